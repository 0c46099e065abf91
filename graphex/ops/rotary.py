"""Rotary position embedding as transformers writes it, alone, for query and key together, and with the cache write.

cos and sin broadcast against x as they are: where the model unsqueezes them for the heads, give the unsqueezed view.
Their last dimension is that of x, D; in the interleaved form only its first half is read, and D / 2 will do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphex.ops.definition import Gradient, check_alike, op, part
from graphex.ops.norms import sum_of
from graphex.torch_private.graphs import require


def check_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    check_alike("cos and sin", cos, sin)
    require(
        x.dim() >= cos.dim() > 0,
        lambda: f"cos with {cos.dim()} dimensions cannot broadcast to x with {x.dim()}",
    )
    width, half = x.shape[-1], x.shape[-1] // 2
    require(width == 2 * half, lambda: f"the last dimension of x must be even; it is {width}")
    require(
        cos.shape[-1] == width or (interleaved and cos.shape[-1] == half),
        lambda: f"the last dimension of cos must be that of x, {width}; it is {cos.shape[-1]}",
    )


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def halves(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The even and odd elements of x, and the cos and sin of each pair."""
    half = x.shape[-1] // 2
    return x[..., 0::2], x[..., 1::2], cos[..., :half], sin[..., :half]


def _fake_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    check_rotary(x, cos, sin, interleaved)
    if not interleaved:
        product = x * cos
        require(product.shape == x.shape, lambda: "cos and sin must not be larger than x")
        return product
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, cos.dtype))


