"""A training step as one replay: forward, loss, backward, clipping, optimizer and zeroing in one device graph.

step = graphex.train_step(model, loss_fn, optimizer, clip_norm=1.0)
for x, y in batches:
    loss = step(x, y)

@graphex.train_step
def step(x, y):                    # or as you write it
    loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

The first form makes the usual step of its parts:

    loss = loss_fn(model(*inputs), target)     or  model(**batch).loss
    for each microbatch: backward of loss / n
    unscale, clip, step, update the scale, zero, average the parameters

Forward and loss are compiled as one function. An exception before the optimizer's step leaves parameters as they were
and no gradient behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial, wraps
from inspect import Parameter, signature
from numbers import Real
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from graphex.backend import Backend, get_backend
from graphex.config import CompilerConfig
from graphex.errors import InputError, at_users_line, did_you_mean
from graphex.loops.step_program import CompiledModule, TrainStep
from graphex.loops.step_state import Found, found_in
from graphex.records import FellBack
from graphex.torch_private.dynamo import hooks_are_guarded
from graphex.torch_private.frames import compiled_call
from graphex.torch_private.memory import move_together
from graphex.torch_private.symbolic import pytree

P = ParamSpec("P")
R = TypeVar("R")


def _by_known_names(function: Callable[P, R]) -> Callable[P, R]:
    """The function, with an error for an unknown keyword argument that names the nearest."""
    known = signature(function).parameters

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                hint = did_you_mean(name, known, f"it takes {', '.join(known)}")
                raise InputError(f"{function.__name__}() got an unexpected keyword argument '{name}' ({hint}).")
        return function(*args, **kwargs)

    return call


@_by_known_names
def train_step(
    model: nn.Module | Callable[..., Any] | None = None,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Optimizer | None = None,
    *,
    scaler: Any = None,
    scheduler: Any = None,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    accumulate: int = 1,
    autocast: torch.dtype | None = None,
    ema: Any = None,
    compile: bool = True,
    dynamic: bool | None = None,
    options: Mapping[str, Any] | CompilerConfig | None = None,
) -> Any:
    """A training step that is one replay of one device graph, where the device has graphs.

    With a module and an optimizer, the step is made of these: `step(x, y)` computes `loss_fn(model(x), y)` and its
    gradients in `accumulate` microbatches, clips these, steps the optimizer (through `scaler`), zeroes the gradients,
    updates an average of the parameters (`ema`: a decay, or an `AveragedModel`) and steps the `scheduler`. It returns
    the loss. Without `loss_fn` the model returns the loss. With a function, or as a decorator, the step is that
    function: it may use modules, optimizers, scalers and schedulers that it reaches by name.

    The model is compiled (`compile=False`: it is not) with these `options` of graphex. Tensors that a step returns are
    detached copies. What cannot be captured runs as it is, with the reason in `step.journal`.
    """
    own = (loss_fn, optimizer, scaler, scheduler, clip_norm, clip_value, autocast, ema)
    has_parts = any(each is not None for each in own) or accumulate != 1
    if model is None and has_parts:
        raise InputError("train_step needs the module of these parts: train_step(model, loss_fn, optimizer).")
    if model is None:
        return partial(train_step, compile=compile, dynamic=dynamic, options=options)
    backend = get_backend(options)
    compile_it = partial(_compiled, backend=backend, dynamic=dynamic) if compile else _as_it_is
    if isinstance(model, nn.Module):
        if optimizer is None:
            raise InputError("train_step needs the optimizer of a module: train_step(model, loss_fn, optimizer).")
        parts = Parts(model, loss_fn, optimizer, scaler, scheduler, clip_norm, clip_value, accumulate, autocast, ema)
        once = not compile or _differentiates_once(found_in(model, loss_fn), backend, type(model).__name__)
        recipe = Recipe(parts, compile_it if once else _as_it_is)
        return TrainStep(recipe, partial(_found_of, parts, recipe.average), backend, compiles=compile)
    if not callable(model):
        raise InputError(f"train_step takes a module, or a function that does a step; got {type(model).__name__}.")
    if has_parts:
        raise InputError("a function is a whole step: the parts of a step are for train_step(module, ...).")
    find = partial(_reached_by, model, compile_it, backend) if compile else lambda: (found_in(model), ())
    return TrainStep(model, find, backend, compiles=compile)


def _compiled(function: Callable[..., Any], *, backend: Backend, dynamic: bool | None) -> Callable[..., Any]:
    compiled = torch.compile(function, backend=backend, dynamic=dynamic)

    def call(*args: Any, **kwargs: Any) -> Any:
        with hooks_are_guarded():
            return compiled(*args, **kwargs)

    return call


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _found_of(parts: Parts, average: nn.Module | None) -> tuple[Found, Sequence[CompiledModule]]:
    found = found_in(parts.model, parts.loss_fn)
    for each in (parts.model, parts.loss_fn, parts.optimizer, parts.scaler, parts.scheduler, average):
        found.add(each)
    return found, ()


def _reached_by(
    function: Callable[..., Any], compile_it: Callable[..., Any], backend: Backend
) -> tuple[Found, Sequence[CompiledModule]]:
    found = found_in(function)
    if not _differentiates_once(found, backend, getattr(function, "__name__", "step")):
        return found, ()
    return found, [CompiledModule(each, compile_it) for each in _outermost(found.modules)]


def _differentiates_once(found: Found, backend: Backend, name: str) -> bool:
    """Whether no code that is found asks for gradients with a history, which those of a compiled module have not.

    It is read and not tried: by the time torch refuses, half of a step is done.
    """
    line = found.reached.line_with("create_graph")
    if line:
        reason = "torch cannot differentiate a compiled backward again, which `create_graph` may ask for"
        backend.journal.fall_back(FellBack(f"{name} step", "the training step is not compiled", reason, line=line))
    return not line


def _outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules with parameters that are no part of another one, and of which nothing is compiled yet."""
    inner = {id(each) for module in modules for each in module.modules() if each is not module}
    return [
        module
        for module in modules
        if id(module) not in inner
        and any(True for _ in module.parameters())
        and not any(compiled_call(each) is not None or hasattr(each, "_orig_mod") for each in module.modules())
    ]


