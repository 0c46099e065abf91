"""The sealed runner: everything that happens around a pass, the same for all passes.

For every pass: time it, check the graph it left, give new nodes their metadata, record what changed, log and dump the
graph. A pass of ours that raises, or leaves a broken graph, is undone and reported; a user's pass that does stops
compilation with its name (or is undone too, with `strict=False`).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePath
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from graphex.analysis import Aliases, known_true, node_line
from graphex.analysis.graphs import raised_in, text_of, value_key
from graphex.analysis.happens_before import moved_across_a_write, stamp_order
from graphex.errors import PassError, RuleError, StreamError, one_line
from graphex.records import PassRan, Record
from graphex.rewrite.base import GraphPass, Work
from graphex.rewrite.compilation import Compilation, readable
from graphex.rewrite.metadata import PassWatch, repair
from graphex.torch_private.dynamo import TensorifyScalarRestartAnalysis
from graphex.torch_private.graphs import copy_graph, graph_module, set_graph, write_code
from graphex.torch_private.symbolic import pytree

# -- interface ---------------------------------------------------------------------------------------------------------


# A pass has to leave a well-formed graph that takes and returns what it took and returned before.


MAY_NOT = "A pass may not change what the graph takes and returns."


@dataclass(frozen=True)
class Interface:
    """The interface of a graph: its inputs, how many values come out, their nesting, what is known of each."""

    inputs: tuple[str, ...]
    outputs: int
    form: Any
    values: tuple[Any, ...] = ()


def interface_of(graph: Graph) -> Interface:
    inputs = tuple(str(node.target) for node in graph.nodes if node.op == "placeholder")
    outputs = [node.args for node in graph.nodes if node.op == "output"]
    if len(outputs) != 1:
        return Interface(inputs, -len(outputs), None)
    leaves = pytree.tree_leaves(outputs[0])
    values = tuple(leaf.meta.get("val") if isinstance(leaf, Node) else leaf for leaf in leaves)
    return Interface(inputs, len(leaves), _form(outputs[0]), values)


def check_graph(graph: Graph, interface: Interface, who: str) -> None:
    """Refuse a graph that is not well formed, or takes or returns something else, naming the node and what to do."""
    seen: set[Node] = set()
    everything = set(graph.nodes)
    for node in graph.nodes:
        for value in node.all_input_nodes:
            if value in seen:
                continue
            where = f" ({line})" if (line := node_line(node)) else ""
            if value in everything:
                problem, advice = "before it is defined", f"Insert it after '{value.name}'"
            else:
                problem, advice = "which is not in the graph any more", "Replace its uses before erasing it"
            verb = "using" if value in everything else "that uses"
            raise PassError(f"{who} left node '{node.name}' {verb} '{value.name}' {problem}{where}. {advice}.")
        seen.add(node)
    _check_interface(interface_of(graph), interface, who)
    try:
        graph.lint()
    except Exception as error:
        raise PassError(f"{who} left a broken graph: {one_line(error)}.") from error


def check_numbers(graph: Graph, who: str) -> None:
    """Refuse symbolic sizes as arguments: they are known while compiling, and nothing computes them in a call."""
    for node in graph.nodes:
        for value in pytree.tree_leaves((node.args, node.kwargs)):
            if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                raise PassError(
                    f"{who} left node '{node.name}' with the symbolic value {value} as an argument. Pass the node that "
                    "computes it, such as one of aten.sym_size.int."
                )


def check_results(graph: Graph, interface: Interface, who: str) -> None:
    """Refuse results of another type or shape: the code behind the graph was compiled for the old ones."""
    for at, (found, before) in enumerate(zip(interface_of(graph).values, interface.values, strict=True)):
        if isinstance(before, torch.Tensor) and isinstance(found, torch.Tensor) and _certainly_differ(found, before):
            raise PassError(f"{who} left output {at} as {_value_text(found)}; it was {_value_text(before)}. {MAY_NOT}")


def _certainly_differ(left: torch.Tensor, right: torch.Tensor) -> bool:
    if (left.dtype, left.device, left.dim()) != (right.dtype, right.device, right.dim()):
        return True
    return any(known_true(a != b) for a, b in zip(left.shape, right.shape, strict=True))


def _value_text(value: torch.Tensor) -> str:
    return f"{text_of(value)} on {value.device}"


def _check_interface(found: Interface, wanted: Interface, who: str) -> None:
    if found.outputs < 0:
        raise PassError(f"{who} left a graph with {-found.outputs} output nodes. A graph has exactly one.")
    if (len(found.inputs), found.outputs) != (len(wanted.inputs), wanted.outputs):
        raise PassError(
            f"{who} left a graph with {len(found.inputs)} inputs and {found.outputs} outputs instead of "
            f"{len(wanted.inputs)} and {wanted.outputs}. {MAY_NOT}"
        )
    if found.form != wanted.form:
        how = "nested in another way, or None where there was a value or the reverse"
        raise PassError(f"{who} left a graph whose outputs are {how}. {MAY_NOT}")
    if found.inputs != wanted.inputs and set(found.inputs) == set(wanted.inputs):
        raise PassError(f"{who} left the inputs in another order ({', '.join(found.inputs)}). {MAY_NOT}")


def _form(value: Any) -> Any:
    """How values are nested, and which are None; a list and a tuple are the same."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_form, value))
    return {key: _form(item) for key, item in value.items()} if isinstance(value, dict) else value is None


