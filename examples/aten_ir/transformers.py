"""`torch.fx.Transformer`: run a graph node by node and record a new one. Four kinds of change, each a small class.

A Transformer drops node metadata (`meta["val"]`, source lines). graphex restores it for a pass in its pipeline.
"""

from typing import Any

import torch
from torch.fx import Transformer
from tracing import aten_graph, ops, through_the_pipeline

aten = torch.ops.aten


class AddToMul(Transformer):
    """One to one:  add(a, b)  ->  mul(a, b)"""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(aten.mul.Tensor if target is aten.add.Tensor else target, args, kwargs)


class AddToMulAndSub(Transformer):
    """One to several:  add(a, b)  ->  sub(mul(a, b), b)"""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is not aten.add.Tensor:
            return super().call_function(target, args, kwargs)
        product = super().call_function(aten.mul.Tensor, args, {})
        return super().call_function(aten.sub.Tensor, (product, args[1]), {})


class WithoutDetach(Transformer):
    """One to none:  detach(x)  ->  x"""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in (aten.detach.default, aten.detach_copy.default, aten.alias.default):
            return args[0]
        return super().call_function(target, args, kwargs)


class NumbersToTensors(Transformer):
    """Decided by the arguments of a node:  add(x, 2)  ->  add(x, full([], 2.0))

    The schema of an op says which arguments are tensors; a number passed for one of them becomes a tensor.
    """

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(target, torch._ops.OpOverload):
            return super().call_function(target, args, kwargs)
        given = list(args)
        for place, argument in enumerate(target._schema.arguments[: len(given)]):
            if isinstance(argument.type, torch.TensorType) and isinstance(given[place], (int, float)):
                given[place] = super().call_function(aten.full.default, ([], float(given[place])), {})
        return super().call_function(target, tuple(given), kwargs)


def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((x + y).detach() + 2).relu()


if __name__ == "__main__":
    x, y = torch.tensor([1.0, -3.0]), torch.tensor([2.0, 2.0])
    wanted = {
        AddToMul: (x * y * 2).relu(),
        AddToMulAndSub: ((x * y - y) * 2 - 2).relu(),
        WithoutDetach: f(x, y),
        NumbersToTensors: f(x, y),
    }
    for transformer, result in wanted.items():
        gm = transformer(aten_graph(f, x, y)).transform()
        assert torch.equal(gm(x, y), result), transformer
        assert torch.equal(through_the_pipeline(f, transformer, x, y), result), transformer

    graph = WithoutDetach(aten_graph(f, x, y)).transform().graph
    assert ops(graph) == ["add.Tensor", "add.Tensor", "relu.default"]
    assert "full.default" in ops(NumbersToTensors(aten_graph(f, x, y)).transform().graph)
