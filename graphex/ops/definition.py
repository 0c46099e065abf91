"""How an op is declared, once: its schema, and with it everything that another part of graphex asks about it.

    @op(
        "graphex::silu_mul(Tensor gate, Tensor up) -> Tensor",
        title="silu(gate) * up",                   what a report calls it
        gradient=Gradient(save, backward),
        kernel="activations.silu_mul",             graphex/kernels/activations.py, silu_mul(call)
        rows=RowRule("pointwise"),                 how it treats the rows of its arguments
        inlines=True,                              Inductor writes as good a kernel where it can join it with others
        libraries=CUBLAS,                          torch's libraries that may compute it: their switches choose kernels
    )
    def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
        '''The formula.'''

The decorated function is the reference: plain ATen, on any device, the meaning of the op. Its docstring is the
documentation.

A fake says shape, type and layout of the results. Without one, the reference is run on fake tensors, and whatever it
calls of this library (ops, and functions that are a `part`) answers with its own fake: an op that is composed of
others needs none. An op that computes much by itself has a short one, since fakes run whenever a graph is traced.

A kernel runs instead of the reference on devices that have kernels. Its launcher takes one argument, the call: a named
tuple of the schema's arguments, defaults filled in. Where it returns a `Refusal`, the reference runs and `declined()`
counts the reason. Nothing is imported for a kernel before its first call.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import threading
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, Protocol, TypeVar, cast

import torch

from graphex.device import kernel_runtime, runs_kernels
from graphex.errors import Refusal
from graphex.torch_private.graphs import require

Function = Callable[..., Any]
F = TypeVar("F", bound=Function)


@dataclass(frozen=True)
class Gradient:
    """`save(ctx, inputs, output)` keeps what `backward(ctx, *gradients)` needs.

    `backward` is called if a result has a gradient, and returns those of the first arguments; the others have none.
    """

    save: Callable[[Any, tuple[Any, ...], Any], None]
    backward: Function


@dataclass(frozen=True)
class RowRule:
    """How an op treats the rows of its arguments. `analysis.row_independence` knows the kinds:

    pointwise       elements one by one, broadcast
    last_dim        each row of the named arguments for itself; all else is the same for every row
    batch           rows are dimension 0, and the named arguments have them
    lookup          rows of the first argument, by the numbers in the second
    """

    kind: str
    arguments: tuple[str, ...] = ()


# Libraries that references call, as `graphex.analysis.effects` names them. `attention` is torch's choice among its
# implementations, of which one is made of matrix products.
CUBLAS = frozenset({"cublas"})
ATTENTION = frozenset({"cublas", "attention"})


@dataclass(frozen=True)
class OpSpec:
    """An op as it was declared."""

    schema: str
    reference: Function
    fake: Function | None  # None: the reference, with the fakes of its parts
    gradient: Gradient | None
    kernel: str | None
    rows: RowRule | None
    title: str
    is_composite: bool  # torch traces through it
    defined_here: bool
    # True: a region compiles the reference, if it can join it with other code. A function gets the arguments of a call,
    # and returns what a region compiles instead, whatever is around the call, or None.
    inlines: bool | Function
    is_random: bool  # it draws from a generator
    compiles_slowly: bool  # Triton takes longer for its kernel than for most
    libraries: frozenset[str]  # those that the reference may call: their switches are a part of the capture key

    @property
    def name(self) -> str:
        """`graphex::rms_norm`"""
        return self.schema.partition("(")[0]

    def formula(self, *args: Any, **kwargs: Any) -> Function | None:
        """What a region compiles instead of such a call, whatever is around it."""
        found: Function | None = None if isinstance(self.inlines, bool) else self.inlines(*args, **kwargs)
        return found

    @property
    def doc(self) -> str:
        return inspect.getdoc(self.reference) or ""


class Arguments(Protocol):
    """A call of an op: a named tuple of its schema's arguments."""

    def __getattr__(self, name: str) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...


SPECS: dict[str, OpSpec] = {}
_named_tuple: Any = namedtuple  # its fields come from a schema: mypy cannot know them
_LIBRARIES: dict[str, torch.library.Library] = {}
_DECLINED: Counter[tuple[str, str]] = Counter()


class _Thread(threading.local):
    runs_fakes = False  # while a reference is run as a fake


_thread = _Thread()


def op(
    schema: str,
    *,
    fake: Function | None = None,
    gradient: Gradient | None = None,
    kernel: str | None = None,
    rows: RowRule | None = None,
    title: str = "",
    is_composite: bool = False,
    inlines: bool | Function = False,
    is_random: bool = False,
    compiles_slowly: bool = False,
    libraries: frozenset[str] = CUBLAS,
) -> Callable[[F], F]:
    """Define an op from its reference. torch traces through an op that `is_composite`."""

    def define(reference: F) -> F:
        name = schema.partition("(")[0]
        namespace, _, short = name.partition("::")
        ours = not (namespace == "npu" and has_torch_npu()) and not hasattr(getattr(torch.ops, namespace), short)
        kinds = is_composite, ours, inlines, is_random, compiles_slowly, libraries
        spec = OpSpec(schema, reference, fake, gradient, kernel, rows, title, *kinds)
        SPECS[name] = spec
        if ours:
            _register(spec, namespace)
        return reference if fake is None else part(fake)(reference)

    return define


def check_alike(names: str, one: torch.Tensor, other: torch.Tensor) -> None:
    """Refuse two tensors, such as "x1 and x2", of different shapes or types."""
    require(
        one.shape == other.shape and one.dtype == other.dtype,
        lambda: (
            f"{names} must have one shape and type; they are {one.dtype} {list(one.shape)} and "
            f"{other.dtype} {list(other.shape)}"
        ),
    )


