"""RMSNorm as models write it, with and without the residual add before or after it, or between two of them.

The cast order and the weight's offset are parameters, because models round differently:

    Llama, Qwen, T5:  weight * n.to(x.dtype)                          cast_before_weight=True
    Gemma:            (n * (1 + weight.float())).to(x.dtype)          cast_before_weight=False, weight_offset=1
    F.rms_norm:       (n * weight.float()).to(x.dtype)                cast_before_weight=False
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphex.ops.definition import Gradient, RowRule, check_alike, op
from graphex.torch_private.graphs import require

NORM = "float eps, float weight_offset=0.0, bool cast_before_weight=True"
NEXT = "Tensor? next_weight, float next_eps, float next_weight_offset=0.0, bool next_cast_before_weight=True"


def wide_dtype(x: Tensor) -> torch.dtype:
    """Where a norm is computed: float32, or float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def norm_dtype(x: Tensor, weight: Tensor | None, cast_before_weight: bool) -> torch.dtype:
    """The type of the norm: with cast_before_weight the product with the weight promotes."""
    if weight is None or not cast_before_weight:
        return x.dtype
    return torch.promote_types(x.dtype, weight.dtype)


def check_norm(x: Tensor, weight: Tensor | None) -> None:
    require(x.dim() > 0, lambda: "an RMSNorm needs at least one dimension; x has none")
    if weight is not None:
        require(
            weight.dim() == 1 and weight.shape[0] == x.shape[-1],
            lambda: (
                f"the weight must have the shape [{x.shape[-1]}] of x's last dimension; it has {list(weight.shape)}"
            ),
        )


def _fake_rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, cast_before_weight: bool = True
) -> tuple[Tensor, Tensor]:
    check_norm(x, weight)
    rstd = x.sum(-1, keepdim=True, dtype=wide_dtype(x))
    return torch.empty_like(x, dtype=norm_dtype(x, weight, cast_before_weight)), rstd


def norm_backward(ctx: Any, grad: Tensor | None, grad_rstd: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and of the weight, from x and rstd alone."""
    x, weight, rstd = ctx.saved_tensors
    wide = rstd.dtype
    x32 = x.to(wide)
    n = x32 * rstd
    grad_x = grad_weight = None
    if grad is not None:
        grad_n = grad.to(wide)
        if weight is not None:
            leading = tuple(range(x.dim() - weight.dim()))
            if ctx.cast_before_weight:
                grad_weight = (grad_n * n.to(x.dtype).to(wide)).sum(leading).to(weight.dtype)
                grad_n = (grad * (weight + ctx.weight_offset)).to(x.dtype).to(wide)
            else:
                grad_weight = (grad_n * n).sum(leading).to(weight.dtype)
                grad_n = grad_n * (weight.to(wide) + ctx.weight_offset)
        grad_x = rstd * (grad_n - n * (grad_n * n).mean(ctx.dims, keepdim=True))
    if grad_rstd is not None:
        mean_gradient = x32 * rstd.pow(3) * grad_rstd / (x.numel() // max(rstd.numel(), 1))
        grad_x = -mean_gradient if grad_x is None else grad_x - mean_gradient
    return None if grad_x is None else grad_x.to(x.dtype), grad_weight


def _save_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _, ctx.weight_offset, ctx.cast_before_weight = inputs
    ctx.dims = (-1,)
    ctx.save_for_backward(x, weight, output[1])


def _save_add_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, weight, _, ctx.weight_offset, ctx.cast_before_weight = inputs
    ctx.dims = (-1,)
    ctx.save_for_backward(output[2], weight, output[1])


def add_norm_backward(
    ctx: Any, grad: Tensor | None, grad_rstd: Tensor | None, grad_sum: Tensor | None
) -> tuple[Any, ...]:
    """The gradients of x1, x2 and the weight. Both addends get what came through the sum and through the norm."""
    through_norm, grad_weight = norm_backward(ctx, grad, grad_rstd)
    both = sum_of(grad_sum, through_norm)
    return both, both, grad_weight


def sum_of(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The sum of two gradients, of which either may be absent."""
    return other if one is None else one if other is None else one + other


@op(
    f"graphex::rms_norm(Tensor x, Tensor? weight, {NORM}) -> (Tensor y, Tensor rstd)",
    title="RMSNorm",
    fake=_fake_rms_norm,
    gradient=Gradient(_save_rms_norm, norm_backward),
    kernel="norm.rms_norm",
    rows=RowRule("last_dim", ("x",)),
    inlines=True,
)
def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, cast_before_weight: bool = True
) -> tuple[Tensor, Tensor]:
    """RMSNorm over the last dimension, computed in float32 (float64 stays float64).

        x32  = x.to(float32)
        rstd = rsqrt(mean(x32 ** 2, -1, keepdim=True) + eps)
        n    = x32 * rstd
        y    = (weight + weight_offset) * n.to(x.dtype)                      cast_before_weight=True
        y    = (n * (weight.to(float32) + weight_offset)).to(x.dtype)        cast_before_weight=False

    An offset of 0 is not added. With cast_before_weight, `y` has the promoted type of x and the weight (bfloat16 x,
    float32 weight: float32), as in the models that write it so; otherwise the type of x. No weight: n.to(x.dtype).
    """
    check_norm(x, weight)
    x32 = x.to(wide_dtype(x))
    rstd = torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return weighted(x32 * rstd, x.dtype, weight, weight_offset, cast_before_weight), rstd


