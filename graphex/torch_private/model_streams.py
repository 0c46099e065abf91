"""Streams and events that a compiled function makes itself, and scopes of streams in which its graph breaks.

Dynamo has a table of the classes whose objects it may make while it traces, and code that makes them anew in every
call: `build_stream` and `build_event`, which know torch's own accelerator. It keeps what it has made for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphex.torch_private.dynamo import disable
from graphex.torch_private.lookup import present

# Dynamo's own parts: what it cannot do without is not looked up as a name that may be gone.
_classes: Any = present("torch._dynamo.variables.user_defined.UserDefinedClassVariable")
_utils: Any = present("torch._dynamo.utils")
_guards: Any = present("torch._dynamo.guards")
_objects: Any = present("torch._dynamo.graph_bytecode_inputs")
_scope: Any = present("torch._dynamo.variables.ctx_manager.FxTracebackAnnotateVariable")
_stream: Any = present("torch._dynamo.variables.streams.StreamVariable")
_graph: Any = present("torch._dynamo.output_graph.OutputGraph")

_skip_code: Any = present("torch._dynamo.eval_frame.skip_code")

_NOT_TRACED = "it runs between compiled graphs"
_MOST_KEPT = 4096  # objects that one call may make


def know_classes(*classes: Any) -> None:
    """Let Dynamo make objects of these classes, which are streams and events, while it traces."""
    table: set[Any] = getattr(_classes, "_in_graph_classes", set)()  # kept by a cache of torch's: what is added stays
    table.update(each for each in classes if isinstance(each, type) and issubclass(each, (torch.Stream, torch.Event)))


def build_with(stream: Callable[..., Any], event: Callable[..., Any]) -> None:
    """Let compiled functions make streams and events that are for no other device with these.

    The objects of one call are dropped when later calls have made theirs: torch would keep every one.
    """
    for name, make in (("build_stream", stream), ("build_event", event)):
        if (before := getattr(_utils, name, None)) is not None:
            setattr(_utils, name, disable(_building(before, make), _NOT_TRACED))
    if not hasattr(_graph, "check_event_record_after_input_mutation"):
        _know_recorded_events(event)
    kept: deque[object] = deque(maxlen=_MOST_KEPT)

    def stash(made: object) -> object:
        kept.append(made)
        return made

    if hasattr(_objects, "stash_graph_created_object"):
        _objects.stash_graph_created_object = disable(stash, _NOT_TRACED)


def ask_for_current_stream(current: Any) -> None:
    """Let Dynamo ask the function `current` for the stream that a compiled function is called on, and run it as it is.

    torch 2.15 asks its C++, which takes the device with the registered name for the accelerator. Older versions ask
    torch.accelerator from code that Dynamo writes, and compile that call like a user's.
    """
    if _skip_code is not None:
        _skip_code(current.__code__)
    for module in (_utils, _guards):
        if hasattr(module, "get_current_stream"):
            module.get_current_stream = current


def _know_recorded_events(event: Callable[..., Any]) -> None:
    """Let `stream.record_event()` make an event as `event()` does: torch 2.11 forgets which one it was."""
    before = getattr(_stream, "call_method", None)
    if before is None:
        return

    def call_method(self: Any, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if name != "record_event" or args or kwargs:
            return before(self, tx, name, args, kwargs)
        made = _classes(event).call_function(tx, [], {})
        made.call_method(tx, "record", [self], {})
        return made

    _stream.call_method = call_method


def _building(before: Callable[..., Any], make: Callable[..., Any]) -> Callable[..., Any]:
    def build(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        device = kwargs.get("device", args[0] if args else None)
        is_other = isinstance(device, (str, torch.device)) and torch.device(device).type != "npu"
        return before(args, kwargs) if is_other else make(*args, **kwargs)

    return build


def tell_of_broken_scopes(tell: Callable[[Mapping[str, Any], Any], None]) -> None:
    """Call `tell` with what a scope says, and the line in it, whenever a graph breaks inside of a scope."""
    before = getattr(_scope, "reconstruct_type", None)
    if before is None:
        return

    def reconstruct_type(self: Any, codegen: Any) -> Any:
        said, summary = _said_by(self), getattr(getattr(codegen, "tx", None), "frame_summary", None)
        if said and summary is not None:
            tell(said, summary())
        return before(self, codegen)

    _scope.reconstruct_type = reconstruct_type


def _said_by(scope: Any) -> Mapping[str, Any]:
    """The annotation that a scope gives to nodes; `annotation` since torch 2.14."""
    values = getattr(scope, "annotation", None) or getattr(scope, "target_values", None)
    said = values[0] if isinstance(values, (list, tuple)) and values else values
    return said if isinstance(said, Mapping) else {}
