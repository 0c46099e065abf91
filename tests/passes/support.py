"""What the tests of passes share: small graphs, an observer of graphs, and what a user can see of a call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import graphex

aten = torch.ops.aten

CLEAN = ("remove_noops", "remove_redundant_copies", "merge_common_subexpressions")


def trace(fn: Callable[..., Any], *inputs: torch.Tensor, dynamic: bool = False) -> GraphModule:
    """An ATen graph of `fn` with values on its nodes, without Dynamo and AOTAutograd: writes stay where they are.

    Without a table, torch 2.14 and newer turn `detach` into `alias`.
    """
    return make_fx(fn, decomposition_table={}, tracing_mode="symbolic" if dynamic else "fake")(*inputs)


class Optimised:
    """A function, traced and compiled by graphex, and the graph its passes left."""

    def __init__(self, fn: Callable[..., Any], *inputs: torch.Tensor, dynamic: bool = False, **options: Any) -> None:
        self.seen = Observer()
        options.setdefault("post_grad_custom_post_pass", self.seen)
        self.run = graphex.compile_fx(trace(fn, *inputs, dynamic=dynamic), options=options)
        self.journal = graphex.journal(self.run)

    def count(self, target: Any) -> int:
        return self.seen.targets.count(target)

    def rules(self) -> list[str]:
        """The rewrites that the clean passes made, dead code aside."""
        return [record.rule for record in self.journal.rewrites if record.pass_name in CLEAN]

    def reasons(self, rule: str) -> list[str]:
        return [record.reason for record in self.journal.refusals if record.rule == rule]


class Observer:
    """A custom pass that changes nothing and keeps what it saw of the last graph."""

    name = "observer"

    def __call__(self, gm: GraphModule, example_inputs: Any, config: Any) -> None:
        self.gm = GraphModule(gm, copy.deepcopy(gm.graph))  # later passes go on changing the graph they are given
        self.example_inputs = example_inputs
        self.config = config
        self.metas = {node.name: dict(node.meta) for node in gm.graph.nodes}
        self.targets = [node.target for node in gm.graph.nodes]
        self.ops = [node.op for node in gm.graph.nodes]


def seen_by_user(fn: Callable[..., Any], *inputs: torch.Tensor) -> tuple[list[Any], list[Any], list[str]]:
    """(results, inputs as the call left them, who shares memory with whom) of a call on copies of the inputs."""
    copies = [value.clone() for value in inputs]
    results = pytree.tree_leaves(fn(*copies))
    return results, copies, memory(results, copies)


def memory(results: list[Any], inputs: list[Any]) -> list[str]:
    """For each result, the first input or result whose memory it lives in."""
    owners: dict[int, str] = {}
    for index, value in enumerate(inputs):
        owners.setdefault(value.untyped_storage().data_ptr(), f"input {index}")
    return [
        owners.setdefault(value.untyped_storage().data_ptr(), f"result {index}")
        for index, value in enumerate(results)
        if isinstance(value, torch.Tensor)
    ]


def assert_same_to_user(ours: Callable[..., Any], theirs: Callable[..., Any], *inputs: torch.Tensor) -> None:
    """Results, strides, writes to inputs, shared memory: nobody can tell which one ran."""
    torch.manual_seed(0)
    results, left, shared = seen_by_user(ours, *inputs)
    torch.manual_seed(0)
    wanted_results, wanted_left, wanted_shared = seen_by_user(theirs, *inputs)
    torch.testing.assert_close(results, wanted_results, rtol=0, atol=0, equal_nan=True, check_stride=True)
    torch.testing.assert_close(left, wanted_left, rtol=0, atol=0, equal_nan=True)
    assert shared == wanted_shared
