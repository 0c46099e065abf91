"""Captures ahead of the calls that matter, and a captured call without Dynamo around it.

with torch.no_grad():
    graphex.warm_up(compiled, [(tokens[:n],) for n in (1, 2, 4, 8)])

step = graphex.replayer(compiled, token, position, caches)
token.copy_(next_token)
logits = step()                             # the tensors it was made with, as they are now
logits = step(token, position, caches)      # or others of the same sizes
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from graphex.backend import journal
from graphex.device import device_of, runtimes_in_use
from graphex.env import progress_to, why_off
from graphex.errors import InputError
from graphex.records import Captured, Journal
from graphex.runtime.program import Ran, warming_up
from graphex.torch_private.memory import storage_address
from graphex.torch_private.symbolic import is_traceable_wrapper_subclass, pytree


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


# -- one call, repeated ------------------------------------------------------------------------------------------------


Pick = Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], Any]

# The leaves that a result may have: tensors, and values that are the same in every call. Others may hold tensors.
_PLAIN = (Tensor, int, float, complex, str, bytes, Enum, torch.Size, torch.dtype, torch.device, type(None))


class Replayer:
    """Replays one call of a compiled model. No guard is checked: the inputs must fit the call it was made for."""

    def __init__(self, ran: Ran, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """`result` is the model's result, made of the graph's results."""
        given, self._form = pytree.tree_flatten((args, kwargs))
        wanted, self._spec = pytree.tree_flatten(result)
        if any(map(is_traceable_wrapper_subclass, (*given, *wanted))):
            raise InputError("a replayer takes and returns plain tensors, and no tensors that are made of others.")
        self._program, self._inputs, self._given, self._names = ran.program, tuple(ran.args), given, list(kwargs)
        self._replayed = ran.program.replayed
        self._fixed = [(place, leaf) for place, leaf in enumerate(given) if not isinstance(leaf, Tensor)]
        self._duplicates = _duplicates(given)
        where = {id(leaf): number for number, leaf in enumerate(given) if isinstance(leaf, Tensor)}
        self._places = {place: where[id(value)] for place, value in enumerate(ran.args) if id(value) in where}
        self._joined = _shares_an_input(given, where, ran.args)
        if any(isinstance(leaf, (int, float, complex)) for leaf in wanted) and _may_hold_numbers(ran, wanted):
            raise InputError(
                "a number in the result may be read from the device in every call, which a replayer does not do; "
                "return a tensor instead."
            )
        self._picks = [_pick(leaf, ran.results, ran.args, given) for leaf in wanted]
        known = set(map(id, given))
        if not all(isinstance(leaf, _PLAIN) or id(leaf) in known for leaf in wanted) or not _are_returned(ran, wanted):
            raise InputError(
                "a replayer returns what the graph computes in tuples, lists and dictionaries and does nothing else "
                "with it; this model also keeps a part of it, or returns some in another kind of object."
            )
        self._alone = isinstance(result, Tensor) and len(ran.results) == 1 and result is ran.results[0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs, given = self._replaced(args, kwargs) if args or kwargs else (self._inputs, self._given)
        results = self._replayed(inputs)
        if results is None:
            results = self._program.call(list(inputs))
        if self._alone:
            return results[0]
        return pytree.tree_unflatten([pick(results, inputs, given) for pick in self._picks], self._spec)

    def _replaced(self, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], list[Any]]:
        """The graph's inputs in a call with other arguments, and the leaves of these."""
        if kwargs.keys() == set(self._names):
            kwargs = {name: kwargs[name] for name in self._names}
        leaves, form = pytree.tree_flatten((args, kwargs))
        if len(leaves) != len(self._given):
            raise InputError(f"this replayer was made for {len(self._given)} values, {len(leaves)} were given.")
        if form != self._form:
            raise InputError(
                "the arguments of a replayer are by place or by name, and in containers, as they were when it was "
                "made; these are not."
            )
        if self._joined:
            raise InputError(
                "arguments of this replayer share memory that the graph takes as one input, so no others can take "
                "their place; write to them and call it without arguments, or make another one."
            )
        for place, value in self._fixed:
            if not _is_same(leaves[place], value):
                raise InputError(
                    f"this replayer was made for {value!r}, {leaves[place]!r} was given; make another one."
                )
        for place, other in self._duplicates:
            if leaves[place] is not leaves[other]:
                raise InputError("this replayer was made with one tensor for two arguments, and was given two.")
        inputs = list(self._inputs)
        for place, leaf in self._places.items():
            if not isinstance(leaves[leaf], Tensor):
                raise InputError(f"this replayer was made for a tensor, {leaves[leaf]!r} was given.")
            inputs[place] = leaves[leaf]
        return tuple(inputs), leaves


