"""Run under Triton's interpreter only, which must be chosen before Triton is imported: see test_interpreter.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def language_is_replaced_once() -> Iterator[None]:
    """The interpreter puts its functions in the place of all those of `triton.language` whenever a kernel calls a
    function, and writes a table of types down for every value: half of the time. Here they stay until the tests end.
    """
    from triton.runtime import interpreter

    with pytest.MonkeyPatch.context() as patch:
        for name, kept in (("_patch_lang", _patched_once), ("_get_np_dtype", _known_by_name)):
            if original := getattr(interpreter, name, None):  # private: another Triton may not have it
                patch.setattr(interpreter, name, kept(original))
        yield


class _Kept:
    """What a launch restores when it ends: nothing."""

    def restore(self) -> None:
        pass


def _patched_once(original: Callable[[Any], Any]) -> Callable[[Any], _Kept]:
    """Functions see `triton.language`, `triton.language.core` or both: each of them is replaced when first seen."""
    import triton.language as tl

    done: set[frozenset[int]] = set()
    kinds: dict[int, frozenset[int]] = {}

    def patched(function: Any) -> _Kept:
        seen = function.__globals__
        kind = kinds.get(id(seen))
        if kind is None:
            kind = kinds[id(seen)] = frozenset(id(each) for each in seen.values() if each is tl or each is tl.core)
        if kind not in done:
            original(function)
            done.add(kind)
        return _Kept()

    return patched


def _known_by_name(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known: dict[str, Any] = {}

    def numpy_type(of: Any) -> Any:
        name = of.scalar.name
        if name not in known:
            known[name] = original(of)
        return known[name]

    return numpy_type
