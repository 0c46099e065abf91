"""Compute into memory that is there: what is not needed any more, and the result of a concatenation.

    before:  a = mul(x, y); b = add(a, x); c = relu(b)
    after:   a = mul(x, y); b = add_(a, x); c = relu_(a)

`ReuseDeadMemory`: an op that has an in-place variant writes over its first argument if the graph has allocated it (it
is no input and no tensor that a custom op has returned), it is alone in its storage, has the result's layout, is not
read afterwards (not through a view either), shares no memory with the other arguments and is not in use: no op in
flight works on it, and no custom op may have kept it. An op with a declared in-place variant writes over the arguments
that the declaration names:

    before:  t = update(x, k, v); y = t[0]; new_k = t[1]; new_v = t[2]
    after:   y = update_(x, k, v)                                             and k, v stand for new_k, new_v

Both memory passes call declared variants. `restore_input_writes` marks the arguments that are inputs to be written
where they are; `reuse_dead_memory` takes intermediate values that are not read afterwards. An argument of a marked call
that is neither is copied first, as the functional op would have done.

`WritePartsOfCat` computes the parts of a concatenation where they belong:

    before:  a = mm(x, w); b = relu(y); c = cat([a, b])
    after:   c = empty(...); mm.out(x, w, out=c[:n]); relu.out(y, out=c[n:])

A part is computed in place if an op of the graph makes it for the concatenation alone, in its type and on its stream,
and the op can write to memory it is given. Parts that cannot are copied, as `cat` would have done. The rewrite is
made only where it saves more bytes than the additional calls are worth; symbolic sizes count as what they were traced
with, and must be sums and products of sizes of the inputs.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any

import torch
from torch.fx import Graph, Node

from graphex.analysis import is_random, known_equal, placement, same_layout
from graphex.analysis.effects import operator_of
from graphex.analysis.inplace_variants import DeclaredVariant, declared_variant, inplace_variant
from graphex.analysis.memory import bytes_of, why_not_reusable
from graphex.analysis.shapes import canonical_dim, known_contiguous
from graphex.rewrite.base import GraphPass, Refusal, Work
from graphex.rewrite.metadata import inherit
from graphex.torch_private.symbolic import expression_of, kind_of

COMPUTE, VARIANT = "compute_in_place", "call_inplace_variant"

_DIRECT = "graphex_written_directly"


def updated_argument(step: Node) -> Node | None:
    """The argument of a declared op that `step`, one of its results, is the new version of; None for anything else."""
    call = call_of(step)
    variant = declared_variant(call.target)
    if variant is None or variant.returns_tuple != (call is not step):
        return None
    place = _index(step, variant) - variant.outs if variant.returns_tuple else 0
    values = variant.written_values(call)
    found = values[place] if 0 <= place < len(values) else None
    return found if isinstance(found, Node) else None


def call_of(step: Node) -> Node:
    """The call that a result belongs to."""
    if step.target is operator.getitem and isinstance(step.args[0], Node):
        return step.args[0]
    return step


def why_not_called(call: Node, directly: Node | None) -> Refusal | None:
    """Why a call cannot become one of its variant that writes to `directly`; None if it can.

    Whatever else the variant writes may have to be copied for it, so that must be certain to give the same layout.
    """
    variant = declared_variant(call.target)
    assert variant is not None
    if variant.returns_tuple and any(user.target is not operator.getitem for user in call.users):
        return Refusal("its results are passed on as a tuple", call)
    for value, after in zip(variant.written_values(call), variant.new_versions(call), strict=True):
        known = value.meta.get("val") if isinstance(value, Node) else None
        if not isinstance(value, Node) or not isinstance(known, torch.Tensor) or not same_layout(after, known):
            return Refusal("a new version has another layout than the argument it would be written over", call)
        if directly is not None and value is not directly and not known_contiguous(known):
            return Refusal(f"'{value.name}' might have to be copied first, and is not contiguous", call)
    return None


def write_directly(step: Node, target: Node) -> None:
    """Let the variant write to `target` itself where `step` is the new version of an argument."""
    call, old = call_of(step), updated_argument(step)
    variant = declared_variant(call.target)
    assert variant is not None
    assert old is not None
    call.meta.setdefault(_DIRECT, set()).add(variant.written_values(call).index(old))
    call.replace_input_with(old, target)


def call_marked_variants(work: Work) -> None:
    """Turn every call that is to write to an input into one of its variant, with the copies that are still needed."""
    for call in list(work.graph.nodes):
        direct: set[int] | None = call.meta.pop(_DIRECT, None)
        if direct is None:
            continue
        variant = declared_variant(call.target)
        assert variant is not None
        work.rewired(call, rule=VARIANT, because="an input that it updates is written where it is")
        for place in range(len(variant.written)):
            if place not in direct and work.config.inplace_pass and _why_not_dead(work, call, variant, place) is None:
                _certify(work, call, variant, place)
                direct.add(place)
        _call_variant(work, call, variant, direct)


def reuse_dead_arguments(work: Work, call: Node) -> None:
    """Call the in-place variant if the values it would write over are not needed any more."""
    variant = declared_variant(call.target)
    assert variant is not None
    places = range(len(variant.written))
    refusal = why_not_called(call, None)
    if refusal is None:
        refusals = (_why_not_dead(work, call, variant, place) for place in places)
        refusal = next((each for each in refusals if each is not None), None)
    if refusal is not None:
        moved = sum(bytes_of(value) for value in variant.written_values(call) if isinstance(value, Node))
        work.refuse(call, refusal, rule=VARIANT, bytes_moved=2 * moved)
        return
    for place in places:
        _certify(work, call, variant, place)
    _call_variant(work, call, variant, set(places))


def _why_not_dead(work: Work, call: Node, variant: DeclaredVariant, place: int) -> Refusal | None:
    dead, after = variant.written_values(call)[place], variant.new_versions(call)[place]
    results = [call] if not variant.returns_tuple else _results(call, variant).get(variant.outs + place, [])
    return why_not_reusable(work.aliases, work.order, call, dead, after, results[0] if results else None)


def _certify(work: Work, call: Node, variant: DeclaredVariant, place: int) -> None:
    dead = variant.written_values(call)[place]
    proof = work.certificate(dead, call, bytes_of(dead))
    work.rewired(call, rule=VARIANT, because=f"'{dead.name}' is not read after this", certificate=proof)


def _call_variant(work: Work, call: Node, variant: DeclaredVariant, direct: set[int]) -> None:
    """Change the call, and let the arguments it writes (or copies of them) stand for their new versions."""
    for place, version in enumerate(variant.new_versions(call)):
        if place not in direct:
            _copy_first(work, call, variant, place, version)
    written = variant.written_values(call)
    if variant.returns_tuple:
        for index, results in _results(call, variant).items():
            for result in results:
                if index >= variant.outs:
                    _stand_for(work, result, written[index - variant.outs])
                elif len(variant.inplace._schema.returns) == 1:
                    work.aliases.adopt(call, result)
                    _stand_for(work, result, call)
    else:
        work.aliases.join(call, written[0])
        call.replace_all_uses_with(written[0])
    _retarget(call, variant, written)


def _stand_for(work: Work, result: Node, kept: Node) -> None:
    if kept is not call_of(result):
        work.aliases.join(result, kept)
    result.replace_all_uses_with(kept)
    inherit(kept, result)
    work.graph.erase_node(result)


def _retarget(call: Node, variant: DeclaredVariant, written: list[Any]) -> None:
    own = list(call.meta["val"][: variant.outs]) if variant.returns_tuple else []
    values = [*own, *(value.meta["val"] for value in written)][: len(variant.inplace._schema.returns)]
    call.target = variant.inplace
    call.meta["val"] = tuple(values) if len(values) > 1 else values[0] if values else None
    call.meta.pop("tensor_meta", None)


def _copy_first(work: Work, call: Node, variant: DeclaredVariant, place: int, version: Any) -> None:
    """Let the call write to a copy of an argument that is still needed."""
    position = variant.written[place]
    name = variant.functional._schema.arguments[position].name
    with work.graph.inserting_before(call):
        copy = work.graph.call_function(torch.ops.aten.clone.default, (variant.written_values(call)[place],))
    copy.meta["val"] = version
    if "custom" in call.meta:
        copy.meta["custom"] = call.meta["custom"]
    inherit(copy, call)
    if position < len(call.args):
        call.update_arg(position, copy)
    else:
        call.update_kwarg(name, copy)


def _results(call: Node, variant: DeclaredVariant) -> dict[int, list[Node]]:
    """The nodes that take the parts of a call's result, by part."""
    found: dict[int, list[Node]] = {}
    for user in call.users:
        found.setdefault(_index(user, variant), []).append(user)
    return found


