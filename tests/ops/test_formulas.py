"""What the ops compute, against the same thing written by hand: as models write it, and as torch_npu documents it."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import graphex.ops  # noqa: F401

GX, NPU = torch.ops.graphex, torch.ops.npu
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request) -> torch.dtype:
    return request.param


# RMSNorm as models write it


def test_rms_norm_is_llamas(dtype):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm, x = LlamaRMSNorm(32, eps=1e-5).to(dtype), torch.randn(3, 5, 32).to(dtype)
    torch.nn.init.normal_(norm.weight)
    same(GX.rms_norm(x, norm.weight, 1e-5)[0], norm(x))


def test_rms_norm_is_gemmas(dtype):
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    norm, x = GemmaRMSNorm(32, eps=1e-5).to(dtype), torch.randn(3, 5, 32).to(dtype)
    torch.nn.init.normal_(norm.weight)
    same(GX.rms_norm(x, norm.weight, 1e-5, 1.0, False)[0], norm(x))


def test_rms_norm_is_t5s(dtype):
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    norm, x = T5LayerNorm(32, eps=1e-5).to(dtype), torch.randn(3, 5, 32).to(dtype)
    torch.nn.init.normal_(norm.weight)
    same(GX.rms_norm(x, norm.weight, 1e-5)[0], norm(x))


def test_rms_norm_is_torchs_own(dtype):
    x, weight = torch.randn(6, 33).to(dtype), torch.randn(33).to(dtype)
    wanted = torch._decomp.decompositions._fused_rms_norm(x, [33], weight, 1e-5)
    found = GX.rms_norm(x, weight, 1e-5, 0.0, False)
    same(found[0], wanted[0])
    same(found[1], wanted[1])
    torch.testing.assert_close(found[0], functional.rms_norm(x, [33], weight, 1e-5))


def test_a_float32_weight_widens_what_was_cast_before_it():
    x, weight = torch.randn(4, 8).bfloat16(), torch.randn(8)
    x32 = x.float()
    n = (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16()
    y, rstd = GX.rms_norm(x, weight, 1e-6)
    assert (y.dtype, rstd.dtype) == (torch.float32, torch.float32)
    same(y, weight * n)
    assert GX.rms_norm(x, weight, 1e-6, 0.0, False)[0].dtype == torch.bfloat16


def test_the_residual_sum_is_rounded_before_the_norm(dtype):
    x1, x2, weight = (torch.randn(*s).to(dtype) for s in ((4, 64), (4, 64), (64,)))
    y, _, total = GX.add_rms_norm(x1, x2, weight, 1e-6)
    same(total, x1 + x2)
    same(y, GX.rms_norm(x1 + x2, weight, 1e-6)[0])
    y32, y_again, _, _ = GX.add_rms_norm_cast(x1, x2, weight, 1e-6)
    same(y_again, y)
    same(y32, y.float())


def test_two_norms_and_the_residual_between_them_are_gemmas(dtype):
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

    first, second = (Gemma3RMSNorm(32, eps=1e-5).to(dtype) for _ in range(2))
    for norm in (first, second):
        torch.nn.init.normal_(norm.weight)
    x, residual = (torch.randn(3, 5, 32).to(dtype) for _ in range(2))
    y, total = GX.rms_norm_add_rms_norm(x, residual, first.weight, 1e-5, 1.0, False, second.weight, 1e-5, 1.0, False)
    same(total, residual + first(x))
    same(y, second(residual + first(x)))


def test_training_keeps_only_the_input_and_rstd():
    saved: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    x, weight = torch.randn(4, 64, requires_grad=True), torch.randn(64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y, _ = GX.rms_norm(x, weight, 1e-6)
    assert sorted(t.numel() for t in saved) == [4, 64, 256]
    y.sum().backward()
    wanted = torch.autograd.grad(functional.rms_norm(x, [64], weight, 1e-6).sum(), (x, weight))
    torch.testing.assert_close((x.grad, weight.grad), wanted)


# Quantisation as people write it


def test_dynamic_quant_by_hand(dtype):
    x = torch.randn(5, 40).to(dtype)
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    q, s = GX.dynamic_quant(x)
    same(s, scale)
    same(q, (x.float() / scale).round().clamp(-128, 127).to(torch.int8))


def test_dynamic_quant_as_torchao_does():
    """choose_qparams_affine (symmetric, eps 1e-5, range -127..127) and quantize_affine."""
    x = torch.randn(5, 40)
    x[2] = 0
    largest = torch.maximum(-torch.clamp(x.amin(-1, keepdim=True), max=0), torch.clamp(x.amax(-1, keepdim=True), min=0))
    scale = torch.clamp(largest / ((127 - -127) / 2), min=1e-5)
    q, s = GX.dynamic_quant(x, mode="reciprocal", min_scale=1e-5, quant_min=-127.0)
    same(s, scale)
    same(q, torch.clamp(torch.round(x * (1.0 / scale)), -127, 127).to(torch.int8))


def test_dynamic_quant_in_the_inputs_own_type():
    """SmoothQuant's per-token quantisation of activations."""
    x = torch.randn(5, 40).bfloat16()
    scale = x.abs().max(dim=-1, keepdim=True)[0].clamp(min=1e-5) / 127
    q, s = GX.dynamic_quant(x, min_amax=1e-5, compute_dtype=torch.bfloat16)
    assert s.dtype == torch.bfloat16
    same(s, scale)
    same(q, (x / scale).round().clamp(-128, 127).to(torch.int8))


