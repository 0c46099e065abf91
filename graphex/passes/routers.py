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
from graphex.passes.experts import NoMatch, called, calls, expect, tried, why_not_alone
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
        mixtures = _mixtures(work, "routed_experts")
        found = [(node, site) for node in mixtures if (site := tried(_chosen_for, node)) is not None]
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


def _chosen_for(mixture: Any) -> JoinedRouter:
    """A mixture whose experts and weights are the flat results of one choice."""
    inner = {mixture}
    choices: list[Any] = []
    for given, number in zip(mixture.args[1:3], (1, 0), strict=True):
        view = called(given, aten.view.default)
        part = called(view.args[0], operator.getitem)
        expect(part.args[1] == number)
        inner |= {view, part}
        choices.append(called(part.args[0], route))
    choice, other = choices
    expect(choice is other and not choice.kwargs)
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
    found = tried(_router_at, numbers, weights)
    if found is None:
        return Refusal("its experts are chosen in a form that is not known")
    refusal = why_not_alone(found.inner, *found.ends)
    return found if refusal is None else refusal


def _router_at(numbers: Any, weights: Any) -> Router:
    clamp = numbers if calls(numbers, aten.clamp.default) else None
    chosen = called(numbers if clamp is None else clamp.args[0], aten.view.default)
    chosen, values = called(chosen.args[0], operator.getitem), called(weights, aten.view.default).args[0]
    expect(chosen.args[1] == 1 and isinstance(values, Node) and values.meta["val"].dim() == 2)
    top = _top(chosen.args[0])
    expect(clamp is None or _keeps_all(clamp, top.args[0].meta["val"].shape[-1]))
    found = tried(_of_the_chosen, chosen, values, top) or _of_all(chosen, values, top)
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
    given: tuple[Any, ...] = tuple(top.args[2:4])
    dim, largest = given + (-1, True)[len(given) :]
    last = top.args[0].meta["val"].dim() - 1
    expect(not top.kwargs and dim in (-1, last) and largest and isinstance(top.args[1], int))
    return top


def _softmax(node: Any) -> Any:
    softmax = called(node, aten._softmax.default)
    expect(softmax.args[1] in (1, -1) and softmax.args[2] is False)
    return softmax


def _of_the_chosen(chosen: Node, values: Node, top: Any) -> Router:
    """`softmax(topk(logits))`"""
    best = called(_softmax(values).args[0], operator.getitem)
    expect(best.args == (top, 0) and top.args[0].meta["val"].dim() == 2)
    return Router((values, chosen), {values, chosen, best, top}, top.args[0], "chosen", top.args[1])


def _of_all(chosen: Node, values: Node, top: Any) -> Router:
    """Scores of all logits, of which the best are taken and scaled."""
    inner: set[Node] = {chosen, values, top}
    base, how = _scaled(values, inner)
    scores = None
    if calls(base, aten.gather.default) and base.args[1] in (1, -1) and base.args[2] is chosen:
        scores = base.args[0]
    else:
        expect(called(base, operator.getitem).args == (top, 0))
    inner.add(base)
    choice, groups = tried(_grouped, top.args[0], inner) or (top.args[0], (1, 1))
    bias = None
    if scores is not None and choice is not scores:
        added = called(choice, aten.add.Tensor)
        expect(not added.kwargs and added.args[0] is scores and isinstance(added.args[1], Node))
        inner.add(added)
        bias = added.args[1]
        expect(tuple(bias.meta["val"].shape) == (scores.meta["val"].shape[1],))
    expect(scores is not None or groups == (1, 1))  # what the best groups leave are not the scores
    logits, kind = _scores(choice if scores is None else scores, inner)
    return Router((values, chosen), inner, logits, kind, top.args[1], bias, *how, *groups)


def _scaled(values: Any, inner: set[Node]) -> tuple[Any, tuple[bool, float, float]]:
    """The values that a cast, a factor and a division by their sum are applied to, and which of these there are."""
    epsilon, scale = 0.0, 1.0
    node = values
    if calls(node, aten._to_copy.default) and node.kwargs.keys() <= {"dtype"}:
        inner.add(node)
        node = node.args[0]
    if calls(node, aten.mul.Tensor) and isinstance(node.args[1], (int, float)):
        inner.add(node)
        node, scale = node.args[0], float(node.args[1])
    try:
        quotient = called(node, aten.div.Tensor)
        total, found = quotient.args[1], {quotient}
        if calls(total, aten.add.Tensor) and isinstance(total.args[1], float) and not total.kwargs:
            found.add(total)
            total, epsilon = total.args
        summed = called(total, aten.sum.dim_IntList)
        given = (summed.args[0], [each % 2 for each in summed.args[1]], *summed.args[2:])
        expect(given == (quotient.args[0], [1], True) and not summed.kwargs)
    except NoMatch:
        return node, (False, 0.0, scale)
    inner |= found | {summed}
    return quotient.args[0], (True, epsilon, scale)


def _scores(node: Any, inner: set[Node]) -> tuple[Node, str]:
    """The logits that scores are made of, and how. They are computed in float32."""
    softmax = tried(_softmax, node)
    made = called(node, aten.sigmoid.default) if softmax is None else softmax
    expect(made.meta["val"].dtype == torch.float32 and made.meta["val"].dim() == 2)
    inner.add(made)
    source = made.args[0]
    if calls(source, aten._to_copy.default) and set(source.kwargs) <= {"dtype", "layout", "device"} and _stays(source):
        inner.add(source)
        source = source.args[0]
    return source, "sigmoid" if softmax is None else "softmax"


def _stays(cast: Any) -> bool:
    """Whether a cast changes nothing but the type, from one that float32 holds."""
    before, after = cast.args[0].meta["val"], cast.meta["val"]
    return before.device == after.device and before.dtype in (torch.float16, torch.bfloat16)


def _grouped(node: Any, inner: set[Node]) -> tuple[Any, tuple[int, int]]:
    """The argument of `masked_fill(choice, not one of the best groups, -inf)`, with the groups and how many stay."""
    filled = called(node, aten.masked_fill.Scalar)
    expect(filled.args[2] == -math.inf)
    (choice, mask), nodes = filled.args[:2], [filled]
    for target in (aten.bitwise_not, aten._to_copy, aten.view, aten.clone, aten.expand):
        nodes.append(called(mask, target.default))
        mask = mask.args[0]
    spread = called(mask, aten.unsqueeze.default)
    marked = called(spread.args[0], aten.scatter.value)
    zeros, picked = called(marked.args[0], aten.zeros_like.default), called(marked.args[2], operator.getitem)
    expect(marked.args[1] == 1 and marked.args[3] == 1 and picked.args[1] == 1)
    top = _top(picked.args[0])
    total = called(top.args[0], aten.sum.dim_IntList)
    pair = called(total.args[0], operator.getitem)
    two = _top(pair.args[0])
    members = called(two.args[0], aten.view.default)
    expect(list(total.args[1]) == [-1] and len(total.args) == 2 and pair.args[1] == 0 and two.args[1] == 2)
    expect(members.args[0] is choice and members.meta["val"].dim() == 3)
    expect(spread.args[1] in (-1, 2) and zeros.args[0] is total)
    inner |= {*nodes, spread, marked, zeros, picked, top, total, pair, two, members}
    return choice, (int(members.meta["val"].shape[1]), int(top.args[1]))
