"""Storages and version counters: keys and addresses of storages, the extent of tensors, overlap, owners, copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import gt

import torch
from torch import Tensor

from graphex.torch_private.lookup import private

Copier = Callable[[Sequence[Tensor], Sequence[Tensor]], object]
Marks = tuple[bool, bool]  # whether a tensor's memory holds the conjugate, and the negative, of its values
UNMARKED: Marks = (False, False)

tensor_begin: int | None = private(
    "torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr",
    None,
    lost="what decides whether a call is a replay runs in Python, which costs the host more",
)
"""The address of torch's C function that reads the address of a tensor. Inductor's generated code calls it too."""

# The types that `_foreach_copy_` is known to have a kernel for, on every device.
_COPIED_TOGETHER = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    }
)

_set_versions = private(
    "torch._C._autograd._unsafe_set_version_counter", None, lost="version counters count graphex's writes to inputs"
)


def sets_versions() -> bool:
    """Whether this torch can set version counters."""
    return _set_versions is not None


def set_versions(tensors: Sequence[Tensor], versions: Sequence[int]) -> None:
    """Let autograd think that the tensors were written to so many times."""
    if tensors:
        _set_versions(tuple(tensors), tuple(versions))


def _copy_one_by_one(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _move_one_by_one(tensors: Sequence[Tensor], ends: Sequence[Tensor], part: float) -> None:
    for tensor, end in zip(tensors, ends, strict=True):
        tensor.lerp_(end, part)


def _has_a_dimension_without_steps(tensor: Tensor) -> int:
    return int(any(size > 1 and step == 0 for size, step in zip(tensor.size(), tensor.stride(), strict=True)))


_copy_together: Copier = private(
    "torch._foreach_copy_", _copy_one_by_one, lost="inputs and results of a captured graph are copied one by one"
)
move_together: Callable[[Sequence[Tensor], Sequence[Tensor], float], object] = private(
    "torch._foreach_lerp_", _move_one_by_one
)
"""Moves each of some tensors a part of the way to another."""

_increment_version = private("torch._C._increment_version", torch.autograd.graph.increment_version)
_is_zerotensor = private("torch._is_zerotensor", lambda tensor: tensor._is_zerotensor())
_internal_overlap = private("torch._debug_has_internal_overlap", _has_a_dimension_without_steps)
_conjugate_view = private("torch._conj", torch.conj)
_negative_view = private("torch._neg_view", lost="graphs with tensors marked as negative are not captured")
_storage_at = private(
    "torch._C._construct_storage_from_data_pointer", None, lost="captured graphs share less of their memory"
)
_storage_uses = private(
    "torch._C._storage_Use_Count", lambda storage: 0, lost="results that are overwritten while held get no warning"
)
retains_graph: Callable[[], bool] = private(
    "torch._C._autograd._get_current_graph_task_keep_graph",
    lambda: True,
    lost="a backward does not compute in the memory of what it has read",
)
"""Whether the backward that runs in this thread leaves what was saved for another one."""


def copier(dtypes: Iterable[torch.dtype]) -> Copier:
    """A function that copies a list of tensors of these types into another: at once where there is a kernel for it."""
    return _copy_together if _COPIED_TOGETHER.issuperset(dtypes) else _copy_one_by_one


def count_writes(tensors: Sequence[Tensor]) -> None:
    """Tell autograd that the tensors were written to behind its back."""
    _increment_version(tensors)


def has_memory(tensor: Tensor) -> bool:
    """Autograd's symbolic zeros have none."""
    return not _is_zerotensor(tensor)


def is_dense(tensor: Tensor) -> bool:
    """Whether every element has a place of its own and there are no gaps between them."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements certainly share a place."""
    return bool(_internal_overlap(tensor) == 1)


def storage_key(tensor: Tensor) -> int:
    """The storage of a tensor as a number, for as long as the storage lives. Fake tensors have one too."""
    return int(tensor.untyped_storage()._cdata)


def storage_address(tensor: Tensor) -> int:
    """Where the storage of a tensor begins in memory; 0 if it holds nothing. Fake tensors have no address."""
    return tensor.untyped_storage().data_ptr()


