"""Streams and events of the user's that a graph takes part in.

Inside, their work runs on streams of the graph's own, captured or not. So a call starts behind what these streams have
been given before, and they go on behind the call: to everybody outside it looks as if the work had been done on them.
"""

from __future__ import annotations

from typing import Any

import torch

from graphex.analysis.plan import Outside, StreamPlan
from graphex.device import Device
from graphex.passes.torch_streams import STREAM
from graphex.runtime.codegen import Boxed


def with_outside(run: Boxed, plan: StreamPlan, device: Device, *, events: bool) -> Boxed:
    """`run`, ordered with the user's own streams and events; `run` itself if there are none."""
    from graphex.torch_private.streams import external_object

    numbers = [int(label.removeprefix(STREAM)) for label in plan.priorities if label.startswith(STREAM)]
    outside = plan.outside if events else Outside()
    if not (numbers or outside.recorded or outside.awaited):
        return run

    def ordered(args: list[Any]) -> Any:
        if device.is_capturing():
            return run(args)
        objects = {number: external_object(number) for number in (*numbers, *outside.recorded, *outside.awaited)}
        streams = [objects[number] for number in numbers if isinstance(objects[number], torch.Stream)]
        current = device.current_stream()
        for stream in streams:
            current.wait_stream(stream)
        for number in outside.awaited:
            if isinstance(objects[number], torch.Event):
                current.wait_event(objects[number])
        results = run(args)
        for stream in streams:
            stream.wait_stream(current)
        for number in outside.recorded:
            if isinstance(objects[number], torch.Event):
                objects[number].record(current)
        return results

    ordered._boxed_call = True  # type: ignore[attr-defined]
    return ordered
