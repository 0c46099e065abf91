"""Kernels that may run at one time and together need more cores than there are.

A kernel that holds its cores until another process, or another kernel, has answered must be on all of them at once.
Two of these on two streams, with nothing that orders them, can each get a part of the cores and wait for the rest for
ever. Three can even if no two of them would. What an op needs is declared:

    graphex.register_core_need(torch.ops.my.all_to_all, vectorcore=32)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from graphex.analysis.effects import operator_of
from graphex.analysis.order import Order
from graphex.analysis.source import node_line, placement
from graphex.analysis.synchronisation import CURRENT
from graphex.errors import InputError
from graphex.ops.scope import CORES
from graphex.torch_private.schemas import overload_of

MOST_SETS = 100  # reported for one graph

Need = tuple[int, int]  # aicores, vectorcores

_NEEDS: dict[torch._ops.OpOverload, Need] = {}


@dataclass(frozen=True)
class Risk:
    """Nodes that nothing orders, where they run, what each needs and where it comes from."""

    nodes: tuple[str, ...]
    streams: tuple[str, ...]
    needs: tuple[Need, ...]
    lines: tuple[str, ...]


def register_core_need(op: object, *, aicore: int = 0, vectorcore: int = 0) -> None:
    """Declare that a kernel of `op` holds so many cores at one time until others have answered it."""
    found = overload_of(op)
    if found is None:
        raise InputError(f"register_core_need takes an operator such as torch.ops.my.op.default, got {op!r}.")
    for name, value in (("aicore", aicore), ("vectorcore", vectorcore)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise InputError(f"{name} must be a number of cores, got {value!r}.")
    if not aicore and not vectorcore:
        raise InputError(f"register_core_need says nothing about {found}: give aicore, vectorcore or both.")
    _NEEDS[found] = (aicore, vectorcore)


def needing(graph: Graph) -> dict[Node, Need]:
    """The nodes whose op has a declared need, and what is left of it within the limits of their scope."""
    found = {}
    for node in graph.nodes:
        need = _NEEDS.get(op) if (op := operator_of(node)) is not None else None
        if need is not None:
            limits = (node.meta.get("custom") or {}).get(CORES, (None, None))
            found[node] = tuple(min(n, limit) if limit else n for n, limit in zip(need, limits, strict=True))
    return found  # type: ignore[return-value]


def deadlock_risks(graph: Graph, cores: Need) -> list[Risk]:
    """The smallest sets of nodes that may run at one time and need more than `cores`."""
    needs = needing(graph)
    order = Order(graph, data=False)
    nodes = list(needs)
    beside = {(a, b) for a in nodes for b in nodes if a is not b and not order.before(a, b) and not order.before(b, a)}
    risks = []
    for together in _too_large(nodes, beside, needs, cores):
        risks.append(
            Risk(
                tuple(node.name for node in together),
                tuple(str(placement(node) or CURRENT) for node in together),
                tuple(needs[node] for node in together),
                tuple(node_line(node) for node in together),
            )
        )
        if len(risks) == MOST_SETS:
            break
    return risks


def _too_large(
    nodes: list[Node], beside: set[tuple[Node, Node]], needs: dict[Node, Need], cores: Need
) -> Iterator[tuple[Node, ...]]:
    pending: list[tuple[tuple[Node, ...], int]] = [((), 0)]
    while pending:
        together, start = pending.pop(0)
        for index in range(start, len(nodes)):
            if not all((nodes[index], other) in beside for other in together):
                continue
            more = (*together, nodes[index])
            if not _fits(more, needs, cores):
                if all(_fits((*more[:i], *more[i + 1 :]), needs, cores) for i in range(len(more))):
                    yield more
            else:
                pending.append((more, index + 1))


def _fits(nodes: tuple[Node, ...], needs: dict[Node, Need], cores: Need) -> bool:
    return len(nodes) < 2 or all(sum(needs[node][kind] for node in nodes) <= cores[kind] for kind in (0, 1))
