"""Captured graphs: one capture, the store of them all, their memory pools, and what a forward keeps for its backward.

Turn            the lock of programs that share memory: one of their calls at a time
Pool            a memory pool that captured graphs share, and the order that sharing asks for
CapturedGraph   one capture, made by `capture_graph`; `fill` gives it a call's inputs
Store           the captured graphs of one program, by key and by addresses, the least recently used one first
SavedMemory     what a captured forward keeps in its own memory for the backward

Graphs of one pool may use the same bytes for their intermediates, so they run one after the other. A pool belongs
to one program, to a handle that the user gave, or to the forwards and backwards of a step.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from sys import getrefcount
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from torch import Tensor

from graphex.device import Device, Replay
from graphex.records import Journal
from graphex.regions.region import laid_out_by_caller
from graphex.runtime.buffers import (
    Arena,
    Copies,
    InputBuffer,
    OutputPlan,
    PuttingBack,
    bytes_of,
    laid_on,
)
from graphex.runtime.capture_plan import CapturePlan
from graphex.runtime.codegen import Boxed
from graphex.runtime.guards import Addresses, CaptureKey, Guard, Picker, picker
from graphex.torch_private.memory import retains_graph, storage_address

ReplayBody = Callable[[Any], Any]

# -- pools -------------------------------------------------------------------------------------------------------------


_given: WeakValueDictionary[tuple[str, Any], Pool] = WeakValueDictionary()


class _Thread(threading.local):
    may_wait = True  # for a turn: it has none, and captures nothing


thread = _Thread()


class Turn:
    """One call at a time: a thread that holds `lock` fills inputs, replays or captures, and takes the outputs out.

    A lock lets its own thread in again, so a call by a finalizer or a signal handler in between looks at `is_running`.

    A call in the middle of another one (by a finalizer, or by the code of an op) never waits for a turn. It could be
    for ever: the thread that has the turn may wait for the one capture that there can be, which is in this thread.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.is_running = False

    @contextmanager
    def lock_if_free(self) -> Iterator[bool]:
        """Hold the lock, unless another thread has it; whether it is held."""
        is_free = self.lock.acquire(blocking=False)
        try:
            yield is_free
        finally:
            if is_free:
                self.lock.release()


@contextmanager
def waiting_for_no_turn() -> Iterator[None]:
    """Around a capture whose thread has no turn."""
    before, thread.may_wait = thread.may_wait, False
    try:
        yield
    finally:
        thread.may_wait = before


class Pool:
    """A memory pool of a device, and the order of the graphs that share it.

    Graphs of one pool may use the same bytes for their intermediates. That is right as long as they run one after the
    other: one thread at a time has the `turn`, and a replay on another stream than the last one waits for it. Several
    pools have one turn if a graph of one reads what a graph of another keeps, as a backward does: which pool a program
    uses, and which graphs there are, changes only in its turn. `handle` is the device's name for the pool.

    A later capture of the pool does not get the memory of kept results. The exception is their last reader, a backward,
    which computes in the memory of saved values it has read; later captures may use that memory too. An earlier capture
    may have used it for its intermediates. `keeper_in_the_way` names a graph with results that a replay could write to.
    """

    def __init__(self, device: Device, handle: Any = None, turn: Turn | None = None) -> None:
        self.turn = turn or Turn()
        self._device = device
        self._handle = handle
        self._is_given = handle is not None
        self.stream = device.stream()  # of the last replay
        self._lasts = device.stream_lasts()
        self.graphs = 0
        self.captures = 0  # with those of graphs that are gone
        self.programs = 0  # that share it
        self._for_backwards: Pool | None = None
        self.keepers: dict[int, OutputPlan] = {}  # by the number of their capture
        self._left: set[int] = set()  # keepers whose graphs are freed, and whose results were in use then

    def enter(self, number: int, outputs: OutputPlan) -> None:
        """Add a graph that was captured; its number is that of its capture."""
        self.graphs += 1
        if outputs.are_kept_in_use is not None:
            self.keepers[number] = outputs

    def leave(self, number: int) -> None:
        """Drop a graph that is freed. Its results that are in use keep their memory, and other replays avoid it."""
        self.graphs -= 1
        if _is_in_use(self.keepers.get(number)):
            self._left.add(number)
        else:
            self.keepers.pop(number, None)

    def keeper_in_the_way(self, number: int) -> int | None:
        """The graph with results in use that a replay of graph `number` could write to, if there is one.

        A replay can write to its own results, to those of graphs captured later, and to those of a graph that had given
        up its memory before this one was captured.
        """
        for other, outputs in self.keepers.copy().items():  # a finalizer may free a graph meanwhile
            is_free = other < number and (outputs.given_up_to is None or number <= outputs.given_up_to)
            if not is_free and _is_in_use(outputs):
                return other
            if other in self._left and not _is_in_use(outputs):
                self._left.discard(other)
                self.keepers.pop(other, None)
        return None

    def kept_addresses(self) -> set[int]:
        """Where replays of the pool's graphs leave results."""
        keepers = self.keepers.copy().items()
        return {place for number, kept in keepers if number not in self._left for place in kept.kept_addresses}

    @property
    def handle(self) -> Any:
        """The device's pool. One that no graph uses any more may be gone, so the next graph gets a new one."""
        if self._handle is None or (self.graphs == 0 and not self._is_given):
            self._handle = self._device.pool()
        return self._handle

    def split(self) -> None:
        """Give backwards another pool: gradients are there when a forward is called, which may not write to them."""
        self._for_backwards = self._for_backwards or Pool(self._device, turn=self.turn)

    @property
    def for_backwards(self) -> Pool:
        return self._for_backwards or self

    def wait_for_last_replay(self) -> None:
        """Let the current stream wait for the last replay of this pool."""
        self.wait_for_last_replay_on(self._device.stream())

    def wait_for_last_replay_on(self, stream: Any) -> None:
        """Let `stream`, which is the current one, wait for the last replay of this pool."""
        if stream == self.stream:
            return
        if self._lasts:
            self._device.follow(self.stream)
        else:
            self._device.synchronize()  # the stream may be gone, and its work still be running
        self.stream, self._lasts = stream, self._device.stream_lasts()


