"""torch_npu's ops: quantisation, matmul with transposes, swiglu, rotary embedding, cast, scatter, and norms.

The norms, those that end in a cast or a quantisation too, normalise over the trailing dimensions that gamma has, in
float32 with gamma, and round once:

    n = x32 * rsqrt(mean(x32 ** 2) + epsilon);  y = (n * gamma.to(float32) [+ beta.to(float32)]).to(x.dtype)

A fused op is the composition of its parts: `y` is rounded to its type before it is cast or quantised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from graphex.ops.activations import ranged
from graphex.ops.attention import rotate_half
from graphex.ops.definition import Gradient, check_alike, op, part
from graphex.ops.norms import add_norm_backward, add_norm_cast_backward, norm_backward, wide_dtype
from graphex.torch_private.graphs import require, require_implemented

# Codes of torch.dtype as torch_npu's schemas carry them -> (the type of the result, its range).
QUANTISED = {
    1: (torch.int8, -128.0, 127.0),
    12: (torch.int8, -128.0, 127.0),  # torch.qint8
    0: (torch.uint8, 0.0, 255.0),
    13: (torch.uint8, 0.0, 255.0),  # torch.quint8
    3: (torch.int32, -2147483648.0, 2147483520.0),  # the largest float32 that an int32 can hold
    14: (torch.int32, -2147483648.0, 2147483520.0),  # torch.qint32
}
FLOAT8 = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def quantised(dtype: int) -> tuple[torch.dtype, float, float]:
    require_implemented(
        dtype in QUANTISED,
        lambda: f"npu_quantize has no reference for the type code {dtype}: use int8 (1), uint8 (0) or int32 (3)",
    )
    return QUANTISED[dtype]


def dynamic_range(dst_type: torch.dtype | None) -> tuple[torch.dtype, float, float, float]:
    """(type, divisor, smallest, largest) of npu_dynamic_quant's result."""
    if dst_type in (None, torch.int8, torch.qint8):
        return torch.int8, 127.0, -128.0, 127.0
    require_implemented(
        dst_type in FLOAT8,
        lambda: f"npu_dynamic_quant has no reference for dst_type {dst_type}: use int8, float8_e4m3fn or float8_e5m2",
    )
    assert dst_type is not None
    return dst_type, FLOAT8[dst_type], -FLOAT8[dst_type], FLOAT8[dst_type]


