"""Write inputs where they are: undo functionalisation's "new value, then copy it over the input".

    before:  new = index_copy(cache, 2, pos, k); y = attend(q, new); copy_(cache, new)
    after:   new = index_copy_(cache, 2, pos, k); y = attend(q, new)

    before:  s = slice(cache, 2, a, b); t = add(s, k); new = slice_scatter(cache, t, 2, a, b); copy_(cache, new)
    after:   window = slice(cache, 2, a, b); add_(window, k)

A chain of updates becomes a chain of writes. It is done only if no older version of the memory is read after it is
overwritten, no update reads the memory it writes, the new value is not handed out as an output of its own (a view of
the input that the user gets back is none), and an exception in between leaves the input as the program would
(`updates`). The refusal names the read, or the node that may raise, that is in the way.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node, map_arg

from graphex.analysis import Aliases, known_equal, node_line, same_layout, written_arguments
from graphex.analysis.aliasing import Storage
from graphex.analysis.dependencies import NO_WRITES, writes_to
from graphex.analysis.effects import PURE_NAMESPACES, operator_of
from graphex.analysis.inplace_variants import has_unproven_variant, inplace_variant
from graphex.analysis.memory import bytes_of, unordered_update
from graphex.analysis.shapes import same_offset, shares_offset_with
from graphex.passes import reinplace
from graphex.passes.updates import (
    WINDOWS,
    Chain,
    Update,
    View,
    WindowPlace,
    find_chain,
    move_copies_up,
    updated,
    why_seen,
)
from graphex.rewrite.base import GraphPass, Refusal, Work
from graphex.rewrite.metadata import PassWatch, fake_mode_of, inherit, repair
from graphex.torch_private.graphs import (
    WRAPPER,
    WRAPPERS,
    finds_views_by_offset,
    unwrap,
    write_directly,
    written_bases,
)
from graphex.torch_private.symbolic import FAKED_BY

# -- layouts -----------------------------------------------------------------------------------------------------------


# The layouts of a graph if one of its values is laid out in memory otherwise.
#
#     before:  new = index_copy(transpose(cache), ...); t = transpose(new); s = sum(t)      new is contiguous, t is not
#     after:   index_copy_(transpose(cache), ...);                          s = sum(cache)  cache is contiguous
#
# Views of the value are laid out otherwise too, as long as they can be taken at all. A computation must give a result
# of the same layout as before, so that nothing changes beyond it. Asked of known sizes only; nothing is guarded.


aten = torch.ops.aten

_BY_STRIDES = frozenset({aten.as_strided.default, aten.view.dtype})


def laid_out_as(aliases: Aliases, node: Node, value: Any, leaving_out: Collection[Node]) -> dict[Node, Any] | None:
    """The new values of `node` and of all views of it; None if a user depends on the layout it has.

    Users in `leaving_out` are not asked.
    """
    if not _is_known(value):
        return None
    changed: dict[Node, Any] = {node: value}
    pending = [node]
    while pending:
        for user in pending.pop().users:
            if user in leaving_out or user in changed or user.op == "output":
                continue
            result = _computed(user, changed)
            if result is None:
                return None
            if aliases.may_alias(user, node):
                if not _same_shape(result, user.meta.get("val")):
                    return None
                changed[user] = result
                pending.append(user)
            elif not _all_alike(result, user.meta.get("val")):
                return None
    return changed


def _computed(user: Node, changed: dict[Node, Any]) -> Any:
    """The (fake) result of a node with other values for some arguments; None if it has none, or is not understood."""
    op = operator_of(user)
    if op is None or op in _BY_STRIDES or op.namespace not in PURE_NAMESPACES or written_arguments(user):
        return None
    args, kwargs = map_arg((user.args, user.kwargs), lambda node: changed.get(node, node.meta.get("val")))
    try:
        return FAKED_BY.get(op, op)(*args, **kwargs)
    except Exception:  # a view that this layout does not allow
        return None


def _is_known(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and all(isinstance(n, int) for n in (*value.shape, *value.stride()))


def _same_shape(left: Any, right: Any) -> bool:
    return _is_known(left) and _is_known(right) and left.shape == right.shape and left.dtype == right.dtype


def _all_alike(left: Any, right: Any) -> bool:
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(_all_alike, left, right))
    return _is_known(left) and same_layout(left, right)


# -- custom ops that write to their arguments --------------------------------------------------------------------------


#     before:  new = auto_functionalized_v2(bump, x=..., _all_bases=[cache])[1]; copy_(cache, new)
#     after:   bump(cache, x)
#
# AOTAutograd wraps such ops so that they write to copies. `restore_input_writes` finds the inputs that can be written
# directly; here the same is found for intermediate values that are not read afterwards, and the ops and the copies that
# remain replace the wrappers.


INPUT, ARGUMENT = "write_input_in_place", "write_argument_in_place"


def unwrap_mutable_ops(work: Work, pass_name: str) -> None:
    """Replace the wrappers of a graph. Part of the pass that marks them: a marked wrapper is not correct by itself."""
    wrapped = [node for node in work.graph.nodes if node.target in WRAPPERS]
    mode = fake_mode_of(work.gm)
    if not wrapped or mode is None:
        return
    for node in wrapped:
        if node.target is WRAPPER and work.config.inplace_pass and work.allows(ARGUMENT):
            for base in written_bases(node):
                if not isinstance(base, Node) or not _is_unread(work, node, base):
                    continue
                if (use := work.aliases.in_use.why(base, node)) is not None:
                    refusal = Refusal(f"'{base.name}' is not free: {use.reason}", node, use.edit)
                    work.refuse(node, refusal, rule=ARGUMENT, bytes_moved=2 * bytes_of(base))
                else:
                    write_directly(node, base)
                    work.rewired(node, rule=ARGUMENT, because=f"'{base.name}' is not read after this")
    known = set(work.graph.nodes)
    with PassWatch(work.gm) as watch:
        unwrap(work.graph, mode)
        for node in [node for node in work.graph.nodes if node not in known and node.target is aten.as_strided.default]:
            _count_from_the_input(node)
    repair(work.gm, watch, pass_name)
    work.changes += len(wrapped)


def _count_from_the_input(view: Node) -> None:
    """Let a view of an input begin as far behind the input as in the example; a call may give one that begins later."""
    base, size, stride, *offset = view.args
    assert isinstance(base, Node)
    traced = base.meta["val"].storage_offset()
    if base.op != "placeholder" or not offset or not isinstance(offset[0], int) or not isinstance(traced, int):
        return
    with view.graph.inserting_before(view):
        begin = view.graph.call_function(aten.sym_storage_offset.default, (base,))
        begin.meta["val"] = traced
        if offset[0] != traced:
            begin = view.graph.call_function(operator.add, (begin, offset[0] - traced))
            begin.meta["val"] = offset[0]
    view.args = (base, size, stride, begin)


def _is_unread(work: Work, node: Node, base: Node) -> bool:
    """Whether `base` is not needed as it was, and the op finds its views of `base` as it would in a copy."""
    aliases = work.aliases
    if finds_views_by_offset(node) and shares_offset_with(base) is not None:
        return False  # tracing has counted from the start of a copy; this begins where another value does
    readers = (value for each in aliases.readers_after(base, node) for value in each.all_input_nodes)
    if aliases.is_owned_elsewhere(base) or any(aliases.may_alias(value, base) for value in readers):
        return False
    return not aliases.shares_with_operands(node, base)


# -- writes to inputs --------------------------------------------------------------------------------------------------


Layouts = dict[Node, Any]  # nodes that are laid out otherwise when an input is written in place: their new values

_ATTEMPTS = 8  # at taking a chain apart, each time with one more scatter left whole


class RestoreInputWrites(GraphPass):
    name = "restore_input_writes"
    option = "input_inplace_pass"
    moves_writes = True
    rule_names = (INPUT, ARGUMENT, reinplace.VARIANT)

    def apply(self, work: Work) -> None:
        if work.allows(INPUT):
            for node in list(work.graph.nodes):
                self._restore(work, node)
            move_copies_up(work)
        reinplace.call_marked_variants(work)
        unwrap_mutable_ops(work, self.name)

    def _restore(self, work: Work, epilogue: Node) -> None:
        found = _provable(work, epilogue)
        if found is None:
            self._name_what_is_unknown(work, epilogue)
            return
        chain, refusal, layouts = found
        if refusal is not None:
            work.refuse(refusal.node or epilogue, refusal, rule=INPUT, bytes_moved=_bytes_moved(chain))
            return
        names = ", ".join(f"'{step.name}'" for step in chain.steps)
        because = f"the old value of '{chain.target.name}' is not read after {names}"
        proof = work.certificate(chain.target, _writer(chain.steps[0]), _bytes_moved(chain))
        work.rewired(chain.steps[-1], rule=INPUT, because=because, certificate=proof)
        _write_in_place(work, chain, layouts)

    def _name_what_is_unknown(self, work: Work, node: Node) -> None:
        """Refuse an update by an op that could write in place, but is not known to give the same bits then."""
        if node.target is not aten.copy_.default or len(node.args) < 2:
            return
        target, value = node.args[0], node.args[1]
        if not isinstance(target, Node) or target.op != "placeholder" or not isinstance(value, Node):
            return
        if value.args and value.args[0] is target and has_unproven_variant(value.target):
            reason = f"'{value.target}' is not known to give the same bits in place"
            work.refuse(value, reason, rule=INPUT, bytes_moved=4 * bytes_of(target))


def _bytes_moved(chain: Chain) -> int:
    """The bytes that functionalisation moves in a call: each step, and the copy back, reads and writes the tensor."""
    return 2 * bytes_of(chain.target) * (len(chain.steps) + 1)


def _provable(work: Work, epilogue: Node) -> tuple[Chain, Refusal | None, Layouts] | None:
    """A chain that may be written in place (and the layouts that change by it), or one that may not and why.

    Where the inside of a scatter is in the way, the scatter is tried as a whole: its content is computed elsewhere and
    copied into the window.
    """
    declared = work.allows(reinplace.VARIANT)
    first: tuple[Chain, Refusal | None, Layouts] | None = None
    whole: set[Node] = set()
    for _ in range(_ATTEMPTS):
        chain = find_chain(epilogue, whole, declared=declared)
        if chain is None:
            break
        proof = ChainProof(work, chain)
        problem = proof.why_not()
        if problem is None:
            return chain, None, proof.layouts
        first = first or (chain, problem[0], {})
        scatters = [place.node for place in problem[1].put_back if place.node.target in WINDOWS] if problem[1] else []
        if not scatters:
            break
        whole.add(scatters[0])
    return first


def first_write_in_place(work: Work, epilogue: Node) -> Node | None:
    """The node that will be the first to write to an input that `epilogue` updates; None if it will be a copy."""
    found = _provable(work, epilogue)
    return _writer(found[0].steps[0]) if found is not None and found[1] is None else None


class ChainProof:
    """The proof that a chain may be written in place. `why_not` gives the refusal, and the update that causes it if one
    does.
    """

    def __init__(self, work: Work, chain: Chain) -> None:
        self.work = work
        self.aliases = work.aliases
        self.chain = chain
        self.inside = {place.node for place in chain.places}
        self.layouts: Layouts = {}
        self.memory = frozenset[Storage]().union(*map(self.aliases.storages, self.inside))

    def why_not(self) -> tuple[Refusal, Update | None] | None:
        chain, aliases = self.chain, self.aliases
        if len(aliases.writes(chain.target)) != 1:
            return Refusal(f"'{chain.target.name}' is written to more than once", chain.epilogue), None
        before: tuple[WindowPlace, ...] = (WindowPlace(chain.target),)
        for update in chain.updates:
            refusal = self._why_not_update(update)
            if refusal is None:
                refusal = self._why_not_overwritten(before, update)
            if refusal is not None:
                return refusal, update
            before = update.places
        steps = [place.node for place in chain.places if place.node is not chain.target]
        # The copy will be gone, and each update reads what the one before it has left.
        ordered = {chain.epilogue, *map(_writer, chain.steps)}
        for step in steps:
            orders = self.work.order, self.work.order_with_data
            refusal = unordered_update(*orders, aliases, _writer(step), [chain.target, *steps], ordered)
            if refusal is not None:
                return replace(refusal, node=step), None
        if any(aliases.is_handed_out(step, chain.target) for step in steps):
            return Refusal("an output would begin to share memory with an input", steps[-1]), None
        if any(aliases.is_written(step) for step in steps):
            return Refusal("the new value is written to", steps[-1]), None
        return self._why_in_use(steps) or why_seen(self.work, chain)

    def _why_in_use(self, steps: list[Node]) -> tuple[Refusal, Update | None] | None:
        """Why the memory of the input, or of its versions, is in use by more than the readers in the graph.

        Where a version was an update of the input in the user's program, it lived in the input's memory there too.
        """
        chain, aliases = self.chain, self.aliases
        is_version = (writes_to(chain.target) or NO_WRITES).is_version
        for step in steps:
            if not is_version(step) and (use := aliases.in_use.why_escaped(step)) is not None:
                return Refusal(f"'{step.name}' would be memory of the input: {use.reason}", step, use.edit), None
        for step in chain.steps:
            writer = _writer(step)
            if (use := aliases.in_use.why_in_flight(chain.target, writer)) is not None:
                return Refusal(f"the old value is not free: {use.reason}", step, use.edit), None
            if not is_version(step) and (reader := aliases.in_use.keeper_between(chain.target, writer, chain.epilogue)):
                return Refusal(f"'{reader.name}' may read the old value, which a custom op may have kept", step), None
        return None

    def _why_not_update(self, update: Update) -> Refusal | None:
        step = update.made.node
        for place in update.places:
            if (refusal := self._why_not_there(place)) is not None:
                return refusal
        old = updated(step, declared=True)
        is_call = reinplace.updated_argument(step) is not None
        if is_call and (refusal := reinplace.why_not_called(_writer(step), old)) is not None:
            return replace(refusal, node=step)
        if self._operands_share(step, old if old is not None else step.args[0]):
            return Refusal("the update reads the memory it would write", step)
        return None

    def _why_not_there(self, place: WindowPlace) -> Refusal | None:
        """Why the window of the input cannot stand for the value of a node; None if it can."""
        found, window = place.node.meta.get("val"), self.chain.target.meta.get("val")
        if not isinstance(found, torch.Tensor) or not isinstance(window, torch.Tensor):
            return Refusal("what is updated is not a tensor", place.node)
        for view in place.path:
            window = view.fake(window)
            if window is None:
                return Refusal("it is not known where in the input the new value belongs", place.node)
        if not same_layout(found, window):
            alike = found.dtype == window.dtype and known_equal(tuple(found.shape), tuple(window.shape))
            if not alike or not self._may_be_laid_out_as(place.node, window):
                return Refusal("the new value has another layout than the input", place.node)
        if self.aliases.is_absolute(place.node) and not same_offset(found, window):
            return Refusal(
                "the new value is addressed from the start of its storage, and the input begins later", place.node
            )
        return None

    def _may_be_laid_out_as(self, node: Node, window: torch.Tensor) -> bool:
        """Whether all other readers of the value can read the window instead."""
        inside = {*self.inside, self.chain.epilogue}
        if all(user in inside for user in node.users):
            return True
        changed = laid_out_as(self.aliases, node, window, inside)
        if changed is not None:
            self.layouts.update(changed)
        return changed is not None

    def _operands_share(self, step: Node, old: Any) -> bool:
        """Whether an argument besides the one that is updated may live in the memory of any version."""
        writer = _writer(step)
        if self.aliases.shares_with_operands(writer, old):
            return True
        operands = [value for value in writer.all_input_nodes if value is not old]
        return any(not self.aliases.storages(value).isdisjoint(self.memory) for value in operands)

    def _why_not_overwritten(self, before: tuple[WindowPlace, ...], update: Update) -> Refusal | None:
        """Why an update may not overwrite the version before it: a node reads that later. None if none does.

        Putting a window back reads nothing.
        """
        step = update.made.node
        end = self.aliases.position(self.chain.epilogue)
        put_back = {place.node for place in update.put_back}
        for old in before:
            last = end if old.node is self.chain.target else None
            for reader in self.aliases.readers_after(old.node, _writer(step), until=last):
                if reader is not self.chain.epilogue and reader not in put_back:
                    where = f" ({line})" if (line := node_line(reader)) else ""
                    return Refusal(f"the old value is read later by '{reader.name}'{where}", step)
        return None


def _writer(step: Node) -> Node:
    """The node that will do the writing: the step itself, or the op whose result it is."""
    return reinplace.call_of(step)


def _write_in_place(work: Work, chain: Chain, layouts: Layouts) -> None:
    for node, value in layouts.items():
        node.meta["val"] = value
        node.meta.pop("tensor_meta", None)
    for node in (*chain.steps[1:], chain.target):
        work.aliases.join(node, chain.steps[0])
    chain.epilogue.replace_all_uses_with(chain.places[-1].node)
    work.graph.erase_node(chain.epilogue)
    for update in chain.updates:
        _write(work, chain.target, update.made)
        for place in update.put_back:
            _let_stand(work, chain.target, place)


def _write(work: Work, target: Node, made: WindowPlace) -> None:
    step = made.node
    variant = inplace_variant(step.target)
    if reinplace.updated_argument(step) is not None:
        reinplace.write_directly(step, target)
    elif step.target is operator.getitem:
        _writer(step).replace_input_with(updated(step, declared=False), target)
        write_directly(_writer(step), target)
    elif variant is not None:
        window = _window(work, target, made)
        step.target = variant
        step.args = (window, *step.args[1:])
        step.meta["val"] = window.meta["val"]
    else:
        view = View(WINDOWS[step.target], tuple(step.args[2:]), dict(step.kwargs))
        window = _window(work, target, WindowPlace(step, (*made.path, view)))
        with work.graph.inserting_before(step):
            write = work.graph.call_function(aten.copy_.default, (window, step.args[1]))
        write.meta["val"] = window.meta["val"]
        inherit(write, step)
        _let_stand(work, target, made)


def _let_stand(work: Work, target: Node, place: WindowPlace) -> None:
    """Let the window of the input stand for a node that only named its content."""
    if place.node.users:
        place.node.replace_all_uses_with(_window(work, target, place))
    work.graph.erase_node(place.node)


def _window(work: Work, target: Node, place: WindowPlace) -> Node:
    """The window of the input, made where the node of the place stands."""
    window = target
    with work.graph.inserting_before(place.node):
        for view in place.path:
            value = view.fake(window.meta["val"])
            window = work.graph.call_function(view.op, (window, *view.args), view.kwargs)
            window.meta["val"] = value
            inherit(window, place.node)
            if "custom" in place.node.meta:
                window.meta["custom"] = place.node.meta["custom"]
    return window
