"""Equal layers of a region: where to cut, so that one of them is compiled and serves for all.

    region:  embed; [mm a; gelu; mm b; add; norm]; [mm a; gelu; mm b; add; norm]; ... ; head

    cut:     embed |  mm a; gelu; mm b; add; norm  |  mm a; gelu; mm b; add; norm  | ... | head

A region is cut only in front of an op that Inductor calls as it is, such as a matrix product: a kernel that it would
have written across the cut ends there anyway, so that nothing is lost. A convolution is no such place: Inductor chooses
the layout of what it reads, which the kernel before it writes if both are in one region. Nor is a place with a value
across it that does not lie in memory row by row: its strides are eager's, and inside of a region Inductor would choose
better ones. Of the other places the one with the fewest values across it is taken, and of several those that are
written without a cut too. Segments are in the graph's order, so that each depends on earlier ones alone.

What a region would compute for later ones alone, from nothing of its own, is left to these (`sunk`). In a backward that
is what is computed again, such as the activations of all layers, and casts of gradients that are used much later:

    before:  ...; t = tanh(saved)  |  g = mm(...); tanh_backward(g, t)        t would be written to memory
    after:   ...  |  t = tanh(saved); g = mm(...); tanh_backward(g, t)
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Node, map_arg

from graphex.analysis.effects import is_kernel, operator_of
from graphex.analysis.memory import bytes_of
from graphex.analysis.shapes import known_contiguous
from graphex.regions.compiler import layout_key
from graphex.regions.members import is_generated, is_view

LAYERS = 6  # equal layers that are worth cutting for
READS = 4  # of memory: Inductor writes a value that is read twice and takes more of them
ROUNDS = 16  # in which it is found out what can move; after so many nothing does


def cut_at_layers(nodes: list[Node]) -> list[list[Node]]:
    """The nodes of a region in segments of which many are equal; one segment if it has no equal layers."""
    kinds = [_kind(node) for node in nodes]
    found = _period(nodes, kinds)
    if found is None:
        return [nodes]
    first, period, times = found
    across = _across(nodes)
    offsets = [
        offset
        for offset in range(period)
        if _may_cut(nodes, first + offset) and not across[first + period + offset].odd
    ]
    if not offsets:
        return [nodes]
    best = min(offsets, key=lambda offset: across[first + period + offset])
    places = (first + best + period * layer for layer in range(times + 1))
    cuts = [place for place in places if 0 < place < len(nodes) and _may_cut(nodes, place)]
    return [nodes[start:end] for start, end in pairwise([0, *cuts, len(nodes)])]


def sunk(segments: list[list[Node]]) -> list[list[Node]]:
    """Regions to be, in an order in which they can run, whose nodes stand where they are first read.

    A node moves if it reads nothing that stays behind, or makes more bytes than it reads. The parts of a tuple stay
    with it: what a region takes are tensors.
    """
    place: dict[Node, int] = {}
    for number, nodes in enumerate(segments):
        place |= {node: place[owner] if (owner := _tuple_of(node)) in place else number for node in nodes}
    bound = {node for node in place if not _may_move(node, place)}
    for _ in range(ROUNDS):
        home: dict[Node, int] = {}
        for node in reversed(place):
            first = place[node] if node in bound else min(home[user] for user in node.users)
            home[node] = max(first, place[node])
        home |= {node: home[owner] for node in place if (owner := _tuple_of(node)) in home}
        tied = {node for node in place if home[node] > place[node] and _reads_what_stays(node, place, home)}
        if not tied:
            break
        bound |= tied
    else:
        home = place
    moved: list[list[Node]] = [[] for _ in segments]
    for node in place:
        moved[home[node]].append(node)
    return [nodes for nodes in moved if nodes]


def _tuple_of(node: Node) -> Node | None:
    """The node that a node is a part of."""
    owner = node.args[0] if node.target is operator.getitem else None
    return owner if isinstance(owner, Node) else None


def _may_move(node: Node, place: dict[Node, int]) -> bool:
    """Whether a node is a part of code that Inductor writes, and all that reads it is in a region behind it."""
    is_written = is_generated(node) or is_view(node)
    return is_written and bool(node.users) and all(place.get(user, -1) >= place[node] for user in node.users)


def _reads_what_stays(node: Node, place: dict[Node, int], home: dict[Node, int]) -> bool:
    values = node.all_input_nodes
    if not any(place.get(value) == place[node] == home[value] for value in values):
        return False
    return bytes_of(node) <= sum(map(bytes_of, values))


def _period(nodes: list[Node], kinds: list[Hashable]) -> tuple[int, int, int] | None:
    """(first, period, times): from `first` on, `times` stretches of `period` nodes that are the same ops.

    The layers are found by an op of a kind that each has once: the places of such a kind are equally far apart.
    """
    places: dict[Hashable, list[int]] = defaultdict(list)
    for place, (node, kind) in enumerate(zip(nodes, kinds, strict=True)):
        if is_kernel(node):
            places[kind].append(place)
    best: tuple[int, int, int] | None = None
    for at in places.values():
        run = _equally_far(at, kinds)
        if run is not None and (best is None or run[1] * run[2] > best[1] * best[2]):
            best = run
    return best


def _equally_far(at: Sequence[int], kinds: list[Hashable]) -> tuple[int, int, int] | None:
    """The longest stretch of places with one distance, between which the same ops stand."""
    best: tuple[int, int, int] | None = None
    start = 0
    for index in range(1, len(at)):
        period = at[index] - at[index - 1]
        if index - 1 > start and period != at[start + 1] - at[start]:
            start = index - 1
        first = at[start]
        same = kinds[at[index - 1] : at[index]] == kinds[first : first + period]
        if not same:
            start = index - 1
            continue
        times = index - start
        if times >= LAYERS and (best is None or times > best[2]):
            best = (first, period, times)
    return best


def _kind(node: Node) -> Hashable:
    """Equal for nodes that do the same to values of the same layout, whichever these are."""
    literals = map_arg((node.args, dict(node.kwargs)), lambda value: None)
    return str(node.target), repr(literals), layout_key(node.meta.get("val"))


def _may_cut(nodes: list[Node], place: int) -> bool:
    """Whether the node at a place is a kernel that Inductor calls as it is, on operands that stay as they are."""
    node = nodes[place]
    is_called = is_kernel(node) and operator_of(node) is not None and not is_generated(node)
    return is_called and node.target is not torch.ops.aten.convolution.default


class Across(NamedTuple):
    """Values that are made before a place and read from it on: how many do not lie in memory row by row, how many
    there are, and how many Inductor would compute again where they are read, rather than write.
    """

    odd: int = 0
    values: int = 0
    computed: int = 0


def _across(nodes: list[Node]) -> list[Across]:
    """What is across each place."""
    position = {node: place for place, node in enumerate(nodes)}
    reads = _reads(nodes)
    changes = [[0, 0, 0] for _ in range(len(nodes) + 1)]
    for place, node in enumerate(nodes):
        last = max((position[user] for user in node.users if user in position), default=place)
        memory = _memory_of(node, position)
        if last > place and not is_view(memory):
            value = memory.meta.get("val")
            is_odd = isinstance(value, Tensor) and not known_contiguous(value)
            for kind, count in enumerate((is_odd, True, reads[node] > 1)):
                changes[place + 1][kind] += count
                changes[last + 1][kind] -= count
    return [Across(*counts) for counts in accumulate(changes, lambda a, b: [x + y for x, y in zip(a, b, strict=True)])]


def _memory_of(node: Node, position: Mapping[Node, int]) -> Node:
    """The node of a region whose memory a view looks at; a view of what the region is given stands for itself."""
    while is_view(node) and node.all_input_nodes and node.all_input_nodes[0] in position:
        node = node.all_input_nodes[0]
    return node


def _reads(nodes: list[Node]) -> dict[Node, int]:
    """How many values in memory Inductor reads for each: 1 for one that it writes there, more for a formula.

    It writes what a library reads, what is read twice and takes many reads itself, and what no formula makes.
    """
    reads: dict[Node, int] = {}
    for node in nodes:
        count = sum(reads.get(value, 1) for value in node.all_input_nodes)
        if is_view(node) or node.target is operator.getitem:
            reads[node] = max(1, count)
            continue
        op = operator_of(node)
        is_formula = op is not None and torch.Tag.pointwise in op.tags
        is_written = any(is_kernel(user) and not is_generated(user) for user in node.users)
        is_reused = len(node.users) > 1 and count > READS
        reads[node] = count if is_formula and not is_written and not is_reused else 1
    return reads
