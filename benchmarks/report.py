"""Times a report until it is visible: writing it, and opening it in Chromium, for a Llama and for a graph of 5,000
nodes.

    python benchmarks/report.py

The first view counts from the command that opens the file until the browser has drawn it, best of three. The graph
page is measured too, because it does the most work. Needs Chromium, chromedriver and selenium.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import machine
from graphex.evidence.report.page import write_page
from tests.harness.browser import Browser, browser, is_there
from tests.harness.reports import explain_llama, large_report

FIRST_VIEW = {"2-layer Llama": 2.0, "5,000 nodes": 5.0}
LARGEST = 5 * 2**20


def seconds(call: Callable[[], object], rounds: int = 1) -> float:
    best = float("inf")
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
    return best


def open_all(window: Browser, path: Path) -> float:
    window.open(path, "tab=graph")
    return seconds(lambda: window.click("#open-all"))


def main() -> int:
    if not is_there():
        print("benchmarks/report.py needs Chromium, chromedriver and selenium.", file=sys.stderr)
        return 2
    head = "| report | nodes | write, s | MiB | first view, s | graph page, s | every module open, s |"
    print(f"reports. {machine()}\n\n{head}\n|---|---|---|---|---|---|---|")
    missed = []
    llama, large = explain_llama(), large_report()
    with tempfile.TemporaryDirectory() as folder, browser() as window:
        window.resize(1360, 900)
        path = Path(folder) / "report.html"
        writers: dict[str, Callable[[], object]] = {
            "2-layer Llama": lambda: llama.save(path),
            "5,000 nodes": lambda: write_page(large, path),
        }
        nodes = {"2-layer Llama": llama.journal.graphs[0].nodes, "5,000 nodes": len(large["graphs"][0]["pictures"][0])}
        for name, write in writers.items():
            wrote, size = seconds(write), path.stat().st_size
            first = seconds(lambda: window.open(path), rounds=3)
            graph = seconds(lambda: window.open(path, "tab=graph"), rounds=3)
            opened = open_all(window, path)
            cells = (wrote, size / 2**20, first, graph, opened)
            print(f"| {name} | {nodes[name]} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
            if max(first, graph) > FIRST_VIEW[name]:
                missed.append(f"{name}: first view {max(first, graph):.1f} s")
            if name == "2-layer Llama" and size > LARGEST:
                missed.append(f"{name}: {size / 2**20:.1f} MiB")
    print("\nmissed: " + ("; ".join(missed) if missed else "none"))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
