"""torch's pattern matcher: the pattern language and the `Match` that users' checks receive."""

from graphex.torch_private.lean_imports import import_matcher

import_matcher()

from torch._inductor.pattern_matcher import (  # noqa: E402
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
from torch.utils._ordered_set import OrderedSet  # noqa: E402

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
