"""Arguments as a kernel takes them: tensors as rows, and the options of quantisation with their types resolved.

Rows: where each row starts, how results are laid out, how a row is cut into tiles. A kernel sees a tensor as `count`
rows of adjacent elements. Row r starts at

    (r // inner) * outer_stride + (r % inner) * inner_stride           r * inner_stride where inner is None

which covers contiguous tensors, slices of wider rows, and slices along a second dimension (the query heads in a merged
QKV projection). Leading dimensions may stand in any order in memory: rows are numbered in the order of memory, and
results get the same order, which is the layout ATen gives them. One number for each row is contiguous, as in ATen.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from graphex.errors import Refusal
from graphex.kernels.arithmetic import TRITON_TYPES
from graphex.ops.definition import Arguments, keyword_defaults

MOST_PLANS = 4096
MOST_ROWS = 2**31 - 2**16
FEW_ROWS = 512
FEW_ELEMENTS = 2**20
FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32))


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the rows of a tensor start; the module says how."""

    count: int
    columns: int
    inner: int | None
    outer_stride: int
    inner_stride: int

    @property
    def steps(self) -> tuple[int | None, int, int]:
        """Where a row starts, as kernels take it."""
        return self.inner, self.outer_stride, self.inner_stride


@dataclass(frozen=True, slots=True)
class RowTile:
    """The part of a tensor that a program computes: so many rows and columns, in so many steps."""

    rows: int
    columns: int
    warps: int
    steps: int = 1


def memory_order(x: Tensor) -> tuple[int, ...] | Refusal:
    """The leading dimensions of x from the slowest to the fastest in memory, or why there is no such order."""
    strides, sizes = x.stride(), x.shape
    leading = range(x.dim() - 1)
    wide = [d for d in leading if sizes[d] > 1]
    if sizes[-1] > 1 and strides[-1] != 1:
        return Refusal("the elements of a row are not adjacent")
    order = sorted(wide, key=lambda d: -strides[d])
    room = sizes[-1]  # what the dimensions so far take up, from the fastest on
    for d in reversed(order):
        if strides[d] < room:
            return Refusal("rows overlap or repeat")
        room += (sizes[d] - 1) * strides[d]
    return tuple(order + [d for d in leading if sizes[d] <= 1])


def rows_of(x: Tensor, order: tuple[int, ...] | None = None) -> Rows | Refusal:
    """The rows of x, in a given order of its leading dimensions, or why they are not rows of a kernel."""
    columns = x.shape[-1]
    count = x.numel() // columns if columns else 0
    if order is None and x.is_contiguous() and count <= MOST_ROWS:
        return Rows(count, columns, None, 0, columns)
    if columns > 1 and x.stride(-1) != 1:
        return Refusal("the elements of a row are not adjacent")
    if count > MOST_ROWS:
        return Refusal("more rows than 32 bits count")
    collapsed: list[tuple[int, int]] = []
    for d in order if order is not None else range(x.dim() - 1):
        size, stride = x.shape[d], x.stride(d)
        if size == 1:
            continue
        if collapsed and collapsed[-1][1] == stride * size:
            collapsed[-1] = (collapsed[-1][0] * size, stride)
        else:
            collapsed.append((size, stride))
    if len(collapsed) > 2:
        return Refusal("rows are spaced in more than two steps")
    inner, inner_stride = collapsed[-1] if collapsed else (1, columns)
    if len(collapsed) < 2:
        return Rows(count, columns, None, 0, inner_stride)
    return Rows(count, columns, inner, collapsed[0][1], inner_stride)


class Inputs(NamedTuple):
    """One or two inputs of one shape, as rows, in the first one's order of dimensions in memory."""

    order: tuple[int, ...] | None
    rows: Rows
    other_rows: Rows


