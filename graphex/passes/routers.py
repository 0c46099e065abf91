"""The choice of experts becomes one op: softmax or sigmoid, top-k, groups and normalisation.

    logits -> (cast) -> softmax -> topk -> (divide by the sum) -> (times a number) -> (cast)        graphex.route(...)
    logits -> topk -> softmax
    logits -> sigmoid -> + correction -> (only the best groups) -> topk; the sigmoids of these -> divide ...

It is looked for before every `graphex.experts`. Each of these small ops is a launch of its own otherwise, and `topk`
several, which together take as long as reading the weights of an expert.

For a few tokens the two are joined then, so that programs of the first projection can find their experts themselves:

    graphex.experts(x, *graphex.route(logits, ...), ...)                                 graphex.routed_experts(...)
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from graphex.analysis import node_line
from graphex.analysis.graphs import arguments, given_arguments, positional
from graphex.ops.experts import FEW
from graphex.passes.experts import called, why_not_alone
from graphex.passes.fuse import IdiomPass, pays
from graphex.rewrite.base import Refusal, Work
from graphex.rewrite.metadata import inherit_all

aten = torch.ops.aten
experts, route = torch.ops.graphex.experts.default, torch.ops.graphex.route.default
routed = torch.ops.graphex.routed_experts.default
_BETWEEN = ("bias", "groups", "top_groups", "experts", "weights")  # arguments that one op for both does not take


class LiftRouters(IdiomPass):
    name = "lift_routers"
    rule = "lift_route"

    def concerns(self, graph: Graph) -> bool:
        return any(node.target is experts for node in graph.nodes)

    def apply(self, work: Work) -> None:
        self.lift(work, ((node, _router(node.args[1], node.args[2])) for node in _mixtures(work, "route")))

    def replace(self, work: Work, router: Router) -> None:
        graph = work.graph
        if (clamp := router.clamp) is not None:
            clamp.replace_all_uses_with(clamp.args[0])
            graph.erase_node(clamp)
        nodes = sorted(router.inner)
        line = node_line(nodes[-1])
        with graph.inserting_before(min(router.ends)):
            new = graph.call_function(route, router.arguments)
            parts = [graph.call_function(operator.getitem, (new, at)) for at in range(2)]
        new.meta["val"] = tuple(old.meta["val"] for old in router.ends)
        for part, old in zip(parts, router.ends, strict=True):
            part.meta["val"] = old.meta["val"]
            inherit_all(part, [old])
            old.replace_all_uses_with(part)
        inherit_all(new, nodes)
        names = [node.name for node in nodes]
        for node in reversed(nodes):
            graph.erase_node(node)
        work.fused(names, [new], rule=self.rule, because="experts are chosen by one kernel", line=line)


class JoinRouters(IdiomPass):
    """A choice of experts and the mixture of these become one op."""

    name = "join_routers"
    rule = "join_route"

    def concerns(self, graph: Graph) -> bool:
        return bool(graph.find_nodes(op="call_function", target=route))

    def apply(self, work: Work) -> None:
        found = [(node, site) for node in _mixtures(work, "routed_experts") if (site := _chosen_for(node)) is not None]
        self.lift(work, ((node, site if (why := site.refusal()) is None else why) for node, site in found))

    def replace(self, work: Work, site: JoinedRouter) -> None:
        graph, nodes = work.graph, sorted(site.inner)
        with graph.inserting_before(site.mixture):
            new = graph.call_function(routed, site.arguments)
        new.meta["val"] = site.mixture.meta["val"]
        inherit_all(new, nodes)
        line, names = node_line(site.mixture), [node.name for node in nodes]
        site.mixture.replace_all_uses_with(new)
        for node in reversed(nodes):
            graph.erase_node(node)
        work.fused(names, [new], rule=self.rule, because="experts can be chosen where they are computed", line=line)


def _mixtures(work: Work, op: str) -> list[Node]:
    """The mixtures of experts for which an op of graphex is worth having."""
    return [node for node in work.graph.nodes if node.target is experts and pays(work, op, node)]


@dataclass
class JoinedRouter:
    """A `mixture` of experts that are chosen by `choice`. `inner` are all nodes from one to the other."""

    choice: Node
    mixture: Node
    inner: set[Node]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of the op that does both."""
        taken = arguments(self.choice) | given_arguments(self.mixture)
        return positional(routed, {name: value for name, value in taken.items() if name not in _BETWEEN})

    def refusal(self) -> Refusal | None:
        how = arguments(self.choice)
        value = how["logits"].meta["val"]
        if how["bias"] is not None or how["groups"] > 1:
            return Refusal("its experts are chosen with a correction, or in groups")
        if value.dtype not in (torch.float16, torch.bfloat16):
            return Refusal(f"its logits are {value.dtype}, not 16-bit numbers")
        if not isinstance(value.shape[0], int) or value.shape[0] * how["top_k"] > FEW:
            return Refusal(f"it may have more than {FEW} pairs of a token and an expert")
        return why_not_alone(self.inner, self.mixture)


