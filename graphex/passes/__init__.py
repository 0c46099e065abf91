"""The graph passes, each a class with one `apply`. `pipeline` has their order; read it first.

    place, torch_streams                     scopes, records, waits and torch's streams become metadata and events
    noop, clean                              no-ops, redundant copies, dead code, common subexpressions
    fuse                                     lift idioms to named ops, fuse named ops; `graphex.fusion` has the rules
    experts, routers                         mixtures of experts as one op, and the choice of experts as another
    projections, projection_plans            linear layers of few rows, with the norms and gates around them
    cat                                      the parts of a concatenation are computed where they belong
    updates, input_reinplace, reinplace      inputs, then dead intermediate values, are written in place again
    rotary_write, rotary_attention           late rules that need a proven write in place: rotary embedding and cache
    streams                                  events between streams, deadlocks, branches for a second stream

`graphex.rewrite` says what a pass is; `partition` is the deprecated name of a module there.
"""

from graphex.passes.cat import WritePartsOfCat
from graphex.passes.clean import MergeCommonSubexpressions, RemoveDeadCode, RemoveRedundantCopies
from graphex.passes.experts import LiftExperts
from graphex.passes.fuse import FuseJointPatterns, FusePatterns, LiftAttention, LiftIdioms
from graphex.passes.input_reinplace import RestoreInputWrites
from graphex.passes.noop import RemoveNoops
from graphex.passes.place import PlaceNodes
from graphex.passes.projections import FoldGates, FoldProjections
from graphex.passes.reinplace import ReuseDeadMemory
from graphex.passes.rotary_attention import JoinRotaryAndAttention
from graphex.passes.rotary_write import WriteRotaryToCache
from graphex.passes.routers import LiftRouters
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
    "LiftExperts",
    "LiftIdioms",
    "LiftRouters",
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
