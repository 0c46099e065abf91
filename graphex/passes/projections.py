"""Linear layers of few rows become ops that read each weight once, with the norm, activation or residual around them.

    before:  y = rms_norm(x, g); q = linear(y, wq); k = linear(y, wk); v = linear(y, wv)
    after:   q, k, v = rms_norm_linears(x, g, ..., [wq, wk, wv], [None, None, None])

    before:  y = rms_norm(x, g); logits = linear(y, w); e = experts(y, ...)
    after:   logits, y = rms_norm_linears(x, g, ..., [w], [None], True); e = experts(y, ...)

    before:  h = silu_mul(gate, up); s = r + linear(h, w)
    after:   s, = silu_mul_linears(gate, up, [w], [None], r)

Layers that read one value become one op over their separate weights: nothing is copied or assumed to be constant. For
inference alone (the ops have no derivative), in float16 and bfloat16, up to 64 rows, or more where each of the layers
is too small to fill a device; where the number of rows is not known the op decides when it runs. What a rule of the
user's is going to take is left to it. Of more than one row, so is the norm of a residual plus another norm (Gemma) to
`rms_norm_add_rms_norm`: in the op it would be a kernel of its own.

    before:  gate, up = rms_norm_linears(x, g, ..., [wg, wu], ...); y, = silu_mul_linears(gate, up, [w], [None], r)
    after:   h = rms_norm_gated_linears(x, g, ..., [wg, wu], ...);  y, = linears(h, [w], [None], r)

`FoldGates` runs behind `FoldProjections`, on the ops that it has made: one op makes a gate and the values that it lets
through, and neither is written to memory. The new op stands where the two layers stood: it reads what they read. Gates
are `silu` and `gelu`; both layers may be the halves of one weight, of which the op reads two views.
`projection_plans` decides which layers join.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node, map_arg

from graphex.analysis import is_effectful, known_equal, known_true, node_line
from graphex.analysis.effects import is_kernel, node_leaves
from graphex.analysis.graphs import arguments
from graphex.analysis.memory import bytes_of
from graphex.fusion.rule import fresh, key_of
from graphex.ops.linears import FEW_ROWS
from graphex.passes.fuse import IdiomPass, pays, result_device, rules_in_use
from graphex.passes.projection_plans import (
    GATED,
    LINEARS,
    NORM,
    RESIDUAL,
    FoldPlan,
    Linear,
    Planner,
    is_reshape,
    linear_at,
    unfit_input,
)
from graphex.records import NO_KERNELS
from graphex.rewrite.base import Refusal, Work, bring_before, elsewhere, used_by
from graphex.rewrite.metadata import evaluate, fake_mode_of, inherit_all
from graphex.torch_private.symbolic import FakeTensorMode, no_new_guards

aten, ops = torch.ops.aten, torch.ops.graphex

SHARE = 24  # one kernel in so many has to be a layer of few rows
LITTLE = 2**24  # or all of them read more bytes of weights than that


class FoldProjections(IdiomPass):
    name = "fold_projections"
    rule_names = (LINEARS, NORM, GATED, RESIDUAL)

    def concerns(self, graph: Graph) -> bool:
        return any(linear_at(node) is not None for node in graph.nodes)

    def apply(self, work: Work) -> None:
        if not work.allows(LINEARS):
            return
        linears = [found for found in map(linear_at, work.graph.nodes) if found is not None]
        if not linears:
            return
        mode = fake_mode_of(work.gm)
        work.remark = _why_none(work, linears)
        if work.remark or mode is None:
            return
        if work.config.lift_idioms != "always" and (reason := _why_too_little(work.graph, linears)):
            work.remark, linears = reason, [linear for linear in linears if linear.has_many_rows]
        planner = Planner(work, _claimed(work))
        plans = list(planner.plans(linears))
        matches = _Folding(work, mode).fold_all(plans)
        for rule, candidates in planner.candidates.items():
            if candidates:
                work.tried(rule, matches[rule], len(candidates))


def _why_none(work: Work, linears: list[Linear]) -> str:
    """Why no layer of the graph is taken; empty if there is no such reason."""
    if not any(pays(work, LINEARS, linear.node) for linear in linears):
        return NO_KERNELS
    return "" if work.phase == "inference" else "it is for inference only"


def _why_too_little(graph: Graph, linears: list[Linear]) -> str:
    """Why no layer of few rows is taken; empty if there is no such reason.

    Tiles are measured for every shape, which takes seconds: the classifier behind a large model gains nothing.
    """
    few = [linear for linear in linears if unfit_input(linear) is None and not linear.has_many_rows]
    kernels = sum(map(is_kernel, graph.nodes))
    if not few or len(few) * SHARE >= kernels or sum(bytes_of(linear.weight) for linear in few) > LITTLE:
        return ""
    return f"{len(few)} of {kernels} kernels are small linear layers of few rows: too little to gain by measuring"


def _claimed(work: Work) -> dict[Node, str]:
    rules = rules_in_use(work)
    if not rules:
        return {}
    from graphex.fusion.matching import claimed_by  # loads the matcher

    return claimed_by(work, rules)


class _Folding:
    """The rewrites of one graph. Plans name nodes as they were before the first of them."""

    def __init__(self, work: Work, mode: FakeTensorMode) -> None:
        self.work, self.graph, self.mode = work, work.graph, mode
        self.now: dict[Node, Node] = {}  # what stands for a node that was replaced
        self.values: dict[Any, list[Any]] = {}

    def fold_all(self, plans: list[FoldPlan]) -> Counter[str]:
        """How often each rule applied."""
        matches: Counter[str] = Counter()
        for plan in plans:
            op = self._inserted(plan)
            if op is None:
                continue
            matches[LINEARS] += len(plan.linears)
            if plan.before is not None:
                matches[NORM if plan.before.target is ops.rms_norm.default else GATED] += 1
            matches[RESIDUAL] += plan.residual is not None
            self._record_fold(plan, op)
            self._connect(plan, op)
        return matches

    # -- the op ------------------------------------------------------------------------------------------------------

    def _inserted(self, plan: FoldPlan) -> Node | None:
        """The op that takes the place of the layers; None if its result cannot be told."""
        place = plan.place
        for linear in plan.linears:
            for operand in linear.operands:
                bring_before(self._current(operand), place)
        with self.graph.inserting_before(place):
            op = self.graph.call_function(plan.op, self._arguments(plan))
        inherit_all(op, _replaced(plan))
        try:
            op.meta["val"] = self._value(op)
        except Exception as problem:
            self.graph.erase_node(op)
            reason = f"the op fails on these arguments: {str(problem).strip().splitlines()[0]}"
            self.work.refuse(plan.linears[0].node, Refusal(reason), rule=LINEARS)
            return None
        return op

    def _arguments(self, plan: FoldPlan) -> tuple[Any, ...]:
        weights = [self._current(linear.weight) for linear in plan.linears]
        biases = [None if linear.bias is None else self._current(linear.bias) for linear in plan.linears]
        residual = () if plan.residual is None else (self._current(plan.residual.other),)
        if plan.before is None:
            return (self._current(plan.x), weights, biases, *residual)
        given = arguments(plan.before)
        if plan.before.target is ops.silu_mul.default:
            return (given["gate"], given["up"], weights, biases, *residual)
        first = (given[name] for name in ("x", "weight", "eps", "weight_offset", "cast_before_weight"))
        return (*first, weights, biases, *([] if plan.kept is None else [True]))

    def _value(self, op: Node) -> list[Any]:
        """The op's results as (fake) tensors. Layers that are alike are asked once: the answer takes a while."""
        key = op.target, key_of(map_arg(op.args, lambda node: node.meta["val"]))
        if key not in self.values:
            with no_new_guards(self.mode.shape_env):
                self.values[key] = evaluate(self.work.gm, op, self.mode)
        return [fresh(value) for value in self.values[key]]

    # -- the rest of the graph ---------------------------------------------------------------------------------------

    def _connect(self, plan: FoldPlan, op: Node) -> None:
        place = op if plan.kept is None else self._keep(plan.kept, op)
        for index, linear in enumerate(plan.linears):
            with self.graph.inserting_after(place):
                place = part = self.graph.call_function(operator.getitem, (op, index))
            inherit_all(part, [linear.node])
            part.meta["val"] = op.meta["val"][index]
            if plan.residual is not None:
                inherit_all(part, [plan.residual.add])
                self._replace(plan.residual.add, part)
            else:
                self._hand_on(linear.node, part)
        _erase_unused([*_replaced(plan), *([] if plan.kept is None else [plan.kept])])

    def _keep(self, norm: Node, op: Node) -> Node:
        """Let others have the norm of the op. Reshapes of it stood before the op, for its layers, and go behind it."""
        last = len(op.meta["val"]) - 1
        with self.graph.inserting_after(op):
            place = part = self.graph.call_function(operator.getitem, (op, last))
        inherit_all(part, [norm])
        part.meta["val"] = op.meta["val"][last]
        self._replace(norm, part)
        pending = [user for user in part.users if user < op]
        while pending:
            reshape = pending.pop(0)
            place.append(reshape)
            place = reshape
            pending += [user for user in reshape.users if user < op]
        return place

    def _hand_on(self, product: Node, part: Node) -> None:
        """Let the users of a product have the layer's result: reshaped as they want it, both are one row of memory."""
        shape = tuple(part.meta["val"].shape)
        returned = _is_returned(product)
        for user in list(product.users):
            if not is_reshape(user):
                continue
            twice = returned and _is_returned(user)  # two results of the graph must not become one tensor
            if known_equal(tuple(user.meta["val"].shape), shape) and not twice:
                returned = returned or _is_returned(user)
                self._replace(user, part)
                self.graph.erase_node(user)
            else:
                user.replace_input_with(product, part)
        if product.users and not known_equal(tuple(product.meta["val"].shape), shape):
            part = self._flat(product, part)
        self._replace(product, part)

    def _flat(self, product: Node, part: Node) -> Node:
        """The result as the matrix that the product was."""
        value: Tensor = product.meta["val"]
        with self.graph.inserting_after(part):
            flat = self.graph.call_function(aten.view.default, (part, [-1, value.shape[-1]]))
        inherit_all(flat, [product])
        flat.meta["val"] = part.meta["val"].as_strided(value.shape, value.stride(), 0)
        return flat

    def _replace(self, old: Node, new: Node) -> None:
        old.replace_all_uses_with(new)
        self.now[old] = new

    def _current(self, node: Node) -> Node:
        while node in self.now:
            node = self.now[node]
        return node

    def _record_fold(self, plan: FoldPlan, op: Node) -> None:
        products = [linear.node for linear in plan.linears]
        read = f"'{plan.linears[0].x.name}' is read by {len(products)} linear layer" + "s" * (len(products) > 1)
        self._note(LINEARS, products, op, read)
        if plan.before is not None:
            rule = NORM if plan.before.target is ops.rms_norm.default else GATED
            alone = "alone" if plan.kept is None else "first"
            self._note(rule, [plan.before], op, f"'{plan.before.name}' is read by these layers {alone}")
        if plan.residual is not None:
            why = f"'{plan.residual.other.name}' is added to the only use of the layer's result"
            self._note(RESIDUAL, [plan.residual.add], op, why)

    def _note(self, rule: str, nodes: list[Node], op: Node, because: str) -> None:
        line = next(filter(None, map(node_line, nodes)), "")
        self.work.fused([node.name for node in nodes], [op], rule=rule, because=because, line=line)


