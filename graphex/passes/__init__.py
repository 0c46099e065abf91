"""Graph passes: one per file, each a class with one `apply`.

`base` says what a pass is, `adapter` turns every form a user may write into one, `metadata` repairs what foreign code
leaves behind. `noop`, `copies`, `cse` and `dce` are the clean passes.
"""

from graphex.passes.cat import WritePartsOfCat
from graphex.passes.clean import MergeCommonSubexpressions, RemoveDeadCode, RemoveRedundantCopies
from graphex.passes.fuse import FuseJointPatterns, FusePatterns, LiftAttention, LiftIdioms
from graphex.passes.input_reinplace import RestoreInputWrites
from graphex.passes.noop import RemoveNoops
from graphex.passes.place import PlaceNodes
from graphex.passes.projections import FoldGates, FoldProjections
from graphex.passes.reinplace import ReuseDeadMemory
from graphex.passes.rotary_attention import JoinRotaryAndAttention
from graphex.passes.rotary_write import WriteRotaryToCache
from graphex.passes.streams import CheckDeadlocks, PlaceBranches, ScheduleStreams
from graphex.rewrite.base import GraphPass, Refusal, Work

__all__ = [
    "CheckDeadlocks",
    "FoldGates",
    "FoldProjections",
    "FuseJointPatterns",
    "FusePatterns",
    "GraphPass",
    "JoinRotaryAndAttention",
    "LiftAttention",
    "LiftIdioms",
    "MergeCommonSubexpressions",
    "PlaceBranches",
    "PlaceNodes",
    "Refusal",
    "RemoveDeadCode",
    "RemoveNoops",
    "RemoveRedundantCopies",
    "RestoreInputWrites",
    "ReuseDeadMemory",
    "ScheduleStreams",
    "Work",
    "WritePartsOfCat",
    "WriteRotaryToCache",
]