def extent(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """The number of elements from a tensor's first to its last, gaps included, expanded dimensions counted once."""
    if 0 in sizes:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def whole_storage(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The memory behind a tensor as one flat tensor."""
    memory = tensor.untyped_storage()
    flat = torch.empty(0, dtype=dtype, device=tensor.device)
    length = memory.nbytes() // flat.element_size()
    return flat.set_(memory, 0, (length,), (1,))


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is what its memory holds: no symbolic zeros, and no subclass that dispatches for itself."""
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__ and has_memory(tensor)


def marks_of(tensor: Tensor) -> Marks:
    return tensor.is_conj(), tensor.is_neg()


def marked(tensor: Tensor, marks: Marks) -> Tensor:
    """The same memory, read with these marks."""
    return flipped(tensor, (tensor.is_conj() != marks[0], tensor.is_neg() != marks[1]))


def flipped(tensor: Tensor, marks: Marks) -> Tensor:
    """The same memory, read with these marks reversed."""
    conjugated, negated = marks
    if conjugated:
        tensor = _conjugate_view(tensor)
    return _negative_view(tensor) if negated else tensor


def borrowed(tensor: Tensor) -> Tensor:
    """The same memory without owning it: the caller knows that it stays there.

    A captured graph's memory belongs to its pool. Without an owner a block can serve the next graph of the pool too.
    """
    if _storage_at is None:
        return tensor
    memory = tensor.untyped_storage()
    storage = _storage_at(memory.data_ptr(), tensor.device, memory.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return marked(empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride()), marks_of(tensor))


def on_storage_of(owner: Tensor, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    """A tensor of another type on the memory of `owner`; `offset` counts elements of `dtype` from its start."""
    return torch.empty(0, dtype=dtype, device=owner.device).set_(owner.untyped_storage(), offset, size, stride)


class Owners:
    """The owners of some tensors' storages: how many there are now, and later whether there are more.

    A storage that `known` has counted before keeps that count: it may have more owners by now.
    """

    def __init__(self, tensors: Iterable[Tensor], known: Owners | None = None) -> None:
        self._storages = list({each._cdata: each for each in map(Tensor.untyped_storage, tensors)}.values())
        self._places = [storage._cdata for storage in self._storages]  # valid as long as the storages are
        counted: dict[int, int] = {} if known is None else dict(zip(known._places, known._before, strict=True))
        self._before: list[int] = [counted.get(place) or int(_storage_uses(place)) for place in self._places]

    def are_more(self) -> bool:
        return any(map(gt, map(_storage_uses, self._places), self._before))

    def own(self, tensor: Tensor) -> bool:
        """Whether a tensor is on a storage of these."""
        return storage_key(tensor) in self._places

    def alone(self, readers: Mapping[int, int]) -> dict[int, int]:
        """The entries of `readers` for storages that nothing holds but the owners counted before and these readers.

        `readers` maps the address of a storage to the number of tensors that read it.
        """
        if _storage_at is None or not all(self._before):  # this torch has no such functions
            return {}
        known = zip(self._storages, self._places, self._before, strict=True)
        found = {storage.data_ptr(): int(_storage_uses(place)) - before for storage, place, before in known}
        return {address: count for address, count in readers.items() if address in found and found[address] <= count}

    def besides(self, readers: Mapping[int, int]) -> Callable[[], bool]:
        """A function that says whether a storage in `readers` has more holders than those and its earlier owners."""
        known = list(zip(self._storages, self._places, self._before, strict=True))
        chosen = [(place, before, storage) for storage, place, before in known if storage.data_ptr() in readers]
        places = [place for place, _, _ in chosen]
        most = [before + readers[storage.data_ptr()] for _, before, storage in chosen]

        def are_held() -> bool:
            assert len(self._storages) >= len(places)  # the storages live as long as this function
            return any(map(gt, map(_storage_uses, places), most))

        return are_held


def storage_owners(tensor: Tensor) -> int:
    """How many tensors hold the memory of this one."""
    return int(_storage_uses(storage_key(tensor)))
