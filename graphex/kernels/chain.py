"""Kernels that follow each other with less of a gap between them (programmatic dependent launch, from Hopper on).

    kernel        reads, computes | let_next | writes its results
    next kernel                      starts, finds its addresses | follow | reads ...

`follow` waits for everything that the kernels before have done, however far back, because each of them has waited in
its turn. So a chained kernel calls it before it reads anything that a kernel may have written, and before it writes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def follow(CHAINED: tl.constexpr):
    """Wait until the kernels before this one are done and their results are there to be read."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next(CHAINED: tl.constexpr):
    """The next kernel may start once all programs are here; it waits for the rest of this one."""
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
