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
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from graphex.backend import Backend, get_backend
from graphex.config import CompilerConfig
from graphex.errors import InputError
from graphex.loops.recipe import Parts, Recipe
from graphex.loops.step_graph import CompiledModule
from graphex.loops.step_program import TrainStep
from graphex.loops.step_state import Found, found_in
from graphex.torch_private.dynamo import hooks_are_guarded


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
    if model is None:
        return partial(train_step, compile=compile, dynamic=dynamic, options=options)
    backend = get_backend(options)
    compile_it = partial(_compiled, backend=backend, dynamic=dynamic) if compile else _as_it_is
    if isinstance(model, nn.Module):
        if optimizer is None:
            raise InputError("train_step needs the optimizer of a module: train_step(model, loss_fn, optimizer).")
        parts = Parts(model, loss_fn, optimizer, scaler, scheduler, clip_norm, clip_value, accumulate, autocast, ema)
        recipe = Recipe(parts, compile_it)
        return TrainStep(recipe, partial(_found_of, parts, recipe.average), backend)
    if not callable(model):
        raise InputError(f"train_step takes a module, or a function that does a step; got {type(model).__name__}.")
    own = (loss_fn, optimizer, scaler, scheduler, clip_norm, clip_value, autocast, ema)
    if any(each is not None for each in own) or accumulate != 1:
        raise InputError("a function is a whole step: the parts of a step are for train_step(module, ...).")
    return TrainStep(model, partial(_reached_by, model, compile_it if compile else None), backend)


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
    function: Callable[..., Any], compile_it: Callable[..., Any] | None
) -> tuple[Found, Sequence[CompiledModule]]:
    found = found_in(function)
    modules = _outermost(found.modules) if compile_it is not None else []
    return found, [CompiledModule(each, compile_it) for each in modules if compile_it is not None]


def _outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules with parameters that are no part of another one, and of which nothing is compiled yet."""
    inner = {id(each) for module in modules for each in module.modules() if each is not module}
    return [
        module
        for module in modules
        if id(module) not in inner
        and any(True for _ in module.parameters())
        and not any(each._compiled_call_impl is not None or hasattr(each, "_orig_mod") for each in module.modules())
    ]
