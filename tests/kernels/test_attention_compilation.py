"""Every tile of attention compiles for a Hopper GPU, fits into it, and has loads of 16 bytes under way."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="needs triton (Linux)")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from graphex.kernels import attention
from graphex.kernels.attention import AttentionTile, Job, New, tiles
from graphex.kernels.launch import launch
from tests.harness.kernels.attention import decode_job
from tests.harness.kernels.hopper import MOST_SHARED, Compiler
from tests.harness.kernels.rotary_attention import step


def compiled(tile: AttentionTile, of: Job, monkeypatch: pytest.MonkeyPatch, new: New | None = None) -> tuple[str, int]:
    kernels = {name: Compiler(getattr(attention, name)) for name in ("attention_kernel", "combine_kernel")}
    for name, compiler in kernels.items():
        monkeypatch.setattr(attention, name, compiler)
    tile.prepare(of, new)(of, launch, new)
    (code,) = kernels["attention_kernel"].code
    assert len(kernels["combine_kernel"].code) == (tile.splits > 1)
    return code, kernels["attention_kernel"].shared


WIDTHS = (64, 80, 96, 112, 128, 192, 256)
CASES = [(width, at) for width in WIDTHS for at in range(len(attention.TILES))]


@pytest.mark.parametrize(
    ("width", "at"),
    [pytest.param(*case, marks=() if case in ((128, 0), (80, 1), (256, 3)) else pytest.mark.full) for case in CASES],
)
def test_tiles(width, at, monkeypatch):
    of = decode_job(width)
    found = tiles(of, 4096)
    code, shared = compiled(found[min(at, len(found) - 1)], of, monkeypatch)
    assert "cp.async.cg.shared.global" in code  # 16 bytes at a time, past the registers
    assert "mma" in code
    assert shared <= MOST_SHARED


@pytest.mark.parametrize("mask", ["none", "by head", pytest.param("added -inf", marks=pytest.mark.full)])
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.float32, marks=pytest.mark.full)])
def test_masks_and_types(mask, dtype, monkeypatch):
    of = decode_job(128, mask, dtype, positions=4)._replace(softcap=30.0)
    code, shared = compiled(tiles(of, 4096)[0], of, monkeypatch)
    assert "cp.async.cg.shared.global" in code
    assert shared <= MOST_SHARED


TOKEN_CASES = [
    (dtype, interleaved, at)
    for dtype in (torch.bfloat16, torch.float16)
    for interleaved in (False, True)
    for at in range(len(attention.TILES))
]
OFTEN = ((torch.bfloat16, False, 0), (torch.float16, True, 1), (torch.bfloat16, False, 5))


@pytest.mark.parametrize(
    ("dtype", "interleaved", "at"),
    [pytest.param(*case, marks=() if case in OFTEN else pytest.mark.full) for case in TOKEN_CASES],
)
def test_tiles_that_add_a_token(dtype, interleaved, at, monkeypatch):
    of = step(group=4, heads=2, length=4096, width=128, mask="prefix", dtype=dtype, interleaved=interleaved)
    found = tiles(of.attention(), 4096)
    tile = found[min(at, len(found) - 1)]
    code, shared = compiled(tile, of.attention(), monkeypatch, of.new())
    assert "cp.async.cg.shared.global" in code
    assert "st.global.v4.b32" in code  # the row of the keys
    assert "mul.rn.f32" in code  # a product that is contracted with nothing
    # 4 rows of 128 are spread over the threads, which read their pieces at once; of pairs, one element at a time.
    assert ("ld.global.v2.b32" if tile.warps == 4 else "ld.global.b32") in code
    assert code.count("ld.global.b16") == 1 + (64 // tile.warps if interleaved else 0)  # 1: the new value
    assert shared <= MOST_SHARED


def test_products_of_a_rotation_are_rounded_before_they_are_added(monkeypatch):
    """What is made of them is converted to the type of the row, and then added or subtracted in it."""
    of = step(group=4, heads=2, length=4096, width=128, dtype=torch.bfloat16)
    code, _ = compiled(tiles(of.attention(), 4096)[0], of.attention(), monkeypatch, of.new())
    assert "fma.rn.bf16" not in code