def part(fake: Function) -> Callable[[F], F]:
    """A function that references call: where a reference is run as a fake, `fake` answers for it."""

    def define(function: F) -> F:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (fake if _thread.runs_fakes else function)(*args, **kwargs)

        return cast(F, call)

    return define


def with_kernel(name: str) -> Function:
    """An op as a part of references: not its reference but the op itself, with its kernel where there is one."""
    spec = SPECS[name]
    namespace, _, short = name.partition("::")
    library = getattr(torch.ops, namespace)  # the real torch_npu may define it later
    return part(spec.fake or spec.reference)(lambda *args, **given: getattr(library, short)(*args, **given))


def _as_fake(reference: Function) -> Function:
    def fake(*args: Any, **kwargs: Any) -> Any:
        before, _thread.runs_fakes = _thread.runs_fakes, True
        try:
            return reference(*args, **kwargs)
        finally:
            _thread.runs_fakes = before

    return fake


@cache
def has_torch_npu() -> bool:
    """Whether the real torch_npu is installed: it defines `torch.ops.npu` itself."""
    return importlib.util.find_spec("torch_npu") is not None


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def compiles_kernels() -> bool:
    """Whether kernels can be compiled now, for a device that is here: not while it captures a graph."""
    runtime = kernel_runtime()
    return runtime is not None and has_triton() and not runtime.is_current_stream_capturing()


def has_kernel(name: str, device: torch.device | str) -> bool:
    """Whether `name` ("graphex::rms_norm") has more than its reference to offer on a device."""
    spec = SPECS.get(name)
    if spec is None or not spec.defined_here or spec.kernel is None:
        return False
    return runs_kernels(torch.device(device).type) and has_triton()


def title_of(name: str) -> str:
    """The name of the op `name` of graphex, or of its in-place form, in a report; empty if it has no title."""
    found = (SPECS.get(f"graphex::{name}{suffix}") for suffix in ("", "_"))
    return next((spec.title for spec in found if spec is not None), "")


def declined() -> dict[tuple[str, str], int]:
    """(op, reason) -> how many calls on CUDA ran the reference because the kernel does not take such arguments."""
    return dict(_DECLINED)


def _register(spec: OpSpec, namespace: str) -> None:
    library = _LIBRARIES.setdefault(namespace, torch.library.Library(namespace, "FRAGMENT"))
    signature = spec.schema.partition("::")[2]
    short = signature.partition("(")[0]
    drawing = (torch.Tag.nondeterministic_seeded,) if spec.is_random else ()
    library.define(signature, tags=(torch.Tag.pt2_compliant_tag, *drawing))
    if spec.is_composite:
        library.impl(short, spec.reference, "CompositeImplicitAutograd")
        return
    library.impl(short, spec.reference, "CompositeExplicitAutograd")
    torch.library.register_fake(spec.name, spec.fake or _as_fake(spec.reference), lib=library)
    if spec.gradient is not None:
        backward, save = _completed(spec.name, spec.gradient.backward), _by_keyword(spec.gradient.save)
        torch.library.register_autograd(spec.name, backward, setup_context=save, lib=library)
    if spec.kernel is not None and has_triton():
        library.impl(short, _with_kernel(spec), "CUDA")


def _by_keyword(save: Callable[[Any, tuple[Any, ...], Any], None]) -> Function:
    """torch calls setup_context by keyword."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        save(ctx, inputs, output)

    return setup_context


def _completed(name: str, backward: Function) -> Function:
    """torch wants a gradient, or None, for each argument."""
    count = len(_arguments(name))

    def gradients(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        found = () if all(grad is None for grad in grads) else backward(ctx, *grads)
        return (*found, *[None] * (count - len(found)))

    return gradients


def _arguments(name: str) -> Any:
    namespace, _, short = name.partition("::")
    return getattr(getattr(torch.ops, namespace), short).default._schema.arguments


@cache
def keyword_defaults(name: str) -> dict[str, Any]:
    """The keyword arguments of an op and their defaults, as its schema has them."""
    return {each.name: each.default_value for each in _arguments(name) if each.kwarg_only}


def launcher_of(spec: OpSpec) -> Function:
    """The function that launches an op's kernel, with the arguments of the op."""
    launch, bind = _launcher(spec)
    return lambda *args, **kwargs: launch(bind(*args, **kwargs))


@cache
def _call_of(name: str) -> Any:
    """The named tuple of an op's arguments, as its schema has them."""
    arguments = _arguments(name)
    defaults = [each.default_value for each in arguments if each.has_default_value()]
    return _named_tuple(name.partition("::")[2], [each.name for each in arguments], defaults=defaults)


def call_with(name: str, call: Arguments, **others: Any) -> Arguments:
    """A call of the op of this name with `others`, and with those arguments of another call that it has too."""
    made = _call_of(name)
    found: Arguments = made(**{each: getattr(call, each) for each in made._fields if hasattr(call, each)} | others)
    return found


@cache
def _launcher(spec: OpSpec) -> tuple[Callable[[Arguments], Any], Callable[..., Arguments]]:
    """The launcher of an op, and the named tuple that it takes."""
    assert spec.kernel is not None
    module, _, name = spec.kernel.partition(".")
    return getattr(importlib.import_module(f"graphex.kernels.{module}"), name), _call_of(spec.name)


def _with_kernel(spec: OpSpec) -> Function:
    launch: Any = None
    bind: Any = None

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal launch, bind
        if launch is None:
            launch, bind = _launcher(spec)
        result = launch(bind(*args, **kwargs))
        if isinstance(result, Refusal):
            _DECLINED[spec.name, result.reason] += 1
            return spec.reference(*args, **kwargs)
        return result

    return run
