"""How a linear layer looks in a graph: a product with a transposed weight, between two reshapes.

    view(x, [rows, K]); t(w); mm(view, t); view(mm, [..., N])         what AOTAutograd makes of linear(x, w)
    addmm(bias, view, t)                                              and of linear(x, w, bias)
    bmm(x, expand(t(w)))                                              where x cannot be flattened without a copy
    linear(x, w, bias), matmul(x, t(w)), mm(x, t(w))                  as it may be called

`x` is the value before the reshape, so that layers that share it are seen to. What is called a weight need not be one:
nothing is assumed of it but that it is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from graphex.analysis import known_equal, known_true
from graphex.analysis.notation import dtype_text
from graphex.analysis.shapes import known_contiguous
from graphex.fusion.calls import EXPAND, PERMUTE, RESHAPE, arguments, call_of, op_of
from graphex.passes.base import Refusal

aten, ops = torch.ops.aten, torch.ops.graphex

MOST_ROWS = 64
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
    """Who uses a value, as it is or reshaped."""
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
        return Refusal(f"its input is {dtype_text(x.dtype)}, and the kernels are for float16 and bfloat16", linear.node)
    rows: Any = 1
    for size in x.shape[:-1]:
        rows = rows * size
    if known_true(rows > MOST_ROWS):
        reason = f"{rows} rows are more than {MOST_ROWS}: a plain matrix product is the right thing"
        return Refusal(reason, linear.node, nothing_lost=True)
    if known_equal(rows, 0) or known_equal(x.shape[-1], 0):
        return Refusal("there is nothing to multiply", linear.node)
    return None


def unfit_weight(linear: Linear) -> Refusal | None:
    """Why this layer is not taken, whatever becomes of the others that share its input."""
    x, weight, result = (each.meta["val"] for each in (linear.x, linear.weight, linear.node))
    if weight.dtype != x.dtype or weight.device != x.device:
        return Refusal(f"input and weight differ: {_kind(x)} and {_kind(weight)}", linear.node)
    if not all(isinstance(size, int) and size > 0 for size in weight.shape):
        return Refusal("the size of the weight is not known before running", linear.node)
    if not known_equal(weight.stride(1), 1):
        return Refusal("the rows of the weight are not adjacent elements", linear.node)
    if linear.bias is not None:
        bias = linear.bias.meta["val"]
        if bias.dim() != 1 or not known_equal(bias.shape[0], weight.shape[0]):
            return Refusal("what is added is not a bias: one number for each row of the weight", linear.node)
        if bias.dtype != x.dtype or bias.device != x.device:
            return Refusal(f"input and bias differ: {_kind(x)} and {_kind(bias)}", linear.node)
    if not known_contiguous(result) or result.dtype != x.dtype:
        return Refusal("the result is of another type or layout than the op's", linear.node)
    return None


def _kind(value: Tensor) -> str:
    return f"{dtype_text(value.dtype)} on {value.device}"
