"""Ops that models for Ascend call: what they compute, and layers made of them, compiled and captured."""

from __future__ import annotations

import pytest
import torch
import torch_npu
from torch.nn import functional

from tests.harness.ascend import Compiled, on_npu

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 8, 4


def dense(q, k, v, scale, length, *, causal=False):
    """[heads, positions, size] against the first `length` keys, by torch's own attention."""
    k, v = (each[:, :length].repeat_interleave(q.shape[0] // each.shape[0], 0) for each in (k, v))
    mask = None
    if causal:
        mask = torch.ones(q.shape[1], length, dtype=torch.bool).tril(length - q.shape[1])
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD", "BNSD_BSND"])
def test_plain_attention(layout, causal):
    q, k, v = torch.randn(2, HEADS, 3, SIZE), *(torch.randn(2, KV_HEADS, 6, SIZE) for _ in range(2))

    def laid_out(x):
        x = x if layout.startswith("BNSD") else x.transpose(1, 2)
        return x.flatten(2) if layout == "BSH" else x

    found, lse = torch_npu.npu_fused_infer_attention_score(
        *(laid_out(each) for each in (q, k, v)),
        actual_seq_lengths_kv=[6, 4],
        num_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        scale=0.3,
        input_layout=layout,
        sparse_mode=3 if causal else 0,
        softmax_lse_flag=True,
    )
    wanted = torch.stack([dense(q[b], k[b], v[b], 0.3, (6, 4)[b], causal=causal) for b in range(2)])
    wanted = wanted.transpose(1, 2) if layout == "BNSD_BSND" else laid_out(wanted)
    torch.testing.assert_close(found, wanted)
    assert lse.shape == (2, HEADS, 3, 1)


@pytest.mark.parametrize("flag", [False, True], ids=["quickly", "with sums"])
def test_masks_of_single_queries_are_those_of_their_sequences(flag):
    q, k, v = torch.randn(2, HEADS, 1, SIZE), *(torch.randn(2, KV_HEADS, 6, SIZE) for _ in range(2))
    mask = torch.rand(2, 6) > 0.5
    options = {"num_heads": HEADS, "num_key_value_heads": KV_HEADS, "scale": 0.3, "input_layout": "BNSD"}
    found, _ = torch_npu.npu_fused_infer_attention_score(q, k, v, atten_mask=mask, softmax_lse_flag=flag, **options)
    many = [each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (k, v)]
    wanted = functional.scaled_dot_product_attention(q, *many, attn_mask=~mask[:, None, None], scale=0.3)
    torch.testing.assert_close(found, wanted)
    for mode in (2, 3):  # says nothing of them
        found, _ = torch_npu.npu_fused_infer_attention_score(
            q, k, v, sparse_mode=mode, softmax_lse_flag=flag, actual_seq_lengths_kv=[6, 6], **options
        )
        torch.testing.assert_close(found, functional.scaled_dot_product_attention(q, *many, scale=0.3))


@pytest.mark.parametrize("flag", [False, True], ids=["quickly", "with sums"])
@pytest.mark.parametrize("layout", ["BNSD_BSND", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD", "TND_NTD", "NTD_TND"])
def test_results_in_another_layout(layout, flag):
    q, k, v = torch.randn(2, HEADS, 3, SIZE), *(torch.randn(2, KV_HEADS, 3, SIZE) for _ in range(2))

    def laid_out(x, layout):
        by_letter = {"BSH": x.transpose(1, 2).flatten(2), "BSND": x.transpose(1, 2), "BNSD": x}
        by_letter |= {"NBSD": x.transpose(0, 1), "NTD": x.transpose(0, 1).flatten(1, 2)}
        return by_letter[layout] if layout in by_letter else x.transpose(1, 2).flatten(0, 1)

    given, _, wanted = layout.partition("_")
    ends = {"actual_seq_lengths": [3, 6], "actual_seq_lengths_kv": [3, 6]} if "T" in layout else {}
    found, _ = torch_npu.npu_fused_infer_attention_score(
        *(laid_out(each, given) for each in (q, k, v)),
        **{"num_heads": HEADS, "num_key_value_heads": KV_HEADS, "scale": 0.3, "input_layout": layout, **ends},
        softmax_lse_flag=flag,
    )
    whole = torch.stack([dense(q[b], k[b], v[b], 0.3, 3) for b in range(2)])
    torch.testing.assert_close(found, laid_out(whole, wanted))


def test_what_would_be_computed_otherwise_is_refused():
    q, k, mask = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8), torch.zeros(4, 6, dtype=torch.bool)
    options = {"num_heads": 2, "input_layout": "BNSD"}
    with pytest.raises(NotImplementedError, match="pre_tokens"):
        torch_npu.npu_fused_infer_attention_score(q, k, k, atten_mask=mask, next_tokens=0, **options)
    with pytest.raises(NotImplementedError, match="sparse_mode 4"):
        torch_npu.npu_fused_infer_attention_score(q, k, k, sparse_mode=4, **options)
    x, w = torch.zeros(2, 4, dtype=torch.int8), torch.zeros(4, 2, dtype=torch.int8)
    with pytest.raises(NotImplementedError, match="packed"):
        torch_npu.npu_quant_matmul(x.int(), w.int(), torch.ones(2), output_dtype=torch.float16)
    with pytest.raises(NotImplementedError, match="packed"):
        torch_npu.npu_quant_matmul(x, w, torch.ones(2, dtype=torch.int64), output_dtype=torch.float16)
    with pytest.raises(NotImplementedError, match="int8"):
        torch_npu.npu_grouped_matmul([x], [w[None]], scale=[torch.ones(1, 2)])


@pytest.mark.parametrize("packed", [False, True])
def test_attention_to_pages(packed):
    lengths, table = [7, 5], torch.tensor([[3, 1], [0, 2]])
    k, v = (torch.randn(4, BLOCK, KV_HEADS * SIZE) for _ in range(2))
    q = torch.randn(2, 1, HEADS, SIZE)
    options = {"block_table": table, "block_size": BLOCK, "actual_seq_lengths_kv": lengths, "scale": 0.3}
    options |= {"num_heads": HEADS, "num_key_value_heads": KV_HEADS}
    if packed:
        query = q.flatten(0, 1)
        options |= {"input_layout": "TND", "actual_seq_lengths": [1, 2]}
    else:
        query = q.flatten(2)
    found, _ = torch_npu.npu_fused_infer_attention_score(query, k, v, **options)
    for b, length in enumerate(lengths):
        rows = [each[table[b]].reshape(-1, KV_HEADS, SIZE).transpose(0, 1) for each in (k, v)]
        wanted = dense(q[b].transpose(0, 1), *rows, 0.3, length).transpose(0, 1)
        torch.testing.assert_close(found.view(2, 1, HEADS, SIZE)[b], wanted)


def test_attention_by_latents_and_rotary_parts():
    q, qr, k, kr = torch.randn(2, 4, 1, 8), torch.randn(2, 4, 1, 4), torch.randn(2, 1, 6, 8), torch.randn(2, 1, 6, 4)
    found, _ = torch_npu.npu_fused_infer_attention_score(
        q, k, k, query_rope=qr, key_rope=kr, num_heads=4, num_key_value_heads=1, scale=0.3, input_layout="BNSD"
    )
    wanted = functional.scaled_dot_product_attention(
        torch.cat((q, qr), -1), torch.cat((k, kr), -1).expand(2, 4, 6, 12), k.expand(2, 4, 6, 8), scale=0.3
    )
    torch.testing.assert_close(found, wanted)


def experts_layer(x, router, up, down):
    """Two of four experts for each token, by the ops."""
    weights, expert, row = torch_npu.npu_moe_gating_top_k_softmax(x @ router, k=2)
    rows, place, by = torch_npu.npu_moe_init_routing(x, row, expert, x.shape[0])
    ends = torch_npu.npu_moe_compute_expert_tokens(by, up.shape[0])
    options = {"group_list": ends, "split_item": 3, "group_type": 0}
    (hidden,) = torch_npu.npu_grouped_matmul([rows], [up], **options)
    (out,) = torch_npu.npu_grouped_matmul([torch_npu.npu_swiglu(hidden)], [down], **options)
    return torch_npu.npu_moe_finalize_routing(out, x, None, None, weights, place, expert)


def experts_layer_v2(x, router, up, down):
    """The same by the newer ops."""
    weights, expert, _ = torch_npu.npu_moe_gating_top_k(x @ router, 2)
    rows, place, tokens, _ = torch_npu.npu_moe_init_routing_v2(
        x, expert, expert_num=up.shape[0], expert_tokens_num_type=1, expert_tokens_num_flag=True, quant_mode=-1
    )
    options = {"group_list": tokens, "group_list_type": 1, "split_item": 3, "group_type": 0}
    (hidden,) = torch_npu.npu_grouped_matmul([rows], [up], **options)
    (out,) = torch_npu.npu_grouped_matmul([torch_npu.npu_swiglu(hidden)], [down], **options)
    return torch_npu.npu_moe_finalize_routing(out, x, None, None, weights, place, expert, 2)


def experts_layer_permuted(x, router, up, down):
    """The same by the ops that permute tokens."""
    weights, expert, _ = torch_npu.npu_moe_gating_top_k_softmax(x @ router, k=2)
    rows, place = torch_npu.npu_moe_token_permute(tokens=x, indices=expert, num_out_tokens=expert.numel())
    tokens = (expert.reshape(-1, 1) == torch.arange(up.shape[0], device=x.device)).sum(0)
    options = {"group_list": tokens, "group_list_type": 1, "split_item": 2, "group_type": 0}
    (hidden,) = torch_npu.npu_grouped_matmul([rows], [up], **options)
    (out,) = torch_npu.npu_grouped_matmul([torch_npu.npu_swiglu(hidden)], [down], **options)
    return x + torch_npu.npu_moe_token_unpermute(permuted_tokens=out, sorted_indices=place, probs=weights)


LAYERS = [experts_layer, experts_layer_v2, experts_layer_permuted]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
def test_experts_are_the_sum_over_tokens_and_choices_and_are_captured(layer):
    arguments = torch.randn(5, 8), torch.randn(8, 4), torch.randn(4, 8, 12), torch.randn(4, 6, 8)
    x, router, up, down = arguments
    weights, chosen = (x @ router).softmax(-1).topk(2, -1)
    wanted = x.clone()
    for token in range(5):
        for weight, expert in zip(weights[token], chosen[token], strict=True):
            a, b = (x[token] @ up[expert]).chunk(2)
            wanted[token] += weight * ((functional.silu(a) * b) @ down[expert])
    torch.testing.assert_close(layer(*arguments), wanted, rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()
    compiled = Compiled(layer, exact=False)
    for _ in range(2):
        compiled(*on_npu(*arguments))
    assert compiled.captures() == ["captured"]


def decode_step(x, w_kv, w_q, gamma, cos, sin, slots, table, k_cache, ckv_cache):
    """Latent attention of one token for each sequence, with its caches in pages."""
    kv = (x @ w_kv).view(x.shape[0], 1, 1, -1)
    torch_npu.npu_kv_rmsnorm_rope_cache(kv, gamma, cos, sin, slots, k_cache, ckv_cache, cache_mode="PA")
    q = (x @ w_q).view(x.shape[0], 1, HEADS, -1)
    q, q_rope = q.split([gamma.shape[0], cos.shape[-1]], -1)
    out, _ = torch_npu.npu_fused_infer_attention_score(
        q.flatten(2),
        ckv_cache.flatten(2),
        ckv_cache.flatten(2),
        query_rope=q_rope.flatten(2),
        key_rope=k_cache.flatten(2),
        block_table=table,
        block_size=BLOCK,
        actual_seq_lengths_kv=[7, 5],
        num_heads=HEADS,
        num_key_value_heads=1,
        scale=0.2,
    )
    return out


def decode_arguments():
    return on_npu(
        torch.randn(2, 16),
        torch.randn(16, SIZE + 4),
        torch.randn(16, HEADS * (SIZE + 4)),
        torch.randn(SIZE),
        torch.randn(2, 1, 1, 4),
        torch.randn(2, 1, 1, 4),
        torch.tensor([6, 12]),
        torch.tensor([[0, 1], [2, 3]]),
        torch.randn(4, BLOCK, 1, 4),
        torch.randn(4, BLOCK, 1, SIZE),
    )


def test_a_decode_step_with_paged_caches_is_captured_and_writes_them_in_place():
    torch._dynamo.reset()
    compiled = Compiled(decode_step)
    for _ in range(3):
        compiled(*decode_arguments())
    assert "captured" in compiled.captures()
    ops = compiled.ops()
    assert "npu.npu_kv_rmsnorm_rope_cache_v2.default" in ops
    assert "aten.copy_.default" not in ops


def norm_in_place(x, residual, gamma):
    torch_npu.npu_add_rms_norm_v2(x, residual, gamma)
    return x * 2, residual + 1


def test_the_norm_in_place_and_its_functional_form_agree():
    torch._dynamo.reset()
    x, residual, gamma = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    rstd, y, total = torch_npu.npu_add_rms_norm_v2_functional(x, residual, gamma)
    mine = x.clone(), residual.clone()
    torch.testing.assert_close(torch_npu.npu_add_rms_norm_v2(*mine, gamma), rstd)
    torch.testing.assert_close(mine, (y, total))
    compiled = Compiled(norm_in_place)
    compiled(*on_npu(x, residual, gamma))
    assert "aten.copy_.default" not in compiled.ops()


def updated_functionally(x, cache, residual, gamma):
    _, y, total = torch_npu.npu_add_rms_norm_v2_functional(cache, residual, gamma)
    cache.copy_(y)
    residual.copy_(total)
    return x + 1


def test_a_functional_form_whose_results_are_copied_back_becomes_the_one_in_place():
    torch._dynamo.reset()
    compiled = Compiled(updated_functionally)
    compiled(*on_npu(torch.randn(3), torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)))
    assert "npu.npu_add_rms_norm_v2.default" in compiled.ops()
    assert "aten.copy_.default" not in compiled.ops()


def test_a_quantised_linear():
    x, w = torch.randn(5, 16), torch.randint(-128, 128, (16, 6), dtype=torch.int8)
    scale = torch.rand(6) / 100

    def layer(x, w, scale):
        q, rows = torch_npu.npu_dynamic_quant(x)
        return torch_npu.npu_quant_matmul(q, w, scale, pertoken_scale=rows, output_dtype=torch.float32)

    torch.testing.assert_close(layer(x, w, scale), x @ (w * scale), rtol=0.02, atol=0.2)
    torch._dynamo.reset()
    compiled = Compiled(layer, exact=False)
    for _ in range(2):
        compiled(*on_npu(x, w, scale))
    assert compiled.captures() == ["captured"]


def test_a_weight_of_bytes_and_an_update_along_an_axis():
    x, w = torch.randn(5, 16), torch.randint(-128, 128, (16, 6), dtype=torch.int8)
    scale, offset = torch.rand(6), torch.randn(6)
    found = torch_npu.npu_weight_quant_batchmatmul(x, w, scale, offset)
    torch.testing.assert_close(found, x @ ((w + offset) * scale))
    cache, new = torch.zeros(2, 1, 5, 3), torch.randn(2, 1, 2, 3)
    torch_npu.scatter_update_(cache, torch.tensor([0, 3]), new, -2)
    assert torch.equal(cache[0, :, 0:2], new[0])
    assert torch.equal(cache[1, :, 3:5], new[1])
    assert torch.equal(torch_npu.scatter_update(torch.zeros(2, 1, 5, 3), torch.tensor([0, 3]), new, -2), cache)


def test_the_beginning_of_latent_attention():
    x, w_dq, w_uq, w_uk = torch.randn(3, 16), torch.randn(16, 6), torch.randn(6, 2 * 9), torch.randn(2, 5, 8)
    w_kv, g_q, g_kv = torch.randn(16, 12), torch.rand(6), torch.rand(8)
    sin, cos = torch.randn(3, 4), torch.randn(3, 4)
    kv, kr, slots = torch.zeros(3, 4, 1, 8), torch.zeros(3, 4, 1, 4), torch.tensor([5, 0, 7])
    q, q_rope, kv2, kr2 = torch_npu.npu_mla_prolog(x, w_dq, w_uq, w_uk, w_kv, g_q, g_kv, sin, cos, slots, kv, kr)

    def turned(t, cos, sin):
        t = torch.cat((t[..., 0::2], t[..., 1::2]), -1)
        return t * cos + torch.cat((-t[..., 2:], t[..., :2]), -1) * sin

    by_heads = (functional.rms_norm(x @ w_dq, (6,), g_q, 1e-5) @ w_uq).view(3, 2, 9)
    torch.testing.assert_close(q, torch.einsum("thd,hdc->thc", by_heads[..., :5], w_uk))
    torch.testing.assert_close(q_rope, turned(by_heads[..., 5:], cos[:, None], sin[:, None]))
    assert kv2 is kv or kv2.data_ptr() == kv.data_ptr()
    torch.testing.assert_close(kv.flatten(0, 1)[slots, 0], functional.rms_norm((x @ w_kv)[:, :8], (8,), g_kv, 1e-5))
    torch.testing.assert_close(kr2.flatten(0, 1)[slots, 0], turned((x @ w_kv)[:, 8:], cos, sin))


def test_an_op_that_the_user_defines_is_found():
    library = torch.library.Library("npu", "FRAGMENT")
    library.define("mine_for_a_test(Tensor x) -> Tensor")
    library.impl("mine_for_a_test", lambda x: x + 1, "CompositeExplicitAutograd")
    assert torch_npu.mine_for_a_test(torch.zeros(2)).tolist() == [1, 1]
    with pytest.raises(AttributeError, match="has no 'never_defined'"):
        _ = torch_npu.never_defined
