"""The state of every random number generator that a call may draw from: two runs that start from it draw the same."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch


class RandomState:
    """A snapshot of torch's generators (CPU and devices), Python's, NumPy's and those of the user."""

    def __init__(self, generators: Iterable[torch.Generator] = ()) -> None:
        self._restorers: list[Callable[[], Any]] = [_restorer(torch.get_rng_state(), torch.set_rng_state)]
        for module in _device_modules():
            self._restorers.append(_restorer(module.get_rng_state_all(), module.set_rng_state_all))
        for generator in generators:
            self._restorers.append(_restorer(generator.get_state(), generator.set_state))
        self._restorers.append(_restorer(random.getstate(), random.setstate))
        if numpy := sys.modules.get("numpy.random"):
            self._restorers.append(_restorer(numpy.get_state(), numpy.set_state))

    def restore(self) -> None:
        for restore in self._restorers:
            restore()


def _restorer(state: Any, put_back: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: put_back(state)


def _device_modules() -> list[Any]:
    """`torch.cuda` and its like, once they are in use: asking them for their generators would start them."""
    modules = (getattr(torch, name, None) for name in ("cuda", "xpu", "npu"))
    return [
        module
        for module in modules
        if module is not None and hasattr(module, "get_rng_state_all") and getattr(module, "is_initialized", bool)()
    ]
