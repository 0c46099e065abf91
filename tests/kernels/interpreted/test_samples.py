"""Every op that has a kernel, on the samples of the op library."""

from __future__ import annotations

import pytest
import torch

from graphex.errors import Refusal
from graphex.ops.definition import SPECS
from tests.harness.kernels.compare import assert_close_to_reference, copies, exact_results, launcher, roundings, tensors
from tests.harness.kernels.samples import SAMPLES, Maker

WITH_KERNEL = [name for name, spec in SPECS.items() if spec.kernel is not None]
# The interpreter's own conversion to float8 does not round to nearest: those are tested on a GPU.
NOT_INTERPRETED = (torch.float8_e4m3fn,)
ONLY_16_BIT = "x is torch.float32: how exactly its products are computed is for the library to say"
NOT_LIKE_X = {
    "the norm has another type than x and the residual",
    "the rows of x and of the residual are in another order in memory",
}
DECLINED = {
    "graphex::experts": {"x is torch.float32, the experts are torch.float32"},
    "graphex::linears": {ONLY_16_BIT},
    "graphex::routed_experts": {"the logits are no rows of 16-bit numbers"},
    "graphex::rms_norm_linears": {ONLY_16_BIT},
    "graphex::silu_mul_linears": {ONLY_16_BIT},
    "graphex::gated_linears": {ONLY_16_BIT},
    "graphex::rms_norm_gated_linears": {ONLY_16_BIT},
    "graphex::rms_norm_add": NOT_LIKE_X,
    "graphex::rms_norm_add_rms_norm": NOT_LIKE_X,
    "graphex::odd_mm": {
        "the matrices are not both float16 or bfloat16, on one device",
        "too much of its tiles would be left over",
    },
    "graphex::rotary_attention_": {"there is more than one token"},
    "npu::npu_dynamic_quant": {"smooth scales of groups of rows"},
    "npu::npu_grouped_matmul": {
        "there is not one x, with one stack of weights and a list of groups",
        "x is torch.float32, the weights are torch.float32",
    },
    "npu::npu_quantize": {"scales along a dimension other than the last"},
}


@pytest.mark.parametrize("name", WITH_KERNEL)
def test_kernel_computes_what_the_reference_does(name):
    torch.manual_seed(0)
    samples = list(SAMPLES[name](Maker(torch.float16))) + list(SAMPLES[name](Maker(torch.float32)))[:2]
    declined = set()
    for sample in samples:
        if any(option in NOT_INTERPRETED for option in sample.options.values()):
            continue
        found_args, wanted_args = copies(sample), copies(sample)
        found = launcher(name)(*found_args, **sample.options)
        if isinstance(found, Refusal):
            declined.add(found.reason)
            continue
        wanted = SPECS[name].reference(*wanted_args, **sample.options)
        exact = exact_results(name, sample)
        for at, (mine, its) in enumerate(zip(tensors(found), tensors(wanted), strict=True)):
            assert_close_to_reference(
                mine, its, None if exact is None else exact[at], most_ulps=roundings(name, sample)
            )
        if name.endswith("_"):
            for mine, its in zip(found_args, wanted_args, strict=True):
                if isinstance(mine, torch.Tensor):
                    assert_close_to_reference(mine, its)
    assert declined == DECLINED.get(name, set())
