"""The stages a graph goes through, in order, in one place.

    pre    the user's passes, before ours
    place  scopes, records and waits become metadata and events (again after post)
    clean  no-ops, redundant casts, dead code
    lift   idioms of plain PyTorch become named ops
    unify  common subexpressions (after lift: it would give the inside of an idiom further users)
    fuse   named ops become fused ops, a user's rules first
    post   the user's passes, after ours
    memory inputs are written in place again; the graph is not functional from here on. Rules that need a write in place
           run next. After `region`, parts of a cat are computed in place, dead intermediates are written over, small
           writes are joined
    region what is left is compiled by Inductor: after the writes, which stay outside, are known
    tidy   dead code that the stages before have left
    streams
           events are added where one stream uses what another makes; races are refused

The joint graph of a training step goes through the passes that ask for it (`stage = "joint"`) before it is
partitioned into the forward and backward graphs, which then take the path above, each for itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Graph

from graphex.analysis import Aliases
from graphex.analysis.effects import inlined
from graphex.analysis.memory import predicted_peak
from graphex.config import AnyRule, CompilerConfig, CustomPass
from graphex.errors import OptionError, RuleError, did_you_mean
from graphex.fusion.rules import users_rules
from graphex.passes.clean import MergeCommonSubexpressions, RemoveDeadCode, RemoveNoops, RemoveRedundantCopies
from graphex.passes.experts import LiftExperts
from graphex.passes.fuse import FuseJointPatterns, FusePatterns, JoinWrites, LiftAttention, LiftIdioms
from graphex.passes.input_reinplace import RestoreInputWrites
from graphex.passes.place import PlaceNodes
from graphex.passes.projections import FoldGates, FoldProjections
from graphex.passes.reinplace import ReuseDeadMemory, WritePartsOfCat
from graphex.passes.rotary_attention import JoinRotaryAndAttention
from graphex.passes.rotary_write import WriteRotaryToCache
from graphex.passes.routers import JoinRouters, LiftRouters
from graphex.passes.streams import CheckDeadlocks, PlaceBranches, ScheduleStreams
from graphex.records import MemoryPredicted
from graphex.regions.members import is_op
from graphex.regions.stage import CompileRegions
from graphex.rewrite.adapter import as_graph_pass
from graphex.rewrite.base import GraphPass
from graphex.rewrite.runner import Runner

Stages = tuple[tuple[str, GraphPass], ...]


def _stage(name: str, *passes: GraphPass) -> Stages:
    return tuple((name, graph_pass) for graph_pass in passes)


OURS: Stages = (
    *_stage("joint", FuseJointPatterns()),
    *_stage("place", PlaceNodes()),
    *_stage("clean", RemoveNoops(), RemoveRedundantCopies(), RemoveDeadCode()),
    # Experts come before what is inside of them.
    *_stage("lift", LiftAttention(), LiftExperts(), LiftRouters(), LiftIdioms()),
    *_stage("unify", MergeCommonSubexpressions()),
    # Projections are folded before a residual add joins the norm behind it.
    *_stage("fuse", FoldProjections(), FoldGates(), FusePatterns(), JoinRouters()),
)
LAST: Stages = (
    *_stage("place", PlaceNodes()),
    *_stage("memory", RestoreInputWrites(), WriteRotaryToCache(), JoinRotaryAndAttention()),
    *_stage("region", CompileRegions()),
    *_stage("memory", WritePartsOfCat(), ReuseDeadMemory(), JoinWrites()),
    *_stage("tidy", RemoveDeadCode()),
    *_stage("streams", ScheduleStreams(), CheckDeadlocks()),
)
AUTOMATIC: Stages = _stage("place", PlaceBranches())  # for a second version of the graph


def optimise(runner: Runner) -> Graph:
    """Take a forward, backward or inference graph through every stage.

    Returns the graph as it stood before the memory stage, which is functional.
    """
    config = runner.compilation.config
    peak_as_given = predicted_peak(runner.gm.graph, runner.aliases)
    for stage, graph_pass in stages(config, last=False):
        runner.run(stage, graph_pass)
    functional = runner.snapshot()
    for stage, graph_pass in stages(config, first=False):
        runner.run(stage, graph_pass)
    runner.compilation.journal.add(MemoryPredicted(runner.graph_name, peak_as_given, _peak_now(runner)))
    return functional


def _peak_now(runner: Runner) -> int:
    """The predicted peak after all passes. A region frees what it was given after its last use, as a graph does."""
    plain = inlined(runner.gm)
    return predicted_peak(plain.graph, runner.aliases if plain is runner.gm else Aliases(plain.graph))


def optimise_joint(runner: Runner) -> None:
    """Take a joint graph through the passes that ask for it."""
    for stage, graph_pass in stages(runner.compilation.config, joint=True):
        runner.run(stage, graph_pass)


def put_on_two_streams(runner: Runner) -> None:
    """Take a graph, as it stands before the memory stage, through the rest with its branches placed."""
    for stage, graph_pass in (*AUTOMATIC, *stages(runner.compilation.config, first=False)):
        runner.run(stage, graph_pass)


def stages(
    config: CompilerConfig, *, joint: bool = False, first: bool = True, last: bool = True
) -> Iterator[tuple[str, GraphPass]]:
    """(stage, pass) pairs in the order they run: those before the memory stage, those from there on, or all."""
    pre, post = config.post_grad_custom_pre_pass, config.post_grad_custom_post_pass
    everything = [*_users("pre", pre), *OURS, *_users("post", post)] if first else []
    for stage, graph_pass in (*everything, *(LAST if last else ())):
        if graph_pass.enabled(config) and (graph_pass.stage == "joint") == joint:
            yield ("joint" if joint else stage), graph_pass  # a user's own may ask for it too


def check_names(config: CompilerConfig) -> None:
    """Refuse names in `disable_passes`, `disable_rules` and `regions_keep_out` that nothing answers to."""
    for option, known in (("disable_passes", pass_names), ("disable_rules", rule_names)):
        names = known(config) if getattr(config, option) else set()  # all families of rules are loaded for their names
        for name in getattr(config, option):
            if name not in names:
                hint = did_you_mean(name, names, f"`graphex {option.removeprefix('disable_')}` lists them")
                raise OptionError(f"option '{option}' names '{name}', which does not exist ({hint}).")
    named = [rule.name for rule in users_rules(config) if _is_named(rule)]
    ours = {rule for _, each in (*OURS, *LAST, *AUTOMATIC) for rule in each.rules()} if named else set()
    for name in named:
        if name in ours:
            raise RuleError(f"your rule '{name}' has the name of a rule of graphex's own. Give it another name.")
    for name in config.regions_keep_out:
        if not is_op(name):
            raise OptionError(
                f"option 'regions_keep_out' names '{name}', which is no op; names are those of torch.ops, such as "
                "'aten.mul' or 'aten.mul.Tensor'."
            )


def _is_named(rule: AnyRule) -> bool:
    """Whether a user has named the rule, which has the name of its search function otherwise."""
    return rule.name != getattr(getattr(rule, "search", None), "__name__", rule.name)


def pass_names(config: CompilerConfig) -> set[str]:
    return {graph_pass.name for graph_pass in _passes(config)}


def rule_names(config: CompilerConfig) -> set[str]:
    """The rules that there are with this configuration: ours and the user's."""
    return {rule for graph_pass in _passes(config) for rule in graph_pass.rules()} | {
        rule.name for rule in users_rules(config)
    }


def _passes(config: CompilerConfig) -> list[GraphPass]:
    users = [as_graph_pass(p) for p in (*config.post_grad_custom_pre_pass, *config.post_grad_custom_post_pass)]
    return [graph_pass for _, graph_pass in (*OURS, *LAST, *AUTOMATIC)] + users


def _users(stage: str, passes: tuple[CustomPass, ...]) -> list[tuple[str, GraphPass]]:
    return [(stage, as_graph_pass(custom)) for custom in passes]
