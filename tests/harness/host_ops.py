"""Custom ops that a device graph cannot hold, because they read a value back to the host, and ops that write.

compiled = compile_it(between)      # captured in two pieces, around `reads_back`
"""

from __future__ import annotations

import torch
from torch import Tensor

import graphex


@torch.library.custom_op("graphex_tests::reads_back", mutates_args=(), tags=(torch.Tag.data_dependent_output,))
def reads_back(x: Tensor) -> Tensor:
    return x * float(x.sum())


reads_back.register_fake(torch.empty_like)


def between(x: Tensor, w: Tensor) -> Tensor:
    a = (x @ w).relu() * 2 + 1
    b = reads_back(a)
    return (b @ w).sin() * 3 + a


kept: list[Tensor] = []


@torch.library.custom_op("graphex_tests::looks", mutates_args=(), tags=(torch.Tag.data_dependent_output,))
def looks(x: Tensor) -> Tensor:
    """`reads_back`, which is known to keep nothing."""
    return x * float(x.sum())


@torch.library.custom_op("graphex_tests::looks_and_keeps", mutates_args=(), tags=(torch.Tag.data_dependent_output,))
def looks_and_keeps(x: Tensor) -> Tensor:
    kept[:] = [x]
    return x * float(x.sum())


@torch.library.custom_op("graphex_tests::doubles", mutates_args={"x"})
def doubles(x: Tensor) -> None:
    x.mul_(2)


@torch.library.custom_op("graphex_tests::doubles_outside", mutates_args={"x"}, tags=(torch.Tag.data_dependent_output,))
def doubles_outside(x: Tensor) -> None:
    x.mul_(2)


looks.register_fake(torch.empty_like)
looks_and_keeps.register_fake(torch.empty_like)
graphex.register_keeps_nothing(looks)
