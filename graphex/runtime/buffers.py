"""The memory of a captured graph's inputs and outputs: copies in, private buffers, copies out.

    Copies        small tensors copied in one launch, a few large ones one by one
    InputBuffer   a private buffer, laid out as the input is; `Arena` is the memory of all buffers of a graph
    OutputPlan    how each result gets out of the graph's memory

Tensors of one type are copied by one kernel as they are. Tensors of several types are too, read as the widest integers
that divide them all:

    int64[1], bfloat16[8], bool[16]   ->   int64[1], int64[2], int64[2]

The `OutputKind` of a result says how it gets out. A result that a region has computed in padded rows is copied once,
from these into the strides that the graph promises. A large product at the end of a graph is `Computed` after the
replay instead, into new memory, and is not copied at all.

A result that lives in an input is returned as that part of the input of *this* call, always. Where the graph has
written to a copy of an input, the new value is put back first.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor

from graphex.errors import CaptureError
from graphex.regions.region import Unlaid, lay_out
from graphex.runtime.guards import picker
from graphex.torch_private.memory import (
    UNMARKED,
    Marks,
    Owners,
    borrowed,
    copier,
    extent,
    flipped,
    has_memory,
    is_dense,
    marked,
    marks_of,
    on_storage_of,
    overlaps_itself,
    storage_address,
    storage_owners,
    whole_storage,
)

_UNITS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
_WIDEST = _UNITS[0][0]
_LARGE, _FEW = 2**18, 4  # bytes of a tensor, and how many such tensors, that are copied one by one
_MOST_REINTERPRETED = 16  # looking at a tensor as integers costs the host about as much as half a launch


class Copies:
    """Copies between a fixed list of tensors and lists that are laid out alike.

    A few large tensors are copied one by one: the kernel that copies many has one block for every 65,536 elements, so
    that a large tensor would keep a small part of a GPU busy for long.
    """

    def __init__(self, fixed: Sequence[Tensor]) -> None:
        large = [place for place, tensor in enumerate(fixed) if bytes_of(tensor) >= _LARGE]
        self._large = [(place, fixed[place]) for place in large] if len(large) <= _FEW else []
        alone = {place for place, _ in self._large}
        small = [place for place in range(len(fixed)) if place not in alone]
        self._together, self._small = _Together([fixed[place] for place in small]) if small else None, picker(small)

    def fill(self, sources: Sequence[Tensor]) -> None:
        """Copy into the fixed tensors."""
        for place, tensor in self._large:
            tensor.copy_(sources[place])
        if self._together is not None:
            self._together.fill(self._small(sources))

    def drain(self, targets: Sequence[Tensor]) -> None:
        """Copy out of the fixed tensors, into fresh ones."""
        for place, tensor in self._large:
            targets[place].copy_(tensor)
        if self._together is not None:
            self._together.drain(self._small(targets))


class _Together:
    """Copies between such lists in one launch."""

    def __init__(self, fixed: Sequence[Tensor]) -> None:
        self._fixed = list(fixed)
        self._copy = copier(tensor.dtype for tensor in fixed)
        self._unit = _common_unit(fixed)
        if self._unit is not None:
            self._integers = _as_integers(self._fixed, self._unit)
            self._copy_integers = copier([self._unit])

    def fill(self, sources: Sequence[Tensor]) -> None:
        if self._unit is None or not _is_plain_bits(sources):
            self._copy(self._fixed, sources)
        else:
            self._copy_integers(self._integers, _as_integers(sources, self._unit))

    def drain(self, targets: Sequence[Tensor]) -> None:
        if self._unit is None:
            self._copy(targets, self._fixed)
        else:
            self._copy_integers(_as_integers(targets, self._unit), self._integers)


def _common_unit(tensors: Sequence[Tensor]) -> torch.dtype | None:
    if len({tensor.dtype for tensor in tensors}) < 2 or len(tensors) > _MOST_REINTERPRETED:
        return None
    if not all(is_dense(tensor) and not tensor.is_complex() for tensor in tensors) or not _is_plain_bits(tensors):
        return None
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    return next(dtype for width, dtype in _UNITS if all(size % width == 0 for size in sizes))


def _is_plain_bits(tensors: Sequence[Tensor]) -> bool:
    """Whether these tensors are nothing but bits, at addresses that are aligned for integers."""
    return all(
        has_memory(tensor)
        and not tensor.is_neg()
        and tensor.data_ptr() % _WIDEST == 0
        and tensor.storage_offset() * tensor.element_size() % _WIDEST == 0
        for tensor in tensors
    )


def _as_integers(tensors: Sequence[Tensor], unit: torch.dtype) -> list[Tensor]:
    return [tensor.as_strided((tensor.numel(),), (1,)).view(unit) for tensor in tensors]


# -- inputs ------------------------------------------------------------------------------------------------------------


_ALIGNMENT = 512  # what a device's allocator gives; kernels are chosen by it


class InputBuffer:
    """A private buffer of one input: the graph reads `view`, and each call copies its tensor into `target`.

    The strides of the input are kept, gaps included, because the graph was compiled for them. An expanded dimension
    (stride 0) holds one element that is copied once: `source` gives the part of a call's tensor that is copied. For a
    conjugate view, the buffer's memory holds the conjugate too, because the graph was traced for one.
    """

    def __init__(self, like: Tensor, memory: Tensor | None) -> None:
        """`memory` is bytes to lay it out in; None takes over the tensor itself as the buffer."""
        self._marks = marks_of(like)
        self._compact = None if is_dense(like) else _without_expansion(like)
        if memory is None:
            self.view = like.detach()  # the memory, whatever becomes of the caller's tensor
            self.target = self.source(self.view)
        else:
            flat = memory.view(like.dtype)
            self.view = marked(flat.as_strided(like.shape, like.stride(), flat.storage_offset()), self._marks)
            self.target = flat.as_strided(self._compact or like.shape, like.stride(), flat.storage_offset())
        if self._compact is not None and overlaps_itself(self.target):
            raise CaptureError(f"an input of shape {tuple(like.shape)} and strides {like.stride()} overlaps itself")

    @property
    def is_simple(self) -> bool:
        """Whether a call's tensor is copied as it is."""
        return self._compact is None and self._marks == UNMARKED

    def source(self, tensor: Tensor) -> Tensor:
        if self._compact is not None:
            tensor = tensor.as_strided(self._compact, tensor.stride(), tensor.storage_offset())
        return tensor if self._marks == UNMARKED else flipped(tensor, self._marks)


