"""Inductor's pattern matcher (`torch._inductor.pattern_matcher`) without the rest of Inductor.

The matcher's module imports all of Inductor's code generators, for two functions that only Inductor's own passes call.
graphex imports it without them: for the length of that one import, stand-ins take the place of two modules in
`sys.modules`, and import the real ones when one of the two functions is first called. This takes 0.9 s off the first
compilation of a process (0.01 s instead of 0.90 s, minimum of five runs, torch 2.13 on a CPU), and
`GRAPHEX_LEAN_IMPORTS=off` switches it off.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import ModuleType
from typing import Any

from graphex.env import lean_imports

MATCHER = "torch._inductor.pattern_matcher"
LATER = {
    "torch._inductor.lowering": "fallback_node_due_to_unsupported_type",
    "torch._inductor.decomposition": "select_decomp_table",
}
PATIENCE = 60.0  # seconds; the import takes one or two


def import_matcher() -> None:
    """Import the matcher, with all of Inductor where it needs more than `LATER` has."""
    is_new = sys.modules.keys().isdisjoint((MATCHER, *LATER))  # else a thread that imports them now would wait for us
    if is_new and lean_imports():
        with suppress(Exception), left_for_later():
            import_module(MATCHER)
    import_module(MATCHER)


@contextmanager
def left_for_later() -> Iterator[None]:
    stand_ins = {name: _StandIn(name) for name in LATER if name not in sys.modules}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name, stand_in in stand_ins.items():
            del sys.modules[name]
            stand_in.is_gone.set()


class _StandIn(ModuleType):
    """A module that is imported once something of it is used. Until it is out of the way, only `LATER` can be.

    Another thread that imports Inductor meanwhile waits for that, but not for what the matcher imports: it may be
    importing that itself. Nor for what Python asks of every module.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.thread, self.is_gone = threading.get_ident(), threading.Event()

    def __getattr__(self, attribute: str) -> Any:
        if attribute == LATER[self.__name__]:
            return _called_later(self.__name__, attribute)
        if sys.modules.get(self.__name__) is self:
            is_ours = threading.get_ident() == self.thread or attribute.startswith("__")
            if is_ours or not self.is_gone.wait(PATIENCE):
                raise AttributeError(attribute)
        return getattr(import_module(self.__name__), attribute)


def _called_later(module: str, function: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(module), function)(*args, **kwargs)

    return call
