"""`stream_safety="shuffle"`: every call also runs in random orders that the events allow, and all must agree."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.fx import GraphModule

from graphex.errors import StreamError
from graphex.runtime.codegen import Boxed, generate

ORDERS = 8  # for each call


def shuffled(graph_name: str, gm: GraphModule, counter: Counter[str]) -> Boxed:
    """The graph in the order it is written, after it was tried in others on copies of the inputs."""
    from graphex.evidence.orders import random_orders

    run = generate(gm).function(f"<graphex {graph_name}>")

    def checked(args: list[Any]) -> Any:
        counter["calls"] += 1
        tried = random_orders(gm, args, orders=ORDERS, seed=counter["calls"])
        counter["orders"] += tried.tried
        if tried.differences:
            first = tried.differences[0]
            raise StreamError(
                f"{graph_name}: {first.what} when its streams run in the order {', '.join(first.order)}. "
                "An event is missing there; this is an error of graphex's if the graph was not changed afterwards."
            )
        return run(args)

    checked._boxed_call = True  # type: ignore[attr-defined]
    return checked
