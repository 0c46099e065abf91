"""torch's pattern matcher: the pattern language and the `Match` that users' checks receive."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from graphex.torch_private.lookup import private

__all__ = [
    "Arg",
    "CallFunction",
    "ExclusiveKeywordArg",
    "FailedMatch",
    "Ignored",
    "KeywordArg",
    "ListOf",
    "Match",
    "MatchContext",
    "MultiOutputPattern",
    "OrderedSet",
    "PatternExpr",
    "fwd_only",
    "joint_fwd_bwd",
]


# -- lean_imports ------------------------------------------------------------------------------------------------------
# Inductor's pattern matcher without the rest of Inductor.
#
# Its module imports all of Inductor's code generators, for two functions that Inductor's own passes call while they
# match. Ours do not: the two are imported when they are first called, which takes most of a second off the first
# compile
# of a process.


MATCHER = "torch._inductor.pattern_matcher"
LATER = {
    "torch._inductor.lowering": "fallback_node_due_to_unsupported_type",
    "torch._inductor.decomposition": "select_decomp_table",
}
PATIENCE = 60.0  # seconds; the import takes one or two


def import_matcher() -> None:
    """Import it, the whole of Inductor with it where it wants more than we know of."""
    if sys.modules.keys().isdisjoint((MATCHER, *LATER)):  # else a thread that imports them now would wait for us
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


# -- patterns ----------------------------------------------------------------------------------------------------------


if TYPE_CHECKING:
    from torch._inductor.pattern_matcher import (
        Arg,
        CallFunction,
        ExclusiveKeywordArg,
        FailedMatch,
        Ignored,
        KeywordArg,
        ListOf,
        Match,
        MatchContext,
        MultiOutputPattern,
        PatternExpr,
        fwd_only,
        joint_fwd_bwd,
    )
    from torch.utils._ordered_set import OrderedSet
else:
    with suppress(ImportError):
        import_matcher()
    _NO_RULES = "no rule with a pattern matches"

    class _Unmatched(Exception):  # noqa: N818  # rules are built of it where they are imported; a match raises
        def __init__(self, *args, **kwargs):
            super().__init__()

    Arg = private("torch._inductor.pattern_matcher.Arg", _Unmatched, lost=_NO_RULES)
    CallFunction = private("torch._inductor.pattern_matcher.CallFunction", _Unmatched, lost=_NO_RULES)
    ExclusiveKeywordArg = private("torch._inductor.pattern_matcher.ExclusiveKeywordArg", _Unmatched, lost=_NO_RULES)
    FailedMatch = private("torch._inductor.pattern_matcher.FailedMatch", _Unmatched, lost=_NO_RULES)
    Ignored = private("torch._inductor.pattern_matcher.Ignored", _Unmatched, lost=_NO_RULES)
    KeywordArg = private("torch._inductor.pattern_matcher.KeywordArg", _Unmatched, lost=_NO_RULES)
    ListOf = private("torch._inductor.pattern_matcher.ListOf", _Unmatched, lost=_NO_RULES)
    Match = private("torch._inductor.pattern_matcher.Match", _Unmatched, lost=_NO_RULES)
    MatchContext = private("torch._inductor.pattern_matcher.MatchContext", _Unmatched, lost=_NO_RULES)
    MultiOutputPattern = private("torch._inductor.pattern_matcher.MultiOutputPattern", _Unmatched, lost=_NO_RULES)
    PatternExpr = private("torch._inductor.pattern_matcher.PatternExpr", _Unmatched, lost=_NO_RULES)
    fwd_only = private("torch._inductor.pattern_matcher.fwd_only", _Unmatched, lost=_NO_RULES)
    joint_fwd_bwd = private("torch._inductor.pattern_matcher.joint_fwd_bwd", _Unmatched, lost=_NO_RULES)
    OrderedSet = private("torch.utils._ordered_set.OrderedSet", _Unmatched, lost=_NO_RULES)