def _index(getitem: Node, variant: DeclaredVariant) -> int:
    index = getitem.args[1]
    assert isinstance(index, int)
    return index + len(variant.functional._schema.returns) if index < 0 else index


class ReuseDeadMemory(GraphPass):
    """Compute into memory that is not needed any more."""

    name = "reuse_dead_memory"
    option = "inplace_pass"
    moves_writes = True
    rule_names = (COMPUTE, VARIANT)

    def apply(self, work: Work) -> None:
        for node in list(work.graph.nodes):
            if node.op != "call_function" or is_random(node):
                continue
            if declared_variant(node.target) is not None and work.allows(VARIANT):
                reuse_dead_arguments(work, node)
            elif work.allows(COMPUTE):
                self._reuse_first_argument(work, node)

    def _reuse_first_argument(self, work: Work, node: Node) -> None:
        variant = inplace_variant(node.target)
        if variant is None or not node.args or not isinstance(node.args[0], Node):
            return
        dead = node.args[0]
        refusal = why_not_reusable(work.aliases, work.order, node, dead, node.meta.get("val"), node)
        if refusal is not None and not refusal.expected:
            work.refuse(node, refusal, rule=COMPUTE, bytes_moved=bytes_of(node))
        if refusal is None:
            proof = work.certificate(dead, node, bytes_of(node))
            work.aliases.join(node, dead)
            node.target = variant
            node.meta["val"] = dead.meta["val"]
            work.rewired(node, rule=COMPUTE, because=f"'{dead.name}' is not read after this", certificate=proof)


