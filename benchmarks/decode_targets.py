"""The targets of the decode table, and which of them are missed or cannot be checked."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.decoding import Setting
from benchmarks.rows import Row
from benchmarks.variants import GRAPHEX, GRAPHEX_UNTUNED, NAMED, STOCK, fits

FLOOR = {1: 1.25, 16: 1.35, 64: 1.45}  # batch -> at most so many times the floor
AHEAD = {16: 2.2}  # batch -> at least so many times faster than the best stock mode whose caches are not marked
COMPILE = {GRAPHEX.name: 8.0, GRAPHEX_UNTUNED.name: 25.0}  # seconds, imports included


def missed(rows: list[Row], bandwidth: float) -> list[str]:
    """A sentence for each target that the rows of graphex miss. A target without rows is not missed: see `unknown`."""
    found = []
    for row in rows:
        if row.variant == GRAPHEX.name:
            beside = [each for each in rows if each.setting == row.setting and NAMED[each.variant].stock]
            found += [*_floor(row, bandwidth), *_faster(row, beside), *_ahead(row, beside)]
        seconds, limit = row.compile + row.imports, COMPILE.get(row.variant)
        if limit is not None and seconds > limit:
            found.append(f"missed: {row.setting}: {row.variant} compiles in {seconds:.1f} s, at most {limit:.0f} s")
    return found


def unknown(rows: list[Row], settings: list[Setting]) -> list[str]:
    """A sentence for each setting on which graphex cannot be compared because rows are missing."""
    there = {row.about for row in rows}
    found = []
    for setting in settings:
        wanted = [GRAPHEX, *(variant for variant in STOCK if fits(variant, setting))]
        absent = [variant.name for variant in wanted if (setting, variant.name) not in there]
        if absent:
            found.append(f"not known: {setting}: no rows of {'; '.join(absent)}")
    return found


def _floor(row: Row, bandwidth: float) -> Iterator[str]:
    most = FLOOR.get(row.setting.batch)
    times = row.pipelined * bandwidth / row.moved
    if most is not None and times > most:
        yield f"missed: {row.setting}: {times:.2f}x floor, at most {most}x"


def _faster(row: Row, stock: list[Row]) -> Iterator[str]:
    for each in stock:
        if row.pipelined >= each.pipelined:
            yield f"missed: {row.setting}: {row.pipelined / each.pipelined:.2f}x the time of {each.variant}"


def _ahead(row: Row, stock: list[Row]) -> Iterator[str]:
    least = AHEAD.get(row.setting.batch)
    unmarked = [each for each in stock if not NAMED[each.variant].marked]
    if least is None or not unmarked or row.setting.of_transformers:
        return
    best = min(unmarked, key=lambda each: each.pipelined)
    ratio = best.pipelined / row.pipelined
    if ratio < least:
        yield f"missed: {row.setting}: {ratio:.2f}x faster than {best.variant} on unmarked caches, at least {least}x"
