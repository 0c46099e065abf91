"""What a graph was traced with for its inputs, and whether a call fits it.

Sizes, strides and devices of the trace are in the graph: views that were right for them are not right for others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from graphex.analysis.notation import tensor_text, text_of
from graphex.errors import InputError
from graphex.torch_private.symbolic import FakeTensor, broken_condition, expression_of, kind_of, substituted

_LAID_OUT = "Pass a copy that is laid out so (such as one by contiguous()), or trace the graph for that too."
_ANY_STRIDE = -1


@dataclass(frozen=True)
class Input:
    """What a graph was traced with for one of its inputs; `dtype` is None where that is no tensor, or not known.

    A number has been put into the graph, and so has what followed from it. Of sizes and strides, None fits every one.
    """

    name: str
    dtype: torch.dtype | None
    sizes: tuple[int | None, ...] = ()
    strides: tuple[int | None, ...] = ()
    layout: torch.layout = torch.strided
    device: torch.device | None = None
    number: bool | int | float | complex | None = None

    @staticmethod
    def of(name: str, value: Any) -> Input:
        if not isinstance(value, torch.Tensor):
            return Input(name, None, number=value if isinstance(value, (int, float, complex)) else None)
        device = None if value.device.type == "meta" else value.device  # a trace without memory is one for any device
        return Input(name, value.dtype, _numbers(value.shape), _numbers(_strides(value)), value.layout, device)

    def check(self, given: Any) -> None:
        """Refuse what the graph was not traced for: a slice of all rows there may be one of some rows here."""
        if not self._fits(given):
            raise InputError(
                f"the graph was traced with {self} for '{self.name}', got {_about(given)}. Trace it for that too."
            )
        if self.dtype is None:
            return
        if not self._is_there(given.device):
            raise InputError(
                f"the graph was traced with a tensor on {self.device} for '{self.name}', got one on {given.device}. "
                f"Move it there, or trace the graph for {given.device} too."
            )
        if given.layout != self.layout:
            raise InputError(
                f"the graph was traced with the layout {self.layout} for '{self.name}', got {given.layout}. "
                "Trace it for that too."
            )
        if self.strides and given.stride() != self.strides and self._is_laid_out_otherwise(given):
            shown = ["*" if stride is None else str(stride) for stride in self.strides]
            got = ", ".join(map(str, given.stride()))
            raise InputError(
                f"the graph was traced with strides [{', '.join(shown)}] for '{self.name}', got [{got}]. {_LAID_OUT}"
            )

    def _is_there(self, device: torch.device) -> bool:
        mine = self.device
        return mine is None or mine == device or (mine.index is None and mine.type == device.type)

    def _fits(self, given: Any) -> bool:
        if self.number is not None:
            return type(given) is type(self.number) and given == self.number
        if self.dtype is None:
            return True
        if not isinstance(given, torch.Tensor) or given.dtype != self.dtype:
            return False
        return given.shape == self.sizes or (
            len(self.sizes) == given.dim() and all(map(_agree, self.sizes, given.shape))
        )

    def _is_laid_out_otherwise(self, given: torch.Tensor) -> bool:
        """The stride of a dimension with one element says nothing, nor does any of a tensor with none."""
        if not all(type(size) is int for size in given.shape) or 0 in given.shape:
            return False
        return any(
            size != 1 and not _agree(mine, stride)
            for mine, stride, size in zip(self.strides, given.stride(), given.shape, strict=True)
        )

    def __str__(self) -> str:
        if self.number is not None:
            return repr(self.number)
        return "no tensor" if self.dtype is None else tensor_text(self.dtype, self.sizes)


class TracedSizes:
    """The symbols in the sizes and strides of a graph's inputs, and what tracing has found out about them or taken for
    granted.
    """

    def __init__(self, inputs: Sequence[Input], values: Sequence[Any]) -> None:
        fakes = [value for value in values if isinstance(value, FakeTensor)]
        self._env = fakes[0].fake_mode.shape_env if fakes else None
        self._sizes = [
            (place, dim, expression_of(size))
            for place, value in enumerate(values)
            for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else [value])
            if isinstance(size, torch.SymInt) and not size.node.is_nested_int()
        ]
        self._strides = [
            (place, dim, expression_of(stride))
            for place, value in enumerate(values)
            for dim, stride in enumerate(_strides(value) if isinstance(value, torch.Tensor) else ())
            if isinstance(stride, torch.SymInt) and not stride.node.is_nested_int()
        ]
        self._where = [
            f"size {dim} of '{inputs[place].name}'" if isinstance(values[place], torch.Tensor) else inputs[place].name
            for place, dim, _ in self._sizes
        ]
        self._names = [each.name for each in inputs]
        self._broken = lru_cache(maxsize=1024)(self._find_broken)

    def check(self, given: Sequence[Any], *, exported: bool = False) -> None:
        """An exported graph checks its sizes itself, and not its strides."""
        sizes = tuple(
            given[place].shape[dim] if isinstance(given[place], torch.Tensor) else given[place]
            for place, dim, _ in self._sizes
        )
        if not all(type(size) is int for size in sizes):
            return
        strides = tuple(_stride(given[place], dim) for place, dim, _ in self._strides)
        if (broken := self._broken(sizes, strides, exported)) is not None:
            raise InputError(f"the graph was traced for {broken}")

    def _find_broken(self, sizes: tuple[int, ...], strides: tuple[int, ...], exported: bool) -> str | None:
        """What does not hold for sizes and strides of a call, what they are, and what to do."""
        known: dict[Any, int] = {}
        where: dict[Any, str] = {}
        for (_, _, expression), size, place in zip(self._sizes, sizes, self._where, strict=True):
            if kind_of(expression) == "symbol" and expression not in known:
                known[expression], where[expression] = size, place
            elif exported:
                continue
            elif kind_of(wanted := substituted(expression, known)) == "number" and wanted != size:
                return f"{place} = {expression}, here {wanted}, got {size}. Trace it for that too."
        for (index, dim, expression), stride in zip(self._strides, strides, strict=True):
            wanted = substituted(expression, known)
            if stride != _ANY_STRIDE and kind_of(wanted) == "number" and wanted != stride:
                what = f"stride {dim} of '{self._names[index]}'"
                return f"{what} = {expression}, here {wanted}, got {stride}. {_LAID_OUT}"
        condition = None if self._env is None or exported else broken_condition(self._env, known)
        if condition is None:
            return None
        got = [f"{symbol} = {known[symbol]} ({where[symbol]})" for symbol in known if symbol in condition.free_symbols]
        return f"{condition}, got {', '.join(got)}. Trace it for that too."


def _stride(given: torch.Tensor, dim: int) -> int:
    """The stride of a dimension with one element says nothing, nor does any of a tensor with none."""
    return _ANY_STRIDE if given.shape[dim] == 1 or 0 in given.shape else given.stride(dim)


def check_arguments(inputs: Sequence[Input], given: Sequence[Any]) -> None:
    if len(inputs) != len(given):
        raise InputError(f"the graph takes {len(inputs)} arguments, got {len(given)}.")
    for each, tensor in zip(inputs, given, strict=True):
        each.check(tensor)


def _strides(tensor: torch.Tensor) -> Sequence[Any]:
    return tensor.stride() if tensor.layout == torch.strided else ()


def _numbers(sizes: Sequence[Any]) -> tuple[int | None, ...]:
    return tuple(size if isinstance(size, int) else None for size in sizes)


def _agree(traced: int | None, given: Any) -> bool:
    return traced is None or not isinstance(given, int) or traced == given


def _about(given: Any) -> str:
    if isinstance(given, torch.Tensor):
        return text_of(given)
    return repr(given) if isinstance(given, (int, float, complex)) else type(given).__name__
