"""Subjects of the models benchmark: a model, its inputs, the sizes there are, and its result in another type."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

SIZES = ("gpu", "cpu", "tiny")
HF, VISION = ("transformers",), ("torchvision",)
T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """A model, its size, and where it runs: the subject of a few rows of the table. `threads` are the CPU's."""

    model: str
    size: str = "gpu"
    batch: int = 8
    dtype: str = "bfloat16"
    device: str = "cuda"
    threads: int = 0

    def __str__(self) -> str:
        threads = f", {self.threads} thread{'s' if self.threads > 1 else ''}" if self.threads else ""
        return self.model + threads

    def pick(self, gpu: T, cpu: T, tiny: T) -> T:
        return {"gpu": gpu, "cpu": cpu, "tiny": tiny}[self.size]

    def tokens(self, most: int, vocabulary: int) -> Tensor:
        return torch.randint(0, vocabulary, (self.batch, most))

    def image(self, gpu: int, cpu: int, tiny: int) -> Tensor:
        side = self.pick(gpu, cpu, tiny)
        return torch.randn(self.batch, 3, side, side)


@dataclass(frozen=True)
class Subject:
    """A model and the arguments of a call of it."""

    model: nn.Module
    arguments: tuple[Tensor, ...] = ()
    named: Mapping[str, Any] = field(default_factory=dict)

    def call(self, run: Callable[..., Any]) -> Any:
        return run(*self.arguments, **self.named)


@dataclass(frozen=True)
class Case:
    """How a model is built. `packages` are those it needs besides torch; `gib` is a rough estimate of its device
    memory while a reference in float64 is computed; `layers` is the number of equal layers at size `gpu`, if it is
    known to be that of the whole model; `slow` multiplies the time that is set aside for its rows.
    """

    make: Callable[[Setting], Subject]
    packages: tuple[str, ...] = ()
    gib: float = 3.0
    layers: int = 0
    slow: float = 1.0

    @property
    def missing(self) -> list[str]:
        return [package for package in self.packages if find_spec(package) is None]


def in_type(subject: Subject, dtype: torch.dtype) -> Subject:
    """The model, changed, and its inputs in another floating type. Rotary frequencies stay in float32, as
    transformers keeps them.
    """
    model = subject.model.eval().requires_grad_(False)
    frequencies = {name: each for name, each in model.named_buffers() if name.endswith("inv_freq")}
    model.to(dtype)
    for name, each in frequencies.items():
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, each)
    inputs = (subject.arguments, dict(subject.named))
    arguments, named = pytree.tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, inputs)
    return Subject(model, arguments, named)


def first_floating(result: Any) -> Tensor:
    tensors = (each for each in pytree.tree_leaves(result) if isinstance(each, Tensor))
    return next(each for each in tensors if each.is_floating_point())


def error(found: Tensor, wanted: Tensor) -> float:
    """The norm of the difference divided by the norm of the expected result; infinite if a value is not finite."""
    measured = ((found.double() - wanted).norm() / wanted.norm()).item()
    return measured if math.isfinite(measured) else math.inf


def transformer(name: str, kind: str, **config: Any) -> nn.Module:
    import transformers

    return getattr(transformers, f"{name}{kind}")(getattr(transformers, f"{name}Config")(**config))


def of_torchvision(
    name: str, sizes: tuple[int, int, int] = (224, 128, 64), **options: Any
) -> Callable[[Setting], Subject]:
    """A model of torchvision by its name, which may begin with a folder: `segmentation.fcn_resnet50`."""

    def make(setting: Setting) -> Subject:
        import torchvision

        build = attrgetter(name)(torchvision.models)
        return Subject(build(weights=None, **options), (setting.image(*sizes),))

    return make