def test_dynamic_quant_to_float8():
    x = torch.randn(5, 40)
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    q, s = GX.dynamic_quant(
        x, min_amax=1e-12, divisor=448.0, quant_min=-448.0, quant_max=448.0, dtype=torch.float8_e4m3fn
    )
    same(s, scale)
    same(q.float(), (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float())


def test_static_quant_as_quantize_per_tensor_does():
    x, scale, zero_point = torch.randn(5, 40), 0.03, 7
    wanted = (torch.round(x * (1.0 / torch.tensor(scale))) + zero_point).clamp(0, 255).to(torch.uint8)
    found = GX.static_quant(
        x,
        torch.tensor(scale),
        torch.tensor(zero_point),
        mode="reciprocal",
        dtype=torch.uint8,
        quant_min=0.0,
        quant_max=255.0,
    )
    same(found, wanted)


def test_static_quant_rounds_once_and_cuts_off_a_fraction_of_the_zero_point():
    x, zero_point = torch.tensor([0.0, 1.0, -1.0, -3.0]), torch.tensor(0.75)
    same(GX.static_quant(x, torch.tensor(1.0), zero_point), torch.tensor([0, 1, 0, -2], dtype=torch.int8))
    before = GX.static_quant(x, torch.tensor(1.0), zero_point, zero_point_before_round=True)
    same(before, torch.tensor([1, 2, 0, -2], dtype=torch.int8))


def test_ties_round_to_even():
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 127.0]])
    same(GX.dynamic_quant(x)[0], torch.tensor([[0, 2, 2, 0, -2, 127]], dtype=torch.int8))


def test_fused_quantisation_is_the_composition(dtype):
    x1, x2, weight = (torch.randn(*s).to(dtype) for s in ((4, 64), (4, 64), (64,)))
    scale = torch.rand(64) + 0.01
    y, _, total = GX.add_rms_norm(x1, x2, weight, 1e-6)
    q, s, total_again = GX.add_rms_norm_dynamic_quant(x1, x2, weight, None, 1e-6)
    assert [a.tolist() for a in (q, s)] == [a.tolist() for a in GX.dynamic_quant(y)]
    same(total_again, total)
    same(GX.add_rms_norm_static_quant(x1, x2, weight, scale, None, 1e-6)[0], GX.static_quant(y, scale))
    same(GX.silu_mul_dynamic_quant(x1, x2)[0], GX.dynamic_quant(functional.silu(x1) * x2)[0])
    same(GX.silu_mul_static_quant(x1, x2, scale), GX.static_quant(functional.silu(x1) * x2, scale))


# Rotary embedding as transformers writes it


def rotary_inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    angle = torch.rand(2, 5, 4).repeat(1, 1, 2) * 6
    return (
        torch.randn(2, 4, 5, 8).to(dtype),
        torch.randn(2, 2, 5, 8).to(dtype),
        angle.cos().to(dtype),
        angle.sin().to(dtype),
    )


def test_rotary_is_llamas(dtype):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k, cos, sin = rotary_inputs(dtype)
    wanted = apply_rotary_pos_emb(q, k, cos, sin)
    found = GX.rotary_qk(q, k, cos.unsqueeze(1), sin.unsqueeze(1))
    for mine, its in zip(found, wanted, strict=True):
        same(mine, its)
    same(GX.rotary(k, cos.unsqueeze(1), sin.unsqueeze(1)), wanted[1])


