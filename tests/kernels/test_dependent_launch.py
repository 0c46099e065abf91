"""A kernel that starts before the one before it has ended reads and writes nothing until that has."""

from __future__ import annotations

import os
import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="needs triton (Linux)")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from graphex.kernels import attention, linears
from graphex.kernels.attention import AttentionTile
from graphex.kernels.launch import launch
from graphex.kernels.linears import GATED_GEMVS, GEMVS, Skinny
from tests.harness.kernels.attention import decode_job
from tests.harness.kernels.hopper import Compiler, cases, compiled
from tests.harness.kernels.linears import zeros_job
from tests.harness.kernels.rotary_attention import step

ACCESS = re.compile(r"\b(ld|st|red|atom|cp\.async[\w.]*|prefetch)\.[\w.:]*global|cp\.async\.bulk")
WAIT, NEXT = "griddepcontrol.wait", "griddepcontrol.launch_dependents"


def assert_waits_first(code: str) -> None:
    assert code.count(WAIT) == 1
    before, _, after = code.partition(WAIT)
    assert not ACCESS.search(before)
    assert ACCESS.search(after)
    assert "$L__BB" not in before  # so that no program goes around it


@pytest.mark.parametrize(
    "name", ["graphex::add_rms_norm", "graphex::rms_norm_add_rms_norm", "graphex::rotary_qkv_write_"]
)
def test_norms_and_rotary_embeddings_wait(name, monkeypatch):
    assert_waits_first(compiled(name, cases()[name], monkeypatch))


@pytest.mark.parametrize(
    ("way", "rows"),
    [(GEMVS[0], 1), (GEMVS[-1], 1), (GATED_GEMVS[0], 1), (GATED_GEMVS[-1], 1), (Skinny(64, 64, 4, 5, parts=2), 16)],
)
def test_linear_layers_wait(way, rows, monkeypatch):
    of = zeros_job(rows, "none", (64,))
    if way in GATED_GEMVS:
        of = replace(
            of,
            weights=[*of.weights, *of.weights],
            biases=[None, None],
            residual=None,
            gated="gelu_tanh" if way is GATED_GEMVS[0] else "gelu",
        )
    kernels = [Compiler(getattr(linears, name)) for name in ("gemv_kernel", "skinny_kernel", "combine_kernel")]
    for kernel in kernels:
        monkeypatch.setattr(linears, kernel.kernel.__name__, kernel)
    way.prepare(of)(of)
    codes = [code for kernel in kernels for code in kernel.code]
    assert len(codes) == (2 if rows > 1 else 1)
    for code in codes:
        assert_waits_first(code)
    assert NEXT in codes[0]


@pytest.mark.parametrize("adds_a_token", [False, True])
def test_attention_waits(adds_a_token, monkeypatch):
    of, new = decode_job(64), None
    if adds_a_token:
        decoding = step(group=4, heads=2, length=4096, width=64, mask="prefix", dtype=torch.bfloat16)
        of, new = decoding.attention(), decoding.new()
    kernels = [Compiler(getattr(attention, name)) for name in ("attention_kernel", "combine_kernel")]
    for kernel in kernels:
        monkeypatch.setattr(attention, kernel.kernel.__name__, kernel)
    AttentionTile(4, 64, 4, 2).prepare(of, new)(of, launch, new)
    for kernel in kernels:
        (code,) = kernel.code
        assert_waits_first(code)
    assert NEXT in kernels[0].code[0]
