"""Tracing of search and replacement functions, with the decompositions that graphs are traced with.

The pattern and the graph must pass through the same mill, or they never look alike. Traces are remembered by what
they depend on (shapes, strides, dtypes, devices, scalars): a model with 32 equal layers traces a rule once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import combinations
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graphex.analysis import Aliases, written_arguments
from graphex.analysis.graphs import parameters_of
from graphex.fusion.calls import SOFT, call_of, is_nothing, one_name, op_of, value_of
from graphex.fusion.patterns import OpPattern, Pattern
from graphex.ops.decompositions import Table, decompositions
from graphex.torch_private.aot import joint_trace, symbolic_trace
from graphex.torch_private.patterns import CallFunction, Ignored, KeywordArg, MultiOutputPattern, PatternExpr
from graphex.torch_private.symbolic import FakeTensor, FakeTensorMode, ShapeEnv, fake_like, no_new_guards, pytree

# -- tracing -----------------------------------------------------------------------------------------------------------


TraceFn = Callable[..., GraphModule]


def trace_forward(fn: Callable[..., Any], args: Sequence[Any], table: Table | None = None) -> GraphModule:
    """The graph of `fn` on these (fake) arguments, functional, as AOTAutograd would hand it over."""
    return _tidied(symbolic_trace(fn, args, decompositions(table)))


def trace_joint(fn: Callable[..., Any], args: Sequence[Any], table: Table | None = None) -> GraphModule:
    """The joint forward and backward graph of `fn`; the gradients come in as further arguments."""
    return _tidied(joint_trace(fn, args, decompositions(table)))


def _tidied(gm: GraphModule) -> GraphModule:
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def without_guards(trace: Callable[[], GraphModule], mode: FakeTensorMode | None) -> GraphModule:
    """Trace in the graph's own fake mode. `NewGuardError` if that asks what is not known about a symbolic size."""
    env: ShapeEnv | None = mode.shape_env if mode is not None else None
    with no_new_guards(env):
        return trace()


def key_of(args: Sequence[Any]) -> tuple[Any, ...]:
    """What a trace depends on, as something that can be compared."""
    return tuple(map(_key, args))


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        sizes = tuple(map(_expression, (*value.shape, *value.stride())))
        return (sizes, value.dtype, value.device, value.requires_grad)
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    return (type(value).__name__, _expression(value))


def _expression(value: Any) -> Any:
    return value.node.expr if isinstance(value, (torch.SymInt, torch.SymFloat)) else value


def fresh(value: Any, *, requires_grad: bool = False) -> Any:
    """A (fake) tensor like this one that shares memory with nothing."""
    if not isinstance(value, FakeTensor):
        return value
    made = fake_like(value)
    return made.requires_grad_() if requires_grad and value.dtype.is_floating_point else made


# -- replacement -------------------------------------------------------------------------------------------------------
# What takes the place of a match: a traced graph, and what can be said of it once for all the places it is put in.


class Replacement:
    """The trace of a replacement function for arguments of one kind."""

    def __init__(self, module: GraphModule) -> None:
        self.module = module
        self.nodes = list(module.graph.nodes)
        self.results = results_of(module)
        self._owners: dict[int, Node] = {}
        for node in self.nodes:
            for part in _tensors(node.meta.get("val")):
                self._owners.setdefault(part.untyped_storage()._cdata, node)
        self._own = {node for node in self.nodes if self._is_in_own_memory(node)}

    @cached_property
    def shared_with_inputs(self) -> list[tuple[int, int]]:
        """Results, by number, and the arguments in whose memory they may lie."""
        aliases, inputs = Aliases(self.module.graph), self.module.graph.find_nodes(op="placeholder")
        pairs = ((index, place) for index in range(len(self.results)) for place in range(len(inputs)))
        return [(index, place) for index, place in pairs if aliases.may_alias(self.results[index], inputs[place])]

    @cached_property
    def shared_results(self) -> list[tuple[int, int]]:
        """Results, by number, that may lie in one memory."""
        aliases, pairs = Aliases(self.module.graph), combinations(range(len(self.results)), 2)
        return [(one, other) for one, other in pairs if aliases.may_alias(self.results[one], self.results[other])]

    @cached_property
    def write_to_argument(self) -> Node | None:
        """A node that may write to the memory of an argument."""
        writers = {node: written for node in self.nodes if (written := written_arguments(node))}
        aliases = Aliases(self.module.graph) if writers else None
        found = (node for node, written in writers.items() if aliases and any(map(aliases.lives_in_input, written)))
        return next(found, None)

    def value_for(self, traced: Node, node: Node) -> Any:
        """The value of a node that was made like the traced one: alike, in memory of its own.

        Cheaper than evaluating the op again. None where the trace shares memory between nodes: there that has to be
        done.
        """
        if traced.target is operator.getitem:
            whole, index = node.args
            return whole.meta["val"][index] if isinstance(whole, Node) else None
        if traced not in self._own:
            return None
        value = traced.meta.get("val")
        if isinstance(value, (list, tuple)):
            return type(value)(fresh(part) for part in value)
        return fresh(value) if isinstance(value, torch.Tensor) else None

    def _is_in_own_memory(self, node: Node) -> bool:
        return all(self._owners[part.untyped_storage()._cdata] is node for part in _tensors(node.meta.get("val")))


