"""Which linear layers of a graph become one op, which norm, activation and residual join them, and why others do not.

Everything is proven on the graph as it stands before the first rewrite. A layer is computed where the first of those
that it is joined with stands, or where its residual is added: the values it reads must be there, and not be written
since (`graphex.rewrite.base.Motion`).

A linear layer looks like this in a graph, a product with a transposed weight, between two reshapes:

    view(x, [rows, K]); t(w); mm(view, t); view(mm, [..., N])         as AOTAutograd writes linear(x, w)
    addmm(bias, view, t)                                              and linear(x, w, bias)
    bmm(x, expand(t(w)))                                              where x cannot be flattened without a copy
    linear(x, w, bias), matmul(x, t(w)), mm(x, t(w))                  as it may be called

`x` is the value before the reshape, so that layers that share it are found. A weight need not be a parameter: it only
has to be there.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from graphex.analysis import known_equal, known_true, same_layout
from graphex.analysis.effects import is_kernel
from graphex.analysis.graphs import arguments, dtype_text
from graphex.analysis.shapes import known_contiguous
from graphex.fusion.calls import EXPAND, PERMUTE, RESHAPE, call_of, op_of
from graphex.ops.linears import FEW_ROWS, SMALL_RESULT
from graphex.passes.fuse import pays, result_device
from graphex.rewrite.base import Motion, Read, Refusal, Work, can_stand_before, elsewhere, used_by, where

aten, ops = torch.ops.aten, torch.ops.graphex

NEAR = 8  # kernels that may stand between two layers of many rows that are computed together
TYPES = (torch.float16, torch.bfloat16)

# Product -> its factors, and what is added to it.
_PRODUCTS: dict[Any, tuple[str, str, str]] = {
    aten.mm.default: ("self", "mat2", ""),
    aten.addmm.default: ("mat1", "mat2", "self"),
    aten.bmm.default: ("self", "mat2", ""),
    aten.matmul.default: ("self", "other", ""),
    aten.linear.default: ("input", "weight", "bias"),
}


@dataclass(frozen=True)
class Linear:
    """`node` computes linear(x, weight, bias), with the leading dimensions of x flattened or not."""

    node: Node
    read: Node  # x, or x flattened
    x: Node
    weight: Node
    bias: Node | None

    @property
    def operands(self) -> list[Node]:
        return [self.weight, *([] if self.bias is None else [self.bias])]

    @property
    def rows(self) -> Any:
        """How many rows its input has; symbolic if that varies."""
        rows: Any = 1
        for size in self.x.meta["val"].shape[:-1]:
            rows = rows * size
        return rows

    @property
    def has_many_rows(self) -> bool:
        return known_true(self.rows > FEW_ROWS)

    @property
    def is_small(self) -> bool:
        """Whether a layer of many rows leaves a part of a large device idle."""
        return known_true(self.rows * self.weight.meta["val"].shape[0] <= SMALL_RESULT)

    @property
    def shape(self) -> tuple[Any, ...]:
        """The shape of its result as a layer: that of x but for the last dimension."""
        return (*self.x.meta["val"].shape[:-1], self.weight.meta["val"].shape[0])


def linear_at(node: Node) -> Linear | None:
    """The linear layer whose product is this node."""
    names = _PRODUCTS.get(node.target) if node.op == "call_function" else None
    if names is None:
        return None
    args = arguments(node)
    given: list[Any] = [args.get(name) for name in names]
    x, weight, bias = given
    if not known_equal(args.get("alpha", 1), 1) or not known_equal(args.get("beta", 1), 1):
        return None
    if node.target is not aten.linear.default:
        weight = transposed(weight)
    if not all(map(_is_strided, [node, x, weight, *([] if bias is None else [bias])])):
        return None
    if weight.meta["val"].dim() != 2 or x.meta["val"].dim() == 0:
        return None
    flattened = node.meta["val"].dim() == 2  # what was put together otherwise for the product comes back as it is
    return Linear(node, x, before_reshape(x) if flattened else x, weight, bias)


def _is_strided(value: Any) -> bool:
    tensor = value.meta.get("val") if isinstance(value, Node) else None
    return isinstance(tensor, Tensor) and tensor.layout == torch.strided


def transposed(node: Any) -> Node | None:
    """The matrix that a node is the transpose of, one for all or repeated for each of a batch."""
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    source = arguments(node).get("self")
    if not isinstance(source, Node) or not _is_strided(source) or source.meta["val"].dim() != 2:
        return None
    if op_of(node) == EXPAND:
        return transposed(source)
    swaps = node.target is aten.t.default or (op_of(node) == PERMUTE and call_of(node).args["dims"] == (1, 0))
    return source if swaps else None


def before_reshape(node: Node) -> Node:
    """The value whose leading dimensions a reshape has flattened; the node itself if there is none."""
    while is_reshape(node):
        source: Node = arguments(node)["self"]
        before, after = source.meta["val"], node.meta["val"]
        if before.dim() < 2 or not known_equal(before.shape[-1], after.shape[-1]):
            return node
        node = source
    return node


def is_reshape(node: Node) -> bool:
    return node.op == "call_function" and op_of(node) == RESHAPE


def readers(node: Node) -> Iterator[Node]:
    """The users of a value, as it is or reshaped."""
    for user in node.users:
        if is_reshape(user):
            yield from readers(user)
        else:
            yield user


# -- what the ops take --------------------------------------------------------------------------------------------


def unfit_input(linear: Linear) -> Refusal | None:
    """Why no layer that reads this input is taken."""
    x = linear.x.meta["val"]
    if x.dtype not in TYPES:
        reason = f"its input is {dtype_text(x.dtype)}, and the kernels are for float16 and bfloat16"
        return Refusal(reason, linear.node, nothing_lost=True)
    if known_equal(linear.rows, 0) or known_equal(x.shape[-1], 0):
        return Refusal("there is nothing to multiply", linear.node)
    return None


def unfit_alone(linear: Linear) -> Refusal | None:
    """Why a layer is not taken by itself: with many rows it is a plain matrix product."""
    if not linear.has_many_rows:
        return None
    reason = f"{linear.rows} rows are more than {FEW_ROWS}: a plain matrix product is the right thing"
    return Refusal(reason, linear.node, nothing_lost=True)


def unfit_weight(linear: Linear) -> Refusal | None:
    """Why this layer is not taken, whatever becomes of the others that share its input."""
    x, weight, result = (each.meta["val"] for each in (linear.x, linear.weight, linear.node))
    if weight.dtype != x.dtype or weight.device != x.device:
        return Refusal(f"input and weight differ: {_type_text(x)} and {_type_text(weight)}", linear.node)
    if not all(isinstance(size, int) and size > 0 for size in weight.shape):
        return Refusal("the size of the weight is not known before running", linear.node)
    if not known_equal(weight.stride(1), 1):
        return Refusal("the rows of the weight are not adjacent elements", linear.node)
    if linear.bias is not None:
        bias = linear.bias.meta["val"]
        if bias.dim() != 1 or not known_equal(bias.shape[0], weight.shape[0]):
            return Refusal("what is added is not a bias: one number for each row of the weight", linear.node)
        if bias.dtype != x.dtype or bias.device != x.device:
            return Refusal(f"input and bias differ: {_type_text(x)} and {_type_text(bias)}", linear.node)
    if not known_contiguous(result) or result.dtype != x.dtype:
        return Refusal("the result is of another type or layout than the op's", linear.node)
    return None


def _type_text(value: Tensor) -> str:
    return f"{dtype_text(value.dtype)} on {value.device}"


# -- plans -------------------------------------------------------------------------------------------------------------


LINEARS, NORM, GATED, RESIDUAL = "linears", "rms_norm_linears", "silu_mul_linears", "linears_residual"
SANDWICH = "rms_norm_add_rms_norm"  # what a norm of the sum of a norm and a residual becomes otherwise
MOST_WEIGHTS = 8


@dataclass(frozen=True)
class Residual:
    """`add` is `other` plus `result`, the only use of a layer's product, reshaped or not."""

    add: Node
    other: Node
    result: Node