def _is_returned(node: Node) -> bool:
    return any(user.op == "output" for user in node.users)


def _replaced(plan: FoldPlan) -> list[Node]:
    found = [linear.node for linear in plan.linears]
    found += [] if plan.before is None else [plan.before]
    return found + ([] if plan.residual is None else [plan.residual.add])


def _erase_unused(nodes: list[Node]) -> None:
    """Erase nodes that are not used any more, and the nodes that only they used."""
    pending = set(nodes)
    while pending:
        node = max(pending)
        pending.remove(node)
        if not node.users and not is_effectful(node):
            pending.update(node.all_input_nodes)
            node.graph.erase_node(node)


# -- gates -------------------------------------------------------------------------------------------------------------


GATE = "gated_linears"
_WITH_GATE: dict[Any, Any] = {
    ops.linears.default: ops.gated_linears.default,
    ops.rms_norm_linears.default: ops.rms_norm_gated_linears.default,
}
_SILU = (ops.silu_mul.default, ops.silu_mul_linears.default)
_GELU = {"none": "gelu", "tanh": "gelu_tanh"}


@dataclass(frozen=True)
class _Gate:
    """A product of a gate and what it lets through, which come from layers of one input, through `inner`."""

    product: Node
    gate: Node
    up: Node
    activation: str
    layers: Node
    inner: tuple[Node, ...]
    halved: bool  # both are halves of one layer's result

    @property
    def order(self) -> tuple[int, ...]:
        return tuple(int(part.args[1]) for part in (self.gate, self.up))  # type: ignore[arg-type]


