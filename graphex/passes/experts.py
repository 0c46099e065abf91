"""Mixtures of experts become one op, which reads the weights of chosen experts where they are.

    x -> repeat -> bmm with gate_up[experts] -> (+ bias) -> gate -> bmm with down[experts] -> (+ bias)
      -> times weights -> view [T, k, H] -> sum over k -> (cast) -> (view, + residual)

    graphex.experts(x, experts, weights, ...)

`gate_up[experts]` copies the weights of every chosen expert of every token before they are multiplied with, which takes
longer than all else. The form is that of transformers ("batched_mm"); how tokens choose experts does not matter. Gates
are `silu(gate) * up` of two halves, and GPT-OSS's, which alternate and are limited.

Its other form ("grouped_mm") sorts the pairs of a token and an expert first, and undoes that at the end:

    experts -> sort -> counted (histc, cumsum)
    x[order // k] -> _grouped_mm(gate_up, counted) -> (+ bias) -> gate -> _grouped_mm(down, counted) -> (+ bias)
      -> times weights[order] -> [order backwards] -> view [T, k, H] -> sum over k ...

It may put zeros where the number of an expert is out of range. A `topk` among all experts gives no such number.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.fx import Graph, Node

from graphex.analysis import node_line
from graphex.analysis.graphs import placement
from graphex.ops.experts import CLAMPED, SILU
from graphex.passes.fuse import IdiomPass, pays
from graphex.rewrite.base import Refusal, Work, used_by
from graphex.rewrite.metadata import inherit_all

aten = torch.ops.aten


class LiftExperts(IdiomPass):
    name = "lift_experts"
    rule = "lift_experts"

    def concerns(self, graph: Graph) -> bool:
        return any(node.target in (aten.bmm.default, aten._grouped_mm.default) for node in graph.nodes)

    def apply(self, work: Work) -> None:
        if work.phase != "inference":
            return
        sums = work.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
        found = [site for each in sums if (site := tried(_site, each)) and pays(work, "experts", site.end)]
        self.lift(work, ((site.end, site if (why := site.refusal()) is None else why) for site in found))

    def replace(self, work: Work, site: ExpertsSite) -> None:
        nodes = sorted(site.inner)
        with work.graph.inserting_before(site.end):
            x, end = site.x.meta["val"], site.end.meta["val"]
            residual = () if site.residual is None else (_viewed(site.residual, x, nodes),)
            new = work.graph.call_function(torch.ops.graphex.experts.default, (*site.arguments, *residual))
            new.meta["val"] = end if site.residual is None else x.new_empty(x.shape)
            result = new if site.residual is None else _viewed(new, end, nodes)
        inherit_all(new, nodes)
        line = node_line(site.end)
        site.end.replace_all_uses_with(result)
        names = [node.name for node in nodes]
        for node in reversed(nodes):
            work.graph.erase_node(node)
        because = "the weights of chosen experts are read where they are, instead of being copied first"
        work.fused(names, [new], rule=self.rule, because=because, line=line)


def _viewed(node: Node, like: Any, nodes: list[Node]) -> Node:
    """A node in the shape of another."""
    made = node.graph.call_function(aten.view.default, (node, list(like.shape)))
    made.meta["val"] = node.meta["val"].view(like.shape)
    inherit_all(made, nodes)
    return made


@dataclass
class ExpertsSite:
    """A mixture of experts that ends with `end`. `inner` are all its nodes, which go with it."""

    end: Node
    inner: set[Node]
    x: Node
    experts: Node
    weights: Node
    up: ExpertLinear
    down: ExpertLinear
    activation: str
    alpha: float = 1.702
    limit: float = 7.0
    residual: Node | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Take along the residual that the sum is added to, if there is one of its shape."""
        with suppress(NoMatch):
            view = called(_only_user(self.end), aten.view.default)
            added = called(_only_user(view), aten.add.Tensor)
            expect(not added.kwargs and len(set(added.args)) == 2)
            (other,) = (each for each in added.args if each is not view)
            expect(isinstance(other, Node) and _alike(other, view) and _alike(added, view))
            self.end, self.residual = added, other
            self.inner |= {view, added}

    @property
    def arguments(self) -> tuple[Any, ...]:
        stacked = (self.up.weight, self.up.bias, self.down.weight, self.down.bias)
        how = (self.up.transposed, self.activation, self.alpha, self.limit)
        return (self.x, self.experts, self.weights, *stacked, *how)

    def refusal(self) -> Refusal | None:
        if self.up.transposed != self.down.transposed:
            return Refusal("the weights of the two projections lie in different orders")
        if self.up.experts is not self.experts or self.down.experts is not self.experts:
            return Refusal("the two projections are those of different experts")
        if (refusal := why_not_alone(self.inner, self.end)) is not None:
            return refusal
        if self.end.meta["val"].dtype != self.x.meta["val"].dtype:
            return Refusal("the sum over experts is used in another type than the tokens have")
        return None


