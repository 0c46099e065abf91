"""How a captured graph treats its inputs and outputs, known before any call.

Inputs are captured by address (parameters, marked and written inputs) or copied into a private buffer by each
call; `kinds` says how each result gets out of the graph's memory (see `buffers`).
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from graphex.analysis import Aliases
from graphex.config import CompilerConfig
from graphex.device import Device
from graphex.regions.members import is_view
from graphex.regions.region import Region
from graphex.runtime.buffers import (
    Computed,
)
from graphex.runtime.codegen import Boxed, region_called
from graphex.torch_private.memory import borrowed


@dataclass(frozen=True)
class PieceInputs:
    """The inputs of a piece that other pieces of its graph have made.

    `received` are at the address where a device graph puts them in every call. `moving` are elsewhere in every call
    and written to by this piece (see `pieces`).
    """

    received: Iterable[int]
    moving: Mapping[int, bool]


@dataclass(frozen=True)
class Tail:
    """The product that makes result `place` after each replay (see `graphex.analysis.memory`).

    `captured` is captured instead of the whole graph, and returns as many values more as `run` takes: `reads`.
    """

    place: int
    captured: Boxed
    run: Boxed
    reads: int

    def computed(self, results: Sequence[Any]) -> tuple[Any, ...]:
        """What was captured, with the result that is computed later in its place."""
        end = len(results) - self.reads
        found = [*results[:end]]
        found[self.place] = Computed(self.run, tuple(map(borrowed, results[end:])))
        return tuple(found)


@dataclass(frozen=True)
class CapturePlan:
    """How the inputs and outputs of a graph are treated, by their index."""

    names: list[str]
    output_names: list[str]
    kinds: list[str]
    static: list[int]
    parameters: list[int]
    by_address: list[int]
    plain: list[int]
    hosts: list[int]
    written: list[int]
    looked_at: list[int]
    unchecked: list[int]
    clone_input: bool | str
    moving: list[int]
    put_back: list[int]
    received: list[int]
    unlaid: frozenset[tuple[Region, int]]
    returns_one: bool
    tail: Tail | None

    @staticmethod
    def of(
        gm: GraphModule,
        aliases: Aliases,
        device: Device,
        static_inputs: Iterable[int],
        config: CompilerConfig,
        kinds: dict[int, str],
        from_pieces: PieceInputs | None = None,
        tail: Tail | None = None,
    ) -> CapturePlan:
        nodes = gm.graph.find_nodes(op="placeholder")
        values = [node.meta.get("val") for node in nodes]
        tensors = [index for index, value in enumerate(values) if isinstance(value, Tensor)]
        hosts = [index for index in tensors if not device.holds(values[index])]
        moving = {} if from_pieces is None else from_pieces.moving
        written = [index for index in tensors if index not in moving and aliases.is_written(nodes[index])]
        # A value that is addressed from the start of its storage can be read at its own address only.
        absolute = [index for index in tensors if aliases.is_absolute(nodes[index])]
        # A value from another piece is at one address, but every call has an object of its own for it.
        parameters = set(static_inputs).intersection(tensors)
        received = [] if from_pieces is None else list(from_pieces.received)
        static = parameters.union(received).intersection(tensors)
        fixed = {*static, *written, *absolute}.difference(hosts)
        by_address = [index for index in tensors if index in fixed]
        unchecked = parameters.difference(written) if config.frozen_parameter else set()
        outputs = output_leaves(gm)
        found = [kinds.get(place, _KINDS[config.clone_output]) for place in range(len(outputs))]
        return CapturePlan(
            names=[node.name for node in nodes],
            output_names=[leaf.name if isinstance(leaf, Node) else str(leaf) for leaf in outputs],
            kinds=found,
            static=sorted(static.difference(hosts)),
            parameters=sorted(parameters.difference(hosts)),
            by_address=by_address,
            plain=[index for index in tensors if index not in fixed and index not in hosts],
            hosts=hosts,
            written=written,
            looked_at=[index for index in by_address if index not in unchecked],
            unchecked=[index for index in by_address if index in unchecked],
            # A piece must not write to memory that a later piece reads, nor a backward to tensors that autograd saved.
            clone_input="auto" if from_pieces is not None and config.clone_input is False else config.clone_input,
            moving=list(moving),
            put_back=[index for index, is_seen in moving.items() if is_seen],
            received=received,
            unlaid=_copied_alone(gm, found),
            returns_one=returns_one(gm),
            tail=tail,
        )

    def addresses(self, args: Sequence[Any]) -> tuple[int, ...]:
        """The addresses of inputs that are captured by address; the identity of those that are not looked at."""
        looked_at = (args[index].data_ptr() for index in self.looked_at)
        return (*looked_at, *(id(args[index]) for index in self.unchecked))

    def named(self, indices: Iterable[int]) -> str:
        """The inputs by name, at most three of them."""
        names = [f"'{self.names[index]}'" for index in sorted(indices)] or ["of another call"]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"input {', '.join(names[:3])}{more}"


_KINDS: dict[bool | str, str] = {"auto": "copied", True: "separate", False: "in place"}


def _copied_alone(gm: GraphModule, kinds: Sequence[str]) -> frozenset[tuple[Region, int]]:
    """The results of regions that are read nowhere and leave the graph as one copy, of them or of a view of them.

    region_0 = region_0(x, w); mm = region_0[0]; logits = view(mm, [8, 128, 50257]); return (logits,)
    """
    times = Counter(leaf for leaf in output_leaves(gm) if isinstance(leaf, Node))
    kinds_of = zip(output_leaves(gm), kinds, strict=True)
    alone = {leaf for leaf, kind in kinds_of if kind in ("copied", "separate") and times[leaf] == 1}
    return frozenset(
        (region, int(result.args[1]))
        for node in gm.graph.find_nodes(op="call_module")
        if (region := region_called(gm, node)) is not None
        for result in node.users
        if _only_view(result) in alone
    )


def _only_view(node: Node) -> Node | None:
    """The output of a graph that is a value, or a view of it, if that is all that becomes of the value."""
    while len(node.users) == 1:
        (user,) = node.users
        if user.op == "output":
            return node
        if not is_view(user) or user.target is operator.getitem or not _same_type(user, node):
            return None
        node = user
    return None


def _same_type(one: Node, other: Node) -> bool:
    left, right = one.meta.get("val"), other.meta.get("val")
    return isinstance(left, Tensor) and isinstance(right, Tensor) and left.dtype == right.dtype


def output_leaves(gm: GraphModule) -> list[Any]:
    """What a graph returns, one by one."""
    returned = _returned(gm)
    return list(returned) if isinstance(returned, (list, tuple)) else [returned]


def returns_one(gm: GraphModule) -> bool:
    """Whether a graph returns a value and no tuple of them."""
    return not isinstance(_returned(gm), (list, tuple))


def _returned(gm: GraphModule) -> Any:
    return gm.graph.output_node().args[0]
