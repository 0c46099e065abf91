"""Compile for capture, and ask a compiled object how often it was captured and replayed.

compiled = compile_it(model)
for _ in range(3):
    same(compiled(x), model(x))
assert (statuses(compiled), replays(compiled), reasons(compiled)) == (["captured"], 2, [])
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Barrier
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._dynamo import config as dynamo
from torch.utils import _pytree as pytree

import graphex

_GRAPHEX = str(Path(graphex.__file__).parent)


def replays(compiled: object) -> int:
    return count(compiled, "replays")


def count(compiled: object, what: str) -> int:
    return sum(counter[what] for counter in graphex.journal(compiled).counts.values())


def statuses(compiled: object) -> list[str]:
    return [record.status for record in graphex.journal(compiled).captures]


def reasons(compiled: object) -> list[str]:
    return [record.reason for record in graphex.journal(compiled).fallbacks]


def compile_it(fn: Callable[..., Any], *, dynamic: bool | None = None, **options: Any) -> Callable[..., Any]:
    return torch.compile(fn, backend="graphex", dynamic=dynamic, options=options)


def same(found: Any, wanted: Any) -> None:
    """Bit for bit; on a GPU a matrix product may choose another kernel in a capture."""
    on_gpu = any(leaf.is_cuda for leaf in pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor))
    torch.testing.assert_close(found, wanted, **({} if on_gpu else {"rtol": 0, "atol": 0}))


def agree(compiled: Callable[..., Any], model: Callable[..., Any], calls: Iterable[Any]) -> None:
    """Both give the same for the inputs of each call, which are made one after the other."""
    for given in calls:
        args = given if isinstance(given, tuple) else (given,)
        same(compiled(*args), model(*args))


def what_threads_leave_set_back() -> AbstractContextManager[None]:
    """torch 2.11 sets what `dynamic=` asks for anew in each call, for all threads, and may leave it so behind them."""
    as_before = {name: getattr(dynamo, name) for name in ("assume_static_by_default", "automatic_dynamic_shapes")}
    return dynamo.patch(as_before)  # type: ignore[no-any-return]


def in_threads(work: Callable[[Any], None], given: Sequence[Any]) -> None:
    """`work` on each of them in a thread of its own, all at one time. What one of them raises is raised here."""
    all_there = Barrier(len(given))

    @torch.no_grad()  # the mode of the caller's thread does not reach another
    def begin(each: Any) -> None:
        all_there.wait()
        work(each)

    with what_threads_leave_set_back(), ThreadPoolExecutor(len(given)) as pool:
        list(pool.map(begin, given))


def interrupted(call: Callable[[], None], other: Callable[[], None]) -> int:
    """`call` again and again, each time with `other` before the next line that it runs in graphex, as a signal handler
    or a finalizer would be called. Returns how many lines there were.
    """
    place, is_over = 0, False
    while not is_over:
        place, left = place + 1, place + 1

        def stop_there(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal left
            if not frame.f_code.co_filename.startswith(_GRAPHEX):
                return None
            left -= event == "line"
            if event == "line" and not left:
                sys.settrace(None)
                sys.call_tracing(other, ())  # Dynamo hands out no compiled code inside of a trace function
            return stop_there

        before = sys.gettrace()
        sys.settrace(stop_there)
        try:
            call()
        finally:
            sys.settrace(before)
        is_over = left > 0
    return place - 1


@torch.no_grad()
def check_with_weights_replaced(model: nn.Linear, compiled: Callable[..., Any], where: str) -> None:
    """Four calls with each of three weights, which are made at once, so that none gets the memory of another."""
    for weight in [torch.randn_like(model.weight, device=where) for _ in range(3)]:
        model.weight.data = weight
        agree(compiled, model, (torch.randn(2, model.in_features, device=where) for _ in range(4)))
