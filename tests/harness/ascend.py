"""The scenarios of `npugraph_ex`: a function compiled by that name on the npu, every call compared with eager.

compiled = Compiled(fn)
compiled(*on_npu(x))
assert compiled.captures() == ["captured"]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from tests.harness import compiling


def on_npu(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.npu() for tensor in tensors]


class Compiled(compiling.Compiled):
    """Through `torch.compile(backend="npugraph_ex", options=...)`."""

    backend = "npugraph_ex"
    nearly: ClassVar[Mapping[str, Any]] = {"rtol": 1e-3, "atol": 1.0}

    def ops(self) -> list[str]:
        """The ops of the graph that runs."""
        return list(map(str, self.running()))


def called(fn: Any, *shape: int, **options: Any) -> Compiled:
    """Compiled, and called with three random tensors of a shape."""
    compiled = Compiled(fn, **options)
    for _ in range(3):
        compiled(*on_npu(torch.randn(shape)))
    return compiled