class FoldGates(IdiomPass):
    """A gate and the layers that it is made of become one op, on what `fold_projections` has made."""

    name = "fold_gates"
    rule = GATE

    def concerns(self, graph: Graph) -> bool:
        return any(node.target in _WITH_GATE for node in graph.nodes)

    def apply(self, work: Work) -> None:
        mode = fake_mode_of(work.gm)
        if mode is None:
            return
        matches = candidates = 0
        for node in list(work.graph.nodes):
            gate = _gate_at(node)
            if gate is None:
                continue
            candidates += 1
            refusal = _why_no_gate(work, gate)
            if refusal is None:
                _fold_gate(work, mode, gate)
                matches += 1
            else:
                work.refuse(node, refusal, rule=GATE)
        if candidates:
            work.tried(GATE, matches, candidates)


def _gate_at(node: Node) -> _Gate | None:
    gate, up, activation, between = _activation_at(node)
    parts = [each for each in (gate, up) if isinstance(each, Node) and each.target is operator.getitem]
    if len(parts) != 2 or parts[0].args[0] is not parts[1].args[0] or gate is up:
        return None
    source: Any = parts[0].args[0]
    whole = _halved(source)
    layers = source if whole is None else whole.args[0]
    if layers.target not in _WITH_GATE:
        return None
    behind = (*layers.users, *(() if whole is None else (source, *source.users)), *between)
    return _Gate(node, gate, up, activation, layers, behind, whole is not None)


