"""One way to define an op: its schema, what it computes, what it returns, its derivative, and its kernel.

    @op(
        "graphex::silu_mul(Tensor gate, Tensor up) -> Tensor",
        fake=lambda gate, up: torch.empty_like(gate),
        gradient=Gradient(save, backward),
        kernel="gated.silu_mul",
    )
    def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
        '''The formula.'''

The decorated function is the reference: plain ATen, on any device, the meaning of the op. A kernel named here runs
instead of it on CUDA; where it declines, the reference runs and `declined()` counts the reason. Nothing is imported
for a kernel before its first call.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch

from graphex.device import runs_kernels

Function = Callable[..., Any]
F = TypeVar("F", bound=Function)


@dataclass(frozen=True)
class Gradient:
    """`save(ctx, inputs, output)` keeps what `backward(ctx, *gradients)` needs."""

    save: Callable[[Any, tuple[Any, ...], Any], None]
    backward: Function


@dataclass(frozen=True)
class OpSpec:
    """An op as it was declared."""

    schema: str
    reference: Function
    fake: Function | None
    gradient: Gradient | None
    kernel: str | None
    defined_here: bool

    @property
    def name(self) -> str:
        """`graphex::rms_norm`"""
        return self.schema.partition("(")[0]

    @property
    def doc(self) -> str:
        return inspect.getdoc(self.reference) or ""


@dataclass(frozen=True)
class Declined:
    """What a kernel returns for arguments it was not written for: the reference runs instead."""

    reason: str


SPECS: dict[str, OpSpec] = {}
_LIBRARIES: dict[str, torch.library.Library] = {}
_DECLINED: Counter[tuple[str, str]] = Counter()


def op(
    schema: str,
    *,
    fake: Function | None,
    gradient: Gradient | None = None,
    kernel: str | None = None,
) -> Callable[[F], F]:
    """Define an op from its reference. Without `fake` it is a composition that torch traces through."""

    def define(reference: F) -> F:
        name = schema.partition("(")[0]
        namespace, _, short = name.partition("::")
        ours = not (namespace == "npu" and has_torch_npu()) and not hasattr(getattr(torch.ops, namespace), short)
        spec = SPECS[name] = OpSpec(schema, reference, fake, gradient, kernel, ours)
        if ours:
            _register(spec, namespace)
        return reference

    return define


@cache
def has_torch_npu() -> bool:
    """Whether the real torch_npu is installed: it defines `torch.ops.npu` itself."""
    return importlib.util.find_spec("torch_npu") is not None


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def has_kernel(name: str, device: torch.device | str) -> bool:
    """Whether `name` ("graphex::rms_norm") has more than its reference to offer on a device."""
    spec = SPECS.get(name)
    if spec is None or not spec.defined_here or spec.kernel is None:
        return False
    return runs_kernels(torch.device(device).type) and has_triton()


def declined() -> dict[tuple[str, str], int]:
    """(op, reason) -> how many calls on CUDA ran the reference because the kernel does not take such arguments."""
    return dict(_DECLINED)


def _register(spec: OpSpec, namespace: str) -> None:
    library = _LIBRARIES.setdefault(namespace, torch.library.Library(namespace, "FRAGMENT"))
    signature = spec.schema.partition("::")[2]
    short = signature.partition("(")[0]
    library.define(signature, tags=(torch.Tag.pt2_compliant_tag,))
    if spec.fake is None:
        library.impl(short, spec.reference, "CompositeImplicitAutograd")
        return
    library.impl(short, spec.reference, "CompositeExplicitAutograd")
    torch.library.register_fake(spec.name, spec.fake, lib=library)
    if spec.gradient is not None:
        torch.library.register_autograd(
            spec.name, spec.gradient.backward, setup_context=_named(spec.gradient.save), lib=library
        )
    if spec.kernel is not None and has_triton():
        library.impl(short, _with_kernel(spec), "CUDA")


def _named(save: Callable[[Any, tuple[Any, ...], Any], None]) -> Function:
    """torch calls setup_context by keyword."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        save(ctx, inputs, output)

    return setup_context


def launcher_of(spec: OpSpec) -> Function:
    """The function that launches an op's kernel: its arguments are the op's."""
    assert spec.kernel is not None
    module, _, name = spec.kernel.partition(".")
    launcher: Function = getattr(importlib.import_module(f"graphex.kernels.{module}"), name)
    return launcher


def _with_kernel(spec: OpSpec) -> Function:
    launcher: Function | None = None

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal launcher
        launcher = launcher or launcher_of(spec)
        result = launcher(*args, **kwargs)
        if isinstance(result, Declined):
            _DECLINED[spec.name, result.reason] += 1
            return spec.reference(*args, **kwargs)
        return result

    return run
