"""The nightly: many random programs in several processes, and a table of what happened.

    python -m tests.fuzz.run --programs 20000 --jobs 2 --seed 0 --regions

Program number i of a seed is the same on every machine. A failure is printed, shrunk, as a Python file of its own.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import torch
from rich.console import Console
from rich.table import Table

from tests.fuzz.check import EQUAL, FAILURE, TORCH, Session, Verdict, session
from tests.fuzz.instructions import random_program
from tests.fuzz.programs import Program, shrunk

DISCARDED = "discarded"
_BATCH = 25


@dataclass
class Tally:
    """What happened to some programs."""

    programs: int = 0
    dynamic: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str, str]] = field(default_factory=list)  # number, what differs, script

    def add(self, other: Tally) -> None:
        self.programs += other.programs
        self.dynamic += other.dynamic
        self.statuses += other.statuses
        self.rules += other.rules
        self.failures += other.failures


def program_number(seed: int, number: int) -> Program:
    return random_program(Random(f"{seed}/{number}"))


def run_batch(job: tuple[int, range, bool, bool]) -> Tally:
    """Check some programs in this process."""
    seed, numbers, shrink, regions = job
    tally = Tally()
    with session(regions=regions) as checks:
        for number in numbers:
            program = program_number(seed, number)
            tally.programs += 1
            if not program.steps:
                tally.statuses[DISCARDED] += 1
                continue
            verdict = _checked(checks, program)
            tally.dynamic += program.dynamic
            tally.statuses[verdict.status] += 1
            tally.rules.update(verdict.rules)
            if verdict.failed:
                tally.failures.append((number, verdict.detail, _smallest(checks, program, shrink).script()))
    return tally


def _checked(checks: Session, program: Program) -> Verdict:
    try:
        return checks.check(program)
    except Exception:
        return Verdict(FAILURE, traceback.format_exc())


def _smallest(checks: Session, program: Program, shrink: bool) -> Program:
    return shrunk(program, lambda smaller: _checked(checks, smaller).failed) if shrink else program


def _prepare() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)


def _tallies(seed: int, programs: int, jobs: int, shrink: bool, regions: bool) -> Iterator[Tally]:
    numbers = (range(start, min(start + _BATCH, programs)) for start in range(0, programs, _BATCH))
    batches = [(seed, each, shrink, regions) for each in numbers]
    if jobs == 1:
        _prepare()
        yield from map(run_batch, batches)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, initializer=_prepare) as pool:
        yield from pool.imap_unordered(run_batch, batches)


def summary(tally: Tally, seconds: float) -> Table:
    table = Table("what", "programs", "percent", title=f"{tally.programs} programs in {seconds:.0f} s")
    for status in (EQUAL, TORCH, DISCARDED, FAILURE):
        table.add_row(status, str(tally.statuses[status]), _percent(tally.statuses[status], tally))
    table.add_row("with dynamic shapes", str(tally.dynamic), _percent(tally.dynamic, tally), end_section=True)
    for rule, count in tally.rules.most_common():
        table.add_row(f"rule {rule}", str(count), _percent(count, tally))
    return table


def _percent(count: int, tally: Tally) -> str:
    return f"{100 * count / max(tally.programs, 1):.1f}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=20_000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--regions", action="store_true", help="what no rule fuses runs in regions, node by node")
    given = parser.parse_args(arguments)
    started, total, console = time.monotonic(), Tally(), Console()
    for tally in _tallies(given.seed, given.programs, given.jobs, not given.no_shrink, given.regions):
        total.add(tally)
        for number, detail, script in tally.failures:
            print(f"\n# program {number} of seed {given.seed} fails: {detail}\n{script}", flush=True)
        pace = (time.monotonic() - started) / total.programs
        line = f"{total.programs}/{given.programs} programs, {len(total.failures)} failures, {1000 * pace:.0f} ms each"
        print(f"\r{line}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    console.print(summary(total, time.monotonic() - started))
    return 1 if total.failures else 0


if __name__ == "__main__":
    sys.exit(main())
