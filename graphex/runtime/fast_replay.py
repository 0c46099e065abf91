"""Fast replay: a call that is like the one before is a replay and nothing else, and finding that out is one check.

    Dynamo  ->  Bypass  ->  guard: same addresses, same answers  ->  replay body: fill, launch, take the results

The guard is made by `guards`; the body below is the one that every replay runs.

`Bypass` leaves out AOTAutograd's runtime wrappers where they have nothing to do, `StepBypass` those of training steps.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from operator import is_, itemgetter
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from graphex.errors import DoubleBackwardError
from graphex.runtime.captured_graph import CapturedGraph, Pool, ReplayBody
from graphex.runtime.codegen import Boxed
from graphex.runtime.guards import Picker, picker
from graphex.runtime.program import Around, Program
from graphex.torch_private.aot import PlainStep, has_hooks_on_saved_tensors
from graphex.torch_private.dynamo import disable
from graphex.torch_private.memory import count_writes, retains_graph, storage_address

Compiled = Callable[..., Any]


# -- the replay --------------------------------------------------------------------------------------------------------


class Finish(NamedTuple):
    """The host's work in a replay, for all captured graphs of a program.

    `numbers` are the outputs that the host computes, and the program that does; `returns_one` undoes the tuple of
    results. `watch` looks for results of the last replay that are still held, before they are overwritten.
    """

    counter: Counter[str]
    numbers: tuple[list[int], Boxed] | None
    returns_one: bool
    watch: Callable[[Any], None] | None


def make_replay(
    graph: CapturedGraph,
    pool: Pool,
    stream: Any,
    written: Picker | None,
    finish: Finish,
    *,
    boxed: bool,
    keeps: bool = False,
) -> ReplayBody:
    """The replay of a captured graph on a stream: the one body that every replay runs.

    `pool` orders all graphs that are filled from the same buffers; the graph's own pool may be another one. `written`
    picks the inputs to count a write of. `boxed`: the inputs come as a list, which is emptied.
    """
    launch, outputs = graph.replay.replay, graph.outputs
    fill, needed = graph.fill if graph.copied else None, outputs.needed
    take = outputs.take_unseen if keeps else outputs.take
    counter, watch = finish.counter, finish.watch
    compute = None if finish.numbers is None else finish.numbers[1]
    rest = partial(_finished, finish) if finish.numbers is not None or finish.returns_one else None

    def replay(args: Any) -> Any:
        if watch is not None:
            watch(outputs)
        if pool.stream != stream:
            pool.wait_for_last_replay_on(stream)
        if fill is not None:
            fill(args)
        launch()
        # From here on the host works while the device does.
        counter["replays"] += 1
        if written is not None:
            count_writes(written(args))
        numbers = () if compute is None else compute(list(args))
        given = needed(args)
        if boxed:
            args.clear()  # not earlier: until now this call may be all that keeps the memory of its inputs
        return take(given) if rest is None else rest(take(given), numbers)

    return replay


def _finished(finish: Finish, results: tuple[Any, ...], numbers: Sequence[Any]) -> Any:
    """Numbers that a graph returns belong to this call, not to the one that was captured."""
    if finish.numbers is not None:
        merged = list(results)
        for place, number in zip(finish.numbers[0], numbers, strict=True):
            merged[place] = number
        results = tuple(merged)
    return results[0] if finish.returns_one else results


# -- past AOTAutograd's wrappers ---------------------------------------------------------------------------------------


class _Seen(threading.local):
    """The inputs and results of the program in the call that the thread is making."""

    args: Sequence[Any] | None = None
    results: Any = None


class Bypass(Around):
    """A layer between AOTAutograd and a program, by which replays go past AOTAutograd's runtime wrappers.

        Dynamo  ->  AOTAutograd's wrappers  ->  program      until a call shows that the program gets Dynamo's inputs,
                                                             and Dynamo the program's results, as they are
        Dynamo  ->  replay                                   from then on; the wrappers again if a call is no replay

    The wrappers copy the list of inputs several times, enter contexts and look for work: for a graph of hundreds of
    inputs that is a tenth of a call's time on the host.
    """

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self._seen = _Seen()
        self._is_plain: bool | None = None

    @classmethod
    def of(cls, program: Program, *about: Any, is_plain: bool) -> Self | None:
        """A bypass for a program, or None if no call of it can be a replay, or if its calls are not plain.

        `is_plain`: as far as is known, AOTAutograd's wrappers only hand its calls over. `about` are the class's further
        arguments.
        """
        return cls(program, *about) if is_plain and program.may_replay else None

    def __call__(self, args: list[Any]) -> Any:
        if self._is_plain is not None:
            return self._program(args)
        given = tuple(args)
        results = self._program(args)
        self._seen.args, self._seen.results = given, results
        return results

    def around(self, wrapped: Compiled) -> Compiled:
        """The callable for Dynamo; `wrapped` is this program in AOTAutograd's wrappers."""
        replayed, is_grad_enabled = self._program.replayed, torch.is_grad_enabled

        @functools.wraps(wrapped)
        def forward(*args: Any) -> Any:
            if not self._is_plain:
                return self._watched(wrapped, args) if self._is_plain is None else wrapped(*args)
            if is_grad_enabled():
                with torch.no_grad():
                    results = replayed(args)
            else:
                results = replayed(args)
            return wrapped(*args) if results is None else results

        return forward

    def _watched(self, wrapped: Compiled, args: tuple[Any, ...]) -> Any:
        seen = self._seen
        try:
            returned = wrapped(*args)
            if seen.args is not None:  # else another thread has found out meanwhile
                self._is_plain = self._found_out(seen, args, returned)
        finally:
            seen.args = seen.results = None
        return returned

    def _found_out(self, seen: _Seen, args: tuple[Any, ...], returned: Any) -> bool | None:
        return _same(seen.args, args) and _same(seen.results, returned)


