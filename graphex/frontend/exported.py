"""ATen graphs that did not come through Dynamo: a user's own AOTAutograd call, or `torch.export`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.fx import GraphModule

from graphex.compilation import Compilation, one_line
from graphex.compiler import compile_graph
from graphex.errors import InputError, PassError
from graphex.passes.metadata import propagate_values
from graphex.records import Journal
from graphex.runtime.codegen import Boxed
from graphex.torch_private.graphs import copy_module
from graphex.torch_private.symbolic import (
    FakeTensor,
    FakeTensorMode,
    ShapeEnv,
    broken_condition,
    detect_fake_mode,
    expression_of,
    kind_of,
    substituted,
)
from graphex.torch_private.trees import pytree

POSITIONAL = "this graph takes positional arguments only."


@dataclass(frozen=True)
class Input:
    """What a graph was traced with for one of its inputs; `dtype` is None where that is no tensor, or not known.

    A number has been put into the graph, and so has what followed from it.
    """

    name: str
    dtype: torch.dtype | None
    sizes: tuple[int | None, ...]  # None fits every size
    number: bool | int | float | complex | None = None

    @staticmethod
    def of(name: str, value: Any) -> Input:
        if not isinstance(value, torch.Tensor):
            return Input(name, None, (), value if isinstance(value, (int, float, complex)) else None)
        return Input(name, value.dtype, tuple(size if isinstance(size, int) else None for size in value.shape))

    def fits(self, given: Any) -> bool:
        if self.number is not None:
            return type(given) is type(self.number) and given == self.number
        if self.dtype is None:
            return True
        if not isinstance(given, torch.Tensor) or given.dtype != self.dtype:
            return False
        if given.shape == self.sizes:
            return True
        pairs = zip(self.sizes, given.shape, strict=False)
        return len(self.sizes) == given.dim() and all(
            mine is None or not isinstance(size, int) or mine == size for mine, size in pairs
        )

    def __str__(self) -> str:
        if self.number is not None:
            return repr(self.number)
        return "no tensor" if self.dtype is None else _written(self.dtype, self.sizes)


class TracedSizes:
    """The symbols in the sizes of a graph's inputs, and what tracing has found out about them or taken for granted."""

    def __init__(self, inputs: Sequence[Input], values: Sequence[Any]) -> None:
        fakes = [value for value in values if isinstance(value, FakeTensor)]
        self._env = fakes[0].fake_mode.shape_env if fakes else None
        self._sizes = [
            (place, dim, expression_of(size))
            for place, value in enumerate(values)
            for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else [value])
            if isinstance(size, torch.SymInt) and not size.node.is_nested_int()
        ]
        self._where = [
            f"size {dim} of '{inputs[place].name}'" if isinstance(values[place], torch.Tensor) else inputs[place].name
            for place, dim, _ in self._sizes
        ]
        self._broken = lru_cache(maxsize=1024)(self._find_broken)

    def check(self, given: Sequence[Any]) -> None:
        sizes = tuple(
            given[place].shape[dim] if isinstance(given[place], torch.Tensor) else given[place]
            for place, dim, _ in self._sizes
        )
        if all(type(size) is int for size in sizes) and (broken := self._broken(sizes)) is not None:
            raise InputError(f"the graph was traced for {broken}. Trace it for that too.")

    def _find_broken(self, sizes: tuple[int, ...]) -> str | None:
        """What does not hold for sizes of a call, and what they are."""
        known: dict[Any, int] = {}
        where: dict[Any, str] = {}
        for (_, _, expression), size, place in zip(self._sizes, sizes, self._where, strict=True):
            if kind_of(expression) == "symbol" and expression not in known:
                known[expression], where[expression] = size, place
            elif kind_of(wanted := substituted(expression, known)) == "number" and wanted != size:
                return f"{place} = {expression}, here {wanted}, got {size}"
        condition = None if self._env is None else broken_condition(self._env, known)
        if condition is None:
            return None
        got = [f"{symbol} = {known[symbol]} ({where[symbol]})" for symbol in known if symbol in condition.free_symbols]
        return f"{condition}, got {', '.join(got)}"


