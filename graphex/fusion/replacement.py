"""What takes the place of a match: a traced graph, and what can be said of it once for all the places it is put in."""

from __future__ import annotations

import operator
from functools import cached_property
from itertools import combinations
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graphex.analysis import Aliases, written_arguments
from graphex.fusion.tracing import fresh
from graphex.torch_private.trees import pytree


class Replacement:
    """The trace of a replacement function for arguments of one kind."""

    def __init__(self, module: GraphModule) -> None:
        self.module = module
        self.nodes = list(module.graph.nodes)
        self.results = results_of(module)
        self._owners: dict[int, Node] = {}
        for node in self.nodes:
            for part in _tensors(node.meta.get("val")):
                self._owners.setdefault(part.untyped_storage()._cdata, node)
        self._own = {node for node in self.nodes if self._is_in_own_memory(node)}

    @cached_property
    def shared_with_inputs(self) -> list[tuple[int, int]]:
        """Results, by number, and the arguments in whose memory they may lie."""
        aliases, inputs = Aliases(self.module.graph), [node for node in self.nodes if node.op == "placeholder"]
        pairs = ((index, place) for index in range(len(self.results)) for place in range(len(inputs)))
        return [(index, place) for index, place in pairs if aliases.may_alias(self.results[index], inputs[place])]

    @cached_property
    def shared_results(self) -> list[tuple[int, int]]:
        """Results, by number, that may lie in one memory."""
        aliases, pairs = Aliases(self.module.graph), combinations(range(len(self.results)), 2)
        return [(one, other) for one, other in pairs if aliases.may_alias(self.results[one], self.results[other])]

    @cached_property
    def write_to_argument(self) -> Node | None:
        """A node that may write to the memory of an argument."""
        writers = {node: written for node in self.nodes if (written := written_arguments(node))}
        aliases = Aliases(self.module.graph) if writers else None
        found = (node for node, written in writers.items() if aliases and any(map(aliases.lives_in_input, written)))
        return next(found, None)

    def value_for(self, traced: Node, node: Node) -> Any:
        """The value of a node that was made like the traced one: alike, in memory of its own.

        Cheaper than evaluating the op again. None where the trace shares memory between nodes: there that has to be
        done.
        """
        if traced.target is operator.getitem:
            whole, index = node.args
            return whole.meta["val"][index] if isinstance(whole, Node) else None
        if traced not in self._own:
            return None
        value = traced.meta.get("val")
        if isinstance(value, (list, tuple)):
            return type(value)(fresh(part) for part in value)
        return fresh(value) if isinstance(value, torch.Tensor) else None

    def _is_in_own_memory(self, node: Node) -> bool:
        return all(self._owners[part.untyped_storage()._cdata] is node for part in _tensors(node.meta.get("val")))


def results_of(gm: GraphModule) -> list[Any]:
    """The tensors that a traced function returns, flat."""
    output = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
    return [leaf for leaf in pytree.tree_leaves(output.args[0]) if isinstance(leaf, Node)]


def _tensors(value: Any) -> list[torch.Tensor]:
    parts = value if isinstance(value, (list, tuple)) else [value]
    return [part for part in parts if isinstance(part, torch.Tensor)]
