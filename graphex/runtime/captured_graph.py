"""One captured graph: where it reads its inputs, and how its outputs get out.

`Plan` is what is known of a graph before any call; `Entry` is one capture of it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from graphex.analysis import Aliases
from graphex.config import CompilerConfig
from graphex.device import Device, Replay
from graphex.runtime.buffers import Arena, Copies, InputBuffer, OutputPlan, PuttingBack, bytes_of
from graphex.runtime.codegen import Boxed
from graphex.runtime.fast_replay import Addresses, Shortcut, picker
from graphex.runtime.keys import Key
from graphex.runtime.pools import Pool

# -- entries -----------------------------------------------------------------------------------------------------------


_NOTHING: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Given:
    """The inputs of a piece that others of its graph have made: `received` are where a device graph puts them in every
    call, `moving` are elsewhere in every call and written to (see `crossing`).
    """

    received: Iterable[int]
    moving: Mapping[int, bool]


@dataclass(frozen=True)
class Plan:
    """How the inputs and outputs of a graph are treated, by their index."""

    names: list[str]
    output_names: list[str]
    ways: list[str]
    static: list[int]
    parameters: list[int]
    by_address: list[int]
    plain: list[int]
    hosts: list[int]
    written: list[int]
    looked_at: list[int]
    unchecked: list[int]
    clone_input: bool | str
    moving: list[int]
    put_back: list[int]
    received: list[int]
    returns_one: bool

    @staticmethod
    def of(
        gm: GraphModule,
        aliases: Aliases,
        device: Device,
        static_inputs: Iterable[int],
        config: CompilerConfig,
        ways: dict[int, str],
        given: Given | None = None,
    ) -> Plan:
        nodes = gm.graph.find_nodes(op="placeholder")
        values = [node.meta.get("val") for node in nodes]
        tensors = [index for index, value in enumerate(values) if isinstance(value, Tensor)]
        hosts = [index for index in tensors if not device.holds(values[index])]
        moving = {} if given is None else given.moving
        written = [index for index in tensors if index not in moving and aliases.is_written(nodes[index])]
        # What is addressed from the start of its storage can be read at its own place only.
        absolute = [index for index in tensors if aliases.is_absolute(nodes[index])]
        # What another piece hands on is at one place, but every call has an object of its own for it.
        parameters = set(static_inputs).intersection(tensors)
        static = parameters.union(given.received if given else ()).intersection(tensors)
        fixed = {*static, *written, *absolute}.difference(hosts)
        by_address = [index for index in tensors if index in fixed]
        unchecked = parameters.difference(written) if config.frozen_parameter else set()
        outputs = output_leaves(gm)
        return Plan(
            names=[node.name for node in nodes],
            output_names=[leaf.name if isinstance(leaf, Node) else str(leaf) for leaf in outputs],
            ways=[ways.get(place, _WAYS[config.clone_output]) for place in range(len(outputs))],
            static=sorted(static.difference(hosts)),
            parameters=sorted(parameters.difference(hosts)),
            by_address=by_address,
            plain=[index for index in tensors if index not in fixed and index not in hosts],
            hosts=hosts,
            written=written,
            looked_at=[index for index in by_address if index not in unchecked],
            unchecked=[index for index in by_address if index in unchecked],
            # A piece must not write to what a later one of the same call reads, nor a backward to what autograd saved.
            clone_input="auto" if given is not None and config.clone_input is False else config.clone_input,
            moving=list(moving),
            put_back=[index for index, is_seen in moving.items() if is_seen],
            received=list(given.received) if given is not None else [],
            returns_one=returns_one(gm),
        )

    def addresses(self, args: Sequence[Any]) -> tuple[int, ...]:
        """Where the inputs are that are captured by address; of those that are not looked at, which they are."""
        looked_at = (args[index].data_ptr() for index in self.looked_at)
        return (*looked_at, *(id(args[index]) for index in self.unchecked))

    def named(self, indices: Iterable[int]) -> str:
        """The inputs by name, at most three of them."""
        names = [f"'{self.names[index]}'" for index in sorted(indices)] or ["of another call"]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"input {', '.join(names[:3])}{more}"


_WAYS: dict[bool | str, str] = {"auto": "copied", True: "separate", False: "in place"}


def output_leaves(gm: GraphModule) -> list[Any]:
    """What a graph returns, one by one."""
    returned = _returned(gm)
    return list(returned) if isinstance(returned, (list, tuple)) else [returned]


def returns_one(gm: GraphModule) -> bool:
    """Whether a graph returns a value and no tuple of them."""
    return not isinstance(_returned(gm), (list, tuple))


def _returned(gm: GraphModule) -> Any:
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    return output.args[0]


@dataclass
class Entry:
    """`checked` are where the inputs were that were captured by address, `copied` those that every call copies.

    `shortcut` finds the next call that replays it, if that is like the one before; the first such call makes it.
    """

    replay: Replay
    pool: Pool
    outputs: OutputPlan
    checked: Addresses
    stays: frozenset[int]
    copied: list[int]
    buffers: list[InputBuffer]
    held: list[Tensor]
    takes_over: bool
    owner: int | None = None
    shortcut: Shortcut | None = None
    _copies: Copies = field(init=False)

    def __post_init__(self) -> None:
        self._copies = Copies([buffer.target for buffer in self.buffers])
        self._copied = picker(self.copied)
        self._simple = not self.takes_over and all(buffer.is_simple for buffer in self.buffers)
        lent = [buffer.view for buffer in self.buffers] if self.takes_over else []
        self._lent = [(tensor, tensor.data_ptr()) for tensor in (*lent, *self.outputs.in_place())]

    @property
    def lends(self) -> bool:
        """Whether the user's tensors share memory with the graph."""
        return bool(self._lent)

    def is_robbed(self) -> bool:
        """Whether memory that the graph shares with the user's tensors was replaced, by making one of them larger."""
        return any(tensor.data_ptr() != address for tensor, address in self._lent)

    def moved(self, args: Sequence[Any]) -> frozenset[int]:
        """The inputs that are not where they were captured. A frozen parameter has to be the same object."""
        return self.checked.moved(args)

    def fill(self, args: Sequence[Any]) -> None:
        """Give the graph this call's inputs, where any are `copied`."""
        given = self._copied(args)
        if self._simple:
            self._copies.fill(given)
        elif self.takes_over:
            self._fill_those_that_differ(given)
        else:
            self._copies.fill([buffer.source(each) for buffer, each in zip(self.buffers, given, strict=True)])

    def _fill_those_that_differ(self, given: Sequence[Tensor]) -> None:
        pairs = [
            (buffer.target, buffer.source(each))
            for buffer, each in zip(self.buffers, given, strict=True)
            if each.data_ptr() != buffer.view.data_ptr()
        ]
        memory = {target.untyped_storage().data_ptr() for target, _ in pairs}
        if any(source.untyped_storage().data_ptr() in memory for _, source in pairs):
            pairs = [(target, source.clone()) for target, source in pairs]  # they trade places
        for target, source in pairs:
            target.copy_(source)

    def free(self) -> None:
        self.pool.graphs -= 1
        self.replay.free([*self.buffers, *self.held])
        self.buffers, self.held, self._lent = [], [], []
        self.shortcut = None


