"""verify=True: on a graph's first call, run it as AOTAutograd gave it and as it is now, and compare.

Both are measured against a float64 run where the ops allow it. On a mismatch the passes are replayed one by one to
find the first that broke the graph, and a script that shows the difference is written. The rules of that pass that are
wrong, or else the pass, are left out, and the version of the graph without them is verified and runs from then on:
for each try the passes run once more, on the graph as AOTAutograd gave it, without one rule or pass. Where the graph
cannot do without the pass, the graph before it runs.

A pass with `preserves_results = False` becomes part of the reference: the graphs before and after it are verified
separately.

In this order: what to leave out, verification, the float64 reference, the state of the random number generators.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node

from graphex.analysis import Aliases, is_collective, is_random
from graphex.analysis.aliasing import REGENERATED
from graphex.analysis.effects import UNINITIALISED, operator_of, region_of
from graphex.config import CompilerConfig
from graphex.debug.files import write_repro
from graphex.debug.tensors import clone_together, difference, sharing
from graphex.device import runtimes_in_use
from graphex.errors import one_line
from graphex.passes.pipeline import optimise
from graphex.records import Journal, Rewrote, RuleTried, Verified
from graphex.rewrite.runner import Runner
from graphex.runtime.buffers import KeptValues
from graphex.runtime.codegen import Boxed, generate
from graphex.runtime.executable import build_executable, interpreted, written_constants
from graphex.runtime.program import Around, Eager, ExecutableGraph, Program
from graphex.torch_private.dynamo import is_transformed
from graphex.torch_private.graphs import copy_module
from graphex.torch_private.symbolic import hint_of, pytree

aten = torch.ops.aten

# -- what to leave out after a mismatch --------------------------------------------------------------------------------


MOST_RULES = 16  # of one pass, that are tried one by one


@dataclass(frozen=True)
class LeftOut:
    """Rules or passes by their names."""

    rules: tuple[str, ...] = ()
    passes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """``rule 'mine'``, ``pass 'add_streams'``"""
        parts = []
        for word, names in (("rule", self.rules), ("pass", self.passes)):
            if names:
                plural = word if len(names) == 1 else {"rule": "rules", "pass": "passes"}[word]
                parts.append(f"{plural} {', '.join(map(repr, names))}")
        return " and ".join(parts)


@dataclass(frozen=True)
class Version:
    """A graph after its passes, without some of them; `functional` is how it stood before the memory stage."""

    runner: Runner
    functional: Graph
    without: LeftOut


def what_to_leave_out(
    original: GraphModule, runner: Runner, pass_name: str, blamed: Callable[[Runner], str]
) -> LeftOut | None:
    """The rules of a pass that are wrong, or the pass; None where the graph cannot do without it.

    `blamed` names the pass that breaks the graph of a runner, or is empty.
    """
    journal = runner.compilation.journal
    made = [record.rule for record in journal.of_graph(runner.graph_name).of(Rewrote) if record.pass_name == pass_name]
    rules = list(dict.fromkeys(made))
    if rules and len(rules) <= MOST_RULES:
        wrong = [rule for rule in rules if len(rules) == 1 or _is_wrong_alone(original, runner, rules, rule, blamed)]
        found = LeftOut(tuple(wrong))
        if wrong and blamed(run_without(original, runner, found, journal=Journal()).runner) != pass_name:
            return found
    step = next((step for step in runner.steps if step.graph_pass.name == pass_name), None)
    return None if step is None or step.graph_pass.is_needed else LeftOut(passes=(pass_name,))


def _is_wrong_alone(
    original: GraphModule, runner: Runner, rules: list[str], rule: str, blamed: Callable[[Runner], str]
) -> bool:
    others = LeftOut(tuple(other for other in rules if other != rule))
    return bool(blamed(run_without(original, runner, others, journal=Journal()).runner))


def run_without(original: GraphModule, runner: Runner, out: LeftOut, journal: Journal | None = None) -> Version:
    """Take the original graph through the passes again. Its records go to the journal of the graph, or to another."""
    before = runner.compilation
    config = CompilerConfig(**before.config.given())
    config.disable_rules = (*before.config.disable_rules, *out.rules)
    config.disable_passes = (*before.config.disable_passes, *out.passes)
    journal = before.journal if journal is None else journal
    compilation = replace(before, config=config.frozen(), journal=journal)
    name = journal.name_version(runner.graph_name, f"without {out}")
    again = Runner(compilation, name, copy_module(original), runner.example_inputs, runner.phase)
    functional = optimise(again)
    return Version(again, functional, out)


# -- verification ------------------------------------------------------------------------------------------------------


CODE_GENERATION = "code generation"
MOST_CULPRITS = 8  # that are left out of one graph
_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
_BITS = frozenset({torch.ops.aten.view.dtype})  # the bytes of a float64 mean something else


@dataclass(frozen=True)
class Snapshot:
    """The graph after one pass (or before all of them)."""

    gm: GraphModule
    pass_name: str
    preserves_results: bool = True


@dataclass(frozen=True)
class RunOutcome:
    outputs: list[Any]
    inputs: list[Any]
    sharing: list[str]


@dataclass(frozen=True)
class Verdict:
    """`problem` is empty if the graphs agree; `reference` says what they were measured against."""

    problem: str
    error: float
    reference: str
    not_compared: tuple[str, ...] = ()


class Verifying(Around):
    """A layer that verifies the first call. After that it is `program`, or the program that verification left."""

    def __init__(self, original: GraphModule, runner: Runner, graph: ExecutableGraph, program: Program) -> None:
        super().__init__(program)
        self._original, self._runner, self._graph = original, runner, graph
        self._is_settled = False

    def __call__(self, args: list[Any]) -> Any:
        if not self._is_settled and not is_transformed():  # else the next call that has tensors to compare is verified
            self._program = _Verification(self._original, self._runner, args).settle(self._program, self._use)
            self._is_settled = True
        return self._program(args)

    def replayed(self, args: tuple[Any, ...], *, seen: frozenset[int] | None = None) -> Any:
        return self._program.replayed(args, seen=seen) if self._is_settled else None

    def replayed_from(self, kept: KeptValues, args: list[Any]) -> Any:
        return self._program.replayed_from(kept, args) if self._is_settled else None

    def _use(self, gm: GraphModule, functional: Graph) -> Program:
        if self._graph.functional is not None:
            self._graph.functional.use(gm, functional)
        if history := self._graph.compilation.journal.history:
            history.drop_code(self._graph.name)
        return build_executable(replace(self._graph, gm=gm, streams=None))


Use = Callable[[GraphModule, Graph], Program]
"""Build a program from a graph, given how it stood before the memory stage."""


@dataclass(frozen=True)
class Finding:
    """The result of comparing all segments; `place` is the first wrong version in `segment`, None if none is.

    A place one past the end of the segment means that the generated code is wrong.
    """

    verdict: Verdict
    segment: list[Snapshot]
    place: int | None

    @property
    def blamed(self) -> str:
        """The pass that broke the graph."""
        if self.place is None:
            return ""
        return self.segment[self.place].pass_name if self.place < len(self.segment) else CODE_GENERATION


class _Verification:
    def __init__(self, original: GraphModule, runner: Runner, args: list[Any]) -> None:
        self.runner = runner
        self.args = args
        self.snapshots = _snapshots(original, runner)
        self.state = RandomState(value for value in args if isinstance(value, torch.Generator))
        self.constants = written_constants(original)
        self.made_again = original.graph.output_node().meta.get(REGENERATED, {})  # outputs that no caller sees

    def settle(self, executable: Program, use: Use) -> Program:
        """The executable to use from now on. Random numbers go on from where they were before."""
        if reason := why_not_verified(self.snapshots[0].gm):
            self._record("refused", reason)
            return executable
        try:
            found = self.examine()
            if found.place is not None:
                return self._without_the_culprit(found, use)
            unknown = found.verdict.not_compared
            said = f"not compared: {'; '.join(unknown)}" if unknown else ""
            self._record("equal", said, reference=found.verdict.reference, worst_error=found.verdict.error)
            return executable
        finally:
            self.state.restore()

    def examine(self) -> Finding:
        """Compare the ends of every segment; the first that differs is the finding."""
        worst, references, unknown = 0.0, set(), dict[str, None]()
        segments = _segments(self.snapshots)
        for segment in segments:
            verdict, culprit = self._check(segment, compiled=segment[-1] is self.snapshots[-1])
            references.add(verdict.reference)
            unknown.update(dict.fromkeys(verdict.not_compared))
            worst = max(worst, verdict.error)
            if culprit is not None:
                return Finding(verdict, segment, culprit)
        return Finding(Verdict("", worst, ", ".join(sorted(references)), tuple(unknown)), segments[-1], None)

    def _check(self, segment: list[Snapshot], *, compiled: bool) -> tuple[Verdict, int | None]:
        """Compare the ends of a segment; on a mismatch find the first version that is wrong.

        The number returned is its place in the segment; one past the end blames the generated code.
        """
        reference = self._run(interpreted(segment[0].gm))
        exact, exact_inputs, why = run_in_float64(segment[0].gm, clone_together(self.args))
        said = "float64" if exact is not None else f"the original graph ({why})"
        terms = _added_up(segment[0].gm) if any(map(_has_regions, (each.gm for each in segment))) else 1

        def verdict(run: Boxed) -> Verdict:
            try:
                found = self._run(run)
            except Exception as error:  # a broken graph may fail in any way
                return Verdict(f"it fails with {one_line(error)}", float("inf"), said)
            return _compare(found, reference, exact, exact_inputs, said, terms)

        last = generate(segment[-1].gm).function() if compiled else interpreted(segment[-1].gm)
        final = verdict(last)
        if not final.problem:
            return final, None
        for place, version in enumerate(segment[1:], start=1):
            found = verdict(interpreted(version.gm))
            if found.problem:
                return found, place
        return final, len(segment)

    def _run(self, run: Boxed) -> RunOutcome:
        """Run on copies of the inputs, from the same random state each time."""
        inputs = clone_together(self.args)
        saved = [constant.clone() for constant in self.constants]
        self.state.restore()
        with torch.no_grad():
            try:
                outputs = pytree.tree_leaves(run(list(inputs)))
                left = [constant.clone() for constant in self.constants]
            finally:
                for constant, value in zip(self.constants, saved, strict=True):
                    constant.copy_(value)
        seen = [None if place in self.made_again else value for place, value in enumerate(outputs)]
        return RunOutcome(outputs, inputs + left, sharing(seen, inputs + self.constants))

    def _without_the_culprit(self, found: Finding, use: Use) -> Program:
        """Leave out what is wrong until the rest is right; the program of the rest."""
        verification = self
        for _ in range(MOST_CULPRITS):
            version = verification._blame(found)
            if version is None:
                break
            verification = _Verification(self.snapshots[0].gm, version.runner, self.args)
            verification.state = self.state
            found = verification.examine()
            if found.place is None:
                return use(version.runner.gm, version.functional)
        else:
            verification._report(found, None)
        assert found.place is not None
        before = found.segment[found.place - 1].gm
        return Eager(interpreted(before)) if found.blamed == CODE_GENERATION else use(before, before.graph)

    def _blame(self, found: Finding) -> Version | None:
        """Record the rule or pass to blame; the graph without it, None where it cannot be left out."""
        version = None
        if found.blamed != CODE_GENERATION:
            try:
                version = self._version_without(found.blamed)
            except Exception as error:  # a user's pass or rule may fail without another
                self.runner.compilation.fall_back(self.runner.graph_name, "nothing can be left out", error)
        self._report(found, version)
        return version

    def _version_without(self, pass_name: str) -> Version | None:
        original = self.snapshots[0].gm

        def blamed(runner: Runner) -> str:
            other = _Verification(original, runner, self.args)
            other.state = self.state
            return other.examine().blamed

        out = what_to_leave_out(original, self.runner, pass_name, blamed)
        return None if out is None else run_without(original, self.runner, out)

    def _report(self, found: Finding, version: Version | None) -> None:
        """Write the script, the verdict, and what runs from now on."""
        verdict, place = found.verdict, found.place or 0
        rules, runs = (version.without.rules, version.runner.graph_name) if version is not None else ((), "")
        record = Verified(
            self.runner.graph_name,
            "mismatch",
            verdict.problem,
            found.blamed,
            verdict.reference,
            verdict.error,
            rules=rules,
            runs=runs,
        )
        before, after = found.segment[place - 1].gm, found.segment[min(place, len(found.segment) - 1)].gm
        self.state.restore()
        try:
            script = str(write_repro(record, before, after, self.args, self.runner.compilation.files))
            way = f"Run {script} to see it"
        except Exception as error:  # no place to write to, for one: what matters is what runs from now on
            script, way = "", f"No script shows it: {one_line(error)}"
        self.runner.compilation.journal.add(replace(record, repro=script))
        self._count_left_out(rules, runs, verdict.problem)
        what = f"verification rolled back to the graph before '{found.blamed}'"
        if version is not None:
            what = f"verification left out {version.without} and kept everything else"
        self.runner.compilation.fall_back(self.runner.graph_name, what, f"{verdict.problem}. {way}")

    def _count_left_out(self, rules: tuple[str, ...], runs: str, problem: str) -> None:
        """Say of rules that are left out of the graph that runs that they apply nowhere, and why."""
        journal = self.runner.compilation.journal
        for tried in journal.of(RuleTried):
            if tried.graph == self.runner.graph_name and tried.rule in rules:
                remark = f"verification left it out: {problem}"
                journal.add(replace(tried, graph=runs, matches=0, remark=remark))

    def _record(self, status: str, reason: str, reference: str = "", worst_error: float = 0.0) -> None:
        record = Verified(self.runner.graph_name, status, reason, "", reference, worst_error)
        self.runner.compilation.journal.add(record)


def why_not_verified(gm: GraphModule) -> str:
    """Why a graph cannot be run a second time; empty if it can."""
    for node in gm.graph.nodes:
        if is_collective(node):
            return f"'{node.name}' communicates with other processes"
        if isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() == "with_effects":
            return f"'{node.name}' has an effect that must happen once"
    return _why_not_comparable(gm)


def _why_not_comparable(gm: GraphModule) -> str:
    """Why two runs may differ: uninitialised memory has other contents every time. Empty: they may not."""
    aliases = Aliases(gm.graph)
    for node in gm.graph.nodes:
        op = operator_of(node)
        if op is None or op._schema.name not in UNINITIALISED:
            continue
        if aliases.reaches_output(node) and not aliases.is_written(node):
            return f"'{node.name}' returns memory that was never written"
    return ""


def _snapshots(original: GraphModule, runner: Runner) -> list[Snapshot]:
    """The graph before the first pass that changed it, and after each of them."""
    snapshots = [Snapshot(original, "")]
    after = [step.before for step in runner.steps[1:]] + [runner.gm]
    for step, gm in zip(runner.steps, after, strict=False):
        snapshots.append(Snapshot(gm, step.graph_pass.name, step.graph_pass.preserves_results))
    return snapshots


_SUMS = (  # and ops with torch's tag for reductions
    *(aten.native_layer_norm, aten.native_layer_norm_backward, aten.native_group_norm, aten.native_group_norm_backward),
    *(aten._native_batch_norm_legit_functional, aten.native_batch_norm_backward),
)


def _segments(snapshots: list[Snapshot]) -> list[list[Snapshot]]:
    """The snapshots, cut where a pass changes results on purpose: each segment computes the same from end to end."""
    segments: list[list[Snapshot]] = [[]]
    for snapshot in snapshots:
        if not snapshot.preserves_results:
            segments.append([])
        segments[-1].append(snapshot)
    return [segment for segment in segments if segment]


def _has_regions(gm: GraphModule) -> bool:
    return any(region_of(node) is not None for node in gm.graph.nodes)


def _added_up(gm: GraphModule) -> int:
    """The most values that one op of a graph adds up. Regions add them one after the other, where eager adds pairs."""
    return max((_terms(node) for node in gm.graph.nodes if _adds(node)), default=1)


def _adds(node: Node) -> bool:
    op = operator_of(node)
    return op is not None and (torch.Tag.reduction in op.tags or op.overloadpacket in _SUMS)


def _terms(node: Node) -> int:
    """How many values of the largest argument there are for each of the smallest result."""
    given, made = ([value.numel() for value in _tensors(each)] for each in (node.all_input_nodes, [node]))
    return max(1, *(hint_of(size, 1) for size in given)) // max(1, min((hint_of(size, 1) for size in made), default=1))


def _tensors(nodes: Iterable[Node]) -> list[Tensor]:
    values = pytree.tree_leaves([node.meta.get("val") for node in nodes])
    return [value for value in values if isinstance(value, Tensor)]


def _compare(
    found: RunOutcome, reference: RunOutcome, exact: list[Any] | None, exact_inputs: list[Any], said: str, terms: int
) -> Verdict:
    if len(found.outputs) != len(reference.outputs):
        return Verdict(f"{len(found.outputs)} outputs instead of {len(reference.outputs)}", 0.0, said)
    worst, unknown = 0.0, []
    groups = (
        ("output", found.outputs, reference.outputs, exact),
        ("input", found.inputs, reference.inputs, exact_inputs if exact is not None else None),
    )
    for what, ours, theirs, truth in groups:
        for index, (mine, original) in enumerate(zip(ours, theirs, strict=True)):
            true = truth[index] if truth is not None and index < len(truth) else None
            problem, error = difference(mine, original, true, terms)
            state = "" if what == "output" else ", as the graph leaves it"
            if error != error:
                unknown.append(f"{what} {index} ({problem})")
                continue
            worst = max(worst, error)
            if problem:
                return Verdict(f"{what} {index}{state}: {problem}", error, said)
    if found.sharing != reference.sharing:
        return Verdict(f"outputs share memory as {found.sharing} instead of {reference.sharing}", worst, said)
    return Verdict("", worst, said, tuple(unknown))


# -- float64 -----------------------------------------------------------------------------------------------------------


class NotInFloat64Error(Exception):
    """The graph has something that cannot, or must not, be run in float64."""


def _grouped_mm(
    x: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Groups of rows of x [T, K], which end at `offs`, each with its own matrix of weight [G, K, N]."""
    if x.dim() != 2 or weight.dim() != 3 or offs is None or bias is not None:
        raise NotInFloat64Error("a grouped product is not one of groups of rows")
    found, start = x.new_zeros((x.shape[0], weight.shape[2])), 0
    for matrix, end in zip(weight, offs.tolist(), strict=True):
        found[start:end] = x[start:end] @ matrix
        start = end
    return found