# -- sizes as nodes ----------------------------------------------------------------------------------------------------


# A pass that allocates memory needs `s0 + 2 * s1` computed in the graph.
#
#     size s0 + 4  ->  s0 = sym_size.int(x, 0); n = add(s0, 4)        right after the inputs, once for each graph
#
# Symbols come from the inputs: sizes that are inputs themselves, or a dimension of an input. Sums and products of them
# are built; anything else is not known before running.


Value = int | Node

_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {"sum": operator.add, "product": operator.mul}


class Sizes:
    """Makes nodes for the sizes of one graph. A size that was asked for before is not made again."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._symbols: dict[Any, tuple[Node, int | None]] | None = None
        self._made: dict[Any, Value] = {}
        self._last: Node | None = None

    def node(self, size: int | torch.SymInt) -> Value | None:
        """A number, or a node that computes the size; None if that cannot be done from the inputs."""
        return size if isinstance(size, int) else self._built(expression_of(size))

    def _built(self, expression: Any) -> Value | None:
        if expression not in self._made:
            made = self._make(expression)
            if made is None:
                return None
            self._made[expression] = made
        return self._made[expression]

    def _make(self, expression: Any) -> Value | None:
        kind = kind_of(expression)
        if kind == "number":
            return int(expression)
        if kind == "symbol":
            return self._symbol(expression)
        if kind not in _OPERATIONS:
            return None
        parts = [self._built(part) for part in expression.args]
        known = [part for part in parts if part is not None]
        return reduce(lambda a, b: self._call(_OPERATIONS[kind], a, b), known) if len(known) == len(parts) else None

    def _symbol(self, symbol: Any) -> Value | None:
        if self._symbols is None:
            self._symbols = _symbols_of_inputs(self._graph)
        node, dim = self._symbols.get(symbol, (None, None))
        return node if node is None or dim is None else self._call(torch.ops.aten.sym_size.int, node, dim)

    def _call(self, function: Callable[..., Any], *args: Value) -> Value:
        if not any(isinstance(arg, Node) for arg in args):
            return int(function(*args))
        with self._graph.inserting_before(self._first_after_inputs()):
            node = self._graph.call_function(function, args)
        node.meta["val"] = function(*(arg.meta["val"] if isinstance(arg, Node) else arg for arg in args))
        self._last = node
        return node

    def _first_after_inputs(self) -> Node:
        """Where the next node goes: after those made before, which it may use."""
        if self._last is not None:
            return self._last.next
        first: Node = next(node for node in self._graph.nodes if node.op != "placeholder")
        return first


def _symbols_of_inputs(graph: Graph) -> dict[Any, tuple[Node, int | None]]:
    """Each symbol that is an input, or a dimension of one: the node, and which dimension."""
    found: dict[Any, tuple[Node, int | None]] = {}
    for node in graph.nodes:
        if node.op != "placeholder":
            break
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and kind_of(expression_of(value)) == "symbol":
            found[expression_of(value)] = (node, None)
        elif isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt) and kind_of(expression_of(size)) == "symbol":
                    found.setdefault(expression_of(size), (node, dim))
    return found


# -- parts of a concatenation ------------------------------------------------------------------------------------------


aten = torch.ops.aten

WORTHWHILE = 2**16  # bytes; below this one cat is cheaper than several calls

# On a CPU a window that is not contiguous is computed row by row, and functions that are not exactly rounded may then
# take another path for the last elements of a row. These ops give the same bits either way.
EXACT = frozenset(
    {
        "aten::abs",
        "aten::add",
        "aten::addmm",
        "aten::bmm",
        "aten::clamp",
        "aten::div",
        "aten::maximum",
        "aten::minimum",
        "aten::mm",
        "aten::mul",
        "aten::neg",
        "aten::relu",
        "aten::sqrt",
        "aten::sub",
    }
)


@dataclass(frozen=True)
class CatPart:
    """One operand: the node, where it begins and ends, and the op that can write it there (None: it is copied)."""

    node: Node
    start: Value
    end: Value
    out: torch._ops.OpOverload | None


@dataclass(frozen=True)
class CatPlan:
    """The sizes of the result, as numbers and nodes, and its parts."""

    shape: list[Value | None]
    parts: list[CatPart]


class WritePartsOfCat(GraphPass):
    """Compute the parts of a concatenation where they belong."""

    name = "write_parts_of_cat"
    option = "remove_cat_ops"
    rule = "cat_in_place"
    moves_writes = True

    def apply(self, work: Work) -> None:
        sizes = Sizes(work.graph)
        for node in list(work.graph.nodes):
            if node.op == "call_function" and node.target is aten.cat.default and node.args:
                plan = _plan(node, sizes)
                if isinstance(plan, Refusal):
                    work.refuse(node, plan, rule=self.rule)
                else:
                    self._rewrite(work, node, plan)

    def _rewrite(self, work: Work, node: Node, plan: CatPlan) -> None:
        value, dim, parts = node.meta["val"], _dim(node), plan.parts
        direct = [part.node for part in parts if part.out is not None]
        with work.graph.inserting_before(min(direct)):
            options = {"dtype": value.dtype, "device": value.device, "layout": value.layout, "pin_memory": False}
            buffer = _call(work, aten.empty.memory_format, (plan.shape,), options, node, value)
        for part in parts:
            # a part that is copied exists only where the cat stood
            place = part.node if part.out is not None else node
            with work.graph.inserting_before(place):
                piece = _piece(value, part, dim)
                window = _call(work, aten.slice.Tensor, (buffer, dim, part.start, part.end), {}, node, piece)
                if part.out is None:
                    _call(work, aten.copy_.default, (window, part.node), {}, node, piece)
                else:
                    kwargs = {**part.node.kwargs, "out": window}
                    _call(work, part.out, tuple(part.node.args), kwargs, part.node, piece)
        names = ", ".join(f"'{each.name}'" for each in direct)
        work.replace(node, buffer, rule=self.rule, because=f"{names} can be computed where the result needs them")
        for each in direct:
            work.graph.erase_node(each)


def _plan(node: Node, sizes: Sizes) -> CatPlan | Refusal:
    """The plan for a cat, or why it stays."""
    operands, value = node.args[0], node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(operands, (list, tuple)) or len(operands) < 2:
        return Refusal("there are not two tensors to join", nothing_lost=True)
    if not known_contiguous(value):
        return Refusal("the result is not contiguous")
    bytes_saved, outs = 0, []
    occurrences = Counter(operands)
    for operand in operands:
        part = operand.meta.get("val") if isinstance(operand, Node) else None
        if not isinstance(operand, Node) or not isinstance(part, torch.Tensor) or part.dim() != value.dim():
            return Refusal("an operand has another rank (an empty tensor of rank 1 is skipped by cat)")
        out = _writer(node, operand, occurrences[operand])
        bytes_saved += bytes_of(operand) if out is not None else 0
        outs.append((operand, out))
    if not bytes_saved:
        return Refusal(
            "no part is computed here, for the result alone, by an op that could write it", nothing_lost=True
        )
    if bytes_saved < WORTHWHILE:
        return Refusal(f"only {bytes_saved} bytes could be computed in place", nothing_lost=True)
    shape = [sizes.node(size) for size in value.shape]
    parts = _placed(outs, _dim(node), sizes)
    if parts is None or any(size is None for size in shape):
        return Refusal("the sizes of the result are not known before running")
    return CatPlan(shape, parts)


def _placed(outs: list[tuple[Node, Any]], dim: int, sizes: Sizes) -> list[CatPart] | None:
    """The operands one after the other along the dimension; None if it is not known where one ends."""
    parts: list[CatPart] = []
    start: Value = 0
    length: int | torch.SymInt = 0
    for operand, out in outs:
        length = length + operand.meta["val"].shape[dim]
        end = sizes.node(length)
        if end is None:
            return None
        parts.append(CatPart(operand, start, end, out))
        start = end
    return parts


def _piece(value: torch.Tensor, part: CatPart, dim: int) -> torch.Tensor:
    """The (fake) tensor that is the window for a part; its sizes are those of the part, and nothing is guarded."""
    start = part.start.meta["val"] if isinstance(part.start, Node) else part.start
    offset = value.storage_offset() + start * value.stride(dim)
    return value.as_strided(part.node.meta["val"].shape, value.stride(), offset)


def _writer(cat: Node, operand: Node, occurrences: int) -> torch._ops.OpOverload | None:
    """The op that computes `operand` into given memory, if it may."""
    value, part = cat.meta["val"], operand.meta["val"]
    op = operator_of(operand)
    if op is None or occurrences != 1 or set(operand.users) != {cat} or is_random(operand):
        return None
    if part.dtype != value.dtype or part.device != value.device or placement(operand) != placement(cat):
        return None
    contiguous = all(known_equal(size, 1) for size in value.shape[: _dim(cat)])
    if not contiguous and value.device.type == "cpu" and op._schema.name not in EXACT:
        return None
    return out_overload(op)


@cache
def out_overload(op: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """`mm` -> `mm.out`: the overload with the same arguments and an `out` to write to."""
    returns = op._schema.returns
    if op.namespace != "aten" or op._schema.is_mutable or len(returns) != 1 or returns[0].alias_info is not None:
        return None
    wanted = _names_and_types(op._schema.arguments)
    for name in op.overloadpacket.overloads():
        overload: torch._ops.OpOverload = getattr(op.overloadpacket, name)
        arguments = overload._schema.arguments
        if not arguments or not arguments[-1].is_out or sum(argument.is_out for argument in arguments) != 1:
            continue
        if arguments[-1].name == "out" and _names_and_types(arguments[:-1]) == wanted:
            return overload
    return None


def _names_and_types(arguments: Any) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in arguments]


def _dim(node: Node) -> int:
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    assert isinstance(dim, int)
    return canonical_dim(dim, node.meta["val"].dim())


def _call(work: Work, op: Any, args: Any, kwargs: Any, origin: Node, value: Any) -> Node:
    node = work.graph.call_function(op, args, kwargs)
    inherit(node, origin)
    if "custom" in origin.meta:
        node.meta["custom"] = origin.meta["custom"]
    node.meta["val"] = value
    return node
