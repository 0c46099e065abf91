"""The kernel that copies rows from one layout into another, such as padded rows into adjacent ones.

    source   row 0 . . . gap | row 1 . . . gap | ...        target   row 0 . . . | row 1 . . . | ...

ATen's copy between tensors of different strides computes the place of every element, and takes twice as long.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graphex.kernels.launch import Plan
from graphex.kernels.layout import FLOATS, blocks_of, rows_of

BLOCK, WARPS = 1024, 4


@triton.jit
def rows_kernel(source, target, columns, blocks, source_stride, target_stride, BLOCK: tl.constexpr):
    place = tl.program_id(0)
    row = (place // blocks).to(tl.int64)
    column = (place % blocks) * BLOCK + tl.arange(0, BLOCK)
    ok = column < columns
    values = tl.load(source + row * source_stride + column, mask=ok)
    tl.store(target + row * target_stride + column, values, mask=ok)


def copy_rows(target: Tensor, source: Tensor) -> bool:
    """Copy a tensor into another of the same size and type. False: these are no rows, and nothing was done."""
    if source.dtype not in FLOATS or source.dim() == 0:
        return False
    read, written = rows_of(source), rows_of(target)
    if isinstance(read, str) or isinstance(written, str) or read.inner is not None or written.inner is not None:
        return False
    blocks = blocks_of(read.columns, BLOCK)
    if read.count * blocks >= 2**31:
        return False
    integers = read.columns, blocks, read.inner_stride, written.inner_stride
    constants = {"BLOCK": BLOCK, "num_warps": WARPS}
    Plan((read.count * blocks,), integers, constants).launch(rows_kernel, (source, target), source)
    return True
