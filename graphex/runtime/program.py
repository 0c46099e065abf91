"""A graph that is to run, the programs that run it, how a thread warms them up, and what autograd sees of them.

    ExecutableGraph   the graph after all passes, and everything that decides how it runs
    Program           call, written inputs, replay, free: all that the front end, `verify` and the loops know of a graph
      Eager           generated code, called as it is
      Deferred        a program that is made beside another one's first call
      GraphProgram    captured graphs, which a thread can warm up: `capture`, `pieces`, `padding`

A loop that captures its calls as a whole holds back the captures inside (`captures_held_back`).

`graphex.warm_up` and `graphex.replayer` warm up, for calls of their own thread only: a call captures at once, what it
writes to its inputs is undone, and the graphs that it ran are listed.

AOTAutograd has dealt with gradients, so a call runs below autograd, in generated code that writes in place. Some calls
must not, and are neither captured nor replayed:

    forward-mode AD     an input carries a tangent
    functorch           vmap, grad, jvp ... are around the call, so inputs may be wrapped tensors

For these the functional graph runs op by op (`FunctionalProgram`): a derivative needs memory that the generated code
writes over, and vmap cannot write a batch into a tensor without one. Ops of graphex run as their references, which have
every derivative.

Version counters show autograd as many writes as the user's program makes, however they are run:

    x.add_(1); x[0].mul_(2)                     two writes, whatever ops they have become, replayed or not

AOTAutograd counts one write itself before each call, for an input of which autograd might have saved something.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node

from graphex.analysis import Aliases, node_line
from graphex.analysis.dependencies import writes_to
from graphex.analysis.effects import region_of
from graphex.analysis.graphs import attribute_of
from graphex.analysis.happens_before import Memory
from graphex.device import Device, StreamSet
from graphex.ops.definition import SPECS
from graphex.ops.scope import NOTHING_TO_RUN
from graphex.rewrite.compilation import Compilation
from graphex.runtime.buffers import KeptValues
from graphex.runtime.captured_graph import SavedMemory
from graphex.runtime.codegen import Boxed, Code
from graphex.torch_private.dynamo import (
    compile_lock,
    compile_lock_if_free,
    dual_level,
    forget_modes_of_others,
    has_tangent,
    inside,
    is_transformed,
    of_thread,
)
from graphex.torch_private.graphs import copy_graph
from graphex.torch_private.memory import set_versions, sets_versions


@dataclass(frozen=True)
class Callbacks:
    """Functions of `debug` and `cache` that the runtime calls. `frontend.compiler` passes them in, because these rooms
    stand above `runtime`.
    """

    write_code: Callable[[Code, GraphModule], str]
    in_random_orders: Callable[[str, GraphModule, Counter[str]], Boxed]
    dump_data: Callable[[ExecutableGraph], Boxed]
    verify: Callable[[ExecutableGraph, Program], Program]
    await_regions: Callable[[ExecutableGraph, Program], Program]


@dataclass(frozen=True)
class ExecutableGraph:
    """A graph after all passes, and everything that decides how it runs. A piece of a graph is one too.

    `functional` runs the calls that autograd or functorch has to see; None for a piece. `version` tells a second
    version of a graph from the first. `streams` are those of the device that it runs on, and `memory` knows the
    storages of values on them, where the graph alone does not show them. `saved` is what the graphs of a training step
    share.
    """

    compilation: Compilation
    name: str
    phase: str  # inference, forward or backward
    gm: GraphModule
    device: Device
    static_inputs: Sequence[int]
    functional: FunctionalProgram | None
    callbacks: Callbacks
    version: str = ""
    piece: int | None = None
    streams: StreamSet | None = None
    memory: Memory | None = None
    saved: SavedMemory | None = None

    @property
    def counter(self) -> Counter[str]:
        return self.compilation.journal.counter(self.name)

    @cached_property
    def aliases(self) -> Aliases:
        """The facts about its memory. No pass comes any more, so they stay true."""
        return Aliases(self.gm.graph)

    @property
    def written(self) -> list[int]:
        return self.aliases.written_inputs()

    @property
    def folder(self) -> str:
        """Where its debug files go."""
        piece = "" if self.piece is None else f"piece_{self.piece}"
        return "/".join(filter(None, (self.phase, self.version, piece)))

    def fall_back(self, what: str, reason: object, at: Node | None = None) -> None:
        """Record that something is done without, and why."""
        where = {} if at is None else {"node": at.name, "line": node_line(at)}
        self.compilation.fall_back(self.name, what, reason, **where)


class Program(ABC):
    """A compiled graph. It is called with one list of inputs, which it empties, and returns what the graph returns."""

    may_replay = False  # whether `replayed` ever has results

    def __init__(self, written: Sequence[int] = ()) -> None:
        """`written` are the inputs that the graph writes to."""
        self._boxed_call = True  # AOTAutograd asks for it; its wrappers copy it, so it is on the instance
        self.written = list(written)

    @abstractmethod
    def __call__(self, args: list[Any]) -> Any: ...

    def replayed(self, args: tuple[Any, ...], *, seen: frozenset[int] | None = None) -> Any:
        """The results of a call that is a replay and nothing else; None if the program has to be called.

        With `seen`, the forward of a training step may return None for the values that it keeps, and one `KeptValues`
        behind its results, if none of the results that are `seen` is kept.
        """
        return None

    def replayed_from(self, kept: KeptValues, args: list[Any]) -> Any:
        """`replayed` for a backward. `args` holds None where the backward reads a value that the forward kept."""
        return None

    def free(self) -> None:
        """Free the captured graphs, if there are any; the next call of a key captures again."""
        return


class Around(Program):
    """A layer around a program. It hands on every question that its class does not answer itself."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.written)
        self.may_replay = program.may_replay
        self._program = program

    def __call__(self, args: list[Any]) -> Any:
        return self._program(args)

    def replayed(self, args: tuple[Any, ...], *, seen: frozenset[int] | None = None) -> Any:
        return self._program.replayed(args, seen=seen)

    def replayed_from(self, kept: KeptValues, args: list[Any]) -> Any:
        return self._program.replayed_from(kept, args)

    def free(self) -> None:
        self._program.free()