def make_entry(
    device: Device,
    run: Boxed,
    plan: Plan,
    args: list[Any],
    stays: Iterable[int],
    pool: Pool,
    arena: Arena,
    error_mode: str,
) -> Entry:
    """Capture `run` for these inputs. Raises what goes wrong, and leaves nothing behind."""
    takes_over = plan.clone_input is False
    stays = frozenset(stays) if plan.clone_input == "auto" else _NOTHING
    copied = [index for index in plan.plain if index not in stays]
    taken = _alone_in_their_memory(plan, args) if takes_over else _NOTHING
    own = iter(arena.buffers([args[index] for index in copied if index not in taken]))
    buffers = [InputBuffer(args[index], None) if index in taken else next(own) for index in copied]
    captured = list(args)
    for index, buffer in zip(copied, buffers, strict=True):
        captured[index] = buffer.view
        if index not in taken:  # a device may look at its inputs while it captures
            buffer.target.copy_(buffer.source(args[index]))
    for index in plan.hosts:
        captured[index] = args[index].clone()
    replay, results = device.capture(lambda: run(list(captured)), pool.handle, error_mode)
    try:
        flat = tuple(results) if isinstance(results, (list, tuple)) else (results,)
        inputs = {index: captured[index] for index in (*plan.by_address, *plan.plain)}
        put_back = [index for index in plan.put_back if index in copied]
        outputs = PuttingBack(flat, plan.ways, inputs, put_back) if put_back else OutputPlan(flat, plan.ways, inputs)
        del results, flat
        outputs.settle()
        checked = Addresses((*plan.looked_at, *stays), args, plan.unchecked, plan.written)
        held = [args[index].detach() for index in plan.unchecked]  # the memory, whatever becomes of the parameter
        entry = Entry(replay, pool, outputs, checked, stays, copied, buffers, held, takes_over)
    except BaseException:
        replay.free()
        raise
    pool.graphs += 1
    return entry


