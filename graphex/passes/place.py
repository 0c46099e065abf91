"""Turn scopes, records and waits into streams of nodes, and into events that name their stream.

    before:  scope_enter(["_user_stream_label"], ["side"]); a = mm(x, x); r = record(); scope_exit(); wait([r])
    after:   a = mm(x, x)                                      meta: stream "side", epoch 0
             event_record("r", "side", 1); event_wait("r", "(current)", 1)

Runs after the user's passes: what they write means something by where it stands, and every later pass may move it.
Streams and events of model code (`torch.cuda.stream`, `torch.Event`, `graphex.scope.stream`) become the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Graph, Node

from graphex.analysis import node_line, placement
from graphex.analysis.dependencies import EPOCH, epoch_of, in_epoch_order
from graphex.analysis.effects import CURRENT, is_work, operator_of, placed_events
from graphex.errors import StreamError
from graphex.ops.scope import CORES, IGNORED, LABEL, LEXICAL, NAMESPACES, PRIORITY
from graphex.passes.torch_streams import inline_control, label_of, lower_torch_events, stream_of
from graphex.records import Refused
from graphex.rewrite.base import GraphPass, Work
from graphex.rewrite.metadata import MADE_BY

# -- scopes ------------------------------------------------------------------------------------------------------------
# The scopes that are open while a graph is walked, and their settings for the nodes inside.


_NOT_NEEDED = {"_user_stream_id", "_user_stream_device_index", "_user_stream_device_type"}


def _label(value: str) -> str:
    if not value or value.startswith("("):
        raise ValueError("a stream's label is a word")
    return value


def _cores(value: str) -> int:
    if (number := int(value)) < 1:
        raise ValueError("the smallest number of cores is 1")
    return number


_KEYS: dict[str, Callable[[str], Any]] = {
    "_user_stream_label": _label,
    "_user_stream_priority": int,
    "_op_aicore_num": _cores,
    "_op_vectorcore_num": _cores,
}


@dataclass(frozen=True)
class Scope:
    """A scope: the settings between one enter and its exit. Those it leaves open hold from outside."""

    enter: Node
    values: dict[str, Any]


class Scopes:
    def __init__(self, work: Work) -> None:
        self._work = work
        self._open: list[Scope] = []
        self._priorities: dict[object, int] = {}
        self._said: set[str] = set()

    def enter(self, node: Node) -> None:
        keys, values = _two_lists(node)
        found = dict(self._open[-1].values) if self._open else {}
        for key, value in zip(keys, values, strict=True):
            read = _KEYS.get(key)
            if read is None:
                self._ignore(node, key)
                continue
            try:
                found[key] = read(str(value))
            except ValueError as error:
                raise StreamError(f"{made(node)} sets '{key}' to {value!r}: {error}.") from None
        self._open.append(Scope(node, found))

    def leave(self, node: Node) -> None:
        if not self._open:
            raise StreamError(f"{made(node)} leaves a scope that was never entered. Insert scope_enter before it.")
        self._open.pop()

    def close(self) -> None:
        if self._open:
            node = self._open[-1].enter
            raise StreamError(
                f"{made(node)} enters a scope that is never left. Insert scope_exit behind the last node of it; if the "
                "scope is in model code, a graph break may have cut it in two."
            )

    def stream(self, node: Node) -> object:
        """The stream that a node standing here is on."""
        label = self._open[-1].values.get("_user_stream_label") if self._open else None
        custom = _custom(node)
        return label or custom.get(LABEL) or stream_of(custom.get("stream"))

    def place(self, node: Node) -> None:
        """Write on a node what holds here."""
        custom = dict(_custom(node))
        stream = self.stream(node)
        scope = self._open[-1].values if self._open else {}
        priority = scope.get("_user_stream_priority", custom.get(PRIORITY))
        cores = (scope.get("_op_aicore_num"), scope.get("_op_vectorcore_num"))
        custom.pop(LABEL, None)
        custom.pop("stream", None)
        if stream is not None:
            custom["stream"] = stream
            if priority is not None and is_work(node):
                custom[PRIORITY] = self._same_priority(node, stream, priority)
        if any(cores):
            custom[CORES] = cores
        if (why := custom.pop(IGNORED, None)) is not None and why not in self._said:
            self._said.add(why)
            self._work.note(lambda graph, name: Refused(graph, name, "scope", node.name, why, node_line(node)))
        if custom != _custom(node):
            if placement(node) != stream and is_work(node):
                self._work.changes += 1
            node.meta["custom"] = custom
        if stream is not None:
            node.meta["stream_label"] = label_of(stream)  # where checks written for other compilers look
        else:
            node.meta.pop("stream_label", None)

    def _same_priority(self, node: Node, stream: object, priority: int) -> int:
        known = self._priorities.setdefault(stream, priority)
        if known != priority:
            raise StreamError(
                f"{made(node)} gives the stream '{stream}' the priority {priority}; it already has {known}. "
                "A stream has one priority: use another label."
            )
        return priority

    def _ignore(self, node: Node, key: str) -> None:
        if key not in _NOT_NEEDED:
            reason = f"the scope key '{key}' means nothing here; the keys are {', '.join(_KEYS)}"
            self._work.note(lambda graph, name: Refused(graph, name, "scope", node.name, reason, node_line(node)))


def _two_lists(node: Node) -> tuple[list[Any], list[Any]]:
    given = [*node.args, *node.kwargs.values()]
    keys, values = given[:2] if len(given) >= 2 else (None, None)
    if not isinstance(keys, (list, tuple)) or not isinstance(values, (list, tuple)) or len(keys) != len(values):
        raise StreamError(f"{made(node)} takes a list of keys and a list of as many values.")
    return list(keys), list(values)


def _custom(node: Node) -> dict[str, Any]:
    custom = node.meta.get("custom")
    return custom if isinstance(custom, dict) else {}


def made(node: Node) -> str:
    """A node, with the user's pass that made it and its line, as a sentence names it."""
    maker, line = node.meta.get(MADE_BY), node_line(node)
    where = f" of your pass '{maker}'" if maker else ""
    return f"node '{node.name}'{where}{f' ({line})' if line else ''}"


