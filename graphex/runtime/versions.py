"""Version counters of inputs: autograd sees as many writes as the program has made.

    x.add_(1); x[0].mul_(2)                     two writes, whatever ops they have become, and however they are replayed

AOTAutograd counts one write itself before each call, for an input of which autograd might have saved something.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from graphex.analysis import Aliases
from graphex.analysis.program import writes_to
from graphex.runtime.codegen import Boxed
from graphex.torch_private.memory import set_versions, sets_versions

COUNTED = "graphex_counted"  # on an input: AOTAutograd counts one of its writes


@dataclass(frozen=True)
class Count:
    """How many writes to an input the program makes, and how many AOTAutograd counts."""

    writes: int
    elsewhere: int


def counts(gm: GraphModule) -> dict[int, Count]:
    """What is known of the writes to the inputs of a graph, by place."""
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    noted = {place: found for place, node in enumerate(inputs) if (found := writes_to(node)) is not None}
    return {place: Count(found.count, int(COUNTED in inputs[place].meta)) for place, found in noted.items()}


def repeated(written: list[int], known: dict[int, Count], *, elsewhere: bool) -> list[int]:
    """The places of written inputs, each as often as its writes are to be counted; at least once if nothing is known.

    `elsewhere`: AOTAutograd's wrapper is around the call.
    """
    found: list[int] = []
    for place in written:
        count = known.get(place, Count(1, 0))
        found += [place] * (count.writes - (count.elsewhere if elsewhere else 0))
    return found


@contextmanager
def uncounted(tensors: Sequence[Tensor]) -> Iterator[None]:
    """A capture computes nothing, whatever the ops that are captured count."""
    seen = [tensor for tensor in tensors if not tensor.is_inference()] if sets_versions() else []
    before = [tensor._version for tensor in seen]
    try:
        yield
    finally:
        set_versions(seen, before)


def counted(run: Boxed, gm: GraphModule, *, in_pieces: bool = False) -> Boxed:
    """`run` counts the writes of its ops, or, in pieces, of each piece. This counts those of the user's program."""
    aliases, inputs = Aliases(gm.graph), [node for node in gm.graph.nodes if node.op == "placeholder"]
    wrong = {
        place: count
        for place, count in counts(gm).items()
        if in_pieces or len(aliases.writes(inputs[place])) != count.writes - count.elsewhere
    }
    if not wrong or not sets_versions():
        return run

    def count(args: list[Any]) -> Any:
        written = [(args[place], count) for place, count in wrong.items() if not args[place].is_inference()]
        before = [tensor._version for tensor, _ in written]
        tensors = [tensor for tensor, _ in written]
        try:
            results = run(args)
        except BaseException:
            # what was written until then, less what was counted for all of it before
            set_versions(tensors, [max(v, t._version - c.elsewhere) for v, (t, c) in zip(before, written, strict=True)])
            raise
        set_versions(tensors, [v + c.writes - c.elsewhere for v, (_, c) in zip(before, written, strict=True)])
        return results

    count._boxed_call = True  # type: ignore[attr-defined]  # what AOTAutograd looks for
    return count
