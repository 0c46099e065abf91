"""Symbolic sizes, fake tensors and pytrees.

The names come from `torch.fx.experimental.symbolic_shapes`, `torch._subclasses` and `torch.utils._pytree`. Most are
required: without them models run without graphex's passes.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import sympy  # type: ignore[import-untyped]
import torch

from graphex.torch_private.lookup import private

if TYPE_CHECKING:
    from torch._guards import detect_fake_mode as detect_fake_mode
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv as ShapeEnv
    from torch.fx.experimental.symbolic_shapes import free_symbols as free_symbols
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols as free_unbacked_symbols
    from torch.fx.experimental.symbolic_shapes import guard_or_false as guard_or_false
    from torch.fx.experimental.symbolic_shapes import statically_known_true as statically_known_true
else:
    detect_fake_mode = private("torch._guards.detect_fake_mode")
    FakeTensor = private("torch._subclasses.fake_tensor.FakeTensor")
    FakeTensorMode = private("torch._subclasses.fake_tensor.FakeTensorMode")
    ShapeEnv = private("torch.fx.experimental.symbolic_shapes.ShapeEnv")
    free_symbols = private("torch.fx.experimental.symbolic_shapes.free_symbols")
    free_unbacked_symbols = private("torch.fx.experimental.symbolic_shapes.free_unbacked_symbols")
    guard_or_false = private("torch.fx.experimental.symbolic_shapes.guard_or_false")
    statically_known_true = private("torch.fx.experimental.symbolic_shapes.statically_known_true")


suggest_memory_format = private("torch._prims_common.suggest_memory_format")
"""The layout, contiguous or channels last, in which ops make a result that cannot have the strides of a tensor."""

_unset_fake = private("torch._subclasses.fake_tensor.unset_fake_temporarily")

NEEDS_A_VALUE: tuple[type[Exception], ...] = (
    private("torch._subclasses.fake_tensor.DataDependentOutputException"),
    private("torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode"),
)
"""The exceptions of tracing where a program asks for an element of a tensor."""


def _with_types_of_statistics(norm: Any) -> Callable[..., Any]:
    """A norm on fake tensors whose statistics are float32 where the CPU's kernel makes them so: of 16 bits with
    parameters or running statistics of float32, as autocast has them. Its own are of 16 bits.
    """

    def fake(*args: Any, **kwargs: Any) -> Any:
        results = norm(*args, **kwargs)
        if not _is_mixed(results[0], args):
            return results
        return (results[0], *(each.to(torch.float32) for each in results[1:3]), *results[3:])

    return fake


def _group_norm_backward(gradient: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """The derivative of a group norm on fake tensors, for x in the type of x; its own is float32 beside float32."""
    results = torch.ops.aten.native_group_norm_backward.default(gradient, x, *args, **kwargs)
    if results[0] is None or not _is_mixed(x, args):
        return results
    return (results[0].to(x.dtype), *results[1:])


def _is_mixed(value: torch.Tensor, args: tuple[Any, ...]) -> bool:
    """Whether a value on the CPU has 16 bits and stands beside arguments of float32."""
    is_narrow = value.device.type == "cpu" and value.dtype in (torch.bfloat16, torch.float16)
    return is_narrow and any(isinstance(arg, torch.Tensor) and arg.dtype == torch.float32 for arg in args)


_STATISTICS = (
    *(torch.ops.aten.native_group_norm.default, torch.ops.aten.native_layer_norm.default),
    *(torch.ops.aten.native_batch_norm.default, torch.ops.aten._native_batch_norm_legit.default),
    *(torch.ops.aten._native_batch_norm_legit.no_stats, torch.ops.aten._native_batch_norm_legit_functional.default),
    torch.ops.aten._batch_norm_with_update_functional.default,
)
_TYPES_OF_NORMS: dict[Any, Any] = {
    torch.ops.aten.native_group_norm_backward.default: _group_norm_backward,
    **{norm: _with_types_of_statistics(norm) for norm in _STATISTICS},
}
NORMS = frozenset(_TYPES_OF_NORMS)
"""Norms whose fakes are wrong about the types of results where values of several types come together."""

FAKED_BY: dict[Any, Any] = {
    torch.ops.aten.zero.default: torch.ops.aten.empty_like.default,  # torch 2.11: its own forgets the strides
    **_TYPES_OF_NORMS,
}
"""What the results of ops are computed by on fake tensors, where their own fakes are wrong about strides or types."""


@contextmanager
def unset_fake_temporarily() -> Iterator[None]:
    """Real tensors are made as such inside, whatever fake mode is on outside."""
    with _unset_fake():
        yield


def fake_like(value: FakeTensor) -> FakeTensor:
    """A fake tensor like this one, in memory of its own. Five times as quick as an op under the fake mode."""
    with unset_fake_temporarily():
        meta = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    return FakeTensor(value.fake_mode, meta, value.device)


def mode_of(values: Iterable[object]) -> FakeTensorMode | None:
    """The fake mode of the first fake tensor among values, nested ones included; None without one."""
    leaves = (leaf for value in values for leaf in pytree.tree_leaves(value))
    return next((leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor)), None)


def hint_of(value: int | torch.SymInt, default: int) -> int:
    """The size a symbol had when it was traced; `default` for one that has no value before running."""
    if isinstance(value, int):
        return value
    hint: Any = value.node.hint
    return default if hint is None else int(hint)


class NewGuardError(Exception):
    """A question about a symbolic size has no answer that holds for all its values."""


@contextmanager
def no_new_guards(env: ShapeEnv | None) -> Iterator[None]:
    """Raise `NewGuardError` where a guard would be added: that recompiles the user's model and cannot be undone."""
    if env is None:
        yield
        return

    def refuse(condition: Any, value: Any) -> NoReturn:
        raise NewGuardError(f"it is not known for every size whether {condition} is {value}")

    def is_refusal(record: logging.LogRecord) -> bool:
        """torch warns of every exception that ends a question about a size; ours is an answer, not a fault."""
        return isinstance(sys.exc_info()[1], NewGuardError)

    vars(env)["_check_frozen"] = refuse
    try:
        with unlogged(ShapeEnv.__module__, is_refusal):
            yield
    finally:
        vars(env).pop("_check_frozen", None)


