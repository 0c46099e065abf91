"""Metadata of nodes: a value, a source line, a stream, origins. Passes hand it on; a user's pass may lose it.

A user's pass may insert bare nodes, retarget existing ones, or hand back a whole new graph (`fx.Transformer` drops
every value, those of the placeholders too). After it has run (`repair`):

* a node that is a copy of one from before (same op, same inputs) gets all of that node's metadata back;
* every other new node inherits source line, stream and origins from the nodes it replaced;
* values that are missing or no longer true are computed by running the node on fake tensors, and so on downstream
  for as long as they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, map_arg

from graphex.analysis import known_equal, placement, same_layout
from graphex.analysis.dependencies import EPOCH, epoch_of
from graphex.analysis.effects import is_work
from graphex.analysis.graphs import ORIGINS, attribute_of, origins, value_key
from graphex.errors import PassError
from graphex.torch_private.graphs import replacements_told
from graphex.torch_private.symbolic import FAKED_BY, NORMS, FakeTensor, FakeTensorMode, detect_fake_mode, pytree

MADE_BY = "graphex_made_by"  # the user's pass that put a node there
_INHERITED = ("stack_trace", "custom", "stream_label", "nn_module_stack", "seq_nr", "partitioner_tag")


def stamp_origins(graph: Graph) -> None:
    """Name every node, as AOTAutograd gave it, as its own origin."""
    for node in graph.nodes:
        node.meta[ORIGINS] = (node.name,)


def inherit(node: Node, *replaced: Node) -> None:
    """Let a node carry on the origins of the nodes it replaces, and their source line if it has none."""
    names = dict.fromkeys([*origins(node), *(name for old in replaced for name in origins(old))])
    if names:
        node.meta[ORIGINS] = tuple(names)
    if node.op != "placeholder" and not node.meta.get("stack_trace"):
        trace = next((old.meta["stack_trace"] for old in replaced if old.meta.get("stack_trace")), None)
        if trace:
            node.meta["stack_trace"] = trace


def inherit_all(node: Node, ancestors: list[Node]) -> None:
    """Let a node carry on the origins, source line, stream and annotations of the nodes it stands for."""
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


class PassWatch:
    """Notes which nodes a user's pass replaces by which, while it runs."""

    def __init__(self, gm: GraphModule) -> None:
        self.nodes = set(gm.graph.nodes)
        self.before = {node.name: node for node in gm.graph.nodes}
        self.calls = {node: (node.target, node.args, node.kwargs) for node in gm.graph.nodes}
        self.placeholders = gm.graph.find_nodes(op="placeholder")
        self.metas = {node: dict(node.meta) for node in gm.graph.nodes}
        self.replaced: dict[str, list[Node]] = {}
        self._told = replacements_told(gm, self._note)

    def __enter__(self) -> PassWatch:
        self._told.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._told.__exit__(*error)

    def dropped(self, gm: GraphModule) -> list[Node]:
        """The nodes that are still there and have lost metadata."""
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


def correct_values(gm: GraphModule) -> None:
    """Compute the values again of ops whose fakes are known to be wrong, and of the nodes behind them."""
    propagate_values(gm, _is_faked_wrong, "tracing")


def _is_faked_wrong(node: Node) -> bool:
    """Whether the fake of an op may be wrong about a node; those of norms are right for values of one type."""
    if node.target not in FAKED_BY:
        return False
    types = {value.dtype for each in node.all_input_nodes if isinstance(value := each.meta.get("val"), torch.Tensor)}
    return node.target not in NORMS or len(types) > 1


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
