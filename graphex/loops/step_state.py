"""The state of a training step: what it reads and writes besides its arguments.

    modules       parameters, buffers, whether each trains; their gradients
    optimizers    made capturable; a learning rate is a tensor while a step runs, and a float otherwise
    deferred      schedulers and averaged models, which the host steps after the device
    values        plain values that the function reads: a captured step holds for these only

`found_in` finds all of it where Python code can reach it (`observation`). A device graph can hold the step of an
optimizer that is fused or capturable, with learning rates on the device:

user    group["lr"] = 0.1                      a float, before and after each step
step    group["lr"] = tensor on the device     filled when the float has changed: an input of the graph
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, partialmethod
from itertools import chain
from operator import is_
from types import FunctionType
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

from graphex.loops.observation import Reached
from graphex.torch_private.cuda import states, switches_for
from graphex.torch_private.dynamo import global_hooks
from graphex.torch_private.memory import is_dense
from graphex.torch_private.symbolic import is_traceable_wrapper_subclass

# -- optimizers --------------------------------------------------------------------------------------------------------


FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)  # one kernel for each group, with a scale for gradients


def made_capturable(optimizer: Optimizer) -> list[str]:
    """Fused kernels where the user chose nothing else, `capturable` where there is such a thing."""
    changes: list[str] = []
    for group in optimizer.param_groups:
        tensors = [each for each in group["params"] if isinstance(each, Tensor)]
        on_device = bool(tensors) and all(each.is_cuda for each in tensors)
        if _may_be_fused(optimizer, group, tensors):
            group["fused"], group["foreach"] = True, False
            optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
            changes.append("fused=True")
        if group.get("capturable") is False and on_device:
            group["capturable"] = True
            changes.append("capturable=True")
        for parameter in tensors:
            state = optimizer.state.get(parameter, {})
            step = state.get("step")
            if (
                isinstance(step, Tensor)
                and step.device != parameter.device
                and (group.get("capturable") or group.get("fused"))
            ):
                state["step"] = step.to(parameter.device)
                changes.append("step on the device")
    return list(dict.fromkeys(changes))


def _may_be_fused(optimizer: Optimizer, group: dict[str, Any], tensors: list[Tensor]) -> bool:
    chosen = group.get("fused") is not None or group.get("foreach") is not None or group.get("differentiable")
    chosen = chosen or group.get("dampening")  # of the first gradient, nothing is damped: `before_fused_step`
    is_known = type(optimizer) in FUSED and not chosen and all(each.is_floating_point() for each in tensors)
    return is_known and _is_laid_out_alike(optimizer, tensors)


def _is_laid_out_alike(optimizer: Optimizer, tensors: list[Tensor]) -> bool:
    """Whether each parameter has its gradient and its state in its own strides: fused kernels go by those of one.

    A checkpoint from before `model.to(memory_format=torch.channels_last)` has others.
    """
    for each in tensors:
        held = (each.grad, *optimizer.state.get(each, {}).values())
        others = [other for other in held if isinstance(other, Tensor) and other.shape == each.shape]
        strided = [other for other in others if other.layout == torch.strided]
        if each.layout != torch.strided or not is_dense(each) or any(o.stride() != each.stride() for o in strided):
            return False
    return True


def takes_tensor(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether a group's learning rate may be a tensor. Elsewhere it is a number that a captured step holds for."""
    return bool(group.get("capturable") or (type(optimizer) in FUSED and group.get("fused")))


