"""Updates of inputs as functionalisation writes them: the new value, traced back to the input it came from.

    x[2:4].add_(k)      s = slice(x, 0, 2, 4); a = add(s, k); new = slice_scatter(x, a, 0, 2, 4);    copy_(x, new)
    x.t().mul_(2)       t = transpose(x, 0, 1); m = mul(t, 2); new = transpose(m, 0, 1);             copy_(x, new)

The first is one update, `a`, of the window `slice(x, 0, 2, 4)`; `new` only puts it back in its place. So is the second,
with another kind of window. Updates follow one another and lie inside one another to any depth (`find_chain`).

The second half keeps writes where the program had them, among the nodes that can raise.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, Node, map_arg

from graphex.analysis import known_equal, node_line
from graphex.analysis.dependencies import NEVER, NO_WRITES, WRITES, TracedProgram, Writes, can_raise, writes_to
from graphex.analysis.inplace_variants import declared_variant, inplace_variant
from graphex.passes import reinplace
from graphex.rewrite.base import Refusal, Work
from graphex.torch_private.graphs import WRAPPER, base_of_result
from graphex.torch_private.symbolic import FakeTensor, NewGuardError, no_new_guards

aten = torch.ops.aten

# op that returns its input with a window replaced -> the view that is this window
WINDOWS: dict[Any, Any] = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.diagonal_scatter.default: aten.diagonal.default,
    aten.as_strided_scatter.default: aten.as_strided.default,
}

# views of all elements, in another arrangement: which element stands where depends on sizes alone, not on strides
ARRANGEMENTS = frozenset(
    {
        aten.alias.default,
        aten.detach.default,
        aten.permute.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.t.default,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
    }
)


@dataclass(frozen=True)
class View:
    """A call that looks at a part of a value, or at all of it in another arrangement."""

    op: Any
    args: tuple[Any, ...]  # those after the value
    kwargs: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def by(node: Node) -> View:
        return View(node.target, tuple(node.args[1:]), dict(node.kwargs))

    def fake(self, value: Any) -> Any:
        """The (fake) tensor that is this view of a (fake) tensor; None if there is none, or not for every size."""
        if not isinstance(value, FakeTensor):
            return None
        args, kwargs = map_arg((self.args, self.kwargs), lambda node: node.meta.get("val"))
        try:
            with no_new_guards(value.fake_mode.shape_env):
                return self.op(value, *args, **kwargs)
        except (RuntimeError, ValueError, NewGuardError):
            return None


Path = tuple[View, ...]


@dataclass(frozen=True)
class WindowPlace:
    """A node, and the window of the input that holds its value at that time."""

    node: Node
    path: Path = ()

    def within(self, view: View) -> WindowPlace:
        return WindowPlace(self.node, (view, *self.path))


@dataclass(frozen=True)
class Update:
    """One write: an op with an in-place variant, or a scatter. `put_back` are the nodes that only carry it outwards."""

    made: WindowPlace
    put_back: tuple[WindowPlace, ...] = ()

    def within(self, view: View) -> Update:
        return Update(self.made.within(view), tuple(place.within(view) for place in self.put_back))

    @property
    def places(self) -> tuple[WindowPlace, ...]:
        return (self.made, *self.put_back)


@dataclass(frozen=True)
class Chain:
    """The updates of one input, in order, and the copy of the last version over it."""

    target: Node
    updates: tuple[Update, ...]
    epilogue: Node

    @property
    def steps(self) -> list[Node]:
        return [update.made.node for update in self.updates]

    @property
    def places(self) -> list[WindowPlace]:
        return [WindowPlace(self.target), *(place for update in self.updates for place in update.places)]


def find_chain(node: Node, whole: Collection[Node], *, declared: bool) -> Chain | None:
    """The updates that lead from an input to the value that is copied over it; None if this is no such copy.

    Scatters in `whole` are taken as one write, whatever their content was made of. With `declared`, ops that have a
    declared in-place variant count as updates too.
    """
    if not is_copy_over_input(node):
        return None
    target, value = node.args[:2]
    assert isinstance(target, Node)
    found = _trace(value, lambda each: each is target, whole, declared)
    return Chain(target, tuple(found[0]), node) if found is not None and found[0] else None


def updated(step: Node, *, declared: bool) -> Any:
    """The argument that the result of an op with an in-place form is a new version of; None if it is no such result."""
    if declared and (argument := reinplace.updated_argument(step)) is not None:
        return argument
    if (old := _updated_by_variant(step)) is not None:
        return old
    if step.target is operator.getitem and isinstance(step.args[0], Node) and step.args[0].target is WRAPPER:
        return base_of_result(step.args[0], int(step.args[1]))  # type: ignore[arg-type]
    return None


def _updated_by_variant(step: Node) -> Any:
    return step.args[0] if step.args and inplace_variant(step.target) is not None else None


def _trace(
    value: Any, is_root: Callable[[Any], bool], whole: Collection[Node], declared: bool, *, inside: bool = False
) -> tuple[list[Update], Node] | None:
    """The updates between a root and `value`, in order, and the root."""
    found: list[Update] = []  # the last one first
    put_back: list[WindowPlace] = []  # what puts back the update that is found next
    while not is_root(value):
        if not isinstance(value, Node):
            return None
        old = _updated_by_variant(value) if inside else updated(value, declared=declared)
        if old is not None:
            updates, value = [Update(WindowPlace(value))], old
        elif value.target in WINDOWS:
            inner = _inside_window(value, whole)
            updates = _carried_by(value, *inner) if inner is not None else [Update(WindowPlace(value))]
            put_back += [] if updates else [WindowPlace(value)]
            value = value.args[0]
        elif value.target in ARRANGEMENTS and (inner := _inside_arrangement(value, whole)) is not None:
            updates = _carried_by(value, *inner)
            put_back += [] if updates else [WindowPlace(value)]
            value = inner[1].args[0]
        else:
            return None
        if updates:
            updates[-1] = replace(updates[-1], put_back=(*updates[-1].put_back, *put_back[::-1]))
            found += updates[::-1]
            put_back = []
    return (found[::-1], value) if not put_back else None


def _carried_by(outer: Node, updates: list[Update], root: Node) -> list[Update]:
    """Updates of the window that `root` looks at, as `outer` puts them back in their place."""
    if not updates:
        return []  # the window is put back as it was
    *first, last = (update.within(View.by(root)) for update in updates)
    return [*first, replace(last, put_back=(*last.put_back, WindowPlace(outer)))]


def _inside_window(scatter: Node, whole: Collection[Node]) -> tuple[list[Update], Node] | None:
    """The updates of the window that a scatter puts back; None if it brings something else."""
    if scatter in whole:
        return None
    seen_by = View(WINDOWS[scatter.target], tuple(scatter.args[2:]), dict(scatter.kwargs))

    def is_root(node: Any) -> bool:
        is_view = isinstance(node, Node) and node.target is seen_by.op and node.args[0] is scatter.args[0]
        return is_view and View.by(node) == seen_by

    return _trace(scatter.args[1], is_root, whole, declared=False, inside=True)


def _inside_arrangement(outer: Node, whole: Collection[Node]) -> tuple[list[Update], Node] | None:
    """The updates of a value in another arrangement, which `outer` turns back into the first."""
    return _trace(outer.args[0], lambda node: _turns_back(node, outer), whole, declared=False, inside=True)


def _turns_back(inner: Any, outer: Node) -> bool:
    """Whether `outer` undoes what `inner` does: every element is where it was.

    Tried on a contiguous tensor: an arrangement that has its sizes and strides again has every element in its place.
    """
    if not isinstance(inner, Node) or inner.target not in ARRANGEMENTS or not isinstance(inner.args[0], Node):
        return False
    before, after = inner.args[0].meta.get("val"), outer.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    if before.dtype != after.dtype or not known_equal(tuple(before.shape), tuple(after.shape)):
        return False
    plain = before.new_empty(before.shape)
    again = View.by(outer).fake(View.by(inner).fake(plain))
    if again is None:
        return False
    return known_equal(tuple(again.shape), tuple(plain.shape)) and known_equal(again.stride(), plain.stride())


# -- writes of the program ---------------------------------------------------------------------------------------------
#     program      st.add_(1); y = t[i]                       new = st + 1; y = t[i]; st.copy_(new)
#     as traced    a = add(st, 1); y = index(t, [i]);         a = add(st, 1); y = index(t, [i]); c = copy(st, a);
#                  copy_(st, a)                               copy_(st, c)
#
# Every write of the program has left a node at its place: the op without its underscore, made from the version before
# it. So the first program writes before `index` and the second behind it. This is noted before the first pass, because
# `c` is a no-op and does not stay, and before the partitioner of a training graph, which merges equal values. A write
# is put back in place only where every node that can raise finds the state that it would have found in the program; a
# copy at the end moves up to the first node that would have found it done.


def note_program_writes(
    graph: Graph, *, has_out: bool, exact: bool = False, is_own: Callable[[Node], bool] = lambda node: False
) -> None:
    """Note on each input when the program wrote to it, and which nodes are the input after such a write.

    `has_out`: some call of the program may have an `out=`, whose result is a version of an input without being made
    from the one before. `exact`: every value of the program is a node of its own, as in an inference graph by
    AOTAutograd; the partitioner of training graphs merges equal ones. `is_own` tells the program's own copies over an
    input from those by functionalisation.
    """
    nodes = list(graph.nodes)
    program = TracedProgram(
        {node.name: time for time, node in enumerate(nodes)},
        {node.name: node.target for node in nodes if can_raise(node)},
    )
    for node in nodes:
        node.meta.pop(WRITES, None)
    for epilogue in filter(is_copy_over_input, nodes):
        target = epilogue.args[0]
        assert isinstance(target, Node)
        if is_own(epilogue) or target.meta.get(WRITES) is not None:
            target.meta[WRITES] = Writes(program, (program.time[epilogue.name],), {epilogue.name: 0})
        else:
            target.meta[WRITES] = _writes(epilogue, program, only_last=has_out, exact=exact)


def is_copy_over_input(node: Node) -> bool:
    if node.op != "call_function" or node.target is not aten.copy_.default or len(node.args) < 2:
        return False
    target, value = node.args[:2]
    is_input = isinstance(target, Node) and target.op in ("placeholder", "get_attr")
    return is_input and isinstance(value, Node)


def _writes(epilogue: Node, program: TracedProgram, *, only_last: bool, exact: bool) -> Writes:
    chain, value = find_chain(epilogue, (), declared=False), epilogue.args[1]
    assert isinstance(value, Node)
    if chain is None:
        return Writes(program, (program.time[value.name],), {value.name: 0})
    updates = chain.updates[-1:] if only_last else chain.updates
    times = tuple(max(program.time[place.node.name] for place in update.places) for update in updates)
    number = {place.node.name: number for number, update in enumerate(updates) for place in update.places}
    versions = frozenset(place.node.name for place in chain.places[1:]) if exact else frozenset[str]()
    return Writes(program, times, number, versions)


def why_seen(work: Work, chain: Chain) -> tuple[Refusal, Update] | None:
    """Why an exception could show, and the update that lets it: a node may raise while the input has a value that it
    never had there in the user's program. None if none does.
    """
    writes = writes_to(chain.target) or NO_WRITES
    starts = [work.aliases.position(reinplace.call_of(step)) for step in chain.steps]
    ends = [*(start + 1 for start in starts[1:]), work.aliases.position(chain.epilogue)]  # a write raises before it is
    for update, start, end in zip(chain.updates, starts, ends, strict=True):
        step, call = update.made.node, reinplace.call_of(update.made.node)
        if _may_stop_halfway(call) and not writes.is_own(step):
            return Refusal(f"'{call.name}' may raise when it has written a part of '{chain.target.name}'", step), update
        if (raiser := _observer(work, writes, update, start, end)) is not None:
            where = f" ({line})" if (line := node_line(raiser)) else ""
            reason = f"'{raiser.name}'{where} may raise, and '{chain.target.name}' would be another than in the program"
            return Refusal(reason, step), update
    return None


def _observer(work: Work, writes: Writes, update: Update, start: int, end: int) -> Node | None:
    """A node between two positions that may raise and expects other writes than those up to `update`."""
    done = writes.last_by(*(place.node for place in update.places))
    if done is None:
        return next(iter(work.raising.between(start, end)), None)
    if (early := work.raising.first_before(writes.times[done], start, end)) is not None:
        return early
    if done + 1 == len(writes.times):
        return None
    later = writes.times[done + 1]
    return next((node for node in work.raising.between(start, end) if work.raising.time_of(node)[1] > later), None)


def _may_stop_halfway(call: Node) -> bool:
    """Whether an op that writes may raise in the middle of it. A declared variant checks what it is given first."""
    return declared_variant(call.target) is None and can_raise(call)


def move_copies_up(work: Work) -> None:
    """Let the copies that are left at the end stand before the first node that would have found them done."""
    if not work.order.one_stream:
        return
    for copy in filter(is_copy_over_input, list(work.graph.nodes)):
        if work.aliases.knows(copy) and (place := _place_of(work, copy)) is not None:
            place.prepend(copy)


def _place_of(work: Work, copy: Node) -> Node | None:
    target, value = copy.args[:2]
    assert isinstance(target, Node)
    assert isinstance(value, Node)
    aliases, raising, writes = work.aliases, work.raising, writes_to(target)
    if writes is None or not writes.times or not aliases.knows(value) or len(aliases.writes(target)) != 1:
        return None
    start, end, written = aliases.position(value), aliases.position(copy), writes.times[-1]
    after = [node for node in raising.between(start, end) if raising.time_of(node)[0] > written]
    if not after or raising.first_before(written, aliases.position(after[0]) - 1, end) is not None:
        return None
    before = after[0].prev
    while not aliases.knows(before):
        before = before.prev
    is_read = aliases.readers_after(target, before, until=end)
    return None if is_read or aliases.written_between(value, before, NEVER) else after[0]
