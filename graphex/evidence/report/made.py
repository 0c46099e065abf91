"""How a report came about: versions, machine, options, and where the time of its compilations went.

Dynamo and AOTAutograd are timed by torch. What AOTAutograd took includes the passes and everything after them, so these
are subtracted; without torch's numbers (a report that is written while torch still compiles) only ours are shown.
"""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from graphex.debug.history import Made
from graphex.records import GraphCompiled, Journal
from graphex.torch_private.dynamo import FrameTimes, frame_times

STAGES = ("passes", "regions", "program", "kernels")
VERSIONS = "other versions"  # of graphs: they go through the passes when the graph is called
_REGIONS = "compile_regions"  # a pass whose time is Inductor's
_PACKAGES = ("triton", "transformers")


def made_with() -> dict[str, str]:
    """The versions and the machine, as text."""
    import graphex

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    found = {
        "graphex": graphex.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": gpu or platform.machine(),
        "cuda": torch.version.cuda or "",
        "system": f"{platform.system()} {platform.machine()}",
        "threads": f"{torch.get_num_threads()} of {os.cpu_count()} cores",
    }
    return {name: text for name, text in (found | dict(map(_package, _PACKAGES))).items() if text}


def _package(name: str) -> tuple[str, str]:
    try:
        return name, version(name)
    except PackageNotFoundError:
        return name, ""


def all_options(graphs: Iterable[dict[str, Any]]) -> dict[str, str]:
    """The options of all graphs; of one that differs from graph to graph, all values."""
    found: dict[str, dict[str, None]] = {}
    for graph in graphs:
        for name, text in graph["options"].items():
            found.setdefault(name, {})[text] = None
    return {name: " or ".join(texts) for name, texts in found.items()}


@dataclass
class CompileTime:
    """The seconds of all graphs of a report, by stage."""

    ours: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    frames: dict[FrameTimes, None] = field(default_factory=dict)

    def add(self, graph: GraphCompiled, made: Made | None, journal: Journal) -> None:
        self.ours["capture"] += sum(each.seconds for each in journal.captures if _is_of(each.graph, graph, journal))
        if graph.graph in journal.versions:
            self.ours[VERSIONS] += sum(ran.seconds for ran in journal.passes if ran.graph == graph.graph)
        if made is None:
            return
        for stage, seconds in made.seconds.items():
            self.ours[stage] += seconds
        regions = sum(ran.seconds for ran in journal.passes if ran.graph == graph.graph and ran.name == _REGIONS)
        if made.seconds:  # empty for a graph that was not compiled to the end
            self.ours["passes"] -= regions
            self.ours["regions"] += regions
        for frame in frame_times():
            if frame.compile_id == graph.compile_id and frame.started <= made.began <= frame.ended:
                self.frames[frame] = None

    def stages(self) -> list[dict[str, Any]]:
        own = sum(self.ours[stage] for stage in STAGES)
        traced = sum(frame.backend + frame.backward for frame in self.frames)
        seconds = {
            "Dynamo": sum(frame.frame - frame.backend for frame in self.frames),
            "AOTAutograd": max(0.0, traced - own),
            **{stage: self.ours[stage] for stage in (*STAGES, "capture", VERSIONS)},
        }
        return [{"stage": stage, "seconds": spent} for stage, spent in seconds.items() if spent]


def _is_of(name: str, graph: GraphCompiled, journal: Journal) -> bool:
    return journal.pieces.get(name, name) == graph.graph
