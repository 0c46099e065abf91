"""A program through graphex, and everything a caller can see of it compared with eager.

Results bit for bit with their strides, what the inputs hold afterwards, and which memory the results live in. Where
graphex differs from eager it must do what `aot_eager` does: then the difference is torch's own and only counted. A
pass that graphex had to roll back is a failure even if the results are right.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch._dynamo
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import graphex
from graphex.debug.tensors import sharing
from graphex.errors import GraphexWarning
from graphex.regions import grow, stage
from tests.fuzz.programs import SIZES, Program, load
from tests.harness.compiling import uncompiled_region

EQUAL, TORCH, FAILURE = "equal", "torch's own difference", "failure"
_SEED = 11
_PROGRAMS_BETWEEN_RESETS = 40


@dataclass(frozen=True)
class Verdict:
    """How it went, what differs, and the rules that made a rewrite."""

    status: str
    detail: str = ""
    rules: frozenset[str] = frozenset()

    @property
    def failed(self) -> bool:
        return self.status == FAILURE


@dataclass(frozen=True)
class Seen:
    """What a caller sees of a call: an error, or results, inputs afterwards and shared memory."""

    error: str
    results: list[Any]
    inputs: list[Any]
    memory: list[Any]


def check(program: Program) -> Verdict:
    loaded = load(program.source())
    return check_functions(loaded.inputs, loaded.model, loaded.dynamic)


def check_source(source: str) -> Verdict:
    """Check a program in its printed form."""
    loaded = load(source)
    return check_functions(loaded.inputs, loaded.model, loaded.dynamic)


def check_functions(
    inputs: Callable[[int], list[Tensor]], model: Callable[..., list[Tensor]], dynamic: bool
) -> Verdict:
    """Compare graphex with eager, and with `aot_eager` where they differ."""
    sizes = SIZES if dynamic else SIZES[:1]
    given = Given(inputs, model, dynamic)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager = [_seen(model, inputs(size)) for size in sizes]
        found, compiled = given.through("graphex")
        rules = frozenset(record.rule for record in graphex.journal(compiled).rewrites)
        if broken := _broken(graphex.journal(compiled)):
            return Verdict(FAILURE, broken, rules)
        differences = _differences(found, [eager])
        if not differences:
            return Verdict(EQUAL, "", rules)
        aot = given.again("aot_eager")
        if _differences(found, [eager, aot]) and (differences := _differences(given.again("graphex"), [eager, aot])):
            return Verdict(FAILURE, "\n".join(differences), rules)
    return Verdict(TORCH, "\n".join(differences), rules)


@dataclass(frozen=True)
class Given:
    """What is to be compiled."""

    inputs: Callable[[int], list[Tensor]]
    model: Callable[..., list[Tensor]]
    dynamic: bool

    def through(self, backend: str) -> tuple[list[Seen], Any]:
        """What a caller sees of the compiled model, and the compiled model."""
        compiled = torch.compile(self.model, backend=backend, fullgraph=True, dynamic=self.dynamic)
        sizes = SIZES if self.dynamic else SIZES[:1]
        return [_seen(compiled, self.inputs(size)) for size in sizes], compiled

    def again(self, backend: str) -> list[Seen]:
        """The same from nothing. Fake tensors that come from torch's cache can have lost where they begin, and custom
        ops then write to another place: what two compilations do is compared only if both start without that cache.
        """
        torch._dynamo.reset()
        FakeTensorMode.cache_clear()
        return self.through(backend)[0]


def _seen(fn: Callable[..., list[Tensor]], inputs: list[Tensor]) -> Seen:
    torch.manual_seed(_SEED)
    with torch.no_grad():
        try:
            results = list(fn(*inputs))
        except Exception as error:
            return Seen(_name_of(error), [], [], [])
    return Seen("", results, inputs, _memory(results, inputs))


def _name_of(error: Exception) -> str:
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0]}"


def _memory(results: list[Any], inputs: list[Any]) -> list[Any]:
    """For each result: whose memory it lives in, where in an input's memory, and which input it is."""
    seen = []
    for owner, value in zip(sharing(results, inputs), results, strict=True):
        place = value.storage_offset() if owner.startswith("input") and isinstance(value, Tensor) else 0
        same = next((index for index, given in enumerate(inputs) if given is value), None)
        seen.append((owner, place, same))
    return seen


