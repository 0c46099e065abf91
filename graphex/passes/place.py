"""Turn scopes, records and waits into streams of nodes, and into events that name their stream.

    before:  scope_enter(["_user_stream_label"], ["side"]); a = mm(x, x); r = record(); scope_exit(); wait([r])
    after:   a = mm(x, x)                                      meta: stream "side", epoch 0
             event_record("r", "side", 1); event_wait("r", "(current)", 1)

Runs after the user's passes, because scopes, records and waits mean something by their position, and later passes move
nodes.

Streams and events of model code (`torch.cuda.stream`, `torch.Event`, `graphex.scope.stream`) become the same:

    before:  sin = sin(x)                                         meta: stream 1
             streams.record_event(2, 1); streams.wait_event(2, 0)
    after:   sin = sin(x)                                         meta: stream "torch stream 1"
             event_record("torch event 2", "torch stream 1"); event_wait("torch event 2", "(current)")

torch 2.12 and newer wrap these ops together with the values that must be there before them; values pass through:

    before:  both = control_deps((sin,), record_event(2, 1), sin); sin2 = both[1]; y = add(sin2, 1)
    after:   streams.record_event(2, 1); y = add(sin, 1)
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from graphex.analysis import node_line, placement
from graphex.analysis.dependencies import EPOCH, epoch_of, in_epoch_order
from graphex.analysis.effects import CURRENT, control_body, is_work, operator_of, placed_events, synchronisation
from graphex.device.base import EXTERNAL_EVENTS, ExternalEvents
from graphex.errors import StreamError
from graphex.ops.scope import CORES, IGNORED, LABEL, LEXICAL, NAMESPACES, PRIORITY
from graphex.records import Refused
from graphex.rewrite.base import GraphPass, Work
from graphex.rewrite.metadata import MADE_BY

# -- streams and events as torch leaves them in a graph ----------------------------------------------------------------


STREAM = "torch stream "
EVENT = "torch event "


def label_of(stream: object) -> str:
    """How an op names a stream."""
    return CURRENT if stream is None else str(stream)


def stream_of(found: object) -> object:
    """The label of a stream that torch or a pass names, by a number or a label; None for the current stream."""
    from graphex.torch_private.dynamo import is_current_stream

    if not isinstance(found, int):
        return found
    return None if is_current_stream(found) else f"{STREAM}{found}"


def external_numbers(labels: Iterable[str]) -> tuple[int, ...]:
    """torch's numbers for the streams that `stream_of` has named."""
    return tuple(int(label.removeprefix(STREAM)) for label in labels if label.startswith(STREAM))


def name_streams(graph: Graph) -> None:
    """Let nodes that still have torch's number for their stream have its label."""
    for node in graph.nodes:
        if isinstance(number := placement(node), int):
            stream = stream_of(number)
            custom = {key: value for key, value in node.meta["custom"].items() if key != "stream"}
            node.meta["custom"] = custom if stream is None else {**custom, "stream": stream}


def inline_control(work: Work) -> None:
    """Take the wrapped ops out of their wrapping."""
    for node in list(work.graph.nodes):
        body = control_body(node)
        if body is None or (synchronisation(node) is None and not any(map(_waits_on_host, body.graph.nodes))):
            continue
        with work.graph.inserting_before(node):
            results = _inlined(work, body, list(node.args[2:]))
        for user in list(node.users):
            if user.target is operator.getitem and isinstance(user.args[1], int):
                user.replace_all_uses_with(results[user.args[1]])
                work.graph.erase_node(user)
        node.replace_all_uses_with(results[0])
        work.graph.erase_node(node)
        work.changes += 1


def _waits_on_host(node: Node) -> bool:
    op = operator_of(node)
    return op is not None and op._schema.name.startswith("streams::synchronize")


def _inlined(work: Work, body: GraphModule, values: list[Any]) -> list[Any]:
    env: dict[Node, Any] = {}
    given = iter(values)
    for inner in body.graph.nodes:
        if inner.op == "placeholder":
            env[inner] = next(given)
        elif inner.op == "output":
            returned = inner.args[0] if isinstance(inner.args[0], (list, tuple)) else [inner.args[0]]
            return [env.get(leaf, leaf) for leaf in returned]
        else:
            env[inner] = work.graph.node_copy(inner, env.__getitem__)
    return []


