"""Calls that autograd or functorch has to see: they run op by op above both, and nothing is captured or replayed.

    forward-mode AD     an input carries a tangent
    functorch           vmap, grad, jvp ... are around the call, so inputs may be wrapped tensors

AOTAutograd has dealt with gradients, so every other call runs below autograd, in generated code that writes in place.
Here the functional graph runs instead: memory that was written over is lost to a derivative, and vmap cannot write a
batch into a tensor without one. Ops of graphex run as their references, which have every derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter

from graphex.compilation import Compilation
from graphex.ops.definition import SPECS
from graphex.ops.scope import NOTHING_TO_RUN
from graphex.runtime.codegen import attribute_of
from graphex.torch_private.tracing import dual_level, has_tangent, is_transformed

TANGENT = "an input carries a tangent (forward-mode AD)"
TRANSFORM = "the call is inside of a transform of torch.func (vmap, grad, jvp ...), or gradients are batched"


class AboveAutograd:
    """The functional graph of a program, for the calls that must not run below autograd."""

    def __init__(self, compilation: Compilation, graph_name: str, gm: GraphModule, functional: Graph) -> None:
        """`gm` is the module that holds what the functional graph takes from attributes."""
        self._compilation, self._graph_name = compilation, graph_name
        self._said: set[str] = set()
        self.use(gm, functional)

    def use(self, gm: GraphModule, functional: Graph) -> None:
        """Run this graph from now on."""
        self._gm, self._graph = gm, functional
        targets = {str(node.target) for node in functional.nodes if node.op == "get_attr"}
        values = [attribute_of(gm, target) for target in sorted(targets)]
        self.held = [value for value in values if isinstance(value, Tensor)]

    def why(self, args: Sequence[Any]) -> str:
        """Why a call has to run here; empty if it need not."""
        if is_transformed():
            return TRANSFORM
        if dual_level() < 0:
            return ""
        return TANGENT if carry_tangents((*args, *self.held)) else ""

    def __call__(self, args: list[Any], reason: str) -> Any:
        if reason not in self._said:
            self._said.add(reason)
            self._compilation.fall_back(self._graph_name, "the graph runs op by op, above autograd", reason)
        given = list(args)
        args.clear()
        results = _References(self._gm, graph=self._graph).run(*given, enable_io_processing=False)
        return tuple(results) if isinstance(results, (list, tuple)) else results


def carry_tangents(values: Sequence[Any]) -> bool:
    return dual_level() >= 0 and any(has_tangent(value) for value in values if isinstance(value, Tensor))


class _References(Interpreter):
    """Runs a graph on one stream, and the reference of an op of graphex in place of the op."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if not isinstance(target, torch._ops.OpOverload):
            return super().call_function(target, args, dict(kwargs))
        if target._schema.name in NOTHING_TO_RUN:
            return None
        spec = SPECS.get(target.name())
        function: Callable[..., Any] = spec.reference if spec is not None and spec.defined_here else target
        return super().call_function(function, args, dict(kwargs))
