"""Run a graph with streams in any order that its events allow: a missing event becomes a wrong number.

    tried = graphex.random_orders(gm, inputs, orders=50)
    assert not tried.differences, tried.differences[0]

Each stream is a queue. Any head that is not waiting for an event may run next, whether or not the values it reads have
been made: a value that is read too early is garbage, and so is memory that its stream has freed. So a race is found
without a GPU, and the order in which a GPU happens to run does not hide it.

`stream_safety="shuffle"` does this in every call (`shuffled`).
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node, map_arg

from graphex.analysis import Aliases, placement
from graphex.analysis.dependencies import has_hidden_effect
from graphex.analysis.effects import is_work, synchronisation
from graphex.analysis.graphs import attribute_of
from graphex.analysis.happens_before import Stream
from graphex.analysis.memory import frees
from graphex.debug.tensors import clone_together
from graphex.errors import InputError, StreamError
from graphex.runtime.codegen import Boxed, generate
from graphex.torch_private.symbolic import pytree

ORDERS = 8  # tried in each call with stream_safety="shuffle"


@dataclass(frozen=True)
class Difference:
    """An order whose results are not those of the graph as it is written."""

    order: tuple[str, ...]
    what: str


@dataclass(frozen=True)
class Orders:
    """The orders that were run, how many of them were distinct, and those with wrong results."""

    tried: int
    distinct: int
    differences: tuple[Difference, ...]


class StreamStep(NamedTuple):
    """One step of a stream: run a node, record or wait for an event, or free memory."""

    stream: Stream
    kind: str
    node: Node
    event: object = None
    in_order: bool = False  # with an effect beyond memory: such nodes keep their order


def random_orders(gm: GraphModule, inputs: Sequence[Any], *, orders: int = 20, seed: int = 0) -> Orders:
    """Run `gm`, whose nodes are placed on streams, as it is written and in `orders` other ways, and compare."""
    if not isinstance(gm, GraphModule):
        raise InputError(f"random_orders takes a torch.fx.GraphModule, got {type(gm).__name__}.")
    taken = len(gm.graph.find_nodes(op="placeholder"))
    if not isinstance(inputs, (list, tuple)) or len(inputs) != taken:
        got = f"{len(inputs)} were" if isinstance(inputs, (list, tuple)) else f"{type(inputs).__name__} was"
        raise InputError(f"random_orders takes a list of the graph's {taken} inputs, {got} given.")
    if not isinstance(orders, int) or orders < 1:
        raise InputError(f"orders must be a positive number, got {orders!r}.")
    program = StreamProgram(gm)
    wanted = program.run(inputs, lambda ready: min(ready, key=lambda step: program.position[step]))
    if wanted.error:
        raise InputError(f"the graph cannot be run as it is written: {wanted.error}.")
    found: list[Difference] = []
    seen: set[tuple[str, ...]] = set()
    for number in range(orders):
        again = program.run(inputs, program.preference(number, random.Random(f"{seed} {number}")))
        seen.add(again.order)
        if what := again.difference(wanted):
            found.append(Difference(again.order, what))
    return Orders(orders, len(seen), tuple(found))


@dataclass(frozen=True)
class OrderRun:
    order: tuple[str, ...]
    results: list[Any]
    inputs: list[Any]
    error: str = ""

    def difference(self, wanted: OrderRun) -> str:
        if self.error:
            return self.error
        for kind, ours, theirs in (("output", self.results, wanted.results), ("input", self.inputs, wanted.inputs)):
            for place, (got, right) in enumerate(zip(ours, theirs, strict=True)):
                if isinstance(right, Tensor) and not torch.allclose(got, right, rtol=0, atol=0, equal_nan=True):
                    return f"{kind} {place} has other values"
        return ""


class StreamProgram:
    """A graph as the steps of its streams."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.steps = list(_steps(gm))
        self.position = {step: number for number, step in enumerate(self.steps)}
        self.streams = list(dict.fromkeys(step.stream for step in self.steps))
        self._like: dict[Node, Any] = {}

    def preference(self, number: int, chance: random.Random) -> Callable[[list[StreamStep]], StreamStep]:
        """How an order chooses among the steps that may run: each stream first once, last once, then at random."""
        streams = list(self.streams)
        chance.shuffle(streams)
        if number < 2 * len(streams):
            special = self.streams[number // 2]
            streams.remove(special)
            streams.insert(0 if number % 2 == 0 else len(streams), special)
        elif number % 2:
            return chance.choice
        return lambda ready: min(ready, key=lambda step: streams.index(step.stream))

    def run(self, inputs: Sequence[Any], choose: Callable[[list[StreamStep]], StreamStep]) -> OrderRun:
        memory = _Memory(self.gm, inputs, self._like)
        order: list[str] = []
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            try:
                for step in self._in_some_order(choose):
                    order.append(f"{step.kind} {step.event or step.node.name}")
                    _DONE[step.kind](memory, step.node)
            except Exception as error:  # an op that is given garbage may do anything
                return OrderRun(tuple(order), [], [], f"an op failed: {type(error).__name__}")
        return OrderRun(tuple(order), *memory.left)

    def _in_some_order(self, choose: Callable[[list[StreamStep]], StreamStep]) -> Iterator[StreamStep]:
        queues = {stream: deque(step for step in self.steps if step.stream == stream) for stream in self.streams}
        recordable = {step.event for step in self.steps if step.kind == "record"}
        effects = deque(step for step in self.steps if step.in_order)
        recorded: set[object] = set()

        def may_run(step: StreamStep) -> bool:
            if step.kind == "wait" and step.event in recordable and step.event not in recorded:
                return False
            return not step.in_order or step is effects[0]

        while ready := [queue[0] for queue in queues.values() if queue and may_run(queue[0])]:
            step = choose(ready)
            queues[step.stream].popleft()
            if step.kind == "record":
                recorded.add(step.event)
            if step.in_order:
                effects.popleft()
            yield step
        stuck = [queue[0].node.name for queue in queues.values() if queue]
        if stuck:
            raise RuntimeError(f"the streams wait for each other at {', '.join(stuck)}")


def _steps(gm: GraphModule) -> Iterator[StreamStep]:
    free = frees(gm.graph)
    aliases = Aliases(gm.graph)
    names = Counter(storage for node in gm.graph.nodes for storage in aliases.storages(node))
    output = gm.graph.output_node()
    yield StreamStep(None, "begin", output)
    for node in gm.graph.nodes:
        if (sync := synchronisation(node)) is not None:
            yield StreamStep(sync.stream, sync.kind, node, sync.what)
        elif is_work(node):
            yield StreamStep(placement(node), "run", node, in_order=has_hidden_effect(node))
        for value in free.get(node, ()):
            for storage in aliases.storages(value):
                names[storage] -= 1
                owner = storage[0]
                if not names[storage] and not aliases.is_owned_elsewhere(owner) and not aliases.reaches_output(owner):
                    yield StreamStep(placement(owner), "free", owner)
    yield StreamStep(None, "end", output)


class _Memory:
    """The values of one run. A value that is read before it is made is garbage of the right shape until then."""

    def __init__(self, gm: GraphModule, inputs: Sequence[Any], like: dict[Node, Any]) -> None:
        self._gm = gm
        self._like = like  # for each node, how to allocate a result like that of the first run
        self._inputs = inputs
        self._given = clone_together(list(inputs))
        placeholders = gm.graph.find_nodes(op="placeholder")
        self._values: dict[Node, Any] = dict(zip(placeholders, self._given, strict=True))
        self._promised: set[Node] = set()
        self.left: tuple[list[Any], list[Any]] = ([], [])  # results and inputs, when the current stream has finished
        for value in self._given:
            if isinstance(value, Tensor):
                _spoil(value)

    def begin(self, _: Node) -> None:
        """The caller has made the inputs."""
        for ours, theirs in zip(self._given, self._inputs, strict=True):
            if isinstance(ours, Tensor):
                ours.copy_(theirs)

    def end(self, output: Node) -> None:
        """The caller looks at the results."""
        results = pytree.tree_leaves(map_arg(output.args[0], self.value))
        both = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in (*results, *self._given)]
        self.left = (both[: len(results)], both[len(results) :])

    def run(self, node: Node) -> None:
        made = self._called(node)
        if node in self._promised:
            pairs = zip(pytree.tree_leaves(self._values[node]), pytree.tree_leaves(made), strict=True)
            for promised, real in pairs:
                if isinstance(promised, Tensor):
                    promised.copy_(real)
        else:
            self._values[node] = made
        self._like.setdefault(node, pytree.tree_map_only(Tensor, _allocator, made))

    def free(self, node: Node) -> None:
        for leaf in pytree.tree_leaves(self._values.get(node)):
            if isinstance(leaf, Tensor):
                _spoil(leaf)

    def value(self, node: Node) -> Any:
        if node not in self._values:
            if node.op == "get_attr":
                held = attribute_of(self._gm, str(node.target))
                self._values[node] = held.clone() if isinstance(held, Tensor) else held  # the graph may write to it
            elif is_work(node):
                self._values[node] = pytree.tree_map_only(partial, _garbage, self._like[node])
                self._promised.add(node)
            else:
                self._values[node] = self._called(node)
        return self._values[node]

    def _called(self, node: Node) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), self.value)
        if node.op == "call_module":
            return self._gm.get_submodule(str(node.target))(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)