@dataclass(frozen=True)
class FoldPlan:
    """Layers that become one op.

    `before`: the rms_norm or silu_mul that joins the op. `kept`: that norm's result, if other nodes also read it.
    """

    linears: list[Linear]
    x: Node
    before: Node | None = None
    residual: Residual | None = None
    kept: Node | None = None

    @property
    def place(self) -> Node:
        return self.linears[0].node if self.residual is None else self.residual.add

    @property
    def op(self) -> Any:
        if self.before is None:
            return ops.linears.default
        return (ops.rms_norm_linears if self.before.target is ops.rms_norm.default else ops.silu_mul_linears).default


class Planner:
    """Plans for one graph. `claimed` are nodes that a rule of the user's is going to take."""

    def __init__(self, work: Work, claimed: Mapping[Node, str]) -> None:
        self.work, self.aliases, self.claimed = work, work.aliases, claimed
        self.motion = Motion(work)
        self.candidates: dict[str, set[Node]] = defaultdict(set)
        self.added: set[Node] = set()  # residual adds that belong to a plan
        self.kernels: dict[Node, int] = {}  # node -> how many kernels stand before it
        self.kept: set[Node] = set()  # results of norms that a plan keeps for others

    def plans(self, linears: list[Linear]) -> Iterator[FoldPlan]:
        by_input: dict[Node, list[Linear]] = defaultdict(list)
        for linear in linears:
            by_input[linear.x].append(linear)
            self.candidates[LINEARS].add(linear.node)
        for siblings in by_input.values():
            if siblings[0].has_many_rows:
                yield from self._plans_of_many_rows(siblings)
            else:
                for group in self._groups(self._fit(siblings)):
                    yield self._plan(group)

    def _plans_of_many_rows(self, siblings: list[Linear]) -> Iterator[FoldPlan]:
        """Small layers that stand near each other are computed together, and nothing else joins them.

            before:  q = addmm(bq, x, wq); k = addmm(bk, x, wk); v = addmm(bv, x, wv)         x: [1024, 768]
            after:   q, k, v = linears(x, [wq, wk, wv], [bq, bk, bv])

        Those of another layer of the model stand further away: its graph stays like that of the layers around it.
        """
        joined: list[Linear] = []
        for near in self._near(siblings):
            for group in self._groups(self._fit(near)) if len(near) > 1 else ():
                if len(group) > 1:
                    joined += group
                    yield FoldPlan(group, group[0].x)
        if alone := [each for each in siblings if each not in joined]:
            self.candidates[LINEARS].difference_update(each.node for each in alone)
            self._refused(LINEARS, unfit_alone(alone[0]))

    def _near(self, siblings: list[Linear]) -> list[list[Linear]]:
        """The small ones among layers of one input, in groups of neighbours."""
        if not self.kernels:
            count = accumulate(map(is_kernel, self.work.graph.nodes), initial=0)
            self.kernels = dict(zip(self.work.graph.nodes, count, strict=False))
        groups: list[list[Linear]] = []
        for each in filter(lambda linear: linear.is_small, siblings):
            here = self.kernels[each.node]
            if groups and here - self.kernels[groups[-1][-1].node] <= NEAR:
                groups[-1].append(each)
            else:
                groups.append([each])
        return groups

    # -- which layers ------------------------------------------------------------------------------------------------

    def _fit(self, siblings: list[Linear]) -> list[Linear]:
        unfit = unfit_input(siblings[0])
        if unfit is not None and unfit.nothing_lost:
            self.candidates[LINEARS].difference_update(linear.node for linear in siblings)
        if self._refused(LINEARS, unfit, self._no_kernel(LINEARS, siblings[0].node)):
            return []
        return [
            each for each in siblings if not self._refused(LINEARS, self._is_claimed(each.node), unfit_weight(each))
        ]

    def _groups(self, linears: list[Linear]) -> Iterator[list[Linear]]:
        """Layers of one input, in the order of the graph, by what can be computed at one place."""
        open_: dict[Hashable, list[Linear]] = {}
        for linear in linears:
            here = where(linear.node)
            group = open_.get(here)
            if group is None:
                if open_:
                    other = next(iter(open_.values()))[0].node
                    apart = elsewhere(other, linear.node)
                    assert apart is not None
                    self._refused(LINEARS, Refusal(f"not joined: {apart.reason}", linear.node))
                open_[here] = [linear]
            elif self._refused(LINEARS, self._cannot_join(group, linear)):
                yield group
                open_[here] = [linear]
            else:
                group.append(linear)
        yield from open_.values()

    def _cannot_join(self, group: list[Linear], linear: Linear) -> Refusal | None:
        first = group[0].node
        if len(group) >= MOST_WEIGHTS:
            return Refusal(f"not joined with '{first.name}': {MOST_WEIGHTS} layers are already", linear.node)
        for operand in linear.operands:
            if not can_stand_before(operand, first):
                return Refusal(f"not joined with '{first.name}': '{operand.name}' is computed later", linear.node)
        for operand in (linear.x, *linear.operands):
            if self.motion.writer_between(operand, first, linear.node):
                return Refusal(f"not joined with '{first.name}': '{operand.name}' is written in between", linear.node)
        return None

    # -- what joins them ---------------------------------------------------------------------------------------------

    def _plan(self, group: list[Linear]) -> FoldPlan:
        x = group[0].x
        before = self._norm(x, group) or self._gated(x, group)
        plan = FoldPlan(group, x, before, kept=x if x in self.kept and before is not None else None)
        for linear in group:
            found = self._residual(linear, plan)
            if isinstance(found, FoldPlan):
                return found
        return plan

    def _norm(self, y: Node, group: list[Linear]) -> Node | None:
        """The norm whose result the layers read, if nothing else does."""
        norm = y.args[0] if y.target is operator.getitem and y.args[1] == 0 else None
        if not isinstance(norm, Node) or norm.target is not ops.rms_norm.default:
            return None
        if self._refused(NORM, self._belongs_to_sum(norm, group[0])):
            return None
        return self._joined(NORM, norm, y, group)

    def _belongs_to_sum(self, norm: Node, linear: Linear) -> Refusal | None:
        """Why a norm is left for `rms_norm_add_rms_norm`. The kernel of one row makes the norm itself, but the op of
        more rows launches a norm before its products, which the kernel that makes the sum can make as well.
        """
        is_taken = all(map(self.work.allows, (NORM, SANDWICH))) and pays(self.work, SANDWICH, norm)
        if not is_taken or not known_true(linear.rows > 1) or not is_of_norm_and_residual(norm):
            return None
        said = f"'{norm.name}' is of the sum of a norm and a residual, and becomes one op with these"
        return Refusal(said, norm, nothing_lost=True)

    def _gated(self, y: Node, group: list[Linear]) -> Node | None:
        return self._joined(GATED, y, y, group) if y.target is ops.silu_mul.default else None

    def _joined(self, rule: str, node: Node, y: Node, group: list[Linear]) -> Node | None:
        """`node`, if it may be computed where the layers are, and as part of them."""
        if not self.work.allows(rule):
            return None
        self.candidates[rule].add(node)
        refused = self._refused(
            rule,
            self._is_claimed(node),
            self._no_kernel(rule, group[0].node),
            self._is_used_elsewhere(node, y, group),
            self.motion.written_between([Read(each, node) for each in node.all_input_nodes], group[0].node),
        )
        return None if refused else node

    def _is_used_elsewhere(self, node: Node, y: Node, group: list[Linear]) -> Refusal | None:
        own, first = {linear.node for linear in group}, group[0].node
        for part in node.users if node is not y else ():
            if part is not y and part.users:
                return Refusal(f"the norm's rstd, '{part.name}', is used too", node)
        strangers = [user for user in readers(y) if user not in own]
        if strangers and not (len(group) == 1 and self._is_kept(node, y, first, strangers)):
            return Refusal(f"the result of '{node.name}' is also {used_by(strangers[0])}", node)
        if (apart := elsewhere(node, first)) is not None:
            return replace(apart, node=node)
        if node.all_input_nodes[0].meta["val"].dtype != y.meta["val"].dtype:
            return Refusal(f"the result of '{node.name}' is of another type than its input", node)
        return None

    def _is_kept(self, node: Node, y: Node, first: Node, strangers: list[Node]) -> bool:
        """Whether the op of a layer can return the norm for other readers: all stand after it, and none is a layer,
        which would make the norm once more. It is the layer that chooses experts, which all read the norm.
        """
        is_norm = node.target is ops.rms_norm.default and known_contiguous(y.meta["val"])
        if not is_norm or y in self.kept or any(user < first or linear_at(user) is not None for user in strangers):
            return False
        self.kept.add(y)
        return True

    def _residual(self, linear: Linear, plan: FoldPlan) -> FoldPlan | None:
        """The plan with the residual that is added to a layer's result, if there is one and it may join."""
        if not self.work.allows(RESIDUAL):
            return None
        found = _added_to(linear)
        if found is None or found.add in self.added:
            return None
        self.candidates[RESIDUAL].add(found.add)
        flat = found.result is linear.node and plan.before is None
        x = linear.read if flat else plan.x
        if self._refused(RESIDUAL, self._is_claimed(found.add), self._unfit_residual(linear, plan, found, x)):
            return None
        self.added.add(found.add)
        return replace(plan, x=x, residual=found)

    def _unfit_residual(self, linear: Linear, plan: FoldPlan, found: Residual, x: Node) -> Refusal | None:
        add, value, other = found.add, found.add.meta["val"], found.other.meta["val"]
        result = found.result.meta["val"]
        if len(plan.linears) > 1:
            return Refusal("a layer that is joined with others takes no residual", add)
        if plan.before is not None and plan.before.target is ops.rms_norm.default:
            return Refusal("a layer that a norm is folded into takes no residual", add)
        if len(found.result.users) > 1 or len(linear.node.users) > 1:
            users = [user for each in (found.result, linear.node) for user in each.users]
            stranger = next(user for user in users if user not in (add, found.result))
            return Refusal(f"the result of '{linear.node.name}' is also {used_by(stranger)}", add)
        if not known_equal(tuple(other.shape), tuple(result.shape)):
            return Refusal(f"what is added has the shape {list(other.shape)}, not {list(result.shape)}", add)
        if not known_equal(tuple(result.shape[:-1]), tuple(x.meta["val"].shape[:-1])):
            return Refusal("the result is reshaped before the residual is added", add)
        if other.dtype != result.dtype or other.device != result.device or value.dtype != result.dtype:
            return Refusal(f"the residual is {dtype_text(other.dtype)} on {other.device}", add)
        if not known_contiguous(value):
            return Refusal("the sum is laid out differently from the op's result", add)
        if (apart := elsewhere(linear.node, add)) is not None:
            return apart
        for user in readers(add):
            if user.target is aten.copy_.default and self.aliases.may_alias(user.args[0], found.other):  # type: ignore[arg-type]
                return Refusal(f"the sum is written back to '{user.args[0]}', where it is", add)
        reads = [Read(each, linear.node) for each in (*linear.operands, plan.x)]
        if plan.before is not None:
            reads = [*reads[:-1], *(Read(each, plan.before) for each in plan.before.all_input_nodes)]
        return self.motion.written_between(reads, add)

    # -- what is known -----------------------------------------------------------------------------------------------

    def _is_claimed(self, node: Node) -> Refusal | None:
        return Refusal(f"your rule '{self.claimed[node]}' takes it", node) if node in self.claimed else None

    def _no_kernel(self, rule: str, node: Node) -> Refusal | None:
        if pays(self.work, rule, node):
            return None
        return Refusal(f"'graphex::{rule}' has no kernel on {result_device(node).type}", node)

    def _refused(self, rule: str, *answers: Refusal | None) -> bool:
        """Whether one of the answers is a refusal; the first is written down."""
        refusal = next((answer for answer in answers if answer is not None), None)
        if refusal is not None:
            assert refusal.node is not None
            self.work.refuse(refusal.node, refusal, rule=rule)
        return refusal is not None


