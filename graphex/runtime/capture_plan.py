"""The plan of a graph's captures, made before any call: their key, and how inputs and outputs are treated.

The key is everything that tells one captured graph of a program from another:

    x: f32[s0, 16]; n: int; scale: f32[] on the CPU      ->      CaptureKey((s0, n, scale's value), switches, settings)

`values` are the numbers that a kernel would take from the host when it is launched: sizes, numbers, tensors of one
element on the CPU. A size is read where that is cheapest: from the number that Dynamo passes beside the tensor, else
from the tensor. A number that no op takes is not part of the key; it is computed on the host:

    n = placeholder; m = n + 1; return (y, m)

Inputs are captured by address (parameters, marked and written inputs) or copied into a private buffer by each call;
`kinds` says how each result gets out of the graph's memory (see `buffers`).
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from graphex.analysis import Aliases
from graphex.analysis.effects import is_size_arithmetic, libraries_of, node_leaves
from graphex.analysis.graphs import extract
from graphex.config import CompilerConfig
from graphex.device import Device
from graphex.regions.members import is_view
from graphex.regions.region import Region, region_called
from graphex.runtime.buffers import Computed, Kinds, OutputKind
from graphex.runtime.codegen import Boxed, generate
from graphex.runtime.guards import CaptureKey
from graphex.torch_private.cuda import states, switches_for
from graphex.torch_private.memory import borrowed
from graphex.torch_private.symbolic import free_symbols, symbol_of

# -- the key -----------------------------------------------------------------------------------------------------------


class KeyReader:
    """Reads the key of a call from its inputs."""

    def __init__(self, gm: GraphModule, aliases: Aliases, device: Device) -> None:
        placeholders = gm.graph.find_nodes(op="placeholder")
        values = [node.meta.get("val") for node in placeholders]
        numbers = set(sizes_that_matter(gm))
        known = {symbol_of(value): index for index, value in enumerate(values) if symbol_of(value) is not None}
        found: dict[Any, tuple[int, int]] = {}
        self._whole: list[int] = []
        for index, value in enumerate(values):
            if not isinstance(value, torch.Tensor):
                continue
            for symbol in free_symbols((*value.shape, *value.stride())):
                if symbol in known:
                    numbers.add(known[symbol])
                elif (dim := _dim_of(symbol, value)) is not None:
                    found.setdefault(symbol, (index, dim))
                elif index not in self._whole:
                    self._whole.append(index)
        self._settings = device.settings
        self.switches = switches_for(libraries_of(gm.graph))
        self._numbers = sorted(numbers)
        self._fractions = [index for index in self._numbers if isinstance(values[index], (float, torch.SymFloat))]
        self._dims = sorted(found.values())
        self.hosts = [index for index, value in enumerate(values) if is_host_scalar(value, device)]
        # Two tensors at one address may begin at different places of their storages.
        tensors = [index for index, value in enumerate(values) if isinstance(value, torch.Tensor)]
        self._absolute = [index for index in tensors if aliases.is_absolute(placeholders[index])]
        self.varies = bool(self._numbers or self._dims or self._whole or self.hosts or self._absolute)

    def __call__(self, args: Sequence[Any]) -> CaptureKey:
        return CaptureKey(self.values(args) if self.varies else (), states(self.switches), self._settings())

    def values(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The `values` of a key: none where nothing `varies`."""
        key: list[Any] = [args[index] for index in self._numbers]
        if self._dims:
            key += [args[index].size(dim) for index, dim in self._dims]
        for index in self._whole:
            key += [args[index].shape, args[index].stride()]
        for index in self._absolute:
            key.append(args[index].storage_offset())
        for index in self._fractions:
            key.append(repr(args[index]))
        for index in self.hosts:
            key.append(repr(args[index].item()))
        return tuple(key)


def is_host_scalar(value: object, device: Device) -> bool:
    """A tensor of one element on the host: device ops take its value when they are launched.

    It is compared as text: 0.0 and -0.0 are equal but not the same, and a NaN is not equal to itself.
    """
    return isinstance(value, torch.Tensor) and value.dim() == 0 and not device.holds(value)


