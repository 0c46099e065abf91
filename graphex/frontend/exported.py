"""ATen graphs that did not come through Dynamo: a user's own AOTAutograd call, or `torch.export`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graphex.compilation import Compilation
from graphex.compiler import Executables, compile_executables
from graphex.errors import InputError, PassError, one_line
from graphex.frontend.traced import Input, TracedSizes, check_arguments
from graphex.passes.metadata import propagate_values
from graphex.passes.program_writes import note_program_writes
from graphex.records import Journal
from graphex.torch_private.graphs import copy_module
from graphex.torch_private.memory import UNMARKED, is_plain, marks_of
from graphex.torch_private.symbolic import (
    FakeTensor,
    FakeTensorMode,
    ShapeEnv,
    detect_fake_mode,
)
from graphex.torch_private.trees import pytree

POSITIONAL = "this graph takes positional arguments only."


class CompiledGraph:
    """What `compile_fx` returns: takes the graph's own arguments, keeps its own journal."""

    def __init__(
        self, executables: Executables, gm: GraphModule, inputs: list[Input], values: Sequence[Any], journal: Journal
    ) -> None:
        self.boxed, self._above = executables  # `boxed` takes one list of the flat inputs, which it empties
        self._traced = [_traced_kind(value) if isinstance(value, torch.Tensor) else None for value in values]
        self._tree = getattr(gm.graph._codegen, "pytree_info", None)
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
        reason = self._why_above(flat)
        return self._above(flat, reason) if reason else self.boxed(flat)

    def _why_above(self, flat: list[Any]) -> str:
        """What no guard has looked at here: whatever the graph was not traced with keeps its program above autograd."""
        tensors = [value for value in (*flat, *self._above.held) if isinstance(value, torch.Tensor)]
        if torch.is_grad_enabled() and any(value.requires_grad for value in tensors):
            return "gradients are recorded, and a tensor requires some; call it under torch.no_grad()"
        for traced, value, each in zip(self._traced, flat, self._inputs, strict=True):
            if traced is not None and isinstance(value, torch.Tensor) and (kind := _kind(value)) != traced:
                return f"'{each.name}' is {kind}, and the graph was traced with {traced}"
        return ""

    def _flat(self, args: tuple[Any, ...], kwargs: dict[str, Any], spec: Any) -> list[Any]:
        """Arguments as make_fx has traced them, which are positional, or else as `((*args,), {**kwargs})`, as exported
        graphs take them.
        """
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
            raise InputError(f"the graph was traced for arguments shaped {spec}, got {found}.")
        check_arguments(self._inputs, flat)
        self._sizes.check(flat, exported=True)
        return flat


def _kind(value: torch.Tensor) -> str:
    """What a tensor is besides memory of some layout."""
    if not is_plain(value):
        return "one of symbolic zeros" if type(value) is torch.Tensor else f"a {type(value).__name__}"
    return _KINDS[marks_of(value)]


def _traced_kind(value: torch.Tensor) -> str:
    """A fake tensor stands for a plain one."""
    return _KINDS[marks_of(value)] if isinstance(value, FakeTensor) else _kind(value)


_KINDS = {
    UNMARKED: "a plain tensor",
    (True, False): "a conjugate view",
    (False, True): "a negative view",
    (True, True): "a negative and conjugate view",
}


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
    executables = compile_executables(gm, values, compilation, "inference", ())
    return CompiledGraph(executables, gm, inputs, values, compilation.journal)


def _is_traced(node: Node) -> bool:
    """Whether a node was traced as it is: a copy by export has no value yet, and one by AOTAutograd is tagged."""
    return "val" in node.meta and "partitioner_tag" not in node.meta


def _inputs_of(gm: GraphModule) -> list[Input]:
    nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
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
    wanted = sum(node.op == "placeholder" for node in gm.graph.nodes)
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