def why_not_alone(inner: set[Node], *ends: Node) -> Refusal | None:
    """Why the nodes of an idiom cannot become one: others use more of them than its ends, or their streams differ."""
    within = inner.union(ends)
    for node in inner.difference(ends):
        if (stranger := next((user for user in node.users if user not in within), None)) is not None:
            return Refusal(f"'{node.name}' is also {used_by(stranger)}")
    return Refusal("its parts are on several streams") if len({placement(node) for node in inner}) > 1 else None


@dataclass
class ExpertLinear:
    """`x` times the weights of the experts that were chosen for each row."""

    x: Node
    weight: Node
    bias: Node | None
    experts: Node
    transposed: bool
    inner: set[Node] = field(default_factory=set)


# -- the parts of the idiom --------------------------------------------------------------------------------------------


class NoMatch(Exception):  # noqa: N818  # no error: nodes that are another thing than what was looked for
    """Raised where nodes are not the idiom; `tried` says None for it."""


T = TypeVar("T")


def tried(match: Callable[..., T], *args: Any) -> T | None:
    """The result of `match`; None if the nodes are no such idiom."""
    try:
        return match(*args)
    except NoMatch:
        return None


def calls(node: Any, target: Any) -> bool:
    return isinstance(node, Node) and node.target is target


def called(node: Any, target: Any) -> Any:
    """The node, to take apart, if it calls this op. Raises NoMatch."""
    expect(calls(node, target))
    return node


def expect(condition: object) -> None:
    if not condition:
        raise NoMatch


def _site(node: Node) -> ExpertsSite:
    """A mixture of experts whose sum is `node`."""
    expect(node.args[1:] == ([1],) and not node.kwargs)
    view = called(node.args[0], aten.view.default)
    expect(len(view.meta["val"].shape) == 3)
    inner = {node, view}
    order = tried(_sorted, view.args[0], inner)
    times = called(view.args[0] if order is None else view.args[0].args[0], aten.mul.Tensor)
    spread = called(times.args[1], aten.unsqueeze.default)
    expect(spread.args[1] in (-1, 1) and spread.args[0].meta["val"].dim() == 1)
    weights = spread.args[0] if order is None else _indexed(spread.args[0], order.places, inner)
    down = _linear(times.args[0], order)
    inner |= {times, spread, *down.inner}
    projected, activation, numbers = tried(_silu, down.x, inner) or _clamped(down.x, inner)
    up = _linear(projected, order)
    count = view.meta["val"].shape[1]
    x = _repeated(up.x, inner, count) if order is None else _gathered(up.x, order, inner, count)
    cast = _only_user(node)
    end = node
    if calls(cast, aten._to_copy.default) and set(cast.kwargs) == {"dtype"}:
        end = cast
        inner.add(cast)
    return ExpertsSite(end, inner | up.inner, x, down.experts, weights, up, down, activation, *numbers)


def _only_user(node: Node) -> Any:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _alike(node: Node, other: Node) -> bool:
    """Whether two values are contiguous, of one shape, of sizes that are known, and of one type."""
    one, two = node.meta["val"], other.meta["val"]
    known = all(isinstance(size, int) for size in (*one.shape, *two.shape))
    return known and one.shape == two.shape and one.dtype == two.dtype and one.is_contiguous() and two.is_contiguous()


@dataclass
class Order:
    """Pairs of a token and an expert, sorted by expert: `sort(experts)` are the `numbers` and their `places`."""

    experts: Node
    numbers: Node
    places: Node

    def unmasked(self, node: Any, inner: set[Node]) -> Any:
        """The rows of `masked_fill(rows, numbers >= E, 0)`, which changes none of them: all experts are below E."""
        try:
            filled = called(node, aten.masked_fill.Scalar)
            spread = called(filled.args[1], aten.unsqueeze.default)
            beyond = called(spread.args[0], aten.ge.Scalar)
            expect(beyond.args[0] is self.numbers and filled.args[2] == 0 and spread.args[1] in (-1, 1))
            _expect_chosen_among(self.experts, beyond.args[1])
        except NoMatch:
            return node
        inner |= {filled, spread, beyond}
        return filled.args[0]

    def expect_sorted(self, index: Any, inner: set[Node]) -> None:
        """An index is that of the sorted pairs: their experts, which may be limited to those that there are."""
        if calls(index, aten.clamp.default) and index.args[:2] == (self.numbers, None) and len(index.args) == 3:
            inner.add(index)
            _expect_chosen_among(self.experts, index.args[2] + 1)
        else:
            expect(index is self.numbers)