class Eager(Program):
    """A program that is not captured. What it writes to its inputs is undone while its thread warms up."""

    def __init__(self, run: Boxed, written: Sequence[int] = ()) -> None:
        super().__init__(written)
        self._run = run

    def __call__(self, args: list[Any]) -> Any:
        if not active:
            return self._run(args)
        note(args)
        if not _thread.warming or not self.written:
            return self._run(args)
        with restored([args[index] for index in self.written]):
            return self._run(args)


class Deferred(Program):
    """A program that is built in its first call, or before that by a thread (`made_beside`).

    The builder holds the lock of compilations: loading code changes Inductor's configuration for a moment.
    """

    def __init__(self, make: Callable[[], Program]) -> None:
        super().__init__()
        self._make: Callable[[], Program] | None = make  # dropped with all that it holds once it was called
        self._made: Program | None = None

    def made(self) -> Program:
        if self._made is None:
            with compile_lock:
                if self._make is not None:
                    self._made, self._make = self._make(), None
        assert self._made is not None
        return self._made

    @contextmanager
    def made_beside(self, device: int | None) -> Iterator[None]:
        """Inside, a thread makes the program. It has ended when the block has: no capture and no fork meets it.

        While another thread compiles, the program is left to its first call. `device` is the index of the accelerator
        that this thread uses, if it uses one.
        """
        thread = threading.Thread(target=self._make_if_free, args=(device,), name="graphex program")
        with suppress(RuntimeError):  # there are as many threads as there may be: it is left to its first call
            thread.start()
        try:
            yield
        finally:
            if thread.ident is not None:
                thread.join()
                forget_modes_of_others()

    def _make_if_free(self, device: int | None) -> None:
        if device is not None:
            torch.accelerator.set_device_index(device)
        with compile_lock_if_free() as is_held, suppress(Exception):  # the first call raises it
            if is_held:
                self.made()

    def __call__(self, args: list[Any]) -> Any:
        return self.made()(args)

    def replayed(self, args: tuple[Any, ...], *, seen: frozenset[int] | None = None) -> Any:
        return self.made().replayed(args, seen=seen)

    def replayed_from(self, kept: KeptValues, args: list[Any]) -> Any:
        return self.made().replayed_from(kept, args)

    def free(self) -> None:
        if self._made is not None:
            self._made.free()


class GraphProgram(Program):
    """A program with captured graphs in it."""

    is_whole = True  # False where Python runs a part of the compiled function, before or after this graph
    reads_numbers = False  # whether the graph returns numbers that depend on data

    def __call__(self, args: list[Any]) -> Any:
        return _run_in_session(self, args) if active else self.call(args)

    @abstractmethod
    def call(self, args: list[Any]) -> Any:
        """Run for these inputs; `__call__` deals with a thread that warms up."""

    def rehearse(self, args: list[Any]) -> None:
        """Run eagerly, if a capture for these inputs needs that first; the programs inside rehearse for themselves."""
        return


