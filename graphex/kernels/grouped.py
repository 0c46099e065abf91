"""Products of groups of rows, each with a matrix of its own, and the way back from experts to tokens.

    grouped_kernel     a block of columns of one group, for some of its rows: float16, bfloat16, or bytes with scales
    finalize_kernel    the weighted sum over the rows of a token, wherever they are

The groups of rows follow each other: `ends` says where each ends. Rows behind the last group are a group of zeros. What
a product of bytes is scaled and shifted with is applied where it is made. A matrix is one group.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import grouped_mm

from graphex.errors import Refusal
from graphex.kernels.arithmetic import pdl_launch, pdl_wait
from graphex.kernels.attention_kernel import bound
from graphex.kernels.experts_kernel import rounded
from graphex.kernels.launch import LaunchPlan
from graphex.kernels.layout import FLOATS, MOST_BLOCKS, block_of, blocks_of, next_power_of_2
from graphex.kernels.tokens import inside
from graphex.ops.activations import ranged
from graphex.ops.definition import Arguments
from graphex.ops.npu_layers import only

HALF = (torch.float16, torch.bfloat16)
PROGRAMS = 264  # two for each multiprocessor: with fewer, rows of a group are shared between programs
MANY = 64  # rows of a group on average, from which the library's products are as good
MOST_TILES = 1024  # of rows, that the programs of a group take turns with


@triton.jit
def _block_of_products(x, row, weight, column, tile, size, n_stride, k_stride, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    """A block of rows and one of columns, [columns, block] and [block, rows]."""
    k = tile * BLOCK + tl.arange(0, BLOCK)
    at = weight + (column * n_stride)[:, None] + (k * k_stride)[None, :]
    if EVEN:
        return tl.load(at), tl.trans(tl.load(x + row[:, None] + k[None, :]))
    else:
        ok = (k < size)[None, :]
        a = tl.load(x + row[:, None] + k[None, :], mask=ok, other=0)
        return tl.load(at, mask=ok, other=0), tl.trans(a)


@triton.jit(do_not_specialize=["count", "rows"])
def grouped_kernel(
    x,
    weight,
    ends,
    scale,
    row_scale,
    bias,
    out,
    count,
    rows,
    size,
    width,
    x_stride,
    e_stride,
    n_stride,
    k_stride,
    scale_stride,  # from column to column: 0 for one scale of all
    BYTES: tl.constexpr,
    BIAS: tl.constexpr,  # "none", "before" scaling, in integers, or "after" it
    EVEN: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    group = tl.program_id(1)
    start, end = 0, rows
    if ends is not None:
        start = tl.load(ends + group - 1, mask=group > 0, other=0).to(tl.int32)
        end = tl.minimum(tl.load(ends + group, mask=group < count, other=rows).to(tl.int32), rows)
    tiles = tl.where(group < count, tl.cdiv(size, BLOCK), 0)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    ok, read = column < width, tl.minimum(column, width - 1)
    matrix = weight + group.to(tl.int64) * e_stride
    of_column = group.to(tl.int64) * width + column
    for first in range(bound(start + tl.program_id(2) * TILE), bound(end), bound(tl.num_programs(2) * TILE)):
        row = first + tl.arange(0, TILE)
        there = row < end
        place = tl.minimum(row, end - 1).to(tl.int64)
        total = tl.zeros((COLUMNS, TILE), tl.int32 if BYTES else tl.float32)
        for tile in tl.range(0, bound(tiles), num_stages=STAGES):
            w, a = _block_of_products(x, place * x_stride, matrix, read, tile, size, n_stride, k_stride, EVEN, BLOCK)
            total = tl.dot(w, a, total, out_dtype=tl.int32 if BYTES else tl.float32)
        mask = column < tl.where(group < count, width, 0)
        if BYTES:
            if BIAS == "before":
                total += tl.load(bias + of_column, mask=mask, other=0)[:, None]
            found = total.to(tl.float32)
            if scale is not None:
                found *= tl.load(scale + of_column * scale_stride, mask=mask, other=0.0).to(tl.float32)[:, None]
            if row_scale is not None:
                found *= tl.load(row_scale + row, mask=there, other=0.0).to(tl.float32)[None, :]
        else:
            found = rounded(total, out)
        if BIAS == "after":
            found += tl.load(bias + of_column, mask=mask, other=0.0).to(tl.float32)[:, None]
        result = tl.trans(tl.where(group < count, found, 0.0)).to(out.dtype.element_ty)
        tl.store(out + place[:, None] * width + column[None, :], result, mask=there[:, None] & ok[None, :])
    pdl_launch(PDL)


class Product(NamedTuple):
    """x [rows, size] times the matrices weight [groups, size, columns], in groups that end at `ends`."""

    x: Tensor
    weight: Tensor
    ends: Tensor | None
    scale: Tensor | None
    row_scale: Tensor | None
    bias: Tensor | None
    dtype: torch.dtype

    def refusal(self) -> Refusal | None:
        """Why the kernel does not take it."""
        x, weight = self.x, self.weight
        given = [each for each in self[:6] if isinstance(each, Tensor)]
        if x.dtype != weight.dtype or x.dtype not in (*HALF, torch.int8):
            return Refusal(f"x is {x.dtype}, the weights are {weight.dtype}")
        if x.dim() != 2 or weight.dim() != 3 or weight.shape[1] != x.shape[1] or not weight.numel():
            return Refusal("x are no rows of the size of the weights")
        if self.dtype not in (FLOATS if x.dtype == torch.int8 else (x.dtype,)):
            return Refusal(f"the result is {self.dtype}")
        if any(each.device != x.device for each in given):
            return Refusal("not all arguments are on one device")
        if (x.shape[1] > 1 and x.stride(1) != 1) or not all(each.is_contiguous() for each in given[2:]):
            return Refusal("rows, scales, biases or ends are not contiguous")
        if weight.shape[0] >= MOST_BLOCKS or weight[0].numel() >= 2**31:
            return Refusal("there are more groups than a grid has blocks, or weights than 32 bits count")
        return self._refusal_of_scales()

    def _refusal_of_scales(self) -> Refusal | None:
        count, _, width = self.weight.shape
        is_bytes, is_late = self.x.dtype == torch.int8, self.bias is None or self.bias.is_floating_point()
        if not is_bytes and (self.scale is not None or self.row_scale is not None or not is_late):
            return Refusal("rows that are not bytes are not scaled")
        if self.bias is not None and not (is_late or self.bias.dtype == torch.int32):
            return Refusal(f"the bias is {self.bias.dtype}")
        if any(each is not None and not each.is_floating_point() for each in (self.scale, self.row_scale)):
            return Refusal("scales are packed")
        sizes = (self.scale, count * width), (self.bias, count * width), (self.row_scale, self.x.shape[0])
        one = self.scale is not None and count == 1 == self.scale.numel()
        if not all(each is None or each.numel() == size or (one and each is self.scale) for each, size in sizes):
            return Refusal("scales or biases are not one for each column of each group")
        return None

    def plan(self) -> LaunchPlan:
        """Tiles by the average size of a group; few columns at a time where there are few rows."""
        rows, size = self.x.shape
        count, _, width = self.weight.shape
        groups = count if self.ends is None else count + 1
        tile = min(128, max(16, next_power_of_2(blocks_of(rows, count))))
        columns, block = 128 if tile == 128 else 64, 128 // self.x.element_size() if tile == 128 else 128
        across = blocks_of(width, columns)
        turns = max(1, min(blocks_of(rows, tile), blocks_of(PROGRAMS, across * count), MOST_TILES))
        e_stride, k_stride, n_stride = self.weight.stride()
        bias = "none" if self.bias is None else "after" if self.bias.is_floating_point() else "before"
        scale_stride = 0 if self.scale is None or self.scale.numel() == 1 else 1
        constants = {
            **{"BYTES": self.x.dtype == torch.int8, "BIAS": bias, "EVEN": size % block == 0},
            **{"TILE": tile, "COLUMNS": columns, "BLOCK": block, "STAGES": 3},
            "num_warps": 8 if tile == 128 else 4,
        }
        integers = (count, rows, size, width, self.x.stride(0), e_stride, n_stride, k_stride, scale_stride)
        return LaunchPlan((across, groups, turns if rows else 0), integers, constants)

    def launch(self) -> Tensor:
        """The result, of a product that is not refused."""
        out = self.x.new_empty((self.x.shape[0], self.weight.shape[2]), dtype=self.dtype)
        tensors = (self.x, self.weight, self.ends, self.scale, self.row_scale, self.bias, out)
        self.plan().launch(grouped_kernel, tensors, self.x)
        return out


def _by_library(of: Product) -> Tensor | None:
    """The library's product of large groups, or None where it has none. Rows behind the last group are set to zero."""
    rows, (count, size, width) = of.x.shape[0], of.weight.shape
    if of.x.dtype != torch.bfloat16 or of.ends is None or rows < MANY * count or of.bias is not None:
        return None
    if size % 8 or width % 8 or not of.x.is_contiguous() or not of.x.is_cuda or 1 not in of.weight.stride()[1:]:
        return None
    found = grouped_mm(of.x, of.weight, offs=of.ends.to(torch.int32))
    is_in_group = torch.arange(rows, device=of.x.device) < of.ends[-1]
    return found.masked_fill_(~is_in_group.unsqueeze(-1), 0.0)


