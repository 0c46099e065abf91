"""The targets of the models table, and which rows miss them."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.models_rows import Row, eager_beside, geometric_mean, inductor_beside, of_variant
from benchmarks.variants import DEFAULT, GRAPHEX, GRAPHEX_AUTOTUNE
from benchmarks.zoo import MODELS

SLOWER = {"cuda": 1.02, "cpu": 1.03}  # at most so many times Inductor's time
MEAN = {"cuda": 0.98}  # the same as a geometric mean
PEAK = 1.05  # at most so many times the memory of the faster Inductor
COMPILE, COMPILE_DEEP, DEEP = (
    1.15,
    0.5,
    24,
)  # times the cold compile of Inductor's default; from so many equal layers on
ERROR = 2.0  # at most so many times eager's error
ROUNDING = {"bfloat16": 1e-2, "float32": 1e-5}  # an error below it is nobody's fault


def means(rows: list[Row]) -> list[str]:
    """A sentence on each variant of graphex: the geometric mean of its times over Inductor's."""
    lines = []
    for variant in (GRAPHEX, GRAPHEX_AUTOTUNE):
        ratios = _ratios(rows, variant.name)
        if ratios:
            beside = "Inductor's max-autotune" if variant is GRAPHEX_AUTOTUNE else "the best of Inductor's two"
            lines.append(f"{variant.name} / {beside}: {geometric_mean(ratios):.3f} as the mean of {len(ratios)} ratios")
    return lines


def missed(rows: list[Row]) -> list[str]:
    """A sentence for each target that the rows of graphex miss. Without a row to compare with, none is missed."""
    found = []
    for row in rows:
        if row.variant in (GRAPHEX.name, GRAPHEX_AUTOTUNE.name):
            found += [f"missed: {row}: {text}" for text in _of_row(row, rows)]
    for device, most in MEAN.items():
        ratios = _ratios([row for row in rows if row.setting.device == device], GRAPHEX.name)
        if ratios and geometric_mean(ratios) > most:
            found.append(f"missed: {geometric_mean(ratios):.3f}x Inductor's time as a geometric mean, at most {most}x")
    return found


def _of_row(row: Row, rows: list[Row]) -> Iterator[str]:
    inductor, eager = inductor_beside(row, rows), eager_beside(row, rows)
    if inductor is not None:
        yield from _above(row.pipelined / inductor.pipelined, SLOWER[row.setting.device], f"time of {inductor.variant}")
        if inductor.peak:
            yield from _above(row.peak / inductor.peak, PEAK, f"peak memory of {inductor.variant}")
    if eager is not None:
        if row.setting.device == "cpu":
            yield from _above(row.pipelined / eager.pipelined, 1.0, "time of eager")
        if row.error > max(ERROR * eager.error, ROUNDING[row.setting.dtype]):
            yield f"error {row.error:.1e}, eager's is {eager.error:.1e}"
    default = of_variant(row, rows, DEFAULT)
    if default is not None and default.compile and row.variant == GRAPHEX.name:
        most = COMPILE_DEEP if MODELS[row.setting.model].layers >= DEEP else COMPILE
        yield from _above(row.compile / default.compile, most, f"cold compile of {default.variant}")


def _above(ratio: float, most: float, what: str) -> Iterator[str]:
    if ratio > most:
        yield f"{ratio:.3f}x the {what}, at most {most:.2f}x"


def _ratios(rows: list[Row], variant: str) -> list[float]:
    pairs = [(row, inductor_beside(row, rows)) for row in rows if row.variant == variant]
    return [row.pipelined / beside.pipelined for row, beside in pairs if beside is not None]