def _chosen_for(mixture: Any) -> JoinedRouter | None:
    """A mixture whose experts and weights are the flat results of one choice."""
    inner = {mixture}
    choices: list[Any] = []
    for given, number in zip(mixture.args[1:3], (1, 0), strict=True):
        view = called(given, aten.view.default)
        part = None if view is None else called(view.args[0], operator.getitem)
        if view is None or part is None or part.args[1] != number:
            return None
        inner |= {view, part}
        choices.append(called(part.args[0], route))
    choice, other = choices
    if choice is None or choice is not other or choice.kwargs:
        return None
    return JoinedRouter(choice, mixture, inner | {choice})


@dataclass
class Router:
    """`ends` are the weights and the numbers of experts, [T, k]; `inner` are all nodes between the logits and these.

    `clamp` limits the numbers to those that there are, which all of them are anyway.
    """

    ends: tuple[Node, Node]
    inner: set[Node]
    logits: Node
    scores: str
    top_k: int
    bias: Node | None = None
    normalised: bool = False
    epsilon: float = 0.0
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    clamp: Any = None
    arguments: tuple[Any, ...] = field(init=False)

    def __post_init__(self) -> None:
        how = (self.normalised, self.epsilon, self.scale, self.groups, self.top_groups)
        dtype = self.ends[0].meta["val"].dtype
        self.arguments = (self.logits, self.bias, self.top_k, self.scores, dtype, *how)


def _router(numbers: Any, weights: Any) -> Router | Refusal:
    """The router whose results, flat, are these two."""
    found = _router_at(numbers, weights)
    if found is None:
        return Refusal("its experts are chosen in a form that is not known")
    refusal = why_not_alone(found.inner, *found.ends)
    return found if refusal is None else refusal


def _router_at(numbers: Any, weights: Any) -> Router | None:
    clamp = called(numbers, aten.clamp.default)
    chosen = called(numbers if clamp is None else clamp.args[0], aten.view.default)
    values = called(weights, aten.view.default)
    if chosen is None or values is None:
        return None
    chosen, values = called(chosen.args[0], operator.getitem), values.args[0]
    top = None if chosen is None or chosen.args[1] != 1 else _top(chosen.args[0])
    if chosen is None or top is None or not isinstance(values, Node) or values.meta["val"].dim() != 2:
        return None
    if clamp is not None and not _keeps_all(clamp, top.args[0].meta["val"].shape[-1]):
        return None
    found = _of_the_chosen(chosen, values, top) or _of_all(chosen, values, top)
    if found is not None:
        found.clamp = clamp
    return found


def _keeps_all(clamp: Any, count: Any) -> bool:
    """Whether numbers from 0 to below `count` stay as they are."""
    lowest, highest = (*clamp.args[1:], None)[:2]
    above = highest is None or (isinstance(count, int) and highest >= count - 1)
    return not clamp.kwargs and (lowest is None or lowest <= 0) and above


def _top(node: Any) -> Any:
    """A `topk` along the last dimension, of the largest."""
    top = called(node, aten.topk.default)
    if top is None or top.kwargs:
        return None
    given: tuple[Any, ...] = tuple(top.args[2:4])
    dim, largest = given + (-1, True)[len(given) :]
    last = top.args[0].meta["val"].dim() - 1
    return top if dim in (-1, last) and largest and isinstance(top.args[1], int) else None


def _softmax_of(node: Any) -> Any:
    found = called(node, aten._softmax.default)
    return found if found is not None and found.args[1] in (1, -1) and found.args[2] is False else None


def _of_the_chosen(chosen: Node, values: Node, top: Any) -> Router | None:
    """`softmax(topk(logits))`"""
    softmax = _softmax_of(values)
    best = None if softmax is None else called(softmax.args[0], operator.getitem)
    if best is None or best.args != (top, 0) or top.args[0].meta["val"].dim() != 2:
        return None
    return Router((values, chosen), {values, chosen, best, top}, top.args[0], "chosen", top.args[1])


def _of_all(chosen: Node, values: Node, top: Any) -> Router | None:
    """Scores of all logits, of which the best are taken and scaled."""
    inner: set[Node] = {chosen, values, top}
    base, how = _scaled(values, inner)
    gathered = called(base, aten.gather.default)
    if gathered is not None and gathered.args[1] in (1, -1) and gathered.args[2] is chosen:
        scores = gathered.args[0]
    elif (best := called(base, operator.getitem)) is not None and best.args == (top, 0):
        scores = None
    else:
        return None
    inner.add(base)
    choice, groups = _grouped(top.args[0], inner)
    bias = None
    if choice is not scores and scores is not None:
        added = called(choice, aten.add.Tensor)
        if added is None or added.kwargs or added.args[0] is not scores or not isinstance(added.args[1], Node):
            return None
        inner.add(added)
        bias = added.args[1]
        if tuple(bias.meta["val"].shape) != (scores.meta["val"].shape[1],):
            return None
    if scores is None and groups != (1, 1):
        return None  # what the best groups leave are not the scores
    found = _scores(choice if scores is None else scores, inner)
    if found is None:
        return None
    logits, kind = found
    return Router((values, chosen), inner, logits, kind, top.args[1], bias, *how, *groups)