# -- warming up --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ran:
    """One run of a compiled graph: the program, what it was given and what it returned.

    `is_whole`: the graph is all that the function does, nothing of it ran in Python before or after.
    """

    program: GraphProgram
    args: list[Any]
    results: Any
    is_whole: bool


class _Thread(threading.local):
    warming = False
    ran: list[Ran] | None = None
    depth = 0
    is_whole = True


_thread = _Thread()
_lock = threading.Lock()
active = 0  # how many threads warm up: while there are none, a call looks no further


def is_warming_up() -> bool:
    """Whether calls capture at once instead of waiting for the second call of a key."""
    return _thread.warming


@contextmanager
def warming_up() -> Iterator[list[Ran]]:
    """Calls of this thread capture at once and leave their inputs as they were. Yields the graphs that were run.

    A graph that is a piece of another is not listed.
    """
    global active
    found: list[Ran] = []
    with _lock:
        active += 1
    before = _thread.warming, _thread.ran
    _thread.warming, _thread.ran = True, found
    try:
        yield found
    finally:
        _thread.warming, _thread.ran = before
        with _lock:
            active -= 1


Note = Callable[[list[Any]], None]
held_back: list[Note] = []  # of the whole process: a capture of one thread may not bear that of another
_NOTES = "graphex captures held back"


@contextmanager
def captures_held_back(note: Note) -> Iterator[None]:
    """Inside, graphs run as generated code, because something around them is captured.

    `note` sees the inputs of each that this thread runs, or a backward of this thread.
    """
    global active
    with _lock:
        active += 1
        held_back.append(note)
    try:
        with inside(_NOTES, note):
            yield
    finally:
        with _lock:
            active -= 1
            held_back.remove(note)


def note(args: list[Any]) -> None:
    """Show the inputs of a graph to the innermost `note` of `captures_held_back`."""
    for see in of_thread(_NOTES)[-1:]:
        see(args)


def _run_in_session(program: GraphProgram, args: list[Any]) -> Any:
    """Run a program while some thread, maybe this one, warms up."""
    if not _thread.warming:
        return program.call(args)
    given, outermost = list(args), _thread.depth == 0
    written = [given[index] for index in program.written]
    before = [tensor.clone() for tensor in written]
    # A program in pieces, or a padded one, is whole if all the graphs inside of it are.
    _thread.is_whole = program.is_whole and (outermost or _thread.is_whole)
    _thread.depth += 1
    try:
        program.rehearse(list(given))
        _restore(written, before)
        results = program.call(args)
    finally:
        _thread.depth -= 1
    if outermost:
        _restore(written, before)
        assert _thread.ran is not None
        _thread.ran.append(Ran(program, given, results, _thread.is_whole))
    return results


@contextmanager
def restored(tensors: list[Tensor]) -> Iterator[None]:
    """Put back, in the end, the values that these tensors have now."""
    before = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        _restore(tensors, before)


def _restore(tensors: list[Tensor], before: list[Tensor]) -> None:
    with torch.no_grad():
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)


# -- autograd's view of a graph ----------------------------------------------------------------------------------------


TANGENT = "an input carries a tangent (forward-mode AD)"
TRANSFORM = "the call is inside of a transform of torch.func (vmap, grad, jvp ...), or gradients are batched"


class FunctionalProgram:
    """The functional graph of a program, op by op, for calls that autograd or functorch has to see."""

    def __init__(
        self, compilation: Compilation, graph_name: str, gm: GraphModule, functional: Callable[[], Graph]
    ) -> None:
        """`gm` holds the attributes that the functional graph reads. `functional` is called when the graph is needed,
        which in most processes it never is.
        """
        self._compilation, self._graph_name = compilation, graph_name
        self._said: set[str] = set()
        self._gm, self._functional = gm, functional

    def use(self, gm: GraphModule, functional: Graph) -> None:
        """Run this graph from now on."""
        self._gm, self._functional = gm, lambda: functional
        vars(self).pop("held", None)

    @cached_property
    def held(self) -> list[Tensor]:
        """The tensors that the graph itself holds."""
        targets = {str(node.target) for node in self._functional().nodes if node.op == "get_attr"}
        values = [attribute_of(self._gm, target) for target in sorted(targets)]
        return [value for value in values if isinstance(value, Tensor)]

    def module(self) -> GraphModule:
        """A copy of the functional graph, for passes."""
        return GraphModule(self._gm, copy_graph(self._functional()))

    def why(self, args: Sequence[Any]) -> str:
        """Why a call has to run here; empty if it need not."""
        if is_transformed():
            return TRANSFORM
        if dual_level() < 0:
            return ""
        return TANGENT if carry_tangents((*args, *self.held)) else ""

    def __call__(self, args: list[Any], reason: str) -> Any:
        if reason not in self._said:
            self._said.add(reason)
            self._compilation.fall_back(self._graph_name, "the graph runs op by op, above autograd", reason)
        given = list(args)
        args.clear()
        results = _References(self._gm, graph=self._functional()).run(*given, enable_io_processing=False)
        return tuple(results) if isinstance(results, (list, tuple)) else results


