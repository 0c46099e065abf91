"""The program of a training step: it runs the step, learns whether it can be captured, captures and replays it.

Calls of one kind (sizes of the batch, plain arguments, hyperparameters, which modules train) go through this:

    1           runs, and compiles
    2, 3        run while every op is seen (`observation`); both must do the same, or the step is never captured
    4           captures, and replays
    5 ...       replay

A kind that differs from a checked one in sizes alone is captured in its second call. Every call is one real step.
`CapturedStep` is one captured graph of it, with the memory of its arguments; `CompiledModule` is a module that is
compiled inside of a step.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial, update_wrapper
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.profiler import record_function

from graphex.backend import Backend
from graphex.config import CompilerConfig
from graphex.device import Device, Replay, device_of, several_accelerators
from graphex.env import why_off
from graphex.errors import CaptureError, DoubleBackwardError, NotOfferedError, at_users_line, one_line
from graphex.evidence.tables import printed
from graphex.loops.observation import Observation, comparable, holds_tensors, may_see_compiled_code
from graphex.loops.step_state import SPARSE, Found, StepState
from graphex.records import Captured, FellBack, Journal, OptimizerPrepared
from graphex.runtime.buffers import Arena, InputBuffer
from graphex.runtime.captured_graph import Pool, waiting_for_no_turn
from graphex.runtime.program import captures_held_back
from graphex.torch_private.dynamo import inside, is_seen_by_a_mode, of_thread, profiler_enabled
from graphex.torch_private.frames import compiled_call, set_compiled_call
from graphex.torch_private.lookup import MissingNameError, check_required
from graphex.torch_private.memory import count_writes, storage_address
from graphex.torch_private.symbolic import pytree

# -- one captured graph ------------------------------------------------------------------------------------------------


@dataclass
class CapturedStep:
    """One device graph of a step. `gradients` are what it leaves on the parameters, `deferred` the host's part."""

    replay: Replay
    pool: Pool
    buffers: list[tuple[int, InputBuffer]]
    results: list[Any]
    spec: Any
    gradients: list[Tensor | None]
    deferred: list[Callable[[], Any]]

    def fill(self, leaves: Sequence[Any]) -> None:
        for place, buffer in self.buffers:
            buffer.target.copy_(buffer.source(leaves[place]))

    def free(self) -> None:
        self.pool.graphs -= 1
        self.replay.free([self.buffers, self.results, self.gradients])
        self.buffers, self.results = [], []


def buffer_for(leaf: Tensor, where: torch.device) -> InputBuffer:
    """Memory of the graph's own for an argument, on the device."""
    if leaf.device.type == where.type:
        return Arena().buffers([leaf], shared=False)[0]
    return InputBuffer(torch.empty_like(leaf, device=where), None)


def detached(results: Any) -> Any:
    return pytree.tree_map_only(Tensor, Tensor.detach, results)


class CompiledModule:
    """A module of the user's that is compiled while a step runs, and as it was outside.

    Steps of several threads may have one module in common, and end in any order.
    """

    _lock = threading.RLock()
    _calls: ClassVar[WeakKeyDictionary[nn.Module, list[Any]]] = WeakKeyDictionary()  # outside, and of steps that run

    def __init__(self, module: nn.Module, compile_it: Callable[[Any], Any]) -> None:
        self._module, self._compiled = module, compile_it(_call_of(module))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        module = self._module
        with self._lock:
            calls = self._calls.setdefault(module, [compiled_call(module)])
            calls.append(self._compiled)
            set_compiled_call(module, self._compiled)
        try:
            yield
        finally:
            with self._lock:
                calls.remove(self._compiled)
                set_compiled_call(module, calls[-1])
                if len(calls) == 1:
                    del self._calls[module]


def _call_of(module: nn.Module) -> Callable[..., Any]:
    """The call of a module in a form that Dynamo compiles: it leaves torch's own (`nn.Sequential`) as they are."""
    if not type(module).forward.__module__.startswith("torch."):
        return module._call_impl

    @at_users_line
    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    return call


