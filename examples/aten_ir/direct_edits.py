"""Edit a graph directly: walk over its nodes, retarget them, insert and erase."""

import torch
from torch.fx import GraphModule
from tracing import aten_graph, ops, through_the_pipeline

aten = torch.ops.aten


def multiply_instead_of_add(gm: GraphModule) -> None:
    """add(a, b)  ->  mul(a, b)"""
    for node in gm.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        node.target = aten.mul.Tensor


def relu_after_add(gm: GraphModule) -> None:
    """y = add(a, b); use(y)  ->  y = add(a, b); r = relu(y); use(r)"""
    for node in gm.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        with gm.graph.inserting_after(node):
            relu = gm.graph.call_function(aten.relu.default, (node,))
        # Everybody but the relu itself uses the relu from now on.
        node.replace_all_uses_with(relu, delete_user_cb=lambda user, relu=relu: user is not relu)


def drop_double_negation(gm: GraphModule) -> None:
    """neg(neg(x))  ->  x"""
    for node in gm.graph.find_nodes(op="call_function", target=aten.neg.default):
        (inner,) = node.args
        if inner.target is aten.neg.default:
            node.replace_all_uses_with(inner.args[0])
            gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code()


def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.neg(torch.neg(x + y)) - 1


if __name__ == "__main__":
    x, y = torch.tensor([1.0, -3.0]), torch.tensor([2.0, 2.0])

    gm = aten_graph(f, x, y)
    for edit in (multiply_instead_of_add, drop_double_negation):
        edit(gm)
        gm.graph.lint()
    gm.recompile()
    assert ops(gm.graph) == ["mul.Tensor", "sub.Tensor"]
    assert torch.equal(gm(x, y), x * y - 1)

    gm = aten_graph(f, x, y)
    relu_after_add(gm)
    gm.recompile()
    assert torch.equal(gm(x, y), (x + y).relu() - 1)

    assert torch.equal(through_the_pipeline(f, multiply_instead_of_add, x, y), x * y - 1)
    assert torch.equal(through_the_pipeline(f, [relu_after_add, drop_double_negation], x, y), (x + y).relu() - 1)
