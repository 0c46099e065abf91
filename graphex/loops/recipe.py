"""The usual training step, made of its parts: forward, loss, backward, clipping, optimizer, zeroing, average.

    loss = loss_fn(model(*inputs), target)     or  model(**batch).loss
    for each microbatch: backward of loss / n
    unscale, clip, step, update the scale, zero, average the parameters

Forward and loss are compiled as one function. An exception before the optimizer's step leaves parameters as they were
and no gradient behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from graphex.errors import InputError
from graphex.torch_private.memory import move_together
from graphex.torch_private.symbolic import pytree


@dataclass
class Parts:
    """What a step is made of; `train_step` says what each does."""

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
        total: Tensor | None = None
        try:
            for micro_args, micro_kwargs in _microbatches(args, kwargs, parts.accumulate):
                with self._autocast():
                    loss = self._loss(*micro_args, **micro_kwargs)
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
    if parts.autocast is not None and not isinstance(parts.autocast, torch.dtype):
        raise InputError(f"autocast is a type, such as torch.bfloat16; got {parts.autocast!r}.")
    if parts.ema is None or isinstance(parts.ema, AveragedModel):
        return
    if not isinstance(parts.ema, (int, float)) or not 0.0 <= parts.ema < 1.0:
        raise InputError(f"ema is the decay of an average, from 0 to below 1, or an AveragedModel; got {parts.ema!r}.")


def _average_of(parts: Parts) -> nn.Module | None:
    if parts.ema is None or isinstance(parts.ema, AveragedModel):
        return parts.ema
    return deepcopy(parts.model).requires_grad_(False).eval()


def _loss_function(parts: Parts) -> Callable[..., Tensor]:
    model, loss_fn = parts.model, parts.loss_fn

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
