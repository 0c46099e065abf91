"""A function compiled and compared with eager, and the graph that runs in the end: what it still copies whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

import graphex
from graphex.analysis import Aliases


class Compiled:
    """`f` through graphex, equal to eager in results and in what it leaves in its inputs.

    Not `exact` is for what `aot_eager` rounds differently from eager too.
    """

    def __init__(
        self, f: Callable[..., Any], *args: Any, verify: bool = True, exact: bool = True, **options: Any
    ) -> None:
        self._graphs: list[GraphModule] = []
        options = {"post_grad_custom_post_pass": self._keep, "verify": verify, **options}
        self.run = torch.compile(f, backend="graphex", options=options)
        tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-5, "atol": 1e-6}
        with torch.no_grad():
            for _ in range(2):
                mine, theirs = _copies(args), _copies(args)
                torch.testing.assert_close(self.run(*mine), f(*theirs), **tolerance)
                torch.testing.assert_close(mine, theirs, **tolerance)
        self.journal = graphex.journal(self.run)
        assert {verdict.status for verdict in self.journal.verifications} == ({"equal"} if verify else set())
        assert not self.journal.fallbacks

    def _keep(self, gm: GraphModule, example_inputs: Any, config: Any) -> None:
        """A pass that changes nothing; the memory stage goes on with this very module."""
        self._graphs.append(gm)

    def full_copies(self, cache: Tensor) -> list[str]:
        """The nodes of the graph that runs which make or move as many elements as the cache has."""
        (gm,) = self._graphs
        aliases = Aliases(gm.graph)
        return [node.name for node in gm.graph.nodes if _moves(node, aliases) and _elements(node) >= cache.numel()]

    def calls(self, op: Any) -> int:
        return sum(node.target is op for gm in self._graphs for node in gm.graph.nodes)

    def made(self, rule: str) -> int:
        return sum(record.rule == rule for record in self.journal.rewrites)

    def reasons(self, rule: str) -> list[str]:
        return [record.reason for record in self.journal.refusals if record.rule == rule]


def _copies(args: Any) -> list[Any]:
    """Copies that are the same tensor where the originals are."""
    made: dict[int, Tensor] = {}
    return [_copy(arg, made) for arg in args]


def _copy(arg: Any, made: dict[int, Tensor]) -> Any:
    if isinstance(arg, list):
        return [_copy(each, made) for each in arg]
    return made.setdefault(id(arg), arg.clone()) if isinstance(arg, Tensor) else arg


def _moves(node: Node, aliases: Aliases) -> bool:
    """Whether the node fills memory: fresh memory, or by a copy."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
        return False
    return node.target is torch.ops.aten.copy_.default or any(owner is node for owner, _ in aliases.storages(node))


def _elements(node: Node) -> int:
    return int(node.meta["val"].numel())
