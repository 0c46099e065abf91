"""torch's pattern matcher (`torch._inductor.pattern_matcher`): the pattern language, and the `Match` of users' checks.

Without these names no rule with a pattern matches, and the journal says so. `inductor` imports the module.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from graphex.torch_private.inductor import import_matcher
from graphex.torch_private.lookup import private

if TYPE_CHECKING:
    from torch._inductor.pattern_matcher import CallFunction as CallFunction
    from torch._inductor.pattern_matcher import FailedMatch as FailedMatch
    from torch._inductor.pattern_matcher import Ignored as Ignored
    from torch._inductor.pattern_matcher import KeywordArg as KeywordArg
    from torch._inductor.pattern_matcher import Match as Match
    from torch._inductor.pattern_matcher import MatchContext as MatchContext
    from torch._inductor.pattern_matcher import MultiOutputPattern as MultiOutputPattern
    from torch._inductor.pattern_matcher import PatternExpr as PatternExpr
    from torch._inductor.pattern_matcher import fwd_only as fwd_only
    from torch._inductor.pattern_matcher import joint_fwd_bwd as joint_fwd_bwd
    from torch.utils._ordered_set import OrderedSet as OrderedSet
else:
    with suppress(ImportError):
        import_matcher()
    _NO_RULES = "no rule with a pattern matches"

    class _Unmatched(Exception):  # noqa: N818  # rules are built of it where they are imported; a match raises
        def __init__(self, *args, **kwargs):
            super().__init__()

    CallFunction = private("torch._inductor.pattern_matcher.CallFunction", _Unmatched, lost=_NO_RULES)
    FailedMatch = private("torch._inductor.pattern_matcher.FailedMatch", _Unmatched, lost=_NO_RULES)
    Ignored = private("torch._inductor.pattern_matcher.Ignored", _Unmatched, lost=_NO_RULES)
    KeywordArg = private("torch._inductor.pattern_matcher.KeywordArg", _Unmatched, lost=_NO_RULES)
    Match = private("torch._inductor.pattern_matcher.Match", _Unmatched, lost=_NO_RULES)
    MatchContext = private("torch._inductor.pattern_matcher.MatchContext", _Unmatched, lost=_NO_RULES)
    MultiOutputPattern = private("torch._inductor.pattern_matcher.MultiOutputPattern", _Unmatched, lost=_NO_RULES)
    PatternExpr = private("torch._inductor.pattern_matcher.PatternExpr", _Unmatched, lost=_NO_RULES)
    fwd_only = private("torch._inductor.pattern_matcher.fwd_only", _Unmatched, lost=_NO_RULES)
    joint_fwd_bwd = private("torch._inductor.pattern_matcher.joint_fwd_bwd", _Unmatched, lost=_NO_RULES)
    OrderedSet = private("torch.utils._ordered_set.OrderedSet", _Unmatched, lost=_NO_RULES)