# -- the program -------------------------------------------------------------------------------------------------------


RESTLESS = 16  # calls in a row of kinds that were not there before, after which a record says so ...
CHANGING = 6  # ... and where a plain value is other than in the call before, which no later call will mend
REMEMBERED = 64  # kinds of calls that were seen and not captured


_TORCHS_TWICE = "does not currently support double backward"
TWICE = (
    "torch cannot differentiate a compiled backward again (create_graph=True): write train_step(..., compile=False), "
    "which leaves the model as it is and captures the step all the same."
)
IN_BETWEEN = (
    "a training step was called in the middle of its own replay or capture, by a finalizer or a signal handler: note "
    "there that a step is to be made, and make it between two steps."
)
Find = Callable[[], tuple[Found, Sequence[CompiledModule]]]


class Kind(NamedTuple):
    """The kind of a call: two calls of one kind are the same work on other data."""

    sizes: Hashable
    path: Hashable  # everything else: Python may take another way through the function
    gradients: Hashable  # of before the step: none, some that it drops, or where those are that it reads

    @property
    def checked_as(self) -> tuple[Hashable, Hashable]:
        """The key of what is learnt about the kind whatever its sizes: "read" for gradients that the step reads."""
        return self.path, self.gradients if isinstance(self.gradients, str) else "read"


@dataclass
class Learnt:
    """The facts about a kind of call that is not captured yet."""

    calls: int = 0
    observation: Observation | None = None
    differed: int = 0
    interrupted: int = 0
    leaves_gradients: bool = False


