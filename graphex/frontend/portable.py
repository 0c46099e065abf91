"""Portable programs: a compiled inference graph that another process calls without Dynamo and AOTAutograd.

AOTAutograd's wrapper does nothing for such a graph but turn gradients off and count writes: its inputs are Dynamo's,
one for one, and so are its results. That is known when the graph is compiled. A graph for which the wrapper does more
has no portable form, and the reason is one sentence.

Weights are inputs: they are not inside, and come from the caller's module.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from graphex.analysis.aliasing import RETURNED
from graphex.cache.artefacts import LARGEST_CONSTANTS, Artefact, Given, made_from
from graphex.cache.calls import HandedOver
from graphex.cache.keys import machine_of
from graphex.config import CompilerConfig
from graphex.device import kernel_runtime
from graphex.errors import InputError
from graphex.frontend.compiler import Executables, executable, sizes_of
from graphex.records import CacheAsked, Journal
from graphex.regions.compiler import settings
from graphex.rewrite.compilation import Compilation, Origin
from graphex.runtime.fast_replay import Bypass, Compiled
from graphex.runtime.native import get_ready_meanwhile
from graphex.runtime.program import Program
from graphex.torch_private.aot import (
    adds_guards,
    counted_inputs,
    dynamic_results,
    mark_dynamic,
    moved_device,
    only_hands_over,
    static_input_indices,
    unpickled,
)
from graphex.torch_private.symbolic import FakeTensorMode, ShapeEnv, is_traceable_wrapper_subclass, pytree

_COMPILE_TIME = ("fusion_rules", "post_grad_custom_pre_pass", "post_grad_custom_post_pass", "use_graph_pool")


@dataclass(frozen=True)
class Portable:
    """A compiled inference graph, and what AOTAutograd adds to it."""

    artefact: Artefact
    handed: HandedOver
    machine: dict[str, Any]
    options: dict[str, Any]
    origin: Origin

    def to_bytes(self) -> bytes:
        return pickle.dumps(self, protocol=5)

    @classmethod
    def from_bytes(cls, data: bytes) -> Portable:
        found = unpickled(data)
        if not isinstance(found, cls):
            raise InputError("this was not saved by graphex.")
        return found

    def callable(self, journal: Journal) -> Compiled:
        """The callable for Dynamo. Raises InputError, saying what differs, where it was saved for another machine."""
        self._check_machine()
        config = CompilerConfig(**self.options).frozen()
        compilation = Compilation(config, journal, "-", origin=self.origin)
        name = compilation.name_graph("inference")
        if kernel_runtime() is not None:
            get_ready_meanwhile(journal)

        def report(what: str, reason: str, line: str) -> None:
            compilation.fall_back(name, what, reason, line=line)

        mode = FakeTensorMode(shape_env=ShapeEnv())
        patches = settings(config) if self.artefact.regions else {}
        given, again = Given(self.handed.constants, [], []), self._why_again()
        made = made_from(self.artefact, given, mode, patches, report, compile_again=bool(again))
        if again:
            report("regions are compiled again", again, "")
        for record in made.records:
            journal.add(record)
        journal.add(CacheAsked(name, "hit", "", "it was saved"))
        program = executable(compilation, name, made, "inference", self.handed.static_inputs)
        return called(program, self.handed)

    def _check_machine(self) -> None:
        """Raise InputError, saying what differs, where a graph was saved for another machine or kind of device."""
        kinds = self.machine["devices"]
        here = machine_of([str(moved_device(torch.device(name))) for name in kinds])
        before = {**self.machine, "devices": dict(zip(here["devices"], kinds.values(), strict=True))}
        for part, found in here.items():
            if found != before.get(part):
                raise InputError(
                    f"this was saved where {part} was {before.get(part)}; here it is {found}. Save it again from the "
                    "model."
                )

    def _why_again(self) -> str:
        """Why Inductor's code for the regions cannot be used; empty if it can."""
        moves = [name for name in self.machine["devices"] if str(moved_device(torch.device(name))) != name]
        if not moves or not self.artefact.regions:
            return ""
        return f"they were saved for {moves[0]}, and the code that Inductor writes names its device"


def called(program: Program, handed: HandedOver) -> Compiled:
    """A call of a program with what AOTAutograd's wrapper does around it."""
    bypass = Bypass(program) if program.may_replay and not handed.dynamic else None
    run = program if bypass is None else bypass

    def forward(*args: Any) -> Any:
        written = [args[place] for place in handed.counted if not args[place].is_inference()]
        if written:
            torch.autograd.graph.increment_version(written)
        with torch.no_grad():
            results = run(list(args))
        for place, dims in handed.dynamic.items():
            mark_dynamic(results[place], dims)
        return results

    return forward if bypass is None else bypass.around(forward)


def portable(
    made: Executables, handed: HandedOver | str, example_inputs: Sequence[Any], compilation: Compilation
) -> Portable | str:
    """The portable form of an inference graph that AOTAutograd has just handed over; why it has none."""
    if isinstance(made.artefact, str):
        return made.artefact
    if isinstance(handed, str):
        return handed
    if made.artefact.guards or any(isinstance(value, torch.SymInt) for value in example_inputs):
        return "its sizes are symbolic; save it for fixed ones"
    options = {name: value for name, value in compilation.config.given().items() if name not in _COMPILE_TIME}
    machine = machine_of(handed.sizes[-1])
    return Portable(made.artefact, replace(handed, traces=()), machine, options, compilation.origin)


def given_by_autograd(graph: GraphModule) -> HandedOver | str:
    """The facts about an inference graph before its passes, or why they are not kept."""
    given, inputs = Given.of(graph), len(graph.graph.find_nodes(op="placeholder"))
    size = 0
    for name, value in given.constants.items():
        if type(value) not in (Tensor, torch.nn.Buffer) or value.layout != torch.strided:
            return f"the constant '{name}' is of type {type(value).__name__}"
        size += value.numel() * value.element_size()
    if size > LARGEST_CONSTANTS:
        return f"it holds constants of {size} bytes"
    static, counted = tuple(static_input_indices()), tuple(counted_inputs(inputs))
    return HandedOver(given.constants, static, counted, dynamic_results(), sizes_of(graph), tuple(given.traces))


def handed_over(
    given: HandedOver,
    graph: GraphModule,
    dynamo_graph: GraphModule,
    example_inputs: Sequence[Any],
    written: Sequence[int],
) -> HandedOver | str:
    """`given`, if AOTAutograd only hands over the calls of a graph that writes to these inputs; or why not."""
    return _why_not_plain(graph, dynamo_graph, example_inputs, written) or given


def _why_not_plain(
    graph: GraphModule, dynamo_graph: GraphModule, example_inputs: Sequence[Any], written: Sequence[int]
) -> str:
    """The work of AOTAutograd around the calls of a graph, besides turning gradients off and counting writes."""
    inputs = len(graph.graph.find_nodes(op="placeholder"))
    results = graph.graph.output_node().meta.get(RETURNED, len(_results(graph)))  # a forward also saves values
    if any(isinstance(value, Tensor) and is_traceable_wrapper_subclass(value) for value in example_inputs):
        return "an input is of a subclass of Tensor"
    if inputs != len(example_inputs) or results != len(_results(dynamo_graph)):
        return "AOTAutograd changes what the graph takes or returns"
    if not only_hands_over(written, but_marks=True):
        return "a result is a view of an input, or an input is updated after the call"
    return "AOTAutograd adds guards of its own" if adds_guards() else ""


def _results(gm: GraphModule) -> list[Any]:
    return list(pytree.tree_leaves(gm.graph.output_node().args[0]))
