"""npugraph_ex's scenarios 31 to 36: default fusions and rules of the user's, by the names of torch_npu."""

from __future__ import annotations

import pytest
import torch
import torchair
from torch_npu import npu_add_rms_norm, npu_dynamic_quant, npu_quantize

import graphex
from tests.harness.ascend import Compiled, on_npu


def inputs(*shapes, dtype=torch.float16):
    return on_npu(*(torch.randn(shape).to(dtype) for shape in shapes))


def quantised_in_every_way(x1, x2, gamma, smooth):
    y, _, x = npu_add_rms_norm(x1, x2, gamma)
    q1, scale1 = npu_dynamic_quant(y, smooth_scales=smooth)
    y, _, x = npu_add_rms_norm(x, x2, gamma)
    q2, scale2 = npu_dynamic_quant(y.flatten(0, 1))
    y, _, x = npu_add_rms_norm(x, x2, gamma)
    return q1, scale1, q2, scale2.view(-1, 1), y.view(-1, y.shape[-1]).to(torch.float32), x


EVERY_WAY = ["add_rms_norm_flatten_cast", "add_rms_norm_flatten_dynamic_quant", "add_rms_norm_smooth_dynamic_quant"]


def test_scenario_31_dynamic_quant_both_ways_and_cast_in_one_model():
    compiled = Compiled(quantised_in_every_way, exact=False)
    compiled(*inputs((2, 3, 32), (2, 3, 32), 32, 32))
    assert sorted(compiled.fusions()) == EVERY_WAY
    assert sum(op.startswith("npu.npu_add_rms_norm_") for op in compiled.ops()) == 3


def test_scenario_31_the_option_turns_it_off():
    compiled = Compiled(quantised_in_every_way, exact=False, pattern_fusion_pass=False)
    compiled(*inputs((2, 3, 32), (2, 3, 32), 32, 32))
    assert compiled.fusions() == []


def test_scenario_32_ops_on_different_streams_are_not_fused():
    def streams(x1, x2, gamma):
        y, _, x = npu_add_rms_norm(x1, x2, gamma)
        with torchair.scope.npu_stream_switch("side"):
            q, scale = npu_dynamic_quant(y)
        return q, scale, x

    def limited(x1, x2, gamma):
        with torchair.scope.limit_core_num(4, 8):
            return streams(x1, x2, gamma)

    for fn in (streams, limited):
        torch._dynamo.reset()
        compiled = Compiled(fn, exact=False)
        compiled(*inputs((2, 3, 32), (2, 3, 32), 32))
        assert compiled.fusions() == []


def quantize(dtype=1, div_mode=True, uses_y=False, eps=1e-6, residual=True):
    def model(x1, x2, gamma, scales, zero_points):
        y, _, x = npu_add_rms_norm(x1, x2, gamma, eps)
        q = npu_quantize(y, scales, zero_points, dtype, -1, div_mode)
        return (q, x, y) if uses_y else (q, x) if residual else q

    return model


def quantize_inputs(width=32, dtype=torch.float16, scales=None, zero=torch.int32):
    steps = (torch.rand(scales or width) + 0.1).to(dtype)
    return [*inputs((2, width), (2, width), width, dtype=dtype), *on_npu(steps, torch.ones(steps.shape, dtype=zero))]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("zero", [torch.int32, torch.float32], ids=str)
@pytest.mark.parametrize("options", [{}, {"eps": 1e-5}, {"dtype": 12}, {"residual": False}], ids=str)
def test_scenario_33_norm_and_quantize(dtype, zero, options):
    compiled = Compiled(quantize(**options), exact=False)
    compiled(*quantize_inputs(dtype=dtype, zero=zero))
    assert compiled.fusions() == ["add_rms_norm_quant_qint8" if options.get("dtype") == 12 else "add_rms_norm_quant"]


def test_scenario_33_with_rows_of_any_number():
    given = quantize_inputs()
    for tensor in given[:2]:
        torch._dynamo.mark_dynamic(tensor, 0)
    compiled = Compiled(quantize(), exact=False)
    compiled(*given)
    assert compiled.fusions() == ["add_rms_norm_quant"]


REFUSED = {
    "int8 zero": (quantize(), {"zero": torch.int8}),
    "uint8 zero": (quantize(), {"zero": torch.uint8}),
    "int32 result": (quantize(dtype=3), {}),
    "y used": (quantize(uses_y=True), {}),
    "multiplied": (quantize(div_mode=False), {}),
    "shape": (quantize(), {"scales": 1}),
    "unaligned": (quantize(), {"width": 24}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_scenario_34_norm_and_quantize_are_refused_with_a_reason(case):
    model, options = REFUSED[case]
    compiled = Compiled(model, exact=False)
    compiled(*quantize_inputs(**options))
    assert compiled.fusions() == []
    assert compiled.reasons()


def test_scenario_34_a_last_dimension_of_any_size_is_not_fused():
    compiled = Compiled(quantize(), exact=False, dynamic=True)
    compiled(*quantize_inputs())
    assert compiled.fusions() == []


def test_scenario_35_a_rule_registered_twice_is_refused_or_skipped():
    example = (torch.ones(2, 2), torch.ones(2, 2))

    def search(a, b):
        return (a - b).exp()

    def replace(a, b):
        return a.exp() / b.exp()

    with torchair.register_replacement(search, replace, example):
        with pytest.raises(graphex.RuleError, match="Duplicate pattern"):
            torchair.register_replacement(search, replace, example)
        assert not torchair.register_replacement(search, replace, example, skip_duplicates=True)


def multiplied(before=None, after=(0, 1)):
    def model(a, b):
        if before is not None:
            a = a.transpose(*before)
        return torch.matmul(a, b).transpose(*after)

    return model


MATMULS = {
    "plain": (multiplied(), ((4, 6, 128), (4, 128, 256)), "batchmatmul_transpose"),
    "transposed before": (multiplied((0, 1)), ((6, 4, 128), (4, 128, 256)), "transpose_batchmatmul_transpose"),
    "K of 511": (multiplied(), ((4, 6, 511), (4, 511, 128)), None),
    "another transpose": (multiplied(after=(0, 2)), ((4, 6, 128), (4, 128, 256)), None),
}


@pytest.mark.parametrize("case", MATMULS)
def test_scenario_36_batched_matmul_and_transpose(case):
    model, shapes, rule = MATMULS[case]
    compiled = Compiled(model, exact=False)
    compiled(*inputs(*shapes, dtype=torch.float32))
    assert compiled.fusions() == ([rule] if rule else [])


def test_scenario_36_a_transposed_input_has_its_own_limit():
    compiled = Compiled(multiplied((0, 1)), exact=False)
    compiled(*inputs((2, 512, 128), (512, 128, 128), dtype=torch.float32))  # K * B is 65536
    assert "transpose_batchmatmul_transpose" not in compiled.fusions()


def test_scenario_36_another_transpose_before_it_leaves_only_the_one_after():
    compiled = Compiled(multiplied((0, 2)), exact=False)
    compiled(*inputs((128, 6, 4), (4, 128, 256), dtype=torch.float32))
    assert "transpose_batchmatmul_transpose" not in compiled.fusions()


def test_scenario_36_the_option_turns_it_off():
    compiled = Compiled(multiplied(), exact=False, pattern_fusion_pass=False)
    compiled(*inputs((4, 6, 128), (4, 128, 256), dtype=torch.float32))
    assert compiled.fusions() == []