def _expect_chosen_among(experts: Any, count: Any) -> None:
    """The numbers of experts are flat results of a `topk` among so many."""
    view = called(experts, aten.view.default)
    chosen = called(view.args[0], operator.getitem)
    expect(chosen.args[1] == 1)
    top = called(chosen.args[0], aten.topk.default)
    among = top.args[0].meta["val"]
    dim = top.args[2] if len(top.args) > 2 else top.kwargs.get("dim", -1)
    expect(dim % among.dim() == among.dim() - 1 and among.shape[-1] == count)


def _sorted(node: Any, inner: set[Node]) -> Order:
    """The order that `node`, the rows of pairs, is brought back from: `rows[empty.index_put(places, 0, 1, ...)]`."""
    rows = called(node, aten.index.Tensor)
    back = called(_only_index(rows), aten.index_put.default)
    expect(len(back.args) == 3 and not back.kwargs)
    empty, counting = called(back.args[0], aten.empty_like.default), called(back.args[2], aten.arange.default)
    places = called(_only_index(back), operator.getitem)
    expect(places.args[1] == 1)
    sort = called(places.args[0], aten.sort.default)
    expect(len(sort.args) == 1 and not sort.kwargs and sort.args[0].meta["val"].dim() == 1)
    expect(empty.args[0] is places and counting.args == (places.meta["val"].shape[0],))
    numbers = next((user for user in sort.users if user.target is operator.getitem and user.args[1] == 0), None)
    if numbers is None:
        raise NoMatch
    inner |= {rows, back, empty, counting, places, sort, numbers}
    return Order(sort.args[0], numbers, places)


def _indexed(node: Any, by: Node, inner: set[Node]) -> Any:
    """The value that is indexed by `by`, along the first dimension."""
    index = called(node, aten.index.Tensor)
    expect(_only_index(index) is by)
    inner.add(index)
    return index.args[0]


def _gathered(node: Any, order: Order, inner: set[Node], times: Any) -> Any:
    """The tokens of sorted pairs, of which each token has so many: `x[places // times]`."""
    rows = called(order.unmasked(node, inner), aten.index.Tensor)
    token = called(_only_index(rows), aten.floor_divide.default)
    expect(token.args == (order.places, times) and rows.args[0].meta["val"].dim() == 2)
    inner |= {rows, token}
    return rows.args[0]


def _grouped_linear(node: Any, order: Order, bias: Node | None, inner: set[Node]) -> ExpertLinear:
    """`_grouped_mm(x, weight, ends)` of sorted rows, where `ends` count the pairs of each expert."""
    product = called(node, aten._grouped_mm.default)
    expect(len(product.args) == 3 and not product.kwargs)
    ends = called(product.args[2], aten.cumsum.default)
    counts = called(ends.args[0], aten.histc.default)
    cast = called(counts.args[0], aten._to_copy.default)
    transposed = {product.args[1]} if calls(product.args[1], aten.transpose.int) else set()
    weight = product.args[1].args[0] if transposed else product.args[1]
    experts = weight.meta["val"].shape[0]
    expect(ends.args[1] == 0 and cast.args[0] is order.numbers and weight.meta["val"].dim() == 3)
    expect(counts.args[1:] == (experts, 0, experts - 1))
    expect(all({dim % 3 for dim in each.args[1:]} == {1, 2} for each in transposed))
    inner = inner | {product, ends, counts, cast} | transposed
    return ExpertLinear(product.args[0], weight, bias, order.experts, not transposed, inner)


def _linear(node: Any, order: Order | None) -> ExpertLinear:
    """`squeeze(bmm(weight[experts], unsqueeze(x, -1)), -1)`, or the transposed one, and a bias; or of sorted rows."""
    inner: set[Node] = set()
    node = _through(node if order is None else order.unmasked(node, inner), inner)
    bias = None
    if calls(node, aten.add.Tensor) and not node.kwargs:
        bias = called(node.args[1], aten.index.Tensor)
        inner |= {node, bias}
        node = node.args[0]
    stacked = None if bias is None else bias.args[0]
    if order is not None:
        if bias is not None:
            order.expect_sorted(_only_index(bias), inner)
        return _grouped_linear(node, order, stacked, inner)
    squeezed = called(node, aten.squeeze.dim)
    product = called(squeezed.args[0], aten.bmm.default)
    transposed = calls(product.args[1], aten.index.Tensor)
    chosen, row = product.args[::-1] if transposed else product.args
    chosen, row = called(chosen, aten.index.Tensor), called(row, aten.unsqueeze.default)
    dim = 1 if transposed else 2
    expect(row.args[1] % 3 == dim and squeezed.args[1] % 3 == dim)
    experts = _only_index(chosen)
    expect(bias is None or _only_index(bias) is experts)
    inner |= {squeezed, product, chosen, row}
    return ExpertLinear(row.args[0], chosen.args[0], stacked, experts, transposed, inner)