class CompiledGraph:
    """What `compile_fx` returns: takes the graph's own arguments, keeps its own journal."""

    def __init__(
        self, run: Boxed, gm: GraphModule, inputs: list[Input], values: Sequence[Any], journal: Journal
    ) -> None:
        self.boxed = run  # takes one list of the flat inputs, which it empties
        self._tree = getattr(gm.graph._codegen, "pytree_info", None)
        self._inputs = inputs
        self._sizes = TracedSizes(inputs, values)
        self.journal = journal

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._tree is None:
            if kwargs:
                raise InputError(POSITIONAL)
            _check(self._inputs, args)
            self._sizes.check(args)
            return self.boxed(list(args))
        flat = self._flat(args, kwargs, self._tree.in_spec)
        result = self.boxed(flat)
        return pytree.tree_unflatten(result, self._tree.out_spec) if self._tree.out_spec is not None else result

    def _flat(self, args: tuple[Any, ...], kwargs: dict[str, Any], spec: Any) -> list[Any]:
        """Arguments as make_fx has traced them, which are positional, or else as `((*args,), {**kwargs})`, as exported
        graphs take them.
        """
        if spec is not None and not kwargs:
            flat, found = pytree.tree_flatten(_in_order(args, spec))
            if found == spec:
                _check(self._inputs, flat)
                self._sizes.check(flat)
                return flat
        if kwargs and spec is not None and [child.type for child in spec.children()] != [tuple, dict]:
            raise InputError(POSITIONAL)
        flat, found = pytree.tree_flatten(_in_order((args, kwargs), spec))
        if spec is not None and found != spec:
            raise InputError(f"the graph was traced for arguments shaped {spec}, got {found}.")
        _check(self._inputs, flat)  # an exported graph checks its symbolic sizes itself
        return flat


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
    example_inputs = _one_for_each_input(gm, example_inputs)
    if example_inputs is not None:
        _check(_inputs_of(gm), example_inputs)
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
    run = compile_graph(gm, values, compilation, "inference", ())
    return CompiledGraph(run, gm, inputs, values, compilation.journal)


def _inputs_of(gm: GraphModule) -> list[Input]:
    nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
    return [Input.of(node.name, node.meta.get("val")) for node in nodes]


def _check(inputs: Sequence[Input], given: Sequence[Any]) -> None:
    """Refuse what the graph was not traced for: a slice of all rows there may be one of some rows here."""
    if len(inputs) != len(given):
        raise InputError(f"the graph takes {len(inputs)} arguments, got {len(given)}.")
    for each, tensor in zip(inputs, given, strict=True):
        if not each.fits(tensor):
            raise InputError(
                f"the graph was traced with {each} for '{each.name}', got {_about(tensor)}. Trace it for that too."
            )


def _about(given: Any) -> str:
    if isinstance(given, torch.Tensor):
        return _written(given.dtype, given.shape)
    return repr(given) if isinstance(given, (int, float, complex)) else type(given).__name__


def _written(dtype: torch.dtype, sizes: Sequence[Any]) -> str:
    return f"{str(dtype).removeprefix('torch.')}[{', '.join('*' if size is None else str(size) for size in sizes)}]"


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
    wanted = sum(node.op == "placeholder" for node in gm.graph.nodes)
    if example_inputs is not None and len(example_inputs) != wanted:
        example_inputs = pytree.tree_leaves(tuple(example_inputs))
    if example_inputs is not None and len(example_inputs) != wanted:
        raise InputError(f"the graph has {wanted} inputs, {len(example_inputs)} example inputs were given.")
    return example_inputs


def _example_values(gm: GraphModule, example_inputs: Sequence[Any] | None) -> list[Any]:
    """Fake values for the inputs: those the graph carries, or fakes of the examples given."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
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
