"""Ascend's ops on a GPU, by graphex's kernels. Scripts whose device "npu" is the GPU have processes of their own: the
mapping cannot be taken back.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphex.ops import SPECS, declined
from tests.harness.processes import python

pytestmark = pytest.mark.cuda
NPU = torch.ops.npu


def test_streams_and_events_made_in_compiled_functions_are_as_on_the_simulated_npu():
    python("-m", "pytest", "-p", "no:xdist", "tests/ascend/test_model_streams.py", GRAPHEX_NPU="cuda")


def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    if dtype == torch.int8:
        return torch.randint(-128, 128, shape, dtype=dtype, device="cuda")
    return (torch.randn(shape, device="cuda") / 8).to(dtype)


@pytest.fixture(autouse=True)
def nothing_declined():
    before = declined()
    yield
    new = {key: count for key, count in declined().items() if count != before.get(key)}
    assert not any(name.startswith("npu::") or "paged" in name for name, _ in new), new


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [1, 40, 700, 5000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8], ids=str)
def test_groups_of_rows(rows, transposed, dtype):
    size, width, count = 512, 384, 8
    weight = (
        made(count, width, size, dtype=dtype).transpose(1, 2) if transposed else made(count, size, width, dtype=dtype)
    )
    x = made(rows, size, dtype=dtype)
    ends = torch.randint(0, rows + 1, (count,), device="cuda").sort().values
    options = {"group_list": ends, "split_item": 3, "group_type": 0}
    if dtype == torch.int8:
        options |= {"scale": [torch.rand(count, width, device="cuda") / 1000], "output_dtype": torch.bfloat16}
        options |= {"per_token_scale": [torch.rand(rows, device="cuda")]}
    (found,) = NPU.npu_grouped_matmul([x], [weight], **options)
    (wanted,) = SPECS["npu::npu_grouped_matmul"].reference([x], [weight], **options)
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
    assert not found[int(ends[-1]) :].any()


@pytest.mark.parametrize("rows", [1, 17, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, None], ids=str)
def test_one_matrix_of_bytes_is_exact_up_to_its_scales(rows, dtype):
    x, weight = made(rows, 1024, dtype=torch.int8), made(1024, 640, dtype=torch.int8)
    scale, bias = torch.rand(640, device="cuda") / 1000, torch.randint(-999, 999, (640,), device="cuda").int()
    options = {"pertoken_scale": torch.rand(rows, device="cuda"), "bias": bias, "output_dtype": dtype}
    found = NPU.npu_quant_matmul(x, weight, scale, **options)
    wanted = SPECS["npu::npu_quant_matmul"].reference(x, weight, scale, **options)
    near = {torch.bfloat16: (8e-3, 0), torch.float32: (1e-6, 0), None: (0, 1)}[dtype]
    torch.testing.assert_close(found, wanted, rtol=near[0], atol=near[1])


@pytest.mark.parametrize("layout", ["BSH", "BNSD", "TND"])
@pytest.mark.parametrize("positions", [1, 4])
def test_attention_to_pages_reads_no_more_than_there_is(layout, positions):
    heads, kv_heads, size, block, lengths = 8, 2, 128, 128, [7, 900, 128, 129]
    query = made(4, positions, heads, size)
    table = torch.randperm(40, device="cuda").view(4, 10).int()
    keys, values = (made(40, block, kv_heads, size) for _ in range(2))
    there = torch.zeros(40, block, dtype=torch.bool, device="cuda")
    slots = (table[..., None] * block + torch.arange(block, device="cuda")).flatten(1).long()
    for mine, length in zip(slots, lengths, strict=True):
        there.view(-1)[mine[:length]] = True
    dirty = [cache.masked_fill(~there[..., None, None], torch.nan) for cache in (keys, values)]
    options = {"block_table": table, "block_size": block, "actual_seq_lengths_kv": lengths, "scale": size**-0.5}
    options |= {"num_heads": heads, "num_key_value_heads": kv_heads, "input_layout": layout, "sparse_mode": 3}
    if layout == "TND":
        options["actual_seq_lengths"] = [positions * number for number in range(1, 5)]
    asked = {"BSH": query.flatten(2), "BNSD": query.transpose(1, 2), "TND": query.flatten(0, 1)}[layout]
    if layout == "BNSD":
        dirty = [cache.transpose(1, 2).contiguous() for cache in dirty]
    else:
        dirty = [cache.flatten(2) for cache in dirty]
    found, _ = NPU.npu_fused_infer_attention_score(asked, *dirty, **options)
    wanted, _ = NPU.npu_fused_infer_attention_score(asked, *dirty, **options, softmax_lse_flag=True)
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-3)


def experts_layer(x, router, up, down):
    weights, expert, row = NPU.npu_moe_gating_top_k_softmax(x @ router, k=2)
    rows, place, by = NPU.npu_moe_init_routing(x, row, expert, x.shape[0])
    ends = NPU.npu_moe_compute_expert_tokens(by, up.shape[0])
    options = {"group_list": ends, "split_item": 3, "group_type": 0}
    (hidden,) = NPU.npu_grouped_matmul([rows], [up], **options)
    (out,) = NPU.npu_grouped_matmul([NPU.npu_swiglu(hidden)], [down], **options)
    return NPU.npu_moe_finalize_routing(out, x, None, None, weights, place, expert)


@pytest.mark.parametrize("tokens", [1, 24, 2000])
def test_a_layer_of_experts_is_captured_and_right(tokens):
    import graphex

    x, router, up, down = made(tokens, 256), made(256, 16), made(16, 256, 512), made(16, 256, 256)
    compiled = torch.compile(experts_layer, backend="graphex")
    with torch.no_grad():
        for _ in range(3):
            found = compiled(x, router, up, down)
        weights, chosen = (x @ router).float().softmax(-1).topk(2, -1)
        wanted = x.float()
        for choice in range(2):
            gate, value = torch.einsum("th,thn->tn", x.float(), up[chosen[:, choice]].float()).chunk(2, -1)
            inner = torch.nn.functional.silu(gate) * value
            part = torch.einsum("tn,tnh->th", inner, down[chosen[:, choice]].float())
            wanted = wanted + weights[:, choice, None] * part
    torch.testing.assert_close(found.float(), wanted, rtol=5e-2, atol=5e-2)
    assert [record.status for record in graphex.journal(compiled).captures] == ["captured"]
