"""Which kernel runs for each op of a graph, and what it was measured against."""

from __future__ import annotations

from dataclasses import dataclass, field

from graphex.kernels.tuning import choice_of
from graphex.records import Journal, KernelsPlanned

LIBRARY = "library"
NOT_YET = "not chosen yet"


@dataclass(frozen=True)
class KernelRow:
    """The calls of one op that are alike.

    `runs` is the way that was chosen, or the kernels where there is only one way; `chosen` is where the choice comes
    from (measured, stored, shipped, default), and `seconds` what each way took where it was measured.
    """

    graph: str
    op: str
    on: str
    times: int
    runs: str
    chosen: str = ""
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def own_time(self) -> float | None:
        return self.seconds.get(self.runs)

    @property
    def against(self) -> str:
        """`library 30.8 us, 4 others from 16.2 us`"""
        others = {name: time for name, time in self.seconds.items() if name != self.runs}
        library = others.pop(LIBRARY, None)
        said = [] if library is None else [f"{LIBRARY} {library * 1e6:.1f} us"]
        if others:
            more = "others" if len(others) > 1 else "other"
            said.append(f"{len(others)} {more} from {min(others.values()) * 1e6:.1f} us")
        return ", ".join(said)


def kernel_rows(journal: Journal) -> list[KernelRow]:
    """As things stand now: choices are made in the first call."""
    return [_row(record) for record in journal.kernels]


def _row(record: KernelsPlanned) -> KernelRow:
    about = record.graph, record.op, record.on, record.times
    if record.declined:
        return KernelRow(*about, f"the reference: {record.declined}")
    if not record.family:
        return KernelRow(*about, ", ".join(record.kernels) or "nothing")
    choice = choice_of(record.family, record.shape)
    if choice is None:
        return KernelRow(*about, ", ".join(record.kernels), NOT_YET)
    return KernelRow(*about, choice.name, choice.source, dict(choice.seconds))
