"""Replay a graph as one device graph, one capture for each key.

The first call of a key runs eagerly and warms the device up, the second captures, every later one replays:

    parameters, marked and written inputs   are captured by address; another address captures again
    a tensor that comes a second time       is captured by address; another one gives it a buffer and one more capture
    every other input                       is copied into a private buffer on every call, so it is never read stale
    outputs                                 are copied out, so a kept one stays right
    what a forward saves, and gradients     stay where they are; while one is in use, the graph is not replayed

A capture that fails leaves the key running eagerly, with the reason in the journal.
"""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from graphex.records import Captured, FellBack
from graphex.rewrite.compilation import Compilation, log
from graphex.runtime import program
from graphex.runtime.buffers import Arena, KeptValues, Kinds, OutputKind, OutputPlan
from graphex.runtime.capture_plan import CapturePlan, KeyReader, PieceInputs, Tail, host_outputs
from graphex.runtime.captured_graph import (
    CapturedGraph,
    FastReplay,
    LastRead,
    Pool,
    ReplayBody,
    SavedMemory,
    Slot,
    Store,
    capture_graph,
    free_what_was_read,
    pool_for,
    thread,
)
from graphex.runtime.codegen import Boxed
from graphex.runtime.fast_replay import Finish, make_replay
from graphex.runtime.guards import Addresses, CaptureKey, Picker, ReplayGuards, make_guard, picker
from graphex.runtime.program import counts, repeated, uncounted
from graphex.torch_private.dynamo import (
    batches_gradients,
    is_seen_by_a_mode,
    modes_enabled,
    profiler_enabled,
    without_modes,
)

REMEMBERED = 64  # keys seen once
RECORDED = 256  # captures of a graph that leave a record; a journal does not grow with calls
MOVES_IN_A_ROW = 8  # captures for moved inputs without a replay in between, after which moved calls run eagerly
CALLS_IN_USE = 2  # calls that found kept results in use, after which they are copied out
MOMENTS = 20  # of 0.1 ms that a call waits for kept results that are about to be dropped
MOST_KEPT = 2  # sizes whose graphs may keep results: each has memory of its own for them

_NOTHING: frozenset[int] = frozenset()
_IN_BETWEEN = "one call was made in the middle of another, by a finalizer, a signal handler or the code of an op"


