"""torch's pattern matcher: the pattern language and the `Match` that users' checks receive.

Importing this module loads Inductor, so it is imported where a rule is really tried.
"""

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
