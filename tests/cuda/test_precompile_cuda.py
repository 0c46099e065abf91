"""On a GPU the first call of a compiled model compiles no kernel: all were compiled ahead, for just these launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
from torch.utils import _pytree as pytree

import graphex
from benchmarks.decoding import Setting, build, step_of
from graphex.kernels import tuning
from tests.harness.processes import python

pytestmark = pytest.mark.cuda


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[Counter[tuple[str, bool]]]:
    """How often kernels were compiled: (name, whether ahead)."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found: Counter[tuple[str, bool]] = Counter()

    def note(fn: Any, is_manual_warmup: bool, **rest: object) -> None:
        found[fn.name, is_manual_warmup] += 1

    triton.knobs.runtime.jit_post_compile_hook = note
    yield found
    triton.knobs.runtime.jit_post_compile_hook = None


@pytest.mark.parametrize("batch", [1, 3, 18])
def test_a_decode_step_compiles_its_kernels_ahead(compiled, batch):
    """Sizes that no other test has: what is compiled stays with the process."""
    setting = Setting("llama", 2, batch, 512 + 64 * batch, 8, 2, 1024 + 128 * batch, 512, 256)
    with torch.no_grad():
        model = build(setting)
        step = step_of(model, setting)
        run = torch.compile(model, backend="graphex", fullgraph=True)
        call = step.call(run)
        expected = step.call(model)()
        step.rewind(1)
        torch.testing.assert_close(call(), expected, rtol=0.05, atol=0.05)
    assert sum(count for (_, ahead), count in compiled.items() if ahead) >= 4
    assert [name for name, ahead in compiled if not ahead] == []
    assert graphex.journal(run).fallbacks == []


def test_a_saved_step_is_loaded_without_measuring_and_saving_leaves_its_caches(monkeypatch, tmp_path):
    monkeypatch.setenv("GRAPHEX_CACHE_DIR", str(tmp_path))
    tuning.forget()
    setting = Setting("llama", 2, 1, 1152, 8, 2, 2304, 512, 256)
    with torch.no_grad():
        model = build(setting)
        step = step_of(model, setting)
        given: list[Any] = []
        expected = step.run(lambda *args: (given.append(args), model(*args))[1])
        step.rewind(1)
        before = [each.clone() for each in pytree.tree_leaves(given[0]) if isinstance(each, torch.Tensor)]
        graphex.save(model, given[0], tmp_path / "step.graphex")
        after = [each for each in pytree.tree_leaves(given[0]) if isinstance(each, torch.Tensor)]
        torch.testing.assert_close(before, after, rtol=0.0, atol=0.0)
        tuning.forget()
        loaded = graphex.load(tmp_path / "step.graphex", model)
        torch.testing.assert_close(step.run(loaded), expected, rtol=0.05, atol=0.05)
    assert tuning.measured() == 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("regions", [False, True])
def test_a_saved_step_is_loaded_for_the_gpu_that_the_model_is_on(regions, tmp_path):
    def made(index: int) -> tuple[torch.nn.Module, torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.LayerNorm(64))
        return model.to(f"cuda:{index}"), torch.randn(8, 64).to(f"cuda:{index}")

    with torch.no_grad():
        model, x = made(0)
        graphex.save(model, (x,), tmp_path / "file", options={"regions": regions})
        model, x = made(1)
        loaded = graphex.load(tmp_path / "file", model)
        for _ in range(3):
            found = loaded(x)
            assert found.device == x.device
            torch.testing.assert_close(found, model(x), rtol=1e-3, atol=1e-3)
    assert loaded.journal.captures


def test_explain_says_which_kernel_runs_for_every_op(monkeypatch, tmp_path):
    monkeypatch.setenv("GRAPHEX_TUNING", "again")
    monkeypatch.setenv("GRAPHEX_CACHE_DIR", str(tmp_path))
    tuning.forget()
    setting = Setting("hf-llama", 2, 1, 1024, 8, 2, 2048, 512, 1024)
    with torch.no_grad():
        step = step_of(build(setting), setting)
        report = graphex.explain(lambda: step.run(step.model), ())
    rows = {row.op: row for row in report.kernels}
    assert {"graphex::rms_norm_linears", "graphex::linears", "graphex::rotary_attention_"} <= rows.keys()
    for op in ("graphex::rms_norm_linears", "graphex::linears"):
        assert rows[op].chosen == "measured"
        assert rows[op].own_time is not None
        assert "library" in rows[op].seconds
    assert "measured against" in str(report)
    tuning.forget()


def test_importing_the_backend_leaves_the_device_alone():
    """A process that has only imported it may fork, and its children use the GPU."""
    python("-c", "import torch, graphex.backend; assert not torch.cuda.is_initialized()")
