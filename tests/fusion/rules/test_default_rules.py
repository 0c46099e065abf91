"""The default fusions, row by row of their table: where they fire, where they must not, and with which results."""

from __future__ import annotations

import pytest
import torch

from tests.harness.compiling import Fused

npu = torch.ops.npu
BOTH = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


def tensors(*shapes, dtype=torch.float16):
    return [torch.randn(shape).to(dtype) for shape in shapes]


# -- add_rms_norm + dynamic_quant --------------------------------------------------------------------------------------


@BOTH
@HALVES
@pytest.mark.parametrize("eps", [1e-6, 1e-5, 9.99999997e-07], ids=str)
@pytest.mark.parametrize("residual", [True, False], ids=["with x", "without x"])
def test_norm_and_dynamic_quant(dynamic, dtype, eps, residual):
    def model(x1, x2, gamma):
        y, _, x = npu.npu_add_rms_norm(x1, x2, gamma, eps)
        q, scale = npu.npu_dynamic_quant(y)
        return (q, scale, x) if residual else (q, scale)

    fused = Fused(model, *tensors((2, 3, 32), (2, 3, 32), 32, dtype=dtype), dynamic=dynamic)
    assert fused.fusions() == ["add_rms_norm_dynamic_quant"]
    assert fused.ops() == ["npu_add_rms_norm_dynamic_quant"]


@BOTH
def test_smooth_scales_reach_the_fused_op(dynamic):
    def model(x1, x2, gamma, smooth):
        y, _, x = npu.npu_add_rms_norm(x1, x2, gamma)
        return *npu.npu_dynamic_quant(y, smooth_scales=smooth), x

    fused = Fused(model, *tensors((2, 3, 32), (2, 3, 32), 32, 32), dynamic=dynamic)
    assert fused.fusions() == ["add_rms_norm_smooth_dynamic_quant"]


@BOTH
@pytest.mark.parametrize("shape", [(2, 3, 32), (2, 3, 4, 32)], ids=str)
@pytest.mark.parametrize("residual", [True, False], ids=["with x", "without x"])
def test_norm_flatten_and_dynamic_quant(dynamic, shape, residual):
    def model(x1, x2, gamma):
        y, _, x = npu.npu_add_rms_norm(x1, x2, gamma)
        q, scale = npu.npu_dynamic_quant(y.flatten(0, 1))
        return (q, scale.view(-1, 1), x) if residual else (q, scale.view(-1, 1))

    assert Fused(model, *tensors(shape, shape, 32), dynamic=dynamic).fusions() == ["add_rms_norm_flatten_dynamic_quant"]


def test_flatten_written_as_reshape_of_sizes_is_the_same():
    def model(x1, x2, gamma):
        y, _, x = npu.npu_add_rms_norm(x1, x2, gamma)
        q, scale = npu.npu_dynamic_quant(y.reshape(y.shape[0] * y.shape[1], y.shape[2]))
        return q, scale.reshape(scale.shape[0], 1), x

    for dynamic in (False, True):
        assert Fused(model, *tensors((2, 3, 32), (2, 3, 32), 32), dynamic=dynamic).fusions()


@BOTH
def test_another_view_than_flatten_is_not_taken_for_it(dynamic):
    """The original trusts a node's name, or looks at one dimension only."""

    def other_rows(x1, x2, gamma):
        y, _, x = npu.npu_add_rms_norm(x1, x2, gamma)
        q, scale = npu.npu_dynamic_quant(y.view(y.shape[0] * y.shape[2], y.shape[1]))
        return q, scale.view(-1, 1), x

    def other_tail(x1, x2, gamma):
        y, _, x = npu.npu_add_rms_norm(x1, x2, gamma)
        q, scale = npu.npu_dynamic_quant(y.view(6, 8, 4))
        return q, scale.view(-1, 1), x

    assert Fused(other_rows, *tensors((2, 3, 32), (2, 3, 32), 32), dynamic=dynamic).fusions() == []
    assert Fused(other_tail, *tensors((2, 3, 4, 8), (2, 3, 4, 8), 8), dynamic=dynamic).fusions() == []


def test_a_norm_result_that_is_used_elsewhere_stays():
    def model(x1, x2, gamma):
        y, _, _x = npu.npu_add_rms_norm(x1, x2, gamma)
        q, scale = npu.npu_dynamic_quant(y)
        return q, scale, y * 2

    fused = Fused(model, *tensors((2, 3, 32), (2, 3, 32), 32))
    assert fused.fusions() == []
    assert any("would disappear" in reason for reason in fused.reasons("add_rms_norm_dynamic_quant"))


