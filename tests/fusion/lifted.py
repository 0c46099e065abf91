"""What the tests of lifts share: compile with lifts forced, compare with eager bit for bit, and say what was fused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import graphex
from tests.passes.support import Observer


class Lifted:
    """A function compiled with `lift_idioms="always"`, run once on copies of the inputs: its results are eager's.

    `dynamic`: all sizes but the last of every tensor are symbolic, as batch and length are in a model.
    """

    def __init__(self, fn: Callable[..., Any], *inputs: Any, dynamic: bool = False, **options: Any) -> None:
        torch._dynamo.reset()
        self.seen = Observer()
        options = {"lift_idioms": "always", "post_grad_custom_post_pass": self.seen} | options
        compiled = torch.compile(fn, backend="graphex", fullgraph=True, options=options)
        given = [[_copy(value) for value in inputs] for _ in range(2)]
        if dynamic:
            _mark_dynamic(given[0])
        found, expected = (
            pytree.tree_leaves(call(*copies)) for call, copies in zip((compiled, fn), given, strict=True)
        )
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(_bits(ours), _bits(theirs), rtol=0, atol=0, equal_nan=True)
        self.journal = graphex.journal(compiled)
        assert self.journal.fallbacks == []
        assert [ran for ran in self.journal.passes if ran.status not in ("changed", "unchanged")] == []

    @property
    def fused(self) -> dict[str, int]:
        """Rule -> how often it applied."""
        counts = Counter[str]()
        for tried in self.journal.rules:
            counts[tried.rule] += tried.matches
        return {rule: count for rule, count in counts.items() if count}

    @property
    def reasons(self) -> str:
        """Why rules did not apply where they almost did."""
        return "\n".join(record.reason for record in (*self.journal.refusals, *self.journal.near_misses))

    def count(self, op: Any) -> int:
        return self.seen.targets.count(op.default)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _mark_dynamic(values: list[Any]) -> None:
    for value in values:
        for dim, size in enumerate(value.shape[:-1]):
            if size > 1:
                torch._dynamo.maybe_mark_dynamic(value, dim)


def _bits(value: Tensor) -> Tensor:
    return value.view(torch.uint8) if value.dtype == torch.float8_e4m3fn else value


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)
