"""Ops with an effect where they stand: they place work on streams, or let the host look at a value.

    scope_enter(["_user_stream_label"], ["side"])       what follows runs on the stream `side` ...
    scope_exit()                                        ... up to here; scopes nest
    moment = record()                                   the work of this stream up to here
    wait([moment])                                      this stream goes on after that moment
    tagged_event_record("ready"); tagged_event_wait("ready")     the same, by name
    record_tagged_stream(x, "side")                     `x` is in use on that stream

They exist under the namespaces `graphex`, `air` and `npugraph_ex` alike and do nothing when called: `place` turns them
into metadata of the nodes around them and into the ops that stay:

    event_record(event, stream, epoch); event_wait(event, stream, epoch)
    used_on(x)                                          the memory of `x` is in use on the stream of this node
    host_wait()                                         the host goes on when all streams have finished

`epoch` counts the records and waits of one stream, so that their place among the nodes does not matter.

    air.print([x]); npu.save_npugraph_tensor(x)         no device graph can hold them: a graph is cut around them
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from graphex.env import numbered
from graphex.torch_private.graphs import print_options

NAMESPACES = ("graphex", "air", "npugraph_ex")

# What `graphex.scope` writes on the nodes of model code (`meta["custom"]`). All but the first stay there.
LABEL = "graphex_stream"
PRIORITY = "graphex_priority"
CORES = "graphex_cores"  # (aicore, vectorcore)
IGNORED = "graphex_ignored"  # why a scope of another package, which these nodes were in, means nothing here

_LIBRARIES: list[torch.library.Library] = []


def _nothing(*args: Any, **kwargs: Any) -> None:
    """The effect of these ops is in the graph, not in the call."""


def _wait_on_the_host() -> None:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is not None:
        torch.get_device_module(device).synchronize()


def _moment(*, device: torch.device | None = None) -> Tensor:
    """The result of `record`: a value to hand to `wait`."""
    return torch.zeros((), device=device)


def _print(x: Sequence[Tensor], summarize_size: int = 3) -> None:
    with print_options(edgeitems=max(summarize_size, 1), threshold=2 * max(summarize_size, 1)):
        for value in x:
            print(value.detach().cpu())


def _save(x: Tensor, *, save_path: str | None = None) -> None:
    where = x.device.index if x.device.index is not None else x.device.type
    stem = (save_path or "npugraph_tensor.pt").removesuffix(".pt")
    with numbered(f"{stem}_device_{where}_", ".pt") as file:
        torch.save(x.detach().cpu(), file)


Ops = dict[str, tuple[str, Callable[..., Any]]]

LEXICAL: Ops = {
    "scope_enter": ("(str[] keys, str[] values, bool need_execute=False) -> ()", _nothing),
    "scope_exit": ("(bool need_execute=False) -> ()", _nothing),
    "record": ("(*, Device? device=None) -> Tensor", _moment),
    "wait": ("(Tensor[] x) -> ()", _nothing),
    "tagged_event_record": ("(str tag, bool created_inside=False) -> ()", _nothing),
    "tagged_event_wait": ("(str tag, bool created_inside=False) -> ()", _nothing),
    "record_tagged_stream": ("(Tensor input, str tag) -> ()", _nothing),
}
PLACED: Ops = {
    "event_record": ("(str event, str stream, int epoch) -> ()", _nothing),
    "event_wait": ("(str event, str stream, int epoch) -> ()", _nothing),
    "used_on": ("(Tensor x) -> ()", _nothing),
    "host_wait": ("() -> ()", _wait_on_the_host),
}
NOTHING_TO_RUN = frozenset(f"graphex::{name}" for name, (_, run) in PLACED.items() if run is _nothing)


_PRINT: Ops = {"print": ("(Tensor[] x, int summarize_size=3) -> ()", _print)}
_SAVE: Ops = {"save_npugraph_tensor": ("(Tensor x, *, str? save_path=None) -> ()", _save)}


def _define(namespace: str, ops: Ops, *tags: torch.Tag | None) -> None:
    library = torch.library.Library(namespace, "FRAGMENT")
    _LIBRARIES.append(library)
    for name, (signature, run) in ops.items():
        if hasattr(getattr(torch.ops, namespace), name):
            continue  # of another package, with the same meaning
        known = tuple(tag for tag in tags if tag is not None)
        library.define(name + signature, tags=(torch.Tag.pt2_compliant_tag, *known))
        library.impl(name, run, "CompositeExplicitAutograd")
        fake = _moment if run is _moment else _nothing
        torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)
        torch.fx.has_side_effect(getattr(getattr(torch.ops, namespace), name).default)


for _namespace in NAMESPACES:
    _define(_namespace, {**LEXICAL, **PLACED} if _namespace == "graphex" else LEXICAL)
for _namespace, _ops in (("air", _PRINT), ("npu", _SAVE)):
    _define(_namespace, _ops, getattr(torch.Tag, "cudagraph_unsafe", None))
