"""`graphex doctor`, `bench` and `cache`: what this machine has, how fast it is, and what is stored on it.

`doctor` checks the machine, `bench` runs the benchmarks of the source tree that fit it, and `cache` shows the graphs
that are stored for the next process, and why one was not found.
"""

from __future__ import annotations

import ast
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphex.cli import Group, json_option, print_json, print_table, styled, waiting
from graphex.errors import count_of, did_you_mean

if TYPE_CHECKING:
    from graphex.cache.keys import CacheKey
    from graphex.cache.store import CacheStore, Entry


# -- doctor ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """`status` is ok, untried, missing (graphex works without it, and less well) or broken (it does not work)."""

    name: str
    status: str
    found: str
    advice: str = ""


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Check this machine: torch, devices, Triton, compilers, and a compilation that is really run.

    The replay check decides in every call whether a captured graph can be replayed. It runs in C++, or in Python with
    the reason why.

    Ends with 1 if something is broken; something that is only missing is no failure.
    """
    findings = []
    with waiting("looking around", len(CHECKS)) as say:
        for check in CHECKS:
            say(check.__name__.strip("_"))
            findings.append(check())
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        print_table(
            ("", "status", "found", "what to do"),
            ((each.name, styled(each.status), each.found, each.advice) for each in findings),
        )
    sys.exit(1 if any(finding.status == "broken" for finding in findings) else 0)


def _python() -> Finding:
    return Finding("Python", "ok", f"{platform.python_version()}, {platform.platform()}")


def _torch() -> Finding:
    import torch

    from graphex.torch_private.lookup import TRIED, is_newer_than_tried, is_too_old

    found, oldest, newest = torch.__version__, TRIED[0].version, TRIED[-1].version
    if is_too_old():
        return Finding("torch", "broken", found, f"pip install 'torch>={oldest}'")
    if is_newer_than_tried():
        said = f"torch {found} is newer than {newest}, the newest that graphex was tried with"
        return Finding("torch", "untried", said, f"if something is odd, try pip install 'torch=={newest}'")
    return Finding("torch", "ok", found)


def _private_names() -> Finding:
    """graphex uses some of torch's private names. One that is gone costs what the finding says, and breaks nothing."""
    from importlib import import_module
    from pkgutil import iter_modules

    from graphex import torch_private
    from graphex.torch_private.lookup import missing_names

    for module in iter_modules(torch_private.__path__):
        import_module(f"{torch_private.__name__}.{module.name}")
    lost = [f"{reason}: {what}" for what, reason in missing_names()]
    if not lost:
        return Finding("torch's inside", "ok", "every private name that graphex uses is there")
    advice = "nothing, if you can do without; a graphex as new as this torch knows the new names"
    return Finding("torch's inside", "missing", "; ".join(lost), advice)


def _backend() -> Finding:
    import graphex

    if entry_points(group="torch_dynamo_backends", name="graphex"):
        return Finding("graphex", "ok", f'{graphex.__version__}, known to torch.compile as backend="graphex"')
    advice = "pip install . in the source tree; until then, import graphex before torch.compile"
    return Finding("graphex", "missing", f"{graphex.__version__}, run from its source tree", advice)


def _cuda() -> Finding:
    import torch

    if torch.version.cuda is None:
        advice = "only if there is a GPU: install torch from https://pytorch.org with CUDA"
        return Finding("CUDA", "missing", "this torch is built without CUDA", advice)
    if not torch.cuda.is_available():
        return Finding("CUDA", "missing", f"torch has CUDA {torch.version.cuda}, no device answers", "check nvidia-smi")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    major, minor = torch.cuda.get_device_capability()
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    found = f"{', '.join(names)}; CUDA {torch.version.cuda}, capability {major}.{minor}, {memory:.0f} GiB"
    return Finding("CUDA", "ok", found)


def _triton() -> Finding:
    if find_spec("triton") is None:
        advice = "pip install triton (Linux); without it fused ops run as plain PyTorch"
        return Finding("Triton", "missing", "not installed", advice)
    try:
        return Finding("Triton", "ok", version("triton"))
    except PackageNotFoundError:
        return Finding("Triton", "ok", "installed with torch")


def _compiler() -> Finding:
    found = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if found is None:
        return Finding("C compiler", "missing", "none", "install gcc: Triton builds a small launcher with it")
    return Finding("C compiler", "ok", found)


def _cpp_compiler() -> Finding:
    """The compiler of regions on a CPU."""
    import torch

    from graphex.regions.compiler import why_no_kernels

    if reason := why_no_kernels(torch.device("cpu")):
        found, _, advice = reason.partition(": ")
        return Finding("C++ compiler", "missing", found, f"{advice}; until then a CPU runs models op by op, as eager")
    return Finding("C++ compiler", "ok", "what Inductor calls is there")


