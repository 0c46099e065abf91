"""PyTorch's own samples of how each operator is called (OpInfo), and what it means that a backend ran one right.

A sample is run in eager mode and compiled, from equal copies of its arguments and the same seed. Right is: the same
results, the same arguments afterwards, the same gradients, and nothing in the journal that says that graphex had to
give up a part of its work. What `aot_eager` cannot do either is not held against graphex.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
import types
import unittest
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

import graphex


def _load_op_db() -> list[Any]:
    """The operator database, without what its module does besides: it wants `expecttest`, which samples do not need,
    freezes the flags of `torch.backends` for the whole process, and seeds random operators in a way that Dynamo cannot
    trace, so that no backend would see them.
    """
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stub
    frozen = torch.backends.flags_frozen()
    from torch.testing._internal import common_methods_invocations as database

    if not frozen:
        torch.backends.__allow_nonbracketed_mutation_flag = True
    database.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    return list(database.op_db)


OPS: dict[str, Any] = {op.formatted_name: op for op in _load_op_db()}

# Operators whose values are undefined: two eager runs differ. Their shapes and types are compared.
UNDEFINED_VALUES = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)

# What the journal may say about an operator without that being a loss of graphex's work.
EXPECTED_FALLBACKS = {
    "the graph runs without capture": "samples hold CPU tensors, data-dependent sizes and reads back to the host",
    "tensor subclass": "AOTAutograd takes the subclass apart before graphex sees it",
}

Call = Callable[..., Any]


@dataclass(frozen=True)
class Sample:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def fresh(self) -> Sample:
        """A copy that shares no memory with this one and is laid out the same way."""
        leaves, tree = pytree.tree_flatten((self.args, self.kwargs))
        compressed = {id(value): _clone(value) for value in leaves if _is_compressed(value)}
        args, kwargs = pytree.tree_unflatten(copy.deepcopy([_leaf(value) for value in leaves], compressed), tree)
        return Sample(args, kwargs)

    def tensors(self) -> list[torch.Tensor]:
        return [value for value in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(value, torch.Tensor)]

    def on_cuda(self) -> bool:
        return any(tensor.is_cuda for tensor in self.tensors())


@dataclass(frozen=True)
class Outcome:
    """What one run did: its results, the tensors it was given as they are now, and the gradients they got."""

    results: Any = None
    arguments: tuple[torch.Tensor, ...] = ()
    gradients: tuple[torch.Tensor | None, ...] = ()
    error: Exception | None = None


Agreement = Callable[[torch.Tensor, torch.Tensor], None]


def EXACT(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=0, atol=0)


def NEAR(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, equal_nan=True)


def SHAPE(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.shape, found.dtype, found.device) == (expected.shape, expected.dtype, expected.device)


def seed(device: str) -> None:
    """`torch.manual_seed` for the devices in use: for every other one it formats the whole stack, at each call."""
    torch.default_generator.manual_seed(0)
    if device != "cpu":
        torch.cuda.manual_seed_all(0)


def samples(op: Any, device: str, dtype: torch.dtype, most: int | None, requires_grad: bool = False) -> list[Sample]:
    """Up to `most` of the operator's samples, evenly spread over all of them."""
    seed(device)
    conjugated = {"include_conjugated_inputs": True} if dtype.is_complex and op.test_conjugated_samples else {}
    found = list(op.sample_inputs(device, dtype, requires_grad=requires_grad, set_seed=False, **conjugated))
    if most == 1:
        found = found[len(found) // 2 :][:1]
    elif most is not None and len(found) > most:
        found = [found[index * (len(found) - 1) // (most - 1)] for index in range(most)]
    return [Sample((sample.input, *sample.args), dict(sample.kwargs)) for sample in found]


def calling(operation: Call) -> Call:
    """A Python function around an operator, which is what Dynamo compiles."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return operation(*args, **kwargs)

    return call


def complaint(
    function: Call,
    sample: Sample,
    *,
    defined: bool = True,
    dynamic: bool | None = None,
    backend: str | graphex.Backend = "graphex",
) -> str | None:
    """What graphex did wrong with this call; None if it did nothing wrong.

    It is held to the closest agreement with eager that `aot_eager` reaches: to the bit, near, or none. A device whose
    graphs are replayed gets enough calls to replay one.
    """
    expected = outcome_of(function, sample)
    if expected.error is not None:  # nothing to compare with
        return None
    replays = sample.on_cuda()
    found, compiled = compiled_outcome(function, sample, backend, dynamic, calls=3 if replays else 1)
    theirs = None
    for agreement in (NEAR,) if replays and defined else (EXACT, NEAR) if defined else (SHAPE,):
        wrong = difference(expected, found, agreement)
        if wrong is None:
            return lost_work(graphex.journal(compiled))
        theirs = theirs or compiled_outcome(function, sample, "aot_eager", dynamic)[0]
        if difference(expected, theirs, agreement) is None:
            return wrong
    return None


def lost_work(journal: graphex.Journal) -> str | None:
    """The first thing graphex had to give up, as its journal tells it."""
    for ran in journal.passes:
        if ran.status not in ("changed", "unchanged"):
            return f"pass {ran.name} was {ran.status}: {ran.reason}"
    for record in journal.fallbacks:
        if record.what not in EXPECTED_FALLBACKS:
            return f"{record.what}: {record.reason}"
    return None


def difference(expected: Outcome, found: Outcome, agreement: Agreement) -> str | None:
    """Where two runs differ, in words; None if nowhere."""
    if found.error is not None:
        return f"{type(found.error).__name__}: {found.error}"
    for part in ("results", "arguments", "gradients"):
        try:
            _assert_same(getattr(expected, part), getattr(found, part), agreement)
        except AssertionError as error:
            return f"{part}: {error}"
    return None


def compiled_outcome(
    function: Call, sample: Sample, backend: str | graphex.Backend, dynamic: bool | None, calls: int = 1
) -> tuple[Outcome, Call]:
    """The outcome of the last of some calls, each with its own copy of the sample."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, dynamic=dynamic)
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        outcome = Outcome()
        for _ in range(calls):
            outcome = outcome_of(compiled, sample)
    return outcome, compiled


def outcome_of(function: Call, sample: Sample) -> Outcome:
    given = sample.fresh()
    seed("cuda" if sample.on_cuda() else "cpu")
    try:
        results = function(*given.args, **given.kwargs)
        gradients = _gradients(results, given)
    except Exception as error:
        return Outcome(error=error)
    return Outcome(results, tuple(given.tensors()), gradients)


def _gradients(results: Any, given: Sample) -> tuple[torch.Tensor | None, ...]:
    """The gradients of a sum over all results that have one."""
    inputs = [tensor for tensor in given.tensors() if tensor.requires_grad and tensor.is_leaf]
    sums = [_sum(value) for value in pytree.tree_leaves(results) if _has_gradient(value)]
    if not inputs or not sums:
        return ()
    return torch.autograd.grad(torch.stack(sums).sum(), inputs, allow_unused=True)


def _has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and value.layout == torch.strided


def _sum(value: torch.Tensor) -> torch.Tensor:
    """A real number in which every element has its own weight."""
    value = torch.view_as_real(value) if value.is_complex() else value
    weights = torch.linspace(0.5, 1.5, value.numel(), device=value.device, dtype=torch.float64)
    return (value.double().reshape(-1) * weights).sum()


def _leaf(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if _is_inner(value) else value


def _is_inner(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_leaf


def _is_compressed(value: Any) -> bool:
    """Compressed sparse tensors have no storage of their own, which `deepcopy` looks for."""
    return isinstance(value, torch.Tensor) and value.layout not in (torch.strided, torch.sparse_coo, torch._mkldnn)


def _clone(value: torch.Tensor) -> torch.Tensor:
    return value.detach().clone().requires_grad_(value.requires_grad)


def _assert_same(expected: Any, found: Any, agreement: Agreement) -> None:
    left, left_tree = pytree.tree_flatten(expected)
    right, right_tree = pytree.tree_flatten(found)
    assert left_tree == right_tree, f"structure {right_tree} instead of {left_tree}"
    for one, other in zip(left, right, strict=True):
        if not isinstance(one, torch.Tensor):
            assert type(one) is type(other), f"{other!r} instead of {one!r}"
            assert one == other or one != one, f"{other!r} instead of {one!r}"
            continue
        assert one.requires_grad == other.requires_grad, f"requires_grad is {other.requires_grad}"
        agreement(other, one)
