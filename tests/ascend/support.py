"""What the scenarios ask: a function compiled by name on the npu, compared with eager, and what its journal says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

import graphex


def on_npu(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.npu() for tensor in tensors]


class Compiled:
    """`fn` through `torch.compile(backend="npugraph_ex", options=...)`; every call is compared with eager."""

    def __init__(
        self, fn: Callable[..., Any], *, dynamic: bool | None = None, exact: bool = True, **options: Any
    ) -> None:
        self.fn, self.exact = fn, exact
        self.graphs: list[GraphModule] = []
        options.setdefault("post_grad_custom_post_pass", lambda gm, inputs, config: self.graphs.append(gm))
        self.run = torch.compile(fn, backend="npugraph_ex", dynamic=dynamic, options=options)

    def __call__(self, *args: Any) -> Any:
        """Call with `args`, and eagerly with copies of them; results and what is left in the arguments are equal."""
        theirs = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, args)
        with torch.no_grad():
            wanted, found = self.fn(*theirs), self.run(*args)
        tolerance = {"rtol": 0.0, "atol": 0.0} if self.exact else {"rtol": 1e-3, "atol": 1.0}
        torch.testing.assert_close(found, wanted, **tolerance)
        torch.testing.assert_close(args, theirs, **tolerance)
        return found

    @property
    def journal(self) -> graphex.Journal:
        return graphex.journal(self.run)

    def captures(self) -> list[str]:
        return [record.status for record in self.journal.captures]

    def count(self, what: str) -> int:
        return sum(counter[what] for counter in self.journal.counts.values())

    def rules(self, pass_name: str | None = None) -> list[str]:
        return [record.rule for record in self.journal.rewrites if pass_name in (None, record.pass_name)]

    def fusions(self) -> list[str]:
        return self.rules("fuse_patterns")

    def refusals(self) -> list[str]:
        return [record.reason for record in (*self.journal.refusals, *self.journal.near_misses)]

    def ops(self) -> list[str]:
        """The ops of the graph that runs."""
        return [str(node.target) for gm in self.graphs for node in gm.graph.nodes if node.op == "call_function"]