def lower_torch_events(work: Work, writer: _Placing) -> None:
    """Replace torch's ops by events with names. Those that reach out of the graph are noted on its output."""
    recorded: dict[int, str] = {}
    awaited: set[int] = set()
    for node in list(work.graph.nodes):
        op = operator_of(node)
        if op is None or op.namespace != "streams":
            continue
        if op._schema.name == "streams::record_stream":
            value, number = node.args
            writer.used_on(value, stream_of(number), before=node)
        elif _waits_on_host(node):
            with work.graph.inserting_before(node):
                work.graph.call_function(torch.ops.graphex.host_wait.default).meta.update(node.meta)
        elif (sync := synchronisation(node)) is None:
            continue  # not understood: it stays
        elif sync.kind == "wait_stream":
            event = writer.name(node.name)
            writer.wait(event, stream_of(sync.stream), after=node)
            writer.record(event, stream_of(sync.what), after=node)
        else:
            number = sync.what
            assert isinstance(number, int)
            if sync.kind == "record":
                recorded[number] = writer.name(f"{EVENT}{number}")
                writer.record(recorded[number], stream_of(sync.stream), after=node)
            elif number in recorded:
                writer.wait(recorded[number], stream_of(sync.stream), after=node)
            else:
                awaited.add(number)
            if op._schema.name == "streams::sync_dealloc":
                writer.used_on(node.args[2], stream_of(sync.stream), before=node)
        work.graph.erase_node(node)
        work.changes += 1
    if recorded or awaited:
        work.graph.output_node().meta[EXTERNAL_EVENTS] = ExternalEvents(tuple(recorded), tuple(sorted(awaited)))


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
    """The settings between an enter and its exit; those that it does not name are those of the scope around it."""

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
        """Write the settings that hold here on a node."""
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
            take = _OPS.get(operator_of(node))
            if take is None:
                if _TAG in node.meta:
                    self.tags[node.meta[_TAG]] = str(node.args[0])
                if node.op.startswith("call"):
                    self.scopes.place(node)
                continue
            take(self, node)
        self.scopes.close()
        for node in reversed(list(self.work.graph.nodes)):
            if operator_of(node) in _OPS:
                self.work.erase(node, rule=self.rule, because="it is on the nodes now")

    # -- one method for each op ---------------------------------------------------------------------------------

    def enter_scope(self, node: Node) -> None:
        self.scopes.enter(node)

    def leave_scope(self, node: Node) -> None:
        self.scopes.leave(node)

    def take_record(self, node: Node) -> None:
        node.meta["graphex_event"] = self.record(self.name(node.name), self.scopes.stream(node), after=node)

    def take_tagged_record(self, node: Node) -> None:
        tag = str(node.args[0])
        self.tags[tag] = self.name(tag)
        self._event(ours.event_record.default, self.tags[tag], self.scopes.stream(node), node).meta[_TAG] = tag

    def take_wait(self, node: Node) -> None:
        values = node.args[0]
        if not isinstance(values, (list, tuple)) or not values:
            raise StreamError(f"{made(node)} waits for nothing. Give it a list of what record() returned.")
        for value in values:
            if not isinstance(value, Node):
                raise StreamError(f"{made(node)} waits for {value!r}, which nothing in the graph has recorded.")
            self.wait(self._event_of(value), self.scopes.stream(node), after=node)

    def take_tagged_wait(self, node: Node) -> None:
        tag = str(node.args[0])
        if tag not in self.tags:
            raise StreamError(
                f"{made(node)} waits for the event '{tag}', which nothing before it records. Insert "
                f"tagged_event_record('{tag}') where the work it stands for is done."
            )
        self.wait(self.tags[tag], self.scopes.stream(node), after=node)

    def take_use(self, node: Node) -> None:
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
        """A name that no other event has: an event is recorded once."""
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


_METHODS: dict[str, Callable[[_Placing, Node], None]] = {
    "scope_enter": _Placing.enter_scope,
    "scope_exit": _Placing.leave_scope,
    "record": _Placing.take_record,
    "wait": _Placing.take_wait,
    "tagged_event_record": _Placing.take_tagged_record,
    "tagged_event_wait": _Placing.take_tagged_wait,
    "record_tagged_stream": _Placing.take_use,
}
_OPS = {
    getattr(getattr(torch.ops, namespace), name).default: _METHODS[name] for namespace in NAMESPACES for name in LEXICAL
}


def _behind_inputs(node: Node) -> Node:
    """Where to insert behind a node: behind all inputs for an input, because inputs stay together at the start."""
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
