"""`graphex doctor`: check this machine, and say what is missing and how to get it."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec

import click

from graphex.cli.output import json_option, print_json, print_table, styled, waiting


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


def _replay_check() -> Finding:
    """Compile the check that decides in every call on a GPU whether it is a replay."""
    from graphex.errors import one_line
    from graphex.runtime import native

    try:
        native.load()
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
    _replay_check,
    _npu,
    _compilation,
)