def _dim_of(symbol: Any, value: torch.Tensor) -> int | None:
    return next((dim for dim, size in enumerate(value.shape) if symbol_of(size) == symbol), None)


def sizes_that_matter(gm: GraphModule) -> list[int]:
    """The inputs that are numbers and reach something other than arithmetic on numbers and the output."""
    return [
        index
        for index, node in enumerate(gm.graph.find_nodes(op="placeholder"))
        if not isinstance(node.meta.get("val"), torch.Tensor) and _reaches_an_op(node)
    ]


def host_outputs(gm: GraphModule) -> tuple[list[int], Boxed] | None:
    """(which outputs are numbers, a program that computes them from the inputs); None if there are none."""
    returned: Any = gm.graph.output_node().args[0]
    leaves = returned if isinstance(returned, (list, tuple)) else (returned,)
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Node) and _is_number(leaf)]
    if not places:
        return None
    needed: set[Node] = set()
    pending = [leaves[index] for index in places]
    while pending:
        node = pending.pop()
        assert isinstance(node, Node)
        if node not in needed:
            needed.add(node)
            pending += list(node_leaves((node.args, node.kwargs)))
    inputs = gm.graph.find_nodes(op="placeholder")
    body = sorted(needed.difference(inputs))
    module, _ = extract(gm, body, inputs, tuple(leaves[index] for index in places))
    return places, generate(module).function("<graphex host values>")


def _reaches_an_op(node: Node) -> bool:
    pending, seen = list(node.users), set()
    while pending:
        user = pending.pop()
        if user.op == "output" or user in seen:
            continue
        if not is_size_arithmetic(user):
            return True
        seen.add(user)
        pending += list(user.users)
    return False


def _is_number(node: Node) -> bool:
    value: Any = node.meta.get("val")
    return value is not None and not isinstance(value, torch.Tensor)


# -- inputs and outputs ------------------------------------------------------------------------------------------------


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
        """The captured results, with the result that is computed later in its place."""
        end = len(results) - self.reads
        found = [*results[:end]]
        found[self.place] = Computed(self.run, tuple(map(borrowed, results[end:])))
        return tuple(found)


@dataclass(frozen=True)
class CapturePlan:
    """How the inputs and outputs of a graph are treated. Inputs are named by their index:

    by_address   captured where they are: `static` ones (`parameters`, marked inputs, values `received` from other
                 pieces), `written` ones, and those that something addresses from the start of their storage
    looked_at    those of them that each call compares the addresses of
    unchecked    the others: frozen parameters, which have to be the same objects
    plain        copied into a buffer by each call, or read where they are if the same tensor comes again
    hosts        in the memory of the host
    moving       made by other pieces, written here, and elsewhere in every call; `put_back` if the new value is seen

    `kinds` says how each output gets out (see `buffers`). `unlaid` are results of regions that are copied out from the
    strides of compiled code.
    """

    names: list[str]
    output_names: list[str]
    kinds: list[OutputKind]
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
        kinds: dict[int, OutputKind],
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


_KINDS: dict[bool | str, OutputKind] = {
    "auto": OutputKind.COPIED,
    True: OutputKind.SEPARATE,
    False: OutputKind.IN_PLACE,
}


def _copied_alone(gm: GraphModule, kinds: Kinds) -> frozenset[tuple[Region, int]]:
    """The results of regions that are read nowhere and leave the graph as one copy, of them or of a view of them.

    region_0 = region_0(x, w); mm = region_0[0]; logits = view(mm, [8, 128, 50257]); return (logits,)
    """
    times = Counter(leaf for leaf in output_leaves(gm) if isinstance(leaf, Node))
    kinds_of = zip(output_leaves(gm), kinds, strict=True)
    alone = {leaf for leaf, kind in kinds_of if kind in (OutputKind.COPIED, OutputKind.SEPARATE) and times[leaf] == 1}
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
    """The results of a graph, one by one."""
    returned = _returned(gm)
    return list(returned) if isinstance(returned, (list, tuple)) else [returned]


def returns_one(gm: GraphModule) -> bool:
    """Whether a graph returns a value and no tuple of them."""
    return not isinstance(_returned(gm), (list, tuple))


def _returned(gm: GraphModule) -> Any:
    return gm.graph.output_node().args[0]
