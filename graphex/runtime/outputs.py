"""Copy what a captured graph computed out of its memory, keeping what the user can see: strides, and which outputs
share memory with each other or with an input captured by address.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from graphex.torch_private.memory import copier, has_memory, is_dense, whole_storage


@dataclass(frozen=True)
class Window:
    """An output as a window on the copy of something that was copied whole."""

    source: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class OutputPlan:
    """Made once, when the graph is captured; `copy_out` runs after every replay.

    An output alone in its storage is copied as it is. Outputs that share one are windows on one copy of the storage.
    """

    def __init__(self, outputs: Any, owned_by_caller: set[int]) -> None:
        self._outputs = tuple(outputs) if isinstance(outputs, (list, tuple)) else (outputs,)
        self._sources: list[torch.Tensor] = []
        self._plan: list[int | Window | None] = []
        tensors = [value for value in self._outputs if _lives_somewhere(value)]
        sharing = Counter(_address(value) for value in tensors if value.numel())
        storages: dict[int, int] = {}
        for value in self._outputs:
            if not _lives_somewhere(value) or (value.numel() and _address(value) in owned_by_caller):
                self._plan.append(None)
            elif sharing[_address(value)] <= 1 and is_dense(value):
                self._plan.append(self._copied(value))
            else:
                storage = storages.get(_address(value))
                if storage is None:
                    storage = storages[_address(value)] = self._copied(whole_storage(value, value.dtype))
                self._plan.append(Window(storage, value.size(), value.stride(), int(value.storage_offset())))
        self._copy = copier(source.dtype for source in self._sources)

    def _copied(self, source: torch.Tensor) -> int:
        self._sources.append(source)
        return len(self._sources) - 1

    def copy_out(self) -> tuple[Any, ...]:
        copies = [torch.empty_strided(s.size(), s.stride(), dtype=s.dtype, device=s.device) for s in self._sources]
        if copies:
            self._copy(copies, self._sources)
        return tuple(_returned(value, plan, copies) for value, plan in zip(self._outputs, self._plan, strict=True))


def _returned(value: Any, plan: int | Window | None, copies: list[torch.Tensor]) -> Any:
    if plan is None:  # not a tensor, without memory, or memory that belongs to the caller
        return value.view_as(value) if isinstance(value, torch.Tensor) else value
    if isinstance(plan, int):
        return copies[plan]
    flat = copies[plan.source]
    if flat.dtype != value.dtype:  # outputs of two types in one storage look at the same bytes
        flat = flat.view(value.dtype)
    return flat.as_strided(plan.size, plan.stride, plan.offset)


def _lives_somewhere(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and has_memory(value)


def _address(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()
