"""The measurements of one variant of one decode step, the job of taking them, and the file that keeps such rows
between runs.

A row names its device and the versions that its figures depend on. Rows of other devices or versions stay in the file,
but are neither merged into a table nor counted as done.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.decoding import Setting
from benchmarks.measure import versions
from benchmarks.workers import VariantOf, write_rows

RESULTS = Path(__file__).parent / "stock.json"


@dataclass(frozen=True)
class Row:
    """Seconds and bytes; `tuned` is the number of choices that graphex has measured in it.

    `compile` excludes `imports`, the modules of torch that the backend needs for any model; if `imports` is 0,
    `compile` includes them. `compiled` says what ran beside the compilation. With `failed` there are no figures.
    """

    setting: Setting
    variant: str
    where: dict[str, str] = field(default_factory=dict)
    moved: int = 0
    pipelined: float = 0.0
    host: float = 0.0
    in_a_row: float = 0.0
    compile: float = 0.0
    imports: float = 0.0
    compiled: str = "alone"
    peak: int = 0
    error: float = 0.0
    tuned: int = 0
    seconds: float = 0.0
    failed: str = ""

    @property
    def with_imports(self) -> bool:
        return self.compile > 0 and not self.imports

    @property
    def about(self) -> tuple[Setting, str]:
        return self.setting, self.variant


def here(setting: Setting) -> dict[str, str]:
    return versions(*setting.packages)


@dataclass(frozen=True)
class Job(VariantOf[Setting]):
    """A row to be measured: a task of `benchmarks/workers.py`."""

    @property
    def script(self) -> Path:
        return Path(__file__).with_name("decode_worker.py")

    @property
    def reference(self) -> str:
        return str(abs(hash(self.setting)))

    @property
    def seconds(self) -> float:
        """A generous estimate of the time it takes."""
        return self.variant.seconds * max(1.0, 0.7 * self.setting.layers / 8)

    @property
    def bytes(self) -> int:
        """A rough estimate of its device memory: weights and caches, and as much again for copies of the caches."""
        of = self.setting
        weights = of.layers * of.width * (2.5 * of.width + 3 * of.hidden) + of.vocabulary * of.width * 2
        caches = 2 * of.layers * of.batch * of.kv_heads * of.positions * of.head
        return int(2 * (weights + 2 * caches))

    def row(self, facts: dict[str, Any], **about: Any) -> Row:
        return Row(self.setting, self.variant.name, here(self.setting), **about, **facts)


class Store:
    """The rows of a file. Of two rows of one variant, setting and place, the later one counts."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.rows: list[Row] = []
        if path is not None and path.exists():
            self.rows = [_read(row) for row in json.loads(path.read_text())]

    def add(self, row: Row) -> None:
        self.rows = [each for each in self.rows if (each.about, each.where) != (row.about, row.where)]
        self.rows.append(row)
        if self.path is not None:
            write_rows(self.path, [asdict(each) for each in self.rows])

    def found(self, setting: Setting, variant: str) -> Row | None:
        """The row that was measured here, if there is one."""
        where = here(setting)
        return next((row for row in self.rows if row.about == (setting, variant) and row.where == where), None)

    def usable(self, settings: Iterable[Setting]) -> tuple[list[Row], list[str]]:
        """The rows of these settings that were measured here, and remarks about the others."""
        asked = set(settings)
        about = [row for row in self.rows if row.setting in asked]
        good = [row for row in about if row.where == here(row.setting)]
        elsewhere = Counter(_difference(row) for row in about if row not in good)
        return good, [f"left out: {count} stock rows measured with {other}" for other, count in elsewhere.items()]


def _difference(row: Row) -> str:
    now = here(row.setting)
    names = sorted(now.keys() | row.where.keys())
    pairs = [(name, row.where.get(name, "unknown"), now.get(name, "unknown")) for name in names]
    return ", ".join(f"{name} {then}, not {today}" for name, then, today in pairs if then != today)


def _read(values: dict[str, object]) -> Row:
    return replace(Row(**values), setting=Setting(**values["setting"]))  # type: ignore[arg-type]