class SavedValues(NamedTuple):
    """The values that a forward saves, in two parts: autograd watches those that the user could write to, by version.

    `seen` are the places of these and of the results, `in_order` puts both parts back where the backward takes them.
    """

    watched: Picker
    others: Picker
    in_order: Picker
    seen: frozenset[int]


class StepBypass(Bypass):
    """The bypass of a training step: of its forward and its backward.

        Dynamo  ->  AOTAutograd's wrappers  ->  AOTAutograd's function for autograd     if a call is no replay
        Dynamo  ->  replay of the forward   ->  `CompiledFunction`                      if it is

    AOTAutograd looks at hundreds of saved values one by one, several times in each step. What matters of that stays:
    autograd watches the versions of saved values that the user could write to.
    """

    def __init__(self, program: Program, results: int, shared: Sequence[int]) -> None:
        """`results` is how many the forward has; `shared` are saved ones whose memory the user may have as well."""
        super().__init__(program)
        self.results, self._shared = results, frozenset(shared)
        self._saved: SavedValues | None = None
        self.step: PlainStep | None = None
        self.backward: Program | None = None

    def complete(self, step: PlainStep | None, backward: Program) -> None:
        """Take the compiled backward. `step` is None if AOTAutograd's wrapper does more than hand over."""
        self.backward = backward
        self.constant = picker(() if step is None else step.constant)
        self.run_backward = disable(_run_backward, reason="what compiled autograd calls is not traced")
        self.step = step  # the last of them: from now on forwards of other threads may be handed over
        if step is None:
            self._is_plain = False

    def around(self, wrapped: Compiled) -> Compiled:
        replayed, is_grad_enabled = self._program.replayed, torch.is_grad_enabled
        apply = super(torch.autograd.Function, CompiledFunction).apply  # an input that fits is none of functorch's

        @functools.wraps(wrapped)
        def forward(*args: Any) -> Any:
            if not self._is_plain:
                return self._watched(wrapped, args) if self._is_plain is None else wrapped(*args)
            if not is_grad_enabled() or has_hooks_on_saved_tensors():
                return wrapped(*args)
            saved = self._saved
            assert saved is not None
            with torch.no_grad():
                results = replayed(args, seen=saved.seen)
            # Behind the inputs, so that each gradient has the number of its input, as in AOTAutograd's function.
            return wrapped(*args) if results is None else apply(*args, (self, saved, results))

        return forward

    def _found_out(self, seen: _Seen, args: tuple[Any, ...], returned: Any) -> bool | None:
        if self.step is None:
            return None  # the backward is not compiled yet
        if not _same(seen.args, args) or len(seen.results) != self.results or len(returned) != self.step.returned:
            return False
        if not all(isinstance(each, (Tensor, int, float)) for each in args):
            return False  # compiled autograd's hooks come as an input, for AOTAutograd's function
        saved = range(self.step.returned, self.results)
        theirs = {storage_address(each) for each in (*args, *returned) if isinstance(each, Tensor)} - {0}
        watched = [place for place in saved if place in self._shared or storage_address(seen.results[place]) in theirs]
        others = [place for place in saved if place not in watched]
        in_order = picker([place for place, _ in sorted(enumerate([*watched, *others]), key=itemgetter(1))])
        places = frozenset([*range(self.step.returned), *watched])
        self._saved = SavedValues(picker(watched), picker(others), in_order, places)
        return True