def _is_in_use(kept: OutputPlan | None) -> bool:
    return kept is not None and kept.are_kept_in_use is not None and kept.are_kept_in_use()


def pool_for(device: Device, handle: Any, turn: Turn | None = None) -> Pool:
    """A new pool, or, for a handle that the user gave, the pool that all graphs with this handle share."""
    if handle is None:
        return Pool(device, turn=turn)
    pool = _given.get((device.name, handle))
    if pool is None:
        pool = _given[(device.name, handle)] = Pool(device, handle)
    return pool


_MOST_PROGRAMS = 8  # that share a pool: each looks at what the others keep
_turns: WeakKeyDictionary[Journal, Turn] = WeakKeyDictionary()
_of_steps: WeakKeyDictionary[Journal, dict[str, Pool]] = WeakKeyDictionary()


def pool_of_steps(device: Device, journal: Journal, *, alone: bool) -> Pool:
    """The pool that forwards and backwards of one compiled object share: they are replayed one after the other.

    `alone`: a pool of its own, in the same turn as the others, since a backward reads what a forward keeps.
    """
    turn = _turns.setdefault(journal, Turn())
    if alone:
        return Pool(device, turn=turn)
    pools = _of_steps.setdefault(journal, {})
    pool = pools.get(device.name)
    if pool is None or pool.programs == _MOST_PROGRAMS:
        pool = pools[device.name] = Pool(device, turn=turn)
    pool.programs += 1
    return pool


# -- captured graphs ---------------------------------------------------------------------------------------------------


_NOTHING: frozenset[int] = frozenset()


@dataclass
class LastRead:
    """Saved values whose only reader is one backward. The backward reuses their memory once it has read them.

    `owning` are the inputs, by index, that own the memory: the program frees them at their last use while it is
    captured. `keeper` is the forward's graph.
    """

    owning: dict[int, Tensor]
    keeper: CapturedGraph
    _is_held: Callable[[], bool]
    _read: Picker

    def put_into(self, args: list[Any]) -> frozenset[int]:
        """Hand the owning tensors over to a list of inputs. Returns their places."""
        places = frozenset(self.owning)
        while self.owning:
            index, value = self.owning.popitem()
            args[index] = value
        return places

    def is_shared(self, args: list[Any]) -> bool:
        """Whether anything but these inputs of a call holds the saved values."""
        return retains_graph() or self._is_held() or _most_referenced(self._read(args)) > _IN_A_LIST


def _most_referenced(values: Sequence[Any]) -> int:
    return max(map(getrefcount, values), default=0)


_probe = [object()]
_IN_A_LIST = _most_referenced(picker([0])(_probe))  # references to something that only a list holds


