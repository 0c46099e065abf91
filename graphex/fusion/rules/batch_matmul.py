"""A batch matmul whose result is transposed, in one op that writes it where it is wanted.

    a, b -> bmm -> transpose(0, 1)                          npu_transpose_batchmatmul(a, b)
    a -> transpose(0, 1) -> bmm(., b) -> transpose(0, 1)    npu_transpose_batchmatmul(a, b, perm_x1=[1, 0, 2])

`torch.matmul` of 3-D tensors arrives as a bmm among views that do nothing, which the matcher sees through.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphex.fusion.rule import Rule
from graphex.fusion.rules.common import Answer, all_of, certainly, dtypes, example, rule, tensor
from graphex.torch_private.patterns import Match

npu = torch.ops.npu

_LANES, _MOST = 128, 65536


def _product(a: Tensor, b: Tensor, transposed: bool) -> Tensor:
    return torch.bmm(a.transpose(0, 1) if transposed else a, b).transpose(0, 1)


def _fused(a: Tensor, b: Tensor, transposed: bool) -> Tensor:
    fused: Tensor = npu.npu_transpose_batchmatmul(a, b, perm_x1=[1, 0, 2] if transposed else [0, 1, 2])
    return fused


def _aligned(match: Match) -> Answer:
    for name in ("a", "b"):
        width = tensor(match, name).shape[-1]
        said = f"the last dimension of '{name}' is {width}, which is not certainly a multiple of {_LANES}"
        refusal = certainly(width % _LANES == 0, match, name, said, f"pad it to a multiple of {_LANES}")
        if refusal is not None:
            return refusal
    return None


def _small_sum(match: Match) -> Answer:
    size = tensor(match, "b").shape[1]
    return certainly(size < _MOST, match, "b", f"the summed dimension is {size}, which is not certainly below {_MOST}")


def _small_batches(match: Match) -> Answer:
    b = tensor(match, "b")
    size = b.shape[1] * b.shape[0]
    said = f"the summed dimension times the batch is {size}, which is not certainly below {_MOST}"
    return certainly(size < _MOST, match, "b", said)


def _rule(name: str, *, transposed: bool) -> Rule:
    def examples() -> dict[str, Any]:
        return {"a": example(3, 2, 128) if transposed else example(2, 3, 128), "b": example(2, 128, 256)}

    kinds = dtypes(("a", "b"), (torch.float16, torch.bfloat16, torch.float32))
    check = all_of(kinds, _aligned, _small_batches if transposed else _small_sum)
    return rule(name, _product, _fused, examples, check, fixed={"transposed": transposed}, origin="default")


RULES = (
    _rule("transpose_batchmatmul_transpose", transposed=True),
    _rule("batchmatmul_transpose", transposed=False),
)
