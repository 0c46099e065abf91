"""Launches of attention that rotates its query and adds a token to the caches first.

The configuration is that of attention alone: a token more or less makes no difference to it, and the caches of a user
are no place to measure writes. A step that the kernel does not take runs as two ops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from graphex.kernels import rotary
from graphex.kernels.attention import Job, New, Tile, chosen_config, refusal_of, steps
from graphex.kernels.launch import called, launch, run_job, seen
from graphex.kernels.layout import memory_order, signature
from graphex.ops.definition import Arguments, Declined


class Step(NamedTuple):
    """The arguments of a call."""

    q: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor
    dim: int
    interleaved: bool
    mask: Tensor | None
    scale: float
    softcap: float

    @property
    def mode(self) -> str:
        return rotary.MODES[self.interleaved]

    def rotation(self) -> rotary.Job:
        return rotary.Job(*self[:8], self.dim % self.k.dim())

    def attention(self) -> Job:
        """As if the query were rotated already."""
        return Job(self.q, self.keys, self.values, self.mask, self.scale, False, self.softcap)

    def new(self) -> New:
        """For a step that is not refused."""
        cos, sin = rotary.broadcast(self.cos, self.q), rotary.broadcast(self.sin, self.q)
        assert cos is not None
        assert sin is not None
        return New(self.k, self.v, cos, sin, self.positions, self.mode)


_PREPARED: dict[Any, Callable[[Step], Any] | Declined] = {}


def _refusal(step: Step) -> str | None:
    """Why one kernel cannot take a step."""
    q, k, v, cos, _, keys, values, positions = step[:8]
    if not q.dim() == k.dim() == v.dim() == 4 or step.dim % 4 != 2:
        return "query, key and value do not have four dimensions, of which the caches are written along the third"
    if q.shape[2] != 1 or positions.numel() != 1:
        return "there is more than one token"
    if len({each.dtype for each in (q, k, v, cos, keys, values)}) > 1:
        return "query, key, value, angles and caches are not of one type"
    plan = rotary.plan_for(step.rotation(), step.mode)
    if isinstance(plan, Declined):
        return plan.reason
    angles = rotary.broadcast(step.cos, q)
    if angles is None or steps(angles)[1]:
        return "heads have angles of their own"
    if unclear := next((order for order in map(memory_order, (keys, values)) if isinstance(order, str)), None):
        return f"a cache: {unclear}"
    return refusal_of(step.attention())


def _prepare(step: Step) -> tuple[Callable[[Step], Any] | Declined, bool]:
    """How to take such a step, and whether that is the last word."""
    if refusal := _refusal(step):
        return Declined(refusal), True
    config, is_final = chosen_config(step.attention())
    if not isinstance(config, Tile):
        return _apart, is_final
    run = config.prepare(step.attention(), step.new())
    return lambda step: run(step.attention(), launch, step.new()), is_final


def _apart(step: Step) -> Any:
    """One op after the other, each with its own kernel."""
    turned = called("graphex::rotary_qkv_write_", *step[:10])
    return called("graphex::attention", turned, step.keys, step.values, step.mask, step.scale, False, step.softcap)


def _shares_memory(step: Step) -> bool:
    """Whether what is read may be what is written, beyond the rows that attention leaves out."""
    written = [cache.untyped_storage().data_ptr() for cache in (step.keys, step.values)]
    in_mask = step.mask is not None and step.mask.untyped_storage().data_ptr() in written
    return in_mask or written[0] == written[1] or rotary.shares_memory(step.rotation())


def rotary_attention_(call: Arguments) -> Any:
    step = Step(*call)
    if seen() is None and _shares_memory(step):
        return Declined("a cache shares its memory with what is read")
    key = signature(*step[:8], step.mask), step.dim, step.interleaved, step.softcap > 0
    found = run_job(step, step.q, key, _PREPARED, _prepare)
    if isinstance(found, Declined) and seen() is not None:
        _apart(step)  # what will run instead is compiled too
    return found