def _broken(journal: graphex.Journal) -> str:
    undone = [f"{record.name} {record.status}: {record.reason}" for record in journal.passes if record.status in _BAD]
    return "\n".join([*undone, *(f"{record.what}: {record.reason}" for record in journal.fallbacks)])


_BAD = ("rolled back", "failed")


def _differences(found: list[Seen], references: list[list[Seen]]) -> list[str]:
    """What agrees with none of the references: one line for each call and aspect."""
    lines = []
    for call, ours in enumerate(found):
        theirs = [reference[call] for reference in references]
        for aspect, compare in ASPECTS.items():
            reasons = [compare(ours, other) for other in theirs]
            if all(reasons):
                lines.append(f"call {call}, {aspect}: {reasons[0]}")
    return lines


def _errors(ours: Seen, theirs: Seen) -> str:
    return "" if bool(ours.error) == bool(theirs.error) else f"{ours.error or 'no error'} / {theirs.error or 'none'}"


def _results(ours: Seen, theirs: Seen) -> str:
    if ours.error or theirs.error:
        return ""
    return next(filter(None, map(_apart, ours.results, theirs.results)), "")


def _inputs(ours: Seen, theirs: Seen) -> str:
    if ours.error or theirs.error:
        return ""
    return next(filter(None, map(_apart, ours.inputs, theirs.inputs)), "")


def _sharing(ours: Seen, theirs: Seen) -> str:
    if ours.error or theirs.error or ours.memory == theirs.memory:
        return ""
    return f"{ours.memory} / {theirs.memory}"


ASPECTS: dict[str, Callable[[Seen, Seen], str]] = {
    "errors": _errors,
    "results": _results,
    "inputs": _inputs,
    "shared memory": _sharing,
}


def _apart(ours: Tensor, theirs: Tensor) -> str:
    """How two tensors differ to a reader; empty if they do not."""
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return f"{ours.dtype} {tuple(ours.shape)} / {theirs.dtype} {tuple(theirs.shape)}"
    if ours.numel() and _strides(ours) != _strides(theirs):
        return f"strides {ours.stride()} / {theirs.stride()}"
    if torch.equal(ours, theirs) and (not ours.is_floating_point() or torch.equal(ours.signbit(), theirs.signbit())):
        return ""
    if ours.is_complex():
        return _apart(torch.view_as_real(ours.resolve_conj()), torch.view_as_real(theirs.resolve_conj()))
    if ours.is_floating_point():
        number = ~theirs.isnan()
        if torch.equal(ours.isnan(), ~number) and torch.equal(ours[number], theirs[number]):
            return ""
    return f"{ours.tolist()} / {theirs.tolist()}"


def _strides(tensor: Tensor) -> list[int]:
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


class Session:
    """Many programs in one process: Dynamo is set up for it, and emptied now and then."""

    def __init__(self) -> None:
        self._done = 0

    def check(self, program: Program) -> Verdict:
        if self._done % _PROGRAMS_BETWEEN_RESETS == 0:
            torch._dynamo.reset()
            gc.collect()
        self._done += 1
        return check(program)


@contextmanager
def in_regions() -> Iterator[None]:
    """Grow regions from single nodes and two equal layers on, and run their nodes: results are eager's bit for bit."""
    sizes = {"FEWEST": 1, "ENOUGH": 1, "LAYERS": 2}
    with (
        mock.patch.dict("os.environ", GRAPHEX_REGIONS="on"),
        mock.patch.multiple(grow, **sizes),
        mock.patch.object(stage, "compile_region", uncompiled_region),
    ):
        yield


@contextmanager
def session(*, regions: bool = False) -> Iterator[Session]:
    """Compile many small functions quickly: Dynamo times the guards of each with a flushed cache, which is left out.

    No rewrite is left out because the tensors are small. `regions`: what no rule fuses runs in regions.
    """
    limits = dict.fromkeys(("recompile_limit", "accumulated_recompile_limit"), 10_000)
    with (
        mock.patch("torch._dynamo.guards.profile_guard_manager", return_value=0.0),
        mock.patch("graphex.passes.reinplace.WORTHWHILE", 1),
        torch._dynamo.config.patch(**limits),
        warnings.catch_warnings(),
        in_regions() if regions else nullcontext(),
    ):
        warnings.simplefilter("ignore", GraphexWarning)
        yield Session()
    torch._dynamo.reset()