def test_interleaved_rotary_is_deepseeks(dtype):
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave

    q, k, cos, sin = rotary_inputs(dtype)
    wanted = apply_rotary_pos_emb_interleave(q, k, cos, sin)
    for mine, its in zip(GX.rotary_qk(q, k, cos.unsqueeze(1), sin.unsqueeze(1), True), wanted, strict=True):
        same(mine, its)
    half = cos[..., :4].unsqueeze(1), sin[..., :4].unsqueeze(1)
    same(GX.rotary(q, *half, True), wanted[0])


def test_rotary_write_fills_the_cache_at_the_positions(dtype):
    q, k, cos, sin = rotary_inputs(dtype)
    v, cos, sin = torch.randn_like(k), cos.unsqueeze(1), sin.unsqueeze(1)
    keys, values = (torch.randn(2, 2, 9, 8).to(dtype) for _ in range(2))
    positions = torch.tensor([8, 1, 2, 0, 5])
    want_keys, want_values = keys.clone(), values.clone()
    want_keys[:, :, positions] = GX.rotary(k, cos, sin)
    want_values[:, :, positions] = v
    alone = keys.clone()
    GX.rotary_write_(k, cos, sin, alone, positions)
    same(alone, want_keys)
    same(GX.rotary_qkv_write_(q, k, v, cos, sin, keys, values, positions), GX.rotary(q, cos, sin))
    same(keys, want_keys)
    same(values, want_values)


# torch_npu


