"""Every tile of the linear layers compiles for a Hopper GPU, fits into it, and reads 16 bytes at a time."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="needs triton (Linux)")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from graphex.kernels import linears
from graphex.kernels.linears import GATED_GEMVS, GATED_SKINNIES, GEMVS, SKINNIES, WIDES, Config, Job
from tests.harness.kernels.hopper import MOST_SHARED, Compiler
from tests.harness.kernels.linears import zeros_job


def compiled(config: Config, of: Job, monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    """The code of a config's product, and how much shared memory it needs."""
    compilers = {}
    for name in ("gemv_kernel", "skinny_kernel", "combine_kernel"):
        compilers[name] = Compiler(getattr(linears, name))
        monkeypatch.setattr(linears, name, compilers[name])
    config.prepare(of)(of)
    used = [compiler for compiler in compilers.values() if compiler.code]
    assert len(used) == (2 if getattr(config, "parts", 1) > 1 else 1)
    return used[0].code[0], used[0].shared


@pytest.mark.parametrize("config", [GEMVS[0], GEMVS[-1]], ids=lambda config: config.name)
@pytest.mark.parametrize(("prologue", "sizes"), [("none", (64,)), ("rms_norm", (64, 32, 32)), ("silu_mul", (64,))])
def test_one_row(config, prologue, sizes, monkeypatch):
    code, _ = compiled(config, zeros_job(1, prologue, sizes), monkeypatch)
    assert ("cp.async" if config.stages > 1 else "ld.global.L1::evict_first.L2::cache_hint.v4.b32") in code


@pytest.mark.full
@pytest.mark.parametrize("config", GEMVS[1:-1], ids=lambda config: config.name)
def test_other_tiles_of_one_row(config, monkeypatch):
    compiled(config, zeros_job(1, "rms_norm", (64, 32)), monkeypatch)


ALL = [(rows, config) for rows, configs in SKINNIES.items() for config in configs]
GATED = [(rows, config) for rows, configs in GATED_SKINNIES.items() for config in configs]


@pytest.mark.parametrize(
    ("rows", "config"),
    [pytest.param(*each, marks=() if at % 9 in (2, 8) else pytest.mark.full) for at, each in enumerate(ALL)],
)
def test_several_rows(rows, config, monkeypatch):
    code, shared = compiled(config, zeros_job(rows, "none", (256, 128)), monkeypatch)
    assert "cp.async.cg.shared.global" in code  # 16 bytes at a time, past the registers
    assert "mma" in code
    assert shared <= MOST_SHARED


@pytest.mark.parametrize("config", WIDES[False], ids=lambda config: config.name)
def test_many_rows(config, monkeypatch):
    code, shared = compiled(config, zeros_job(1000, "none", (256, 128)), monkeypatch)
    assert "cp.async.cg.shared.global" in code
    assert "wgmma" in code
    assert shared <= MOST_SHARED


@pytest.mark.parametrize(
    ("rows", "config"),
    [
        (1, GATED_GEMVS[0]),
        *(pytest.param(1, config, marks=pytest.mark.full) for config in GATED_GEMVS[1:]),
        (16, GATED_SKINNIES[16][3]),
        *(pytest.param(*each, marks=pytest.mark.full) for each in GATED),
    ],
)
def test_a_gate_and_what_it_lets_through(rows, config, monkeypatch):
    _, shared = compiled(config, replace(zeros_job(rows, "none", (256, 256)), gated="silu"), monkeypatch)
    assert shared <= MOST_SHARED
