"""`graphex bench`: the benchmarks of the source tree that fit this machine."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from graphex.cli.output import json_option, print_json, print_table, styled, waiting
from graphex.errors import did_you_mean

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
NEEDS = {  # benchmark -> the requirement on the machine
    "host_overhead": "",
    "memory": "",
    "fusion_compile": "",
    "compile_time": "",
    "report": "chromium",
    "replay": "CUDA",
    "decode": "CUDA",
    "prefill": "CUDA",
    "models": "CUDA",
    "kernels": "CUDA",
    "linears": "CUDA",
    "attention": "CUDA",
    "streams": "CUDA",
}


@dataclass(frozen=True)
class Result:
    """`exit` is 1 if the benchmark missed a target of its own."""

    name: str
    seconds: float
    exit: int
    output: str


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--list", "only_list", is_flag=True, help="List the benchmarks and which of them fit, and run none.")
@json_option
def bench(names: tuple[str, ...], only_list: bool, as_json: bool) -> None:
    """Run the benchmarks called NAME, or all that fit this machine. Every number is measured beside its baseline.

    Ends with 1 if a benchmark misses a target of its own.
    """
    if not FOLDER.is_dir():
        raise click.UsageError("the benchmarks are in the source tree, not in the package; run this from a checkout.")
    for name in names:
        if name not in NEEDS:
            hint = did_you_mean(name, NEEDS, f"there are {', '.join(NEEDS)}", most=3)
            raise click.UsageError(f"there is no benchmark '{name}' ({hint}).")
    if only_list:
        _print_list(as_json)
        return
    chosen = names or tuple(name for name in NEEDS if not _missing(name))
    results = []
    with waiting("measuring", len(chosen)) as say:
        for name in chosen:
            say(name)
            results.append(_measure(name))
            if not as_json:
                click.echo(f"{name}: {results[-1].seconds:.0f} s\n\n{results[-1].output}")
    if as_json:
        print_json([asdict(result) for result in results])
    sys.exit(1 if any(result.exit for result in results) else 0)


def _measure(name: str) -> Result:
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py")], capture_output=True, text=True, check=False, cwd=FOLDER.parent
    )
    seconds = time.perf_counter() - started
    return Result(name, seconds, done.returncode, done.stdout + (done.stderr if done.returncode else ""))


def _print_list(as_json: bool) -> None:
    rows = [(name, "fits" if not _missing(name) else f"needs {_missing(name)}", _summary(name)) for name in NEEDS]
    if as_json:
        print_json([{"name": name, "status": status, "summary": summary} for name, status, summary in rows])
    else:
        print_table(("benchmark", "", "what it measures"), ((n, styled(status), told) for n, status, told in rows))


def _missing(name: str) -> str:
    """The requirement of a benchmark that this machine does not meet; empty if there is none."""
    import torch

    has = {"": True, "CUDA": torch.cuda.is_available(), "chromium": shutil.which("chromium") is not None}
    return "" if has[NEEDS[name]] else NEEDS[name]


def _summary(name: str) -> str:
    doc = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text())) or ""
    return doc.splitlines()[0]