@dataclass(frozen=True, slots=True)
class FastReplay:
    """The replay of a call that is like the one before: `fits` says whether it is, and then `run` is all of it.

    `seen` are the results that are tensors even if others are `KeptValues`; None if all are. `reads` are the outputs of
    a forward that a backward reads where they are, without tensors for them.
    """

    fits: Guard
    run: ReplayBody
    seen: frozenset[int] | None = None
    reads: OutputPlan | None = None


@dataclass
class CapturedGraph:
    """One capture: `checked` are the addresses that it was made with, `copied` the inputs that every call copies.

    `last_read` are inputs whose memory a replay computes in, once it has read them. `boxed` is its replay inside of
    AOTAutograd's wrappers, with the stream it is for. `fast` recognises the next call, if that is like the one before,
    and replays it. Both are made by the first call that needs them.
    """

    replay: Replay
    pool: Pool
    outputs: OutputPlan
    checked: Addresses
    copied: list[int]
    buffers: list[InputBuffer]
    held: list[Tensor]
    takes_over: bool
    number: int  # of its pool's captures
    last_read: LastRead | None = None
    is_freed: bool = False
    owner: int | None = None
    boxed: tuple[Any, ReplayBody] | None = None
    fast: FastReplay | None = None
    _copies: Copies = field(init=False)

    def __post_init__(self) -> None:
        self._copies = Copies([buffer.target for buffer in self.buffers])
        self._copied = picker(self.copied)
        self._simple = not self.takes_over and all(buffer.is_simple for buffer in self.buffers)
        self._note_lent()

    def _note_lent(self) -> None:
        lent = [buffer.view for buffer in self.buffers] if self.takes_over else []
        self._lent = [*lent, *self.outputs.in_place()]
        self._lent_at = Addresses(range(len(self._lent)), self._lent)

    def give_up(self, args: list[Any], places: Iterable[int]) -> LastRead | None:
        """Give the memory of kept results back to the pool once the backward that takes them as inputs has read them.

        The inputs are put on memory that they do not own. None if something else holds them.
        """
        read = [index for index in places if self.outputs.keeps(args[index])]
        if retains_graph() or _most_referenced(picker(read)(args)) > _IN_A_LIST:
            return None
        lent, is_held = self.outputs.give_up(Counter(storage_address(args[index]) for index in read))
        self._note_lent()
        if not lent:
            return None
        self.outputs.given_up_to = self.pool.captures  # every later one may get the memory
        owning = {index: args[index] for index in read if storage_address(args[index]) in lent}
        for index, value in owning.items():
            args[index] = laid_on(lent[storage_address(value)], value)
        return LastRead(owning, self, is_held, picker(list(owning)))

    def may_read(self, outputs: OutputPlan) -> bool:
        """Whether a replay that computes in values kept by a forward would do so in the memory of these."""
        read = self.last_read
        return read is None or (read.keeper.outputs is outputs and not read.keeper.is_freed)

    @property
    def lends(self) -> bool:
        """Whether the user's tensors share memory with the graph."""
        return bool(self._lent)

    def storage_replaced(self) -> bool:
        """Whether a tensor that shares memory with the graph has another storage now, because it was resized."""
        return bool(self._lent_at.moved(self._lent))

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
        memory = {storage_address(target) for target, _ in pairs}
        if any(storage_address(source) in memory for _, source in pairs):
            pairs = [(target, source.clone()) for target, source in pairs]  # they trade places
        for target, source in pairs:
            target.copy_(source)

    def free(self) -> None:
        """Free the graph. If results on the pool's memory are still read, wait until they are not
        (`free_what_was_read`).
        """
        self.is_freed = True
        in_use = self.outputs.are_kept_in_use
        if self.outputs.given_up_to is not None and in_use is not None and in_use():
            _waiting_for_readers.append(self)
            return
        self.pool.leave(self.number)
        self.replay.free([*self.buffers, *self.held])
        self.buffers, self.held, self._lent, self._lent_at = [], [], [], Addresses((), ())
        self.boxed = self.fast = None


_waiting_for_readers: deque[CapturedGraph] = deque()  # of the process: they outlive the programs that they are of


def free_what_was_read() -> None:
    """Free the graphs that waited for readers of their results, where there are none any more."""
    for _ in range(len(_waiting_for_readers)):
        try:
            graph = _waiting_for_readers.popleft()
        except IndexError:  # another thread is at it
            return
        lock = graph.pool.turn.lock
        if lock.acquire(blocking=False):
            try:
                graph.free()
            finally:
                lock.release()
        else:
            _waiting_for_readers.append(graph)


