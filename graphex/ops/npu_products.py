"""torch_npu's products of quantised matrices and of groups of rows, and its norm in place.

    npu_quant_matmul                 bytes times bytes, scaled
    npu_weight_quant_batchmatmul     floats times bytes
    npu_grouped_matmul               groups of rows, each with a matrix of its own: the experts of a layer

No op here asks the device for a number, so all of them can be captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphex.ops import npu  # noqa: F401  (its ops are parts of those here)
from graphex.ops.definition import op, with_kernel
from graphex.ops.norms import wide_dtype
from graphex.ops.quant import ranged
from graphex.torch_private.graphs import require, require_implemented

INPLACE = (("npu_add_rms_norm_v2_functional", "npu_add_rms_norm_v2"),)
_add_rms_norm = with_kernel("npu::npu_add_rms_norm")

# -- norm in place -----------------------------------------------------------------------------------------------------


@op(
    "npu::npu_add_rms_norm_v2_functional(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06)"
    " -> (Tensor, Tensor, Tensor)"
)
def npu_add_rms_norm_v2_functional(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """`npu_add_rms_norm` with its results in another order: (rstd, y, x)."""
    y, rstd, total = _add_rms_norm(x1, x2, gamma, epsilon)
    return rstd, y, total


@op(
    "npu::npu_add_rms_norm_v2(Tensor(a!) x1, Tensor(b!) x2, Tensor gamma, float epsilon=1e-06) -> Tensor",
    fake=lambda x1, x2, gamma, epsilon=1e-6: x1.sum(tuple(range(-gamma.dim(), 0)), keepdim=True, dtype=wide_dtype(x1)),
)
def npu_add_rms_norm_v2(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> Tensor:
    """`npu_add_rms_norm` in place: x1 becomes y, x2 becomes the sum, and rstd is returned."""
    rstd, y, total = npu_add_rms_norm_v2_functional(x1, x2, gamma, epsilon)
    x1.copy_(y)
    x2.copy_(total)
    return rstd


# -- quantised matmuls -------------------------------------------------------------------------------------------------


def _product_shape(x1: Tensor, x2: Tensor) -> list[int]:
    batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    return [*batch, x1.shape[-2], x2.shape[-1]]


def _fake_npu_quant_matmul(
    x1: Tensor, x2: Tensor, scale: Tensor, *, output_dtype: torch.dtype | None = None, **_: Any
) -> Tensor:
    return x1.new_empty(_product_shape(x1, x2), dtype=output_dtype or torch.int8)


@op(
    "npu::npu_quant_matmul(Tensor x1, Tensor x2, Tensor scale, *, Tensor? offset=None, Tensor? pertoken_scale=None,"
    " Tensor? bias=None, ScalarType? output_dtype=None, SymInt[]? group_sizes=None) -> Tensor",
    fake=_fake_npu_quant_matmul,
    kernel="grouped.npu_quant_matmul",
)
def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    group_sizes: Sequence[int] | None = None,
) -> Tensor:
    """The product of two int8 matrices, scaled: exact up to the scaling, then in float32, rounded once.

        y = (x1 @ x2 [+ bias, if it is int32]) * scale [* pertoken_scale, one for each row] [+ bias, if it is a float]

    Without `output_dtype` the result is int8: y [+ offset], rounded and clamped.
    """
    require_implemented(not group_sizes, lambda: "npu_quant_matmul has no reference for scales of groups (group_sizes)")
    if output_dtype not in (None, torch.int8):
        return _scaled(x1, x2, scale, pertoken_scale, bias, output_dtype)
    y = _scaled(x1, x2, scale, pertoken_scale, bias, torch.float32)
    return ranged(y if offset is None else y + offset.to(torch.float32), -128.0, 127.0, torch.int8)


def _scaled(
    x: Tensor, weight: Tensor, scale: Tensor | None, row_scale: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """A product of bytes: exact up to the scaling, which is in float32; not scaled as int32."""
    require_implemented(
        x.dtype == weight.dtype == torch.int8 and (scale is None or scale.is_floating_point()),
        lambda: "there is no reference for products of packed numbers (int32), nor for packed scales (int64)",
    )
    exact = x.to(torch.float64) @ weight.to(torch.float64)  # of int32: a CUDA device has no matmul of these
    is_late = bias is not None and bias.is_floating_point()
    if bias is not None and not is_late:
        exact = exact + bias
    if dtype == torch.int32:
        return exact.to(torch.int32)
    y = exact.to(torch.float32)
    if scale is not None:
        y = y * scale.to(torch.float32)
    if row_scale is not None:
        y = y * row_scale.to(torch.float32).unsqueeze(-1)
    if bias is not None and is_late:
        y = y + bias.to(torch.float32)
    return y.to(dtype)


def _fake_npu_weight_quant_batchmatmul(
    x: Tensor, weight: Tensor, antiquant_scale: Tensor, *args: Any, **_: Any
) -> Tensor:
    return x.new_empty(_product_shape(x, weight))


@op(
    "npu::npu_weight_quant_batchmatmul(Tensor x, Tensor weight, Tensor antiquant_scale, Tensor? antiquant_offset=None,"
    " Tensor? quant_scale=None, Tensor? quant_offset=None, Tensor? bias=None, int antiquant_group_size=0,"
    " int inner_precise=0) -> Tensor",
    fake=_fake_npu_weight_quant_batchmatmul,
)
def npu_weight_quant_batchmatmul(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None = None,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    bias: Tensor | None = None,
    antiquant_group_size: int = 0,
    inner_precise: int = 0,
) -> Tensor:
    """A matmul with an int8 weight: x @ ((weight [+ antiquant_offset]) * antiquant_scale) [+ bias], in the type of x.

    Scales are one for each column, or one for each column and each `antiquant_group_size` rows.
    """
    require_implemented(
        quant_scale is None and quant_offset is None,
        lambda: "npu_weight_quant_batchmatmul has no reference for quantised results",
    )

    def by_rows(values: Tensor) -> Tensor:
        if antiquant_group_size and values.dim() > 1:
            values = values.repeat_interleave(antiquant_group_size, -2)[..., : weight.shape[-2], :]
        return values

    wide = weight.to(x.dtype)
    if antiquant_offset is not None:
        wide = wide + by_rows(antiquant_offset)
    y = x @ (wide * by_rows(antiquant_scale)).to(x.dtype)
    return y if bias is None else (y + bias).to(x.dtype)


# -- grouped matmul ----------------------------------------------------------------------------------------------------


def _weights(weight: Sequence[Tensor]) -> list[Tensor]:
    """One matrix for each group, given as a list or as one stack."""
    return list(weight[0].unbind(0)) if len(weight) == 1 and weight[0].dim() == 3 else list(weight)


def _fake_npu_grouped_matmul(
    x: Sequence[Tensor], weight: Sequence[Tensor], *, output_dtype: torch.dtype | None = None, **_: Any
) -> list[Tensor]:
    matrices = _weights(weight)
    dtype = output_dtype or x[0].dtype
    if len(x) > 1 or len(matrices) == 1:
        return [a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=dtype) for a, b in zip(x, matrices, strict=True)]
    return [x[0].new_empty((*x[0].shape[:-1], matrices[0].shape[-1]), dtype=dtype)]


@op(
    "npu::npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None,"
    " Tensor[]? offset=None, Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None,"
    " Tensor[]? per_token_scale=None, Tensor? group_list=None, Tensor[]? activation_input=None,"
    " Tensor[]? activation_quant_scale=None, Tensor[]? activation_quant_offset=None, int? split_item=0,"
    " int? group_type=-1, int? group_list_type=0, int? act_type=0, int[]? tuning_config=None,"
    " ScalarType? output_dtype=None) -> Tensor[]",
    fake=_fake_npu_grouped_matmul,
    kernel="grouped.npu_grouped_matmul",
)
def npu_grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    bias: Sequence[Tensor] | None = None,
    scale: Sequence[Tensor] | None = None,
    per_token_scale: Sequence[Tensor] | None = None,
    group_list: Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = -1,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    tuning_config: Sequence[int] | None = None,
    output_dtype: torch.dtype | None = None,
    **others: Any,
) -> list[Tensor]:
    """Matmuls of groups of rows, each with a weight of its own: one result, or one for each x.

        rows of group g:  x @ weight[g] [+ bias[g]]
        of bytes:         (x @ weight[g] [+ bias[g], if it is int32]) * scale[g] [* per_token_scale] [+ bias[g]]

    `group_list` says where each group ends (group_list_type 0) or how long it is (1); rows behind the last group are
    zero. Several x are groups of their own and need no list. Bytes need an `output_dtype`.
    """
    require_implemented(
        not act_type and all(each is None for each in others.values()) and group_list_type in (0, 1),
        lambda: "npu_grouped_matmul has no reference for activations, offsets and antiquantisation",
    )
    matrices, dtype = _weights(weight), output_dtype or x[0].dtype
    require_implemented(
        dtype != torch.int8, lambda: "npu_grouped_matmul has no reference for results in int8: say an output_dtype"
    )
    biases = _weights_or_none(bias, len(matrices))
    scales = _weights_or_none(scale, len(matrices))

    def product(rows: Tensor, group: int) -> Tensor:
        shift = None if biases is None else biases[group]
        if rows.dtype == torch.int8:
            each = None if scales is None else scales[group]
            return _scaled(rows, matrices[group], each, only(per_token_scale), shift, dtype)
        y = rows @ matrices[group]
        return (y if shift is None else y + shift).to(dtype)

    if len(x) > 1 or len(matrices) == 1:
        return [product(rows, group) for group, rows in enumerate(x)]
    require(group_list is not None, lambda: "one x and several weights need a group_list")
    assert group_list is not None
    ends = group_list.long() if group_list_type == 0 else group_list.long().cumsum(0)
    group_of = torch.searchsorted(ends, torch.arange(x[0].shape[0], device=x[0].device), right=True)
    result = x[0].new_zeros((*x[0].shape[:-1], matrices[0].shape[-1]), dtype=dtype)
    for group in range(len(matrices)):
        result = torch.where((group_of == group).unsqueeze(-1), product(x[0], group), result)
    return [result]


def only(values: Sequence[Tensor] | None) -> Tensor | None:
    """The first of a list that is for one group or for all of them."""
    return values[0] if values else None


def _weights_or_none(values: Sequence[Tensor] | None, count: int) -> list[Tensor] | None:
    if not values:
        return None
    return list(values[0].unbind(0)) if len(values) == 1 and count > 1 else list(values)
