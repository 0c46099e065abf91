"""Autograd's view of a graph: calls that must stay above it, and the version counters of inputs.

AOTAutograd has dealt with gradients, so a call runs below autograd, in generated code that writes in place. Some calls
must not, and are neither captured nor replayed:

    forward-mode AD     an input carries a tangent
    functorch           vmap, grad, jvp ... are around the call, so inputs may be wrapped tensors

For these the functional graph runs op by op: a derivative needs memory that the generated code writes over, and vmap
cannot write a batch into a tensor without one. Ops of graphex run as their references, which have every derivative.

Version counters show autograd as many writes as the user's program makes, however they are run:

    x.add_(1); x[0].mul_(2)                     two writes, whatever ops they have become, replayed or not

AOTAutograd counts one write itself before each call, for an input of which autograd might have saved something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter

from graphex.analysis import Aliases
from graphex.analysis.dependencies import writes_to
from graphex.analysis.graphs import attribute_of
from graphex.ops.definition import SPECS
from graphex.ops.scope import NOTHING_TO_RUN
from graphex.rewrite.compilation import Compilation
from graphex.runtime.codegen import Boxed
from graphex.torch_private.dynamo import dual_level, has_tangent, is_transformed
from graphex.torch_private.graphs import copy_graph
from graphex.torch_private.memory import set_versions, sets_versions

TANGENT = "an input carries a tangent (forward-mode AD)"
TRANSFORM = "the call is inside of a transform of torch.func (vmap, grad, jvp ...), or gradients are batched"


class FunctionalProgram:
    """The functional graph of a program, op by op, for calls that autograd or functorch has to see."""

    def __init__(self, compilation: Compilation, graph_name: str, gm: GraphModule, functional: Graph) -> None:
        """`gm` holds the attributes that the functional graph reads."""
        self._compilation, self._graph_name = compilation, graph_name
        self._said: set[str] = set()
        self.use(gm, functional)

    def use(self, gm: GraphModule, functional: Graph) -> None:
        """Run this graph from now on."""
        self._gm, self._graph = gm, functional
        targets = {str(node.target) for node in functional.nodes if node.op == "get_attr"}
        values = [attribute_of(gm, target) for target in sorted(targets)]
        self.held = [value for value in values if isinstance(value, Tensor)]

    def module(self) -> GraphModule:
        """A copy of the functional graph, for passes."""
        return GraphModule(self._gm, copy_graph(self._graph))

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


# -- version counters --------------------------------------------------------------------------------------------------


COUNTED = "graphex_counted"  # on an input: AOTAutograd counts one of its writes


@dataclass(frozen=True)
class Count:
    """How many writes to an input the program makes, and how many AOTAutograd counts."""

    writes: int
    elsewhere: int


def counts(gm: GraphModule) -> dict[int, Count]:
    """The known counts of writes to the inputs of a graph, by place."""
    inputs = gm.graph.find_nodes(op="placeholder")
    noted = {place: found for place, node in enumerate(inputs) if (found := writes_to(node)) is not None}
    return {place: Count(found.count, int(COUNTED in inputs[place].meta)) for place, found in noted.items()}


def repeated(written: list[int], known: dict[int, Count], *, elsewhere: bool) -> list[int]:
    """The places of written inputs, each as often as its writes are to be counted; at least once if nothing is known.

    `elsewhere`: AOTAutograd's wrapper is around the call.
    """
    found: list[int] = []
    for place in written:
        count = known.get(place, Count(1, 0))
        found += [place] * (count.writes - (count.elsewhere if elsewhere else 0))
    return found


@contextmanager
def uncounted(tensors: Sequence[Tensor]) -> Iterator[None]:
    """A capture computes nothing: undo what the captured ops count."""
    seen = [tensor for tensor in tensors if not tensor.is_inference()] if sets_versions() else []
    before = [tensor._version for tensor in seen]
    try:
        yield
    finally:
        set_versions(seen, before)


def counted(run: Boxed, gm: GraphModule, *, in_pieces: bool = False) -> Boxed:
    """`run` counts the writes of its ops, or of each piece; the result counts those of the user's program."""
    aliases, inputs = Aliases(gm.graph), gm.graph.find_nodes(op="placeholder")
    wrong = {
        place: count
        for place, count in counts(gm).items()
        if in_pieces or len(aliases.writes(inputs[place])) != count.writes - count.elsewhere
    }
    if not wrong or not sets_versions():
        return run

    def count(args: list[Any]) -> Any:
        written = [(args[place], count) for place, count in wrong.items() if not args[place].is_inference()]
        before = [tensor._version for tensor, _ in written]
        tensors = [tensor for tensor, _ in written]
        try:
            results = run(args)
        except BaseException:
            # the writes until then, less those that AOTAutograd has counted ahead
            set_versions(tensors, [max(v, t._version - c.elsewhere) for v, (t, c) in zip(before, written, strict=True)])
            raise
        set_versions(tensors, [v + c.writes - c.elsewhere for v, (_, c) in zip(before, written, strict=True)])
        return results

    return count
