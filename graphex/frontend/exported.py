"""ATen graphs that did not come through Dynamo: a user's own AOTAutograd call, or `torch.export`.

Sizes, strides and devices of the trace are in such a graph: views that were right for them are not right for others.
No guard of Dynamo's stands before a call, so `Input` and `TracedSizes` check that a call fits the trace.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graphex.analysis.graphs import tensor_text, text_of
from graphex.errors import InputError, PassError, one_line
from graphex.frontend.compiler import Executables, compile_graph
from graphex.passes.updates import note_program_writes
from graphex.records import Journal
from graphex.rewrite.compilation import Compilation
from graphex.rewrite.metadata import propagate_values
from graphex.torch_private.graphs import copy_module, pytree_of
from graphex.torch_private.memory import UNMARKED, is_plain, marks_of
from graphex.torch_private.symbolic import (
    FakeTensor,
    FakeTensorMode,
    ShapeEnv,
    broken_condition,
    detect_fake_mode,
    expression_of,
    kind_of,
    pytree,
    substituted,
)

_LAID_OUT = "Pass a copy that is laid out so (such as one by contiguous()), or trace the graph for that too."
_ANY_STRIDE = -1


@dataclass(frozen=True)
class Input:
    """One input of a graph, as it was traced; `dtype` is None if it is no tensor, or not known.

    A number is a constant of the graph, and so is everything that followed from it. A size or stride of None fits all.
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
        """Refuse an argument that does not fit the trace: a slice of all rows there may be one of some rows here."""
        if not self._fits(given):
            raise InputError(
                f"the graph was traced with {self} for '{self.name}', got {_value_text(given)}. Trace it for that too."
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
    """The symbols in sizes and strides of a graph's inputs, and the conditions that tracing has found or assumed."""

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
        """Refuse sizes and strides that the graph was not traced for. An exported graph checks its sizes itself."""
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
        """The condition that the sizes and strides of a call break, their values, and a way out; None if all hold."""
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


def check_count(inputs: Sequence[Input], given: Sequence[Any]) -> None:
    if len(inputs) != len(given):
        names = f" ({', '.join(each.name for each in inputs)})" if inputs else ""
        plural = "" if len(inputs) == 1 else "s"
        raise InputError(f"the graph takes {len(inputs)} argument{plural}{names}, got {len(given)}.")


def check_arguments(inputs: Sequence[Input], given: Sequence[Any]) -> None:
    check_count(inputs, given)
    for each, tensor in zip(inputs, given, strict=True):
        each.check(tensor)


def _strides(tensor: torch.Tensor) -> Sequence[Any]:
    return tensor.stride() if tensor.layout == torch.strided else ()


def _numbers(sizes: Sequence[Any]) -> tuple[int | None, ...]:
    return tuple(size if isinstance(size, int) else None for size in sizes)


def _agree(traced: int | None, given: Any) -> bool:
    return traced is None or not isinstance(given, int) or traced == given


def _value_text(given: Any) -> str:
    if isinstance(given, torch.Tensor):
        return text_of(given)
    return repr(given) if isinstance(given, (int, float, complex)) else type(given).__name__


# -- compile_fx --------------------------------------------------------------------------------------------------------


_NUMBERS = re.compile(r"(_\d+)+$")  # the place of a value inside of an argument

POSITIONAL = "this graph takes positional arguments only."


class CompiledGraph:
    """The result of `compile_fx`: takes the graph's own arguments, keeps its own journal."""

    def __init__(
        self, executables: Executables, gm: GraphModule, inputs: list[Input], values: Sequence[Any], journal: Journal
    ) -> None:
        self.boxed = executables.program  # takes one list of the flat inputs, which it empties
        self._functional = executables.functional
        self._traced = [_traced_kind(value) if isinstance(value, torch.Tensor) else None for value in values]
        self._tree = pytree_of(gm.graph)
        self._inputs = inputs
        self._sizes = TracedSizes(inputs, values)
        self.journal = journal

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._tree is None:
            if kwargs:
                raise InputError(POSITIONAL)
            check_arguments(self._inputs, args)
            self._sizes.check(args)
            return self._run(list(args))
        flat = self._flat(args, kwargs, self._tree.in_spec)
        result = self._run(flat)
        return pytree.tree_unflatten(result, self._tree.out_spec) if self._tree.out_spec is not None else result

    def _run(self, flat: list[Any]) -> Any:
        reason = self._why_functional(flat)
        return self._functional(flat, reason) if reason else self.boxed(flat)

    def _why_functional(self, flat: list[Any]) -> str:
        """Why a call needs the functional program: it has gradients, or kinds of tensors that the trace had not."""
        tensors = [value for value in (*flat, *self._functional.held) if isinstance(value, torch.Tensor)]
        if torch.is_grad_enabled() and any(value.requires_grad for value in tensors):
            return "gradients are recorded, and a tensor requires some; call it under torch.no_grad()"
        for traced, value, each in zip(self._traced, flat, self._inputs, strict=True):
            if traced is not None and isinstance(value, torch.Tensor) and (kind := _kind(value)) != traced:
                return f"'{each.name}' is {kind}, and the graph was traced with {traced}"
        return ""

    def _flat(self, args: tuple[Any, ...], kwargs: dict[str, Any], spec: Any) -> list[Any]:
        """The flat inputs. make_fx traces positional arguments; exported graphs take `((*args,), {**kwargs})`."""
        if spec is not None and not kwargs:
            flat, found = pytree.tree_flatten(_in_order(args, spec))
            if found == spec:
                check_arguments(self._inputs, flat)
                self._sizes.check(flat)
                return flat
        if kwargs and spec is not None and [child.type for child in spec.children()] != [tuple, dict]:
            raise InputError(POSITIONAL)
        flat, found = pytree.tree_flatten(_in_order((args, kwargs), spec))
        if spec is not None and found != spec:
            if not kwargs and _is_flat(spec):
                check_count(self._inputs, args)
            wanted = _call_text(spec, [each.name for each in self._inputs])
            raise InputError(f"the graph was traced for {wanted}. It was called with {_call_text(found)}.")
        check_arguments(self._inputs, flat)
        self._sizes.check(flat, exported=True)
        return flat


def _kind(value: torch.Tensor) -> str:
    """The traits of a tensor besides its layout: subclass, symbolic zeros, conjugate and negative views."""
    if not is_plain(value):
        return "one of symbolic zeros" if type(value) is torch.Tensor else f"a {type(value).__name__}"
    return _KINDS[marks_of(value)]


def _traced_kind(value: torch.Tensor) -> str:
    """The `_kind` of tensors that a graph was traced with: a fake tensor stands for a plain one."""
    return _KINDS[marks_of(value)] if isinstance(value, FakeTensor) else _kind(value)


_KINDS = {
    UNMARKED: "a plain tensor",
    (True, False): "a conjugate view",
    (False, True): "a negative view",
    (True, True): "a negative and conjugate view",
}


def _is_flat(spec: Any) -> bool:
    """Whether a graph takes single values by their places, and nothing else."""
    children = spec.children()
    if [child.type for child in children] == [tuple, dict]:
        return not children[1].children() and all(not child.children() for child in children[0].children())
    return all(child.type is None for child in children)


def _call_text(spec: Any, names: Sequence[str] = ()) -> str:
    """The arguments of a call in words: ``2 arguments: x, parts (a list of 2)``. `names` are those of a graph's inputs.

    A graph that takes a tuple and a dictionary, and one that was exported with arguments by name, have one spec, and
    may be called either way.
    """
    if [child.type for child in spec.children()] != [tuple, dict]:
        return _arguments_text(spec.children(), names)
    places, named = spec.children()
    text = _arguments_text([*places.children(), *named.children()], names, named.context)
    return f"{text}, or {_arguments_text(spec.children(), ())}" if names and named.context else text


def _arguments_text(specs: Sequence[Any], names: Sequence[str], keywords: Sequence[str] = ()) -> str:
    """`keywords` are the names that the last arguments are given by."""
    texts, first = [], 0
    for place, spec in enumerate(specs):
        own = names[first : first + spec.num_leaves]
        first += spec.num_leaves
        stems = {name if spec.type is None else _NUMBERS.sub("", name) for name in own}
        keyword = keywords[place - len(specs)] if place >= len(specs) - len(keywords) else ""
        name = f"{keyword} (by name)" if keyword else stems.pop() if len(stems) == 1 else ""
        texts.append(_form_text(spec, name))
    count = f"{len(texts) or 'no'} argument{'' if len(texts) == 1 else 's'}"
    return f"{count}: {', '.join(texts)}" if texts else count


def _form_text(spec: Any, name: str = "") -> str:
    """One argument: ``x``, ``a list of 2``, ``pair (a dictionary with 'a' and 'b')``."""
    children = spec.children()
    if spec.type is None:
        return name or "a value"
    parts = list(map(_form_text, children))
    if spec.type is dict:
        text = f"a dictionary with {' and '.join(map(repr, spec.context)) or 'nothing'}"
    else:
        text = f"a {getattr(spec.type, '__name__', 'container')} of {len(parts)}"
    if any(child.type is not None for child in children):
        text += f": {', '.join(parts)}"
    return f"{name} ({text})" if name else text


def _in_order(given: Any, spec: Any) -> Any:
    """The keys of dictionaries as the graph was traced with them: their order means nothing in a call."""
    if spec is None:
        return given
    if spec.type is dict and type(given) is dict and given.keys() == set(spec.context):
        return {key: _in_order(given[key], child) for key, child in zip(spec.context, spec.children(), strict=True)}
    if spec.type in (list, tuple) and type(given) is spec.type and len(given) == spec.num_children:
        return spec.type(map(_in_order, given, spec.children()))
    return given


def compile_aten(gm: GraphModule, example_inputs: Sequence[Any] | None, compilation: Compilation) -> Callable[..., Any]:
    gm = copy_module(gm)  # the caller's module is not touched
    own = {node for node in gm.graph.nodes if _is_traced(node)}
    example_inputs = _one_for_each_input(gm, example_inputs)
    if example_inputs is not None:
        check_arguments(_inputs_of(gm), example_inputs)
    _forget_unrelated_values(gm, given=example_inputs is not None)
    values = _example_values(gm, example_inputs)
    inputs = _inputs_of(gm)
    try:
        propagate_values(gm, lambda node: False, "compile_fx")
    except PassError as error:  # no pass has run yet: it is the graph itself
        problem = one_line(error.__cause__ or error)
        raise InputError(
            f"the graph cannot be evaluated ({problem}). compile_fx takes ATen graphs, from torch.export or make_fx."
        ) from error
    note_program_writes(gm.graph, has_out=True, is_own=own.__contains__)
    executables = compile_graph(gm, values, compilation, "inference", ())
    return CompiledGraph(executables, gm, inputs, values, compilation.journal)


def _is_traced(node: Node) -> bool:
    """Whether a node was traced as it is: a copy by export has no value yet, and one by AOTAutograd is tagged."""
    return "val" in node.meta and "partitioner_tag" not in node.meta


def _inputs_of(gm: GraphModule) -> list[Input]:
    nodes = gm.graph.find_nodes(op="placeholder")
    return [Input.of(node.name, node.meta.get("val")) for node in nodes]


def _forget_unrelated_values(gm: GraphModule, *, given: bool) -> None:
    """`make_fx` on real tensors gives each value a fake mode of its own; no op takes two of those together.

    Of a sparse tensor it notes nothing, not even the device: where examples are given, they tell.
    """
    values = [node.meta.get("val") for node in gm.graph.nodes]
    unrelated = len({id(value.fake_mode) for value in values if isinstance(value, FakeTensor)}) > 1
    for node in gm.graph.nodes:
        if unrelated or (given and node.meta.get("val") is None):
            node.meta.pop("val", None)


def _one_for_each_input(gm: GraphModule, example_inputs: Sequence[Any] | None) -> Sequence[Any] | None:
    wanted = len(gm.graph.find_nodes(op="placeholder"))
    if example_inputs is not None and not isinstance(example_inputs, (list, tuple)):
        raise InputError(
            f"example_inputs must be a list or a tuple of the graph's inputs, got {type(example_inputs).__name__}."
        )
    if example_inputs is not None and len(example_inputs) != wanted:
        example_inputs = pytree.tree_leaves(tuple(example_inputs))
    if example_inputs is not None and len(example_inputs) != wanted:
        raise InputError(f"the graph has {wanted} inputs, {len(example_inputs)} example inputs were given.")
    return example_inputs


def _example_values(gm: GraphModule, example_inputs: Sequence[Any] | None) -> list[Any]:
    """Fake values for the inputs: those the graph carries, or fakes of the examples given."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    missing = [node for node in placeholders if "val" not in node.meta]
    if missing and example_inputs is None:
        raise InputError(f"input '{missing[0].name}' has no value; pass example_inputs.")
    if missing:
        mode = detect_fake_mode(list(example_inputs or ())) or FakeTensorMode(shape_env=ShapeEnv())
        for node, example in zip(placeholders, example_inputs or (), strict=True):
            if "val" not in node.meta:
                fake = isinstance(example, torch.Tensor) and not isinstance(example, FakeTensor)
                node.meta["val"] = mode.from_tensor(example, static_shapes=True) if fake else example
    return [node.meta["val"] for node in placeholders]
