"""One captured graph of a training step, the memory of its arguments, and modules that are compiled inside of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graphex.device import Replay
from graphex.runtime.buffers import Arena, InputBuffer
from graphex.runtime.pools import Pool
from graphex.torch_private.symbolic import pytree


@dataclass
class CapturedStep:
    """One device graph of a step. `gradients` are what it leaves on the parameters, `deferred` the host's part."""

    replay: Replay
    pool: Pool
    buffers: list[tuple[int, InputBuffer | Tensor]]
    results: list[Any]
    spec: Any
    gradients: list[Tensor | None]
    deferred: list[Callable[[], Any]]

    def fill(self, leaves: Sequence[Any]) -> None:
        for place, buffer in self.buffers:
            if isinstance(buffer, Tensor):
                buffer.copy_(leaves[place])
            else:
                buffer.target.copy_(buffer.source(leaves[place]))

    def free(self) -> None:
        self.pool.graphs -= 1
        self.replay.free([self.buffers, self.results, self.gradients])
        self.buffers, self.results = [], []


def buffer_for(leaf: Tensor, where: torch.device) -> InputBuffer | Tensor:
    """Memory of the graph's own for an argument, on the device."""
    if leaf.device.type == where.type:
        return Arena().buffers([leaf], shared=False)[0]
    return torch.empty_like(leaf, device=where)


def detached(results: Any) -> Any:
    return pytree.tree_map_only(Tensor, Tensor.detach, results)


class CompiledModule:
    """A module of the user's that is compiled while a step runs, and as it was outside."""

    def __init__(self, module: nn.Module, compile_it: Callable[[Any], Any]) -> None:
        self._module, self._compiled = module, compile_it(_call_of(module))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        before, self._module._compiled_call_impl = self._module._compiled_call_impl, self._compiled
        try:
            yield
        finally:
            self._module._compiled_call_impl = before


def _call_of(module: nn.Module) -> Callable[..., Any]:
    """The call of a module in a form that Dynamo compiles: it leaves torch's own (`nn.Sequential`) as they are."""
    if not type(module).forward.__module__.startswith("torch."):
        return module._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    return call