# -- placement ---------------------------------------------------------------------------------------------------------


_TAG = "graphex_tag"  # on a record: the name that a later pass may wait for it by

ours = torch.ops.graphex
_OPS = {getattr(getattr(torch.ops, namespace), name).default: name for namespace in NAMESPACES for name in LEXICAL}


class PlaceNodes(GraphPass):
    name = "place_nodes"
    is_needed = True
    rule = "placement"

    def concerns(self, graph: Graph) -> bool:
        return any(map(_is_concerned, graph.nodes))

    def apply(self, work: Work) -> None:
        inline_control(work)
        _put_in_epoch_order(work)
        _Placing(work, self.rule).run()
        _number(work)


def _is_concerned(node: Node) -> bool:
    custom = node.meta.get("custom")
    if isinstance(custom, dict) and not custom.keys().isdisjoint((LABEL, CORES, IGNORED)):
        return True
    op = operator_of(node)
    return op in _OPS or placement(node) is not None or (op is not None and op.namespace == "streams")


def _put_in_epoch_order(work: Work) -> None:
    """Nodes that a pass has moved away from their events go back, before new events get their numbers."""
    if not any(placed_events(list(work.graph.nodes))):
        return
    order = in_epoch_order(work.graph, frozenset(node for node in work.graph.nodes if operator_of(node) in _OPS))
    if isinstance(order, Node):
        if not work.config.post_grad_custom_post_pass:
            raise RuntimeError(f"no order of the nodes keeps all events ('{order.name}')")
        raise StreamError(
            f"{made(order)} contradicts the events that were there before: no order of the nodes keeps all of them. "
            "Insert it on the other side of the record or wait it depends on."
        )
    relink(work, order)


def relink(work: Work, order: list[Node]) -> None:
    """Put the nodes of the graph in this order."""
    if order == list(work.graph.nodes):
        return
    for node, following in pairwise(order):
        node.append(following)
    work.changes += 1