def _alone_in_their_memory(plan: Plan, args: Sequence[Any]) -> frozenset[int]:
    """The inputs that another can be copied into: none that overlaps a parameter, a cache or one more input."""
    starts = {index: args[index].data_ptr() for index in (*plan.by_address, *plan.plain)}
    spans = sorted((start, start + bytes_of(args[index]), index) for index, start in starts.items())
    shared: set[int] = set()
    furthest, whose = 0, -1
    for start, end, index in spans:
        if start < min(furthest, end):
            shared |= {index, whose}
        if end > furthest:
            furthest, whose = end, index
    return frozenset(plan.plain) - shared


# -- store -------------------------------------------------------------------------------------------------------------
# The captured graphs of one compiled graph: the most recently used ones, found by key and by addresses.
#
# A key may have several graphs, one for each set of parameters and caches that was passed: compiled layers of one
# class
# share their code, and with it the place where their graphs are kept.


@dataclass(frozen=True)
class Slot:
    """A place for one graph."""

    key: Key
    addresses: tuple[int, ...]


class Store:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[Slot, Entry] = OrderedDict()
        self._latest: dict[Key, tuple[Slot, Entry]] = {}
        self.newest: Entry | None = None  # the graph that was used last, of whichever key
        self._newest_key: Key = ()
        self._known: Counter[Key] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def knows(self, key: Key) -> bool:
        return self._known[key] > 0

    def latest(self, key: Key) -> Entry | None:
        """The graph of a key that was used last."""
        if self.newest is not None and self._newest_key == key:  # a lookup costs more: a slot has hundreds of addresses
            return self.newest
        found = self._latest.get(key)
        if found is None:
            return None
        self._entries.move_to_end(found[0])
        self.newest, self._newest_key = found[1], key
        return found[1]

    def find(self, slot: Slot) -> Entry | None:
        entry = self._entries.get(slot)
        if entry is not None:
            self._entries.move_to_end(slot)
            self._used(slot, entry)
        return entry

    def put(self, slot: Slot, entry: Entry) -> list[Slot]:
        """Keep a graph; what it replaces and what there is no room for is freed. Returns the latter.

        The new graph is there before any goes: a memory pool that no graph uses is gone.
        """
        old = self._entries.pop(slot, None)
        self._entries[slot] = entry
        self._used(slot, entry)
        if old is None:
            self._known[slot.key] += 1
        else:
            old.free()
        evicted = list(self._entries)[: max(0, len(self._entries) - self._limit)]
        for oldest in evicted:
            self.drop(oldest)
        return evicted

    def drop(self, slot: Slot) -> None:
        entry = self._entries.pop(slot)
        self._known[slot.key] -= 1
        if not self._known[slot.key]:
            del self._known[slot.key]
        if slot.key in self._latest and self._latest[slot.key][1] is entry:
            del self._latest[slot.key]
        if self.newest is entry:
            self.newest = None
        entry.free()

    def _used(self, slot: Slot, entry: Entry) -> None:
        self._latest[slot.key] = slot, entry
        self.newest, self._newest_key = entry, slot.key

    def free(self, owner: int | None = None) -> None:
        """Free everything, or what was captured for one owner."""
        for slot, entry in list(self._entries.items()):
            if owner is None or entry.owner == owner:
                self.drop(slot)