def weighted(
    n: Tensor, dtype: torch.dtype, weight: Tensor | None, weight_offset: float, cast_before_weight: bool
) -> Tensor:
    """The last step of a norm: `n` times the weight, in the model's own order of casts."""
    if weight is None:
        return n.to(dtype)
    if cast_before_weight:
        return (weight + weight_offset if weight_offset else weight) * n.to(dtype)
    weight = weight.to(n.dtype)
    return (n * (weight + weight_offset if weight_offset else weight)).to(dtype)


@op(
    f"graphex::rms_norm_add(Tensor x, Tensor residual, Tensor? weight, {NORM}) -> Tensor",
    title="RMSNorm + residual add",
    kernel="norm.rms_norm_add",
    rows=RowRule("last_dim", ("x", "residual")),
    inlines=True,
)
def rms_norm_add(x: Tensor, residual: Tensor, *norm: Any, **options: Any) -> Tensor:
    """The residual, and the RMSNorm of what a layer made of it: x and residual of one shape and type.

        y, _ = rms_norm(x, weight, eps, weight_offset, cast_before_weight)
        sum  = residual + y

    For inference: it has no derivative.
    """
    check_alike("x and residual", x, residual)
    y, _ = rms_norm(x, *norm, **options)
    return residual + y


@op(
    "graphex::rms_norm_add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, float weight_offset, "
    f"bool cast_before_weight, {NEXT}) -> (Tensor y, Tensor sum)",
    title="RMSNorm + residual add + RMSNorm",
    kernel="norm.rms_norm_add_rms_norm",
    rows=RowRule("last_dim", ("x", "residual")),
    inlines=True,
)
def rms_norm_add_rms_norm(x: Tensor, residual: Tensor, *norms: Any, **of_next: Any) -> tuple[Tensor, Tensor]:
    """The residual, the RMSNorm of what a layer made of it, and the RMSNorm of their sum: the norms around a layer.

        sum  = rms_norm_add(x, residual, weight, eps, weight_offset, cast_before_weight)
        y, _ = rms_norm(sum, next_weight, next_eps, next_weight_offset, next_cast_before_weight)

    The sum is rounded to its type before its norm. For inference: it has no derivative.
    """
    total = rms_norm_add(x, residual, *norms[:4])
    y, _ = rms_norm(total, *norms[4:], **{name.removeprefix("next_"): value for name, value in of_next.items()})
    return y, total


@op(
    f"graphex::add_rms_norm(Tensor x1, Tensor x2, Tensor? weight, {NORM}) -> (Tensor y, Tensor rstd, Tensor sum)",
    title="residual add + RMSNorm",
    gradient=Gradient(_save_add_rms_norm, add_norm_backward),
    kernel="norm.add_rms_norm",
    rows=RowRule("last_dim", ("x1", "x2")),
    inlines=True,
)
def add_rms_norm(
    x1: Tensor,
    x2: Tensor,
    weight: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    cast_before_weight: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """The residual add and the RMSNorm of its result: x1 and x2 of one shape and type.

    sum     = x1 + x2                    rounded to its type before the norm
    y, rstd = rms_norm(sum, weight, eps, weight_offset, cast_before_weight)
    """
    check_alike("x1 and x2", x1, x2)
    total = x1 + x2
    return (*rms_norm(total, weight, eps, weight_offset, cast_before_weight), total)


def add_norm_cast_backward(ctx: Any, grad32: Tensor | None, grad: Tensor | None, *rest: Any) -> tuple[Any, ...]:
    return add_norm_backward(ctx, sum_of(grad, None if grad32 is None else grad32.to(ctx.y_dtype)), *rest)


def _save_add_rms_norm_cast(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.y_dtype = output[1].dtype
    _save_add_rms_norm(ctx, inputs, output[1:])


@op(
    f"graphex::add_rms_norm_cast(Tensor x1, Tensor x2, Tensor? weight, {NORM})"
    " -> (Tensor y32, Tensor y, Tensor rstd, Tensor sum)",
    gradient=Gradient(_save_add_rms_norm_cast, add_norm_cast_backward),
    kernel="norm.add_rms_norm_cast",
)
def add_rms_norm_cast(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`add_rms_norm`, and its norm also as float32.

    y, rstd, sum = add_rms_norm(x1, x2, weight, eps, weight_offset, cast_before_weight)
    y32          = y.to(float32)                            the rounded y, widened
    """
    y, rstd, total = add_rms_norm(*args, **kwargs)
    # A custom op's results never share memory: where y is float32 already, y32 is a copy of it.
    return y.to(torch.float32, copy=True), y, rstd, total
