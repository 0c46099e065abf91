"""Patterns made from traced functions, and from patterns that users write in torch's own classes.

    def search(x1, x2, gamma):                    OpPattern(getitem, OpPattern(npu_rms_norm,
        s = x1 + x2                        ->         self=OpPattern(add, self=x1, other=x2), gamma=gamma,
        y, _ = npu_rms_norm(s, gamma)                 epsilon=1e-6), 0)
        return y, s                               and the add, which is an output too

A *loose* pattern ignores constants, because a size may be burnt into them, and lets casts and reshapes be absent; it
finds the arguments. The function is then traced again on these arguments, and that *exact* pattern has the last word.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graphex.analysis.graphs import parameters_of
from graphex.fusion.calls import SOFT, call_of, is_nothing, one_name, op_of, value_of
from graphex.fusion.patterns import OpPattern, Pattern
from graphex.torch_private.patterns import CallFunction, Ignored, KeywordArg, MultiOutputPattern, PatternExpr
from graphex.torch_private.symbolic import pytree


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
