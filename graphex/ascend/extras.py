"""Ascend names that scripts call in passing: accepted, and done as far as there is something to do here.

Scopes and functions about CANN do nothing. A scope leaves a refusal in the journal of a graph that has nodes in it, a
function a fallback in the journals of what is compiled after it; both say why.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from inspect import isfunction
from typing import Any

import torch
from torch import Tensor
from torch.fx.traceback import annotate

from graphex.ascend.config import notes
from graphex.errors import InputError
from graphex.ops.scope import IGNORED
from graphex.records import FellBack
from graphex.torch_private.dynamo import mark_dynamic

__version__ = torch.__version__.partition("+")[0]
"""Of torch_npu, which is numbered after the torch it belongs to."""


def _note(what: str, why: str) -> None:
    record = FellBack("-", f"{what} does nothing", why)
    if record not in notes:
        notes.append(record)


# -- collectives and sizes ---------------------------------------------------------------------------------------------


def patch_for_hcom() -> None:
    """Nothing: torch traces collectives by itself."""
    _note("patch_for_hcom()", "torch traces collectives by itself")


def set_dim_gears(input: Tensor, dim_gears: Mapping[int, Sequence[int]]) -> None:
    """Let the dimensions be dynamic. Each size gets a graph of its own; the option capture_sizes pads to some sizes."""
    if not isinstance(dim_gears, Mapping):
        raise InputError(f"dim_gears maps dimensions to sizes, got {dim_gears!r}.")
    for dim, sizes in dim_gears.items():
        if not isinstance(dim, int) or not -input.dim() <= dim < input.dim() or not 2 <= len(sizes) <= 100:
            raise InputError(f"dim_gears maps a dimension of the tensor to 2 to 100 sizes, got {dim!r}: {sizes!r}.")
        mark_dynamic(input, dim % input.dim())
    _note("the list of set_dim_gears()", "sizes are dynamic, and the option capture_sizes pads calls to some of them")


# -- scopes ------------------------------------------------------------------------------------------------------------


def super_kernel(scope: str = "", options: str = "") -> Any:
    """Nothing: kernels of the scope are not linked into one."""
    return annotate({IGNORED: "torchair.scope.super_kernel links binaries of the NPU; here the nodes stay as they are"})


def op_never_timeout(enable: bool = True) -> Any:
    """Nothing: no kernel is stopped for the time it takes."""
    return annotate({IGNORED: "torchair.scope.op_never_timeout: no op times out here"})


def data_dump() -> Any:
    """Nothing: `dump_tensor_data` dumps every node."""
    return annotate({IGNORED: "torchair.scope.data_dump: the option dump_tensor_data dumps every node, or none"})


# -- events and values -------------------------------------------------------------------------------------------------


def npu_create_tagged_event(tag: str) -> str:
    """An event, which is known by its tag."""
    if not isinstance(tag, str) or not tag:
        raise InputError(f"the tag of an event is a word, got {tag!r}.")
    return tag


def npu_tagged_event_record(event: str) -> None:
    """The work of the current stream up to here, by the tag of an event."""
    torch.ops.air.tagged_event_record(event)


def npu_tagged_event_wait(event: str) -> None:
    """The current stream goes on when the event was recorded."""
    torch.ops.air.tagged_event_wait(event)


def npu_record_tagged_stream(input: Tensor, tagged_stream: str) -> None:
    """The memory of a tensor is in use on the stream of that label."""
    torch.ops.air.record_tagged_stream(input, tagged_stream)


def npu_print(*values: Tensor, summarize_size: int = 3, **_: Any) -> None:
    """Print tensors where the graph has come to them. The graph is cut there: printing is the host's."""
    torch.ops.air.print([value for value in values if isinstance(value, Tensor)], summarize_size)


# -- scripts for another device ----------------------------------------------------------------------------------------

_FACTORIES = (
    "arange as_tensor empty empty_like empty_strided eye full full_like linspace ones ones_like rand rand_like randint"
    " randint_like randn randn_like randperm tensor zeros zeros_like"
)


# Libraries whose own questions about torch.cuda are not meant for the npu.
_NOT_SCRIPTS = ("torch", "graphex", "triton")


@functools.cache
def transfer_to_npu() -> None:
    """From now on "cuda" is "npu" where a script makes or moves a tensor or a module, or calls torch.cuda's functions.

    Where the npu is the GPU there is nothing to do.
    """
    if torch.empty(0, device="npu").is_cuda:
        return
    for name in _FACTORIES.split():
        setattr(torch, name, _moved(getattr(torch, name)))
    for owner in (Tensor, torch.nn.Module):
        owner.to = _moved(owner.to)  # type: ignore[method-assign]
        owner.cuda = _to_npu  # type: ignore[method-assign]
    npu = torch.npu  # type: ignore[attr-defined]
    for name, value in vars(npu).items():
        theirs = getattr(torch.cuda, name, None)
        if name in ("Stream", "Event"):
            setattr(torch.cuda, name, value)
        elif isfunction(theirs) and isfunction(value) and not name.startswith("_"):
            setattr(torch.cuda, name, _for_scripts(theirs, value))


def _for_scripts(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """`ours` for scripts, `theirs` for torch itself."""

    @functools.wraps(theirs)
    def called(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
            if caller in _NOT_SCRIPTS:
                return theirs(*args, **kwargs)
        return ours(*map(_npu_for, args), **{name: _npu_for(value) for name, value in kwargs.items()})

    return called


def _to_npu(self: Any, device: Any = None, *args: Any, **kwargs: Any) -> Any:
    return self.npu()


def _moved(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def moved(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _npu_for(kwargs["device"])
        return function(*map(_npu_for, args), **kwargs)

    return moved


def _npu_for(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("npu", 0)
    return "npu:0" if isinstance(value, str) and value.partition(":")[0] == "cuda" else value
