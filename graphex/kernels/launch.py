"""Launches of kernels: on the device, or only compiled, to be launched later; for a whole graph before its first call.

    launch(kernel, grid, arguments, constants)         runs it; inside of `only_compiling()` it does the following
    compile_only(kernel, grid, arguments, constants)   compiles it; the tensors may be fake ones

`only_compiling()` and how a kernel is compiled, or found, are in `compiled.py`.

`JobConfig`, `run_job` and `Scratch` are for the families with several configurations: what one is, how it runs, and how
the fastest is found.

`precompile_kernels` compiles those of a graph beside each other, instead of one after the other in its first call, and
`compiling_kernels` does so while something else is compiled:

    graph:   y = rms_norm_linears(x, ...); a = attention(q, ...); z = rms_norm_linears(y, ...)

    here:    each distinct call goes through its launcher with fake tensors of the traced sizes, which launches nothing

A launcher chooses as it will in the call, from what is known; where it will measure, all candidates are compiled.
Symbolic sizes are taken as they were when the graph was traced.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import cache
from itertools import cycle
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.fx import Node
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import MockTensor

from graphex.errors import Refusal
from graphex.kernels.arithmetic import CONTRACTED, PTX
from graphex.kernels.compiled import (
    MOST_THREADS,
    Seen,
    compile_ahead,
    compiling_in_threads,
    keep_hashes,
    only_compiling,
    seen,
)
from graphex.kernels.layout import on_device_of, remember
from graphex.kernels.tuning import Candidate, choose, is_settled
from graphex.ops.definition import SPECS, has_kernel, launcher_of
from graphex.torch_private.symbolic import FakeTensor, FakeTensorMode, hint_of, pytree

Start = Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None]

OLDEST_WITH_PDL = (9, 0)
_WITH_PDL = {"PDL": True, "launch_pdl": True}
_WITHOUT_PDL = {"PDL": False}


def launch(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    if (noted := seen()) is None:
        keep_hashes(kernel)
        kernel[grid](*arguments, **_options(kernel, constants))
    else:
        noted.kernels.append(kernel.__name__)
        compile_only(kernel, grid, arguments, constants)


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """A launch without its tensors and the numbers of a call."""

    grid: tuple[int, ...]
    integers: tuple[int | None, ...]
    constants: dict[str, Any]

    def launch(self, kernel: Any, tensors: tuple[Any, ...], on: Tensor, numbers: tuple[float, ...] = ()) -> None:
        if all(self.grid):
            with on_device_of(on):
                launch(kernel, self.grid, (*tensors, *self.integers, *numbers), self.constants)


def compile_only(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    compile_ahead(kernel, grid, tuple(map(_typed, arguments)), _options(kernel, constants))


def _options(kernel: Any, constants: dict[str, Any]) -> dict[str, Any]:
    """The options that a kernel is compiled with: its constants, whether it is chained (`arithmetic.py`), and products
    contracted with sums unless the constants say otherwise.
    """
    if "PDL" not in kernel.arg_names:
        return CONTRACTED | constants
    chains = _has_pdl(torch.cuda.current_device() if torch.cuda.is_available() else -1)
    return CONTRACTED | constants | (_WITH_PDL if chains else _WITHOUT_PDL)


@cache
def _has_pdl(device: int) -> bool:
    """Whether a device starts a kernel before the one before it has ended."""
    return device >= 0 and bool(PTX.value) and torch.cuda.get_device_capability(device) >= OLDEST_WITH_PDL


def _typed(argument: Any) -> Any:
    """The argument, as a kernel is compiled for it. A fake tensor has no address: its type stands for one, aligned."""
    if isinstance(argument, tuple):
        return tuple(map(_typed, argument))
    return MockTensor(argument.dtype) if isinstance(argument, FakeTensor) else argument


def is_aligned(x: Tensor) -> bool:
    """Whether x begins where 16 bytes can be read at once."""
    return isinstance(x, FakeTensor) or x.data_ptr() % 16 == 0


def called(op: str, *args: Any) -> Any:
    """Call an op of graphex from a launcher of another. Where kernels are only compiled, its kernel is compiled too."""
    if seen() is not None and not isinstance(result := launcher_of(SPECS[op])(*args), Refusal):
        return result
    namespace, _, name = op.partition("::")
    return getattr(getattr(torch.ops, namespace), name)(*args)


Job = TypeVar("Job")
Given = TypeVar("Given", contravariant=True)
Made = TypeVar("Made", covariant=True)

LIBRARY = "library"  # the configuration that has no kernels of ours to compile
NO_ROOM = "the device has no room for the tile that is taken unmeasured"


class PreparedJob(Protocol[Given, Made]):
    """A configuration that is prepared for one job, and runs all jobs with the same layout."""

    def __call__(self, job: Given, start: Start = launch, /) -> Made: ...


class JobConfig(Protocol[Given, Made]):
    """A configuration of a kind of job."""

    @property
    def name(self) -> str: ...

    def prepare(self, job: Given) -> PreparedJob[Given, Made]: ...


Config = TypeVar("Config", bound=JobConfig[Any, Any])


def run_job(job: Any, on: Tensor, key: Any, known: dict[Any, Any], prepare: Callable[[Any], tuple[Any, bool]]) -> Any:
    """The results of a job, by the configuration that is `known` for its key or that `prepare` finds, or a refusal.

    `prepare` also says whether that answer is final.
    """
    with on_device_of(on):
        config = known.get(key)
        if config is None:
            config, is_final = prepare(job)
            if is_final and seen() is None:
                remember(known, key, config)
        if isinstance(config, Refusal):
            return config
        try:
            return config(job)
        except OutOfResources:
            return remember(known, key, Refusal(NO_ROOM))


class Scratch(ABC, Generic[Job]):
    """Measures configurations of a job, on the job and copies of it in turn: no input is in the device's cache then."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._jobs: Iterator[Job] | None = None

    @abstractmethod
    def jobs(self, job: Job) -> list[Job]:
        """The job and its copies."""

    def fastest(self, kind: str, signature: str, configs: Sequence[Config], default: str) -> tuple[Config, bool]:
        """The fastest of some configurations, and whether that choice is final. `default` is taken unmeasured."""
        candidates = self.candidates(configs)
        chosen = choose(kind, signature, list(candidates.values()), candidates[default])
        (config,) = (config for config in configs if config.name == chosen.name)
        return config, is_settled(kind, signature)

    def candidates(self, configs: Sequence[JobConfig[Job, Any]]) -> dict[str, Candidate]:
        return {config.name: self._candidate(config) for config in configs}

    def _candidate(self, config: JobConfig[Job, Any]) -> Candidate:
        prepared = config.prepare(self._job)
        is_ours = config.name != LIBRARY
        return Candidate(
            config.name,
            lambda: prepared(self._next()),
            (lambda: prepared(self._job, compile_only)) if is_ours else None,
        )

    def _next(self) -> Job:
        if self._jobs is None:
            self._jobs = cycle(self.jobs(self._job))
        return next(self._jobs)