def npu_grouped_matmul(call: Arguments) -> Any:
    x, weight, ends = call.x, call.weight, call.group_list
    if len(x) != 1 or len(weight) != 1 or weight[0].dim() != 3 or ends is None or ends.numel() != weight[0].shape[0]:
        return Refusal("there is not one x, with one stack of weights and a list of groups")
    refused = (call.offset, call.antiquant_scale, call.antiquant_offset, call.activation_input)
    if call.act_type or call.group_list_type not in (0, 1) or any(each for each in refused):
        return Refusal("there are activations, offsets or packed weights")
    ends = ends.contiguous() if call.group_list_type == 0 else ends.cumsum(0)
    numbers = only(call.scale), only(call.per_token_scale), only(call.bias)
    of = Product(x[0], weight[0], ends, *numbers, call.output_dtype or x[0].dtype)
    if (refusal := of.refusal()) is not None:
        return refusal
    found = _by_library(of)
    return [of.launch() if found is None else found]


def npu_quant_matmul(call: Arguments) -> Any:
    x, weight = call.x1, call.x2
    if x.dim() < 2 or weight.dim() != 2 or call.group_sizes:
        return Refusal("there is not one matrix of weights with scales of its columns")
    is_bytes = call.output_dtype in (None, torch.int8)
    dtype = torch.float32 if is_bytes else call.output_dtype
    rows = x.reshape(-1, x.shape[-1])
    of = Product(rows, weight[None], None, call.scale, call.pertoken_scale, call.bias, dtype)
    if (refusal := of.refusal()) is not None:
        return refusal
    found = of.launch()
    if is_bytes:
        shifted = found if call.offset is None else found + call.offset.to(torch.float32)
        found = ranged(shifted, -128.0, 127.0, torch.int8)
    return found.view(*x.shape[:-1], weight.shape[1])


