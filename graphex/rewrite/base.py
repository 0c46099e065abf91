"""A pass, and the object it works on: the graph, the facts about it, and the pen for the journal.

A pass author writes `apply`; `runner` does the timing, linting, dumping, recording and rolling back around it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from graphex.analysis import Aliases, node_line
from graphex.analysis.dependencies import Raising, raising_in
from graphex.analysis.effects import operator_of
from graphex.analysis.happens_before import Order
from graphex.config import CompilerConfig
from graphex.errors import Refusal as Refusal
from graphex.ops import SPECS, has_kernel
from graphex.records import Certificate, Record, Refused, Rewrote
from graphex.rewrite.metadata import inherit
from graphex.torch_private.symbolic import pytree


class Work:
    """One graph while one pass works on it: the graph, the facts about it, and the pen for the journal."""

    def __init__(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        config: CompilerConfig,
        *,
        graph_name: str,
        pass_name: str,
        write: Callable[[Record], None],
        aliases: Aliases,
        phase: str = "inference",
        table: Mapping[Any, Any] | None = None,
        fall_back_later: Callable[[str, str, str], None] = lambda what, reason, line: None,
    ) -> None:
        self.gm = gm
        self.example_inputs = example_inputs
        self.config = config
        self.changes = 0
        self.remark = ""  # what there is to say about the run as a whole
        self.phase = phase  # inference, forward, backward or joint
        self.table = table  # the decompositions the graph was traced with, beyond ours
        self.fall_back_later = fall_back_later  # for what the pass has built: (what, reason, line) while it runs
        self._graph_name = graph_name
        self._pass_name = pass_name
        self._write = write
        self.aliases = aliases  # kept up to date by `replace`

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
        """The same where data dependencies count: for readers of a value that stay its readers."""
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
