"""The scenarios of `npugraph_ex`: a function compiled by that name on the npu, every call compared with eager.

compiled = Compiled(fn)
compiled(*on_npu(x))
assert compiled.captures() == ["captured"]
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.harness import compiling
from tests.harness.comparing import assert_leaves_close


def on_npu(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.npu() for tensor in tensors]


ONE_APART = {"rtol": 0, "atol": 1}
NEARLY = {
    torch.float32: {"rtol": 1e-3, "atol": 1e-3},
    torch.float16: {"rtol": 1e-3, "atol": 1e-3},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-3},
}


class Compiled(compiling.Compiled):
    """Through `torch.compile(backend="npugraph_ex", options=...)`."""

    backend = "npugraph_ex"

    def assert_close(self, found: Any, wanted: Any) -> None:
        """Equal, or with `exact=False` equal but for rounding: floats nearly so, and quantised results within one."""
        for ours, theirs in zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True):
            tolerance = self.tolerance
            if tolerance is self.nearly and isinstance(theirs, torch.Tensor):
                tolerance = NEARLY.get(theirs.dtype, ONE_APART)
            assert_leaves_close(ours, theirs, **tolerance)

    def ops(self) -> list[str]:
        """The ops of the graph that runs."""
        return list(map(str, self.running()))


def called(fn: Any, *shape: int, **options: Any) -> Compiled:
    """Compiled, and called with three random tensors of a shape."""
    compiled = Compiled(fn, **options)
    for _ in range(3):
        compiled(*on_npu(torch.randn(shape)))
    return compiled
