"""When a value is used for the last time."""

from __future__ import annotations

from torch.fx import Graph, Node


def last_uses(graph: Graph) -> dict[Node, list[Node]]:
    """For each node, the values that nobody needs after it, in the order they were defined.

        before:  a = f(x); b = g(a); c = h(a, b)
        result:  {b: [], c: [a, b]}        (and x dies at a)

    A value that is never used dies where it is defined. What the output returns never dies.
    """
    dying: dict[Node, list[Node]] = {}
    last: dict[Node, Node] = {}
    for node in graph.nodes:
        for value in node.all_input_nodes:
            last[value] = node
    for value in graph.nodes:
        if value.op == "output":
            continue
        user = last.get(value, value)
        if user.op != "output":
            dying.setdefault(user, []).append(value)
    return dying
