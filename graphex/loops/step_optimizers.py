"""Optimizers whose step a device graph can hold: fused or capturable, with learning rates on the device.

user    group["lr"] = 0.1                      a float, before and after each step
step    group["lr"] = tensor on the device     filled when the float has changed: an input of the graph
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

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
    return type(optimizer) in FUSED and not chosen and all(each.is_floating_point() for each in tensors)


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
    def as_tensors(self) -> Iterator[None]:
        self.fill()
        groups = self._optimizer.param_groups
        self._before = [group["lr"] for group in groups]
        for group, tensor in zip(groups, self._tensors, strict=False):
            if takes_tensor(self._optimizer, group):
                group["lr"] = tensor
        try:
            yield
        finally:
            self.give_back()

    def give_back(self) -> None:
        """Learning rates are what they were before `as_tensors`."""
        for group, rate, tensor in zip(self._optimizer.param_groups, self._before, self._tensors, strict=False):
            if group["lr"] is tensor:  # else the step itself has set another
                group["lr"] = rate