def _save_rotary(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """For one tensor or several that are rotated by the same angles."""
    *rotated, cos, sin, ctx.interleaved = inputs
    ctx.dtypes = [x.dtype for x in rotated]
    angles = cos.requires_grad or sin.requires_grad
    ctx.save_for_backward(*(x if angles else None for x in rotated), cos, sin)


def rotary_gradient(grad: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The gradient of x: the rotation by the opposite angle."""
    half = grad.shape[-1] // 2
    first, second = grad[..., :half], grad[..., half:]
    if interleaved:
        cos, sin = cos[..., :half], sin[..., :half]
        return torch.stack((first * cos + second * sin, second * cos - first * sin), -1).flatten(-2)
    turned = grad * sin
    return grad * cos + torch.cat((turned[..., half:], -turned[..., :half]), dim=-1)


def _angle_gradients(ctx: Any, grad: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    if not ctx.interleaved:
        return (grad * x).sum_to_size(cos.shape), (grad * rotate_half(x)).sum_to_size(sin.shape)
    even, odd, narrow_cos, narrow_sin = halves(x, cos, sin)
    half = x.shape[-1] // 2
    first, second = grad[..., :half], grad[..., half:]
    by_cos = (first * even + second * odd).sum_to_size(narrow_cos.shape)
    by_sin = (second * even - first * odd).sum_to_size(narrow_sin.shape)
    padding = (0, cos.shape[-1] - half)  # the unread second half has no influence
    pad = torch.nn.functional.pad
    return pad(by_cos, padding), pad(by_sin, padding)


def _rotary_backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    """The gradients of the rotated tensors, then those of cos and sin."""
    *inputs, cos, sin = ctx.saved_tensors
    results: list[Tensor | None] = []
    grad_cos = grad_sin = None
    for grad, x, dtype in zip(grads, inputs, ctx.dtypes, strict=True):
        results.append(None if grad is None else rotary_gradient(grad, cos, sin, ctx.interleaved).to(dtype))
        if grad is not None and x is not None:
            by_cos, by_sin = (g.to(cos.dtype) for g in _angle_gradients(ctx, grad, x, cos, sin))
            grad_cos, grad_sin = sum_of(grad_cos, by_cos), sum_of(grad_sin, by_sin)
    return (*results, grad_cos, grad_sin)


@op(
    "graphex::rotary(Tensor x, Tensor cos, Tensor sin, bool interleaved=False) -> Tensor",
    title="rotary embedding",
    fake=_fake_rotary,
    gradient=Gradient(_save_rotary, _rotary_backward),
    kernel="rotary.rotary",
    inlines=True,
)
def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotary position embedding of the last dimension (of size D) of x.

        half:         x * cos + cat(-x[..., D/2:], x[..., :D/2]) * sin
        interleaved:  a, b = x[..., 0::2], x[..., 1::2];  c, s = cos[..., :D/2], sin[..., :D/2]
                      cat(a * c - b * s,  b * c + a * s)              de-interleaved, as DeepSeek and LongCat do

    cos and sin broadcast to x as they are, and types promote: each product is rounded to the promoted type.
    """
    check_rotary(x, cos, sin, interleaved)
    if not interleaved:
        return (x * cos) + (rotate_half(x) * sin)
    a, b, c, s = halves(x, cos, sin)
    return torch.cat((a * c - b * s, b * c + a * s), dim=-1).contiguous()


@op(
    "graphex::rotary_qk(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved=False) -> (Tensor q, Tensor k)",
    title="query and key rotary embedding",
    gradient=Gradient(_save_rotary, _rotary_backward),
    kernel="rotary.rotary_qk",
    inlines=True,
)
def rotary_qk(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """`rotary(q, cos, sin), rotary(k, cos, sin)`: query and key, whose numbers of heads may differ, in one launch."""
    return rotary(q, cos, sin, interleaved), rotary(k, cos, sin, interleaved)


def check_cache(x: Tensor, dtype: torch.dtype, cache: Tensor, positions: Tensor, dim: int, name: str) -> None:
    require(
        positions.dim() == 1 and positions.dtype in (torch.int64, torch.int32),
        lambda: (
            f"positions must be one-dimensional, of int64 or int32; it is {positions.dtype} {list(positions.shape)}"
        ),
    )
    require(
        cache.dtype == dtype, lambda: f"{name} has the type {cache.dtype}; what is written has {dtype}. Cast it first"
    )
    require(x.dim() == cache.dim(), lambda: f"{name} has {cache.dim()} dimensions; what is written has {x.dim()}")
    dim %= x.dim()
    for at, (size, room) in enumerate(zip(x.shape, cache.shape, strict=True)):
        wanted = positions.shape[0] if at == dim else room
        require(
            size == wanted,
            lambda at=at, size=size, wanted=wanted: (
                f"dimension {at} of what is written to {name} must be {wanted}; it is {size}"
            ),
        )


@part(fake=lambda *_: None)
def _write(cache: Tensor, dim: int, positions: Tensor, rows: Tensor) -> None:
    cache.index_copy_(dim, positions, rows)


@op(
    "graphex::rotary_write_(Tensor x, Tensor cos, Tensor sin, Tensor(a!) cache, Tensor positions, int dim=-2,"
    " bool interleaved=False) -> ()",
    kernel="rotary.rotary_write_",
)
def rotary_write_(
    x: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, positions: Tensor, dim: int = -2, interleaved: bool = False
) -> None:
    """The rotary embedding of a key, written into its cache.

        cache.index_copy_(dim, positions, rotary(x, cos, sin, interleaved))

    `positions` are distinct and not negative, as index_copy_ wants them. The kernel writes nothing at a position
    outside the cache, where the reference raises.
    """
    check_rotary(x, cos, sin, interleaved)
    check_cache(x, torch.promote_types(x.dtype, cos.dtype), cache, positions, dim, "cache")
    _write(cache, dim, positions, rotary(x, cos, sin, interleaved))


@op(
    "graphex::rotary_qkv_write_(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) key_cache,"
    " Tensor(b!) value_cache, Tensor positions, int dim=-2, bool interleaved=False) -> Tensor",
    kernel="rotary.rotary_qkv_write_",
)
def rotary_qkv_write_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    dim: int = -2,
    interleaved: bool = False,
) -> Tensor:
    """The work of a decode step before attention, in one launch: returns the rotated query.

    rotary_write_(k, cos, sin, key_cache, positions, dim, interleaved)
    value_cache.index_copy_(dim, positions, v)
    return rotary(q, cos, sin, interleaved)
    """
    rotary_write_(k, cos, sin, key_cache, positions, dim, interleaved)
    check_cache(v, v.dtype, value_cache, positions, dim, "value_cache")
    _write(value_cache, dim, positions, v)
    return rotary(q, cos, sin, interleaved)
