"""Run a graph in float64: the reference that both the original and the optimised graph are measured against."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Interpreter

from graphex.analysis import is_random
from graphex.torch_private.trees import pytree

_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
_BITS = frozenset({torch.ops.aten.view.dtype})  # the bytes of a float64 mean something else


class NotInFloat64Error(Exception):
    """The graph has something that cannot, or must not, be run in float64."""


class _Wide(Interpreter):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in _BITS:
            raise NotInFloat64Error(f"{target} looks at bits")
        args, kwargs = pytree.tree_map(
            lambda value: _WIDE.get(value, value) if _is_dtype(value) else value, (args, kwargs)
        )
        return super().call_function(target, args, kwargs)

    def fetch_attr(self, target: str) -> Any:
        return _widen(super().fetch_attr(target))


def run_in_float64(gm: GraphModule, args: list[Any]) -> tuple[list[Any] | None, list[Any], str]:
    """(outputs, inputs as the graph left them, why not): outputs are None if the graph cannot be run in float64."""
    if any(is_random(node) for node in gm.graph.nodes):
        return None, [], "random numbers differ between types"
    wide = [_widen(value) for value in args]
    try:
        with torch.no_grad():
            result = _Wide(gm).run(*wide)
    except Exception as error:  # any op may lack a float64 kernel
        return None, [], f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return pytree.tree_leaves(result), wide, ""


def _is_dtype(value: Any) -> bool:
    return isinstance(value, torch.dtype)


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in _WIDE:
        return value.detach().to(_WIDE[value.dtype])
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
