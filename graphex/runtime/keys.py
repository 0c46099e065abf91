"""What tells one captured graph from another: the values of what really varies.

    x: f32[s0, 16]; n: int; scale: f32[] on the CPU      ->      key = (s0, n, scale's value, switches)

A size is read where it is cheapest: from the number that Dynamo passes beside the tensor, else from the tensor. What a
kernel would take from the host when it is launched (numbers, tensors of one element on the CPU) is part of the key,
and so are the switches that choose kernels, but for those of libraries that the graph does not call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from graphex.analysis import Aliases
from graphex.analysis.libraries import libraries_of
from graphex.device import Device
from graphex.runtime.host_values import sizes_that_matter
from graphex.torch_private.numerics import states, switches_for
from graphex.torch_private.symbolic import free_symbols, symbol_of

Key = tuple[Any, ...]


class KeyReader:
    """Reads the key of a call from its inputs."""

    def __init__(self, gm: GraphModule, aliases: Aliases, device: Device) -> None:
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
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
        # Tensors may begin at one place in memories that do not.
        tensors = [index for index, value in enumerate(values) if isinstance(value, torch.Tensor)]
        self._absolute = [index for index in tensors if aliases.is_absolute(placeholders[index])]
        self.varies = bool(self._numbers or self._dims or self._whole or self.hosts or self._absolute)

    def __call__(self, args: Sequence[Any]) -> Key:
        switches = states(self.switches), self._settings()
        return (*self.values(args), switches) if self.varies else (switches,)

    def values(self, args: Sequence[Any]) -> Key:
        """The key without the switches: nothing, where nothing `varies`."""
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

    def text(self, key: Key) -> str:
        """The key as the journal shows it, without the switches."""
        return str(key[:-1])


def is_host_scalar(value: object, device: Device) -> bool:
    """A tensor of one element on the host: device ops take its value when they are launched.

    It is compared as text: 0.0 and -0.0 are equal but not the same, and a NaN is not equal to itself.
    """
    return isinstance(value, torch.Tensor) and value.dim() == 0 and not device.holds(value)


def _dim_of(symbol: Any, value: torch.Tensor) -> int | None:
    return next((dim for dim, size in enumerate(value.shape) if symbol_of(size) == symbol), None)