_WITHOUT_FLOAT64 = {torch.ops.aten._grouped_mm.default: _grouped_mm}


class _Wide(Interpreter):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in _BITS:
            raise NotInFloat64Error(f"{target} looks at bits")
        args, kwargs = pytree.tree_map(
            lambda value: _WIDE.get(value, value) if _is_dtype(value) else value, (args, kwargs)
        )
        return super().call_function(_WITHOUT_FLOAT64.get(target, target), args, kwargs)

    def fetch_attr(self, target: str) -> Any:
        return _widen(super().fetch_attr(target))


def run_in_float64(gm: GraphModule, args: list[Any]) -> tuple[list[Any] | None, list[Any], str]:
    """(outputs, inputs as the graph left them, why not): outputs are None if the graph cannot be run in float64."""
    if any(is_random(node) for node in gm.graph.nodes):
        return None, [], "random numbers differ between types"
    wide = [_widen(value) for value in args]
    try:
        with torch.no_grad():
            result = _Wide(gm).run(*wide)
    except Exception as error:  # any op may lack a float64 kernel
        return None, [], f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return pytree.tree_leaves(result), wide, ""


def _is_dtype(value: Any) -> bool:
    return isinstance(value, torch.dtype)


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in _WIDE:
        return value.detach().to(_WIDE[value.dtype])
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


# -- random state ------------------------------------------------------------------------------------------------------


class RandomState:
    """The states of torch's generators (CPU and devices), Python's, NumPy's and the user's."""

    def __init__(self, generators: Iterable[torch.Generator]) -> None:
        self._saved: list[tuple[Callable[[Any], Any], Any]] = [(torch.set_rng_state, torch.get_rng_state())]
        for module in _device_modules():
            self._saved.append((module.set_rng_state_all, module.get_rng_state_all()))
        for generator in generators:
            self._saved.append((generator.set_state, generator.get_state()))
        self._saved.append((random.setstate, random.getstate()))
        if numpy := sys.modules.get("numpy.random"):
            self._saved.append((numpy.set_state, numpy.get_state()))

    def restore(self) -> None:
        for put_back, state in self._saved:
            put_back(state)


def _device_modules() -> list[Any]:
    """`torch.cuda` and its like, once they are in use: asking them for their generators would start them."""
    return [module for module in runtimes_in_use().values() if hasattr(module, "get_rng_state_all")]