def is_of_norm_and_residual(norm: Node) -> bool:
    """Whether a norm is of the sum of a residual and another norm, which is for nothing else."""
    add = arguments(norm)["x"]
    if add.target is not aten.add.Tensor or not known_equal((given := arguments(add))["alpha"], 1):
        return False
    for y, residual in ((given["self"], given["other"]), (given["other"], given["self"])):
        first = y.args[0] if isinstance(y, Node) and y.target is operator.getitem and y.args[1] == 0 else None
        if isinstance(first, Node) and first.target is ops.rms_norm.default and isinstance(residual, Node):
            alone = list(y.users) == [add] and not any(part.users for part in first.users if part is not y)
            x, other, total = (each.meta["val"] for each in (arguments(first)["x"], residual, add))
            return alone and y is not residual and same_layout(x, other) and x.dtype == total.dtype
    return False


def _added_to(linear: Linear) -> Residual | None:
    """The sum that reads a layer's product, or a reshape of it."""
    for result in (linear.node, *(user for user in linear.node.users if is_reshape(user))):
        for add in result.users:
            if add.target is not aten.add.Tensor or not known_equal((given := arguments(add))["alpha"], 1):
                continue
            others = [each for each in (given["self"], given["other"]) if each is not result]
            if len(others) == 1 and isinstance(others[0], Node) and isinstance(others[0].meta.get("val"), Tensor):
                return Residual(add, others[0], result)
    return None