# -- the usual step, made of its parts ---------------------------------------------------------------------------------


@dataclass
class Parts:
    """The parts of a step; `train_step` says what each does."""

    model: nn.Module
    loss_fn: Callable[..., Any] | None
    optimizer: Optimizer
    scaler: GradScaler | None = None
    scheduler: Any = None
    clip_norm: float | None = None
    clip_value: float | None = None
    accumulate: int = 1
    autocast: torch.dtype | None = None
    ema: float | AveragedModel | None = None


class Recipe:
    """A step as a function. `average` is the module that holds the averaged parameters."""

    def __init__(self, parts: Parts, compile_it: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        _check(parts)
        self._parts = parts
        self._loss, self._autocast = compile_it(_loss_function(parts)), _autocast_of(parts)
        self.average = _average_of(parts)
        self.__name__ = self.__qualname__ = type(parts.model).__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        parts, scaler = self._parts, self._parts.scaler
        if parts.loss_fn is not None and len(args) + len(kwargs) < 2:
            raise InputError(
                "a step with a loss function takes the model's inputs and a target, the target last: step(x, y)."
            )
        total: Tensor | None = None
        try:
            for micro_args, micro_kwargs in _microbatches(args, kwargs, parts.accumulate):
                with self._autocast():
                    loss = _one_number(self._loss(*micro_args, **micro_kwargs))
                loss = loss / parts.accumulate if parts.accumulate > 1 else loss
                (loss if scaler is None else scaler.scale(loss)).backward()
                total = loss.detach() if total is None else total + loss.detach()
            self._clip()
        except BaseException:
            parts.optimizer.zero_grad(set_to_none=True)
            raise
        if scaler is None:
            parts.optimizer.step()
        else:
            scaler.step(parts.optimizer)
            scaler.update()
        parts.optimizer.zero_grad(set_to_none=True)
        self._update_average()
        if parts.scheduler is not None:
            parts.scheduler.step()
        assert total is not None
        return total

    def _clip(self) -> None:
        parts = self._parts
        if parts.clip_norm is None and parts.clip_value is None:
            return
        if parts.scaler is not None:
            parts.scaler.unscale_(parts.optimizer)
        trained = [each for group in parts.optimizer.param_groups for each in group["params"]]
        if parts.clip_norm is not None:
            nn.utils.clip_grad_norm_(trained, parts.clip_norm)
        if parts.clip_value is not None:
            nn.utils.clip_grad_value_(trained, parts.clip_value)

    @torch.no_grad()
    def _update_average(self) -> None:
        ema, model, average = self._parts.ema, self._parts.model, self.average
        if average is None:
            return
        if isinstance(ema, AveragedModel):
            ema.update_parameters(model)
            return
        assert ema is not None
        theirs = [each.detach() for each in model.parameters()]
        move_together(list(average.parameters()), theirs, 1.0 - ema)
        for mine, other in zip(average.buffers(), model.buffers(), strict=True):
            mine.copy_(other)


def _check(parts: Parts) -> None:
    if not isinstance(parts.model, nn.Module):
        raise InputError(
            f"train_step takes a module, a loss function and an optimizer, got {type(parts.model).__name__}."
        )
    if not isinstance(parts.optimizer, Optimizer):
        kind = type(parts.optimizer).__name__
        raise InputError(f"train_step takes an optimizer of torch.optim as `optimizer`, got {kind}.")
    if not isinstance(parts.accumulate, int) or parts.accumulate < 1:
        raise InputError(f"accumulate is how many microbatches a step has, at least 1; got {parts.accumulate!r}.")
    closure = signature(parts.optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise InputError(
            f"{type(parts.optimizer).__name__} computes the loss as often as it likes. Write the step as a function "
            "that calls `optimizer.step(closure)`, and pass that to train_step."
        )
    _check_trained(parts)
    _check_clipping("clip_norm", "the largest norm", parts.clip_norm)
    _check_clipping("clip_value", "the largest absolute value of a gradient", parts.clip_value)
    _check_methods("scaler", "a torch.amp.GradScaler", parts.scaler, ("scale", "unscale_", "step", "update"))
    _check_methods("scheduler", "a scheduler of torch.optim.lr_scheduler", parts.scheduler, ("step",))
    if parts.scheduler is not None and _needs_arguments(parts.scheduler.step):
        kind = type(parts.scheduler).__name__
        raise InputError(f"{kind} steps with arguments, such as a metric: call its `step` yourself, after the step.")
    if parts.autocast is not None and not isinstance(parts.autocast, torch.dtype):
        raise InputError(f"autocast is a type, such as torch.bfloat16; got {parts.autocast!r}.")
    if parts.ema is None or isinstance(parts.ema, AveragedModel):
        return
    if not isinstance(parts.ema, (int, float)) or not 0.0 <= parts.ema < 1.0:
        raise InputError(f"ema is the decay of an average, from 0 to below 1, or an AveragedModel; got {parts.ema!r}.")


def _check_trained(parts: Parts) -> None:
    modules = [each for each in (parts.model, parts.loss_fn) if isinstance(each, nn.Module)]
    trained = {id(each) for module in modules for each in module.parameters() if each.requires_grad}
    held = {id(each) for group in parts.optimizer.param_groups for each in group["params"]}
    if trained and trained.isdisjoint(held):
        raise InputError("the optimizer holds none of the model's parameters. Make it of model.parameters().")


def _check_clipping(name: str, meaning: str, limit: Any) -> None:
    is_number = isinstance(limit, Real) and not isinstance(limit, bool)
    if limit is not None and not (is_number and limit > 0):
        raise InputError(f"{name} is {meaning}, above 0; got {limit!r}.")


def _check_methods(name: str, meaning: str, given: Any, methods: Sequence[str]) -> None:
    if given is not None and not all(callable(getattr(given, each, None)) for each in methods):
        raise InputError(f"{name} is {meaning}; got {given!r}.")


def _needs_arguments(method: Callable[..., Any]) -> bool:
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return any(each.default is Parameter.empty and each.kind in kinds for each in signature(method).parameters.values())


def _average_of(parts: Parts) -> nn.Module | None:
    if parts.ema is None or isinstance(parts.ema, AveragedModel):
        return parts.ema
    return deepcopy(parts.model).requires_grad_(False).eval()


def _loss_function(parts: Parts) -> Callable[..., Tensor]:
    model, loss_fn = parts.model, parts.loss_fn

    @at_users_line
    def loss(*args: Any, **kwargs: Any) -> Tensor:
        if loss_fn is None:
            return _loss_in(model(*args, **kwargs))
        return _loss_in(loss_fn(model(*args[:-1], **kwargs), args[-1]))

    return loss


def _autocast_of(parts: Parts) -> Callable[[], AbstractContextManager[Any]]:
    """Autocast as people write it, around the call of what is compiled.

    Inside of it, AOTAutograd would trace the backward without autocast: the products that attention is made of, with
    dropout where no kernel does both, in float32.
    """
    if parts.autocast is None:
        return nullcontext
    device = next((each.device.type for each in parts.model.parameters()), "cpu")
    return partial(torch.autocast, device, dtype=parts.autocast)


def _loss_in(result: Any) -> Tensor:
    """The loss that a model returns: a tensor of one element, or the `loss` of an output object or a dictionary."""
    loss = result if isinstance(result, Tensor) else getattr(result, "loss", None)
    if loss is None and isinstance(result, dict):
        loss = result.get("loss")
    if not isinstance(loss, Tensor):
        raise InputError("a training step needs a loss: pass `loss_fn`, or let the model return it (as `.loss`).")
    return loss


def _one_number(loss: Tensor) -> Tensor:
    if loss.numel() != 1:
        raise InputError(
            f"a loss is one number, and this one is of shape {tuple(loss.shape)}: take its mean or its sum."
        )
    return loss


def _microbatches(args: Any, kwargs: Any, number: int) -> Iterator[tuple[Any, Any]]:
    """Equal parts of all tensors along their first dimension."""
    if number == 1:
        yield args, kwargs
        return
    leaves, spec = pytree.tree_flatten((args, kwargs))
    rows = {leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
    if len(rows) != 1 or next(iter(rows)) % number:
        sizes = " and ".join(map(str, sorted(rows))) or "no"
        raise InputError(f"a batch of {sizes} rows cannot be divided into {number} microbatches (accumulate={number}).")
    parts = [leaf.chunk(number) if isinstance(leaf, Tensor) and leaf.dim() else (leaf,) * number for leaf in leaves]
    for each in zip(*parts, strict=True):
        yield pytree.tree_unflatten(list(each), spec)