class _Placing:
    """One walk over the nodes as they stand."""

    def __init__(self, work: Work, rule: str) -> None:
        self.work = work
        self.rule = rule
        self.scopes = Scopes(work)
        self.tags: dict[str, str] = {}  # a tag -> the event that its last record is
        self.names: Counter[str] = Counter(str(sync.what) for _, sync in placed_events(list(work.graph.nodes)))

    def run(self) -> None:
        lower_torch_events(self.work, self)
        for node in list(self.work.graph.nodes):
            name = _OPS.get(operator_of(node))
            if name is None:
                if _TAG in node.meta:
                    self.tags[node.meta[_TAG]] = str(node.args[0])
                if node.op.startswith("call"):
                    self.scopes.place(node)
                continue
            getattr(self, f"_{name}")(node)
        self.scopes.close()
        for node in reversed(list(self.work.graph.nodes)):
            if operator_of(node) in _OPS:
                self.work.erase(node, rule=self.rule, because="it is on the nodes now")

    # -- one method for each op ---------------------------------------------------------------------------------

    def _scope_enter(self, node: Node) -> None:
        self.scopes.enter(node)

    def _scope_exit(self, node: Node) -> None:
        self.scopes.leave(node)

    def _record(self, node: Node) -> None:
        node.meta["graphex_event"] = self.record(self.name(node.name), self.scopes.stream(node), after=node)

    def _tagged_event_record(self, node: Node) -> None:
        tag = str(node.args[0])
        self.tags[tag] = self.name(tag)
        self._event(ours.event_record.default, self.tags[tag], self.scopes.stream(node), node).meta[_TAG] = tag

    def _wait(self, node: Node) -> None:
        values = node.args[0]
        if not isinstance(values, (list, tuple)) or not values:
            raise StreamError(f"{made(node)} waits for nothing. Give it a list of what record() returned.")
        for value in values:
            if not isinstance(value, Node):
                raise StreamError(f"{made(node)} waits for {value!r}, which nothing in the graph has recorded.")
            self.wait(self._event_of(value), self.scopes.stream(node), after=node)

    def _tagged_event_wait(self, node: Node) -> None:
        tag = str(node.args[0])
        if tag not in self.tags:
            raise StreamError(
                f"{made(node)} waits for the event '{tag}', which nothing before it records. Insert "
                f"tagged_event_record('{tag}') where the work it stands for is done."
            )
        self.wait(self.tags[tag], self.scopes.stream(node), after=node)

    def _record_tagged_stream(self, node: Node) -> None:
        label = str(node.args[1])
        self.used_on(node.args[0], None if label == CURRENT else label, before=node)

    def _event_of(self, value: Node) -> str:
        """The event behind a value: the one that `record` made, or one recorded where the value is made."""
        while value.op.startswith("call") and "graphex_event" not in value.meta and not is_work(value):
            value = value.all_input_nodes[0]
        event: str | None = value.meta.get("graphex_event")
        if event is None:
            event = value.meta["graphex_event"] = self.record(self.name(value.name), placement(value), after=value)
        return event

    # -- what they are made of ----------------------------------------------------------------------------------

    def name(self, wanted: str) -> str:
        """An event is recorded once: what is recorded again has another name."""
        self.names[wanted] += 1
        return wanted if self.names[wanted] == 1 else f"{wanted} {self.names[wanted]}"

    def record(self, event: str, stream: object, *, after: Node) -> str:
        self._event(ours.event_record.default, event, stream, _behind_inputs(after))
        return event

    def wait(self, event: str, stream: object, *, after: Node) -> None:
        self._event(ours.event_wait.default, event, stream, after)

    def used_on(self, value: Any, stream: object, *, before: Node) -> None:
        with self.work.graph.inserting_before(before):
            node = self.work.graph.call_function(ours.used_on.default, (value,))
        node.meta.update(val=None, custom={"stream": stream} if stream is not None else {})
        self.work.changes += 1

    def _event(self, op: Any, event: str, stream: object, place: Node) -> Node:
        with self.work.graph.inserting_after(place):
            node = self.work.graph.call_function(op, (event, label_of(stream), 0))
        node.meta["val"] = None
        self.work.changes += 1
        return node


def _behind_inputs(node: Node) -> Node:
    """Placeholders stay together at the start."""
    while node.op == "placeholder" and node.next.op == "placeholder":
        node = node.next
    return node


def _number(work: Work) -> None:
    """Count the events of each stream, and note on every node which of them it is behind."""
    epochs: Counter[object] = Counter()
    events = dict(placed_events(list(work.graph.nodes)))
    for node in work.graph.nodes:
        if node in events:
            stream = events[node].stream
            epochs[stream] += 1
            node.args = (*node.args[:2], epochs[stream])
        elif is_work(node) and epoch_of(node) != epochs[placement(node)]:
            node.meta[EPOCH] = epochs[placement(node)]
            work.changes += 1
