"""Runs a small decode under NVIDIA's compute-sanitizer, to find accesses outside of a tensor and races. Needs a GPU.

    PYTHONPATH=. python benchmarks/sanitize.py [--seconds 55] [--inside]

The script runs `--inside`, the decode itself, three times. The first and second run give every tensor an allocation of
its own, so that an access one past its end is found, and therefore do not capture; they look for bad accesses and for
races in shared memory. The third replays captured graphs. Tiles are not timed, which would take long under the
sanitizer.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import graphex
from benchmarks.decoding import Setting, build, error, in_float32, step_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SETTINGS = [  # odd sizes on purpose: every mask of a kernel is needed
    Setting("llama", 1, 1, 384, 6, 2, 328, 130, 70, "bfloat16", DEVICE),
    Setting("llama", 1, 3, 384, 6, 2, 328, 130, 70, "float16", DEVICE),
    Setting("llama", 1, 16, 256, 2, 1, 520, 130, 150, "bfloat16", DEVICE),
]
OWN_ALLOCATIONS = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "GRAPHEX_SANITIZE_MODE": "eager"}
RUNS = {  # tool and what its process finds in its environment
    "memcheck": OWN_ALLOCATIONS,
    "racecheck": OWN_ALLOCATIONS,
    "memcheck, captured": {"GRAPHEX_SANITIZE_MODE": "reduce-overhead"},
}
WRONG = 0.02


@torch.no_grad()
def decode(mode: str) -> None:
    """A few steps of every setting, compared with float32."""
    for setting in SETTINGS:
        torch.compiler.reset()
        model = build(setting)
        step = step_of(model, setting)
        run = torch.compile(model, backend="graphex", fullgraph=True, options={"mode": mode})
        for _ in range(3):
            found = step.run(run)
        off = error(found, in_float32(model, setting))
        print(f"{setting}, {setting.dtype}: error {off:.1e}", flush=True)
        if off > WRONG:
            raise SystemExit(f"{setting} is wrong")
        if setting.device == "cuda" and graphex.journal(run).fallbacks:
            raise SystemExit(f"fell back: {graphex.journal(run).fallbacks}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=55, help="what is not done by then has failed")
    parser.add_argument("--inside", action="store_true", help="the decode alone, without the sanitizer")
    options = parser.parse_args()
    if options.inside:
        decode(os.environ.get("GRAPHEX_SANITIZE_MODE", "eager"))
        return 0
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None or not torch.cuda.is_available():
        print("this check needs a CUDA device and compute-sanitizer")
        return 1
    end = time.perf_counter() + options.seconds
    found = [sanitized(tool, name, environment, end) for name, environment in RUNS.items()]
    return 0 if all(found) else 1


def sanitized(tool: str, name: str, environment: dict[str, str], end: float) -> bool:
    """Whether one run is clean; prints the result, with the problems if there are any."""
    command = [tool, "--tool", name.split(",")[0], "--error-exitcode", "9"]
    started = time.perf_counter()
    given = {**os.environ, "GRAPHEX_TUNING": "off", **environment}
    try:
        done = subprocess.run(
            [*command, sys.executable, __file__, "--inside"],
            env=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=max(1.0, end - started),
            check=False,
        )
    except subprocess.TimeoutExpired:
        print(f"{name}: not done in time", flush=True)
        return False
    told = "clean" if done.returncode == 0 else f"exit code {done.returncode}\n{done.stdout[-4000:]}"
    print(f"{name}: {told} ({time.perf_counter() - started:.0f} s)", flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