def replayer(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Replayer:
    """A callable that replays `compiled(*args, **kwargs)`, for callers that guarantee their inputs.

    Neither Dynamo's guards nor AOTAutograd's wrapper run: sizes, types and devices must be those of `args`. Addresses
    are still looked at, and arguments that are no tensors must be the same. What making it writes to inputs is undone.
    """
    if not callable(compiled):
        raise InputError(f"replayer takes what torch.compile returned, and a call's arguments, got {compiled!r}.")
    found = journal(compiled)  # what is not compiled is not even called
    with warming_up() as ran:
        result = compiled(*args, **kwargs)
    if len(ran) != 1:
        why = _why_no_graph(found, none_ran=not ran)
        raise InputError(
            f"a replayer needs a call that runs exactly one captured graph, this one runs {len(ran)}{why}."
        )
    if not ran[0].is_whole:
        raise InputError(
            "a replayer needs a call that is one captured graph and nothing else, this one breaks before or after it "
            "(fullgraph=True shows where)."
        )
    return Replayer(ran[0], args, kwargs, result)


def _why_no_graph(found: Journal, *, none_ran: bool) -> str:
    """The journal's reasons why a graph was not captured, and a way out where the device has no graphs."""
    if reasons := "; ".join(dict.fromkeys(record.reason for record in found.fallbacks)):
        return f" ({reasons})"
    devices = [set(map(torch.device, graph.devices)) for graph in found.graphs]
    if not none_ran or not any(devices):
        return ""
    if any(device_of(each).captures for each in devices):
        return " (it has no kernel, or options that capture nothing: mode='eager', force_eager, dump_tensor_data)"
    where = " and ".join(sorted(map(str, set().union(*devices))))
    way_out = "move the model and its inputs to a GPU, or call the compiled model itself"
    return f" (its tensors are on {where}, where there are no device graphs); {way_out}"


def _is_same(found: Any, made_for: Any) -> bool:
    """Whether an argument that is no tensor is as it was traced: an equal number or text, or the very same object."""
    plain = isinstance(made_for, (int, float, complex, str, bytes))
    return found is made_for or (plain and type(found) is type(made_for) and bool(found == made_for))


def _duplicates(given: list[Any]) -> list[tuple[int, int]]:
    """Places of arguments at which the same tensor stands: the graph has one input for both."""
    first: dict[int, int] = {}
    found = [(place, first.setdefault(id(leaf), place)) for place, leaf in enumerate(given) if isinstance(leaf, Tensor)]
    return [(place, other) for place, other in found if place != other]


def _shares_an_input(given: list[Any], where: dict[int, int], inputs: Sequence[Any]) -> bool:
    """Whether the graph takes the memory of some arguments instead of them: views that overlap and are written."""
    others = {storage_address(value) for value in inputs if isinstance(value, Tensor) and id(value) not in where}
    own = {id(value) for value in inputs}
    return any(storage_address(leaf) in others for leaf in given if isinstance(leaf, Tensor) and id(leaf) not in own)


def _may_hold_numbers(ran: Ran, returned: Sequence[Any]) -> bool:
    """Whether the graph computes something from which numbers are made: it reads some back, or the model does, from a
    result that it does not return.
    """
    return not _are_returned(ran, returned) or ran.program.reads_numbers


def _are_returned(ran: Ran, returned: Sequence[Any]) -> bool:
    """Whether every tensor that the graph computes is a part of what the model returns."""
    tensors = [leaf for leaf in returned if isinstance(leaf, Tensor)]
    results = [value for value in ran.results if isinstance(value, Tensor)]
    return all(any(leaf is value or _looks_like(value, leaf) for leaf in tensors) for value in results)


def _pick(leaf: Any, results: Sequence[Any], inputs: Sequence[Any], given: Sequence[Any]) -> Pick:
    """Where a part of the model's result comes from: an output of the graph, one of its inputs, or an argument."""
    if not isinstance(leaf, Tensor):
        return lambda results, inputs, given: leaf
    if leaf.requires_grad:
        raise InputError("a replayer computes no gradients; make it under torch.no_grad() or torch.inference_mode().")
    for place, value in enumerate(results):
        if value is leaf or _looks_like(value, leaf):
            return lambda results, inputs, given: results[place]
    for place, value in enumerate(inputs):
        if value is leaf or _looks_like(value, leaf):
            return lambda results, inputs, given: inputs[place]
    for place, value in enumerate(given):
        if value is leaf:
            return lambda results, inputs, given: given[place]
    raise InputError("a part of the result is computed outside of the captured graph, so a replayer cannot return it.")


def _looks_like(value: Any, leaf: Tensor) -> bool:
    return (
        isinstance(value, Tensor)
        and value.numel() > 0
        and value.data_ptr() == leaf.data_ptr()
        and (value.shape, value.stride(), value.dtype) == (leaf.shape, leaf.stride(), leaf.dtype)
    )