def test_npu_norms_multiply_by_gamma_in_float32(dtype):
    x1, x2, gamma = (torch.randn(*s).to(dtype) for s in ((4, 3, 64), (4, 3, 64), (64,)))
    x = x1 + x2
    rstd = (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    y = (x.float() * rstd * gamma.float()).to(dtype)
    for found, wanted in zip(NPU.npu_add_rms_norm(x1, x2, gamma), (y, rstd, x), strict=True):
        torch.testing.assert_close(found, wanted)
    for found, wanted in zip(NPU.npu_add_rms_norm_cast(x1, x2, gamma), (y.float(), y, rstd, x), strict=True):
        torch.testing.assert_close(found, wanted)


def test_npu_rms_norm_covers_all_dimensions_of_gamma():
    x, gamma = torch.randn(2, 3, 4), torch.randn(3, 4)
    y, rstd = NPU.npu_rms_norm(x, gamma)
    assert rstd.shape == (2, 1, 1)
    torch.testing.assert_close(y, x / (x.square().mean((1, 2), keepdim=True) + 1e-6).sqrt() * gamma)


def test_npu_quantised_norms_are_compositions(dtype):
    x1, x2, gamma = (torch.randn(*s).to(dtype) for s in ((4, 64), (4, 64), (64,)))
    scales, zeros, smooth = torch.rand(64) + 0.01, torch.randn(64), torch.rand(64).to(dtype)
    y, _, x = NPU.npu_add_rms_norm(x1, x2, gamma)
    q, nothing, total = NPU.npu_add_rms_norm_quant(x1, x2, gamma, scales, zeros)
    same(q, NPU.npu_quantize(y, scales, zeros, torch.qint8, -1))
    same(total, x)
    assert nothing.numel() == 0
    y1, y2, total, s1, s2 = NPU.npu_add_rms_norm_dynamic_quant(
        x1, x2, gamma, smooth_scale1=smooth, output_mask=[True, False]
    )
    want_q, want_s = NPU.npu_dynamic_quant(y, smooth_scales=smooth)
    same(y1, want_q)
    same(s1, want_s)
    same(total, x)
    assert y2.numel() == s2.numel() == 0
    both = NPU.npu_add_rms_norm_dynamic_quant(x1, x2, gamma, smooth_scale1=smooth, smooth_scale2=smooth)
    same(both[1], want_q)
    same(both[4], want_s)


def test_npu_dynamic_quant(dtype):
    x = torch.randn(3, 5, 16).to(dtype)
    x[1, 2] = 0
    q, scale = NPU.npu_dynamic_quant(x)
    assert (q.dtype, scale.dtype, scale.shape) == (torch.int8, torch.float32, (3, 5))
    assert not q[1, 2].any()
    torch.testing.assert_close(q.float() * scale.unsqueeze(-1), x.float(), atol=scale.max().item() * 0.51, rtol=0)
    grouped, _ = NPU.npu_dynamic_quant(x[0], smooth_scales=torch.eye(2, 16).to(dtype), group_index=torch.tensor([2, 5]))
    assert [row.nonzero().flatten().tolist() for row in grouped] == [[0], [0], [1], [1], [1]]


def test_npu_quantize_by_dtype_code_or_name():
    x, scales, zeros = torch.randn(4, 6) * 3, torch.rand(6) + 0.05, torch.randn(6)
    wanted = (x / scales + zeros).round().clamp(-128, 127).to(torch.int8)
    for dtype in (torch.qint8, torch.int8, 1, 12):
        same(NPU.npu_quantize(x, scales, zeros, dtype), wanted)
    multiplied = NPU.npu_quantize(x, scales[:4], None, torch.quint8, 0, False)
    same(multiplied, (x * scales[:4, None]).round().clamp(0, 255).to(torch.uint8))
    with pytest.raises(NotImplementedError, match="type code 16"):
        NPU.npu_quantize(x, scales, zeros, torch.quint4x2)


def test_npu_transpose_batchmatmul():
    a, b = torch.randn(3, 4, 8), torch.randn(3, 8, 6)
    wanted = torch.bmm(a, b).transpose(0, 1)
    found = NPU.npu_transpose_batchmatmul(a, b)
    assert found.is_contiguous()
    torch.testing.assert_close(found, wanted)
    transposed = NPU.npu_transpose_batchmatmul(a.transpose(0, 1).contiguous(), b, perm_x1=[1, 0, 2])
    torch.testing.assert_close(transposed, wanted)
    split = NPU.npu_transpose_batchmatmul(a, b, batch_split_factor=3)
    torch.testing.assert_close(split, wanted.permute(1, 0, 2))
    with pytest.raises(NotImplementedError, match="bias"):
        NPU.npu_transpose_batchmatmul(a, b, bias=torch.zeros(6))


def test_npu_swiglu_and_rotary_mul(dtype):
    x = torch.randn(3, 16).to(dtype)
    a, b = x.float().chunk(2, -1)
    same(NPU.npu_swiglu(x), (functional.silu(a) * b).to(dtype))
    r1, r2 = torch.randn(3, 16).to(dtype), torch.randn(3, 16).to(dtype)
    same(NPU.npu_rotary_mul(x, r1, r2), GX.rotary(x, r1, r2))
    turned = torch.stack((-x[:, 1::2], x[:, ::2]), -1).flatten(1)
    same(NPU.npu_rotary_mul(x, r1, r2, "interleave"), x * r1 + turned * r2)


@pytest.mark.parametrize("mode", ["Norm", "PA"])
@pytest.mark.parametrize("slots", [(1, 4, 0), (-1, 4, 0), (5, -1, -1), (-1, -1, -1), (-1, 0, -1)], ids=str)
def test_npu_kv_rmsnorm_rope_cache_writes_rows_that_have_a_slot_and_nothing_else(slots, mode):
    kv, gamma, cos, sin = torch.randn(2, 1, 3, 12), torch.randn(8), torch.randn(2, 1, 3, 4), torch.randn(2, 1, 3, 4)
    shape = (2, 1, 6) if mode == "Norm" else (3, 4, 1)
    caches = torch.randn(*shape, 4), torch.randn(*shape, 8)
    wanted = [cache.clone() for cache in caches]
    index = torch.tensor([[*slots], [2, -1, 3]] if mode == "Norm" else [*slots, 11, -1, 7])
    made = torch.ops.npu.npu_kv_rmsnorm_rope_cache_v2(
        kv, gamma, cos, sin, index, *caches, cache_mode=mode, is_output_kv=True
    )
    for row, slot in enumerate(index.flatten().tolist()):
        for cache, part in zip(wanted, made, strict=True):
            if slot >= 0 and mode == "Norm":
                cache[row // 3, :, slot] = part[row // 3, :, row % 3]
            elif slot >= 0:
                cache.flatten(0, 1)[slot] = part[row // 3, :, row % 3]
    for cache, other in zip(caches, wanted, strict=True):
        assert torch.equal(cache, other)


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD", "BNSD_BSND"])
@pytest.mark.parametrize("options", [{}, {"sparse_mode": 3}, {"sparse_mode": 2}, {"mask": 4}, {"mask": 2}], ids=str)
def test_npu_attention_of_sequences_of_one_length_is_that_of_each(layout, options):
    query, key, value = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)

    def laid_out(x: Tensor) -> Tensor:
        x = x.transpose(1, 2).contiguous() if layout in ("BSH", "BSND") else x
        return x.flatten(2) if layout == "BSH" else x

    shape = {2: (3, 5), 4: (2, 1, 3, 5)}.get(options.get("mask"))
    mask = None if shape is None else torch.randn(shape) > 0.5
    given = {"input_layout": layout, "num_heads": 4, "num_key_value_heads": 2, "scale": 0.3, "atten_mask": mask}
    given["sparse_mode"] = options.get("sparse_mode", 0)
    args = [laid_out(x) for x in (query, key, value)]
    whole, _ = torch.ops.npu.npu_fused_infer_attention_score(*args, **given)
    each, _ = torch.ops.npu.npu_fused_infer_attention_score(*args, **given, actual_seq_lengths_kv=[5, 5])
    assert whole.stride() == each.stride()
    torch.testing.assert_close(whole, each)


def test_npu_scatter_nd_update():
    x, updates = torch.zeros(4, 3), torch.randn(2, 3)
    indices = torch.tensor([[3], [1]])
    wanted = x.clone()
    wanted[[3, 1]] = updates
    same(NPU.npu_scatter_nd_update(x, indices, updates), wanted)
    assert not x.any()
    assert NPU.npu_scatter_nd_update_(x, indices, updates) is x
    same(x, wanted)


# Bad input, and the import


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: GX.rms_norm(x, torch.ones(3), 1e-6), r"weight must have the shape \[8\]"),
        (lambda x: GX.add_rms_norm(x, x[:1], None, 1e-6), "x1 and x2 must have one shape"),
        (lambda x: GX.silu_mul(x, x.half()), "gate and up must have one shape and type"),
        (lambda x: GX.rotary(x, x[:, :4], x[:, :4]), "last dimension of cos must be that of x, 8"),
        (lambda x: GX.rotary(x[:, :3], x[:, :3], x[:, :3]), "must be even; it is 3"),
        (lambda x: GX.rotary_write_(x, x, x, x.half(), torch.arange(4), 0), "Cast it first"),
        (lambda x: GX.dynamic_quant(x, mode="multiply"), "mode must be one of divide, reciprocal"),
        (lambda x: GX.static_quant(x, torch.ones(3)), "scale must be one number or have the shape"),
        (lambda x: NPU.npu_rms_norm(x, torch.ones(4)), "gamma must have the trailing shape"),
        (lambda x: NPU.npu_swiglu(x[:, :3]), "odd: 3"),
    ],
)
@pytest.mark.parametrize("fake", [False, True])
def test_bad_input_is_one_sentence(call, message, fake):
    from torch._subclasses.fake_tensor import FakeTensorMode

    if fake:
        with FakeTensorMode() as mode:
            mode.allow_non_fake_inputs = True
            with pytest.raises(RuntimeError, match=message):
                call(torch.randn(4, 8))
    else:
        with pytest.raises(RuntimeError, match=message):
            call(torch.randn(4, 8))