class TrainStep:
    """A callable step. `journal` says what was captured, or why not; `average` holds averaged parameters."""

    def __init__(self, function: Callable[..., Any], find: Find, backend: Backend, *, compiles: bool = True) -> None:
        """`find` is called before the first step, and when a name that the function reads stands for something else."""
        update_wrapper(self, function)
        self._function, self._find, self._compiles = function, find, compiles
        self._compiled: Sequence[CompiledModule] = ()
        self.journal: Journal = backend.journal
        self.average: nn.Module | None = getattr(function, "average", None)
        self._name = f"{getattr(function, '__name__', 'step')} step"
        self._label = f"graphex replay: {self._name}"
        self._config: CompilerConfig = backend.config
        self._state = StepState(Found())
        self._device: Device | None = None
        self._where = torch.device("cpu")
        self._is_off = False
        self._lock = threading.RLock()
        self._put_off: list[Callable[[], Any]] | None = None  # while the user's code runs, and no graph is captured
        self._interruptions = 0  # calls in the middle of another one
        self._graphs: OrderedDict[Kind, CapturedStep] = OrderedDict()
        self._learnt: OrderedDict[Kind, Learnt] = OrderedDict()
        self._checked: set[Hashable] = set()
        self._reads_gradients: dict[Hashable, bool] = {}
        self._restless, self._said_restless, self._last_values = 0, False, dict[str, Hashable]()
        self._pool: Pool | None = None
        self._why_again = ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(each is self for each in of_thread(_CALLS)):
            return self._in_between(args, kwargs)
        with self._lock, inside(_CALLS, self):
            if self._device is None or self._state.found.is_replaced():
                self._begin(args, kwargs)
            if method := self._state.found.replaced_method:
                self._compile_again(method)
            if self._is_off and self._state.is_prepared and self._state.has_other_groups():
                self._prepare()  # a scaler takes groups with fused kernels, or groups without, and no mixture
            try:
                return self._as_it_is(args, kwargs) if self._is_off else self._step(args, kwargs)
            except RuntimeError as error:
                if not isinstance(error, DoubleBackwardError) and _TORCHS_TWICE not in str(error):
                    raise
                raise NotOfferedError(TWICE) from error

    def _in_between(self, args: Any, kwargs: Any) -> Any:
        """A call in the middle of another one: by the step itself, by a finalizer or by a signal handler.

        While the user's code runs, it is made as in eager, and the calls that were put off are made before and after
        it. In the middle of a replay or a capture it is refused: a capture would hold it for good.
        """
        if self._is_off:
            return self._as_it_is(args, kwargs)
        if self._put_off is None:
            raise NotOfferedError(IN_BETWEEN)
        self._interruptions += 1
        self._state.catch_up(self._put_off)
        try:
            return self._as_it_is(args, kwargs)
        finally:
            self._state.catch_up(self._put_off)

    def _compile_again(self, method: str) -> None:
        """Drop what Dynamo has compiled: it has no guard on the methods of classes."""
        self._state.found.replaced_method = ""
        if not self._compiles:
            return
        torch.compiler.reset()
        reason = f"'{method}' was replaced, and compiled code does not see that"
        self.journal.fall_back(FellBack(self._name, "everything is compiled again", reason))

    def __repr__(self) -> str:
        state = "runs without capture" if self._is_off else f"captured graphs: {len(self._graphs)}"
        return f"<training step of {self._name.removesuffix(' step')}, {state}>"

    def explain(self) -> str:
        """The step so far, as tables: its graphs and their memory, what is saved, what was captured."""
        return printed(f"training step {self._name.removesuffix(' step')}", self.journal)

    def free(self) -> None:
        """Free the device graphs; the next calls capture again."""
        with self._lock:
            while self._graphs:
                self._graphs.popitem()[1].free()

    # -- before the first call ---------------------------------------------------------------------------------------

    def _begin(self, args: Any, kwargs: Any) -> None:
        self.free()
        for known in (self._learnt, self._checked, self._reads_gradients):
            known.clear()
        found, self._compiled = self._find()
        found.look_at_methods()
        self._state, self._is_off = StepState(found), False
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        devices = self._state.devices() | {each.device for each in tensors if not self._state.parameters}
        self._device = device_of(devices)
        self._where = next((each for each in devices if each.type != "cpu"), torch.device("cpu"))
        if reason := self._why_not_captured(devices):
            self._stay_plain(reason, warn=self._device.captures)
        else:
            self._prepare()

    def _why_not_captured(self, devices: set[torch.device]) -> str:
        assert self._device is not None
        if reason := why_off():
            return f"graphex is off: {reason}"
        try:
            check_required()
        except MissingNameError as error:
            return str(error)
        if self._config.force_eager or self._config.mode in ("eager", "max-autotune-no-cudagraphs"):
            return "the options ask for no capture"
        if several := several_accelerators(devices):
            return f"its tensors are on {several}"
        if not self._device.captures:
            return f"the device '{self._device.name}' has no graphs"
        return self._state.why_never()

    def _prepare(self) -> None:
        for optimizer, changes in self._state.prepare():
            self.journal.add(OptimizerPrepared(self._name, type(optimizer).__name__, tuple(changes)))
        self._state.look_again()

    def _stay_plain(self, reason: str, line: str = "", *, warn: bool = True) -> None:
        self._is_off = True
        self.free()
        what = "the training step runs without capture"
        self.journal.fall_back(FellBack(self._name, what, reason, line=line), warn=warn)

    # -- one call ----------------------------------------------------------------------------------------------------

    def _step(self, args: Any, kwargs: Any) -> Any:
        if is_seen_by_a_mode() or self._device_captures() or torch.is_anomaly_enabled():
            return self._as_it_is(args, kwargs)  # a replay would hide the ops of this one call
        if self._state.hooks() and (reason := self._state.why_never()):
            self._stay_plain(reason)
            return self._as_it_is(args, kwargs)
        if why := self._state.why_elsewhere():
            self._start_again(why)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        kind = self._kind(leaves, spec)
        graph = self._graphs.get(kind)
        if graph is None and self._may_capture(kind):
            graph = self._capture(kind, leaves, spec)
        if graph is not None:
            self._restless = 0
            self._graphs.move_to_end(kind)
            return self._replay(graph, leaves)
        if self._is_off:
            return self._as_it_is(args, kwargs)
        return self._run_and_learn(kind, args, kwargs)

    def _device_captures(self) -> bool:
        return self._device is not None and self._device.is_capturing()

    def _kind(self, leaves: Sequence[Any], spec: Any) -> Kind:
        sizes = tuple(
            (leaf.shape, leaf.stride() if leaf.layout == torch.strided else leaf.layout, leaf.dtype, leaf.device)
            for leaf in leaves
            if isinstance(leaf, Tensor)
        )
        plain = tuple(leaf.requires_grad if isinstance(leaf, Tensor) else comparable(leaf) for leaf in leaves)
        values = self._state.values()
        path = (spec, plain, tuple(values.values()))
        return Kind(sizes, path, self._kind_of_gradients(path))

    def _kind_of_gradients(self, path: Hashable) -> Hashable:
        gradients = self._state.gradients()
        if all(each is None for each in gradients):
            return "none"
        if not self._reads_gradients.get(path, False):
            return "some"
        return tuple(0 if each is None else each.data_ptr() for each in gradients)

    def _may_capture(self, kind: Kind) -> bool:
        learnt = self._learnt.get(kind)
        return learnt is not None and learnt.calls > 0 and kind.checked_as in self._checked

    def _start_again(self, why: str) -> None:
        """Free the graphs and learn anew: they were made for memory that is not the step's any more."""
        if self._graphs:
            self.journal.counter(self._name)["freed"] += len(self._graphs)
            self._why_again = why
        self.free()
        self._learnt.clear()  # what is compiled may be compiled anew, which a capture must not contain
        self._prepare()

    # -- running as the function is ----------------------------------------------------------------------------------

    def _run_and_learn(self, kind: Kind, args: Any, kwargs: Any) -> Any:
        learnt = self._remember(kind)
        seen: Observation | None = None
        if learnt.calls and kind.checked_as not in self._checked:
            given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            seen = Observation(self._where.type, given, _present(self._state.gradients()), learnt.observation)
        before = self._interruptions
        results = self._run(args, kwargs, seen)
        changed = self._state.found.reached.look_after_run()
        if self._interruptions != before:  # what was seen is not the step's alone
            learnt.interrupted += 1
            if learnt.interrupted > 1:
                self._stay_plain("the step is called in the middle of itself")
            return results
        learnt.calls += 1
        learnt.leaves_gradients = any(each is not None for each in self._state.gradients())
        if seen is not None and not self._is_off:
            self._learn(kind, learnt, seen, changed)
        return results

    def _remember(self, kind: Kind) -> Learnt:
        learnt = self._learnt.get(kind)
        if learnt is not None:
            self._restless = 0
            return learnt
        self._restless += 1
        values, before = self._state.named_values(), self._last_values
        changed = [name for name, value in values.items() if before.get(name) != value]
        if self._restless >= (CHANGING if changed else RESTLESS) and not self._said_restless:
            self._said_restless = True
            reason = f"{changed[0]} changes in every call" if changed else "the last calls all had other sizes"
            what = "the training step is not captured so far"
            self.journal.fall_back(
                FellBack(self._name, what, f"{reason}, and a step is captured for calls that are alike")
            )
        self._last_values = values
        learnt = self._learnt[kind] = Learnt()
        if len(self._learnt) > REMEMBERED:
            self._learnt.popitem(last=False)
        return learnt

    def _learn(self, kind: Kind, learnt: Learnt, seen: Observation, changed: str) -> None:
        if seen.reason:
            self._stay_plain(seen.reason, seen.line)
            return
        if kind.gradients != "none" and seen.reads_gradients != self._reads_gradients.get(kind.path, False):
            self._reads_gradients[kind.path] = seen.reads_gradients  # kinds are told apart in another way from now on
            return
        before, learnt.observation = learnt.observation, seen
        if before is None:
            return
        difference, line = seen.differs_from(before)
        if not difference and changed:
            self._stay_plain(f"{changed} changes in every call, and a replay would not change it")
            return
        if not difference:
            self._checked.add(kind.checked_as)
            learnt.observation = None
            return
        learnt.differed += 1
        if learnt.differed > 1:  # the first two may differ by what is made in a first call
            self._stay_plain(difference, line)

    def _run(self, args: Any, kwargs: Any, seen: Observation | None) -> Any:
        """One step as the function has it; what is compiled inside is not captured on its own."""
        deferred: list[Callable[[], Any]] = []
        unknown: list[Optimizer] = []
        late: list[bool] = []
        sparse: list[bool] = []

        def before_step(optimizer: Optimizer) -> None:
            late.append(bool(deferred))
            sparse.append(self._state.has_sparse_gradients(optimizer))
            self._state.before_fused_step(optimizer)
            if not any(optimizer is each for each in self._state.found.optimizers):
                unknown.append(optimizer)

        with ExitStack() as stack:
            _register_hook()
            stack.enter_context(inside(_STEPS, before_step))
            stack.enter_context(captures_held_back(_nothing if seen is None else seen.note))
            told = _nothing if seen is None else seen.refuse
            stack.enter_context(self._state.rates_as_tensors(told))
            stack.enter_context(self._state.deferring(deferred, told))
            if seen is not None:
                if not may_see_compiled_code():
                    stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(seen)
            results = self._call_openly(deferred, args, kwargs)
            torch.clear_autocast_cache()  # casts of parameters that the step has changed
        if seen is not None:
            seen.finish(pytree.tree_leaves(results), _present(self._state.gradients()))
        for call in deferred:
            call()
        if any(late):
            self._stay_plain("a scheduler or an averaged model steps before an optimizer does")
        elif any(sparse):
            self._stay_plain(SPARSE)
        elif unknown:
            self._state.found.optimizers += unknown
            self._start_again("another optimizer was met")
        elif why := self._state.why_elsewhere():
            self._why_again = why if self._graphs else self._why_again
            self.free()
            self._prepare()
        self.journal.counter(self._name)["calls"] += 1
        return detached(results)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for each in self._compiled:
                stack.enter_context(each.in_place())
            return self._function(*args, **kwargs)

    def _call_openly(self, put_off: list[Callable[[], Any]], args: Any, kwargs: Any) -> Any:
        """Call the function; another call may be made in its middle. `put_off` are the calls to make after it."""
        before, self._put_off = self._put_off, put_off
        try:
            return self._call(*args, **kwargs)
        finally:
            self._put_off = before

    def _as_it_is(self, args: Any, kwargs: Any) -> Any:
        with inside(_STEPS, self._state.before_fused_step):
            return detached(self._call_openly([], args, kwargs))

    # -- capture and replay ------------------------------------------------------------------------------------------

    def _capture(self, kind: Kind, leaves: list[Any], spec: Any) -> CapturedStep | None:
        assert self._device is not None
        if reason := self._why_not_copied(leaves):
            self._stay_plain(reason)
            return None
        started, before = time.perf_counter(), self._state.gradients()
        if isinstance(kind.gradients, str):
            self._state.put_gradients([None] * len(before))
        gc.collect()  # memory that garbage holds is memory that the graph cannot have
        self._device.release_cached()
        self._state.renew_accumulators()
        reserved = self._device.reserved_bytes()
        try:
            graph = self._captured(leaves, spec, own_pool=self._learnt[kind].leaves_gradients)
        except BaseException as error:
            self._state.put_gradients(before)
            if not isinstance(error, CaptureError):
                raise
            self._stay_plain(one_line(error.__cause__ or error))
            return None
        changed = self._state.found.reached.look_after_run()
        if why := self._state.why_elsewhere() or (changed and f"{changed} is changed"):
            graph.free()
            self._state.put_gradients(before)
            self._stay_plain(f"{why} by the step itself")
            return None
        self._graphs[kind] = graph
        self._learnt.pop(kind, None)
        while len(self._graphs) > self._config.capture_limit:
            self._graphs.popitem(last=False)[1].free()
        self._note_capture(kind, graph, time.perf_counter() - started, self._device.reserved_bytes() - reserved)
        return graph

    def _why_not_copied(self, leaves: Sequence[Any]) -> str:
        """Why an argument cannot be given to a graph as a copy; empty if all can."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if any(each.requires_grad for each in tensors):
            return "an argument requires a gradient"
        if holder := next((leaf for leaf in leaves if holds_tensors(leaf)), None):
            return (
                f"an argument is a {type(holder).__name__}, whose tensors no graph is given; pass them as a dictionary"
            )
        own = {storage_address(each) for each in (*self._state.parameters, *self._state.buffers)}
        if any(storage_address(each) in own for each in tensors if each.numel()):
            return "an argument shares memory with a parameter or a buffer"
        return ""

    def _captured(self, leaves: list[Any], spec: Any, *, own_pool: bool) -> CapturedStep:
        """Capture the step on copies of its arguments. Nothing is computed."""
        assert self._device is not None
        device, state = self._device, self._state
        buffers = [
            (place, buffer_for(leaf, self._where)) for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)
        ]
        given = list(leaves)
        for place, buffer in buffers:
            given[place] = buffer.view
        args, kwargs = pytree.tree_unflatten(given, spec)
        deferred: list[Callable[[], Any]] = []
        pool = self._pool_for(own_pool)
        torch.clear_autocast_cache()  # what was cast before would be read where it was
        with (
            captures_held_back(_nothing),
            state.rates_as_tensors(_nothing),
            state.deferring(deferred, _nothing),
            waiting_for_no_turn(),
        ):
            run = partial(self._call, *args, **kwargs)
            replay, results = device.capture(run, pool.handle, self._config.capture_error_mode)
        torch.clear_autocast_cache()
        pool.graphs += 1
        flat, form = pytree.tree_flatten(detached(results))
        return CapturedStep(replay, pool, buffers, flat, form, state.gradients(), deferred)

    def _pool_for(self, own: bool) -> Pool:
        """Graphs share a pool, but for those that leave gradients in theirs, which another graph must not write to."""
        assert self._device is not None
        if own:
            return Pool(self._device)
        if self._pool is None:
            self._pool = Pool(self._device)
        return self._pool

    def _note_capture(self, kind: Kind, graph: CapturedStep, seconds: float, grown: int) -> None:
        status = "recaptured" if self._why_again else "captured"
        self.journal.counter(self._name)[status] += 1
        by_address = len(self._state.parameters) + len(self._state.buffers)
        sizes = ", ".join(str(tuple(each[0])) for each in kind.sizes)  # type: ignore[attr-defined]
        self.journal.add(
            Captured(
                self._name,
                status,
                f"({sizes})",
                seconds,
                by_address,
                len(graph.buffers),
                self._why_again,
                max(0, grown),
            )
        )
        self._why_again = ""

    @torch.no_grad()
    def _replay(self, graph: CapturedStep, leaves: Sequence[Any]) -> Any:
        graph.pool.wait_for_last_replay()
        graph.fill(leaves)
        self._state.fill_rates()
        with record_function(self._label) if profiler_enabled() else nullcontext():
            graph.replay.replay()
        self._state.put_gradients(graph.gradients)
        count_writes(self._state.written())
        results = [each.clone() if isinstance(each, Tensor) else each for each in graph.results]
        for call in graph.deferred:
            call()
        self.journal.counter(self._name)["replays"] += 1
        return pytree.tree_unflatten(results, graph.spec)


def _nothing(what: Any) -> None: ...


_STEPS = "graphex training steps"
_CALLS = "graphex calls of training steps"


@cache
def _register_hook() -> None:
    """Let steps see the optimizers that step inside of them.

    The hook stays: torch walks through all hooks in each step of any optimizer, in any thread.
    """
    register_optimizer_step_pre_hook(_before_optimizer)


def _before_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for before_step in of_thread(_STEPS):
        before_step(optimizer)


def _present(gradients: Sequence[Tensor | None]) -> list[Tensor]:
    return [each for each in gradients if each is not None]
