"""Replay a graph as one device graph, one capture for each key.

The first call of a key runs eagerly and warms the device up, the second captures, every later one replays:

    parameters, marked and written inputs   are captured by address; another address captures again
    a tensor that comes a second time       is captured by address; another one gives it a buffer and one more capture
    every other input                       is copied into a private buffer on every call, so it is never read stale
    outputs                                 are copied out, so a kept one stays right

A capture that fails leaves the key running eagerly, with the reason in the journal.
"""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from graphex.analysis import Aliases
from graphex.device import Device
from graphex.records import Captured, FellBack
from graphex.rewrite.compilation import Compilation
from graphex.runtime import session
from graphex.runtime.above import AboveAutograd, counts, repeated, uncounted
from graphex.runtime.buffers import Arena, OutputPlan
from graphex.runtime.captured_graph import Entry, Given, Plan, Slot, Store, make_entry
from graphex.runtime.codegen import Boxed
from graphex.runtime.fast_replay import Picker, Questions, Shortcut, picker, straight_run, what_fits
from graphex.runtime.keys import Key, KeyReader, host_outputs
from graphex.runtime.pools import Pool, pool_for
from graphex.torch_private.dynamo import is_seen_by_a_mode, modes_enabled, profiler_enabled, without_modes
from graphex.torch_private.memory import count_writes

REMEMBERED = 64  # keys seen once
RECORDED = 256  # captures of a graph that leave a record; a journal does not grow with calls
MOVES_IN_A_ROW = 8  # captures for moved inputs without a replay in between, after which moved calls run eagerly

_NOTHING: frozenset[int] = frozenset()