@triton.jit(do_not_specialize=["count", "tokens", "times"])
def finalize_kernel(
    rows, skip1, skip2, bias, scales, places, experts, out, count, tokens, times, width, row_stride,
    BY_TOKEN: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    ok = column < width
    total = tl.zeros((COLUMNS,), tl.float32)
    for each in range(0, bound(times)):
        at = token * times + each if BY_TOKEN else token + each * tokens
        place = tl.load(places + at).to(tl.int64)
        there = place >= 0
        row, seen = inside(tl.where(there, place, 0), count), column < tl.where(there, width, 0)
        found = tl.load(rows + row * row_stride + column, mask=seen, other=0.0).to(tl.float32)
        if bias is not None:
            expert = tl.load(experts + token * times + each).to(tl.int64)
            found += tl.load(bias + expert * width + column, mask=seen, other=0.0).to(tl.float32)
        if scales is not None:
            found *= tl.load(scales + token * times + each).to(tl.float32)
        total += tl.where(there, found, 0.0)
    pdl_launch(PDL)
    if skip1 is not None:
        total += tl.load(skip1 + token * width + column, mask=ok, other=0.0).to(tl.float32)
    if skip2 is not None:
        total += tl.load(skip2 + token * width + column, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=ok)


def npu_moe_finalize_routing(call: Arguments) -> Any:
    flat = call.expanded_permuted_rows.reshape(-1, call.expanded_permuted_rows.shape[-1])
    places, experts, width = call.expanded_src_to_dst_row, call.export_for_source_row, flat.shape[1]
    more = [each for each in (call.skip1, call.skip2, call.bias, call.scales) if each is not None]
    if any(each.dtype not in FLOATS for each in (flat, *more)) or (call.bias is not None and experts is None):
        return Refusal("rows, skips, bias or scales are no floats, or a bias has no experts")
    more += [places, *(() if experts is None else (experts,))]
    if any(each.device != flat.device or not each.is_contiguous() for each in more) or flat.stride(1) != 1:
        return Refusal("not all arguments are contiguous and on one device")
    times = 1 if call.scales is None else call.scales.shape[-1]
    tokens = places.shape[0] // times
    if any(each is not None and each.shape != (tokens, width) for each in (call.skip1, call.skip2)):
        return Refusal("what is added does not have the shape of the result")
    if not flat.shape[0] or not width or tokens > MOST_BLOCKS:
        return Refusal("there are no rows, or more tokens than a grid has blocks")
    out = flat.new_empty((tokens, width))
    columns = min(512, block_of(width))
    constants = {"BY_TOKEN": (call.drop_pad_mode or 0) >= 2, "COLUMNS": columns, "num_warps": 4}
    sizes = flat.shape[0], tokens, times, width, flat.stride(0)
    plan = LaunchPlan((blocks_of(width, columns), tokens), sizes, constants)
    plan.launch(finalize_kernel, (flat, call.skip1, call.skip2, call.bias, call.scales, places, experts, out), flat)
    return out