def _fake_npu_dynamic_quant(input: Tensor, *, dst_type: torch.dtype | None = None, **_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(input, dtype=dynamic_range(dst_type)[0]), input.sum(-1, dtype=torch.float32)


def _smoothed(input: Tensor, smooth_scales: Tensor | None, group_index: Tensor | None) -> Tensor:
    z = input.to(torch.float32)
    if smooth_scales is None:
        return z
    if group_index is None:
        return z * smooth_scales.to(torch.float32)
    rows = torch.arange(z.numel() // max(z.shape[-1], 1), device=z.device, dtype=group_index.dtype)
    group = torch.searchsorted(group_index, rows, right=True).clamp(max=smooth_scales.shape[0] - 1)
    return z * smooth_scales.to(torch.float32)[group].view(z.shape)


@op(
    "npu::npu_dynamic_quant(Tensor input, *, Tensor? smooth_scales=None, Tensor? group_index=None,"
    " ScalarType? dst_type=None) -> (Tensor, Tensor)",
    fake=_fake_npu_dynamic_quant,
    kernel="activations.npu_dynamic_quant",
)
def npu_dynamic_quant(
    input: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Symmetric quantisation with one scale for each row: (q, scale), the scale without the last dimension.

        z     = input.to(float32) [* smooth_scales.to(float32)]
        scale = z.abs().amax(-1) / 127                        float8_e4m3fn: / 448, float8_e5m2: / 57344
        q     = round(z / scale), clamped to the type         a row of zeros is quantised to zeros

    With `group_index`, group g of the rows ends before row group_index[g] and is multiplied by smooth_scales[g].
    """
    dtype, divisor, smallest, largest = dynamic_range(dst_type)
    z = _smoothed(input, smooth_scales, group_index)
    scale = z.abs().amax(-1, keepdim=True) / divisor
    q = ranged(z / torch.where(scale == 0, 1.0, scale), smallest, largest, dtype)
    return q, scale.squeeze(-1)


def _along(values: Tensor, x: Tensor, axis: int) -> Tensor:
    """One number, or one for each index along an axis, in float32 and ready to broadcast against x."""
    values = values.to(torch.float32)
    if values.numel() == 1:
        return values.reshape(())
    require(
        values.dim() == 1 and values.shape[0] == x.shape[axis],
        lambda: (
            f"scales and zero_points must be one number or have the shape [{x.shape[axis]}] of dimension {axis}; "
            f"found {list(values.shape)}"
        ),
    )
    return values.reshape([-1] + [1] * (x.dim() - 1 - axis % x.dim()))


@op(
    "npu::npu_quantize(Tensor self, Tensor scales, Tensor? zero_points, int dtype, int axis=1, bool div_mode=True)"
    " -> Tensor",
    fake=lambda self, scales, zero_points, dtype, *_: torch.empty_like(self, dtype=quantised(dtype)[0]),
    kernel="activations.npu_quantize",
)
def npu_quantize(
    self: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: int, axis: int = 1, div_mode: bool = True
) -> Tensor:
    """Quantisation with known scales, one number or one for each index along `axis`.

        div_mode:      round(self.to(float32) / scales + zero_points)
        not div_mode:  round(self.to(float32) * scales + zero_points)       both clamped to the type

    `dtype` is torch.qint8 or int8, quint8 or uint8, qint32 or int32, or its code (1, 12, ...); 4-bit is not supported.
    """
    result, smallest, largest = quantised(dtype)
    z, scale = self.to(torch.float32), _along(scales, self, axis)
    v = z / scale if div_mode else z * scale
    if zero_points is not None:
        v = v + _along(zero_points, self, axis)
    return ranged(v, smallest, largest, result)


def _permuted_sizes(
    input: Tensor, weight: Tensor, perms: Sequence[Sequence[int] | None]
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    require(
        input.dim() == 3 and weight.dim() == 3,
        lambda: f"npu_transpose_batchmatmul wants 3-D tensors; found {input.dim()}-D and {weight.dim()}-D",
    )
    perm_x1, perm_x2, perm_y = perms
    a, b = input.permute(tuple(perm_x1 or (0, 1, 2))), weight.permute(tuple(perm_x2 or (0, 1, 2)))
    return a, b, tuple(perm_y or (1, 0, 2))


def _fake_npu_transpose_batchmatmul(
    input: Tensor,
    weight: Tensor,
    *,
    perm_x1: Sequence[int] | None = None,
    perm_x2: Sequence[int] | None = None,
    perm_y: Sequence[int] | None = None,
    batch_split_factor: int | None = 1,
    **_: Any,
) -> Tensor:
    a, b, order = _permuted_sizes(input, weight, (perm_x1, perm_x2, perm_y))
    require(
        a.shape[0] == b.shape[0] and a.shape[2] == b.shape[1],
        lambda: f"cannot multiply batches of {list(a.shape)} by {list(b.shape)}",
    )
    sizes = a.shape[0], a.shape[1], b.shape[2]
    out = a.new_empty([sizes[d] for d in order])
    if batch_split_factor in (None, 1):
        return out
    first, rows, columns = out.shape[1], out.shape[0], out.shape[2]
    return out.new_empty([batch_split_factor, rows, first * columns // batch_split_factor])


@op(
    "npu::npu_transpose_batchmatmul(Tensor input, Tensor weight, *, Tensor? bias=None, Tensor? scale=None,"
    " int[]? perm_x1=None, int[]? perm_x2=None, int[]? perm_y=None, int? batch_split_factor=1) -> Tensor",
    fake=_fake_npu_transpose_batchmatmul,
)
def npu_transpose_batchmatmul(
    input: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    perm_x1: Sequence[int] | None = None,
    perm_x2: Sequence[int] | None = None,
    perm_y: Sequence[int] | None = None,
    batch_split_factor: int | None = 1,
) -> Tensor:
    """A batched matmul whose result is laid out transposed, with no copy: the BLAS reads and writes through strides.

        y = bmm(input.permute(perm_x1), weight.permute(perm_x2)).permute(perm_y)        contiguous
        perm_x1 and perm_x2 are [0, 1, 2] and perm_y is [1, 0, 2] where they are not given

    With a batch_split_factor F > 1, y of shape [M, B, N] becomes [F, M, B * N / F]: the batch is split into F parts.
    bias and scale are reserved by torch_npu and refused here.
    """
    require_implemented(
        bias is None and scale is None,
        lambda: "npu_transpose_batchmatmul does not support bias and scale here: add or multiply the result instead",
    )
    a, b, order = _permuted_sizes(input, weight, (perm_x1, perm_x2, perm_y))
    sizes = a.shape[0], a.shape[1], b.shape[2]
    out = a.new_empty([sizes[d] for d in order])
    back = [order.index(d) for d in range(3)]
    torch.bmm(a, b, out=out.permute(back))
    if batch_split_factor in (None, 1):
        return out
    rows, batch, columns = out.shape
    require(
        batch % batch_split_factor == 0,
        lambda: f"batch_split_factor {batch_split_factor} must divide the batch of {batch}",
    )
    parts = out.view(rows, batch_split_factor, batch // batch_split_factor * columns)
    return parts.transpose(0, 1).contiguous()


def _half_of(x: Tensor, dim: int) -> int:
    size = x.shape[dim]
    require(size % 2 == 0, lambda: f"npu_swiglu halves dimension {dim}, whose size is odd: {size}")
    return size // 2


def _save_npu_swiglu(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.dim = inputs
    ctx.save_for_backward(x)


def _npu_swiglu_backward(ctx: Any, grad: Tensor) -> tuple[Tensor]:
    gate, up = _wide_halves(ctx.saved_tensors[0], ctx.dim)
    wide = grad.to(gate.dtype)
    grad_gate = torch.ops.aten.silu_backward(wide * up, gate)
    return (torch.cat((grad_gate, wide * functional.silu(gate)), ctx.dim).to(grad.dtype),)


def _wide_halves(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    gate, up = x.chunk(2, dim)
    wide = torch.promote_types(x.dtype, torch.float32)
    return gate.to(wide), up.to(wide)


@op(
    "npu::npu_swiglu(Tensor self, int dim=-1) -> Tensor",
    fake=lambda self, dim=-1: torch.empty_like(self.narrow(dim, 0, _half_of(self, dim))),
    gradient=Gradient(_save_npu_swiglu, _npu_swiglu_backward),
    kernel="activations.npu_swiglu",
)
def npu_swiglu(self: Tensor, dim: int = -1) -> Tensor:
    """The halves a, b of `self` along `dim`: (silu(a) * b) in float32, rounded once to the type of `self`."""
    _half_of(self, dim)
    gate, up = _wide_halves(self, dim)
    return (functional.silu(gate) * up).to(self.dtype)


def _rotated(x: Tensor, rotary_mode: str) -> Tensor:
    if rotary_mode == "half":
        return rotate_half(x)
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)


def _check_rotary_mode(rotary_mode: str) -> None:
    require(
        rotary_mode in ("half", "interleave"),
        lambda: f"rotary_mode must be 'half' or 'interleave'; it is '{rotary_mode}'",
    )


def _fake_npu_rotary_mul(self: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    _check_rotary_mode(rotary_mode)
    return self * r1


def _save_npu_rotary_mul(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, r1, r2, ctx.rotary_mode = inputs
    ctx.save_for_backward(x if r1.requires_grad or r2.requires_grad else None, r1, r2)
    ctx.x_dtype = x.dtype


def _npu_rotary_mul_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, r1, r2 = ctx.saved_tensors
    grad_r1 = grad_r2 = None
    if x is not None:
        grad_r1 = (grad * x).sum_to_size(r1.shape).to(r1.dtype)
        grad_r2 = (grad * _rotated(x, ctx.rotary_mode)).sum_to_size(r2.shape).to(r2.dtype)
    # The rotation is antisymmetric: its transpose is its negative.
    grad_x = grad * r1 - _rotated(grad * r2, ctx.rotary_mode)
    return grad_x.to(ctx.x_dtype), grad_r1, grad_r2


@op(
    'npu::npu_rotary_mul(Tensor self, Tensor r1, Tensor r2, str rotary_mode="half") -> Tensor',
    fake=_fake_npu_rotary_mul,
    gradient=Gradient(_save_npu_rotary_mul, _npu_rotary_mul_backward),
    kernel="rotary.npu_rotary_mul",
)
def npu_rotary_mul(self: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    """Rotary position embedding: self * r1 + rotated * r2.

    half:        rotated = cat(-self[..., D/2:], self[..., :D/2])
    interleave:  rotated = -self[..., 1::2] and self[..., 0::2], interleaved
    """
    _check_rotary_mode(rotary_mode)
    return (self * r1) + (_rotated(self, rotary_mode) * r2)


def _save_npu_dtype_cast(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.x_dtype = inputs[0].dtype


def _npu_dtype_cast_backward(ctx: Any, grad: Tensor) -> tuple[Tensor]:
    return (grad.to(ctx.x_dtype),)


@op(
    "npu::_npu_dtype_cast(Tensor self, ScalarType dtype) -> Tensor",
    gradient=Gradient(_save_npu_dtype_cast, _npu_dtype_cast_backward),
)
def npu_dtype_cast(self: Tensor, dtype: torch.dtype) -> Tensor:
    """`self.to(dtype)`, always a new tensor."""
    return self.to(dtype, copy=True)


@op(
    "npu::npu_scatter_nd_update(Tensor self, Tensor indices, Tensor updates) -> Tensor",
    fake=lambda self, *_: torch.empty_like(self),
)
def npu_scatter_nd_update(self: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """A copy of `self` in which `out[tuple(indices[i])] = updates[i]` for every i.

    The last dimension of `indices` indexes the first dimensions of `self`; indices are distinct.
    """
    return self.index_put(tuple(indices.unbind(-1)), updates)


@op(
    "npu::npu_scatter_nd_update_(Tensor(a!) self, Tensor indices, Tensor updates) -> Tensor(a!)",
    is_composite=True,
)
def npu_scatter_nd_update_(self: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """`npu_scatter_nd_update` in place. torch traces through it: a graph shows its `index_put`."""
    return self.index_put_(tuple(indices.unbind(-1)), updates)


# -- norms -------------------------------------------------------------------------------------------------------------


def _check_gamma(x: Tensor, gamma: Tensor) -> None:
    require(
        0 < gamma.dim() <= x.dim() and gamma.shape == x.shape[x.dim() - gamma.dim() :],
        lambda: f"gamma must have the trailing shape of x, {list(x.shape)}; it has {list(gamma.shape)}",
    )


def _dims(gamma: Tensor) -> tuple[int, ...]:
    return tuple(range(-gamma.dim(), 0))


def _save(ctx: Any, x: Tensor, gamma: Tensor, rstd: Tensor) -> None:
    ctx.weight_offset, ctx.cast_before_weight, ctx.dims = 0.0, False, _dims(gamma)
    ctx.y_dtype = x.dtype
    ctx.save_for_backward(x, gamma, rstd)


def _save_npu_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save(ctx, inputs[0], inputs[1], output[1])


def _fake_norm(x: Tensor, gamma: Tensor, epsilon: float, beta: Tensor | None = None) -> tuple[Tensor, Tensor]:
    _check_gamma(x, gamma)
    return torch.empty_like(x), x.sum(_dims(gamma), keepdim=True, dtype=wide_dtype(x))


@part(_fake_norm)
def _norm(x: Tensor, gamma: Tensor, epsilon: float, beta: Tensor | None = None) -> tuple[Tensor, Tensor]:
    _check_gamma(x, gamma)
    x32 = x.to(wide_dtype(x))
    rstd = torch.rsqrt(x32.pow(2).mean(_dims(gamma), keepdim=True) + epsilon)
    y = x32 * rstd * gamma.to(x32.dtype)
    if beta is not None:
        y = y + beta.to(x32.dtype)
    return y.to(x.dtype), rstd


@op(
    "npu::npu_rms_norm(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    gradient=Gradient(_save_npu_rms_norm, norm_backward),
    kernel="norm.npu_rms_norm",
)
def npu_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """RMSNorm over the dimensions of gamma: (y, rstd).

    rstd = rsqrt(mean(self.to(float32) ** 2, dims of gamma, keepdim=True) + epsilon)
    y    = (self.to(float32) * rstd * gamma.to(float32)).to(self.dtype)
    """
    return _norm(self, gamma, epsilon)


def _save_npu_add_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save(ctx, output[2], inputs[2], output[1])


@op(
    "npu::npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor, Tensor)",
    gradient=Gradient(_save_npu_add_rms_norm, add_norm_backward),
    kernel="norm.npu_add_rms_norm",
)
def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """Residual add and RMSNorm: (y, rstd, x).

    x       = x1 + x2                         rounded to its type
    y, rstd = npu_rms_norm(x, gamma, epsilon)
    """
    check_alike("x1 and x2", x1, x2)
    total = x1 + x2
    return (*_norm(total, gamma, epsilon), total)


def _save_npu_add_rms_norm_cast(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save_npu_add_rms_norm(ctx, inputs, output[1:])


@op(
    "npu::npu_add_rms_norm_cast(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    gradient=Gradient(_save_npu_add_rms_norm_cast, add_norm_cast_backward),
    kernel="norm.npu_add_rms_norm_cast",
)
def npu_add_rms_norm_cast(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`npu_add_rms_norm`, with its norm also as float32: (y32, y, rstd, x), where y32 = y.to(float32)."""
    y, rstd, total = npu_add_rms_norm(x1, x2, gamma, epsilon)
    return y.to(torch.float32, copy=True), y, rstd, total


@op(
    "npu::npu_add_rms_norm_quant(Tensor x1, Tensor x2, Tensor gamma, Tensor scales1, Tensor? zero_points1,"
    " Tensor? beta=None, Tensor? scales2=None, Tensor? zero_points2=None, *, int axis=-1, float epsilon=1e-06,"
    " bool div_mode=True) -> (Tensor, Tensor, Tensor)",
    kernel="norm.npu_add_rms_norm_quant",
)
def npu_add_rms_norm_quant(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    scales1: Tensor,
    zero_points1: Tensor | None,
    beta: Tensor | None = None,
    scales2: Tensor | None = None,
    zero_points2: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-6,
    div_mode: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Residual add, RMSNorm, then int8 with known scales: (y1, y2, x).

    y, _, x = npu_add_rms_norm(x1, x2, gamma, epsilon)         beta is added to y before it is rounded
    y1      = npu_quantize(y, scales1, zero_points1, int8, axis, div_mode)
    y2      = the same with scales2, zero_points2; empty without scales2
    """
    check_alike("x1 and x2", x1, x2)
    total = x1 + x2
    y, _ = _norm(total, gamma, epsilon, beta)
    y1 = npu_quantize(y, scales1, zero_points1, 1, axis, div_mode)
    y2 = y1.new_empty(0) if scales2 is None else npu_quantize(y, scales2, zero_points2, 1, axis, div_mode)
    return y1, y2, total


def wants(output_mask: list[bool] | tuple[bool, ...], smooth_scale2: Tensor | None) -> tuple[bool, bool]:
    """Which of the two quantised results are asked for: without a mask the first, and the second if it has a scale."""
    return (output_mask[0], output_mask[1]) if len(output_mask) == 2 else (True, smooth_scale2 is not None)


@op(
    "npu::npu_add_rms_norm_dynamic_quant(Tensor x1, Tensor x2, Tensor gamma, *, Tensor? smooth_scale1=None,"
    " Tensor? smooth_scale2=None, Tensor? beta=None, float epsilon=1e-06, bool[2] output_mask=[])"
    " -> (Tensor y1, Tensor y2, Tensor x_out, Tensor scale1, Tensor scale2)",
    kernel="norm.npu_add_rms_norm_dynamic_quant",
)
def npu_add_rms_norm_dynamic_quant(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    *,
    smooth_scale1: Tensor | None = None,
    smooth_scale2: Tensor | None = None,
    beta: Tensor | None = None,
    epsilon: float = 1e-6,
    output_mask: list[bool] | tuple[bool, ...] = (),
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Residual add, RMSNorm, then int8 with one scale for each row: (y1, y2, x_out, scale1, scale2).

        y, _, x_out = npu_add_rms_norm(x1, x2, gamma, epsilon)     beta is added to y before it is rounded
        y1, scale1  = npu_dynamic_quant(y, smooth_scales=smooth_scale1)
        y2, scale2  = npu_dynamic_quant(y, smooth_scales=smooth_scale2)

    `output_mask` says which of the two are wanted; without it the first is, and the second if it has a smooth scale.
    What is not wanted is empty.
    """
    check_alike("x1 and x2", x1, x2)
    total = x1 + x2
    y, _ = _norm(total, gamma, epsilon, beta)
    nothing = y.new_empty(0, dtype=torch.int8), y.new_empty(0, dtype=torch.float32)
    first, second = wants(output_mask, smooth_scale2)
    y1, scale1 = npu_dynamic_quant(y, smooth_scales=smooth_scale1) if first else nothing
    y2, scale2 = npu_dynamic_quant(y, smooth_scales=smooth_scale2) if second else tuple(t.clone() for t in nothing)
    return y1, y2, total, scale1, scale2