def capture_graph(
    device: Device,
    run: Boxed,
    plan: CapturePlan,
    args: list[Any],
    stays: Iterable[int],
    pool: Pool,
    arena: Arena,
    error_mode: str,
    last_read: LastRead | None = None,
) -> CapturedGraph:
    """Capture `run` for these inputs. Raises what goes wrong, and leaves nothing behind."""
    stays = frozenset(stays) if plan.clone_input == "auto" else _NOTHING
    copied = [index for index in plan.plain if index not in stays]
    captured, buffers = _with_buffers(plan, args, copied, arena)
    run = run if plan.tail is None else plan.tail.captured
    given = list(captured)
    read = _NOTHING if last_read is None else last_read.put_into(given)
    with laid_out_by_caller(plan.unlaid) as unlaid:
        replay, results = device.capture(lambda: run(given), pool.handle, error_mode)
    try:
        flat = tuple(results) if isinstance(results, (list, tuple)) else (results,)
        flat = flat if plan.tail is None else plan.tail.computed(flat)
        inputs = {index: captured[index] for index in (*plan.by_address, *plan.plain) if index not in read}
        put_back = [index for index in plan.put_back if index in copied]
        about = flat, plan.kinds, inputs, unlaid
        outputs = PuttingBack(*about, put_back) if put_back else OutputPlan(*about)
        del results, flat, about, unlaid
        outputs.settle()
        checked = Addresses((*plan.looked_at, *stays), args, plan.unchecked)
        held = [args[index].detach() for index in plan.unchecked]  # the memory, whatever becomes of the parameter
        pool.captures += 1
        takes_over = plan.clone_input is False
        graph = CapturedGraph(replay, pool, outputs, checked, copied, buffers, held, takes_over, pool.captures)
    except BaseException:
        replay.free()
        raise
    pool.enter(graph.number, outputs)
    if last_read is not None:
        graph.last_read, last_read.keeper.outputs.given_up_to = last_read, graph.number
    return graph


def _with_buffers(
    plan: CapturePlan, args: list[Any], copied: list[int], arena: Arena
) -> tuple[list[Any], list[InputBuffer]]:
    """The inputs that a graph is captured on, and the buffers among them, filled for this call."""
    taken = _alone_in_their_memory(plan, args) if plan.clone_input is False else _NOTHING
    own = iter(arena.buffers([args[index] for index in copied if index not in taken]))
    buffers = [InputBuffer(args[index], None) if index in taken else next(own) for index in copied]
    captured = list(args)
    for index, buffer in zip(copied, buffers, strict=True):
        captured[index] = buffer.view
        if index not in taken:  # a device may look at its inputs while it captures
            buffer.target.copy_(buffer.source(args[index]))
    for index in plan.hosts:
        captured[index] = args[index].clone()
    return captured, buffers


def _alone_in_their_memory(plan: CapturePlan, args: Sequence[Any]) -> frozenset[int]:
    """The inputs that another can be copied into: none that overlaps a parameter, a cache or one more input."""
    starts = {index: args[index].data_ptr() for index in (*plan.by_address, *plan.plain)}
    spans = sorted((start, start + bytes_of(args[index]), index) for index, start in starts.items())
    shared: set[int] = set()
    furthest, owner = 0, -1
    for start, end, index in spans:
        if start < min(furthest, end):
            shared |= {index, owner}
        if end > furthest:
            furthest, owner = end, index
    return frozenset(plan.plain) - shared


# -- the store ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slot:
    """A place for one graph."""

    key: CaptureKey
    addresses: tuple[int, ...]


