"""Capture ahead of the calls that matter.

with torch.no_grad():
    graphex.warm_up(compiled, [(tokens[:n],) for n in (1, 2, 4, 8)])
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from graphex.backend import journal
from graphex.device import runtimes_in_use
from graphex.env import why_off
from graphex.errors import InputError
from graphex.records import Captured
from graphex.regions.compiler import progress_to
from graphex.runtime.program import warming_up
from graphex.torch_private.symbolic import pytree


def warm_up(compiled: Callable[..., Any], calls: Sequence[Any], *, progress: bool | None = None) -> list[Captured]:
    """Capture the device graphs of some example calls, and return the records of these captures.

    A call is a tuple of arguments or a dictionary of keyword arguments. Make it in the mode of the calls to come (under
    `torch.no_grad()`, for example) and with the caches that will be used. What a call writes to its inputs is undone
    (from a copy, for which there has to be room), and the random generators are left as they were. The largest call
    goes first: smaller ones then fit into its memory. The bar is shown on a terminal; `progress` decides otherwise.
    Where graphex is switched off (`GRAPHEX_DISABLE`), nothing is called.
    """
    arguments = [_arguments(call) for call in _checked(calls)]
    arguments.sort(key=_size, reverse=True)
    found = journal(compiled)
    if why_off():  # no graph of ours would undo what it writes
        return []
    before = len(found.records)
    is_shown = sys.stderr.isatty() if progress is None else progress
    with _bar(len(arguments), is_shown) as step:
        for args, kwargs in arguments:
            with undone():
                compiled(*args, **kwargs)
            step()
    return [record for record in found.records[before:] if isinstance(record, Captured)]


def _checked(calls: object) -> Sequence[Any]:
    if isinstance(calls, (str, Tensor)) or not isinstance(calls, Sequence):
        raise InputError(f"warm_up takes a list of example calls, such as [(x,), (y,)]; got {type(calls).__name__}.")
    return calls


def _arguments(call: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(call, Mapping):
        return (), dict(call)
    if isinstance(call, (tuple, list)):
        return tuple(call), {}
    kind = type(call).__name__
    raise InputError(
        f"an example call is a tuple of arguments or a dictionary of keyword arguments, got {kind}; write (x,)."
    )


def _size(call: tuple[tuple[Any, ...], dict[str, Any]]) -> int:
    return sum(leaf.numel() for leaf in pytree.tree_leaves(call) if isinstance(leaf, Tensor))


@contextmanager
def undone() -> Iterator[None]:
    """Calls inside capture, and leave their inputs and the random generators as they were."""
    with _random_numbers_kept(), warming_up():
        yield


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """The generators of the host and of the devices in use go on from where they were."""
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for kind, runtime in runtimes_in_use().items():
            stack.enter_context(torch.random.fork_rng(range(runtime.device_count()), device_type=kind))
        yield


@contextmanager
def _bar(steps: int, is_shown: bool) -> Iterator[Callable[[], None]]:
    """A bar on stderr, which also says what is compiled meanwhile; yields a function to call after each step."""
    if not is_shown:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("capturing", total=steps)
        with progress_to(lambda text: bar.update(task, description=text, refresh=True)):
            yield lambda: bar.update(task, description="capturing", advance=1)
