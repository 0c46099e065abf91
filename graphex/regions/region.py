"""The module that runs a region: compiled code, checked in its first call against what the graph promises.

    graph:   region_0 = call_module("region_0", (x, w)); y = region_0[0]

Generated code calls `Region.boxed` with a list that is emptied, so that what nothing else holds is freed inside.

Inductor may pad the rows of a result. Where it does, the result is copied into the strides that the graph promises:
later nodes, and the caller, rely on these. A capture that copies the result out of its memory anyway takes that copy
over (`laid_out_by_caller`). Of `zeros + x` Inductor returns x itself: such a result is copied, too.

A region for a CPU may write to its inputs. It leaves their version counters alone, as compiled code does; the program
counts its writes.

On a CPU the indices that a region reads by are looked at first. If one is out of range, the nodes run one by one, and
the one that eager would stop at raises. So they do outside of inference mode if a written input was made in it.

A region from the cache builds its graph only on demand; `Promises` holds the layouts of its inputs and results until
then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from graphex.analysis.effects import written_arguments
from graphex.errors import one_line
from graphex.ops.definition import has_triton
from graphex.regions.compiler import Boxed, RegionCode, launches
from graphex.regions.indices import Columns, Lookup, are_in_range, checks_of, lookups_in
from graphex.torch_private.memory import extent, set_versions, sets_versions, storage_key
from graphex.torch_private.symbolic import expression_of, kind_of, substituted

Symbols = dict[Any, int]
LARGE = 2**20  # elements; below, a launch costs the host more than ATen's copy costs the device


@dataclass(frozen=True)
class Unlaid:
    """A result in the strides of compiled code.

    `promised` has the strides of the graph, on the same memory: it says where views of the result lie, and holds no
    values. Nothing may read it before `value` is copied into memory that is laid out like it.
    """

    value: Tensor
    promised: Tensor


def lay_out(target: Tensor, value: Tensor) -> Tensor:
    """Copy a value into a tensor of its size and type with other strides."""
    if value.device.type == "cuda" and value.numel() >= LARGE and has_triton():
        from graphex.kernels.tokens import copy_rows

        if copy_rows(target, value):
            return target
    return target.copy_(value)


class _Asked(threading.local):
    """A request of the program that this thread captures.

    `results`: outputs of regions that the program copies into their strides itself. `left`: those of them that regions
    have left to it.
    """

    def __init__(self) -> None:
        self.results: frozenset[tuple[Region, int]] = frozenset()
        self.left: list[Unlaid] = []


_asked = _Asked()


@contextmanager
def laid_out_by_caller(results: frozenset[tuple[Region, int]]) -> Iterator[list[Unlaid]]:
    """Inside, regions leave these of their results to the caller to copy into the graph's strides, where they have
    others. Yields the results that were left.
    """
    before = _asked.results, _asked.left
    left: list[Unlaid] = []
    _asked.results, _asked.left = results, left
    try:
        yield left
    finally:
        _asked.results, _asked.left = before  # what was left is the caller's: later captures may have its memory


class Layout(NamedTuple):
    """The sizes, strides, type and device of a tensor. Sizes are numbers, or expressions of symbols."""

    sizes: tuple[Any, ...]
    strides: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, value: Tensor) -> Layout:
        sizes, strides = (tuple(map(_expression, each)) for each in (value.shape, value.stride()))
        return cls(sizes, strides, value.dtype, value.device)


class Promises(NamedTuple):
    """The layouts of a region's inputs and results, as its graph has them. An input that is no tensor is a number.

    `written` are the places of inputs that the region writes to.
    """

    inputs: tuple[Layout | Any, ...]
    results: tuple[Layout, ...]
    written: tuple[int, ...]

    @classmethod
    def of(cls, body: GraphModule) -> Promises:
        given = body.graph.find_nodes(op="placeholder")
        values = [node.meta.get("val") for node in given]
        inputs = (Layout.of(value) if isinstance(value, Tensor) else _expression(value) for value in values)
        results: Any = body.graph.output_node().args[0]
        written = {value for node in body.graph.nodes for value in written_arguments(node)}
        places = (place for place, node in enumerate(given) if node in written)
        return cls(tuple(inputs), tuple(Layout.of(leaf.meta["val"]) for leaf in results), tuple(places))

    def symbols(self) -> Iterator[tuple[Any, int, Callable[[Any], int]]]:
        """Every symbol that is a size or a stride of an input, or an input; that input, and how it is read there."""
        for place, value in enumerate(self.inputs):
            if not isinstance(value, Layout):
                yield from [(value, place, int)] if kind_of(value) == "symbol" else []
                continue
            for read, numbers in ((_stride_at, value.strides), (_size_at, value.sizes)):
                yield from ((each, place, read(dim)) for dim, each in enumerate(numbers) if kind_of(each) == "symbol")


def _stride_at(dim: int) -> Callable[[Tensor], int]:
    return lambda value: value.stride(dim)


def _size_at(dim: int) -> Callable[[Tensor], int]:
    return lambda value: value.size(dim)


def _expression(value: Any) -> Any:
    return expression_of(value) if isinstance(value, torch.SymInt) else value


class Region(torch.nn.Module):
    """A module that runs the code of a region. `body` is the region's graph, or a function that builds it.

    `line` is the source line of the first node. `report` is called once if the body runs instead of compiled code, with
    the event, its reason and the line. With `promises` the body needs no index checks.
    """

    def __init__(
        self,
        name: str,
        body: GraphModule | Callable[[], GraphModule],
        code: RegionCode,
        line: str,
        report: Callable[[str, str, str], None],
        promises: Promises | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self._body = body
        self.code = code
        self.line = line
        self._report = report
        self._checks = [] if promises else checks_of(lookups_in(self.body.graph))
        self._placeholders = self.body.graph.find_nodes(op="placeholder") if self._checks else []
        promises = promises or Promises.of(self.body)
        self._promised, self._known = promises.results, list(promises.symbols())
        self._written = promises.written
        self._shared: frozenset[int] = frozenset()
        self._run: Boxed = self._uncompiled if code.is_awaited else self._first_call

    @property
    def body(self) -> GraphModule:
        if not isinstance(self._body, GraphModule):
            self._body = self._body()
        return self._body

    @property
    def looks_up(self) -> bool:
        """Whether indices are looked at before a call."""
        return bool(self._checks)

    def checks(self, args: Sequence[Node]) -> list[Lookup | Columns]:
        """The index checks of a call with these arguments of the graph around it."""
        given = dict(zip(self._placeholders, args, strict=True)) if self._checks else {}
        return [replace(check, given=given[check.given]) for check in self._checks]

    def take(self, code: RegionCode) -> None:
        """Run this code from the next call on: it was awaited."""
        self.code, self._run = code, self._first_call

    @property
    def launches(self) -> int:
        """How many kernels it launches."""
        return launches(self.body, self.code)

    def forward(self, *args: Any) -> Any:
        return self.boxed(list(args))

    def boxed(self, args: list[Any]) -> Any:
        if self._checks and not are_in_range(self._checks, dict(zip(self._placeholders, args, strict=True))):
            return self.single(args)
        return self.checked(args)

    def checked(self, args: list[Any]) -> Any:
        """The call with indices that are known to be in range."""
        if self._written and not _may_write(args[place] for place in self._written):
            return self.single(args)
        return self._run(args)

    def single(self, args: list[Any]) -> Any:
        """The call with an index that is out of range, or with what must not be written to: the nodes run one by one,
        and one raises what eager raises.
        """
        return self._uncompiled(args)

    def _first_call(self, args: list[Any]) -> Any:
        given, symbols = list(args), self._symbols(args)
        before = [(given[place], given[place].clone()) for place in self._written]
        try:
            results = self.code.run(args)
        except Exception as error:
            _put_back(before)
            results = self._uncompiled(given)  # raises what eager raises, if it is the call that is wrong
            self._give_up(f"the compiled code raised {one_line(error)}")
            return results
        if problem := _why_not_as_promised(self._promised, symbols, results):
            _put_back(before)
            self._give_up(problem)
            return self._uncompiled(given)
        self._shared = _sharing(given, results)
        is_laid_out = not self._shared and all(
            result.stride() == _numbers(symbols, value.strides)
            for value, result in zip(self._promised, results, strict=True)
        )
        self._run = self.code.run if is_laid_out else self._copied
        return results if is_laid_out else self._laid_out(symbols, results)

    def _copied(self, args: list[Any]) -> Any:
        symbols = self._symbols(args)
        return self._laid_out(symbols, self.code.run(args))

    def _laid_out(self, symbols: Symbols, results: Sequence[Tensor]) -> list[Tensor]:
        """The results in the strides of the graph and memory of their own: those that have others are copied."""
        strides = [_numbers(symbols, value.strides) for value in self._promised]
        return [
            result
            if result.stride() == stride and place not in self._shared
            else self._in_strides(place, result, stride)
            for place, (result, stride) in enumerate(zip(results, strides, strict=True))
        ]

    def _in_strides(self, place: int, value: Tensor, stride: tuple[int, ...]) -> Tensor:
        is_own = place not in self._shared
        if is_own and all(
            size <= 1 or one == other for size, one, other in zip(value.shape, value.stride(), stride, strict=True)
        ):
            return value.as_strided(value.shape, stride)  # they differ only where a dimension has one element
        if is_own and (self, place) in _asked.results and _has_room(value, stride):
            promised = value.as_strided(value.shape, stride)
            _asked.left.append(Unlaid(value, promised))
            return promised
        return lay_out(torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device), value)

    def _give_up(self, reason: str) -> None:
        self._run = self._uncompiled
        self._report(f"{self.name} runs without compiled code", reason, self.line)

    def _uncompiled(self, args: list[Any]) -> Any:
        given = list(args)
        args.clear()
        written = [given[place] for place in self._written if not given[place].is_inference()]
        before = [value._version for value in written]
        results = self.body(*given)
        if written and sets_versions():
            set_versions(written, before)
        return results

    def _symbols(self, given: Sequence[Any]) -> Symbols:
        """The value of every symbol that is a size or a stride of an input, or an input."""
        return {symbol: read(given[place]) for symbol, place, read in self._known}


def region_called(gm: GraphModule, node: Node) -> Region | None:
    """The compiled region that a node calls; None for every other node."""
    found = gm.get_submodule(str(node.target)) if node.op == "call_module" else None
    return found if isinstance(found, Region) else None


def _why_not_as_promised(promised: Sequence[Layout], symbols: Symbols, results: Sequence[Any]) -> str:
    """Why compiled results are not what the graph says they are; empty if they are, strides and memory apart."""
    if len(promised) != len(results):
        return f"it returns {len(results)} values instead of {len(promised)}"
    for place, (value, result) in enumerate(zip(promised, results, strict=True)):
        if not isinstance(result, Tensor) or result.dtype != value.dtype or not _is_on(value.device, result):
            return f"result {place} has another type than the graph says"
        if tuple(result.shape) != (sizes := _numbers(symbols, value.sizes)):
            return f"result {place} has the sizes {tuple(result.shape)}, and not {sizes}"
    return ""


def _may_write(values: Iterable[Tensor]) -> bool:
    """Whether ops may write to these: to tensors made in inference mode they may in inference mode only."""
    return torch.is_inference_mode_enabled() or not any(value.is_inference() for value in values)


def _put_back(before: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Undo the writes of compiled code: the nodes that run instead may read what they wrote over."""
    for value, content in before:
        value.copy_(content)


def _sharing(given: Sequence[Any], results: Sequence[Tensor]) -> frozenset[int]:
    """The places of results that share memory with an input or an earlier result; later passes rely on there being
    none. Storages are compared, not addresses: a first call without elements has none, and a later one may have them.
    """
    seen = {storage_key(value) for value in given if isinstance(value, Tensor)}
    places = set()
    for place, result in enumerate(results):
        memory = storage_key(result)
        if memory in seen:
            places.add(place)
        seen.add(memory)
    return frozenset(places)


def _is_on(device: torch.device, result: Tensor) -> bool:
    """Whether the result is on the device. Scalars on the host pass too: attention's seeds are on the device in a
    capture and on the host otherwise, whatever the fake tensors say.
    """
    return result.device == device or (result.device.type == "cpu" and not result.dim())


def _has_room(value: Tensor, stride: tuple[int, ...]) -> bool:
    """Whether a tensor of the same size with these strides ends within the memory of the value."""
    end = value.storage_offset() + extent(value.shape, stride)
    return end * value.element_size() <= value.untyped_storage().nbytes()


def _numbers(symbols: Symbols, sizes: Iterable[Any]) -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) else int(substituted(size, symbols)) for size in sizes)
