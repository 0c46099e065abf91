"""The rows of the models table: one variant of one model each, the job of measuring it, and the comparisons."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measure import machine, versions
from benchmarks.subjects import Setting
from benchmarks.variants import AUTOTUNE, DEFAULT, EAGER, MODEL_VARIANTS, REDUCE, Variant
from benchmarks.workers import VariantOf, write_rows
from benchmarks.zoo import MODELS

PACKAGES = ("triton", "transformers", "torchvision")


@dataclass(frozen=True)
class Row:
    """Seconds and bytes. `best` is the shortest sample of `pipelined`, `host` the time until a call returns (0 on the
    CPU). `compile` and `warm` exclude `imports`; `warm` is 0 if it was not measured. `compiled` says what ran beside
    the compilation. With `failed` there are no figures.
    """

    setting: Setting
    variant: str
    pipelined: float = 0.0
    best: float = 0.0
    host: float = 0.0
    compile: float = 0.0
    warm: float = 0.0
    imports: float = 0.0
    compiled: str = "alone"
    peak: int = 0
    error: float = 0.0
    graphs: int = 0
    remark: str = ""
    seconds: float = 0.0
    failed: str = ""

    def __str__(self) -> str:
        return f"{self.setting}: {self.variant}"


@dataclass(frozen=True)
class Job(VariantOf[Setting]):
    """A row to be measured: a task of `benchmarks/workers.py`."""

    @property
    def script(self) -> Path:
        return Path(__file__).with_name("models_worker.py")

    @property
    def reference(self) -> str:
        """The threads are not part of it: settings that differ in them have one result."""
        return "-".join((self.setting.model, self.setting.size, self.setting.dtype, str(self.setting.batch)))

    @property
    def seconds(self) -> float:
        """A generous estimate of the time it takes."""
        return self.variant.seconds * MODELS[self.setting.model].slow * self.setting.pick(1.0, 1.5, 0.5)

    @property
    def bytes(self) -> int:
        return int(MODELS[self.setting.model].gib * 2**30) if self.setting.device == "cuda" else 0

    def row(self, facts: dict[str, Any], **about: Any) -> Row:
        return Row(self.setting, self.variant.name, **about, **facts)


@dataclass
class Rows:
    """The rows of a run, and the file that holds them from the first row on."""

    path: Path | None = None
    all: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        key = (row.setting, row.variant)
        self.all = [each for each in self.all if (each.setting, each.variant) != key] + [row]
        if self.path is not None:
            where = {"machine": machine(), "versions": versions("transformers", "torchvision")}
            write_rows(self.path, {**where, "rows": [asdict(each) for each in self.all]})

    @staticmethod
    def read(paths: Iterable[Path]) -> tuple[list[str], Rows]:
        """The machines that some files are about, and the rows of all; a later file replaces rows of an earlier one."""
        found, machines = Rows(), []
        for path in paths:
            data = json.loads(path.read_text())
            machines.append(", ".join((data["machine"], *(f"{name} {data['versions'][name]}" for name in PACKAGES))))
            for row in data["rows"]:
                found.add(Row(**{**row, "setting": Setting(**row["setting"])}))
        return list(dict.fromkeys(machines)), found

    @property
    def good(self) -> list[Row]:
        """The rows with figures, by model, in the order of the variants."""
        models, variants = list(MODELS), list(MODEL_VARIANTS)
        found = [row for row in self.all if not row.failed]
        return sorted(
            found, key=lambda row: (models.index(row.setting.model), row.setting.threads, variants.index(row.variant))
        )


def inductor_beside(row: Row, rows: Iterable[Row]) -> Row | None:
    """The row of Inductor that `row` is compared with: the faster of default and reduce-overhead, or max-autotune for
    rows of that mode.
    """
    autotuned = MODEL_VARIANTS[row.variant].mode == AUTOTUNE.mode
    names = (AUTOTUNE.name,) if autotuned else (DEFAULT.name, REDUCE.name)
    beside = [each for each in rows if each.setting == row.setting and each.variant in names]
    return min(beside, key=lambda each: each.pipelined, default=None)


def of_variant(row: Row, rows: Iterable[Row], variant: Variant) -> Row | None:
    """The row of another variant of the same setting."""
    return next((each for each in rows if each.setting == row.setting and each.variant == variant.name), None)


def eager_beside(row: Row, rows: Iterable[Row]) -> Row | None:
    return of_variant(row, rows, EAGER)


def geometric_mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))
