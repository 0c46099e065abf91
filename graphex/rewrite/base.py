"""A pass, the object it works on, and the proof that a node may move.

A pass author writes `apply`; `runner` does the timing, linting, dumping, recording and rolling back around it. `Work`
is the graph, the facts about it, and the pen for the journal.

Passes that join nodes compute them at another place than where they stood:

    before:  k' = rotary(k); index_copy_(keys, 2, at, k'); ... ; index_copy_(values, 2, at, v)
    after:                                                 ... ; rotary_qkv_write_(k, v, keys, values, at)

They ask one `Motion`, with the place that a node comes from (`start`) and the place that it goes to (`end`): what it
reads, what it writes and the streams around it must stay as they were. Its facts are those from before the first
rewrite of the pass. The pass adds to `moved` the memory whose writes it has moved: nothing more is proven about that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from graphex.analysis import Aliases, is_effectful, node_line, placement, written_arguments
from graphex.analysis.aliasing import Storage
from graphex.analysis.dependencies import Raising, epoch_of, raising_in
from graphex.analysis.effects import is_work, operator_of
from graphex.analysis.happens_before import Order
from graphex.config import CompilerConfig
from graphex.errors import Refusal as Refusal
from graphex.ops import SPECS, has_kernel
from graphex.ops.scope import CORES
from graphex.records import Certificate, Record, Refused, Rewrote, RuleTried
from graphex.rewrite.metadata import inherit
from graphex.torch_private.symbolic import pytree


@dataclass(eq=False, repr=False)
class Work:
    """One graph while one pass works on it: the graph, the facts about it, and the pen for the journal."""

    gm: GraphModule
    example_inputs: Sequence[Any]
    config: CompilerConfig
    phase: str  # inference, forward, backward or joint
    table: Mapping[Any, Any] | None  # the decompositions the graph was traced with, beyond ours
    aliases: Aliases  # kept up to date by `replace`
    fall_back_later: Callable[[str, str, str], None]  # for what the pass has built: (what, reason, line) while it runs
    _graph_name: str
    _pass_name: str
    _write: Callable[[Record], None]
    changes: int = 0
    remark: str = ""  # what there is to say about the run as a whole

    @property
    def graph(self) -> Graph:
        return self.gm.graph

    @cached_property
    def order(self) -> Order:
        """The order of nodes, as the graph stood when this was first asked for; data dependencies do not count,
        because the passes that ask take them away.
        """
        return Order(self.graph, data=False)

    @cached_property
    def order_with_data(self) -> Order:
        """The order of nodes where data dependencies count: for readers of a value that stay its readers."""
        return Order(self.graph)

    @cached_property
    def raising(self) -> Raising:
        """The nodes that can raise, at the places that `aliases` know."""
        return raising_in(self.graph, self.aliases)

    def allows(self, rule: str) -> bool:
        return rule not in self.config.disable_rules

    def replace(self, node: Node, kept: Node, *, rule: str, because: str) -> None:
        """Let `kept` stand for `node` everywhere, and drop `node`."""
        self.aliases.join(node, kept)
        self._record_rewrite(rule, [node], [kept], because)
        inherit(kept, node)
        node.replace_all_uses_with(kept)
        self.graph.erase_node(node)

    def rewired(self, node: Node, *, rule: str, because: str, certificate: Certificate | None = None) -> None:
        """Take note that `node` was changed in place: its arguments, or the op it calls."""
        self._record_rewrite(rule, [node], [node], because, certificate)

    def fused(self, names: list[str], into: list[Node], *, rule: str, because: str, line: str) -> None:
        """Take note that the nodes of these names, which are gone, were replaced by `into`."""
        self.changes += 1
        new = tuple(node.name for node in into)
        preview = any(map(runs_by_reference, into))
        self._write(Rewrote(self._graph_name, self._pass_name, rule, tuple(names), new, because, line, preview=preview))

    def note(self, make: Callable[[str, str], Record]) -> None:
        """Write a record of another kind, made from the names of the graph and the pass."""
        self._write(make(self._graph_name, self._pass_name))

    def tried(self, rule: str, matches: int, candidates: int, remark: str = "") -> None:
        """Take note how often `rule` applied, of how many places where it did or nearly did."""
        self._write(RuleTried(self._graph_name, self._pass_name, rule, matches, candidates, remark))

    def erase(self, node: Node, *, rule: str, because: str) -> None:
        self._record_rewrite(rule, [node], [], because)
        self.graph.erase_node(node)

    def refuse(self, node: Node, reason: str | Refusal, *, rule: str, bytes_moved: int = 0) -> None:
        """Take note that `rule` fits at `node` and was refused."""
        said = reason if isinstance(reason, Refusal) else Refusal(reason)
        place = self._graph_name, self._pass_name, rule, node.name, said.reason, node_line(node)
        self._write(Refused(*place, bytes_moved, said.edit, said.nothing_lost))

    def certificate(self, written: Node, writer: Node, bytes_saved: int) -> Certificate:
        """Why `writer` may write to the memory of `written`: the node named here is the last to read it."""
        owners = ", ".join(sorted(owner.name for owner, _ in self.aliases.storages(written)))
        last = self.aliases.last_reader_before(written, writer)
        return Certificate(owners, "nobody" if last is None else last.name, bytes_saved)

    def _record_rewrite(
        self, rule: str, nodes: list[Node], into: list[Node], because: str, certificate: Certificate | None = None
    ) -> None:
        self.changes += 1
        line = next(filter(None, map(node_line, nodes)), "")
        old, new = tuple(node.name for node in nodes), tuple(node.name for node in into)
        preview = any(map(runs_by_reference, into)) and not certificate
        about = self._graph_name, self._pass_name, rule, old, new, because, line, certificate
        self._write(Rewrote(*about, preview))


class GraphPass(ABC):
    """A transformation of one graph.

    `option` names the configuration flag that switches it. `preserves_results = False` declares that the pass changes
    what the graph computes on purpose; verification then takes the graph after it as the reference.
    """

    name: str
    option: ClassVar[str | None] = None
    rule: ClassVar[str] = ""  # for a pass that has one: without it there is nothing to do
    rule_names: ClassVar[tuple[str, ...]] = ()  # for a pass that has several
    stage: str = ""
    preserves_results: bool = True
    moves_writes: ClassVar[bool] = False  # writes to memory are this pass's subject: they may end up elsewhere
    is_needed: ClassVar[bool] = False  # no graph runs without it: verification does not leave it out
    foreign: bool = False  # written by a user: errors stop compilation, metadata is repaired afterwards

    def enabled(self, config: CompilerConfig) -> bool:
        name = getattr(self, "name", type(self).__name__)  # a user's may have none
        if name in config.disable_passes or (self.rule in config.disable_rules and not self.is_needed):
            return False
        return self.option is None or bool(getattr(config, self.option))

    def concerns(self, graph: Graph) -> bool:
        """Whether there is anything for the pass in a graph; if not, it does not run and leaves no record."""
        return True

    def rules(self) -> tuple[str, ...]:
        """The names of the rules this pass applies, for `disable_rules`."""
        return (self.rule,) if self.rule else self.rule_names

    @abstractmethod
    def apply(self, work: Work) -> None: ...


def runs_by_reference(node: Node) -> bool:
    """Whether a node calls an op of ours on a device that has no kernel for it."""
    op = operator_of(node)
    if op is None or op._schema.name not in SPECS:
        return False
    tensors = [value for value in pytree.tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]
    return bool(tensors) and not has_kernel(op._schema.name, tensors[0].device)


# -- the proof that a node may move ------------------------------------------------------------------------------------


class Read(NamedTuple):
    """A value, and the node that reads it now."""

    value: Node
    reader: Node


class Motion:
    """Proofs that nodes of one graph may move. Each proof returns a Refusal, or None if the move is safe."""

    def __init__(self, work: Work) -> None:
        self.work, self.aliases = work, work.aliases
        self.moved: set[Storage] = set()

    # -- facts -------------------------------------------------------------------------------------------------------

    def unknown(self, nodes: Iterable[Node]) -> Refusal | None:
        """Refuse nodes that a rewrite of the pass has made: they are not in the facts."""
        if all(map(self.aliases.knows, nodes)):
            return None
        return Refusal("it needs the result of another rewrite of this pass")

    def moved_before(self, values: Iterable[Node]) -> Refusal | None:
        if all(self.moved.isdisjoint(self.aliases.storages(value)) for value in values):
            return None
        return Refusal("another rewrite of this pass has moved a write to the same memory")

    # -- streams -----------------------------------------------------------------------------------------------------

    def across_streams(self, start: Node, end: Node, involved: Iterable[Node] = ()) -> Refusal | None:
        """All nodes involved are on the stream of `start`, and nothing on the way to `end` orders streams."""
        for node in (*involved, end):
            if placement(node) != placement(start):
                return Refusal(f"'{start.name}' and '{node.name}' run on different streams")
        if not self.work.order.one_stream and (between := _ordering_between(start, end)) is not None:
            return Refusal(f"'{between.name}', which may order streams, stands in between")
        return None

    # -- memory ------------------------------------------------------------------------------------------------------

    def written_between(self, reads: Iterable[Read], end: Node) -> Refusal | None:
        """Each value that is read at `end` instead of by its reader must be the same there."""
        for value, reader in reads:
            if writer := self.writer_between(value, reader, end):
                between = f"'{reader.name}' and '{end.name}'"
                return Refusal(f"'{value.name}' is written between {between}, by '{writer.name}'", end)
        return None

    def writer_between(self, value: Node, start: Node, end: Node) -> Node | None:
        """A node behind `start`, `end` included, that writes to the memory of a value."""
        first, last = map(self.aliases.position, (start, end))
        if not self.aliases.written_between(value, start, last):
            return None
        return next(node for node in self.aliases.writes(value) if first < self.aliases.position(node) <= last)

    def used_between(
        self, written: Node, start: Node, end: Node, until: str, besides: Collection[Node] = ()
    ) -> Refusal | None:
        """A write to `written` may go from `start` to `end` if nothing uses that memory on the way."""
        first, last = map(self.aliases.position, (start, end))
        for user in self.aliases.users_of_memory(written):
            is_between = first < self.aliases.position(user) < last
            if is_between and user not in besides and not _only_looks(user):
                return Refusal(f"'{user.name}' uses '{written.name}' before {until}")
        if reader := self.aliases.in_use.keeper_between(written, start, end):
            return Refusal(f"'{reader.name}' may read '{written.name}', which a custom op may have kept")
        return None

    def raised_between(self, start: Node, end: Node, when: str, besides: Collection[Node] = ()) -> Refusal | None:
        """Code that catches an exception from between the two places finds the write at `start` done."""
        for node in self.work.raising.between(*map(self.aliases.position, (start, end))):
            if node not in besides:
                return Refusal(f"'{node.name}' may raise {when}")
        return None


def _ordering_between(first: Node, last: Node) -> Node | None:
    """A node between two that has an effect and writes to nothing: it may order streams."""
    node = first.next
    while node is not last:
        if is_effectful(node) and not written_arguments(node):
            return node
        node = node.next
    return None


def _only_looks(node: Node) -> bool:
    """A view: it reads no element."""
    op = operator_of(node)
    if op is None or op._schema.is_mutable:
        return False
    return all(result.alias_info is not None for result in op._schema.returns)


def can_stand_before(node: Node, place: Node) -> bool:
    """Whether a value is there at `place`, or can be: views and sizes of what is there can be made anywhere."""
    if node < place or node.op in ("placeholder", "get_attr"):
        return True
    if node.op != "call_function" or is_work(node) or is_effectful(node):
        return False
    return all(can_stand_before(value, place) for value in node.all_input_nodes)


def bring_before(node: Node, place: Node) -> None:
    """Move a view, and the nodes it is made of, in front of `place`, where `can_stand_before` allows it."""
    if node < place or node.op == "placeholder":
        return
    for value in node.all_input_nodes:
        bring_before(value, place)
    place.prepend(node)


def where(node: Node) -> Hashable:
    """The stream, its epoch and the core limits under which a node runs."""
    return repr(placement(node)), epoch_of(node), repr((node.meta.get("custom") or {}).get(CORES))


def elsewhere(one: Node, other: Node) -> Refusal | None:
    """Why two nodes cannot become one: they run on two streams, in two epochs of one, or under other core limits."""
    if where(one) == where(other):
        return None
    if placement(one) != placement(other):
        return Refusal(f"'{one.name}' and '{other.name}' run on different streams", other)
    if epoch_of(one) != epoch_of(other):
        return Refusal(f"their stream records or waits between '{one.name}' and '{other.name}'", other)
    return Refusal(f"'{one.name}' and '{other.name}' have different limits of cores", other)


def used_by(user: Node) -> str:
    """The user of a value, as a refusal names it."""
    if user.op == "output":
        return "returned"
    return f"used by '{user.name}'" + (f" ({line})" if (line := node_line(user)) else "")