def _only_index(node: Any) -> Node:
    """The numbers by which the first dimension is indexed, if that is all."""
    indices = node.args[1]
    expect(isinstance(indices, (list, tuple)) and len(indices) == 1 and isinstance(indices[0], Node))
    value = indices[0].meta["val"]
    expect(value.dim() == 1 and value.dtype in (torch.int64, torch.int32))
    found: Node = indices[0]
    return found


def _through(node: Any, inner: set[Node]) -> Any:
    """The `x` of `squeeze(unsqueeze(x, d), d)`."""
    while calls(node, aten.squeeze.dim):
        back = node.args[0]
        if not calls(back, aten.unsqueeze.default) or back.args[1] % 3 != node.args[1] % 3:
            break
        inner |= {node, back}
        node = back.args[0]
    return node


def _silu(node: Any, inner: set[Node]) -> tuple[Any, str, tuple[float, ...]]:
    product = called(node, aten.mul.Tensor)
    silu = called(product.args[0], aten.silu.default)
    gate, up = called(silu.args[0], operator.getitem), called(product.args[1], operator.getitem)
    split = called(gate.args[0], aten.split.Tensor)
    expect(up.args[0] is split and (gate.args[1], up.args[1]) == (0, 1))
    expect(len(split.meta["val"]) == 2 and gate.meta["val"].shape == up.meta["val"].shape)
    expect((split.args[2] if len(split.args) > 2 else 0) % 2 == 1)
    inner |= {product, silu, gate, up, split}
    return split.args[0], SILU, ()


def _clamped(node: Any, inner: set[Node]) -> tuple[Any, str, tuple[float, ...]]:
    """`(up + 1) * (gate * sigmoid(gate * alpha))`"""
    product = called(node, aten.mul.Tensor)
    plus, swish = called(product.args[0], aten.add.Tensor), called(product.args[1], aten.mul.Tensor)
    expect(plus.args[1] == 1 and not plus.kwargs)
    gate, sigmoid = called(swish.args[0], aten.clamp.default), called(swish.args[1], aten.sigmoid.default)
    up, scaled = called(plus.args[0], aten.clamp.default), called(sigmoid.args[0], aten.mul.Tensor)
    alpha, limit = scaled.args[1], up.args[2]
    expect(scaled.args[0] is gate and isinstance(alpha, float))
    expect(tuple(up.args[1:]) == (-limit, limit) and tuple(gate.args[1:]) == (None, limit))
    even, odd = called(gate.args[0], aten.slice.Tensor), called(up.args[0], aten.slice.Tensor)
    expect(_alternate(even, 0) and _alternate(odd, 1))
    found: set[Node] = set()
    projected = _through(even.args[0], found)
    expect(projected is _through(odd.args[0], found))
    inner |= {product, plus, swish, gate, sigmoid, up, scaled, even, odd, *found}
    return projected, CLAMPED, (alpha, float(limit))


def _alternate(node: Any, first: int) -> bool:
    """Whether a slice takes every second element of a row."""
    given: tuple[Any, ...] = (*node.args[1:], *(0, None, 2**63 - 1, 1)[len(node.args) - 1 :])
    dim, start, end, step = given
    width = node.args[0].meta["val"].shape[-1]
    return bool(dim % 2 == 1 and (start or 0) == first and (end is None or end >= width) and step == 2)


def _repeated(node: Any, inner: set[Node], times: Any) -> Any:
    """The tokens that `node` repeats, each `times` times in a row."""
    view = called(node, aten.view.default)
    copy = called(view.args[0], aten.clone.default)
    expanded = called(copy.args[0], aten.expand.default)
    added = called(expanded.args[0], aten.unsqueeze.default)
    shape, flat = expanded.meta["val"].shape, view.meta["val"].shape
    expect(added.args[1] % 3 == 1 and len(shape) == 3 and shape[1] == times and len(flat) == 2)
    expect(flat[1] == shape[2] and added.args[0].meta["val"].dim() == 2)
    inner |= {view, copy, expanded, added}
    return added.args[0]
