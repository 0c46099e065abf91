"""A pass, the object it works on, and the metadata that every node has: a value, a source line, a stream, its origins.

A pass author writes `apply`; `runner` does the timing, linting, dumping, recording and rolling back around it.

A custom pass may insert bare nodes, retarget existing ones, or hand back a whole new graph (`fx.Transformer` drops
every value, those of the placeholders too). After it has run (`repair`):

* a node that is a copy of one from before (same op, same inputs) gets all of that node's metadata back;
* every other new node inherits source line, stream and origins from the nodes it replaced;
* values that are missing or no longer true are computed by running the node on fake tensors, and so on downstream
  for as long as they differ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node, map_arg

from graphex.analysis import Aliases, known_equal, node_line, placement, same_layout
from graphex.analysis.dependencies import EPOCH, Raising, epoch_of, raising_in
from graphex.analysis.effects import is_work, operator_of
from graphex.analysis.graphs import ORIGINS, attribute_of, origins, value_key
from graphex.analysis.happens_before import Order
from graphex.config import CompilerConfig
from graphex.errors import PassError
from graphex.errors import Refusal as Refusal
from graphex.ops import SPECS, has_kernel
from graphex.records import Certificate, Record, Refused, Rewrote
from graphex.torch_private.symbolic import FAKED_BY, FakeTensor, FakeTensorMode, detect_fake_mode, pytree


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


def inherit(node: Node, *replaced: Node) -> None:
    """Let a node carry on the origins of what it replaces, and their source line if it has none."""
    names = dict.fromkeys([*origins(node), *(name for old in replaced for name in origins(old))])
    if names:
        node.meta[ORIGINS] = tuple(names)
    if node.op != "placeholder" and not node.meta.get("stack_trace"):
        trace = next((old.meta["stack_trace"] for old in replaced if old.meta.get("stack_trace")), None)
        if trace:
            node.meta["stack_trace"] = trace


# -- metadata of nodes that foreign code has made ----------------------------------------------------------------------


MADE_BY = "graphex_made_by"  # the user's pass that put a node there
_INHERITED = ("stack_trace", "custom", "stream_label", "nn_module_stack", "seq_nr", "partitioner_tag")


def stamp_origins(graph: Graph) -> None:
    """Name every node, as AOTAutograd gave it, as its own origin."""
    for node in graph.nodes:
        node.meta[ORIGINS] = (node.name,)


class PassWatch:
    """Notes, while a foreign pass runs, what it replaces by what."""

    def __init__(self, gm: GraphModule) -> None:
        self._gm = gm
        self.nodes = set(gm.graph.nodes)
        self.before = {node.name: node for node in gm.graph.nodes}
        self.calls = {node: (node.target, node.args, node.kwargs) for node in gm.graph.nodes}
        self.placeholders = gm.graph.find_nodes(op="placeholder")
        self.metas = {node: dict(node.meta) for node in gm.graph.nodes}
        self.replaced: dict[str, list[Node]] = {}

    def __enter__(self) -> PassWatch:
        self._gm._register_replace_node_hook(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._gm._unregister_replace_node_hook(self._note)

    def dropped(self, gm: GraphModule) -> list[Node]:
        """The nodes that are still there and have lost what they carried."""
        return [
            node
            for node in gm.graph.nodes
            if node.op != "output"
            and node in self.nodes
            and any(key in self.metas[node] and key not in node.meta for key in ("val", ORIGINS))
        ]

    def _note(self, old: Node, new: str, user: Node) -> None:
        known = self.replaced.setdefault(new, [])
        if old not in known:
            known.append(old)


def repair(gm: GraphModule, watch: PassWatch, pass_name: str) -> None:
    """Restore metadata after a foreign pass that turned `watch.before` into `gm`."""
    _restore_placeholders(gm, watch)
    for node in watch.dropped(gm):
        node.meta.update({key: value for key, value in watch.metas[node].items() if key not in node.meta})
    copies = _restore_copies(gm, watch)
    replaced = (old.name for olds in watch.replaced.values() for old in olds)
    elsewhere = {*replaced, *(node.name for node in gm.graph.nodes)}
    known = copies | watch.nodes
    new = [node for node in gm.graph.nodes if node not in known and node.op not in ("placeholder", "output")]
    for node in new:
        node.meta[MADE_BY] = pass_name
        inherit_all(node, _ancestors(node, watch, elsewhere))
    for node in reversed(new):  # the inside of a replacement: from the part of it that is known
        if ORIGINS not in node.meta:
            inherit_all(node, [user for user in node.users if ORIGINS in user.meta])
    for node in new:
        if ORIGINS not in node.meta:
            inherit_all(node, [value for value in node.all_input_nodes if ORIGINS in value.meta])
            node.meta.setdefault(ORIGINS, ())
    propagate_values(gm, lambda node: node not in copies and _is_changed(node, watch), f"your pass '{pass_name}'")


def propagate_values(gm: GraphModule, stale: Callable[[Node], bool], who: str) -> None:
    """Compute `meta["val"]` where it is missing or stale, and downstream of every value that came out different."""
    mode = fake_mode_of(gm)
    if mode is None:
        return
    dirty: set[Node] = set()
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        known = node.meta.get("val")
        if node not in dirty and "val" in node.meta and not stale(node):
            continue
        try:
            value = evaluate(gm, node, mode)
        except Exception as error:
            problem = f"left node '{node.name}' ({node.target}) that cannot be evaluated: {error}"
            raise PassError(f"{who} {problem}") from error
        if known is None or not _same_value(known, value):
            node.meta["val"] = value
            node.meta.pop("tensor_meta", None)
            dirty.update(node.users)


def correct_layouts(gm: GraphModule) -> None:
    """Compute the values again of ops whose fakes are known to be wrong, and of the nodes behind them."""
    propagate_values(gm, lambda node: node.target in FAKED_BY, "tracing")


def _restore_placeholders(gm: GraphModule, watch: PassWatch) -> None:
    placeholders = gm.graph.find_nodes(op="placeholder")
    for node, old in zip(placeholders, watch.placeholders, strict=True):
        node.meta.update({key: value for key, value in watch.metas[old].items() if key not in node.meta})


def _restore_copies(gm: GraphModule, watch: PassWatch) -> set[Node]:
    """Recognise nodes of a rebuilt graph that are the old ones again, in the order they are computed."""
    counterpart: dict[Node, Node] = {}
    placeholders = iter(watch.placeholders)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            counterpart[node] = next(placeholders)
        elif ORIGINS in node.meta:
            continue
        else:
            old = _source_node(node, watch)
            if old is None:
                continue
            target, args, kwargs = watch.calls[old]
            mapped = map_arg((node.args, node.kwargs), lambda value: counterpart.get(value, value))
            if node.target == target and value_key(mapped) == value_key((args, kwargs)):
                counterpart[node] = old
                node.meta.update(watch.metas[old])
    return {node for node in counterpart if node.op != "placeholder"}


def _source_node(node: Node, watch: PassWatch) -> Node | None:
    """The node that an interpreter was running when this one was made, by torch's own provenance."""
    sources = node.meta.get("from_node") or ()
    return watch.before.get(sources[-1].name) if sources else None


