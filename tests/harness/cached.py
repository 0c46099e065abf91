"""A cache of compiled graphs for tests, which is on, and what it was asked. A compilation after `torch._dynamo.reset()`
is that of the next process, as far as the cache knows: nothing of it is kept in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import graphex

Run = Callable[..., graphex.Journal]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of stored graphs."""
    monkeypatch.setenv("GRAPHEX_CACHE", "on")
    monkeypatch.setenv("GRAPHEX_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "graphs"


@pytest.fixture
def run(folder: Path) -> Run:
    """Compile a function as a new process would, and compare a call of it with eager; its journal."""

    def run(function: Callable[..., Any], *args: Any, dynamic: bool = False, **options: Any) -> graphex.Journal:
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="graphex", dynamic=dynamic, options=options)
        given, eager = copies(args), copies(args)
        result, expected = compiled(*given), function(*eager)
        torch.testing.assert_close((result, given), (expected, eager))
        return graphex.journal(compiled)

    return run


def copies(values: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda value: value.detach().clone(), values)


def asked(journal: graphex.Journal) -> list[str]:
    return [record.status for record in journal.cache]


def missed(journal: graphex.Journal) -> str:
    """Why the only graph was missed."""
    (record,) = journal.cache
    assert record.status == "miss"
    return record.reason


def why_traced(journal: graphex.Journal) -> str | None:
    """Why AOTAutograd has traced the only graph, which was in the cache; empty if it has not, None without a hit."""
    (record,) = journal.cache
    if record.status != "hit":
        return None
    return record.reason.removeprefix("AOTAutograd has traced it: ")