class Store:
    """The captured graphs of one program, at most `limit`: the most recently used ones.

    A key may have several graphs, one for each set of parameters and caches that was passed: compiled layers of one
    class share their code, and with it this store.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._graphs: OrderedDict[Slot, CapturedGraph] = OrderedDict()
        self._latest: dict[CaptureKey, tuple[Slot, CapturedGraph]] = {}
        self.newest: CapturedGraph | None = None  # the graph that was used last, of any key
        self._newest_key: CaptureKey | None = None
        self._known: Counter[CaptureKey] = Counter()

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def keys(self) -> int:
        return len(self._known)

    def knows(self, key: CaptureKey) -> bool:
        return self._known[key] > 0

    def latest(self, key: CaptureKey) -> CapturedGraph | None:
        """The graph of a key that was used last."""
        if self.newest is not None and self._newest_key == key:  # a lookup costs more: a slot has hundreds of addresses
            return self.newest
        found = self._latest.get(key)
        if found is None:
            return None
        self._graphs.move_to_end(found[0])
        self.newest, self._newest_key = found[1], key
        return found[1]

    def find(self, slot: Slot) -> CapturedGraph | None:
        graph = self._graphs.get(slot)
        if graph is not None:
            self._graphs.move_to_end(slot)
            self._note_use(slot, graph)
        return graph

    def put(self, slot: Slot, graph: CapturedGraph) -> list[Slot]:
        """Keep a graph, free the one it replaces and those that there is no room for. Returns the slots of the latter.

        The new graph is there before any is freed: a memory pool that no graph uses is gone.
        """
        old = self._graphs.pop(slot, None)
        self._graphs[slot] = graph
        self._note_use(slot, graph)
        if old is None:
            self._known[slot.key] += 1
        else:
            old.free()
        evicted = list(self._graphs)[: max(0, len(self._graphs) - self._limit)]
        for oldest in evicted:
            self.drop(oldest)
        return evicted

    def drop(self, slot: Slot) -> None:
        graph = self._graphs.pop(slot, None)
        if graph is None:  # it was freed meanwhile, with a model that is gone
            return
        self._known[slot.key] -= 1
        if not self._known[slot.key]:
            del self._known[slot.key]
        if slot.key in self._latest and self._latest[slot.key][1] is graph:
            del self._latest[slot.key]
        if self.newest is graph:
            self.newest = None
        graph.free()

    def _note_use(self, slot: Slot, graph: CapturedGraph) -> None:
        self._latest[slot.key] = slot, graph
        self.newest, self._newest_key = graph, slot.key

    def _now(self) -> list[CapturedGraph]:
        """All graphs there are: a backward asks in a thread of its own, while a forward may capture another."""
        return list(self._graphs.values())

    def lasting_addresses(self) -> set[int]:
        """Where the graphs keep results that nothing copies, and where they read parameters."""
        return {address for graph in self._now() for address in (*graph.outputs.kept_addresses, *graph.checked.known)}

    def may_keep(self) -> bool:
        """Whether any graph keeps what it saves in place; True while there is none."""
        graphs = self._now()
        return not graphs or any(graph.outputs.keeps_saved for graph in graphs)

    def discard(self, graph: CapturedGraph) -> None:
        """Drop one graph, wherever it is."""
        for slot in [slot for slot, each in self._graphs.items() if each is graph]:
            self.drop(slot)

    def keeper(self, tensor: Tensor) -> CapturedGraph | None:
        """The graph that has handed out a tensor and keeps its memory."""
        return next((graph for graph in self._now() if graph.outputs.keeps(tensor)), None)

    def holds(self, pool: Pool, number: int) -> bool:
        """Whether a graph of a pool is one of these."""
        return any(each.pool is pool and each.number == number for each in self._now())

    def free(self, owner: int | None = None) -> None:
        """Free all graphs, or those that were captured for one owner."""
        for slot, graph in list(self._graphs.items()):
            if owner is None or graph.owner == owner:
                self.drop(slot)


# -- what a forward saves for its backward -----------------------------------------------------------------------------


class SavedMemory:
    """Where the backward of a training step finds what the forward saved: at the same addresses in every replay.

    These are the parameters that the forward's graphs were captured with, and values that they keep in place. A forward
    is not replayed while an earlier one's values are in use. `is_kept` is False where they are copied out instead.
    """

    def __init__(self) -> None:
        self._store: Store | None = None
        self._may_be_kept = False

    @property
    def is_kept(self) -> bool:
        """Whether the forward's graphs keep values, or will: all that is saved may turn out to be inputs."""
        return self._may_be_kept and self._store is not None and self._store.may_keep()

    def offer(self, store: Store, *, may_be_kept: bool) -> None:
        """Called for a forward that is captured; `may_be_kept`: it is to keep values in its graphs."""
        self._store, self._may_be_kept = store, may_be_kept

    def withdraw(self) -> None:
        """Called when the forward copies its values out, or is not captured."""
        self._may_be_kept = False

    def addresses(self) -> set[int]:
        return set() if self._store is None else self._store.lasting_addresses()

    def keeper(self, args: Sequence[Any], places: Sequence[int]) -> CapturedGraph | None:
        """The forward's graph that keeps inputs of a backward, which are at these places."""
        if self._store is None:
            return None
        found = (self._store.keeper(args[index]) for index in places)
        return next((graph for graph in found if graph is not None), None)
