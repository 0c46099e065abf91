"""What is compiled for the host answers as Python does, and a replay notices the same with it."""

from __future__ import annotations

import os
import shutil
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from graphex.runtime import native
from graphex.runtime.addresses import Addresses
from tests.runtime.support import check_with_weights_replaced, compile_it, replays, statuses

needs_compiler = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")


@pytest.fixture
def loaded(monkeypatch, tmp_path):
    """The native code; tests without it run in Python."""
    monkeypatch.setattr(native, "same_addresses", None)
    monkeypatch.setenv("GRAPHEX_CACHE_DIR", str(tmp_path))
    native.load()
    assert native.same_addresses is not None
    return native.same_addresses


def packed(numbers: Sequence[int], kind: str) -> bytes:
    return array(kind, numbers).tobytes()


@needs_compiler
@pytest.mark.parametrize("kind", [list, tuple])
def test_it_says_whether_tensors_are_where_they_were(loaded, kind):
    tensors = [torch.randn(4), nn.Parameter(torch.randn(3, 3)), torch.randn(6)[2:], torch.empty(0)]
    places, addresses = [0, 2, 3, 5], [t.data_ptr() for t in tensors]
    args = kind([tensors[0], 7, tensors[1], tensors[2], None, tensors[3]])
    given = packed(places, "i"), packed(addresses, "q")
    assert loaded(args, *given) is True
    tensors[1].data = torch.randn(3, 3)
    assert loaded(args, *given) is False
    assert loaded(kind([]), b"", b"") is True


@needs_compiler
def test_what_is_no_tensor_with_memory_is_not_where_it_was(loaded):
    sparse = torch.eye(3).to_sparse()
    for other in (None, 3, "x", sparse, torch.nn.Module()):
        assert loaded([other], packed([0], "i"), packed([0], "q")) is False
    assert loaded([torch.randn(2)], packed([1], "i"), packed([0], "q")) is False  # there are fewer arguments


@needs_compiler
@pytest.mark.parametrize("given", [(), ([],), ([], b"1234", b"1234"), ({}, b"", b""), ([], "", "")])
def test_other_arguments_are_refused(loaded, given):
    with pytest.raises(TypeError):
        loaded(*given)


@needs_compiler
def test_it_is_compiled_once(loaded, monkeypatch, tmp_path):
    (made,) = (tmp_path / "native").iterdir()
    before = made.stat().st_mtime_ns
    monkeypatch.setenv("CXX", "a compiler that is not there")
    native.load()
    assert made.stat().st_mtime_ns == before


def test_without_a_compiler_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("GRAPHEX_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", os.devnull)
    with pytest.raises(OSError):  # noqa: PT011  (which one is the system's to say)
        native.load()


@needs_compiler
def test_a_replay_notices_what_moved(loaded, where):
    asked: list[bool] = []

    def noted(*given: Any) -> bool:
        asked.append(loaded(*given))
        return asked[-1]

    native.same_addresses = noted
    model = nn.Linear(4, 4).to(where)
    compiled = compile_it(model)
    check_with_weights_replaced(model, compiled, where)
    assert statuses(compiled) == ["captured", "recaptured", "recaptured"]
    assert replays(compiled) == 11
    assert True in asked
    assert False in asked


@needs_compiler
def test_both_ways_name_the_same_inputs(loaded, monkeypatch):
    tensors: list[Any] = [torch.randn(2) for _ in range(9)]
    addresses = Addresses([7, 1, 2, 5], tensors)
    elsewhere = list(tensors)
    elsewhere[2], elsewhere[3], elsewhere[7] = torch.randn(2), torch.randn(2), torch.randn(2)
    found = [addresses.moved(tensors), addresses.moved(elsewhere)]
    monkeypatch.setattr(native, "same_addresses", None)
    assert found == [addresses.moved(tensors), addresses.moved(elsewhere)] == [frozenset(), frozenset({2, 7})]