# -- the kernels of a graph --------------------------------------------------------------------------------------------


UNKNOWN = -1  # a size that only running tells


@dataclass(frozen=True)
class StandIn:
    """The sizes, strides, type and device of a tensor: launchers look at nothing else."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def fake(self) -> Tensor:
        return torch.empty_strided(self.sizes, self.strides, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, eq=False)
class Call:
    """A call of an op; its tensors are stand-ins."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def launch(self) -> Any:
        args, kwargs = pytree.tree_map_only(StandIn, StandIn.fake, (self.args, self.kwargs))
        return launcher_of(SPECS[self.op])(*args, **kwargs)

    @property
    def on(self) -> str:
        """The sizes of its tensors: `1x4096, 6144x4096`."""
        tensors = [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, StandIn)]
        return ", ".join("x".join(map(str, tensor.sizes)) for tensor in tensors)


@dataclass(frozen=True)
class Planned:
    """The launches of calls that are alike, or why the kernel does not take them."""

    call: Call
    times: int
    seen: Seen
    declined: str


@dataclass
class Precompiled:
    """The launches of a graph's calls, the errors in finding them, and the kernels that compiled late or not at all."""

    planned: list[Planned] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    not_compiled: list[Exception] = field(default_factory=list)
    tried_again: list[Exception] = field(default_factory=list)


