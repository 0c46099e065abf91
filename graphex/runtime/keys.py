"""The capture key: everything that tells one captured graph of a program from another.

    x: f32[s0, 16]; n: int; scale: f32[] on the CPU      ->      Key((s0, n, scale's value), switches, settings)

`values` are the numbers that a kernel would take from the host when it is launched: sizes, numbers, tensors of one
element on the CPU. A size is read where that is cheapest: from the number that Dynamo passes beside the tensor, else
from the tensor. A number that no op takes is not part of the key; it is computed on the host:

    n = placeholder; m = n + 1; return (y, m)
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from graphex.analysis import Aliases
from graphex.analysis.effects import is_size_arithmetic, libraries_of, node_leaves
from graphex.analysis.graphs import extract
from graphex.device import Device
from graphex.runtime.codegen import Boxed, generate
from graphex.torch_private.cuda import states, switches_for
from graphex.torch_private.symbolic import free_symbols, symbol_of


class Key(NamedTuple):
    """`switches` choose kernels, less those of libraries that the graph does not call; `settings` are the device's."""

    values: tuple[Any, ...]
    switches: tuple[object, ...]
    settings: Hashable


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

    def __call__(self, args: Sequence[Any]) -> Key:
        return Key(self.values(args) if self.varies else (), states(self.switches), self._settings())

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
