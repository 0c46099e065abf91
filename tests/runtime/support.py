"""What the tests of capture ask a compiled object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import graphex


def replays(compiled: object) -> int:
    return count(compiled, "replays")


def count(compiled: object, what: str) -> int:
    return sum(counter[what] for counter in graphex.journal(compiled).counts.values())


def statuses(compiled: object) -> list[str]:
    return [record.status for record in graphex.journal(compiled).captures]


def reasons(compiled: object) -> list[str]:
    return [record.reason for record in graphex.journal(compiled).fallbacks]


def compile_it(fn: Callable[..., Any], *, dynamic: bool | None = None, **options: Any) -> Callable[..., Any]:
    return torch.compile(fn, backend="graphex", dynamic=dynamic, options=options)


def same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