def precompile_kernels(nodes: Iterable[Node]) -> Precompiled:
    """Compile the kernels that the calls of a graph will launch. One that fails beside others is tried again alone."""
    calls = distinct_calls(nodes)
    made = _compiled(calls, MOST_THREADS) if calls else Precompiled()
    if failed := made.not_compiled:
        made = _compiled(calls, 1)
        made.tried_again = failed
    return made


@contextmanager
def compiling_kernels(nodes: Iterable[Node]) -> Iterator[None]:
    """Compile the kernels of calls while the block runs, and wait for them at its end. `precompile_kernels` finds them
    later, and says which did not compile.
    """
    calls = distinct_calls(nodes)
    if not calls:
        yield
        return
    apart, threads = copy_context(), compiling_in_threads()  # what the block itself launches does not go to the threads
    apart.run(threads.__enter__)
    try:
        apart.run(_planned, calls)
        yield
    finally:
        apart.run(threads.__exit__, None, None, None)


def _compiled(calls: dict[Call, int], threads: int) -> Precompiled:
    with compiling_in_threads(threads) as not_compiled:
        made = _planned(calls)
    made.not_compiled = not_compiled
    return made


def _planned(calls: dict[Call, int]) -> Precompiled:
    """The launches of calls. Their kernels are compiled where this is called, or by its threads."""
    made = Precompiled()
    with FakeTensorMode():
        for call in sorted(calls, key=_is_quick):
            try:
                with only_compiling() as seen:
                    result = call.launch()
            except Exception as error:
                made.errors.append(error)
            else:
                declined = result.reason if isinstance(result, Refusal) else ""
                made.planned.append(Planned(call, calls[call], seen, declined))
    order = list(calls)
    made.planned.sort(key=lambda each: order.index(each.call))
    return made


def _is_quick(call: Call) -> bool:
    """Ops that take long to compile come first: the others are done by the time they are."""
    return not SPECS[call.op].compiles_slowly


def distinct_calls(nodes: Iterable[Node]) -> dict[Call, int]:
    """The calls of a graph that have kernels, those that are alike as one, and how many there are of each."""
    calls = [call for node in nodes if (call := _call_of(node)) is not None]
    first = {str(call): call for call in reversed(calls)}
    return {first[text]: times for text, times in Counter(map(str, calls)).items()}


def _call_of(node: Node) -> Call | None:
    """None for a node without a kernel, or with sizes that are not known before it runs."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    name = node.target.name().partition(".")[0]
    values = [each.meta.get("val") for each in node.all_input_nodes]
    devices = [value.device for value in values if isinstance(value, Tensor)]
    if not devices or not has_kernel(name, devices[0]):
        return None
    args, kwargs = pytree.tree_map_only(Node, _standing_in, (tuple(node.args), dict(node.kwargs)))
    leaves = pytree.tree_leaves((args, kwargs))
    sizes = [size for leaf in leaves if isinstance(leaf, StandIn) for size in (*leaf.sizes, *leaf.strides)]
    return None if UNKNOWN in sizes else Call(name, args, kwargs)


def _standing_in(node: Node) -> Any:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return StandIn(_numbers(value.shape), _numbers(value.stride()), value.dtype, value.device)
    return hint_of(value, UNKNOWN) if isinstance(value, torch.SymInt) else value


def _numbers(sizes: Sequence[int | torch.SymInt]) -> tuple[int, ...]:
    return tuple(hint_of(size, UNKNOWN) for size in sizes)