def _replay_check() -> Finding:
    """Compile the check that decides in every call on a GPU whether it is a replay."""
    from graphex.errors import one_line
    from graphex.runtime import guards

    try:
        guards.load()
    except Exception as error:
        advice = "install g++ and Python's headers, or set CXX; until then a replay costs the host more"
        return Finding("replay check", "missing", f"done in Python, not in C++: {one_line(error)}", advice)
    return Finding("replay check", "ok", "done in C++, compiled and loaded")


def _npu() -> Finding:
    if find_spec("torch_npu") is None:
        return Finding("torch_npu", "missing", "not installed", "only for Ascend devices; graphex defines its ops here")
    return Finding("torch_npu", "ok", "installed")


def _compilation() -> Finding:
    """A small model is compiled, run and compared: the only check that proves something."""
    import torch

    import graphex
    from graphex.errors import one_line

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, x = torch.nn.Linear(8, 8, device=device), torch.randn(4, 8, device=device)
    try:
        with torch.no_grad():
            seen = graphex.explain(model, (x,), options={"verify": True})
    except Exception as error:
        return Finding("compilation", "broken", one_line(error), "set TORCH_LOGS=+graphex and report it")
    journal = seen.journal
    if not seen.worst_difference <= 1e-4 or any(verdict.status == "mismatch" for verdict in journal.verifications):
        return Finding("compilation", "broken", f"results differ by {seen.worst_difference:.3g}", "please report it")
    replays = sum(counts["replays"] for counts in journal.counts.values())
    how = f"captured, replayed {replays} times" if replays else "straight-line code, no device graph"
    if device == "cuda" and not replays:
        why = "; ".join(record.reason for record in journal.fallbacks) or "no reason was recorded"
        return Finding("compilation", "broken", f"on cuda, but not captured: {why}", "please report it")
    return Finding("compilation", "ok", f"on {device}, equal to eager; {how}")


CHECKS: tuple[Callable[[], Finding], ...] = (
    _python,
    _torch,
    _private_names,
    _backend,
    _cuda,
    _triton,
    _compiler,
    _cpp_compiler,
    _replay_check,
    _npu,
    _compilation,
)


# -- benchmarks --------------------------------------------------------------------------------------------------------


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
    "training": "CUDA",
    "generate": "CUDA",
    "warm_start": "CUDA",
    "replay_host": "CUDA",
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
    """The first sentence of a benchmark's docstring, which may take several lines."""
    doc = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text())) or ""
    return " ".join(doc.split()).partition(". ")[0].rstrip(".") + "."


# -- stored graphs -----------------------------------------------------------------------------------------------------


_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (0, "s"))


@click.group(cls=Group)
def cache() -> None:
    """List, compare, check, move and remove the graphs that are stored for the next process."""