def inputs_of(x: Tensor, other: Tensor | None, names: str) -> Inputs | Refusal:
    """The rows of x and of another tensor; `names` are those of both."""
    if x.dtype not in FLOATS:
        return Refusal(f"x is {x.dtype}")
    if x.dim() == 0 or x.shape[-1] == 0:
        return Refusal("x has no columns")
    if other is not None and (other.shape != x.shape or other.dtype != x.dtype or other.device != x.device):
        return Refusal(f"{names} differ in shape, type or device")
    order = order_of(x)
    if isinstance(order, Refusal):
        return order
    rows, other_rows = rows_of(x, order), rows_of(x if other is None else other, order)
    if isinstance(rows, Refusal):
        return rows
    if isinstance(other_rows, Refusal):
        return other_rows
    return Inputs(order, rows, other_rows)


def order_of(x: Tensor) -> tuple[int, ...] | Refusal | None:
    """None for a contiguous tensor, else `memory_order`."""
    return None if x.is_contiguous() else memory_order(x)


def allocate(x: Tensor, order: tuple[int, ...] | None, dtype: torch.dtype) -> Tensor:
    """An uninitialised result with the shape of x and its order of dimensions in memory."""
    if order is None:
        return torch.empty_like(x, dtype=dtype)
    full = (*order, x.dim() - 1)
    return x.new_empty([x.shape[d] for d in full], dtype=dtype).permute([full.index(d) for d in range(x.dim())])


def rows_of_ones(x: Tensor, order: tuple[int, ...] | None) -> Rows | Refusal:
    """The rows of a tensor with one number per row. It is contiguous, as a reduction's result is."""
    if order is None:
        return Rows(0, 1, None, 0, 1)
    return rows_of(torch.empty((*x.shape[:-1], 1), device="meta"), order)