def test_float32_is_not_what_the_fused_op_takes():
    def model(x1, x2, gamma):
        y, _, x = npu.npu_add_rms_norm(x1, x2, gamma)
        return *npu.npu_dynamic_quant(y), x

    fused = Fused(model, *tensors((2, 32), (2, 32), 32, dtype=torch.float32))
    assert fused.fusions() == []
    assert any("float32" in reason for reason in fused.reasons("add_rms_norm_dynamic_quant"))


# -- add_rms_norm + cast -----------------------------------------------------------------------------------------------

CASTS = {"to": lambda y: y.to(torch.float32), "npu": lambda y: npu._npu_dtype_cast(y, torch.float32)}


@BOTH
@HALVES
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("flat", [True, False], ids=["view", "no view"])
@pytest.mark.parametrize("uses_y", [True, False], ids=["y used", "y unused"])
def test_norm_and_cast(dynamic, dtype, cast, flat, uses_y):
    def model(x1, x2, gamma):
        y, _, x = npu.npu_add_rms_norm(x1, x2, gamma, 1e-5)
        wide = CASTS[cast](y.view(-1, y.size(-1)) if flat else y)
        return (wide, x, y * 2) if uses_y else (wide, x)

    fused = Fused(model, *tensors((2, 3, 16), (2, 3, 16), 16, dtype=dtype), dynamic=dynamic)
    assert fused.fusions() == ["add_rms_norm_flatten_cast" if flat else "add_rms_norm_cast"]


def test_a_cast_to_another_dtype_is_no_cast_to_float32():
    def model(x1, x2, gamma):
        y, _, x = npu.npu_add_rms_norm(x1, x2, gamma)
        return y.to(torch.float64), x

    fused = Fused(model, *tensors((2, 16), (2, 16), 16))
    assert fused.fusions() == []
    assert any("float64" in reason for reason in fused.reasons("add_rms_norm_cast"))


def test_another_view_before_the_cast_blocks_it():
    def model(x1, x2, gamma):
        y, _, x = npu.npu_add_rms_norm(x1, x2, gamma)
        return y.view(-1, 8).to(torch.float32), x

    assert Fused(model, *tensors((2, 16), (2, 16), 16)).fusions() == []


# -- matmul + transpose ------------------------------------------------------------------------------------------------