def _scaled(values: Any, inner: set[Node]) -> tuple[Any, tuple[bool, float, float]]:
    """The values that a cast, a factor and a division by their sum are applied to, and which of these there are."""
    normalised, epsilon, scale = False, 0.0, 1.0
    node = values
    if (cast := called(node, aten._to_copy.default)) is not None and cast.kwargs.keys() <= {"dtype"}:
        inner.add(cast)
        node = cast.args[0]
    if (product := called(node, aten.mul.Tensor)) is not None and isinstance(product.args[1], (int, float)):
        inner.add(product)
        node, scale = product.args[0], float(product.args[1])
    quotient = called(node, aten.div.Tensor)
    if quotient is None or not isinstance(quotient.args[1], Node):
        return node, (normalised, epsilon, scale)
    total, found = quotient.args[1], {quotient}
    if (added := called(total, aten.add.Tensor)) is not None and isinstance(added.args[1], float) and not added.kwargs:
        found.add(added)
        total, epsilon = added.args[0], added.args[1]
    summed = called(total, aten.sum.dim_IntList)
    given = None if summed is None else (summed.args[0], [each % 2 for each in summed.args[1]], *summed.args[2:])
    if summed is None or given != (quotient.args[0], [1], True) or summed.kwargs:
        return node, (False, 0.0, scale)
    inner |= found | {summed}
    return quotient.args[0], (True, epsilon, scale)


def _scores(node: Any, inner: set[Node]) -> tuple[Node, str] | None:
    """The logits that scores are made of, and how. They are computed in float32."""
    softmax, sigmoid = _softmax_of(node), called(node, aten.sigmoid.default)
    made = softmax if softmax is not None else sigmoid
    if made is None or made.meta["val"].dtype != torch.float32 or made.meta["val"].dim() != 2:
        return None
    inner.add(made)
    source = made.args[0]
    cast = called(source, aten._to_copy.default)
    if cast is not None and set(cast.kwargs) <= {"dtype", "layout", "device"} and _stays(cast):
        inner.add(cast)
        source = cast.args[0]
    return source, "softmax" if made is softmax else "sigmoid"


def _stays(cast: Any) -> bool:
    """Whether a cast changes nothing but the type, from one that float32 holds."""
    before, after = cast.args[0].meta["val"], cast.meta["val"]
    return before.device == after.device and before.dtype in (torch.float16, torch.bfloat16)


def _grouped(node: Any, inner: set[Node]) -> tuple[Any, tuple[int, int]]:
    """The argument of `masked_fill(choice, not one of the best groups, -inf)`, with the groups and how many stay."""
    filled = called(node, aten.masked_fill.Scalar)
    if filled is None or filled.args[2] != -math.inf:
        return node, (1, 1)
    choice, nodes = filled.args[0], [filled]

    def step(value: Any, target: Any) -> Any:
        found = called(value, target)
        if found is not None:
            nodes.append(found)
        return None if found is None else found.args[0]

    mask: Any = filled.args[1]
    for target in (aten.bitwise_not, aten._to_copy, aten.view, aten.clone, aten.expand):
        mask = step(mask, target.default)
    spread = called(mask, aten.unsqueeze.default)
    marked = None if spread is None else called(spread.args[0], aten.scatter.value)
    zeros = None if marked is None else called(marked.args[0], aten.zeros_like.default)
    if spread is None or marked is None or zeros is None or marked.args[1] != 1 or marked.args[3] != 1:
        return node, (1, 1)
    picked = called(marked.args[2], operator.getitem)
    top = None if picked is None or picked.args[1] != 1 else _top(picked.args[0])
    total = None if top is None else called(top.args[0], aten.sum.dim_IntList)
    pair = None if total is None or list(total.args[1]) != [-1] else called(total.args[0], operator.getitem)
    two = None if pair is None or pair.args[1] != 0 else _top(pair.args[0])
    members = None if two is None or two.args[1] != 2 else called(two.args[0], aten.view.default)
    if members is None or top is None or total is None or pair is None or two is None:
        return node, (1, 1)
    if members.args[0] is not choice or members.meta["val"].dim() != 3 or len(total.args) > 2:
        return node, (1, 1)
    if spread.args[1] not in (-1, 2) or zeros.args[0] is not total:
        return node, (1, 1)
    inner |= {*nodes, spread, marked, zeros, picked, top, total, pair, two, members}
    return choice, (int(members.meta["val"].shape[1]), int(top.args[1]))