def _activation_at(node: Node) -> tuple[Any, Any, str, tuple[Node, ...]]:
    """The gate of a product and what it lets through, the activation, and its node where that is another one."""
    if node.target in _SILU:
        given = arguments(node)
        return given["gate"], given["up"], "silu", ()
    if node.target is aten.mul.Tensor and len(node.all_input_nodes) == 2:
        for gelu, up in (node.args, node.args[::-1]):
            if isinstance(gelu, Node) and gelu.target is aten.gelu.default and _same_type(node, gelu, up):
                given = arguments(gelu)
                return given["self"], up, _GELU[given["approximate"]], (gelu,)
    return None, None, "", ()


def _same_type(*nodes: Any) -> bool:
    return len({node.meta["val"].dtype for node in nodes}) == 1


def _halved(split: Any) -> Any:
    """The only result of a layer that `split` cuts into two halves, along the last dimension."""
    if split.target is not aten.split.Tensor:
        return None
    whole, value = split.args[0], split.args[0].meta["val"]
    halves = [part.shape[-1] for part in split.meta["val"]]
    dim = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
    if whole.target is not operator.getitem or dim % value.dim() != value.dim() - 1:
        return None
    return whole if len(halves) == 2 and isinstance(halves[0], int) and halves[0] == halves[1] else None


