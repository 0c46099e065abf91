"""Inductor's pattern matcher (`torch._inductor.pattern_matcher`), and the code that Inductor writes, without the rest.

The matcher's module imports all of Inductor's code generators, for two functions that only Inductor's own passes call.
So does the code that Inductor writes, for what few graphs of ours call: kernels of libraries, and the alignment of
planned memory. graphex imports both without them: for the length of that one import, stand-ins take the place of some
modules in `sys.modules`, and import the real ones when what they stand for is first used. This takes 0.9 s off the
first compilation of a process (0.01 s instead of 0.90 s, minimum of five runs, torch 2.13 on a CPU), and as much off
one that loads compiled regions. `GRAPHEX_LEAN_IMPORTS=off` switches it off.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

import torch

from graphex.env import lean_imports

T = TypeVar("T")
MATCHER = "torch._inductor.pattern_matcher"
LATER = {
    "torch._inductor.lowering": "fallback_node_due_to_unsupported_type",
    "torch._inductor.decomposition": "select_decomp_table",
}
LATER_IN_CODE = {
    "torch._inductor.select_algorithm": "extern_kernels",
    "torch._inductor.codegen.memory_planning": "_align",
    "torch._inductor.graph": "GraphLowering",
}
KERNELS = ("mm", "addmm", "bmm", "baddbmm", "convolution")  # of `extern_kernels`: functions of torch's
PATIENCE = 60.0  # seconds; the import takes one or two


def import_matcher() -> None:
    """Import the matcher, with all of Inductor where it needs more than `LATER` has."""
    is_new = sys.modules.keys().isdisjoint((MATCHER, *LATER))  # else a thread that imports them now would wait for us
    if is_new and lean_imports():
        with suppress(Exception), left_for_later():
            import_module(MATCHER)
    import_module(MATCHER)


def import_code(load: Callable[[], T]) -> T:
    """Call `load`, which imports code that Inductor wrote; with all of Inductor where that needs more."""
    if sys.modules.keys().isdisjoint(LATER_IN_CODE) and lean_imports():
        with suppress(Exception):
            with left_for_later(LATER_IN_CODE):
                return load()
    return load()


@contextmanager
def left_for_later(later: Mapping[str, str] | None = None) -> Iterator[None]:
    wanted = LATER if later is None else later
    stand_ins = {name: _StandIn(name, used) for name, used in wanted.items() if name not in sys.modules}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name, stand_in in stand_ins.items():
            del sys.modules[name]
            stand_in.is_gone.set()


class _StandIn(ModuleType):
    """A module that is imported once something of it is used. Until it is out of the way, only `later` can be.

    Another thread that imports Inductor meanwhile waits for that, but not for what the matcher imports: it may be
    importing that itself. Nor for what Python asks of every module.
    """

    def __init__(self, name: str, later: str) -> None:
        super().__init__(name)
        self.later, self.thread, self.is_gone = later, threading.get_ident(), threading.Event()

    def __getattr__(self, attribute: str) -> Any:
        if attribute == self.later:
            return _KNOWN.get(attribute, _Later)(self.__name__, attribute)
        if sys.modules.get(self.__name__) is self:
            is_ours = threading.get_ident() == self.thread or attribute.startswith("__")
            if is_ours or not self.is_gone.wait(PATIENCE):
                raise AttributeError(attribute)
        return getattr(import_module(self.__name__), attribute)


class _Later:
    """A function or a namespace of a module that is imported when it is used."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(self._module), self._name)(*args, **kwargs)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(getattr(import_module(self._module), self._name), attribute)


class _Kernels(_Later):
    """Inductor's namespace of libraries' kernels. It is imported for those that are not torch's."""

    def __init__(self, module: str, name: str) -> None:
        super().__init__(module, name)
        vars(self).update({kernel: getattr(torch, kernel) for kernel in KERNELS})


class _Lowering(_Later):
    """Inductor's `GraphLowering`, which is asked for a hook of tests: none can have been set before the import."""

    save_output_code = None


_KNOWN: dict[str, type[_Later]] = {"extern_kernels": _Kernels, "GraphLowering": _Lowering}
