"""Custom ops that write to their arguments: one, two, a list; with and without a returned tensor; declared variants."""

from __future__ import annotations

import torch
from torch import Tensor

import graphex


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


plain.register_fake(torch.empty_like)


@torch.library.custom_op("graphex_fuzz::mix", mutates_args=())
def mix(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A functional op with a declared variant: a result of its own, then new versions of `x` and `y`."""
    x, y = x.clone(), y.clone()
    return mix_in_place(x, y, z), x, y


@mix.register_fake
def _(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(z), x.clone(), y.clone()


@torch.library.custom_op("graphex_fuzz::mix_in_place", mutates_args=("x", "y"))
def mix_in_place(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    x.add_(y)
    y.mul_(2)
    return z * 3


@mix_in_place.register_fake
def _(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return torch.empty_like(z)


@torch.library.custom_op("graphex_fuzz::turn", mutates_args=())
def turn(x: Tensor) -> Tensor:
    """A functional op with a declared variant and one result: the rows in the other order."""
    return x.flip(0)


turn.register_fake(torch.clone)


@torch.library.custom_op("graphex_fuzz::turn_in_place", mutates_args=("x",))
def turn_in_place(x: Tensor) -> None:
    x.copy_(x.flip(0))


graphex.register_inplace_variant(mix, mix_in_place, mutated=("x", "y"))
graphex.register_inplace_variant(turn, turn_in_place)
