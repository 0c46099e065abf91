"""Logits processors of users that can be a part of a captured step: torch code that looks at the scores alone.

Dynamo is asked, with a copy of the processor, scores as they will be, and tokens whose number is not fixed. What it
traces is right for every step if it is one graph without breaks, of whose inputs none are the tokens or their number,
that takes nothing for granted about this number, and that leaves the processor as it was. Then the step runs that
graph, and Dynamo's guards say when the processor, or something that it reads, has become another one.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from graphex.loops.decode_loop import compiling
from graphex.loops.processors import Process, Sequence, described
from graphex.torch_private.dynamo import compiled_version, input_sources, mark_growing, size_guards

KEPT = 16
_PLAIN = (bool, int, float, complex, str, bytes, Tensor, torch.dtype, torch.device, type(None))
_TOKENS = "L['input_ids']"


def processed(processor: Any, input_ids: Tensor, scores: Tensor) -> Any:
    """What is traced."""
    return processor(input_ids, scores)


@dataclass
class Traced:
    """A processor as Dynamo traced it. `reason` is why its graph is not right for every step; empty if it is."""

    function: FunctionType
    tokens: Tensor
    scores: Tensor
    reason: str = ""
    graphs: int = 0
    compiled: Callable[..., Any] = field(init=False)

    def __post_init__(self) -> None:
        self.compiled = torch.compile(self.function, backend=self._record, fullgraph=True, dynamic=False)

    def _record(self, graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs += 1
        guards, sources = size_guards(), input_sources(graph)
        if guards is None or guards or any(_TOKENS in each for each in sources):
            self.reason = "looks at the tokens so far"
        elif not all(isinstance(each, Tensor) for each in inputs):
            self.reason = "reads numbers that may change"
        return graph

    def version(self, processor: Any) -> str | None:
        values = {"processor": processor, "input_ids": self.tokens, "scores": self.scores}
        return compiled_version(self.function, values)


class TorchCode:
    """The processors that were traced for one model."""

    def __init__(self) -> None:
        self._traced: OrderedDict[Hashable, Traced] = OrderedDict()

    def process(self, processor: Any, scores: Tensor) -> tuple[Process, Hashable] | str:
        """A processor as part of a step on such scores, and what it depends on; or why only the host can call it."""
        if mark_growing is None:
            return "is not known to look at the scores alone"
        if (held := _not_plain(processor)) is not None:
            return f"holds a {held}, which may change"
        key = (type(processor), described(processor), tuple(scores.shape), scores.device)
        with compiling:
            found = self._traced.get(key)
            version = None if found is None else found.version(processor)
            if found is None or (version is None and not found.reason):
                found = self._traced[key] = _trace(processor, scores)
                version = found.version(processor)
            self._traced.move_to_end(key)
            while len(self._traced) > KEPT:
                self._traced.popitem(last=False)
        if found.reason or version is None:
            return found.reason or "reads something that changes"
        run, tokens = found.compiled, found.tokens

        def process(sequence: Sequence, scores: Tensor) -> Tensor:
            with compiling:
                result: Tensor = run(processor, tokens, scores)
            return result

        return process, (id(processor), key[1], version)


def _trace(processor: Any, scores: Tensor) -> Traced:
    function = FunctionType(processed.__code__.replace(), processed.__globals__, processed.__name__)
    tokens = torch.zeros((scores.shape[0], 4), dtype=torch.long, device=scores.device)
    assert mark_growing is not None
    mark_growing(tokens, 1)
    found = Traced(function, tokens, scores)
    try:
        trial = copy.deepcopy(processor)
        before = described(trial)
        result = found.compiled(trial, tokens, scores.clone())
        after = described(trial)
    except Exception as error:  # whatever a user's code raises on scores that are none
        found.reason = found.reason or f"cannot be traced ({type(error).__name__})"
        return found
    if found.graphs != 1:
        found.reason = "is not traced as one graph"
    elif after != before:
        found.reason = "changes itself in every call"
    elif not isinstance(result, Tensor) or result.shape != scores.shape:
        found.reason = "does not return scores of the shape that it gets"
    return found


def _not_plain(processor: Any) -> str | None:
    """The type of something that a processor holds and that may change unseen; None if there is none."""
    if not hasattr(processor, "__dict__"):
        return type(processor).__name__
    left: list[Any] = list(vars(processor).values())
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            left += value
        elif not isinstance(value, _PLAIN):
            return type(value).__name__
    return None
