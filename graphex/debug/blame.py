"""The blame for a mismatch that verification finds: the rules to leave out, or else the pass.

The passes run once more, on the graph as AOTAutograd gave it, without one rule or pass at a time. Everything else
stays. The graph that comes out is another version of the graph, with records of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch.fx import Graph, GraphModule

from graphex.config import CompilerConfig
from graphex.passes.pipeline import optimise
from graphex.records import Journal, Rewrote
from graphex.rewrite.runner import Runner
from graphex.torch_private.graphs import copy_module

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