# -- runner ------------------------------------------------------------------------------------------------------------


log = logging.getLogger("graphex")


@dataclass(frozen=True)
class PassStep:
    """A pass that changed the graph, and the graph before it, which verification can go back to."""

    graph_pass: GraphPass
    before: GraphModule


@dataclass(eq=False, repr=False)
class Runner:
    """Takes one graph through its passes. `gm` is the graph as it stands."""

    compilation: Compilation
    graph_name: str
    gm: GraphModule
    example_inputs: Sequence[Any]
    phase: str
    steps: list[PassStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._snapshot: Graph | None = None
        self._interface = interface_of(self.gm.graph)
        self._aliases: Aliases | None = None
        stamp_order(self.gm.graph, self.aliases)
        self._show("original", stage="as given")

    def run(self, stage: str, graph_pass: GraphPass) -> None:
        if not graph_pass.concerns(self.gm.graph):
            return
        snapshot = self.snapshot()
        records: list[Record] = []
        before, started = _targets(self.gm.graph), time.perf_counter()
        module_before = self.gm
        try:
            changed, remark = self._apply(graph_pass, records)
        except TensorifyScalarRestartAnalysis:  # it asks Dynamo to trace again
            raise
        except Exception as error:
            self._undo(module_before, snapshot)
            self._failed(stage, graph_pass, error, before, time.perf_counter() - started)
            return
        seconds = time.perf_counter() - started
        after = _targets(self.gm.graph)
        if changed:
            if self.compilation.config.verify:
                self.steps.append(PassStep(graph_pass, graph_module(module_before, snapshot)))
            self._snapshot = None
        self.compilation.journal.add(
            PassRan(
                self.graph_name,
                stage,
                graph_pass.name,
                "changed" if changed else "unchanged",
                seconds,
                before.total(),
                after.total(),
                dict(before - after),
                dict(after - before),
                remark,
            )
        )
        for record in records:
            self.compilation.journal.add(record)
        self._show(f"after_{graph_pass.name}", stage=stage, changed=changed)

    def _apply(self, graph_pass: GraphPass, records: list[Record]) -> tuple[bool, str]:
        """Run the pass and check the graph that it left. Returns whether the graph has changed, and a remark."""
        compilation = self.compilation
        about = self.gm, self.example_inputs, compilation.config, self.phase, compilation.decompositions, self.aliases
        fall_back_later = partial(_fall_back, compilation, self.graph_name)
        work = Work(*about, fall_back_later, self.graph_name, graph_pass.name, records.append)
        if not graph_pass.foreign:
            graph_pass.apply(work)
            if work.changes:
                check_graph(work.gm.graph, self._interface, f"pass '{graph_pass.name}'")
                self._check_order(graph_pass, work.gm, f"pass '{graph_pass.name}'")
            return work.changes > 0, work.remark
        write_code(self.gm)  # a user's pass may look at the code or run the module
        signature = _signature(self.gm.graph)
        with PassWatch(self.gm) as watch:
            graph_pass.apply(work)
        changed = work.gm is not self.gm or _signature(self.gm.graph) != signature
        dropped = watch.dropped(work.gm)
        if changed:
            check_graph(work.gm.graph, self._interface, f"your pass '{graph_pass.name}'")
            check_numbers(work.gm.graph, f"your pass '{graph_pass.name}'")
        if changed or dropped:
            repair(work.gm, watch, graph_pass.name)
            check_results(work.gm.graph, self._interface, f"your pass '{graph_pass.name}'")
            self._check_order(graph_pass, work.gm, f"your pass '{graph_pass.name}'")
        self.gm = work.gm
        return changed, f"dropped the metadata of {len(dropped)} nodes; it was restored" if dropped else ""

    @property
    def aliases(self) -> Aliases:
        """The alias facts of the graph as it stands, made again only after something changed it."""
        if self._aliases is None:
            self._aliases = Aliases(self.gm.graph)
        return self._aliases

    def _check_order(self, graph_pass: GraphPass, gm: GraphModule, who: str) -> None:
        """Reads and writes of one memory must stay in order, which no data dependency says."""
        aliases = self._aliases = Aliases(gm.graph)
        if not graph_pass.moves_writes and (moved := moved_across_a_write(gm.graph, aliases)) is not None:
            node, memory = moved
            where = f" ({line})" if (line := node_line(node)) else ""
            raise PassError(
                f"{who} moved node '{node.name}' across a write to '{memory}'{where}; it would read or write other "
                "values than before. Keep the order of the nodes that use the same memory."
            )
        stamp_order(gm.graph, aliases)

    def _failed(
        self, stage: str, graph_pass: GraphPass, error: Exception, before: Counter[str], seconds: float
    ) -> None:
        users = graph_pass.foreign or isinstance(error, RuleError)
        stops = (users and self.compilation.config.strict) or isinstance(error, StreamError)
        status, reason = ("failed" if stops else "rolled back"), one_line(error)
        size = before.total()
        self.compilation.journal.add(
            PassRan(self.graph_name, stage, graph_pass.name, status, seconds, size, size, reason=reason)
        )
        if stops:
            if isinstance(error, (PassError, RuleError, StreamError)):
                raise error
            raise PassError(
                f"your pass '{graph_pass.name}' raised {reason}{_raised_at(error)}. "
                "Fix it, or set strict=False to go on without it."
            ) from error
        self.compilation.fall_back(self.graph_name, f"pass '{graph_pass.name}' was rolled back", error)

    def snapshot(self) -> Graph:
        """A copy of the graph as it stands, made again only after something changed it."""
        if self._snapshot is None:
            self._snapshot = copy_graph(self.gm.graph)
        return self._snapshot

    def _undo(self, module: GraphModule, snapshot: Graph) -> None:
        self.gm = module
        set_graph(self.gm, copy_graph(snapshot))  # others may hold the snapshot
        self._snapshot = self._aliases = None

    def _show(self, title: str, *, stage: str, changed: bool = True) -> None:
        wanted = self.compilation.files.wanted
        if changed and log.isEnabledFor(logging.DEBUG):
            log.debug("%s, %s, %s:\n%s", self.graph_name, stage, title, readable(self.gm))
        if wanted:
            self.compilation.files.graph(self.phase, title, readable(self.gm))
        if changed:
            self._add_to_history()

    def _add_to_history(self) -> None:
        """Add a snapshot of the graph, where a report was asked for. An error costs the report, not the compilation."""
        journal = self.compilation.journal
        if journal.history is None:
            return
        try:
            journal.history.take(self.compilation.compile_id, self.graph_name, self.gm.graph, self.aliases)
        except Exception as error:
            journal.history = None
            self.compilation.fall_back(self.graph_name, "reports are without graphs", error)


def _fall_back(compilation: Compilation, graph_name: str, what: str, reason: str, line: str) -> None:
    compilation.fall_back(graph_name, what, reason, line=line)


def _raised_at(error: Exception) -> str:
    frame = raised_in(error)
    return f" ({PurePath(frame.file).name}:{frame.line})" if frame is not None else ""


def _targets(graph: Graph) -> Counter[str]:
    """How often each op or module is called: the difference of two counts is the work of a pass."""
    return Counter(str(node.target) if node.op.startswith("call") else node.op for node in graph.nodes)


def _signature(graph: Graph) -> list[Hashable]:
    return [
        (node, node.op, value_key(node.target), value_key(node.args), value_key(node.kwargs)) for node in graph.nodes
    ]
