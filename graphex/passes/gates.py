"""A gate and what it lets through are made by one op: neither is written to memory.

    before:  gate, up = rms_norm_linears(x, g, ..., [wg, wu], ...); y, = silu_mul_linears(gate, up, [w], [None], r)
    after:   h = rms_norm_gated_linears(x, g, ..., [wg, wu], ...);  y, = linears(h, [w], [None], r)

Runs behind `fold_projections`, on the ops that it has made. The new op stands where the two layers stood: it reads what
they read.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from graphex.analysis import node_line
from graphex.analysis.effects import node_leaves
from graphex.analysis.graphs import arguments
from graphex.config import CompilerConfig
from graphex.ops import has_kernel
from graphex.records import RuleTried
from graphex.rewrite.base import GraphPass, Refusal, Work
from graphex.rewrite.metadata import evaluate, fake_mode_of, inherit_all
from graphex.rewrite.motion import elsewhere, used_by
from graphex.torch_private.symbolic import FakeTensorMode, no_new_guards

ops = torch.ops.graphex

RULE = "gated_linears"
_GATED: dict[Any, Any] = {
    ops.linears.default: ops.gated_linears.default,
    ops.rms_norm_linears.default: ops.rms_norm_gated_linears.default,
}
_ACTIVATIONS = (ops.silu_mul.default, ops.silu_mul_linears.default)


class FoldGates(GraphPass):
    name = "fold_gates"
    option = "pattern_fusion_pass"

    def enabled(self, config: CompilerConfig) -> bool:
        return super().enabled(config) and config.lift_idioms != "never"

    def rules(self) -> tuple[str, ...]:
        return (RULE,)

    def concerns(self, graph: Graph) -> bool:
        return any(node.target in _GATED for node in graph.nodes)

    def apply(self, work: Work) -> None:
        mode = fake_mode_of(work.gm)
        if mode is None or not work.allows(RULE):
            return
        matches = candidates = 0
        for node in list(work.graph.nodes):
            layers = _layers_before(node)
            if layers is None:
                continue
            candidates += 1
            refusal = _why_not(work, node, layers)
            if refusal is None:
                _fold(work, mode, node, layers)
                matches += 1
            else:
                work.refuse(node, refusal, rule=RULE)
        if candidates:
            work.note(lambda graph, name: RuleTried(graph, name, RULE, matches, candidates))


def _layers_before(node: Node) -> Node | None:
    """The two layers that make the gate and the rest of an activation."""
    if node.target not in _ACTIVATIONS:
        return None
    gate, up = (arguments(node)[name] for name in ("gate", "up"))
    parts = [each for each in (gate, up) if isinstance(each, Node) and each.target is operator.getitem]
    if len(parts) != 2 or parts[0].args[0] is not parts[1].args[0] or gate is up:
        return None
    layers = parts[0].args[0]
    return layers if isinstance(layers, Node) and layers.target in _GATED else None


def _why_not(work: Work, node: Node, layers: Node) -> Refusal | None:
    given = arguments(layers)
    if len(given["weights"]) != 2:
        return Refusal(f"'{layers.name}' is {len(given['weights'])} layers", node)
    if given.get("residual") is not None:
        return Refusal(f"'{layers.name}' adds a residual", node)
    for part in layers.users:
        if (stranger := next((user for user in part.users if user is not node), None)) is not None:
            return Refusal(f"'{part.name}' is also {used_by(stranger)}", node)
    if sum(leaf in layers.users for leaf in node_leaves((node.args, node.kwargs))) > 2:
        return Refusal(f"'{node.name}' reads the gate or what it lets through once more", node)
    if (apart := elsewhere(layers, node)) is not None:
        return apart
    device = layers.meta["val"][0].device
    if work.config.lift_idioms != "always" and not has_kernel(f"graphex::{RULE}", device):
        return Refusal(f"'graphex::{RULE}' has no kernel on {device.type}", node)
    return None


def _fold(work: Work, mode: FakeTensorMode, node: Node, layers: Node) -> None:
    given, call = arguments(layers), arguments(node)
    parts = list(layers.users)
    order = [part.args[1] for part in (call["gate"], call["up"])]
    weights, biases = ([given[name][index] for index in order] for name in ("weights", "biases"))
    first = [value for name, value in given.items() if name not in ("weights", "biases", "residual")]
    made = _call(work, mode, _GATED[layers.target], (*first, weights, biases), [layers, *parts, node], layers)
    if node.target is ops.silu_mul.default:
        result = made
    else:
        rest = (made, call["weights"], call["biases"], call["residual"])
        result = _call(work, mode, ops.linears.default, rest, [node], node)
    line = node_line(node)
    because = f"'{parts[0].name}' and '{parts[-1].name}' are read by '{node.name}' alone"
    work.fused([layers.name, node.name], list(dict.fromkeys([made, result])), rule=RULE, because=because, line=line)
    node.replace_all_uses_with(result)
    for old in (node, *parts, layers):
        work.graph.erase_node(old)


def _call(work: Work, mode: FakeTensorMode, op: Any, args: tuple[Any, ...], replaced: list[Node], before: Node) -> Node:
    with work.graph.inserting_before(before):
        made = work.graph.call_function(op, args)
    inherit_all(made, replaced)
    with no_new_guards(mode.shape_env):
        made.meta["val"] = evaluate(work.gm, made, mode)
    return made
