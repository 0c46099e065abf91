"""Rows of a table, copied: a program has one index and a block of columns, so that no index waits for another."""

from __future__ import annotations

import triton
import triton.language as tl

from graphex.kernels.arithmetic import PTX

_INSIDE = tl.constexpr("""
{
    .reg .pred outside;
    setp.ge.u64 outside, $1, $2;
    @outside trap;
    mov.b64 $0, $1;
}
""")


@triton.jit
def inside(row, rows):
    """The row, if there is one of that number; else the kernel stops, and with it the device, as in ATen.

    The comparison is one of unsigned numbers, to which a negative one is large. The interpreter raises.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            _INSIDE, "=l,l,l", [row, rows.to(tl.int64)], dtype=tl.int64, is_pure=False, pack=1
        )
    else:
        assert (row >= 0) & (row < rows), "an index is outside of the table"
        return row


@triton.jit(do_not_specialize=["rows", "step"], do_not_specialize_on_alignment=["indices"])
def embedding_kernel(weight, indices, out, rows, columns, row_stride, step, BLOCK: tl.constexpr):
    place = tl.program_id(1).to(tl.int64)
    row = inside(tl.load(indices + place * step).to(tl.int64), rows)
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = column < columns
    tl.store(out + place * columns + column, tl.load(weight + row * row_stride + column, mask=ok), mask=ok)