def _ancestors(node: Node, watch: PassWatch, elsewhere: set[str]) -> list[Node]:
    """The nodes that a new node stands for: those whose users it took over, and those that disappeared with them.

    `elsewhere` names nodes that did not disappear, or that another node stands for.
    """
    replaced = watch.replaced.get(node.name)
    if not replaced:
        source = _source_node(node, watch)
        return [source] if source is not None else []
    found = dict.fromkeys(replaced)
    pending = list(replaced)
    while pending:
        _, args, kwargs = watch.calls.get(pending.pop(), (None, (), {}))
        for value in pytree.tree_leaves((args, kwargs)):
            if isinstance(value, Node) and value not in found and value.name not in elsewhere:
                found[value] = None
                pending.append(value)
    return list(found)


def inherit_all(node: Node, ancestors: list[Node]) -> None:
    """Let a node carry on the origins, source line, stream and annotations of what it stands for."""
    if not ancestors:
        return
    inherit(node, *ancestors)
    for key in _INHERITED:
        found = next((old.meta[key] for old in ancestors if old.meta.get(key) is not None), None)
        if found is not None:
            node.meta.setdefault(key, found)
    _inherit_place(node, [old for old in ancestors if is_work(old)])


def _inherit_place(node: Node, kernels: list[Node]) -> None:
    """Put a node that replaces work of one stream on that stream, between the same events."""
    streams = {placement(old) for old in kernels}
    if len(streams) == 1 and placement(node) is None and (stream := streams.pop()) is not None:
        node.meta["custom"] = {**node.meta.get("custom", {}), "stream": stream}
    epochs = {epoch_of(old) for old in kernels}
    if len(epochs) == 1 and (epoch := epochs.pop()) is not None:
        node.meta.setdefault(EPOCH, epoch)


def _is_changed(node: Node, watch: PassWatch) -> bool:
    call = watch.calls.get(node)
    return call is None or value_key(call) != value_key((node.target, node.args, node.kwargs))


def fake_mode_of(gm: GraphModule) -> FakeTensorMode | None:
    values = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    values += [node.meta.get("val") for node in gm.graph.nodes if node.op != "placeholder"]
    return detect_fake_mode([value for value in values if isinstance(value, FakeTensor)])


def evaluate(gm: GraphModule, node: Node, mode: FakeTensorMode, instead: Mapping[Node, Any] | None = None) -> Any:
    """The fake value of a node, from the values of its inputs; `instead` overrides some of them."""
    if node.op == "get_attr":
        return _fake_attribute(gm, str(node.target), mode)
    known = instead or {}
    args, kwargs = map_arg((node.args, node.kwargs), lambda value: known.get(value, value.meta.get("val")))
    with mode:
        if node.op == "call_module":
            return _run_module(gm.get_submodule(str(node.target)), args, kwargs, mode)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return FAKED_BY.get(node.target, node.target)(*args, **kwargs)


def _fake_attribute(gm: GraphModule, target: str, mode: FakeTensorMode) -> Any:
    value = attribute_of(gm, target)
    return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value


def _run_module(module: Any, args: Any, kwargs: Any, mode: FakeTensorMode) -> Any:
    """A submodule may hold real tensors; they are made fake for the occasion."""
    if not isinstance(module, GraphModule):
        return module(*args, **kwargs)

    class _Fake(torch.fx.Interpreter):
        def fetch_attr(self, target: str) -> Any:
            return _fake_attribute(self.module, target, mode)  # type: ignore[arg-type]

    return _Fake(module).run(*args)


def _same_value(left: Any, right: Any) -> bool:
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(_same_value(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return same_layout(left, right)
    if isinstance(left, (torch.SymInt, int)) and isinstance(right, (torch.SymInt, int)):
        return known_equal(left, right)
    return type(left) is type(right)