class Rates:
    """The learning rates of an optimizer as tensors on the device of their parameters, where these can be tensors."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._tensors: list[Tensor] = []
        self._filled: list[float] = []
        self._before: list[Any] = []
        self._versions: list[int] = []

    def _ready(self) -> None:
        for group in self._optimizer.param_groups[len(self._tensors) :]:
            device = group["params"][0].device if group["params"] else torch.device("cpu")
            self._tensors.append(torch.zeros((), dtype=torch.float32, device=device))
            self._filled.append(float("nan"))

    def fill(self) -> None:
        self._ready()
        for number, group in enumerate(self._optimizer.param_groups):
            if not takes_tensor(self._optimizer, group):
                continue
            rate = group["lr"]
            if isinstance(rate, Tensor):
                if rate is not self._tensors[number]:
                    self._tensors[number].copy_(rate)
                    self._filled[number] = float("nan")
            elif rate != self._filled[number]:
                self._tensors[number].fill_(rate)
                self._filled[number] = rate

    @contextmanager
    def as_tensors(self, told: Callable[[str], None]) -> Iterator[None]:
        """`told` hears of a rate that was set inside: a replay would not set it."""
        self.fill()
        groups = self._optimizer.param_groups
        self._before = [group["lr"] for group in groups]
        self._versions = [each._version for each in self._tensors]
        for group, tensor in zip(groups, self._tensors, strict=False):
            if takes_tensor(self._optimizer, group):
                group["lr"] = tensor
        try:
            yield
        finally:
            if self.give_back():
                told("sets a learning rate; set it outside of the step, or by a scheduler")

    def give_back(self) -> bool:
        """Put learning rates back: the former ones, or those that the step set, as numbers. Returns whether the step
        set one.
        """
        groups = self._optimizer.param_groups
        tensors = zip(self._tensors, self._versions, strict=False)
        changed = False
        for group, before, (tensor, version) in zip(groups, self._before, tensors, strict=False):
            rate = group["lr"]
            is_set = tensor._version != version if rate is tensor else not _same_rate(rate, before)
            changed |= is_set
            if rate is tensor and not is_set:
                group["lr"] = before
            elif is_set and isinstance(rate, Tensor) and not isinstance(before, Tensor):
                group["lr"] = float(rate)
        return changed


def _same_rate(rate: Any, other: Any) -> bool:
    return rate is other or (not isinstance(rate, Tensor) and not isinstance(other, Tensor) and rate == other)


# Types whose work is the host's, and the method that does it: called in a step, it is put off until after it.
DEFERRED: dict[type, str] = {LRScheduler: "step", ReduceLROnPlateau: "step", AveragedModel: "update_parameters"}
SPARSE = "a gradient is sparse, and its size depends on data"
_LIBRARIES = ("cublas", "cudnn", "attention", "linalg")


Method = tuple[type, str, Any]
_METHODS = (FunctionType, staticmethod, classmethod, property, partialmethod)


def methods_of(modules: Iterable[nn.Module]) -> frozenset[Method]:
    """The methods of the classes of modules, and of objects that they hold: a class, a name, and what stands there."""
    modules = list(modules)
    held = chain.from_iterable(vars(module).values() for module in modules)
    kinds = {*map(type, modules), *map(type, held)} - {Tensor, nn.Parameter}
    classes = {each for kind in kinds for each in kind.__mro__ if each not in (nn.Module, object)}
    return frozenset(
        (each, name, method) for each in classes for name, method in vars(each).items() if isinstance(method, _METHODS)
    )


@dataclass
class Found:
    """The modules, optimizers, scalers and schedulers that a function can reach."""

    modules: list[nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    scalers: list[GradScaler] = field(default_factory=list)
    deferred: list[Any] = field(default_factory=list)
    reached: Reached = field(default_factory=partial(Reached, (), ()))
    methods: frozenset[Method] = frozenset()
    replaced_method: str = ""  # of a class, since the last look

    def is_replaced(self) -> bool:
        """Whether other models, optimizers, scalers or schedulers are reached by now."""
        before = self.reached.things
        self.replaced_method = ""
        if not self.reached.look():
            return False
        self.look_at_methods()
        return not _identical(self.reached.things, before)

    def look_at_methods(self) -> None:
        """Note the methods of the modules' classes, and which one is another than in the last look."""
        before = self.methods
        self.methods = methods_of(each for module in self.modules for each in module.modules())
        for kind, name, method in before - self.methods:
            if vars(kind).get(name) is not method:
                self.replaced_method = f"{kind.__qualname__}.{name}"

    def add(self, thing: Any) -> bool:
        """Keep something of these types; False if it is of another one."""
        for kind, kept in ((AveragedModel, self.deferred), (nn.Module, self.modules), (Optimizer, self.optimizers)):
            if isinstance(thing, kind):
                _once(kept, thing)
                return True
        if isinstance(thing, GradScaler):
            _once(self.scalers, thing)
        elif isinstance(thing, tuple(DEFERRED)):
            _once(self.deferred, thing)
            _once(self.optimizers, getattr(thing, "optimizer", None))
        else:
            return False
        return True