SPELLINGS = {
    "matmul": lambda a, b: torch.matmul(a, b).transpose(0, 1),
    "bmm": lambda a, b: torch.bmm(a, b).transpose(1, 0),
    "negative dims": lambda a, b: torch.bmm(a, b).transpose(-3, -2),
    "permute": lambda a, b: torch.bmm(a, b).permute(1, 0, 2),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("noops", [True, False], ids=["cleaned", "not cleaned"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_matmul_and_transpose(spelling, noops, dtype):
    inputs = tensors((4, 6, 128), (4, 128, 256), dtype=dtype)
    fused = Fused(SPELLINGS[spelling], *inputs, remove_noop_ops=noops)
    assert fused.fusions() == ["batchmatmul_transpose"]
    assert "bmm" not in fused.ops()


def test_matmul_between_transposes():
    def model(a, b):
        return torch.matmul(a.transpose(0, 1), b).transpose(0, 1)

    assert Fused(model, *tensors((6, 4, 128), (4, 128, 256))).fusions() == ["transpose_batchmatmul_transpose"]


def test_only_the_batch_may_be_dynamic():
    def model(a, b):
        return torch.matmul(a, b).transpose(0, 1)

    a, b = tensors((4, 6, 128), (4, 128, 256))
    torch._dynamo.mark_dynamic(a, 1)
    assert Fused(model, a, b).fusions() == ["batchmatmul_transpose"]
    assert Fused(model, a, b, dynamic=True).fusions() == []


@pytest.mark.parametrize("dims", [(-2, -1), (0, 2), (1, 2), (0, 0)], ids=str)
def test_other_transposes_are_left_alone(dims):
    """The original fuses (-2, -1) and (0, 0) too, with a wrong result."""
    assert Fused(lambda a, b: torch.bmm(a, b).transpose(*dims), *tensors((4, 6, 128), (4, 128, 256))).fusions() == []


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        (((2, 3, 127), (2, 127, 128)), "127"),
        (((2, 3, 128), (2, 128, 100)), "100"),
        (((1, 2, 65536), (1, 65536, 128)), "65536"),
    ],
    ids=str,
)
def test_the_limits_of_the_batch_matmul(shapes, reason):
    fused = Fused(lambda a, b: torch.bmm(a, b).transpose(0, 1), *tensors(*shapes))
    assert fused.fusions() == []
    assert any(reason in said for said in fused.reasons("batchmatmul_transpose"))


def test_a_matmul_of_more_dimensions_is_left_alone():
    fused = Fused(lambda a, b: torch.matmul(a, b).transpose(0, 1), *tensors((2, 3, 4, 128), (2, 3, 128, 128)))
    assert fused.fusions() == []


# -- add_rms_norm + quantize -------------------------------------------------------------------------------------------


def quantised(dtype=1, axis=-1, div_mode=True, uses_y=False, eps=1e-6):
    def model(x1, x2, gamma, scales, zero_points=None):
        y, _, x = npu.npu_add_rms_norm(x1, x2, gamma, eps)
        q = npu.npu_quantize(y, scales, zero_points, dtype, axis, div_mode)
        return (q, x, y) if uses_y else (q, x)

    return model


def quant_inputs(width=32, dtype=torch.float16, scales=None, zero=torch.int32):
    x1, x2, gamma = tensors((2, 3, width), (2, 3, width), width, dtype=dtype)
    steps = torch.rand(width if scales is None else scales).to(dtype) + 0.1
    return [x1, x2, gamma, steps, *([torch.ones(steps.shape, dtype=zero)] if zero is not None else [])]


@HALVES
@pytest.mark.parametrize("eps", [1e-6, 1e-5], ids=str)
@pytest.mark.parametrize("zero", [torch.int32, torch.float16, None], ids=str)
def test_norm_and_quantize(dtype, eps, zero):
    fused = Fused(quantised(eps=eps), *quant_inputs(dtype=dtype, zero=zero))
    assert fused.fusions() == ["add_rms_norm_quant" if zero is not None else "add_rms_norm_quant_symmetric"]


def test_the_last_axis_by_its_number_is_the_last_axis():
    assert Fused(quantised(axis=2), *quant_inputs()).fusions() == ["add_rms_norm_quant"]


def test_rows_may_be_dynamic():
    inputs = quant_inputs()
    for tensor in inputs[:2]:
        torch._dynamo.mark_dynamic(tensor, 0)
    assert Fused(quantised(), *inputs).fusions() == ["add_rms_norm_quant"]


@pytest.mark.parametrize(
    ("model", "inputs", "reason"),
    [
        (quantised(), quant_inputs(width=24), "48 bytes"),
        (quantised(), quant_inputs(dtype=torch.float32), "float32"),
        (quantised(), quant_inputs(zero=torch.int8), "8 bits"),
        (quantised(), quant_inputs(zero=torch.uint8), "8 bits"),
        (quantised(div_mode=False), quant_inputs(), "div_mode"),
        (quantised(uses_y=True), quant_inputs(), "would disappear"),
        (quantised(), quant_inputs(scales=1), "shape"),
    ],
    ids=["unaligned", "float32", "int8 zero", "uint8 zero", "multiply", "y used", "one scale"],
)
def test_the_limits_of_norm_and_quantize(model, inputs, reason):
    fused = Fused(model, *inputs)
    assert fused.fusions() == []
    assert any(reason in said for said in fused.reasons()), fused.reasons()


# -- all of them -------------------------------------------------------------------------------------------------------


def test_one_option_turns_all_of_it_off():
    def model(x1, x2, gamma):
        y, _, x = npu.npu_add_rms_norm(x1, x2, gamma)
        return *npu.npu_dynamic_quant(y), x

    inputs = tensors((2, 32), (2, 32), 32)
    assert Fused(model, *inputs, pattern_fusion_pass=False).fusions() == []
    assert Fused(model, *inputs, disable_rules=["add_rms_norm_dynamic_quant"]).fusions() == []
    assert Fused(model, *inputs).fusions() != []


def test_many_fusions_in_one_model():
    def model(x1, x2, gamma):
        outputs = []
        for _ in range(3):
            y, _, x = npu.npu_add_rms_norm(x1, x2, gamma)
            q, scale = npu.npu_dynamic_quant(y)
            outputs.append(q)
            x1, x2 = x, q.to(x.dtype) * scale.unsqueeze(-1).to(x.dtype)
        y, _, x = npu.npu_add_rms_norm(x1, x2, gamma)
        return *outputs, y.to(torch.float32), x

    fused = Fused(model, *tensors((2, 3, 32), (2, 3, 32), 32))
    assert sorted(fused.fusions()) == ["add_rms_norm_cast"] + ["add_rms_norm_dynamic_quant"] * 3
    counts = {rule.rule: (rule.matches, rule.candidates) for rule in fused.journal.rules}
    assert counts["add_rms_norm_dynamic_quant"] == (3, 3)


def test_every_rule_belongs_to_one_documented_family():
    from graphex.fusion.rules import FUSIONS, LIFTS

    families = (*FUSIONS, *LIFTS)
    names = [name for family in families for name in family.names]
    assert len(names) == len(set(names)) == 31
    assert all("->" in family.doc for family in families)