def _why_no_gate(work: Work, gate: _Gate) -> Refusal | None:
    node, layers = gate.product, gate.layers
    given = arguments(layers)
    if len(given["weights"]) != (1 if gate.halved else 2):
        return Refusal(f"'{layers.name}' is {len(given['weights'])} layers", node)
    if given.get("residual") is not None:
        return Refusal(f"'{layers.name}' adds a residual", node)
    if known_true(gate.gate.meta["val"].numel() > FEW_ROWS * gate.gate.meta["val"].shape[-1]):
        return Refusal(f"'{layers.name}' has more than {FEW_ROWS} rows", node)
    for part in gate.inner:
        if (stranger := next((user for user in part.users if user not in (node, *gate.inner)), None)) is not None:
            return Refusal(f"'{part.name}' is also {used_by(stranger)}", node)
    if sum(leaf in gate.inner for leaf in node_leaves((node.args, node.kwargs))) > 2:
        return Refusal(f"'{node.name}' reads the gate or what it lets through once more", node)
    if (apart := elsewhere(layers, node)) is not None:
        return apart
    if not pays(work, GATE, layers):
        return Refusal(f"'graphex::{GATE}' has no kernel on {result_device(layers).type}", node)
    return None


def _fold_gate(work: Work, mode: FakeTensorMode, gate: _Gate) -> None:
    node, layers = gate.product, gate.layers
    given, call = arguments(layers), arguments(node)
    weights, biases = (_of_both_layers(work, mode, gate, given[name]) for name in ("weights", "biases"))
    first = [value for name, value in given.items() if name not in ("weights", "biases", "residual", "keeps_norm")]
    args = (*first, weights, biases, gate.activation)
    made = result = _inserted(work, mode, _WITH_GATE[layers.target], args, [layers, *gate.inner, node], layers)
    if node.target is ops.silu_mul_linears.default:
        rest = (made, call["weights"], call["biases"], call["residual"])
        result = _inserted(work, mode, ops.linears.default, rest, [node], node)
    because = f"'{gate.gate.name}' and '{gate.up.name}' are read by '{node.name}' alone"
    made_here = list(dict.fromkeys([made, result]))
    work.fused([layers.name, node.name], made_here, rule=GATE, because=because, line=node_line(node))
    node.replace_all_uses_with(result)
    for old in (node, *reversed(gate.inner), layers):
        work.graph.erase_node(old)


def _of_both_layers(work: Work, mode: FakeTensorMode, gate: _Gate, given: list[Any]) -> list[Any]:
    """The weights, or biases, of the gate and of what it lets through."""
    if not gate.halved:
        return [given[index] for index in gate.order]
    if given[0] is None:
        return [None, None]
    size = gate.gate.meta["val"].shape[-1]
    bounds = [(0, index * size, (index + 1) * size) for index in gate.order]
    return [_inserted(work, mode, aten.slice.Tensor, (given[0], *at), [gate.layers], gate.layers) for at in bounds]


def _inserted(
    work: Work, mode: FakeTensorMode, op: Any, args: tuple[Any, ...], replaced: list[Node], before: Node
) -> Node:
    with work.graph.inserting_before(before):
        made = work.graph.call_function(op, args)
    inherit_all(made, replaced)
    with no_new_guards(mode.shape_env):
        made.meta["val"] = evaluate(work.gm, made, mode)
    return made