class Arena:
    """Memory for the buffers of all keys of a graph: every key lays its own out from the start.

    A key's buffers are filled right before its replay, so another key may have written to them.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def buffers(self, inputs: Sequence[Tensor], *, shared: bool = True) -> list[InputBuffer]:
        sizes = [_aligned(bytes_of(tensor)) for tensor in inputs]
        memory = self._room(sum(sizes), inputs[0].device, shared) if inputs else None
        buffers, start = [], 0
        for tensor, size in zip(inputs, sizes, strict=True):
            assert memory is not None
            buffers.append(InputBuffer(tensor, memory[start : start + bytes_of(tensor)]))
            start += size
        return buffers

    def _room(self, size: int, device: torch.device, shared: bool) -> Tensor:
        if not shared:
            with torch.inference_mode(False):
                return torch.zeros(size, dtype=torch.uint8, device=device)
        if self._memory is None or self._memory.numel() < size:
            with torch.inference_mode(False):  # calls in and outside of that mode write to it
                self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        return self._memory


def bytes_of(tensor: Tensor) -> int:
    """The bytes from a tensor's first element to its last, gaps included, expanded dimensions counted once."""
    return extent(tensor.shape, tensor.stride()) * tensor.element_size()


def _without_expansion(tensor: Tensor) -> torch.Size:
    return torch.Size(1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


# -- outputs -----------------------------------------------------------------------------------------------------------


_new_on_its_memory = attrgetter("data")


class OutputKind(Enum):
    """How a result gets out of the graph's memory, where it does not live in an input."""

    COPIED = auto()  # into new memory, so that a kept one stays right; results that share memory still do
    SEPARATE = auto()  # copied too, but no two results share memory
    HANDED_ON = auto()  # copied to an address that is the same in every call, for another piece of the same call
    IN_PLACE = auto()  # not at all: it is the graph's own memory, which any replay of its pool may write to again
    KEPT = auto()  # in place, for what a training step saves and for gradients: no replay before their holders let go
    SHOWN = auto()  # in place and watched like those, for large results of a training step that the user gets
    LENT = auto()  # in place, for a caller that copies it before the next replay


Kinds = Sequence[OutputKind]

_SHARING = (OutputKind.COPIED, OutputKind.HANDED_ON)  # copies of results that share memory share it, too
_WATCHED = (OutputKind.KEPT, OutputKind.SHOWN)
_STAYING = (OutputKind.IN_PLACE, OutputKind.LENT, *_WATCHED)


@dataclass(frozen=True)
class Constant:
    """A result that is no tensor, or one without memory: the same in every call."""

    value: Any


@dataclass(frozen=True)
class View:
    """A part of another tensor's memory. `offset` counts elements of `dtype` from where that tensor begins."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    marks: Marks

    @classmethod
    def like(cls, value: Tensor, offset: int) -> View:
        return cls(value.dtype, value.size(), value.stride(), offset, marks_of(value))


@dataclass(frozen=True)
class PartOfInput:
    """A result that lives in an input: the input itself, or a view of it."""

    index: int
    view: View | None

    def of(self, given: Tensor) -> Tensor:
        view = self.view
        if view is None:
            return given
        start = given.storage_offset()
        if given.dtype == view.dtype:
            return marked(given.as_strided(view.size, view.stride, start + view.offset), view.marks)
        start = start * given.element_size() // view.dtype.itemsize
        return marked(on_storage_of(given, view.dtype, view.size, view.stride, start + view.offset), view.marks)


@dataclass(frozen=True)
class Copied:
    """A result that is the whole copy of `source`."""

    source: int


@dataclass(frozen=True)
class Window:
    """A result that is a view of the copy of a whole storage."""

    source: int
    view: View

    def of(self, copy: Tensor) -> Tensor:
        view = self.view
        if copy.dtype != view.dtype:  # outputs of two types in one storage look at the same bytes
            copy = copy.view(view.dtype)
        return marked(copy.as_strided(view.size, view.stride, view.offset), view.marks)


@dataclass(frozen=True)
class LaidOut:
    """A copy of `source` in other strides; `empty` allocates it. The result is the part of it that `window` says."""

    source: Tensor
    empty: Callable[[], Tensor]
    window: tuple[torch.Size, tuple[int, ...], int]

    def taken(self) -> Tensor:
        return lay_out(self.empty(), self.source).as_strided(*self.window)


@dataclass(frozen=True)
class Computed:
    """A result that is computed after the replay, into new memory, from what the graph has left in its own."""

    run: Callable[[list[Tensor]], Sequence[Tensor]]
    reads: tuple[Tensor, ...]

    def taken(self) -> Tensor:
        return self.run(list(self.reads))[0]


@dataclass(frozen=True)
class InPlace:
    """A result that is the graph's own tensor. `owners` counts the tensors on its storage when the user holds none."""

    value: Tensor
    kind: OutputKind
    owners: int = 0


class KeptValues:
    """A stand-in for the values that one replay has kept for its backward: they are in use as long as it lives."""

    __slots__ = ("__weakref__", "outputs")

    def __init__(self, outputs: OutputPlan) -> None:
        self.outputs = outputs

    def put_into(self, args: list[Any]) -> None:
        """Put tensors where the list has None."""
        missing = [index for index, value in enumerate(args) if value is None]
        for index, tensor in zip(missing, self.outputs.look(), strict=True):
            args[index] = tensor

    def filled(self, args: Sequence[Any]) -> tuple[list[Any], frozenset[int]]:
        """A copy of the list with the graph's own tensors, which the caller must not keep, and the places of these."""
        kept, missing = iter(self.outputs.kept), frozenset(place for place, value in enumerate(args) if value is None)
        return [next(kept) if value is None else value for value in args], missing


class OutputPlan:
    """How each output leaves the graph's memory. The plan is made once, at capture; `take` runs after every replay.

    `kinds` says for each output how it gets out. `inputs` are the tensors the graph was captured on, by their index.
    `unlaid` are copied into other strides than they have.
    """

    _may_keep_unseen = True  # `take_unseen` does all that `take` does

    def __init__(
        self, outputs: Sequence[Any], kinds: Kinds, inputs: dict[int, Tensor], unlaid: Sequence[Unlaid] = ()
    ) -> None:
        self.given_up_to: int | None = None  # graphs of the pool may compute in the kept memory from this capture on
        self._last_kept: Callable[[], KeptValues | None] = lambda: None  # of the last replay
        self.was_looked_at = True  # tensors on kept memory were handed out since the last replay
        self._sources: list[Tensor] = []
        self._empties: list[Callable[[], Tensor]] = []
        storages: dict[int, int] = {}
        copied = [value for value, kind in zip(outputs, kinds, strict=True) if kind in _SHARING and _lives(value)]
        sharing = Counter(storage_address(value) for value in copied if value.numel())
        owners = [(index, tensor, tensor.data_ptr(), bytes_of(tensor)) for index, tensor in inputs.items()]
        left = {storage_address(each.value): each for each in unlaid}
        self._plan: list[Any] = []
        for value, kind in zip(outputs, kinds, strict=True):
            if isinstance(value, Computed):
                self._plan.append(value)
            elif not _lives(value):
                self._plan.append(Constant(value))
            elif value.numel() and (each := left.get(storage_address(value))):
                self._plan.append(_laid_out(each, value))
            elif part := _part_of_input(value, owners):
                self._plan.append(part)
            elif kind in _STAYING:
                self._plan.append(InPlace(value, kind))
            elif is_dense(value) and (kind is OutputKind.SEPARATE or sharing[storage_address(value)] <= 1):
                self._plan.append(Copied(self._source(value, kind)))
            else:
                whole = None if kind is OutputKind.SEPARATE else storages.get(storage_address(value))
                if whole is None:
                    whole = storages[storage_address(value)] = self._source(whole_storage(value, value.dtype), kind)
                self._plan.append(Window(whole, View.like(value, int(value.storage_offset()))))
        self._copies = Copies(self._sources)
        self.parts = [step.index for step in self._plan if isinstance(step, PartOfInput)]
        self.needed = picker(self.parts)
        self._as_copied = self._plan == [Copied(place) for place in range(len(self._sources))]
        is_alone = self._as_copied and len(self._plan) == 1 and kinds[0] is not OutputKind.HANDED_ON
        self._clone = _plain_clone(self._sources[0]) if is_alone else None

    def settle(self) -> None:
        """Find out which results stay with the graph. Call it when only this plan and the graph hold the outputs."""
        self._plan = [
            InPlace(step.value, step.kind, storage_owners(step.value)) if isinstance(step, InPlace) else step
            for step in self._plan
        ]
        in_place = [(place, step) for place, step in enumerate(self._plan) if isinstance(step, InPlace)]
        self._unwatched = [(place, step) for place, step in in_place if step.kind is OutputKind.IN_PLACE]
        self.may_be_held = bool(self._unwatched)
        self._note_kept()
        self.keeps_saved = bool(self._in_place(OutputKind.KEPT))
        is_kept = [isinstance(step, InPlace) and step.kind in _WATCHED for step in self._plan]
        places = [*(i for i, kept in enumerate(is_kept) if kept), *(i for i, kept in enumerate(is_kept) if not kept)]
        self._others = [step for step, kept in zip(self._plan, is_kept, strict=True) if not kept]
        self.kept_places = places[: sum(is_kept)]
        self.keeps_unseen = self.keeps_saved and not self._in_place(OutputKind.SHOWN) and self._may_keep_unseen
        self._in_order = picker([place for place, _ in sorted(enumerate(places), key=itemgetter(1))])

    def _note_kept(self, known: Owners | None = None) -> None:
        self.kept = self._in_place(*_WATCHED)
        with_memory = [value for value in self.kept if value.numel()]  # others cannot be overwritten
        self._owners = Owners(with_memory, known)
        self.are_kept_in_use = self._are_kept_in_use if with_memory else None
        self.kept_addresses = list(map(Tensor.data_ptr, self.kept))

    def _are_kept_in_use(self) -> bool:
        return self._last_kept() is not None or (self.was_looked_at and self._owners.are_more())

    def keeps(self, tensor: Tensor) -> bool:
        """Whether a tensor that was handed out is on memory that stays with the graph."""
        return self._owners.own(tensor)

    def give_up(self, readers: Mapping[int, int]) -> tuple[dict[int, Tensor], Callable[[], bool]]:
        """Give kept values that only readers hold back to the pool, which may use their memory again.

        `readers` counts the tensors of a call that read a storage, by its address. Returns tensors on the memory that
        is given up, by that address, and a function that says whether anything but so many readers holds any of it.
        """
        alone = self._owners.alone(readers)
        self._plan = _without_owning(self._plan, alone)
        self._note_kept(self._owners)
        lent = {address: value for value in self.kept if (address := storage_address(value)) in alone}
        return lent, self._owners.besides(alone)

    def _in_place(self, *kinds: OutputKind) -> list[Tensor]:
        return [step.value for step in self._plan if isinstance(step, InPlace) and step.kind in kinds]

    def in_place(self) -> list[Tensor]:
        """The outputs whose memory is handed out to the user."""
        return self._in_place(OutputKind.IN_PLACE, *_WATCHED)

    def still_held(self) -> list[int]:
        """The outputs in place that are still held from the call before."""
        return [place for place, step in self._unwatched if storage_owners(step.value) > step.owners]

    def take(self, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
        """The results; `inputs` are the inputs of this call that are `needed`."""
        if self._clone is not None:
            return (self._clone(),)
        copies = self._copied()
        if self._as_copied:
            return tuple(copies)
        given = iter(inputs)
        others = [_result(step, copies, given) for step in self._others]
        return tuple(self._in_order([*self.look(), *others]))

    def _copied(self) -> list[Tensor]:
        copies = [empty() for empty in self._empties]
        if copies:
            self._copies.drain(copies)
        return copies

    def look(self) -> Iterable[Tensor]:
        """Tensors on the kept values, in the order of their places."""
        self.was_looked_at = True
        # There are hundreds of them. A new tensor on the same memory costs least without a version to share.
        return map(_new_on_its_memory, self.kept)

    def take_unseen(self, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
        """The results, with None for those that are kept, and a `KeptValues` behind them.

        Call it only after a replay for which no kept result of the graph was in use.
        """
        copies, given, kept = self._copied(), iter(inputs), KeptValues(self)
        others = [_result(step, copies, given) for step in self._others]
        self._last_kept, self.was_looked_at = weakref.ref(kept), False
        return (*self._in_order([*(None for _ in self.kept), *others]), kept)

    def _source(self, tensor: Tensor, kind: OutputKind) -> int:
        self._sources.append(borrowed(tensor))
        empty = empty_for(tensor, tensor.size(), tensor.stride())
        self._empties.append(empty if kind is not OutputKind.HANDED_ON else empty().detach)
        return len(self._sources) - 1


class PuttingBack(OutputPlan):
    """The plan of a graph that writes to copies of the inputs `put_back`: `take` copies their values to the inputs."""

    _may_keep_unseen = False

    def __init__(
        self,
        outputs: Sequence[Any],
        kinds: Kinds,
        inputs: dict[int, Tensor],
        unlaid: Sequence[Unlaid],
        put_back: Sequence[int],
    ) -> None:
        super().__init__(outputs, kinds, inputs, unlaid)
        self._written = [inputs[index] for index in put_back]
        self.needed = picker([*put_back, *self.parts])

    def take(self, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
        for given, written in zip(inputs, self._written, strict=False):
            given.copy_(written)
        return super().take(inputs[len(self._written) :])


def _laid_out(unlaid: Unlaid, value: Tensor) -> LaidOut:
    promised = unlaid.promised
    window = value.size(), value.stride(), int(value.storage_offset())
    return LaidOut(borrowed(unlaid.value), empty_for(promised, promised.size(), promised.stride()), window)


def _plain_clone(source: Tensor) -> Callable[[], Tensor] | None:
    """The `clone` of a tensor, half the work for the host; None if it does not copy everything about the tensor."""
    return source.clone if not source.storage_offset() and not any(marks_of(source)) else None


def empty_for(source: Tensor, size: Sequence[int], stride: Sequence[int]) -> Callable[[], Tensor]:
    """A function that allocates a copy of `source`, or of a part of it with this size.

    The copy begins as far into its memory as the source does: AOTAutograd looks there to find out which part of an
    input a result stands for.
    """
    offset, dtype, device = int(source.storage_offset()), source.dtype, source.device
    if not offset:
        return partial(torch.empty_strided, size, stride, dtype=dtype, device=device)
    room = offset + max(0, 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True)))
    return lambda: torch.empty(room, dtype=dtype, device=device).as_strided(size, stride, offset)


def _result(step: Any, copies: list[Tensor], given: Any) -> Any:
    if isinstance(step, Copied):
        return copies[step.source]
    if isinstance(step, Window):
        return step.of(copies[step.source])
    if isinstance(step, PartOfInput):
        return step.of(next(given))
    if isinstance(step, InPlace):
        return step.value.detach()
    if isinstance(step, (LaidOut, Computed)):
        return step.taken()
    return step.value.view_as(step.value) if isinstance(step.value, Tensor) else step.value


def _part_of_input(value: Tensor, owners: list[tuple[int, Tensor, int, int]]) -> PartOfInput | None:
    """The input that a result is a part of, found by address: buffers of several inputs may share one storage."""
    if not value.numel():
        return None
    address, memory = value.data_ptr(), storage_address(value)
    candidates = [each for each in owners if storage_address(each[1]) == memory]
    within = [each for each in candidates if each[2] <= address < each[2] + each[3]]
    for index, tensor, start, _ in within or candidates[:1]:  # `as_strided` may have left the input's own window
        offset, rest = divmod(address - start, value.element_size())
        if rest == 0 and (tensor.storage_offset() * tensor.element_size()) % value.element_size() == 0:
            return PartOfInput(index, None if value is tensor else View.like(value, offset))
    return None


def _without_owning(plan: list[Any], given_up: Container[int]) -> list[Any]:
    """The steps of a plan, where kept values at these addresses borrow their memory, and do not own it."""
    memory: dict[int, Tensor] = {}
    found: list[Any] = []
    for step in plan:
        is_kept = isinstance(step, InPlace) and step.kind is OutputKind.KEPT
        if is_kept and (address := storage_address(step.value)) in given_up:
            if address not in memory:
                memory[address] = borrowed(whole_storage(step.value, torch.uint8))
            step = replace(step, value=laid_on(memory[address], step.value))
        found.append(step)
    return found


def laid_on(memory: Tensor, like: Tensor) -> Tensor:
    """A tensor that looks at this memory as `like` does at its own."""
    given = on_storage_of(memory, like.dtype, like.size(), like.stride(), int(like.storage_offset()))
    return marked(given, marks_of(like))


def _lives(value: Any) -> bool:
    return isinstance(value, Tensor) and has_memory(value)
