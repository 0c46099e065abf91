"""Custom ops that write to their arguments: one, two, a list; with and without a returned tensor."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("graphex_fuzz::bump", mutates_args=("x",))
def bump(x: Tensor, by: float) -> None:
    x.add_(by)


@torch.library.custom_op("graphex_fuzz::swap", mutates_args=("x", "y"))
def swap(x: Tensor, y: Tensor) -> None:
    kept = x.clone()
    x.copy_(y)
    y.copy_(kept)


@torch.library.custom_op("graphex_fuzz::push", mutates_args=("cache",))
def push(cache: Tensor, rows: Tensor) -> Tensor:
    """Move the rows of the cache down, put `rows` in front, and return what is now the sum."""
    kept = cache[:-1].clone()
    cache[1:].copy_(kept)
    cache[0].copy_(rows)
    return cache.sum(0)


@push.register_fake
def _(cache: Tensor, rows: Tensor) -> Tensor:
    return cache.sum(0)


@torch.library.custom_op("graphex_fuzz::step", mutates_args=("weight", "momentum"))
def step(weight: Tensor, momentum: Tensor, gradient: Tensor) -> Tensor:
    """An optimizer's step: two tensors written, one read, one returned."""
    momentum.mul_(0.5).add_(gradient)
    weight.sub_(momentum)
    return momentum * 2


@step.register_fake
def _(weight: Tensor, momentum: Tensor, gradient: Tensor) -> Tensor:
    return torch.empty_like(momentum)


@torch.library.custom_op("graphex_fuzz::bump_all", mutates_args=("xs",))
def bump_all(xs: list[Tensor], by: float) -> None:
    for x in xs:
        x.add_(by)


@torch.library.custom_op("graphex_fuzz::plain", mutates_args=())
def plain(x: Tensor) -> Tensor:
    """Functional, but not known to be: it may count calls."""
    return x * 3


@plain.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)
