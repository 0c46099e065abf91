"""What a rule looks for: all the outputs of its search function, and where in a graph they may stand.

    def search(x, w): s = x + w; return s.relu(), s         Pattern([relu(s), s]), begun at the op that says most

The parts are `OpPattern`s (see `op_patterns`); `making` makes them from a function.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.fx import Node

from graphex.fusion.calls import PERMUTE, SOFT, Calls
from graphex.fusion.op_patterns import Attempt, OpPattern, taken_up
from graphex.fusion.stops import Stop
from graphex.fusion.words import op_title
from graphex.torch_private.patterns import FailedMatch, Match, MultiOutputPattern, OrderedSet, PatternExpr

_ARITHMETIC = frozenset(
    {torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor, torch.ops.aten.sub.Tensor, torch.ops.aten.div.Tensor}
)
_MOVES = frozenset(
    {
        *SOFT,
        PERMUTE,
        torch.ops.aten.unsqueeze.default,
        torch.ops.aten.slice.Tensor,
        torch.ops.aten.clone.default,
        torch.ops.aten.cat.default,
    }
)

Check = Callable[[Match], Any]
"""What a rule asks about a match: True, False, or a `Refusal` with a reason."""


@dataclass
class Pattern:
    """What a rule looks for: one pattern for each output of its function. `outputs[anchor]` is where a try begins."""

    outputs: list[PatternExpr]
    anchor: int = field(init=False)
    operations: list[OpPattern] = field(init=False)

    def __post_init__(self) -> None:
        self.operations = list(_operations(self.outputs))
        firm = [index for index, output in enumerate(self.outputs) if isinstance(output, OpPattern) and not output.soft]
        self.anchor = max(firm, key=lambda index: _weight(self._innermost(index)), default=0)

    def _innermost(self, index: int) -> Any:
        """What tells most about an output: the op itself, or the op whose result it picks."""
        output = self.outputs[index]
        assert isinstance(output, OpPattern)
        parts = [part for part in output.arguments.values() if isinstance(part, OpPattern)]
        return parts[0].op_name if output.op_name is operator.getitem and parts else output.op_name

    @cached_property
    def anchor_op(self) -> Any:
        output = self.outputs[self.anchor]
        return output.op_name if isinstance(output, OpPattern) else None

    @cached_property
    def root_op(self) -> Any:
        """The op that tells this pattern from others: its sites are the candidates."""
        return max(self.operations, key=lambda op: _weight(op.op_name)).op_name

    @property
    def size(self) -> int:
        return len(self.operations)

    @cached_property
    def needs(self) -> frozenset[Any]:
        """The ops a graph must hold for this pattern to match anywhere. A slice may be hidden in a split."""
        hidden = torch.ops.aten.slice.Tensor
        return frozenset(op.op_name for op in self.operations if not op.soft and op.op_name is not hidden)

    @cached_property
    def look(self) -> Any:
        """What a first look at an anchor asks: patterns that ask the same get the same answer."""
        begin = self.outputs[self.anchor]
        return (begin.op_name, begin.firm) if isinstance(begin, OpPattern) else None

    def rejected(self, node: Node, calls: Calls) -> Stop | None:
        """Why the anchor cannot be at `node`, at a first look."""
        begin = self.outputs[self.anchor]
        if isinstance(begin, OpPattern) and calls.ops(node)[0] == begin.op_name:
            return begin.rejected(node, calls)
        return None

    def match(self, node: Node, calls: Calls) -> Match | Stop:
        """Match with the anchor at `node`; the furthest stop if it does not."""
        rejected = self.rejected(node, calls)
        if rejected is not None:
            return rejected
        attempt = Attempt(self.outputs, calls, node)
        try:
            found = self._match(attempt, node)
        except FailedMatch as failure:
            found = failure
        if isinstance(found, Match):
            return found
        if attempt.furthest.matched < 0:
            return Stop(0, node, str(found))
        return attempt.furthest

    def _match(self, attempt: Attempt, node: Node) -> Match | FailedMatch:
        whole = attempt.match(self.outputs[self.anchor], node)
        if isinstance(whole, FailedMatch):
            return whole
        for index, output in enumerate(self.outputs):
            if index == self.anchor:
                continue
            part = self._match_further(attempt, output)
            if isinstance(part, FailedMatch):
                return part
            if not taken_up(whole, part):
                return FailedMatch("a variable stands for two values")
        whole.nodes = list(dict.fromkeys(whole.nodes))
        whole.pattern = MultiOutputPattern([self.outputs[self.anchor]])
        return whole

    def _match_further(self, attempt: Attempt, output: PatternExpr) -> Match | FailedMatch:
        before = dict(attempt.pattern_to_node)
        result: Match | FailedMatch | None = None
        for node in self._candidates(attempt, output):
            result = attempt.match(output, node)
            if result:
                return result
            attempt.pattern_to_node = dict(before)
        if isinstance(output, OpPattern) and output.op_name is operator.getitem:
            attempt.pattern_to_node[output] = None  # nobody asks for this result: it needs no replacement
            return Match(attempt, output)
        return result or attempt.stop(
            None,
            lambda: f"no {_title_of(output)} uses what was matched so far",
            "",
            "leave that result out of the rule",
        )

    def _candidates(self, attempt: Attempt, output: PatternExpr) -> list[Node]:
        """Where a further output can be: nearest to the anchor first, and never where another output is."""
        taken = {attempt.pattern_to_node.get(other) for other in self.outputs if other is not output}
        found = [node for node in output.find_anchor_nodes(attempt, OrderedSet()) if node and node not in taken]
        anchor = attempt.pattern_to_node[self.outputs[self.anchor]]
        assert anchor is not None
        before = [node for node in found if node < anchor]
        return sorted(before, reverse=True) + sorted(node for node in found if not node < anchor)


def _title_of(output: PatternExpr) -> str:
    return op_title(output.op_name) if isinstance(output, OpPattern) else str(output)


def _weight(op: Any) -> int:
    """How much an op tells: a result picked or moved nothing, arithmetic a little, a named op of its own most."""
    if op is operator.getitem or op in _MOVES:
        return 0
    if op in _ARITHMETIC:
        return 1
    if isinstance(op, torch._ops.OpOverload):
        return 3 if op.namespace == "aten" else 4
    return 2


def _operations(outputs: list[PatternExpr]) -> Iterator[OpPattern]:
    seen: set[PatternExpr] = set()
    pending: list[Any] = list(outputs)
    while pending:
        part = pending.pop(0)
        if isinstance(part, (list, tuple)):
            pending.extend(part)
        elif isinstance(part, OpPattern) and part not in seen:
            seen.add(part)
            yield part
            pending.extend(part.arguments.values())