@contextmanager
def unlogged(logger: str, is_dropped: Callable[[logging.LogRecord], bool]) -> Iterator[None]:
    """Drop some of the records that one of torch's loggers is given by this thread."""
    thread = threading.get_ident()

    def passes(record: logging.LogRecord) -> bool:
        return record.thread != thread or not is_dropped(record)

    log = logging.getLogger(logger)
    log.addFilter(passes)
    try:
        yield
    finally:
        log.removeFilter(passes)


def quiet_fakes() -> AbstractContextManager[None]:
    """Let an op on fake tensors fail without torch's stack traces on the screen: the caller handles the error."""
    return unlogged(FakeTensor.__module__, lambda record: True)


@contextmanager
def without_guards(env: ShapeEnv | None) -> Iterator[None]:
    """Answer questions about symbolic sizes for the sizes at hand inside, and add no guard."""
    if env is None:
        yield
        return
    with env.suppress_guards():
        yield


def substituted(expression: Any, sizes: dict[Any, int]) -> Any:
    """An expression with numbers in place of symbols."""
    return expression.xreplace({symbol: sympy.Integer(size) for symbol, size in sizes.items()})


def broken_condition(env: ShapeEnv, sizes: dict[Any, int]) -> Any:
    """A condition that tracing has put on symbols, or took for granted, and that does not hold for these sizes."""
    for symbol, size in sizes.items():
        bounds = env.bound_sympy(symbol)
        if size < bounds.lower:
            return sympy.Ge(symbol, bounds.lower, evaluate=False)
        if size > bounds.upper:
            return sympy.Le(symbol, bounds.upper, evaluate=False)
    return next((guard.expr for guard in env.guards if substituted(guard.expr, sizes) == sympy.false), None)


def stated_since(env: ShapeEnv | None, count: int) -> list[Any]:
    """The conditions on symbols, as expressions, that were added to an environment after the first `count`."""
    return [] if env is None else [guard.expr for guard in env.guards[count:]]


def conditions(env: ShapeEnv | None) -> list[str]:
    """Everything that is known of the symbols of an environment, whatever sizes they have now."""
    if env is None:
        return []
    ranges = [f"{symbol} in {bounds}" for symbol, bounds in env.var_to_range.items()]
    return sorted({*(str(guard.expr) for guard in env.guards), *ranges})


def add_guards(env: ShapeEnv, conditions: list[Any]) -> Any:
    """Add conditions to an environment, all of them or none; the first that does not hold for its sizes, if any."""
    sizes = {symbol: int(value) for symbol, value in _values(env).items() if value.is_Integer}
    for condition in conditions:
        if substituted(condition, sizes) != sympy.true:
            return condition
    for condition in conditions:
        env.evaluate_expr(condition)
    return None


def _values(env: ShapeEnv) -> dict[Any, Any]:
    """The value that each symbol had when it was traced."""
    found: dict[Any, Any] = getattr(env, "backed_var_to_val", None) or env.var_to_val
    return found


def symbolic(env: ShapeEnv, expression: Any) -> int | torch.SymInt:
    """A size with this expression. Raises KeyError for one with a symbol that the environment does not have."""
    if expression.is_Integer:
        return int(expression)
    known = _values(env)
    hint = int(expression.xreplace({symbol: known[symbol] for symbol in expression.free_symbols}))
    return env.create_symintnode(expression, hint=hint)


def expression_of(value: torch.SymInt | torch.SymFloat) -> Any:
    """The expression a symbolic number stands for, in terms of the symbols of the inputs."""
    return value.node.expr


def kind_of(expression: Any) -> str:
    """The kind of an expression: a number, a symbol, a sum, a product; empty for anything else."""
    if isinstance(expression, sympy.Integer):
        return "number"
    if isinstance(expression, sympy.Symbol):
        return "symbol"
    return {sympy.Add: "sum", sympy.Mul: "product"}.get(type(expression), "")


def symbol_of(value: Any) -> Any:
    """The symbol that a size is, if it is one and not an expression of several; None otherwise."""
    expression = value.node.expr if isinstance(value, torch.SymInt) else None
    return expression if expression is not None and expression.is_Symbol else None


def evaluated(sizes: Any, symbol: Any, value: int) -> tuple[int, ...]:
    """Symbolic sizes of which only one symbol is not known, as numbers."""
    return tuple(int(s.node.expr.subs({symbol: value})) if isinstance(s, torch.SymInt) else int(s) for s in sizes)


def multiple_of(size: Any, symbol: Any) -> int | None:
    """How often a symbol goes into a size, for every value of the symbol; None if it does not."""
    if not isinstance(size, torch.SymInt):
        return None
    ratio = (size.node.expr / symbol).expand()
    return int(ratio) if ratio.is_Integer and ratio > 0 else None


# -- nested containers, and tensors that are made of others, taken apart the way torch does it -------------------------


if TYPE_CHECKING:
    from torch.utils import _pytree
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass

    pytree = _pytree
else:
    pytree = private("torch.utils._pytree")
    is_traceable_wrapper_subclass = private("torch.utils._python_dispatch.is_traceable_wrapper_subclass")