class CompiledFunction(torch.autograd.Function):
    """A replayed forward as autograd sees it. AOTAutograd's has the same name, which a user finds in `grad_fn`."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Any, ...]:
        bypass, saved, results = args[-1]
        step = bypass.step
        kept = results[-1] if len(results) > bypass.results else None
        ctx.bypass, ctx.in_order, ctx.held = bypass, saved.in_order, [saved.others(results), kept]
        ctx.save_for_backward(*[each.detach() if each._is_view() else each for each in saved.watched(results)])
        returned: tuple[Any, ...] = step.results(results)
        ctx.mark_non_differentiable(*bypass.constant(returned))
        ctx._materialize_non_diff_grads = False  # AOTAutograd's attribute: no zeros are made for these
        return returned

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        return (*ctx.bypass.run_backward(ctx, gradients), None)


def _run_backward(ctx: Any, gradients: Sequence[Any]) -> Any:
    bypass, step, held = ctx.bypass, ctx.bypass.step, ctx.held
    watched = ctx.saved_tensors  # raises if they were written to, or are released
    if not held:
        raise RuntimeError(
            "Trying to backward through the graph a second time. Specify retain_graph=True the first time."
        )
    args, kept = [*ctx.in_order([*watched, *held[0]]), *step.gradients(gradients)], held[1]
    del watched
    is_differentiable = torch.is_grad_enabled()  # create_graph=True
    if not retains_graph():
        held.clear()  # nothing but the list of arguments holds them now
        ctx.maybe_clear_saved_tensors()
        if kept is not None and not is_differentiable:
            results = bypass.backward.replayed_from(kept, args)
            if results is not None:
                return results
    if kept is not None:
        kept.put_into(args)
    if is_differentiable:
        run, connected = partial(step.call, bypass.backward, list(args)), torch.empty(0, requires_grad=True)
        return _OnceDifferentiable.apply(run, connected, *args)
    return step.call(bypass.backward, args)


class _OnceDifferentiable(torch.autograd.Function):
    """Gradients with a history, that have no gradients themselves: asking for these is an error, not a zero."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], Any], *args: Any) -> Any:
        return tuple(run())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise DoubleBackwardError("torch.compile with graphex does not support double backward.")


def _same(some: Any, others: Sequence[Any]) -> bool:
    """Whether both hold the very same objects."""
    return isinstance(some, (list, tuple)) and len(some) == len(others) and all(map(is_, some, others))