class Capturing:
    """A boxed callable that captures and replays `run`."""

    def __init__(
        self,
        compilation: Compilation,
        graph_name: str,
        device: Device,
        run: Boxed,
        gm: GraphModule,
        static_inputs: Sequence[int],
        *,
        pool: Pool | None = None,
        ways: dict[int, str] | None = None,
        given: Given | None = None,
        above: AboveAutograd | None = None,
    ) -> None:
        """`ways` are the outputs that get out in another way than the options say (see `outputs`). `given` is what a
        piece gets from others of its graph; None for what takes its inputs from the user. `above` is None for a piece:
        what runs all of them asks for the whole graph.
        """
        self._boxed_call = True  # on the instance: wrappers copy what they find there
        self._compilation, self._graph_name, self._device, self._run = compilation, graph_name, device, run
        self._above = above
        config = compilation.config
        self._limit, self._force = config.capture_limit, config.force_recapture
        self._error_mode = config.capture_error_mode
        self._shares_pool = config.reuse_graph_pool_in_same_fx
        aliases = Aliases(gm.graph)
        self._plan = Plan.of(gm, aliases, device, static_inputs, config, ways or {}, given)
        known = counts(gm) if given is None else {}  # who runs the pieces of a graph sees to its inputs
        self._count_in_call, self._count_alone = (
            picker(places) if (places := repeated(self._plan.written, known, elsewhere=elsewhere)) else None
            for elsewhere in (True, False)
        )
        self._returns_one = self._plan.returns_one
        self._key = KeyReader(gm, aliases, device)
        self._questions = Questions(device, self._key.switches)
        self._numbers = host_outputs(gm)
        self._pool = pool or pool_for(device, config.use_graph_pool)
        self._lock = self._pool.lock
        self._arena = Arena()
        self._store = Store(self._limit)
        self._failed: set[Key] = set()
        self._seen: OrderedDict[Key, dict[int, weakref.ref[Tensor]]] = OrderedDict()
        self._stays: set[int] = set()
        self._must_copy: set[int] = set()
        self._said: set[str] = set()
        self._owners: set[int] = set()
        self._last: OutputPlan | None = None
        self._moves = 0
        self._gave_up = False
        self._counter = compilation.journal.counter(graph_name)
        self._label = f"graphex replay: {graph_name}"
        weakref.finalize(self, self._store.free).atexit = False

    def __call__(self, args: list[Any]) -> Any:
        return session.run_in_session(self, args) if session.active else self.call(args)

    def call(self, args: list[Any]) -> Any:
        if self._gave_up or self._device.is_capturing() or self._is_watched(args):
            return self._run(args)
        key = self._key(args)
        with self._lock:
            if self._pool.is_running:  # by a finalizer or a signal handler, which the lock lets in
                self._say_once("one call was made in the middle of another, by a finalizer or a signal handler")
                return self._run(args)
            self._pool.is_running = True
            try:
                entry = self._entry(key, args)
                if entry is not None:
                    return self._replay(entry, args)
            finally:
                self._pool.is_running = False
        return self._run(args)

    def _is_watched(self, args: Sequence[Any]) -> bool:
        """Whether a mode, autograd or functorch sees the ops of this call, which a replay would hide."""
        if is_seen_by_a_mode():
            self._say_once("a TorchDispatchMode sees the ops of a call, and a replay has none")
            return True
        return self._above is not None and bool(self._above.why(args))

    def replayed(self, args: tuple[Any, ...]) -> Any:
        """The results of `call`, if it would replay and do nothing else; None if it has to be called."""
        if session.active:
            return None
        pool = self._pool
        with pool.lock:
            if pool.is_running:
                return None
            pool.is_running = True
            try:
                entry = self._store.newest
                if (
                    entry is None
                    or (shortcut := entry.shortcut) is None
                    or not shortcut.fits(args)
                    or ((run := shortcut.run) is None and entry.is_robbed())
                ):
                    return self._replayed_after_a_search(args)
                results = (
                    run(args)
                    if run is not None
                    else self._replay_unseen(entry, args, shortcut.stream, self._count_alone)
                )
                self._moves = 0
                self._counter["straight"] += 1
                return results
            finally:
                pool.is_running = False

    def _replayed_after_a_search(self, args: tuple[Any, ...]) -> Any:
        if self._force or self._gave_up or profiler_enabled() or self._device.is_capturing() or self._is_watched(args):
            return None
        key = self._key(args)
        entry, moved = self._find(key, args)
        if entry is None or moved or entry.is_robbed():
            return None
        self._moves = 0
        stream = self._device.stream()
        entry.shortcut = self._shortcut(entry, key, stream)
        results = self._replay_now(entry, args, stream, self._count_alone)
        self._counter["straight"] += 1
        return results

    def _shortcut(self, entry: Entry, key: Key, stream: Any) -> Shortcut:
        values = self._key.values if self._key.varies else None
        fits = what_fits(self._questions, key, stream, entry.checked, values)
        is_plain = self._numbers is None and not self._returns_one
        run = straight_run(entry, self._pool, stream, self._counter, self._count_alone) if is_plain else None
        return Shortcut(fits, stream, run)

    def rehearse(self, args: list[Any]) -> None:
        """Warm up for a capture that the next call makes."""
        if not self._gave_up and not self._store.knows(self._key(args)):
            self._run(args)

    @property
    def written(self) -> list[int]:
        return [*self._plan.written, *self._plan.moving]

    @property
    def is_whole(self) -> bool:
        return self._compilation.is_whole

    def free(self) -> None:
        """Give up every captured graph; the next call of a key captures again."""
        self._store.free()

    # -- finding or making the graph of a key -------------------------------------------------------------------

    def _entry(self, key: Key, args: list[Any]) -> Entry | None:
        """The graph to replay; None to run this call eagerly."""
        entry, moved = self._find(key, args)
        fits = entry is not None and not moved
        is_robbed = entry is not None and entry.is_robbed()
        if fits and not self._force and not is_robbed:
            self._moves = 0
            return entry
        if not fits and key in self._failed:
            return None
        slot = Slot(key, self._plan.addresses(args))
        if fits:
            why = "a tensor that shares the graph's memory was resized" if is_robbed else "force_recapture is set"
            return self._capture(slot, args, why)
        if self._store.knows(key):
            return self._capture_what_moved(slot, args, moved)
        if key in self._seen or session.is_warming_up():
            return self._capture(slot, args, "")
        self._remember(key, args)
        return None

    def _find(self, key: Key, args: Sequence[Any]) -> tuple[Entry | None, frozenset[int]]:
        """A graph of this key, if there is one for these addresses, and what has moved since it was captured."""
        entry = self._store.latest(key)
        moved = _NOTHING if entry is None else entry.moved(args)
        if entry is not None and not moved:
            return entry, moved
        if key in self._failed or not self._store.knows(key):
            return None, moved
        entry = self._store.find(Slot(key, self._plan.addresses(args)))
        return entry, moved if entry is None else entry.moved(args)

    def _capture_what_moved(self, slot: Slot, args: list[Any], moved: frozenset[int]) -> Entry | None:
        self._must_copy.update(moved.intersection(self._plan.plain))
        self._moves += 1
        # Other parameters are another model with the same code, and there may be as many of these as there is room for.
        patience = MOVES_IN_A_ROW if moved.isdisjoint(self._plan.static) else max(MOVES_IN_A_ROW, self._limit)
        if self._moves > patience:
            advice = "pass the same tensors"
            if not moved.isdisjoint(self._plan.received):
                advice = "the piece of the graph that makes it runs without capture"
            self._say_once(f"{self._plan.named(moved)} moved in {patience} calls in a row; {advice}")
            return None
        return self._capture(slot, args, f"moved: {self._plan.named(moved)}")

    def _remember(self, key: Key, args: list[Any]) -> None:
        """This call warms up. A tensor that is the same object in the next call has a place of its own."""
        self._seen[key] = {index: weakref.ref(args[index]) for index in self._plan.plain}
        if len(self._seen) > max(REMEMBERED, self._limit):
            self._seen.popitem(last=False)
            if not len(self._store) and not self._counter["replays"]:
                self._say_once("the last calls all had other sizes, and a graph is captured for sizes seen before")

    def _capture(self, slot: Slot, args: list[Any], why_again: str) -> Entry | None:
        started, reserved = time.perf_counter(), self._device.reserved_bytes()
        if (seen := self._seen.pop(slot.key, None)) is not None:
            self._stays = {index for index, tensor in seen.items() if tensor() is args[index]}
        pool = self._pool if self._shares_pool else self._new_pool()
        stays = self._stays - self._must_copy
        self._pool.take_turn()  # buffers of other graphs are written to
        try:
            with uncounted([args[index] for index in self._plan.written]):
                entry = make_entry(
                    self._device, self._run, self._plan, args, stays, pool, self._arena, self._error_mode
                )
        except Exception as error:
            self._give_up(slot.key, error)
            return None
        entry.owner = self._watch(args)
        self._note_evictions(slot, self._store.put(slot, entry))
        status = "recaptured" if why_again else "captured"
        self._counter[status] += 1
        if self._counter["captured"] + self._counter["recaptured"] <= RECORDED:
            seconds, grown = time.perf_counter() - started, max(0, self._device.reserved_bytes() - reserved)
            sizes = (len(entry.checked.indices) + len(self._plan.unchecked), len(entry.copied))
            record = Captured(self._graph_name, status, self._key.text(slot.key), seconds, *sizes, why_again, grown)
            self._compilation.journal.add(record)
        return entry

    def _new_pool(self) -> Pool:
        return pool_for(self._device, self._compilation.config.use_graph_pool)

    def _note_evictions(self, slot: Slot, evicted: list[Slot]) -> None:
        before = self._counter["evicted"]
        self._counter["evicted"] += len(evicted)
        if not before and any(other.key != slot.key for other in evicted):
            reason = f"more than capture_limit={self._limit} combinations of sizes are in use"
            record = FellBack(self._graph_name, "the least recently used device graph was freed", reason)
            self._compilation.journal.fall_back(record, warn=False)

    def _watch(self, args: list[Any]) -> int | None:
        """A model's graphs go with its parameters, although Dynamo may keep the compiled code."""
        if not self._plan.parameters:
            return None
        first: Tensor = args[self._plan.parameters[0]]
        if id(first) not in self._owners:
            self._owners.add(id(first))
            weakref.finalize(first, _free_if_idle, weakref.ref(self), id(first)).atexit = False
        return id(first)

    def _give_up(self, key: Key, error: Exception) -> None:
        """The key runs eagerly from now on; the whole graph does if nothing of it was ever captured."""
        if len(self._failed) < REMEMBERED:
            self._failed.add(key)
            self._gave_up = not self._counter["captured"]
        else:
            self._gave_up = True
        self._fall_back(error.__cause__ or error)

    def _fall_back(self, reason: object) -> None:
        self._compilation.fall_back(self._graph_name, "the graph runs without capture", reason)

    def _say_once(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            self._fall_back(reason)

    # -- replaying ----------------------------------------------------------------------------------------------

    def _replay(self, entry: Entry, args: list[Any]) -> Any:
        if profiler_enabled():
            with torch.profiler.record_function(self._label):
                return self._replay_now(entry, args, self._device.stream(), self._count_in_call)
        return self._replay_now(entry, args, self._device.stream(), self._count_in_call)

    def _replay_now(self, entry: Entry, args: Sequence[Any], stream: Any, written: Picker | None) -> Any:
        """`written` picks the inputs to count a write of, which are others inside of AOTAutograd's wrapper."""
        if not modes_enabled():
            return self._replay_unseen(entry, args, stream, written)
        with without_modes():  # what they make of the user's calls is in the graph; the copies are none of these
            return self._replay_unseen(entry, args, stream, written)

    def _replay_unseen(self, entry: Entry, args: Sequence[Any], stream: Any, written: Picker | None) -> Any:
        # Graphs of one pool overwrite each other's results; one with a pool of its own overwrites its own.
        last, self._last = self._last if self._shares_pool else entry.outputs, entry.outputs
        if last is not None and last.may_be_held and (held := last.still_held()):
            self._warn_about_held(held)
        self._pool.take_turn_on(stream)
        if entry.copied:
            entry.fill(args)
        entry.replay.replay()
        # What the device need not wait for comes after.
        self._counter["replays"] += 1
        if written is not None:
            count_writes(written(args))
        numbers = None if self._numbers is None else self._numbers[1](list(args))
        given = entry.outputs.needed(args)
        if isinstance(args, list):
            args.clear()  # not earlier: until now this call may be all that keeps the memory of its inputs
        results = entry.outputs.take(given)
        if self._numbers is not None:
            results = _with_numbers(results, self._numbers[0], numbers)
        return results[0] if self._returns_one else results

    def _warn_about_held(self, places: list[int]) -> None:
        for place in places:
            name = self._plan.output_names[place]
            if name in self._said:
                continue
            self._said.add(name)
            what = f"output {place} ('{name}') of the call before is still in use and may be overwritten"
            reason = "clone_output=False hands out the device graph's own memory; copy what you keep"
            self._compilation.fall_back(self._graph_name, what, reason, node=name)


def _with_numbers(results: tuple[Any, ...], places: list[int], numbers: Any) -> tuple[Any, ...]:
    """What a graph returns besides tensors belongs to this call, not to the one that was captured."""
    merged = list(results)
    for place, number in zip(places, numbers, strict=True):
        merged[place] = number
    return tuple(merged)


def _free_if_idle(owner: weakref.ref[Capturing], ident: int) -> None:
    """Called when a parameter dies, at any time and in any thread: what is in use is left alone."""
    capturing = owner()
    if capturing is None:
        return
    capturing._owners.discard(ident)
    if capturing._pool.lock.acquire(blocking=False):
        try:
            if not capturing._pool.is_running:
                capturing._store.free(ident)
        finally:
            capturing._pool.lock.release()
