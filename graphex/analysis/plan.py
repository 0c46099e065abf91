"""What the runtime has to know about the streams of a finished graph. It is on the output node."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph

OUTSIDE = "graphex_events_outside"
PLAN = "graphex_streams"


@dataclass(frozen=True)
class Outside:
    """Events of the user's, by torch's numbers: recorded in the graph; waited for in it and recorded before it."""

    recorded: tuple[int, ...] = ()
    awaited: tuple[int, ...] = ()


@dataclass(frozen=True)
class StreamPlan:
    """The streams of a graph besides the current one, with their priorities."""

    priorities: dict[str, int]
    outside: Outside = Outside()


def stream_plan(graph: Graph) -> StreamPlan | None:
    """The plan of a graph whose events are proven to be enough; None for a graph that runs on one stream."""
    plan: StreamPlan | None = graph.output_node().meta.get(PLAN)
    return plan
