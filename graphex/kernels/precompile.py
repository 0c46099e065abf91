"""The kernels of a graph, compiled beside each other before its first call instead of one after the other in it.

    graph:   y = rms_norm_linears(x, ...); a = attention(q, ...); z = rms_norm_linears(y, ...)

    here:    each distinct call goes through its launcher with fake tensors of the traced sizes, which launches nothing

A launcher chooses as it will in the call, from what is known; where it will measure, all candidates are compiled.
Symbolic sizes are taken as they were when the graph was traced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from graphex.kernels.compiled import MOST_THREADS, compiling_in_threads
from graphex.kernels.launch import Seen, only_compiling
from graphex.ops.definition import SPECS, Declined, has_kernel, launcher_of
from graphex.torch_private.symbolic import FakeTensorMode, hint_of, pytree

SLOW = ("graphex::rotary_attention_", "graphex::attention")
UNKNOWN = -1  # a size that only running tells


@dataclass(frozen=True)
class StandIn:
    """A tensor, as far as a launcher looks at it."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def fake(self) -> Tensor:
        return torch.empty_strided(self.sizes, self.strides, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, eq=False)
class Call:
    """A call of an op; its tensors are stand-ins."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def launch(self) -> Any:
        args, kwargs = pytree.tree_map_only(StandIn, StandIn.fake, (self.args, self.kwargs))
        return launcher_of(SPECS[self.op])(*args, **kwargs)

    @property
    def on(self) -> str:
        """The sizes of its tensors: `1x4096, 6144x4096`."""
        tensors = [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, StandIn)]
        return ", ".join("x".join(map(str, tensor.sizes)) for tensor in tensors)


@dataclass(frozen=True)
class Planned:
    """The launches of calls that are alike, or why the kernel does not take them."""

    call: Call
    times: int
    seen: Seen
    declined: str


@dataclass
class Precompiled:
    """The launches of a graph's calls, the errors in finding them, and the kernels that compiled late or not at all."""

    planned: list[Planned] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    not_compiled: list[Exception] = field(default_factory=list)
    tried_again: list[Exception] = field(default_factory=list)


def precompile_kernels(nodes: Iterable[Node]) -> Precompiled:
    """Compile what the calls of a graph will launch. What does not compile beside others is tried again by itself."""
    calls = distinct_calls(nodes)
    made = _compiled(calls, MOST_THREADS) if calls else Precompiled()
    if failed := made.not_compiled:
        made = _compiled(calls, 1)
        made.tried_again = failed
    return made


def _compiled(calls: dict[Call, int], threads: int) -> Precompiled:
    made = Precompiled()
    with FakeTensorMode(), compiling_in_threads(threads) as made.not_compiled:
        for call in sorted(calls, key=_is_quick):
            try:
                with only_compiling() as seen:
                    result = call.launch()
            except Exception as error:
                made.errors.append(error)
            else:
                declined = result.reason if isinstance(result, Declined) else ""
                made.planned.append(Planned(call, calls[call], seen, declined))
    order = list(calls)
    made.planned.sort(key=lambda each: order.index(each.call))
    return made


def _is_quick(call: Call) -> bool:
    """The ops that take longest to compile come first: the others are done by the time they are."""
    return call.op not in SLOW


def distinct_calls(nodes: Iterable[Node]) -> dict[Call, int]:
    """The calls of a graph that have kernels, those that are alike as one, and how many there are of each."""
    calls = [call for node in nodes if (call := _call_of(node)) is not None]
    first = {str(call): call for call in reversed(calls)}
    return {first[text]: times for text, times in Counter(map(str, calls)).items()}


def _call_of(node: Node) -> Call | None:
    """None for a node without a kernel, or with sizes that are not known before it runs."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    name = node.target.name().partition(".")[0]
    values = [each.meta.get("val") for each in node.all_input_nodes]
    devices = [value.device for value in values if isinstance(value, Tensor)]
    if not devices or not has_kernel(name, devices[0]):
        return None
    args, kwargs = pytree.tree_map_only(Node, _standing_in, (tuple(node.args), dict(node.kwargs)))
    leaves = pytree.tree_leaves((args, kwargs))
    sizes = [size for leaf in leaves if isinstance(leaf, StandIn) for size in (*leaf.sizes, *leaf.strides)]
    return None if UNKNOWN in sizes else Call(name, args, kwargs)


def _standing_in(node: Node) -> Any:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return StandIn(_numbers(value.shape), _numbers(value.stride()), value.dtype, value.device)
    return hint_of(value, UNKNOWN) if isinstance(value, torch.SymInt) else value


def _numbers(sizes: Sequence[int | torch.SymInt]) -> tuple[int, ...]:
    return tuple(hint_of(size, UNKNOWN) for size in sizes)