@cache.command(name="list")
@json_option
def list_entries(as_json: bool) -> None:
    """List the stored graphs, the latest use first: what each is of, its size, its age, how often it was loaded."""
    store, now = _store(), time.time()
    rows = [_entry_row(store, entry, now) for entry in store.entries()]
    if as_json:
        print_json({"folder": str(store.path), "graphs": rows})
        return
    if rows:
        columns = ("id", "graph", "KiB", "age", "hits")
        print_table(
            columns,
            ((row["id"], row["graph"], str(row["bytes"] // 1024), _age(row["age"]), str(row["hits"])) for row in rows),
        )
    click.echo(f"{_counted(len(rows), sum(row['bytes'] for row in rows))} in {store.path}")


@cache.command()
@click.argument("wanted", metavar="MODEL|ID")
@json_option
def why(wanted: str, as_json: bool) -> None:
    """Say why the stored graph with an ID, or the latest of a MODEL, was compiled although others were stored before.

    MODEL is the name of the module or function. It is compared with the stored graph that is nearest to it.
    """
    from graphex.cache.keys import difference, nearest

    store = _store()
    entry, key = _found(store, wanted)
    others = {
        other.id: found
        for other in store.entries()
        if other.id != entry.id and other.made <= entry.made and (found := store.key(other.id)) is not None
    }
    found = nearest(key, list(others.values()))
    reason = f"it was the first {key.phase} graph of {key.name}: nothing to compare with"
    reason = reason if found is None else difference(key, found)
    compared = next((id for id, other in others.items() if other is found), "")
    if as_json:
        print_json({"id": entry.id, "graph": _graph(key), "compared_with": compared, "reason": reason})
        return
    beside = f", compared with {compared}" if compared else ""
    click.echo(f"{entry.id} ({_graph(key)}{beside}): {reason}")


@cache.command()
@click.argument("wanted", metavar="[MODEL|ID]", required=False)
def clear(wanted: str | None) -> None:
    """Remove all stored graphs, those of a MODEL, or the one with an ID."""
    store = _store()
    ids = [entry.id for entry in store.entries()] if wanted is None else _ids(store, wanted)
    for id in ids:
        store.discard(id)
    click.echo(f"removed {count_of(len(ids), 'graph')} from {store.path}")


@cache.command()
@json_option
def verify(as_json: bool) -> None:
    """Check the hash, the owner and the mode of every stored graph; ends with 1 if something is wrong.

    A graph that is found to be wrong is never loaded: it is compiled again, and replaced.
    """
    store = _store()
    problems = {entry.id: problem for entry in store.entries() if (problem := store.problem(entry.id))}
    count = len(store.entries())
    if as_json:
        print_json({"graphs": count, "problems": problems})
    else:
        for problem in problems.values():
            click.echo(problem)
        click.echo(f"{count - len(problems)} of {count} graphs are as they were written")
    sys.exit(1 if problems else 0)


@cache.command()
@click.argument("path", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("wanted", metavar="[MODEL|ID]", required=False)
def export(path: Path, wanted: str | None) -> None:
    """Write the stored graphs, or some of them, to one archive for another machine of the same kind.

    Ends with 1 if nothing is stored.
    """
    from graphex.cache.store import write_archive

    if not path.parent.is_dir():
        raise click.UsageError(f"'{path.parent}' is no directory. Make it first, or give another PATH.")
    store = _store()
    ids = [entry.id for entry in store.entries()] if wanted is None else _ids(store, wanted)
    if not ids:
        raise click.ClickException(f"nothing is stored in {store.path}; '{path}' was not written.")
    try:
        size = write_archive(path, store, ids)
    except OSError as error:
        raise click.ClickException(f"'{path}' cannot be written: {error.strerror}. Give another PATH.") from error
    click.echo(f"wrote {_counted(len(ids), size)}, to {path}")


@cache.command(name="import")
@click.argument("path", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--yes", is_flag=True, help="Do not ask.")
def import_archive(path: Path, yes: bool) -> None:
    """Say what an archive holds, and store it. Loading a stored graph runs code from it: import what you trust."""
    from graphex.cache.store import keys_of, read_archive, store_archive

    files = read_archive(path)
    for id, key in keys_of(files).items():
        devices = ", ".join(key.parts.get("devices", {}).values())
        click.echo(f"{id}   {_graph(key)}   {devices}   torch {key.parts.get('torch', '').split(' ')[0]}")
    if not yes:
        click.confirm(f"Store these in {_store().path}? A graph that is loaded runs code from the archive", abort=True)
    store_archive(files, _store())
    click.echo(f"stored {count_of(sum(name.endswith('.graph') for name in files), 'graph')}")


def _counted(graphs: int, size: int) -> str:
    """``1 graph, 12 KiB``"""
    from graphex.evidence.tables import size_text

    return f"{count_of(graphs, 'graph')}, {size_text(size)}"


# -- entries -----------------------------------------------------------------------------------------------------------


def _store() -> CacheStore:
    from graphex.cache.store import CacheStore

    store = CacheStore()
    try:
        store.entries()
    except OSError as error:
        raise click.ClickException(
            f"the cache cannot be used: {error}. Set GRAPHEX_CACHE_DIR to a folder of yours."
        ) from error
    return store


def _entry_row(store: CacheStore, entry: Entry, now: float) -> dict[str, Any]:
    key = store.key(entry.id)
    graph = "cannot be read" if key is None else _graph(key)
    age = max(0.0, now - entry.made)  # another clock made it, or it was made since
    return {"id": entry.id, "graph": graph, "bytes": entry.bytes, "age": age, "hits": entry.hits}


def _graph(key: CacheKey) -> str:
    """`Decoder inference`"""
    return f"{key.name} {key.phase}"


def _age(seconds: float) -> str:
    size, unit = next((size, unit) for size, unit in _UNITS if seconds >= size)
    return f"{int(seconds // (size or 1))} {unit}"


def _ids(store: CacheStore, wanted: str) -> list[str]:
    """The graph with an id, or a beginning of one; else those of a function."""
    by_id = [entry.id for entry in store.entries() if wanted in (entry.id, entry.id.partition("-")[2])]
    by_id = by_id or [entry.id for entry in store.entries() if len(wanted) >= 4 and entry.id.startswith(wanted)]
    names = {entry.id: key.name for entry in store.entries() if (key := store.key(entry.id)) is not None}
    found = by_id or [id for id, name in names.items() if name == wanted]
    if not found:
        known = sorted(set(names.values()))
        hint = did_you_mean(wanted, known, f"there are {', '.join(known) or 'none'}", most=3)
        raise click.UsageError(f"no graph is stored for '{wanted}' ({hint}).")
    return found


def _found(store: CacheStore, wanted: str) -> tuple[Entry, CacheKey]:
    """The latest entry that an id or a name leads to, and its key."""
    ids = _ids(store, wanted)
    entry = max((entry for entry in store.entries() if entry.id in ids), key=lambda entry: entry.made)
    key = store.key(entry.id)
    if key is None:
        raise click.ClickException(f"the key of {entry.id} cannot be read.")
    return entry, key
