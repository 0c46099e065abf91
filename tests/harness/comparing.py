"""Compare what two functions do, as far as a caller can see it.

assert_same_to_user(compiled, eager, x, y)     # results, strides, writes to inputs, shared memory
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

EXACT = {"rtol": 0, "atol": 0}


def copies(values: Any) -> Any:
    """Copies of all tensors in a structure, which are the same tensor where the originals are."""
    made: dict[int, Tensor] = {}
    return pytree.tree_map_only(Tensor, lambda tensor: made.setdefault(id(tensor), tensor.clone()), values)


def assert_leaves_close(found: Any, wanted: Any, **tolerance: Any) -> None:
    """Leaf by leaf; float8 by its bits, which is all that torch compares of it."""
    for ours, theirs in zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True):
        if isinstance(theirs, Tensor):
            assert ours.dtype == theirs.dtype
        torch.testing.assert_close(_bits(ours), _bits(theirs), **tolerance)


def _bits(value: Any) -> Any:
    is_float8 = isinstance(value, Tensor) and value.dtype == torch.float8_e4m3fn
    return value.view(torch.uint8) if is_float8 else value


def seen_by_user(fn: Callable[..., Any], *inputs: Tensor) -> tuple[list[Any], list[Any], list[str]]:
    """(results, inputs as the call left them, which share memory) of a call on copies of the inputs."""
    torch.manual_seed(0)
    given = [value.clone() for value in inputs]
    results = pytree.tree_leaves(fn(*given))
    return results, given, memory(results, given)


def memory(results: list[Any], inputs: list[Any]) -> list[str]:
    """For each result, the first input or result whose memory it lives in."""
    owners: dict[int, str] = {}
    for index, value in enumerate(inputs):
        owners.setdefault(value.untyped_storage().data_ptr(), f"input {index}")
    return [
        owners.setdefault(value.untyped_storage().data_ptr(), f"result {index}")
        for index, value in enumerate(results)
        if isinstance(value, Tensor)
    ]


def assert_same_to_user(ours: Callable[..., Any], theirs: Callable[..., Any], *inputs: Tensor) -> None:
    """Results, strides, writes to inputs, shared memory: a caller cannot tell which one ran."""
    results, left, shared = seen_by_user(ours, *inputs)
    wanted_results, wanted_left, wanted_shared = seen_by_user(theirs, *inputs)
    torch.testing.assert_close(results, wanted_results, **EXACT, equal_nan=True, check_stride=True)
    torch.testing.assert_close(left, wanted_left, **EXACT, equal_nan=True)
    assert shared == wanted_shared
