"""Patterns of rules: the outputs of a search function. A pattern is tried at nodes of a graph; a failure says why.

    def search(x, w): s = x + w; return s.relu(), s         Pattern([relu(s), s]), begun at the op that says most

The parts are `OpPattern`s, calls of one op each, with normalised arguments; `rule` makes them. A `Mismatch` says where
and why a match ended, as a user would say it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.fx import Node

from graphex.analysis.graphs import dtype_text
from graphex.fusion.calls import (
    CAST,
    COMMUTATIVE,
    PERMUTE,
    RESHAPE,
    SOFT,
    SPLITS,
    Calls,
    is_nothing,
    op_of,
    targets_of,
    value_of,
)
from graphex.torch_private.patterns import (
    CallFunction,
    FailedMatch,
    Ignored,
    KeywordArg,
    Match,
    MatchContext,
    MultiOutputPattern,
    OrderedSet,
    PatternExpr,
)
from graphex.torch_private.symbolic import statically_known_true

# -- ops, values and edits as a user would say them --------------------------------------------------------------------


def op_title(op: Any) -> str:
    """``npu.npu_rms_norm``, ``add``: an op as a user would say it."""
    if isinstance(op, torch._ops.OpOverload):
        name = op._schema.name.split("::")
        return name[1] if name[0] == "aten" else ".".join(name)
    return str(getattr(op, "__name__", op))


def describe(node: Any) -> str:
    if isinstance(node, Node):
        return f"'{node.name}' ({op_title(op_of(node))})" if node.op == "call_function" else f"the input '{node.name}'"
    return f"the constant {show(node)}"


CHANGES = " (the model then computes something else)"
ROUNDS = " (the results then differ in their last bits)"

_LEFT_OUT: dict[Any, str] = {
    **{op: f"do not {op} the value here{CHANGES}" for op in (*SOFT, PERMUTE)},
    torch.ops.aten.clone.default: "do not clone the value here, with clone() or contiguous()",
}
_PUT_IN: dict[Any, tuple[str, str]] = {
    CAST: ("dtype", f"cast the value to {{}} here{CHANGES}"),
    RESHAPE: ("shape", f"reshape the value to {{}} here{CHANGES}"),
}


def edit_for(found: Any, expected: Any, arguments: Mapping[str, Any]) -> str:
    """The edit that would put an op with these arguments where something else was found; empty where nothing is known.

    An edit that changes what the model computes says so.
    """
    name, text = _PUT_IN.get(expected, ("", ""))
    if isinstance(wanted := arguments.get(name), (torch.dtype, tuple)):
        return text.format(dtype_text(wanted) if isinstance(wanted, torch.dtype) else list(wanted))
    return _LEFT_OUT.get(op_of(found), "") if isinstance(found, Node) else ""


def show(value: Any) -> str:
    return f"'{value.name}'" if isinstance(value, Node) else repr(value)


# -- where and why matches end -----------------------------------------------------------------------------------------


Sentence = Callable[[], str]
"""A sentence that is put together when it is read: most mismatches never are."""


@dataclass(slots=True)
class Mismatch:
    """Where a match ended: after how many ops, at which node, why, and what edit of model or rule would help.

    Every try of a rule at a node may end in one, and few are recorded: sentences are made when they are read.
    """

    matched: int
    node: Node | None
    said: str | Sentence
    advice: str | Sentence = ""
    advice_to_author: str = ""
    fits: bool = False  # all ops are there: it ended at an argument

    @property
    def reason(self) -> str:
        return self.said if isinstance(self.said, str) else self.said()

    def edit(self, *, own_rule: bool) -> str:
        """An edit that would help: of the model, and of the rule where the user wrote it."""
        of_model = self.advice if isinstance(self.advice, str) else self.advice()
        return ", or ".join(filter(None, (of_model, self.advice_to_author if own_rule else "")))


@dataclass(slots=True)
class OtherOp(Mismatch):
    """Something else (`found`: a node, or a number) stands where the pattern has an op, with these arguments."""

    expected: Any = None
    found: Any = None
    arguments: Any = None

    @property
    def reason(self) -> str:
        return f"{describe(self.found)} stands where the rule has {op_title(self.expected)}"

    def edit(self, *, own_rule: bool) -> str:
        """For a user's rule: advise to compute the op inside of the compiled function. Our rules have variants, so that
        this advice could be wrong for them.
        """
        if own_rule and isinstance(self.found, Node) and self.found.op == "placeholder" and not self.arguments:
            return f"compute the {op_title(self.expected)} inside of what is compiled, and not outside"
        return edit_for(self.found, self.expected, self.arguments or {})


# -- the pattern of one op ---------------------------------------------------------------------------------------------
# A call of one op, as a pattern: torch's pattern language, with arguments normalised and every failure located.
#
#     mul(x, rsqrt(m))        OpPattern(mul, {"self": x, "other": OpPattern(rsqrt, {"self": m})})
#
# An `Attempt` is one try at one node. If it fails it says where, after how many ops, and why: the `Mismatch` that came
# furthest is what a near miss reports.


_ONE = f"use one and the same value in both places{CHANGES}"


class Attempt(MatchContext):
    """One try of a pattern at one node. Sees through what does nothing, and remembers how far it came."""

    def __init__(self, outputs: Sequence[PatternExpr], calls: Calls, node: Node) -> None:
        super().__init__(list(outputs), graph=node.graph)
        self.calls = calls
        self.furthest = Mismatch(-1, None, "")
        self.entered = 0  # ops whose arguments are being looked at

    def match(self, pattern: PatternExpr, node: Any) -> Match | FailedMatch:
        if isinstance(node, Node):
            is_op = type(pattern) is OpPattern  # `isinstance` of an abstract class takes longer than all of this
            if not is_op or self.calls.ops(node)[0] != pattern.op_name:  # type: ignore[attr-defined]
                node = self.calls.source(node)
            if type(pattern) is KeywordArg and pattern not in self.pattern_to_node:
                self.pattern_to_node[pattern] = node
                return Match(self, pattern, kwargs={pattern.name: node})
        if (other := self.pattern_to_node.get(pattern)) is not None and other != node:
            return self.fail(node, lambda: f"{describe(node)} stands where the rule has {describe(other)} again", _ONE)
        found: Match | FailedMatch = super().match(pattern, node)
        return found

    def fail(self, node: Any, said: Sentence, advice: str | Sentence = "", to_author: str = "") -> FailedMatch:
        """A failure here. The one that came furthest is the one worth telling."""
        return self._failed(
            Mismatch(self._matched(), node if isinstance(node, Node) else None, said, advice, to_author)
        )

    def fail_at(self, node: Any, pattern: OpPattern) -> FailedMatch:
        """Another op stands where this one should."""
        where = node if isinstance(node, Node) else None
        wanted, arguments = pattern.op_name, pattern.arguments if pattern.op_name in SOFT else None
        return self._failed(OtherOp(self._matched(), where, "", expected=wanted, found=node, arguments=arguments))

    def _matched(self) -> int:
        done = sum(isinstance(p, OpPattern) and n is not None for p, n in self.pattern_to_node.items())
        return done + self.entered

    def _failed(self, end: Mismatch) -> FailedMatch:
        if end.matched > self.furthest.matched:
            self.furthest = end
        return FailedMatch("it ends after {} ops", end.matched)


class OpPattern(CallFunction):
    """Matches a call of one op. `arguments` holds patterns and constants by schema name; None ignores them all."""

    def __init__(self, op_name: Any, arguments: Mapping[str, Any], *, soft: bool = False) -> None:
        super().__init__(list(targets_of(op_name)), *arguments.values(), _users=1)
        self.op_name = op_name
        self.arguments = dict(arguments)
        self.soft = soft
        self.firm = tuple(
            (name, part.op_name)
            for name, part in self.arguments.items()
            if isinstance(part, OpPattern) and not part.soft
        )
        self.ops = 1 + sum(map(_ops_in, arguments.values()))
        self._swappable = op_name in COMMUTATIVE
        if self._swappable:
            # The operand that says most binds variables first: a bare variable would take either operand.
            self.arguments = dict(sorted(self.arguments.items(), key=lambda item: -_ops_in(item[1])))
        asking = [(name, part) for name, part in self.arguments.items() if not isinstance(part, Ignored)]
        self._asked = [(name, part, isinstance(part, PatternExpr)) for name, part in asking]
        alpha = self.arguments.get("alpha", 1)
        self._unscaled = isinstance(alpha, Ignored) or bool(alpha == 1)

    def __repr__(self) -> str:
        return f"{op_title(self.op_name)}({', '.join(f'{name}={value!r}' for name, value in self.arguments.items())})"

    def rejected(self, node: Node, calls: Calls) -> Mismatch | None:
        """A quick look at the ops of the arguments: most tries end here, and never set up a match."""
        operands = calls.operands(node)
        for name, op in self.firm:
            if op in operands.get(name, ()):
                continue
            if self._swappable and op in operands.get("other" if name == "self" else "self", ()):
                continue
            value = calls[node].args.get(name)
            return OtherOp(1, value if isinstance(value, Node) else None, "", expected=op, found=value)
        return None

    def _match_fns(self, node: Any) -> bool:
        return isinstance(node, Node) and op_of(node) == self.op_name

    def _match(self, node: Any, ctx: MatchContext) -> Match | FailedMatch:
        assert isinstance(ctx, Attempt)
        if not isinstance(node, Node) or ctx.calls.ops(node)[0] != self.op_name:
            if self.soft:
                return ctx.match(next(iter(self.arguments.values())), node)
            return ctx.fail_at(node, self)
        found = ctx.calls[node].args
        if self._swappable and self._unscaled and found.get("alpha", 1) == 1:
            swapped = {**found, "self": found["other"], "other": found["self"]}
            return self._either(node, (found, swapped), ctx)
        return self._with(node, found, ctx)

    def _either(self, node: Node, spellings: tuple[dict[str, Any], ...], ctx: Attempt) -> Match | FailedMatch:
        before = dict(ctx.pattern_to_node)
        result: Match | FailedMatch = FailedMatch("never tried")
        for found in spellings:
            ctx.pattern_to_node = dict(before)
            try:
                result = self._with(node, found, ctx)
            except FailedMatch as failure:
                result = failure
            if result:
                break
        return result

    def _with(self, node: Node, found: Mapping[str, Any], ctx: Attempt) -> Match | FailedMatch:
        ctx.entered += 1
        try:
            return self._with_arguments(node, found, ctx)
        finally:
            ctx.entered -= 1

    def _with_arguments(self, node: Node, found: Mapping[str, Any], ctx: Attempt) -> Match | FailedMatch:
        match = Match(ctx, self)
        for name, wanted, is_pattern in self._asked:
            value = found.get(name)
            part = ctx.match(wanted, value) if is_pattern else self._value(node, name, wanted, value, ctx)
            if part is None:
                continue
            if isinstance(part, FailedMatch):
                return part
            if not taken_up(match, part):
                return self._inconsistent(node, name, ctx)
        match.nodes.append(node)
        match.targets[self] = node.target
        return match

    def _inconsistent(self, node: Node, name: str, ctx: Attempt) -> FailedMatch:
        return ctx.fail(
            node, lambda: f"'{name}' of {describe(node)} is not the value that stands for it elsewhere", _ONE
        )

    def _value(self, node: Node, name: str, wanted: Any, found: Any, ctx: Attempt) -> Match | FailedMatch | None:
        """The match of a constant, or of a list that may hold patterns; None if there is nothing to remember."""
        if isinstance(wanted, (list, tuple)) and any(isinstance(part, PatternExpr) for part in wanted):
            if not isinstance(found, (list, tuple)) or len(found) != len(wanted):
                return ctx.fail(
                    node,
                    lambda: f"'{name}' of {describe(node)} has another length than in the rule",
                    lambda: f"give {len(wanted)} values for '{name}'{CHANGES}",
                )
            match = Match(ctx, self)
            for one_wanted, one_found in zip(wanted, found, strict=True):
                is_pattern = isinstance(one_wanted, PatternExpr)
                part = (
                    ctx.match(one_wanted, one_found)
                    if is_pattern
                    else self._value(node, name, one_wanted, one_found, ctx)
                )
                if isinstance(part, FailedMatch):
                    return part
                if part is not None and not taken_up(match, part):
                    return self._inconsistent(node, name, ctx)
            return match
        if same_constant(wanted, found):
            return None
        return ctx.fail(
            node,
            lambda: f"'{name}' of {describe(node)} is {show(found)}, and {show(wanted)} in the rule",
            lambda: f"use {name}={show(wanted)}{CHANGES}",
            "make it a scalar argument of the rule" if _is_number(wanted) else "",
        )

    def find_anchor_nodes(self, ctx: MatchContext, searched: Any) -> Generator[Node | None, None, None]:
        if self in ctx.pattern_to_node:
            yield ctx.pattern_to_node[self]
            return
        for part in self.flat_args_kwargs[0]:
            if not isinstance(part, PatternExpr):
                continue
            for other in part.find_anchor_nodes(ctx, searched):
                for user in _users_through(other) if isinstance(other, Node) else ():
                    if user not in searched and self._match_fns(user):
                        searched.add(user)
                        yield user
                if self.soft:
                    yield other  # this op is absent, and its argument stands for it


def taken_up(match: Match, part: Match) -> bool:
    """Make a part a part of the match. No if a variable would stand for two values; the match is of no use then."""
    bound = match.kwargs
    for name, value in part.kwargs.items():
        known = bound.setdefault(name, value)
        if known is not value and known != value:
            return False
    match.args.extend(part.args)
    match.nodes.extend(part.nodes)
    match.targets.update(part.targets)
    return True


_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device})


def same_constant(wanted: Any, found: Any) -> bool:
    """Whether an argument certainly has the value it has in the rule. Symbolic sizes are compared as expressions."""
    if type(wanted) is type(found) and type(wanted) in _PLAIN:
        return bool(wanted == found)
    wanted, found = (_plain(value) for value in (wanted, found))
    if isinstance(wanted, (list, tuple)) and isinstance(found, (list, tuple)):
        return len(wanted) == len(found) and all(same_constant(a, b) for a, b in zip(wanted, found, strict=True))
    if isinstance(wanted, bool) != isinstance(found, bool):
        return False
    number = (int, float, torch.SymInt, torch.SymFloat)
    if isinstance(wanted, number) and isinstance(found, number):
        return bool(statically_known_true(wanted == found))
    return type(wanted) is type(found) and bool(wanted == found)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    return value_of(value) if isinstance(value, Node) else value


def _ops_in(part: Any) -> int:
    """How many ops a part of a pattern has, those that it shares counted each time."""
    if isinstance(part, (list, tuple)):
        return sum(map(_ops_in, part))
    return part.ops if isinstance(part, OpPattern) else 0


def _users_through(node: Node) -> Iterator[Node]:
    """The users of a value: direct ones, those behind nodes that do nothing, and those of its split parts."""
    for user in node.users:
        yield user
        if user.target in SPLITS:
            yield from user.users
        elif user.op == "call_function" and is_nothing(user):
            yield from _users_through(user)


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
"""A question of a rule about a match, answered by True, False, or a `Refusal` with a reason."""


@dataclass
class Pattern:
    """The pattern of a rule: one for each output of its function. `outputs[anchor]` is where a try begins."""

    outputs: list[PatternExpr]
    anchor: int = field(init=False)
    operations: list[OpPattern] = field(init=False)

    def __post_init__(self) -> None:
        self.operations = list(_operations(self.outputs))
        firm = [index for index, output in enumerate(self.outputs) if isinstance(output, OpPattern) and not output.soft]
        self.anchor = max(firm, key=lambda index: _weight(self._innermost(index)), default=0)

    def _innermost(self, index: int) -> Any:
        """The op that tells most about an output: the op itself, or the op whose result it picks."""
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
        """The questions of a first look at an anchor: patterns that ask the same get the same answer."""
        begin = self.outputs[self.anchor]
        return (begin.op_name, begin.firm) if isinstance(begin, OpPattern) else None

    def rejected(self, node: Node, calls: Calls) -> Mismatch | None:
        """Why the anchor cannot be at `node`, at a first look."""
        begin = self.outputs[self.anchor]
        if isinstance(begin, OpPattern) and calls.ops(node)[0] == begin.op_name:
            return begin.rejected(node, calls)
        return None

    def match(self, node: Node, calls: Calls) -> Match | Mismatch:
        """Match with the anchor at `node`; the mismatch that came furthest if it does not."""
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
            return Mismatch(0, node, str(found))
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
            attempt.pattern_to_node[output] = None  # this result has no users: it needs no replacement
            return Match(attempt, output)
        return result or attempt.fail(
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