class CapturedProgram(program.GraphProgram):
    """Captures and replays `run`."""

    may_replay = True

    def __init__(
        self,
        graph: program.ExecutableGraph,
        run: Boxed,
        static_inputs: Sequence[int],
        *,
        pool: Pool | None,
        kinds: dict[int, OutputKind],
        from_pieces: PieceInputs | None = None,
        tail: Tail | None = None,
        in_turn: bool = False,
    ) -> None:
        """`kinds` are the outputs that get out in another way than the options say (see `buffers`). `from_pieces` are
        the inputs that other pieces have made; None if all come from the user. `tail` runs after each replay.
        `in_turn`: the caller has the pool's turn, before and after a call.
        """
        gm, device, compilation = graph.gm, graph.device, graph.compilation
        config = compilation.config
        self._compilation, self._graph_name, self._device, self._run = compilation, graph.name, device, run
        self._functional = graph.functional  # None for a piece: the program around all pieces runs such calls
        self.is_whole = compilation.is_whole
        self._limit, self._force = config.capture_limit, config.force_recapture
        self._error_mode, self._captures_first = config.capture_error_mode, config.capture_first_call
        self._shares_pool = config.reuse_graph_pool_in_same_fx
        self._frees_in_order = graph.streams is None  # memory that one stream has read may still be read by another
        aliases = graph.aliases
        plan = self._plan = CapturePlan.of(gm, aliases, device, static_inputs, config, kinds, from_pieces, tail)
        super().__init__([*plan.written, *plan.moving])
        known = counts(gm) if from_pieces is None else {}  # the program around all pieces counts writes to its inputs
        self._count_in_call = _counting(repeated(plan.written, known, elsewhere=True))
        self._count_alone = _counting(repeated(plan.written, known, elsewhere=False))
        self._key = KeyReader(gm, aliases, device)
        self._guards = ReplayGuards(device, self._key.switches)
        self._pool = pool or pool_for(device, config.use_graph_pool)
        self._turn, self._in_turn = self._pool.turn, in_turn
        self._arena = Arena()
        self._store = Store(self._limit)
        self._failed: set[CaptureKey] = set()  # keys that could not be captured
        self._seen: OrderedDict[CaptureKey, dict[int, weakref.ref[Tensor]]] = (
            OrderedDict()
        )  # keys called once, plain inputs
        self._stays: set[int] = set()  # plain inputs that came a second time: read where they are
        self._must_copy: set[int] = set()  # plain inputs that were read where they are, and moved
        self._said: set[str] = set()  # reasons on record
        self._owners: set[int] = set()  # parameters whose end frees the graphs that were captured for them
        self._moves = 0  # captures for moved inputs since the last replay
        self._gave_up = False
        self._counter = graph.counter
        held = HeldResults(compilation, graph.name, plan.output_names, shares_pool=self._shares_pool)
        watch = held.watch if OutputKind.IN_PLACE in plan.kinds else None
        self._finish = Finish(self._counter, host_outputs(gm), plan.returns_one, watch)
        self._label = f"graphex replay: {graph.name}"
        self._share_with_step(graph)
        weakref.finalize(self, self._store.free).atexit = False

    def _share_with_step(self, graph: program.ExecutableGraph) -> None:
        """Tell the backward where the forward keeps what it saves."""
        self._saved = graph.saved if graph.phase == "backward" else None
        self._received: list[int] = []  # inputs that the forward's graphs keep
        self._in_use = 0  # calls that found kept results in use
        self._withdraw: Callable[[], None] = lambda: None  # says that a forward keeps nothing for its backward
        if graph.saved is not None and graph.phase == "forward":
            graph.saved.offer(self._store, may_be_kept=OutputKind.KEPT in self._plan.kinds)
            self._withdraw = graph.saved.withdraw

    def call(self, args: list[Any]) -> Any:
        if program.held_back:
            program.note(args)
            return self._run(args)
        if self._gave_up or self._device.is_capturing() or self._is_watched(args):
            return self._run(args)
        key, turn = self._key(args), self._turn
        if self._in_turn:
            graph = self._free_graph(key, args)
            return self._run(args) if graph is None else self._replay(graph, args)
        with turn.lock if thread.may_wait else turn.lock_if_free() as is_free:
            if not is_free or turn.is_running:  # the lock lets a finalizer or a signal handler in
                return self.run_in_between(args)
            may_wait, thread.may_wait, turn.is_running = thread.may_wait, False, True
            try:
                graph = self._free_graph(key, args)
                if graph is not None:
                    return self._replay(graph, args)
            finally:
                thread.may_wait, turn.is_running = may_wait, False
        return self._run(args)

    def run_in_between(self, args: list[Any]) -> Any:
        """Run a call eagerly that is made in the middle of another one, which uses the graphs and their memory."""
        if not self._device.is_capturing():
            self._say_once(_IN_BETWEEN)
        return self._run(args)

    def _is_watched(self, args: Sequence[Any]) -> bool:
        """Whether a mode, autograd or functorch sees the ops of this call, which a replay would hide."""
        if is_seen_by_a_mode():
            self._say_once("a TorchDispatchMode sees the ops of a call, and a replay has none")
            return True
        return self._functional is not None and bool(self._functional.why(args))

    def replayed(self, args: tuple[Any, ...], *, seen: frozenset[int] | None = None) -> Any:
        """The results of `call`, if it would replay and do nothing else; None if it has to be called."""
        if program.active:
            return None
        turn = self._turn
        with turn.lock if thread.may_wait else turn.lock_if_free() as is_free:
            if not is_free or turn.is_running:
                return None
            may_wait, thread.may_wait, turn.is_running = thread.may_wait, False, True
            try:
                graph = self._store.newest
                if graph is None or (fast := graph.fast) is None or fast.seen is not seen or not fast.fits(args):
                    return self._replayed_after_a_search(args, seen)
                if graph.pool.keepers and _keeper_in_the_way(graph) is not None:  # gradients, in a pool that is shared
                    return None
                results = fast.run(args)
                self._moves = 0
                self._counter["straight"] += 1
                return results
            finally:
                thread.may_wait, turn.is_running = may_wait, False

    def _replayed_after_a_search(self, args: tuple[Any, ...], seen: frozenset[int] | None) -> Any:
        if self._force or self._gave_up or profiler_enabled() or self._device.is_capturing() or self._is_watched(args):
            return None
        key = self._key(args)
        graph, moved = self._find(key, args)
        if graph is None or moved or graph.storage_replaced() or _keeper_in_the_way(graph) is not None:
            return None
        self._moves = 0
        graph.fast = self._fast(graph, key, seen)
        results = _without_modes(graph.fast.run, args)
        self._counter["straight"] += 1
        return results

    def _fast(self, graph: CapturedGraph, key: CaptureKey, seen: frozenset[int] | None) -> FastReplay:
        """The fast replay of calls that are like this one and do not come through AOTAutograd's wrappers."""
        stream = self._device.stream()
        values = self._key.values if self._key.varies else None
        fits = make_guard(self._guards, key, stream, graph.checked, values)
        guard = (lambda args: fits(args) and not graph.storage_replaced()) if graph.lends else fits
        keeps = seen is not None and graph.outputs.keeps_unseen and seen.isdisjoint(graph.outputs.kept_places)
        about = graph, self._pool, stream, self._count_alone, self._finish
        return FastReplay(guard, make_replay(*about, boxed=False, keeps=keeps), seen)

    def replayed_from(self, kept: KeptValues, args: list[Any]) -> Any:
        """The results of a backward whose graph reads the kept values where they are; None if it has to be called."""
        turn = self._turn
        if program.active or self._gave_up or self._force or batches_gradients():
            return None
        with turn.lock if thread.may_wait else turn.lock_if_free() as is_free:
            if not is_free or turn.is_running or kept.outputs.was_looked_at:
                return None
            may_wait, thread.may_wait, turn.is_running = thread.may_wait, False, True
            try:
                graph = self._store.newest
                fast = None if graph is None else graph.fast
                if fast is None or fast.reads is not kept.outputs or not fast.fits(args):
                    graph = self._reader(kept, args)
                if graph is None or graph.fast is None or _keeper_in_the_way(graph) is not None:
                    return None
                self._moves = 0
                self._counter["straight"] += 1
                return graph.fast.run(args)
            finally:
                thread.may_wait, turn.is_running = may_wait, False

    def _reader(self, kept: KeptValues, args: list[Any]) -> CapturedGraph | None:
        """The graph that reads the values kept by a forward's graph in place, if there is one for this backward."""
        filled, missing = kept.filled(args)
        if self._key.varies or self._finish.numbers is not None or profiler_enabled() or self._device.is_capturing():
            return None
        if self._is_watched(filled):
            return None
        key = self._key(filled)
        graph, moved = self._find(key, filled)
        if graph is None or moved or graph.storage_replaced() or not missing.issubset(graph.checked.indices):
            return None
        used = {*graph.copied, *graph.outputs.parts, *self._plan.written, *self._plan.hosts, *self._plan.unchecked}
        outputs, stream = kept.outputs, self._device.stream()
        if not used.isdisjoint(missing) or not graph.may_read(outputs):
            return None
        places = Addresses([index for index in graph.checked.indices if index not in missing], args)
        fits = make_guard(self._guards, key, stream, places)
        run = make_replay(graph, self._pool, stream, self._count_in_call, self._finish, boxed=True)
        guard = lambda args: fits(args) and graph.may_read(outputs) and not graph.storage_replaced()  # noqa: E731
        graph.fast = FastReplay(guard, run, reads=outputs)
        return graph

    def rehearse(self, args: list[Any]) -> None:
        """Warm up for a capture that the next call makes."""
        if not self._gave_up and not self._store.knows(self._key(args)):
            self._run(args)

    def free(self) -> None:
        with self._turn.lock:  # another thread may be replaying
            self._store.free()

    # -- finding or making the graph of a key -------------------------------------------------------------------

    def _free_graph(self, key: CaptureKey, args: list[Any]) -> CapturedGraph | None:
        """The graph to replay, if nothing that a replay would write to is in use; None to run this call eagerly."""
        self._look_for_gradients(args)
        graph = self._graph(key, args)
        return None if graph is None or self._is_in_use(graph, args) else graph

    def _graph(self, key: CaptureKey, args: list[Any]) -> CapturedGraph | None:
        """The graph of this call; None if it has none."""
        graph, moved = self._find(key, args)
        fits = graph is not None and not moved
        is_replaced = graph is not None and graph.storage_replaced()
        if fits and not self._force and not is_replaced:
            self._moves = 0
            return graph
        if not fits and key in self._failed:
            return None
        slot = self._slot(key, args)
        if self._saved is not None and not fits and self._saved_elsewhere(self._saved, args):
            if key not in self._seen and not self._store.knows(key):
                self._remember(key, args)
            return None
        if fits:
            why = "a tensor that shares the graph's memory was resized" if is_replaced else "force_recapture is set"
            return self._capture(slot, args, why)
        if self._store.knows(key):
            return self._capture_what_moved(slot, args, moved)
        if key in self._seen or self._captures_first or program.is_warming_up():
            return self._capture(slot, args, "")
        self._remember(key, args)
        return None

    def _find(self, key: CaptureKey, args: Sequence[Any]) -> tuple[CapturedGraph | None, frozenset[int]]:
        """A graph of this key, if there is one for these addresses, and the inputs that have moved since."""
        graph = self._store.latest(key)
        moved = _NOTHING if graph is None else graph.moved(args)
        if graph is not None and not moved:
            return graph, moved
        if key in self._failed or not self._store.knows(key):
            return None, moved
        graph = self._store.find(self._slot(key, args))
        return graph, moved if graph is None else graph.moved(args)

    def _slot(self, key: CaptureKey, args: Sequence[Any]) -> Slot:
        return Slot(key, (*self._plan.addresses(args), *(args[index].data_ptr() for index in self._received)))

    def _saved_elsewhere(self, saved: SavedMemory, args: Sequence[Any]) -> bool:
        """Whether the forward of this backward ran eagerly although forwards are usually replayed.

        Such a backward is not captured: its saved values are at addresses that will not come again. The first call
        finds out which inputs are where the forward's graphs have them.
        """
        lasting = saved.addresses()
        found = {index for index in self._plan.plain if args[index].data_ptr() in lasting}
        if not len(self._store) or not saved.is_kept:
            self._received = sorted(found)
        return saved.is_kept and (not found or not found.issuperset(self._received))

    def _is_in_use(self, graph: CapturedGraph, args: list[Any]) -> bool:
        """Whether results of an earlier replay, which were not copied, are in use: the graph must not be replayed."""
        if graph.last_read is not None and self._is_read_elsewhere(graph, graph.last_read, args):
            return True
        keeper = _keeper_in_the_way(graph)
        if keeper is None:
            return False
        self._in_use += 1
        if self._in_use == CALLS_IN_USE:
            self._in_use = 0
            if self._store.holds(graph.pool, keeper):
                kinds = (OutputKind.SHOWN,) if OutputKind.SHOWN in self._plan.kinds else (OutputKind.KEPT,)
                self._copy_out(f"{CALLS_IN_USE} calls were made while those of an earlier one were in use", kinds)
            else:
                self._leave_pool()
        return True

    def _is_read_elsewhere(self, graph: CapturedGraph, last_read: LastRead, args: list[Any]) -> bool:
        """Whether a replay would overwrite saved values that are still read: the user retains the autograd graph, or
        the forward's graph was freed and its memory may be another's.
        """
        if last_read.keeper.is_freed:
            self._store.discard(graph)
            return True
        if not last_read.is_shared(args):
            return False
        reason = "what the forward saved is held elsewhere (retain_graph=True), and a replay computes in its memory"
        if reason not in self._said:
            self._said.add(reason)
            record = FellBack(self._graph_name, "such calls run without the device graph", reason)
            self._compilation.journal.fall_back(record, warn=False)
        return True

    def _leave_pool(self) -> None:
        """Take a memory pool of its own: results of another graph are in use when this one is called."""
        self._store.free()
        self._pool = self._new_pool()
        what = "the graph has a memory pool of its own"
        reason = f"{CALLS_IN_USE} calls were made while results of another graph (such as gradients) were in use"
        self._compilation.journal.fall_back(FellBack(self._graph_name, what, reason), warn=False)

    def _copy_out(self, reason: str, kinds: Kinds = (OutputKind.KEPT, OutputKind.SHOWN)) -> None:
        """From now on copy results of these kinds out of the graph's memory instead of leaving them there."""
        now = [OutputKind.COPIED if kind in kinds else kind for kind in self._plan.kinds]
        self._plan = replace(self._plan, kinds=now)
        if OutputKind.KEPT in kinds:
            self._withdraw()
        self._store.free()
        what = "gradients are copied" if self._saved is not None else "what a forward saves is copied"
        what = what if OutputKind.KEPT in kinds else "large results of a forward are copied"
        record = FellBack(self._graph_name, f"{what} out of the device graph's memory", reason)
        self._compilation.journal.fall_back(record, warn=False)

    def _capture_what_moved(self, slot: Slot, args: list[Any], moved: frozenset[int]) -> CapturedGraph | None:
        self._must_copy.update(moved.intersection(self._plan.plain).difference(self._received))
        self._moves += 1
        # Other parameters are another model with the same code, and there may be as many of these as there is room for.
        elsewhere = moved.isdisjoint(self._plan.static) and moved.isdisjoint(self._received)
        patience = MOVES_IN_A_ROW if elsewhere else max(MOVES_IN_A_ROW, self._limit)
        if self._moves > patience:
            advice = "pass the same tensors"
            if not moved.isdisjoint(self._plan.received):
                advice = "the piece of the graph that makes it runs without capture"
            self._say_once(f"{self._plan.named(moved)} moved in {patience} calls in a row; {advice}")
            return None
        return self._capture(slot, args, f"moved: {self._plan.named(moved)}")

    def _remember(self, key: CaptureKey, args: list[Any]) -> None:
        """Note a call that warms up. A tensor that is the same object in the next call has a place of its own."""
        self._seen[key] = {index: weakref.ref(args[index]) for index in self._plan.plain}
        if len(self._seen) > max(REMEMBERED, self._limit):
            self._seen.popitem(last=False)
            if not len(self._store) and not self._counter["replays"]:
                self._say_once("the last calls all had other sizes, and a graph is captured for sizes seen before")

    def _capture(self, slot: Slot, args: list[Any], why_again: str) -> CapturedGraph | None:
        if OutputKind.KEPT in self._plan.kinds and not self._store.knows(slot.key) and self._store.keys >= MOST_KEPT:
            self._copy_out(f"calls have more than {MOST_KEPT} combinations of sizes")
        started, reserved = time.perf_counter(), self._device.reserved_bytes()
        if (seen := self._seen.pop(slot.key, None)) is not None:
            self._stays = {index for index, tensor in seen.items() if tensor() is args[index]}
        keeper = None if self._saved is None else self._saved.keeper(args, self._received)
        may_share = self._shares_pool and (keeper is None or keeper.outputs.given_up_to is None)
        pool = self._pool if may_share else self._new_pool()
        lasting = pool.kept_addresses()  # another graph puts an input there in every replay
        handed_on = {index for index in self._plan.plain if args[index].data_ptr() in lasting}
        stays = (self._stays | handed_on | set(self._received)) - self._must_copy
        self._pool.wait_for_last_replay()  # buffers of other graphs are written to
        free_what_was_read()
        last_read = None
        if keeper is not None and keeper.pool is pool and self._frees_in_order and self._plan.clone_input == "auto":
            last_read = keeper.give_up(args, stays.intersection(self._received))
        about = self._plan, args, stays, pool, self._arena, self._error_mode, last_read
        try:
            with uncounted([args[index] for index in self._plan.written]):
                graph = capture_graph(self._device, self._run, *about)
        except Exception as error:
            self._give_up(slot.key, error)
            return None
        graph.owner = self._watch(args)
        self._note_evictions(slot, self._store.put(slot, graph))
        status = "recaptured" if why_again else "captured"
        self._counter[status] += 1
        if self._counter["captured"] + self._counter["recaptured"] <= RECORDED:
            seconds, grown = time.perf_counter() - started, max(0, self._device.reserved_bytes() - reserved)
            sizes = (len(graph.checked.indices) + len(self._plan.unchecked), len(graph.copied))
            tail = "" if self._plan.tail is None else self._plan.output_names[self._plan.tail.place]
            record = Captured(self._graph_name, status, str(slot.key.values), seconds, *sizes, why_again, grown, tail)
            self._compilation.journal.add(record)
            log.info("%s: %s for sizes %s in %.3f s", self._graph_name, status, record.key, seconds)
        return graph

    def _look_for_gradients(self, args: Sequence[Any]) -> None:
        """Choose the pool of a first capture. A loop that zeroes gradients after the forward needs another pool for
        backwards.
        """
        if len(self._store):
            return
        if self._saved is not None:
            self._pool = self._pool.for_backwards
        elif any(args[index].grad is not None for index in self._plan.parameters if args[index].is_leaf):
            self._pool.split()

    def _new_pool(self) -> Pool:
        return pool_for(self._device, self._compilation.config.use_graph_pool, self._turn)

    def _note_evictions(self, slot: Slot, evicted: list[Slot]) -> None:
        before = self._counter["evicted"]
        self._counter["evicted"] += len(evicted)
        if not before and any(other.key != slot.key for other in evicted):
            reason = f"more than capture_limit={self._limit} combinations of sizes are in use"
            record = FellBack(self._graph_name, "the least recently used device graph was freed", reason)
            self._compilation.journal.fall_back(record, warn=False)

    def _watch(self, args: list[Any]) -> int | None:
        """Free captured graphs when the model's first parameter dies; Dynamo may keep the compiled code longer.

        Returns what stands for that parameter.
        """
        if not self._plan.parameters:
            return None
        first: Tensor = args[self._plan.parameters[0]]
        if id(first) not in self._owners:
            self._owners.add(id(first))
            weakref.finalize(first, _free_if_idle, weakref.ref(self), id(first)).atexit = False
        return id(first)

    def _give_up(self, key: CaptureKey, error: Exception) -> None:
        """Run the key eagerly from now on, and the whole graph if nothing of it was ever captured."""
        if len(self._failed) < REMEMBERED:
            self._failed.add(key)
            self._gave_up = not self._counter["captured"]
        else:
            self._gave_up = True
        if self._gave_up:
            self._withdraw()
        self._fall_back(error.__cause__ or error)

    def _fall_back(self, reason: object) -> None:
        self._compilation.fall_back(self._graph_name, "the graph runs without capture", reason)

    def _say_once(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            self._fall_back(reason)

    # -- replaying ----------------------------------------------------------------------------------------------

    def _replay(self, graph: CapturedGraph, args: list[Any]) -> Any:
        """Replay a call that comes through AOTAutograd's wrappers or from another piece."""
        stream = self._device.stream()
        if graph.boxed is None or graph.boxed[0] != stream:
            run = make_replay(graph, self._pool, stream, self._count_in_call, self._finish, boxed=True)
            graph.boxed = stream, run
        run = graph.boxed[1]
        if not profiler_enabled():
            return _without_modes(run, args)
        with torch.profiler.record_function(self._label):
            return _without_modes(run, args)


def _keeper_in_the_way(graph: CapturedGraph) -> int | None:
    """The graph whose results in use a replay could write to, after a moment in which they may be dropped.

    On a GPU backwards run in autograd's own thread. It drops what they read and return after the caller has its
    results, and needs the interpreter's lock for that, which a caller that goes on at once does not let go.
    """
    keeper = graph.pool.keeper_in_the_way(graph.number)
    for _ in range(MOMENTS):
        if keeper is None:
            return None
        time.sleep(1e-4)
        keeper = graph.pool.keeper_in_the_way(graph.number)
    return keeper


def _counting(places: list[int]) -> Picker | None:
    return picker(places) if places else None


def _without_modes(run: ReplayBody, args: Sequence[Any]) -> Any:
    """Run a replay where no TorchFunctionMode sees it: modes saw the user's calls when these were captured."""
    if not modes_enabled():
        return run(args)
    with without_modes():
        return run(args)


class HeldResults:
    """Warnings for `clone_output=False`, which hands out the graph's own memory: held results will be overwritten."""

    def __init__(self, compilation: Compilation, graph_name: str, names: list[str], *, shares_pool: bool) -> None:
        self._compilation, self._graph_name, self._names = compilation, graph_name, names
        self._shares_pool = shares_pool
        self._said: set[str] = set()
        self._last: OutputPlan | None = None

    def watch(self, outputs: OutputPlan) -> None:
        """Warn before a replay. Graphs of one pool overwrite each other's results; others only their own."""
        last, self._last = self._last if self._shares_pool else outputs, outputs
        if last is None or not last.may_be_held:
            return
        for place in last.still_held():
            name = self._names[place]
            if name in self._said:
                continue
            self._said.add(name)
            what = f"output {place} ('{name}') of the call before is still in use and may be overwritten"
            reason = "clone_output=False hands out the device graph's own memory; copy what you keep"
            self._compilation.fall_back(self._graph_name, what, reason, node=name)


def _free_if_idle(owner: weakref.ref[CapturedProgram], ident: int) -> None:
    """Free the graphs of a parameter that dies, at any time and in any thread: what is in use is left alone."""
    capturing = owner()
    if capturing is None:
        return
    capturing._owners.discard(ident)
    turn = capturing._turn
    if turn.lock.acquire(blocking=False):
        try:
            if not turn.is_running:
                capturing._store.free(ident)
        finally:
            turn.lock.release()
