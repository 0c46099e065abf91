"""silu(gate) * up, the activation of a gated feed-forward block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from graphex.ops.definition import Gradient, op
from graphex.torch_private.checks import require


def check_gated(gate: Tensor, up: Tensor) -> None:
    require(
        gate.shape == up.shape and gate.dtype == up.dtype,
        lambda: (
            f"gate and up must have one shape and type; they are {gate.dtype} {list(gate.shape)} and "
            f"{up.dtype} {list(up.shape)}"
        ),
    )


def _fake_silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    check_gated(gate, up)
    return gate * up


def _save_silu_mul(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _silu_mul_backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    if grad is None:
        return None, None
    gate, up = ctx.saved_tensors
    return torch.ops.aten.silu_backward(grad * up, gate), grad * functional.silu(gate)


@op(
    "graphex::silu_mul(Tensor gate, Tensor up) -> Tensor",
    fake=_fake_silu_mul,
    gradient=Gradient(_save_silu_mul, _silu_mul_backward),
    kernel="gated.silu_mul",
)
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, gate and up of one shape and type: the silu is rounded to the type, then the product is."""
    check_gated(gate, up)
    return functional.silu(gate) * up
