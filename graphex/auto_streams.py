"""`auto_streams`: a second version of a graph, with its branches on another stream, kept where it is faster."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import GraphModule

from graphex.analysis import Aliases
from graphex.analysis.plan import stream_plan
from graphex.errors import StreamError
from graphex.passes.auto_streams import why_not_automatic
from graphex.pipeline import put_on_two_streams
from graphex.records import AutoStreams
from graphex.runner import Runner
from graphex.runtime.above import AboveAutograd
from graphex.runtime.codegen import Boxed
from graphex.runtime.executable import build_executable, device_for
from graphex.runtime.keys import KeyReader
from graphex.runtime.trial import Trial


def with_two_streams(
    runner: Runner, functional: GraphModule, one: Boxed, static_inputs: Sequence[int], above: AboveAutograd
) -> Boxed:
    """`one`, or a trial of it against the same graph on two streams. Why not, is in the journal."""
    compilation, name = runner.compilation, runner.graph_name
    device = device_for(runner.gm)
    reason = "" if device.has_lanes else f"the device '{device.name}' has no streams"
    reason = reason or why_not_automatic(functional.graph, Aliases(functional.graph))
    if not reason:
        second = Runner(compilation, f"{name} on two streams", functional, runner.example_inputs, runner.phase)
        try:
            put_on_two_streams(second)
        except StreamError as error:
            reason = str(error)
        else:
            reason = "" if stream_plan(second.gm.graph) is not None else "nothing was placed on another stream"
    if reason:
        compilation.journal.add(AutoStreams(name, "", "not tried", reason=reason))
        return one
    folder = f"{runner.phase}/two_streams"
    two = build_executable(compilation, second.graph_name, folder, second.gm, static_inputs, above)
    aliases = Aliases(runner.gm.graph)
    key = KeyReader(runner.gm, aliases, device)
    return Trial(name, compilation.journal, device, key, aliases.written_inputs(), one, two, above)
