"""`PassManager`: several passes in a row, with checks after each of them."""

import torch
from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassResult
from torch.fx.passes.infra.pass_manager import PassManager
from tracing import aten_graph, ops, through_the_pipeline

aten = torch.ops.aten


def retarget(gm: GraphModule, old: object, new: object) -> PassResult:
    nodes = gm.graph.find_nodes(op="call_function", target=old)
    for node in nodes:
        node.target = new
    gm.recompile()
    return PassResult(gm, bool(nodes))


def add_to_div(gm: GraphModule) -> PassResult:
    return retarget(gm, aten.add.Tensor, aten.div.Tensor)


def div_to_mul(gm: GraphModule) -> PassResult:
    return retarget(gm, aten.div.Tensor, aten.mul.Tensor)


def has_no_product(gm: GraphModule) -> None:
    if "mul.Tensor" in ops(gm.graph):
        raise ValueError("there is a product in the graph")


def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


if __name__ == "__main__":
    x, y = torch.tensor([6.0, 9.0]), torch.tensor([2.0, 3.0])

    both = PassManager(passes=[add_to_div, div_to_mul], run_checks_after_each_pass=True, suppress_check_failures=False)
    result = both(aten_graph(f, x, y))
    assert result.modified
    assert torch.equal(result.graph_module(x, y), x * y)
    assert torch.equal(through_the_pipeline(f, both, x, y), x * y)

    # A check runs after every pass if the manager was asked to; the one that fails stops the rest.
    checked = PassManager(passes=[add_to_div, div_to_mul], run_checks_after_each_pass=True)
    checked.add_checks(has_no_product)
    try:
        checked(aten_graph(f, x, y))
    except Exception as error:
        print(f"stopped by the check: {error.__cause__ or error}")
    else:
        raise AssertionError("the check did not run")
    first = PassManager(passes=[add_to_div], run_checks_after_each_pass=True)
    first.add_checks(has_no_product)
    assert torch.equal(through_the_pipeline(f, first, x, y), x / y)
