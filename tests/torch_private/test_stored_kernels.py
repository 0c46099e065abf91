"""Triton kernels of stored code: every block size that a process added, the choice between them, and where they are."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

import triton
from torch._inductor.codecache import torch_key
from torch._inductor.runtime.triton_heuristics import check_autotune_cache, triton_hash_to_path_key
from torch._inductor.triton_bundler import StaticallyLaunchedAutotuner, TritonBundle, TritonKernelArtifacts

from graphex.torch_private.inductor import _sources_known, _with_every_block_size

LARGE, SMALL = (triton.Config({"XBLOCK": 1, "R0_BLOCK": size}, num_warps=8) for size in (2048, 1024))
IS_KEPT_BY_TORCH = len(signature(check_autotune_cache).parameters) != 3


@dataclass
class Binary:
    hash: str


@dataclass
class Result:
    config: triton.Config
    kernel: Binary


@dataclass
class Kernel:
    """What Inductor's kernel has that is looked at."""

    compile_results: list[Result]
    filename: str
    launchers: list[Any] = field(default_factory=list)
    inductor_meta: dict[str, Any] = field(default_factory=dict)
    save_cache_hook: Any = None
    autotune_time_taken_ns: int = 0

    def is_statically_launchable(self) -> bool:
        return True


RESULTS = [Result(LARGE, Binary("a" * 64)), Result(SMALL, Binary("b" * 64))]


@pytest.fixture
def stored(tmp_path) -> Kernel:
    """A kernel as Inductor stores it, before it adds a block size."""
    return Kernel(RESULTS[:1], str(tmp_path / "kernel.py"))


@pytest.fixture
def here(stored, monkeypatch) -> Kernel:
    """The same kernel in this process, in the module of its code."""
    kernel = Kernel(RESULTS, stored.filename, launchers=[SimpleNamespace(config=each.config) for each in RESULTS])
    monkeypatch.setitem(
        sys.modules, "torch._inductor.runtime.compile_tasks.code", SimpleNamespace(triton_red_fused_0=kernel)
    )
    return kernel


def after(stored: Kernel, binaries: list[Result]) -> Kernel:
    """The kernel as graphex stores it, with these binaries."""
    artefacts = [TritonKernelArtifacts(triton_hash_to_path_key(each.kernel.hash), 0, []) for each in binaries]
    entry = StaticallyLaunchedAutotuner("key", "triton_red_fused_0", stored)
    bundle = _with_every_block_size(SimpleNamespace(_triton_bundle=TritonBundle(artefacts, [entry]), cache_key="code"))
    assert [each.cache_key for each in bundle.static_autotuners] == ["key"]
    return bundle.static_autotuners[0].kernel


def chosen(kernel: Kernel) -> list[triton.Config]:
    """What Inductor finds, in the process that loads the kernel."""
    configs = [each.config for each in kernel.compile_results]
    return check_autotune_cache(configs, kernel.filename, kernel.inductor_meta)[0]


@pytest.mark.skipif(IS_KEPT_BY_TORCH, reason="this torch stores the choice itself")
def test_a_block_size_that_was_added_is_stored_and_no_process_adds_it_again(stored, here):
    kernel = after(stored, RESULTS)
    assert [each.config for each in kernel.compile_results] == [LARGE, SMALL]
    assert kernel.inductor_meta == {"dynamic_scale_rblock": False}
    assert here.inductor_meta == {}
    assert chosen(kernel) == [LARGE, SMALL]  # nothing was measured


@pytest.mark.skipif(IS_KEPT_BY_TORCH, reason="this torch stores the choice itself")
@pytest.mark.parametrize("best", [LARGE, SMALL])
def test_a_choice_that_is_made_after_it_was_stored_is_found(stored, here, best):
    kernel = after(stored, RESULTS)
    here.save_cache_hook(best, 1, triton_cache_hash="")  # as Inductor does in the first call
    assert chosen(kernel) == [best]


@pytest.mark.skipif(IS_KEPT_BY_TORCH, reason="this torch stores the choice itself")
def test_a_choice_that_a_trial_has_made_is_found(stored, here):
    here.launchers = here.launchers[1:]
    assert chosen(after(stored, RESULTS)) == [SMALL]


def test_a_block_size_without_its_binary_is_not_stored(stored, here):
    assert after(stored, RESULTS[:1]) is stored


def test_a_kernel_without_another_block_size_is_stored_as_it_is(stored, here):
    here.compile_results = RESULTS[:1]
    assert after(stored, RESULTS) is stored


def test_kernels_are_found_under_the_hash_of_the_process_that_stored_them():
    real = torch_key()
    torch_key.clear()
    with _sources_known(b"of another process"):
        assert torch_key() == b"of another process"
    assert torch_key() == real  # computed again
    with _sources_known(b"of another process"):
        assert torch_key() == real  # this process knows it
    assert torch_key() == real