def allocate_ones(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty((*x.shape[:-1], 1), dtype=dtype)


def blocks_of(count: int, size: int) -> int:
    """How many blocks of a size cover a count. (Triton's own `cdiv` is much slower on the host.)"""
    return -(-count // size)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 1 else 1


def block_of(columns: int) -> int:
    """A row as one block: a power of two, and no less than the four elements that are quantised together."""
    return max(4, next_power_of_2(columns))


def row_tile(rows: int, columns: int, widest: int, few: int = 16, many: int = 32) -> RowTile:
    """One program a row where rows are wide; several where they are short and there are many.

    A thread has `many` elements, or `few` where there are so few rows that only their latency counts. A program keeps
    no more than `widest` elements of a row.
    """
    block = min(block_of(columns), widest)
    if rows <= FEW_ROWS:
        return RowTile(1, block, warps_for(block, few))
    together = max(1, 2048 // block)
    return RowTile(together, block, warps_for(block * together, many))


def warps_for(elements: int, a_thread: int) -> int:
    return max(1, min(32, elements // (32 * a_thread)))


def flat_tile(rows: int, columns: int, sharing: bool = False) -> RowTile:
    """For elementwise work, where a row may be cut anywhere. `sharing`: several rows share a column's parameters."""
    few = rows * columns <= FEW_ELEMENTS
    size = 512 if few else 1024 if sharing else 2048
    block = min(block_of(columns), size)
    return RowTile(min(size // block, next_power_of_2(rows)), block, 4, 2 if sharing and not few else 1)


MOST_BLOCKS = 2**16 - 1  # along the second and third axis of a grid


def grid_of(column_blocks: int, row_blocks: int) -> tuple[int, int, int]:
    """A grid over blocks of columns, then of rows: no program divides its number to find its place."""
    return column_blocks, min(row_blocks, MOST_BLOCKS), blocks_of(row_blocks, MOST_BLOCKS)


def signature(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Shapes, strides, types and devices of tensors: all that a plan for a launch may depend on."""
    return tuple(None if t is None else (t.shape, t.stride(), t.dtype, t.get_device()) for t in tensors)


P = TypeVar("P")


def remember(plans: dict[Any, P], key: Any, plan: P) -> P:
    """Keep a plan, so that the next launch of the same kind costs the host little."""
    if len(plans) >= MOST_PLANS:
        plans.clear()
    plans[key] = plan
    return plan


def on_device_of(x: Tensor) -> Any:
    """Make the tensor's device the current one, on which Triton launches."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


# -- options of quantisation -------------------------------------------------------------------------------------------


DYNAMIC_QUANT, STATIC_QUANT = "graphex::dynamic_quant", "graphex::static_quant"
INTEGERS = frozenset((torch.int8, torch.uint8))
FLOAT8 = frozenset((torch.float8_e4m3fn, torch.float8_e5m2))
RANGES = {
    torch.int8: (-128.0, 127.0),
    torch.uint8: (0.0, 255.0),
    torch.float8_e4m3fn: (-448.0, 448.0),
    torch.float8_e5m2: (-57344.0, 57344.0),
}


@dataclass(frozen=True, slots=True, eq=False)
class Dynamic:
    """Options of a dynamic quantisation: one object for each set of them."""

    dtype: torch.dtype
    scale_dtype: torch.dtype
    keepdim: bool
    numbers: tuple[float, float, float, float, float]  # divisor, min_amax, min_scale, quant_min, quant_max
    types: dict[str, object]  # the kernel's constants


@dataclass(frozen=True, slots=True, eq=False)
class Static:
    """Options of a static quantisation: one object for each set of them."""

    dtype: torch.dtype
    numbers: tuple[float, float]  # quant_min, quant_max
    types: dict[str, object]


def _refusal(dtype: torch.dtype, quant_min: float, quant_max: float, *floats: torch.dtype) -> Refusal | None:
    if not FLOATS.issuperset(floats):
        return Refusal("quantisation is computed in a type other than float16, bfloat16 and float32")
    if dtype not in RANGES:
        return Refusal(f"the kernel does not quantise to {dtype}")
    smallest, largest = RANGES[dtype]
    if not smallest <= quant_min <= quant_max <= largest:
        return Refusal(f"the quantised range is not within that of {dtype}")
    if dtype in INTEGERS and not (quant_min == int(quant_min) and quant_max == int(quant_max)):
        return Refusal("the bounds of the quantised range are not integers")
    return None


def _through(value: float, dtype: torch.dtype) -> float:
    """A Python number as an op on tensors of this type sees it."""
    return torch.tensor(value, dtype=torch.float64).to(dtype).item() if value else 0.0


@lru_cache(maxsize=256)
def dynamic_options(*, zero_is_zero: bool = False, **given: Any) -> Dynamic | Refusal:
    """The keyword arguments of `graphex::dynamic_quant`; `zero_is_zero` as in `npu_dynamic_quant`."""
    options = SimpleNamespace(**keyword_defaults(DYNAMIC_QUANT) | given)
    dtype, quant_min, quant_max = options.dtype or torch.int8, options.quant_min, options.quant_max
    compute = options.compute_dtype or torch.float32
    scale = options.scale_dtype or compute
    refusal = _refusal(dtype, quant_min, quant_max, compute, scale)
    if refusal is not None:
        return refusal
    if options.mode not in ("divide", "reciprocal"):
        return Refusal(f"unknown mode '{options.mode}'")
    types = {
        "MODE": options.mode,
        "COMPUTE": TRITON_TYPES[compute],
        "SCALE": TRITON_TYPES[scale],
        "RESULT": TRITON_TYPES[torch.promote_types(compute, scale)],
        "ZERO_IS_ZERO": zero_is_zero,
        "FULL_RANGE": RANGES[dtype] == (quant_min, quant_max),
    }
    least = _through(options.min_amax, compute), _through(options.min_scale, compute)
    return Dynamic(dtype, scale, options.keepdim, (options.divisor, *least, quant_min, quant_max), types)


def static_options(scale: Tensor, zero_point: Tensor | None, columns: int, **given: Any) -> Static | Refusal:
    """The keyword arguments of `graphex::static_quant`, given its scale and zero point."""
    for value in (scale, zero_point):
        if value is not None and (value.dim() > 1 or value.numel() not in (1, columns)):
            return Refusal("a scale or zero point is neither one number nor one for each column")
    return _static_options(
        scale.dtype,
        scale.dim() == 0,
        scale.numel() == 1,
        None if zero_point is None else zero_point.dtype,
        zero_point is not None and zero_point.dim() == 0,
        zero_point is not None and zero_point.numel() == 1,
        **keyword_defaults(STATIC_QUANT) | given,
    )


@lru_cache(maxsize=256)
def _static_options(
    scale: torch.dtype,
    scale_is_scalar: bool,
    one_scale: bool,
    zero_point: torch.dtype | None,
    zero_point_is_scalar: bool,
    one_zero_point: bool,
    *,
    mode: str,
    zero_point_before_round: bool,
    quant_min: float,
    quant_max: float,
    dtype: torch.dtype | None,
    compute_dtype: torch.dtype | None,
) -> Static | Refusal:
    dtype, compute = dtype or torch.int8, compute_dtype or torch.float32
    refusal = _refusal(dtype, quant_min, quant_max, compute, scale)
    if refusal is not None:
        return refusal
    if mode not in ("divide", "reciprocal", "multiply"):
        return Refusal(f"unknown mode '{mode}'")
    # As in ATen: a zero-dimensional tensor does not widen the type of a tensor with dimensions.
    result = compute if scale_is_scalar else torch.promote_types(compute, scale)
    total = result
    if zero_point is not None and not zero_point_is_scalar:
        total = torch.promote_types(result, zero_point)
    if total not in FLOATS:
        return Refusal("the zero point is of a type other than an integer, float16, bfloat16 and float32")
    types = {
        "MODE": mode,
        "COMPUTE": TRITON_TYPES[compute],
        "SCALE": TRITON_TYPES[scale],
        "RESULT": TRITON_TYPES[result],
        "SUM": TRITON_TYPES[total],
        "ONE_SCALE": one_scale,
        "ONE_ZERO_POINT": one_zero_point,
        "ZERO_POINT_FIRST": zero_point_before_round,
        "FULL_RANGE": RANGES[dtype] == (quant_min, quant_max),
    }
    return Static(dtype, (quant_min, quant_max), types)


def dynamic_of(call: Arguments) -> Dynamic | Refusal:
    """The options of an op that ends in `graphex::dynamic_quant`."""
    return dynamic_options(**{name: getattr(call, name) for name in keyword_defaults(DYNAMIC_QUANT)})


def static_of(call: Arguments, x: Tensor) -> Static | Refusal:
    """The options of an op that ends in `graphex::static_quant` of tensors that are shaped as x."""
    options = {name: getattr(call, name) for name in keyword_defaults(STATIC_QUANT)}
    return static_options(call.scale, call.zero_point, x.shape[-1] if x.dim() else 0, **options)


NO_QUANTISATION: dict[str, object] = {
    "MODE": "divide",
    "COMPUTE": TRITON_TYPES[torch.float32],
    "SCALE": TRITON_TYPES[torch.float32],
    "RESULT": TRITON_TYPES[torch.float32],
    "SUM": TRITON_TYPES[torch.float32],
    "ONE_SCALE": False,
    "ONE_ZERO_POINT": False,
    "ZERO_POINT_FIRST": False,
    "ZERO_IS_ZERO": False,
    "FULL_RANGE": False,
}


def is_column_vector(vector: Tensor | None, x: Tensor) -> bool:
    """Whether there is one number of a type kernels know for each column of x, next to each other."""
    return vector is None or (
        vector.shape == x.shape[-1:]
        and vector.device == x.device
        and vector.dtype in FLOATS
        and (vector.stride(0) == 1 or vector.shape[0] == 1)
    )


def quant_refusal(
    x: Tensor,
    options: Dynamic | Static | None,
    smooth: Tensor | None = None,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
) -> Refusal | None:
    """Why a kernel cannot quantise x, if so."""
    if options is not None and (refusal := device_refusal(options.dtype, x)) is not None:
        return refusal
    if not is_column_vector(smooth, x):
        return Refusal("the smooth scales are not a contiguous vector over the last dimension of x")
    for value in (scale, zero_point):
        if value is not None and (value.device != x.device or not value.is_contiguous()):
            return Refusal("a scale or zero point is on another device or not contiguous")
    return None


def device_refusal(dtype: torch.dtype, x: Tensor) -> Refusal | None:
    """Why the device cannot quantise: its hardware does not convert to the type."""
    oldest = (8, 9) if dtype in FLOAT8 else (7, 2)
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < oldest:
        return Refusal(f"this device does not convert to {dtype}")
    return None