def results_of(gm: GraphModule) -> list[Any]:
    """The tensors that a traced function returns, flat."""
    output = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
    return [leaf for leaf in pytree.tree_leaves(output.args[0]) if isinstance(leaf, Node)]


def _tensors(value: Any) -> list[torch.Tensor]:
    parts = value if isinstance(value, (list, tuple)) else [value]
    return [part for part in parts if isinstance(part, torch.Tensor)]


# -- making ------------------------------------------------------------------------------------------------------------
# Patterns made from traced functions, and from what users write in torch's own classes.
#
#     def search(x1, x2, gamma):                    OpPattern(getitem, OpPattern(npu_rms_norm,
#         s = x1 + x2                        ->         self=OpPattern(add, self=x1, other=x2), gamma=gamma,
#         y, _ = npu_rms_norm(s, gamma)                 epsilon=1e-6), 0)
#         return y, s                               and the add, which is an output too
#
# *Loose* patterns ignore constants, since a size may be burnt into them, and let casts and reshapes be absent; they
# find
# the arguments. The function is then traced again on what was found, and that *exact* pattern has the last word.


def pattern_of(gm: GraphModule, names: list[str], scalars: Mapping[str, float], *, exact: bool) -> Pattern:
    """The pattern of a traced function. `scalars` are the values that stand for its scalar arguments."""
    made: dict[Node, Any] = {}
    arguments = iter(names)
    marks = {value: name for name, value in scalars.items()}
    outputs: list[PatternExpr] = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            made[node] = KeywordArg(next(arguments, node.name))
        elif node.op == "output":
            outputs = [made[leaf] for leaf in pytree.tree_leaves(node.args[0]) if isinstance(leaf, Node)]
        elif not isinstance(value_of(node), torch.Tensor) and op_of(node) is not operator.getitem and _is_size(node):
            made[node] = value_of(node)
        elif exact and node.op == "call_function" and is_nothing(node):
            made[node] = made[node.all_input_nodes[0]]
        else:
            made[node] = _op_pattern(node, made, marks, exact=exact)
    return Pattern(outputs)


def _op_pattern(node: Node, made: Mapping[Node, Any], marks: Mapping[Any, str], *, exact: bool) -> OpPattern:
    call = call_of(node)

    def convert(value: Any) -> Any:
        if isinstance(value, Node):
            known = made[value]
            return known if isinstance(known, PatternExpr) or exact else Ignored()
        if isinstance(value, (list, tuple)):
            parts = [convert(part) for part in value]
            return Ignored() if parts and all(isinstance(part, Ignored) for part in parts) else tuple(parts)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value in marks:
            return KeywordArg(marks[value])
        keep = exact or value is None or isinstance(value, (bool, str)) or call.op is operator.getitem
        return value if keep else Ignored()

    arguments = {name: convert(value) for name, value in call.args.items()}
    return OpPattern(call.op, arguments, soft=not exact and call.op in SOFT)


def converted(pattern: PatternExpr) -> Pattern:
    """A pattern that a user wrote in torch's classes, in ours: normalised arguments, located failures."""
    made: dict[PatternExpr, Any] = {}

    def convert(part: Any) -> Any:
        if isinstance(part, (list, tuple)):
            return tuple(convert(one) for one in part)
        if not isinstance(part, CallFunction) or isinstance(part, OpPattern):
            return part
        if part not in made:
            op, arguments = _normalised(part)
            made[part] = OpPattern(op, {name: convert(value) for name, value in arguments.items()})
        return made[part]

    outputs = pattern.outputs if isinstance(pattern, MultiOutputPattern) else [pattern]
    return Pattern([convert(output) for output in outputs if output is not None])


def _normalised(part: CallFunction) -> tuple[Any, dict[str, Any]]:
    """An op and its arguments by name: a positional one left out has its default, a keyword is ignored."""
    target: Any = part.fns[0]
    op = one_name(target)
    parameters = parameters_of(target)
    if parameters is None:
        return op, {**{str(index): value for index, value in enumerate(part.args)}, **part.kwargs}
    names = [name for name, _ in parameters]
    arguments = dict(zip(names, part.args, strict=False)) | part.kwargs
    if op in SOFT:
        return op, {"self": next(iter(arguments.values()))}
    keywords = {a.name for a in target._schema.arguments if a.kwarg_only}
    return op, {**{n: d for n, d in parameters if n not in keywords and n not in arguments}, **arguments}


def _is_size(node: Node) -> bool:
    return isinstance(value_of(node), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))