def carry_tangents(values: Sequence[Any]) -> bool:
    return dual_level() >= 0 and any(has_tangent(value) for value in values if isinstance(value, Tensor))


class _References(Interpreter):
    """Runs a graph on one stream, and the reference of an op of graphex in place of the op."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if not isinstance(target, torch._ops.OpOverload):
            return super().call_function(target, args, dict(kwargs))
        if target._schema.name in NOTHING_TO_RUN:
            return None
        spec = SPECS.get(target.name())
        function: Callable[..., Any] = spec.reference if spec is not None and spec.defined_here else target
        return super().call_function(function, args, dict(kwargs))


# -- version counters --------------------------------------------------------------------------------------------------


COUNTED = "graphex_counted"  # on an input: AOTAutograd counts one of its writes


@dataclass(frozen=True)
class Count:
    """How many writes to an input the program makes, and how many AOTAutograd counts."""

    writes: int
    elsewhere: int


def counts(gm: GraphModule) -> dict[int, Count]:
    """The known counts of writes to the inputs of a graph, by place."""
    inputs = gm.graph.find_nodes(op="placeholder")
    noted = {place: found for place, node in enumerate(inputs) if (found := writes_to(node)) is not None}
    return {place: Count(found.count, int(COUNTED in inputs[place].meta)) for place, found in noted.items()}


def repeated(written: list[int], known: dict[int, Count], *, elsewhere: bool) -> list[int]:
    """The places of written inputs, each as often as its writes are to be counted; at least once if nothing is known.

    `elsewhere`: AOTAutograd's wrapper is around the call.
    """
    found: list[int] = []
    for place in written:
        count = known.get(place, Count(1, 0))
        found += [place] * (count.writes - (count.elsewhere if elsewhere else 0))
    return found


@contextmanager
def uncounted(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Restore version counters after a capture: its ops count writes although nothing is computed."""
    seen = [tensor for tensor in tensors if not tensor.is_inference()] if sets_versions() else []
    before = [tensor._version for tensor in seen]
    try:
        yield
    finally:
        set_versions(seen, before)


def counted(run: Boxed, graph: ExecutableGraph, *, in_pieces: bool = False) -> Boxed:
    """`run` counts the writes of its ops, or of each piece, but those of regions; the result counts those of the user's
    program.
    """
    gm, aliases = graph.gm, graph.aliases
    known = counts(gm)
    wrong: dict[int, Count] = {}
    unseen: set[int] = set()  # written to by regions, and counted by nothing else
    for place, value in enumerate(gm.graph.find_nodes(op="placeholder")):
        writes = aliases.writes(value)
        by_ops = sum(region_of(node) is None for node in writes)
        wanted = known.get(place, Count(len(writes), 0))
        unseen.update([place] if by_ops < len(writes) and not wanted.elsewhere else [])
        if (place in known or place in unseen) and (in_pieces or by_ops != wanted.writes - wanted.elsewhere):
            wrong[place] = wanted
    if not wrong or not sets_versions():
        return run

    def count(args: list[Any]) -> Any:
        written = [(args[place], place, count) for place, count in wrong.items() if not args[place].is_inference()]
        before = [tensor._version for tensor, _, _ in written]
        tensors = [tensor for tensor, _, _ in written]
        try:
            results = run(args)
        except BaseException:
            # the writes until then, less those that AOTAutograd has counted ahead
            least = [version + (place in unseen) for version, (_, place, _) in zip(before, written, strict=True)]
            seen = [tensor._version - count.elsewhere for tensor, _, count in written]
            set_versions(tensors, list(map(max, least, seen)))
            raise
        set_versions(tensors, [v + c.writes - c.elsewhere for v, (_, _, c) in zip(before, written, strict=True)])
        return results

    return count
