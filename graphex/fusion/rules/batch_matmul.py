"""A batch matmul whose result is transposed, in one op that writes it where it is wanted.

    a, b -> bmm -> transpose(0, 1)                          npu_transpose_batchmatmul(a, b)
    a -> transpose(0, 1) -> bmm(., b) -> transpose(0, 1)    npu_transpose_batchmatmul(a, b, perm_x1=[1, 0, 2])

`torch.matmul` of 3-D tensors arrives as a bmm among views that do nothing, which the matcher sees through.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphex.fusion.rule import Rule, examples_of
from graphex.fusion.rules.lifting import Answer, all_of, certainly, dtypes, example, tensor
from graphex.torch_private.patterns import Match

npu = torch.ops.npu

_LANES, _MOST = 128, 65536


def _aligned(match: Match) -> Answer:
    for name in ("a", "b"):
        width = tensor(match, name).shape[-1]
        said = f"the last dimension of '{name}' is {width}, which is not certainly a multiple of {_LANES}"
        refusal = certainly(width % _LANES == 0, match, name, said, f"pad it to a multiple of {_LANES}")
        if refusal is not None:
            return refusal
    return None


def _rule(name: str, *, transposed: bool) -> Rule:
    def search(a: Tensor, b: Tensor) -> Tensor:
        product = torch.bmm(a.transpose(0, 1) if transposed else a, b)
        return product.transpose(0, 1)

    def replace(a: Tensor, b: Tensor) -> Tensor:
        fused: Tensor = npu.npu_transpose_batchmatmul(a, b, perm_x1=[1, 0, 2] if transposed else [0, 1, 2])
        return fused

    def small_enough(match: Match) -> Answer:
        b = tensor(match, "b")
        size = b.shape[1] * b.shape[0] if transposed else b.shape[1]
        what = "the summed dimension times the batch" if transposed else "the summed dimension"
        return certainly(size < _MOST, match, "b", f"{what} is {size}, which is not certainly below {_MOST}")

    def examples() -> list[Any]:
        a = example(3, 2, 128) if transposed else example(2, 3, 128)
        return [a, example(2, 128, 256)]

    kinds = dtypes(("a", "b"), (torch.float16, torch.bfloat16, torch.float32))
    return Rule(name, search, replace, examples_of(examples), all_of(kinds, _aligned, small_enough), origin="default")


RULES = (
    _rule("transpose_batchmatmul_transpose", transposed=True),
    _rule("batchmatmul_transpose", transposed=False),
)
