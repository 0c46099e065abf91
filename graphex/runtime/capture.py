"""Replay a graph as one device graph, one capture for each combination of sizes.

The first call of a key runs eagerly and warms the device up, the second captures, every later one replays:

    parameters, marked and written inputs   are captured by address; another address captures again
    every other input                       is copied into a private buffer on every call, so it is never read stale
    outputs                                 are copied out, so a kept one stays right

A capture that fails leaves the graph running eagerly, with the reason in the journal.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graphex.analysis import is_collective, node_line
from graphex.analysis.effects import operator_of
from graphex.compilation import Compilation
from graphex.device import Device, Replay
from graphex.errors import CaptureError
from graphex.records import Captured
from graphex.runtime.codegen import Boxed
from graphex.runtime.host_values import host_outputs, sizes_that_matter
from graphex.runtime.inputs import InputBuffer
from graphex.runtime.outputs import OutputPlan
from graphex.torch_private.memory import copier
from graphex.torch_private.symbolic import free_unbacked_symbols
from graphex.torch_private.tracing import profiler_enabled

KEPT_CAPTURES = 64

_CAPTURABLE_HIGHER_ORDER = frozenset(
    {
        "auto_functionalized",
        "auto_functionalized_v2",
        "triton_kernel_wrapper_functional",
        "triton_kernel_wrapper_mutation",
    }
)


@dataclass(frozen=True)
class Uncapturable:
    """Why a graph cannot be captured, and at which node."""

    reason: str
    node: Node | None = None

    @property
    def line(self) -> str:
        return "" if self.node is None else node_line(self.node)


def why_not_captured(gm: GraphModule) -> Uncapturable | None:
    """The first thing in the graph that a device graph cannot hold; None if nothing is known to be in the way."""
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            what = "input" if node.op == "placeholder" else "node"
            return Uncapturable(f"{what} '{node.name}' is on the CPU", node)
        if node.op == "placeholder":
            continue
        if free_unbacked_symbols(value):
            return Uncapturable(f"the size of '{node.name}' depends on data", node)
        op = operator_of(node)
        if op is not None and torch.Tag.data_dependent_output in op.tags:
            return Uncapturable(f"'{node.name}' reads a value back to the host", node)
        if is_collective(node):
            return Uncapturable(f"'{node.name}' communicates with other processes", node)
        if (
            isinstance(node.target, torch._ops.HigherOrderOperator)
            and node.target.name() not in _CAPTURABLE_HIGHER_ORDER
        ):
            return Uncapturable(f"'{node.name}' is a {node.target.name()}, which may decide on the host", node)
    return None


@dataclass
class Entry:
    """One captured graph: where it reads its inputs, and how its outputs get out."""

    replay: Replay
    buffers: list[InputBuffer]
    addresses: list[int]
    outputs: OutputPlan


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
        written: Sequence[int],
    ) -> None:
        self._boxed_call = True  # on the instance: wrappers copy what they find there
        self._compilation, self._graph_name, self._device, self._run = compilation, graph_name, device, run
        values = [node.meta.get("val") for node in gm.graph.nodes if node.op == "placeholder"]
        tensors = [index for index, value in enumerate(values) if isinstance(value, torch.Tensor)]
        by_address = set(static_inputs) | set(written)
        self._by_address = [index for index in tensors if index in by_address]
        self._copied = [index for index in tensors if index not in by_address]
        self._copy_in = copier(values[index].dtype for index in self._copied)
        self._written = list(written)
        self._sizes = sizes_that_matter(gm)
        self._numbers = host_outputs(gm)
        self._shaped = [
            i for i in tensors if any(isinstance(s, torch.SymInt) for s in (*values[i].shape, *values[i].stride()))
        ]
        self._entries: OrderedDict[Any, Entry | None] = OrderedDict()
        self._pool: Any = None
        self._gave_up = False
        self._counter = compilation.journal.counter(graph_name)
        self._label = f"graphex replay: {graph_name}"

    def __call__(self, args: list[Any]) -> Any:
        if self._gave_up:
            return self._run(args)
        key = self._key(args)
        if key not in self._entries:
            self._keep(key, None)  # seen once: this call warms up
            return self._run(args)
        self._entries.move_to_end(key)
        entry = self._entries[key]
        moved = entry is not None and any(
            args[index].data_ptr() != address for index, address in zip(self._by_address, entry.addresses, strict=True)
        )
        if entry is None or moved:
            entry = self._capture(key, args, "an input captured by address has moved" if moved else "")
            if entry is None:
                return self._run(args)
        return self._replay(entry, args)

    def _key(self, args: list[Any]) -> Any:
        shapes = tuple((args[i].shape, args[i].stride()) for i in self._shaped)
        return (tuple(args[i] for i in self._sizes), shapes)

    def _capture(self, key: Any, args: list[Any], why_again: str) -> Entry | None:
        started = time.perf_counter()
        self._pool = self._pool or self._device.pool()
        captured = list(args)
        try:
            buffers = [InputBuffer(args[index]) for index in self._copied]
            for index, buffer in zip(self._copied, buffers, strict=True):
                buffer.target.copy_(buffer.source(args[index]))  # a device may look at its inputs while it captures
                captured[index] = buffer.view
            replay, outputs = self._device.capture(lambda: self._run(list(captured)), self._pool)
        except CaptureError as error:
            self._gave_up = True
            self._entries.clear()
            self._compilation.fall_back(self._graph_name, "the graph runs without capture", error.__cause__ or error)
            return None
        addresses = [args[index].data_ptr() for index in self._by_address]
        owned = {args[index].untyped_storage().data_ptr() for index in self._by_address}
        entry = Entry(replay, buffers, addresses, OutputPlan(outputs, owned))
        if old := self._entries[key]:
            old.replay.free()  # only now: a pool that no graph uses is gone
        self._keep(key, entry)
        status = "recaptured" if why_again else "captured"
        self._counter[status] += 1
        seconds = time.perf_counter() - started
        self._compilation.journal.add(
            Captured(self._graph_name, status, str(key), seconds, len(self._by_address), len(self._copied), why_again)
        )
        return entry

    def _keep(self, key: Any, entry: Entry | None) -> None:
        self._entries[key] = entry
        if len(self._entries) <= KEPT_CAPTURES:
            return
        if not any(self._entries.values()) and not self._counter["replays"]:
            reason = f"each of {KEPT_CAPTURES} calls had other sizes, and a graph is captured for sizes seen before"
            self._compilation.fall_back(self._graph_name, "the graph runs without capture", reason)
        _, oldest = self._entries.popitem(last=False)
        if oldest is not None:
            oldest.replay.free()

    def _replay(self, entry: Entry, args: list[Any]) -> Any:
        self._counter["replays"] += 1
        if profiler_enabled():
            with torch.profiler.record_function(self._label):
                return self._replay_now(entry, args)
        return self._replay_now(entry, args)

    def _replay_now(self, entry: Entry, args: list[Any]) -> Any:
        if entry.buffers:
            sources = [buffer.source(args[index]) for buffer, index in zip(entry.buffers, self._copied, strict=True)]
            self._copy_in([buffer.target for buffer in entry.buffers], sources)
        changed = [args[index] for index in self._written]
        numbers = self._numbers and self._numbers[1](list(args))
        args.clear()
        entry.replay.replay()
        if changed:
            torch.autograd.graph.increment_version([tensor for tensor in changed if not tensor.is_inference()])
        results = entry.outputs.copy_out()
        return results if self._numbers is None else _with_numbers(results, self._numbers[0], numbers)


def _with_numbers(results: tuple[Any, ...], places: list[int], numbers: Any) -> tuple[Any, ...]:
    """What a graph returns besides tensors belongs to this call, not to the one that was captured."""
    merged = list(results)
    for place, number in zip(places, numbers, strict=True):
        merged[place] = number
    return tuple(merged)
