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

from graphex.compilation import Compilation
from graphex.device import Device
from graphex.records import Captured, FellBack
from graphex.runtime import session
from graphex.runtime.codegen import Boxed
from graphex.runtime.entries import Entry, Plan, make_entry
from graphex.runtime.host_values import host_outputs
from graphex.runtime.inputs import Arena
from graphex.runtime.keys import Key, KeyReader
from graphex.runtime.pools import Pool, pool_for
from graphex.torch_private.memory import count_writes
from graphex.torch_private.tracing import profiler_enabled

REMEMBERED = 64  # keys seen once
RECORDED = 256  # captures of a graph that leave a record; a journal does not grow with calls
MOVES_IN_A_ROW = 8  # captures for moved inputs without a replay in between, after which moved calls run eagerly


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
        in_place: Sequence[int] = (),
    ) -> None:
        """`in_place` are outputs that are read before the next call and by nobody who could keep them."""
        self._boxed_call = True  # on the instance: wrappers copy what they find there
        self._compilation, self._graph_name, self._device, self._run = compilation, graph_name, device, run
        config = compilation.config
        self._limit, self._force, self._error_mode = (
            config.capture_limit,
            config.force_recapture,
            config.capture_error_mode,
        )
        self._plan = Plan.of(gm, device, static_inputs, config, in_place)
        self._key = KeyReader(gm, device)
        self._numbers = host_outputs(gm)
        self._pool = pool or pool_for(device, config.use_graph_pool)
        self._arena = Arena()
        self._entries: OrderedDict[Key, Entry | None] = OrderedDict()  # None: it cannot be captured
        self._seen: OrderedDict[Key, dict[int, weakref.ref[Tensor]]] = OrderedDict()
        self._must_copy: set[int] = set()
        self._said: set[str] = set()
        self._watched: weakref.ref[Tensor] | None = None
        self._moves = 0
        self._gave_up = False
        self._is_running = False
        self._counter = compilation.journal.counter(graph_name)
        self._label = f"graphex replay: {graph_name}"
        weakref.finalize(self, _free_all, self._entries).atexit = False

    def __call__(self, args: list[Any]) -> Any:
        return session.run_in_session(self, args) if session.active else self.call(args)

    def call(self, args: list[Any]) -> Any:
        if self._gave_up or self._device.is_capturing():
            return self._run(args)
        key = self._key(args)
        with self._pool.lock:
            self._is_running = True
            try:
                entry = self._entry(key, args)
                if entry is not None:
                    return self._replay(entry, args)
            finally:
                self._is_running = False
        return self._run(args)

    def rehearse(self, args: list[Any]) -> None:
        """Warm up for a capture that the next call makes."""
        if not self._gave_up and self._key(args) not in self._entries:
            self._run(args)

    @property
    def written(self) -> list[int]:
        return self._plan.written

    def free(self) -> None:
        """Give up every captured graph; the next call of a key captures again."""
        _free_all(self._entries)

    # -- finding or making the graph of a key -------------------------------------------------------------------

    def _entry(self, key: Key, args: list[Any]) -> Entry | None:
        """The graph to replay; None to run this call eagerly."""
        entry = self._entries.get(key)
        if entry is None:
            if key in self._entries:
                return None  # it failed before
            if key not in self._seen and not session.is_warming_up():
                self._remember(key, args)
                return None
            return self._capture(key, args, "")
        self._entries.move_to_end(key)
        if self._force:
            return self._capture(key, args, "force_recapture is set")
        moved = entry.moved(args)
        if not moved:
            self._moves = 0
            return entry
        self._must_copy.update(moved.intersection(self._plan.plain))
        self._moves += 1
        if self._moves > MOVES_IN_A_ROW:
            self._say_that_inputs_keep_moving(moved)
            return None
        return self._capture(key, args, f"moved: {self._plan.named(moved)}")

    def _remember(self, key: Key, args: list[Any]) -> None:
        """This call warms up. A tensor that is the same object in the next call has a place of its own."""
        self._seen[key] = {index: weakref.ref(args[index]) for index in self._plan.plain}
        if len(self._seen) > max(REMEMBERED, self._limit):
            self._seen.popitem(last=False)
            if not self._entries and not self._counter["replays"]:
                self._say_once("the last calls all had other sizes, and a graph is captured for sizes seen before")

    def _capture(self, key: Key, args: list[Any], why_again: str) -> Entry | None:
        started, reserved = time.perf_counter(), self._device.reserved_bytes()
        seen = self._seen.pop(key, {})
        stays = {index for index, tensor in seen.items() if tensor() is args[index]} - self._must_copy
        old = self._entries.get(key)
        if old is not None:
            stays = (set(old.stays) - self._must_copy) if why_again else stays
        pool = self._pool if self._compilation.config.reuse_graph_pool_in_same_fx else self._own_pool()
        try:
            entry = make_entry(self._device, self._run, self._plan, args, stays, pool, self._arena, self._error_mode)
        except Exception as error:
            self._forget(key, error)
            return None
        self._keep(key, entry)
        self._watch(args)
        status = "recaptured" if why_again else "captured"
        self._counter[status] += 1
        if self._counter["captured"] + self._counter["recaptured"] <= RECORDED:
            seconds, grown = time.perf_counter() - started, self._device.reserved_bytes() - reserved
            by_address, copied = len(entry.checked), len(entry.copied)
            text = self._key.text(key)
            self._compilation.journal.add(
                Captured(self._graph_name, status, text, seconds, by_address, copied, why_again, max(0, grown))
            )
        return entry

    def _watch(self, args: list[Any]) -> None:
        """A model's graphs go with its parameters, although Dynamo may keep the compiled code."""
        if not self._plan.static:
            return
        first: Tensor = args[self._plan.static[0]]
        if self._watched is None or self._watched() is not first:
            self._watched = weakref.ref(first)
            weakref.finalize(first, _free_if_idle, weakref.ref(self)).atexit = False

    def _own_pool(self) -> Pool:
        return pool_for(self._device, self._compilation.config.use_graph_pool)

    def _keep(self, key: Key, entry: Entry) -> None:
        """A graph is freed only after the next is captured: a pool that no graph uses is gone."""
        old = self._entries.pop(key, None)
        self._entries[key] = entry
        if old is not None:
            old.free()
        while len(self._entries) > self._limit:
            _, oldest = self._entries.popitem(last=False)
            if oldest is not None:
                oldest.free()
            self._counter["evicted"] += 1
            if self._counter["evicted"] == 1:
                reason = f"more than capture_limit={self._limit} combinations of sizes are in use"
                record = FellBack(self._graph_name, "the least recently used device graph was freed", reason)
                self._compilation.journal.fall_back(record, warn=False)

    def _forget(self, key: Key, error: Exception) -> None:
        """The key runs eagerly from now on; the whole graph does if nothing of it was ever captured."""
        old = self._entries.pop(key, None)
        if old is not None:
            old.free()
        self._entries[key] = None
        self._gave_up = not self._counter["captured"]
        self._fall_back(error.__cause__ or error)

    def _fall_back(self, reason: object) -> None:
        self._compilation.fall_back(self._graph_name, "the graph runs without capture", reason)

    def _say_that_inputs_keep_moving(self, moved: frozenset[int]) -> None:
        self._say_once(f"{self._plan.named(moved)} moved in {MOVES_IN_A_ROW} calls in a row; pass the same tensors")

    def _say_once(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            self._fall_back(reason)

    # -- replaying ----------------------------------------------------------------------------------------------

    def _replay(self, entry: Entry, args: list[Any]) -> Any:
        self._counter["replays"] += 1
        if profiler_enabled():
            with torch.profiler.record_function(self._label):
                return self._replay_now(entry, args)
        return self._replay_now(entry, args)

    def _replay_now(self, entry: Entry, args: list[Any]) -> Any:
        plan = self._plan
        if entry.warns and (held := entry.outputs.still_held()):
            self._warn_about_held(held)
        self._pool.take_turn()
        entry.fill(args)
        numbers = self._numbers and self._numbers[1](list(args))
        written = [args[index] for index in plan.written]
        given = [args[index] for index in entry.outputs.inputs_needed]
        entry.replay.replay()
        args.clear()  # not earlier: until now this call may be all that keeps the memory of its inputs
        if written:
            count_writes(written)
        results = entry.outputs.take(given)
        if self._numbers is not None:
            results = _with_numbers(results, self._numbers[0], numbers)
        return results[0] if plan.returns_one else results

    def _warn_about_held(self, places: list[int]) -> None:
        for place in places:
            name = self._plan.output_names[place]
            if name in self._said:
                continue
            self._said.add(name)
            what = f"output {place} ('{name}') of an earlier call is still in use and was overwritten"
            reason = (
                "clone_output=False hands out the device graph's own memory; drop it before the next call, or copy it"
            )
            self._compilation.fall_back(self._graph_name, what, reason, node=name)


def _with_numbers(results: tuple[Any, ...], places: list[int], numbers: Any) -> tuple[Any, ...]:
    """What a graph returns besides tensors belongs to this call, not to the one that was captured."""
    merged = list(results)
    for place, number in zip(places, numbers, strict=True):
        merged[place] = number
    return tuple(merged)


def _free_all(entries: OrderedDict[Key, Entry | None]) -> None:
    while entries:
        _, entry = entries.popitem()
        if entry is not None:
            entry.free()


def _free_if_idle(owner: weakref.ref[Capturing]) -> None:
    """Called when a parameter dies, at any time and in any thread: what is in use is left alone."""
    capturing = owner()
    if capturing is None or capturing._watched is None or capturing._watched() is not None:
        return
    if capturing._pool.lock.acquire(blocking=False):
        try:
            if not capturing._is_running:
                capturing.free()
        finally:
            capturing._pool.lock.release()
