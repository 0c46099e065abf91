"""The kernels compile for a Hopper GPU where there is none: bfloat16 and float8, which the interpreter gets wrong."""

from __future__ import annotations

import os

import pytest
import torch

from tests.harness.kernels.hopper import cases, compiled
from tests.harness.kernels.samples import EPS, Maker, Sample

pytest.importorskip("triton", reason="needs triton (Linux)")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)


@pytest.mark.parametrize("name", cases())
def test_compiles_to_wide_accesses(name, monkeypatch):
    code = compiled(name, cases()[name], monkeypatch)
    assert "ld.global.v4.b32" in code  # 16 bytes at a time
    assert "st.global.v4.b32" in code or "st.global.v2.b32" in code


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_index_outside_of_a_table_stops_the_device_before_a_row_is_read(dtype, monkeypatch):
    table, indices = torch.randn(7, 4096).bfloat16(), torch.tensor([3, 6], dtype=dtype)
    code = compiled("graphex::embedding", Sample((table, indices)), monkeypatch)
    assert 0 < code.index("trap;") < code.index("ld.global.v")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_of_odd_width_is_read_and_written_by_the_copy_engine(dtype, monkeypatch):
    make = Maker(dtype)
    code = compiled("graphex::odd_mm", Sample((make(1024, 768), make(50257, 768).t())), monkeypatch)
    assert "wgmma.mma_async" in code
    assert "cp.async.bulk.tensor.2d.shared" in code
    assert "cp.async.bulk.tensor.2d.global" in code


@pytest.mark.parametrize("name", [name for name in cases() if "rotary" in name])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_a_rotation_are_rounded_before_they_are_added(name, dtype, monkeypatch):
    code = compiled(name, cases(dtype)[name], monkeypatch)
    assert "mul" in code
    assert "fma." not in code


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("graphex::rms_norm", ((3, 1), (1,))),
        ("graphex::dynamic_quant", ((3, 1), (1,))),
        ("graphex::silu_mul", ((1, 1), (1, 1))),
        ("graphex::rotary", ((1, 2), (1, 2), (1, 2))),
    ],
)
def test_compiles_for_a_single_column(name, shapes, monkeypatch):
    make = Maker(torch.bfloat16)
    numbers = (EPS,) if name == "graphex::rms_norm" else ()
    assert compiled(name, Sample((*(make(*shape) for shape in shapes), *numbers)), monkeypatch)