def test_the_import_is_light_and_leaves_the_real_torch_npu_alone(tmp_path):
    (tmp_path / "torch_npu.py").write_text("raise RuntimeError('imported')")
    program = """
import sys, torch
import graphex.ops
heavy = {"torch._dynamo", "torch._inductor", "triton", "sympy"} & set(sys.modules)
print(not heavy, "torch_npu" in sys.modules)
print(hasattr(torch.ops.npu, "npu_rms_norm"), hasattr(torch.ops.graphex, "rms_norm"))
"""
    path = [str(tmp_path), *sys.path]
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{program}"], capture_output=True, text=True
    )
    light, *rest = result.stdout.split()
    assert rest == ["False", "False", "True"], result.stderr
    # Where graphex is not installed, its import registers the backend, for which it loads Dynamo.
    assert light == "True" or not entry_points(group="torch_dynamo_backends", name="graphex")


def test_without_triton_the_references_run():
    program = """
import sys
sys.modules["triton"] = None
import torch, graphex.ops
y, _ = torch.ops.graphex.rms_norm(torch.ones(2, 4), None, 0.0)
print(y.sum().item(), graphex.ops.has_kernel("graphex::rms_norm", "cuda"))
"""
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{program}"], capture_output=True, text=True
    )
    assert result.stdout.strip() == "8.0 False", result.stderr
