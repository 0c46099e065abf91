"""The scopes that are open while a graph is walked, and what they say about the nodes inside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from graphex.analysis import node_line, placement
from graphex.analysis.launches import is_work
from graphex.errors import StreamError
from graphex.ops.scope import CORES, LABEL, PRIORITY
from graphex.passes.base import Work
from graphex.passes.metadata import MADE_BY
from graphex.passes.torch_streams import stream_of
from graphex.records import Refused

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
    """What holds between one enter and its exit; what it does not say holds from outside."""

    enter: Node
    values: dict[str, Any]


class Scopes:
    def __init__(self, work: Work) -> None:
        self._work = work
        self._open: list[Scope] = []
        self._priorities: dict[object, int] = {}

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
        if custom != _custom(node):
            if placement(node) != stream and is_work(node):
                self._work.changes += 1
            node.meta["custom"] = custom

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
    """A node, and who put it there."""
    maker, line = node.meta.get(MADE_BY), node_line(node)
    where = f" of your pass '{maker}'" if maker else ""
    return f"node '{node.name}'{where}{f' ({line})' if line else ''}"