_DONE: dict[str, Callable[[_Memory, Node], None]] = {  # what a kind of step does; an event moves no data
    "begin": _Memory.begin,
    "run": _Memory.run,
    "record": lambda memory, node: None,
    "wait": lambda memory, node: None,
    "free": _Memory.free,
    "end": _Memory.end,
}


def _allocator(like: Tensor) -> partial[Tensor]:
    return partial(torch.empty_strided, like.size(), like.stride(), dtype=like.dtype, device=like.device)


def _garbage(allocate: partial[Tensor]) -> Tensor:
    made = allocate()
    _spoil(made)
    return made


def _spoil(tensor: Tensor) -> None:
    """Fill the whole storage: NaN in floating-point types, 0 in others (it may be used as an index)."""
    memory = tensor.untyped_storage()
    bits = 0xFF if tensor.is_floating_point() or tensor.is_complex() else 0
    torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(memory, 0, (memory.nbytes(),), (1,)).fill_(bits)


def shuffled(graph_name: str, gm: GraphModule, counter: Counter[str]) -> Boxed:
    """The graph in the order it is written; each call first runs in other orders on copies of the inputs."""
    run = generate(gm).function(f"<graphex {graph_name}>")

    def checked(args: list[Any]) -> Any:
        counter["calls"] += 1
        tried = random_orders(gm, args, orders=ORDERS, seed=counter["calls"])
        counter["orders"] += tried.tried
        if tried.differences:
            first = tried.differences[0]
            raise StreamError(
                f"{graph_name}: {first.what} when its streams run in the order {', '.join(first.order)}. "
                "An event is missing there; this is an error of graphex's if the graph was not changed afterwards."
            )
        return run(args)

    return checked