def _once(kept: list[Any], thing: Any) -> None:
    if thing is not None and not any(other is thing for other in kept):
        kept.append(thing)


def found_in(*roots: Any) -> Found:
    """Everything of a step's state that functions, models and other objects can reach."""
    found = Found(reached=Reached(roots, (nn.Module, Optimizer, GradScaler, *DEFERRED)))
    for each in found.reached.things:
        found.add(each)
    return found


def _identical(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


# -- the state of all that was found -----------------------------------------------------------------------------------


class StepState:
    """Reads, prepares and restores what was found."""

    def __init__(self, found: Found) -> None:
        self.found = found
        self._rates: dict[int, Rates] = {}
        self._switches = switches_for(_LIBRARIES)
        self._counted: list[Hashable] = []
        self._chosen: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.look_again()

    def look_again(self) -> None:
        """List parameters, buffers and optimizer state as they are now."""
        self._modules, self.parameters, self.buffers = self._listed()
        self._version = self.found.reached.version
        self._states = [
            (optimizer.state, parameter, state, name, value)
            for optimizer in self.found.optimizers
            for parameter, state in optimizer.state.items()
            if isinstance(state, dict)
            for name, value in state.items()
        ]
        self._owners = [(optimizer, optimizer.state, optimizer.param_groups) for optimizer in self.found.optimizers]
        self._members = [(group, list(group["params"])) for _, _, groups in self._owners for group in groups]
        self._is_sparse = any(each.layout != torch.strided for each in (*self.parameters, *self.buffers))
        self._addresses = self._read_addresses()
        self._others = self._other_tensors()

    def _listed(self) -> tuple[list[nn.Module], list[Tensor], list[Tensor]]:
        modules = {id(each): each for module in self.found.modules for each in module.modules()}
        groups = [group for optimizer in self.found.optimizers for group in optimizer.param_groups]
        named = [each for module in self.found.modules for each in module.parameters()]
        known = {id(each): each for each in (*named, *(each for group in groups for each in group["params"]))}
        averaged = [each for each in self.found.deferred if isinstance(each, AveragedModel)]
        buffers = [each for module in (*self.found.modules, *averaged) for each in module.buffers()]
        return list(modules.values()), list(known.values()), buffers

    def devices(self) -> set[torch.device]:
        return {each.device for each in self.parameters}

    def gradients(self) -> list[Tensor | None]:
        return [each.grad for each in self.parameters]

    def written(self) -> list[Tensor]:
        """The tensors that a step may write to and that autograd may have saved."""
        return [each for each in (*self.parameters, *self.buffers) if not each.is_inference()]

    def put_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient

    # -- what a captured step was made for -------------------------------------------------------------------------

    def _read_addresses(self) -> list[Hashable]:
        if self._is_sparse:
            return []  # no step is captured for such tensors
        held = chain(self.parameters, self.buffers)
        found: list[Hashable] = [(each.data_ptr(), each.dtype, each.shape, each.stride()) for each in held]
        found += [value.data_ptr() for *_, value in self._states if type(value) is Tensor]
        return found

    def _other_tensors(self) -> list[Tensor]:
        """The tensors that the step reaches and that are no parameters or buffers."""
        known = {id(each) for each in (*self.parameters, *self.buffers)}
        return [
            each
            for each in self.found.reached.others_tensors()
            if id(each) not in known and each.layout == torch.strided and not is_traceable_wrapper_subclass(each)
        ]

    def why_elsewhere(self) -> str:
        """The part of the state that has moved, or was replaced, since `look_again`; empty if none has."""
        if self.found.reached.version != self._version:
            modules, parameters, buffers = self._listed()
            pairs = ((modules, self._modules), (parameters, self.parameters), (buffers, self.buffers))
            if not all(_identical(now, before) for now, before in pairs):
                return "a module, a parameter or a buffer was replaced"
            self._version, self._others = self.found.reached.version, self._other_tensors()
        if self._read_addresses() != self._addresses:
            return "parameters, buffers or the state of an optimizer moved"
        for optimizer, state, groups in self._owners:
            if optimizer.state is not state or optimizer.param_groups is not groups:
                return f"the state of {type(optimizer).__name__} was replaced"
        if self.has_other_groups():
            return "the groups of an optimizer are others"
        if not all(_identical(group["params"], before) for group, before in self._members):
            return "the parameters of an optimizer are others"
        if any(
            states.get(parameter) is not state or state.get(name) is not value
            for states, parameter, state, name, value in self._states
        ):
            return "the state of an optimizer was replaced"
        if len(self._states) != sum(len(each) for owner in self.found.optimizers for each in owner.state.values()):
            return "the state of an optimizer grew"
        return ""

    def has_other_groups(self) -> bool:
        """Whether an optimizer has got a group since `look_again`, or has them in another order."""
        groups = list(chain.from_iterable(each.param_groups for each in self.found.optimizers))
        return not _identical(groups, [group for group, _ in self._members])

    @property
    def is_prepared(self) -> bool:
        return bool(self._rates)

    def values(self) -> dict[str, Hashable]:
        """Everything of the host that a captured step holds for, by name."""
        values: dict[str, Hashable] = {"values": self.found.reached.version}
        values["requires_grad"] = tuple(each.requires_grad for each in self.parameters)
        for optimizer in self.found.optimizers:
            for number, group in enumerate(optimizer.param_groups):
                where = f"{type(optimizer).__name__}.param_groups[{number}]"
                inputs = ("params", "initial_lr", *(["lr"] if takes_tensor(optimizer, group) else []))
                values |= {
                    f"{where}['{name}']": id(value) if isinstance(value, Tensor) else repr(value)
                    for name, value in group.items()
                    if name not in inputs
                }
                values[f"the parameters of {where}"] = len(group["params"])
        for number, scaler in enumerate(self.found.scalers):
            values[f"scaler {number}"] = scaler.is_enabled() and (
                scaler.get_growth_factor(),
                scaler.get_backoff_factor(),
                scaler.get_growth_interval(),
            )
        values["where other tensors are"] = tuple([each.data_ptr() for each in self._others])
        values["numerics and autocast"] = (*states(self._switches), *modes(), torch.get_default_dtype())
        return values

    def named_values(self) -> dict[str, Hashable]:
        """The same with a name for each."""
        return self.found.reached.others_values() | {
            name: value for name, value in self.values().items() if name != "values"
        }

    def why_never(self) -> str:
        """Why no step with this state can be one replay; empty if nothing is in the way."""
        for module in self._modules:
            kind = type(module).__name__
            if kind in ("DistributedDataParallel", "FullyShardedDataParallel") or hasattr(module, "_get_fsdp_state"):
                return f"{kind} synchronises gradients in hooks of the host"
        if hook := users_hook((*self._modules, *self.found.optimizers)):
            return hook
        if self._is_sparse:
            return "a parameter or a buffer is sparse"
        if any(getattr(each, "sparse", False) is True for each in self._modules):
            return SPARSE
        for parameter in self.parameters:
            if is_traceable_wrapper_subclass(parameter):
                return f"a parameter is a {type(parameter).__name__}, which is made of other tensors"
            if parameter._backward_hooks or getattr(parameter, _GRADIENT_HOOKS, None):
                return "a parameter has a gradient hook, which Python runs"
            if _accumulates(parameter) and _has_hooks(_accumulator(parameter)):
                return "a hook on a parameter's accumulator (a node of autograd) is run by Python"
        return ""

    def renew_accumulators(self) -> None:
        """Have autograd make new accumulators for all parameters, on the stream of the next forward.

        An accumulator adds gradients on the stream it was made on, which a capture must not touch. It lives as long as
        any graph that ends in it, such as that of an old loss that the user keeps. In a distributed program the
        accumulators stay: DDP has hooks on them that no public name shows.
        """
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return
        for parameter in filter(_accumulates, self.parameters):
            memory, other = parameter.data, torch.float32 if parameter.dtype == torch.float64 else torch.float64
            parameter.data = torch.empty(0, dtype=other, device=parameter.device)  # drops one of another type
            parameter.data = memory

    def hooks(self) -> bool:
        """Whether a module, an optimizer or a parameter has a hook by now."""
        held = [vars(each) for each in (*self._modules, *self.found.optimizers)]
        return (
            any(each.get(name) for each in held for name in (*_HOOKS, *_STEP_HOOKS))
            or any(each._backward_hooks or getattr(each, _GRADIENT_HOOKS, None) for each in self.parameters)
            or not all(map(_is_ours, global_hooks()))
        )

    # -- optimizers ------------------------------------------------------------------------------------------------

    def prepare(self) -> list[tuple[Optimizer, list[str]]]:
        """Make optimizers capturable. Returns what was changed on each."""
        for optimizer in self.found.optimizers:
            if not all(_is_laid_out_alike(optimizer, group["params"]) for group in self._fused_here(optimizer)):
                self._give_back(optimizer)
        groups = [group for each in self.found.optimizers for group in each.param_groups]
        chosen = [(group, {name: group.get(name) for name in ("fused", "foreach")}) for group in groups]
        changed = [(each, made_capturable(each)) for each in self.found.optimizers]
        self._chosen += [(group, before) for group, before in chosen if group.get("fused") != before["fused"]]
        for optimizer in self.found.optimizers:
            self._rates.setdefault(id(optimizer), Rates(optimizer))
        return [(optimizer, changes) for optimizer, changes in changed if changes]

    def has_sparse_gradients(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer has a sparse gradient. Fused kernels take none: it is put back to the user's choice."""
        gradients = [each.grad for group in optimizer.param_groups for each in group["params"]]
        if all(each is None or each.layout == torch.strided for each in gradients):
            return False
        self._give_back(optimizer)
        return True

    def before_fused_step(self, optimizer: Optimizer) -> None:
        """Let a momentum that is not there yet be zeros. A fused kernel takes those of all parameters or of none, and
        leaves new ones as they are, unwritten, if gradients are infinite.
        """
        for group in self._fused_here(optimizer):
            if not (group["fused"] and group.get("momentum")):
                continue
            missing = [each for each in group["params"] if each.grad is not None]
            missing = [each for each in missing if optimizer.state[each].get("momentum_buffer") is None]
            if missing and group["dampening"]:
                self._give_back(optimizer)
                return
            for each in missing:
                optimizer.state[each]["momentum_buffer"] = torch.zeros_like(each)

    def _fused_here(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """The groups of an optimizer that `prepare` has chosen fused kernels for."""
        chosen = [group for group, _ in self._chosen]
        return [each for each in optimizer.param_groups if any(each is group for group in chosen)]

    def _give_back(self, optimizer: Optimizer) -> None:
        """Put an optimizer back to the kernels that the user chose."""
        fused = self._fused_here(optimizer)
        for group, before in self._chosen:
            if any(group is each for each in fused):
                group.update(before)
        if fused:
            is_fused = any(group.get("fused") for group in optimizer.param_groups)
            optimizer._step_supports_amp_scaling = is_fused  # type: ignore[attr-defined]
        if (rates := self._rates.get(id(optimizer))) is not None:
            rates.give_back()

    @contextmanager
    def rates_as_tensors(self, told: Callable[[str], None]) -> Iterator[None]:
        """Learning rates are tensors on the device inside, and what they were outside; `told` hears if one is set."""
        with ExitStack() as stack:
            for rates in self._rates.values():
                stack.enter_context(rates.as_tensors(told))
            yield

    def fill_rates(self) -> None:
        """Give the learning rates of this moment to the device."""
        for rates in self._rates.values():
            rates.fill()

    @contextmanager
    def deferring(self, calls: list[Callable[[], Any]], read: Callable[[str], None]) -> Iterator[None]:
        """Calls of schedulers and averaged models are put into `calls` instead of being made.

        `read` is called, and the step is not captured, in two cases: the step asks a scheduler for its learning rate,
        or it calls a method that it took from the object before the step (`after = scheduler.step`).
        """
        patched: list[tuple[Any, str]] = []
        self._counted = list(map(_calls_of, self.found.deferred))
        try:
            for thing in self.found.deferred:
                name = next(name for kind, name in DEFERRED.items() if isinstance(thing, kind))
                laters = {name: partial(_deferred, calls=calls), "get_last_lr": partial(self._told, calls, read)}
                for each, later in laters.items():
                    if each not in vars(thing) and hasattr(thing, each):  # a method that other code has put there stays
                        vars(thing)[each] = later(getattr(thing, each))
                        patched.append((thing, each))
            yield
        finally:
            for thing, name in patched:
                del vars(thing)[name]
        for thing, before in zip(self.found.deferred, self._counted, strict=True):
            if _calls_of(thing) != before:
                read(f"calls a method of a {type(thing).__name__} that was taken from it before; call it by its name")

    def _told(self, calls: list[Callable[[], Any]], read: Callable[[str], None], method: Callable[[], Any]) -> Any:
        def now() -> Any:
            read("asks a scheduler for the learning rate; ask it outside of the step")
            self.catch_up(calls)
            return method()

        return now

    def catch_up(self, calls: list[Callable[[], Any]]) -> None:
        """Make the calls that were put off."""
        for rates in self._rates.values() if calls else ():
            rates.give_back()  # a scheduler is to change numbers
        while calls:
            calls.pop(0)()
        self._counted = list(map(_calls_of, self.found.deferred))


def _accumulates(parameter: Tensor) -> bool:
    """Whether autograd adds gradients of this tensor up."""
    return parameter.requires_grad and parameter.is_leaf and not parameter.is_inference()


@torch.enable_grad()
def _accumulator(parameter: Tensor) -> Any:
    node = parameter.view_as(parameter).grad_fn
    assert node is not None
    return node.next_functions[0][0]


def _has_hooks(node: Any) -> bool:
    """Whether Python has registered a hook on a node: the handle of one more tells how many there are."""
    for register in (node.register_hook, node.register_prehook):
        handle = register(lambda *gradients: None)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks:
            return True
    return False


def _calls_of(thing: Any) -> Hashable:
    """A value that every step of a scheduler, or update of an averaged model, changes."""
    if isinstance(thing, AveragedModel):
        return thing.n_averaged._version
    inner = tuple(map(_calls_of, getattr(thing, "_schedulers", ())))
    return getattr(thing, "last_epoch", 0), getattr(thing, "_step_count", 0), inner


def _deferred(method: Callable[..., Any], calls: list[Callable[[], Any]]) -> Callable[..., None]:
    def later(*args: Any, **kwargs: Any) -> None:
        calls.append(lambda: method(*args, **kwargs))

    return later


def modes() -> tuple[object, ...]:
    """The modes of torch that a caller sets around a call, and that make it another one."""
    kinds = ("cpu", "cuda")
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    return (*autocast, torch.is_grad_enabled(), torch.is_inference_mode_enabled())


_HOOKS = {
    "_forward_hooks": "a forward hook",
    "_forward_pre_hooks": "a forward pre-hook",
    "_backward_hooks": "a backward hook",
    "_backward_pre_hooks": "a backward pre-hook",
}


_GRADIENT_HOOKS = "_post_accumulate_grad_hooks"
_STEP_HOOKS = {"_optimizer_step_pre_hooks": "a step pre-hook", "_optimizer_step_post_hooks": "a step post-hook"}
_OWN = "graphex.loops.step_program"  # has a hook for all optimizers


def _is_ours(hook: Any) -> bool:
    return getattr(hook, "__module__", None) == _OWN


def users_hook(owners: Iterable[nn.Module | Optimizer], *, harmless: str = "") -> str:
    """The first hook of these modules and optimizers, or of all there are, in words; empty without one.

    `harmless` is a module of Python whose hooks do not count.
    """

    def counts(hook: Any) -> bool:
        return not _is_ours(hook) and getattr(hook, "__module__", None) != harmless

    if any(map(counts, global_hooks())):
        return "a hook for all modules, or for all optimizers, is run by Python"
    for owner in owners:
        kinds = _STEP_HOOKS if isinstance(owner, Optimizer) else _HOOKS
        for name, text in kinds.items():
            if any(map(counts, getattr(owner, name, {}).values())):
                return f"{type(owner).__name__} has {text}, which Python runs"
    return ""
