"""Arguments for every op of the library: ordinary sizes, odd sizes, strided inputs, and each option at least once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

EPS = 1e-5


@dataclass(frozen=True)
class Maker:
    """Makes random tensors of one type on one device."""

    dtype: torch.dtype
    device: str = "cpu"
    grad: bool = False

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.randn(shape, dtype=torch.float32).to(dtype or self.dtype).to(self.device)
        return x.requires_grad_() if self.grad else x

    def positive(self, *shape: int) -> Tensor:
        return torch.rand(shape).add(0.01).to(self.device)

    def row_strided(self, *shape: int) -> Tensor:
        """A slice of something wider: rows with a gap between them."""
        wide = self(*shape[:-1], shape[-1] * 2 + 1)
        return wide[..., 1 : 1 + shape[-1]].detach().requires_grad_(self.grad)

    def transposed(self, a: int, b: int, c: int) -> Tensor:
        return self(b, a, c).transpose(0, 1).detach().requires_grad_(self.grad)

    def angles(self, *shape: int) -> tuple[Tensor, Tensor]:
        angle = torch.rand(shape).mul(6.28)
        return angle.cos().to(self.dtype).to(self.device), angle.sin().to(self.dtype).to(self.device)

    def index(self, *values: int) -> Tensor:
        return torch.tensor(values, device=self.device)


@dataclass(frozen=True)
class Sample:
    args: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)


def _norm_inputs(make: Maker) -> Iterator[tuple[Tensor, Tensor | None, dict[str, Any]]]:
    yield make(2, 3, 16), make(16), {}
    yield make(3, 7), make(7), {"weight_offset": 1.0, "cast_before_weight": False}
    yield make(5), None, {}
    yield make.row_strided(4, 8), make(8), {"weight_offset": 1.0}
    yield make.transposed(3, 4, 8), make(8), {"cast_before_weight": False}
    yield make(0, 8), make(8), {}
    yield make(2, 8), make(8, dtype=torch.float32), {}


def rms_norm(make: Maker) -> Iterator[Sample]:
    for x, weight, options in _norm_inputs(make):
        yield Sample((x, weight, EPS), options)


def add_rms_norm(make: Maker) -> Iterator[Sample]:
    for x, weight, options in _norm_inputs(make):
        yield Sample((x, make(*x.shape), weight, EPS), options)
    yield Sample((make(2, 8), make.row_strided(2, 8), make(8), EPS))


def rms_norm_add_rms_norm(make: Maker) -> Iterator[Sample]:
    for x, weight, options in _norm_inputs(make):
        how = options.get("weight_offset", 0.0), options.get("cast_before_weight", True)
        following = {f"next_{name}": value for name, value in options.items()}
        yield Sample((x, make(*x.shape), weight, EPS, *how, make(x.shape[-1]), 1e-3), following)
    residual, wide = make.row_strided(2, 8), make(8, dtype=torch.float32)
    yield Sample((make(2, 8), residual, make(8), EPS, 1.0, False, None, EPS))
    yield Sample((make.transposed(3, 4, 8), make.transposed(3, 4, 8), None, EPS, 0.0, True, wide, EPS, 1.0))


_DYNAMIC: tuple[dict[str, Any], ...] = (
    {},
    {"mode": "reciprocal", "min_scale": 1e-5, "quant_min": -127.0},
    {"min_amax": 1e-5, "keepdim": False},
    {"divisor": 448.0, "quant_min": -448.0, "quant_max": 448.0, "dtype": torch.float8_e4m3fn, "min_scale": 1e-12},
)
_STATIC: tuple[dict[str, Any], ...] = (
    {},
    {"mode": "reciprocal", "quant_min": -127.0},
    {"mode": "multiply", "zero_point_before_round": True},
    {"dtype": torch.uint8, "quant_min": 0.0, "quant_max": 255.0},
)


def _static_parameters(make: Maker, columns: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    yield make.positive(columns), None
    yield make.positive(1), make.index(3)
    yield make.positive(columns), torch.randint(-5, 5, (columns,), dtype=torch.int32, device=make.device)
    yield torch.tensor(0.25, device=make.device), torch.tensor(2.0, device=make.device)


def dynamic_quant(make: Maker) -> Iterator[Sample]:
    for options in _DYNAMIC:
        yield Sample((make(2, 3, 16),), options)
    yield Sample((make.row_strided(4, 7), make(7)))
    yield Sample((make.transposed(3, 4, 8),), {"keepdim": False})
    yield Sample((make(3, 8),), {"compute_dtype": make.dtype, "scale_dtype": torch.float32})
    yield Sample((make(0, 8),))


def static_quant(make: Maker) -> Iterator[Sample]:
    for options, parameters in zip(_STATIC, _static_parameters(make, 8), strict=True):
        yield Sample((make(3, 8), *parameters), options)
    yield Sample((make(3, 8), torch.tensor(0.25, device=make.device), torch.full((8,), 0.75, device=make.device)))
    yield Sample((make.row_strided(4, 7), make.positive(7)))
    yield Sample((make.transposed(3, 4, 8), make.positive(8)), {"compute_dtype": make.dtype})
    yield Sample((make(0, 8), make.positive(8)))


def rms_norm_dynamic_quant(make: Maker) -> Iterator[Sample]:
    for (x, weight, options), quant in zip(_norm_inputs(make), _DYNAMIC * 2, strict=False):
        yield Sample((x, weight, None, EPS), options | quant)
    yield Sample((make(3, 8), make(8), make(8), EPS))


def add_rms_norm_dynamic_quant(make: Maker) -> Iterator[Sample]:
    for (x, weight, options), quant in zip(_norm_inputs(make), _DYNAMIC * 2, strict=False):
        yield Sample((x, make(*x.shape), weight, None, EPS), options | quant)
    yield Sample((make(3, 8), make(3, 8), make(8), make(8), EPS))


def rms_norm_static_quant(make: Maker) -> Iterator[Sample]:
    for at, ((x, weight, options), quant) in enumerate(zip(_norm_inputs(make), _STATIC * 2, strict=False)):
        scale, zero_point = list(_static_parameters(make, x.shape[-1]))[at % 4]
        yield Sample((x, weight, scale, zero_point, EPS), options | quant)


def add_rms_norm_static_quant(make: Maker) -> Iterator[Sample]:
    for sample in rms_norm_static_quant(make):
        x, *rest = sample.args
        yield Sample((x, make(*x.shape), *rest), sample.options)


def silu_mul(make: Maker) -> Iterator[Sample]:
    yield Sample((make(2, 3, 16), make(2, 3, 16)))
    yield Sample((make.row_strided(3, 7), make.row_strided(3, 7)))
    yield Sample((make.transposed(3, 4, 8), make.transposed(3, 4, 8)))
    yield Sample((make(5), make(5)))
    yield Sample((make(0, 4), make(0, 4)))


def embedding(make: Maker) -> Iterator[Sample]:
    yield Sample((make(11, 16), make.index(3, 0, 10, 3)))
    yield Sample((make(5, 7), torch.randint(5, (2, 3, 2), dtype=torch.int32, device=make.device)))
    yield Sample((make.row_strided(6, 9), torch.randint(6, (4, 5), device=make.device)[:, ::2]))
    yield Sample((make(3, 1100), torch.tensor(2, device=make.device)))
    yield Sample((make(3, 4), torch.empty(2, 0, dtype=torch.int64, device=make.device)))
    yield Sample((make(1, 1), make.index(0)))


def experts(make: Maker) -> Iterator[Sample]:
    """One token, some, and so many that several share an expert; both layouts and gates."""
    for tokens, times, transposed, bias in ((1, 2, False, False), (3, 2, True, True), (20, 2, False, True)):
        count, hidden, inner = 5, 24, 20
        gate_up, down = (hidden, 2 * inner), (inner, hidden)
        if not transposed:
            gate_up, down = gate_up[::-1], down[::-1]
        chosen = torch.arange(tokens * times, device=make.device) * 3 % count
        weights = torch.rand(tokens * times, device=make.device).to(make(1).dtype if bias else torch.float32)
        biases = (make(count, 2 * inner), make(count, hidden)) if bias else (None, None)
        how = (transposed, "clamped" if transposed else "silu")
        stacked = (make(count, *gate_up), biases[0], make(count, *down), biases[1])
        yield Sample((make(tokens, hidden), chosen, weights, *stacked, *how))


def route(make: Maker) -> Iterator[Sample]:
    """Logits without equal ones, of which either could be chosen."""
    for tokens, count, top, scores, groups in (
        (1, 8, 2, "softmax", 1),
        (3, 60, 4, "chosen", 1),
        (2, 32, 6, "sigmoid", 4),
    ):
        order = torch.stack([torch.randperm(count, device=make.device) for _ in range(tokens)])
        logits, dtype = (order * 0.125 - 1).to(make(1).dtype), make(1).dtype
        bias = torch.arange(count, device=make.device) / 1024 if groups > 1 else None
        how = {"normalised": scores != "chosen", "scale": 2.5, "groups": groups, "top_groups": max(1, groups // 2)}
        yield Sample((logits, bias, top, scores, dtype), how)


def routed_experts(make: Maker) -> Iterator[Sample]:
    """One token and some, both layouts and gates, and scores of all experts and of the chosen ones."""
    chosen = ((1, 6, 2, "softmax"), (3, 20, 4, "chosen"), (2, 5, 1, "sigmoid"))
    for (tokens, count, top, scores), transposed in zip(chosen, (False, True, False), strict=True):
        hidden, inner = 24, 20
        gate_up, down = (hidden, 2 * inner), (inner, hidden)
        if not transposed:
            gate_up, down = gate_up[::-1], down[::-1]
        order = torch.stack([torch.randperm(count, device=make.device) for _ in range(tokens)])
        logits, dtype = (order * 0.125 - 1).to(make(1).dtype), make(1).dtype
        biases = (make(count, 2 * inner), make(count, hidden)) if transposed else (None, None)
        how = (transposed, "clamped" if transposed else "silu")
        stacked = (make(count, *gate_up), biases[0], make(count, *down), biases[1])
        yield Sample((make(tokens, hidden), logits, top, scores, dtype, scores == "softmax", 0.0, 1.0, *stacked, *how))


def odd_mm(make: Maker) -> Iterator[Sample]:
    """Every eighth, fourth and second row is aligned; then sizes that are for the library."""
    yield Sample((make(512, 64), make(265, 64).t()))
    yield Sample((make(272, 128), make(518, 128).t()))
    yield Sample((make(112, 64), make(300, 64).t()))
    yield Sample((make(3, 5), make(7, 5).t()))


def argmax(make: Maker) -> Iterator[Sample]:
    yield Sample((make(2, 5000),))
    yield Sample((make(1, 7).round(),))
    nan = make(3, 40)
    nan[1, 5:7] = torch.nan
    yield Sample((nan,))


def append_tokens_(make: Maker) -> Iterator[Sample]:
    """With and without places to count, a padding token, last tokens and a report; before and after all are done."""
    settings = ((False, False, 5), (False, True, 5), (True, True, 5), (False, True, 12), (True, False, 5))
    for done, extra, last in settings:
        tokens, token = torch.zeros(3, 9, dtype=torch.long, device=make.device), make.index(0, 0, 0).view(3, 1)
        state = (tokens, token, make.index(4)[0], torch.tensor([True, False, True], device=make.device))
        ended = torch.tensor(done, device=make.device)
        counted = (make.index(6)[0], make.index(7, 7, 8).view(3, 1)) if extra else (None, None)
        others = (make.index(1)[0], make.index(5, last)) if extra else (None, None)
        report = torch.full((3, 4), -1, device=make.device) if last == 12 or not extra else None
        yield Sample((make.index(12, 11, 5), *state, ended, *counted, *others, report))


def silu_mul_dynamic_quant(make: Maker) -> Iterator[Sample]:
    for sample, options in zip(silu_mul(make), _DYNAMIC * 2, strict=False):
        yield Sample(sample.args, options)
    yield Sample((make(3, 8), make(3, 8), make(8)))


def silu_mul_static_quant(make: Maker) -> Iterator[Sample]:
    for sample, options in zip(silu_mul(make), _STATIC * 2, strict=False):
        yield Sample((*sample.args, make.positive(sample.args[0].shape[-1])), options)


def _linear_inputs(make: Maker) -> Iterator[tuple[Tensor, list[Tensor], list[Tensor | None]]]:
    """One row and several, one weight and several, with and without biases, strided weights and inputs."""
    yield make(1, 1, 32), [make(24, 32), make(8, 32), make(8, 32)], [None, None, None]
    yield make(3, 5, 16), [make(7, 16)], [make(7)]
    yield make(19), [make.row_strided(5, 19), make(3, 19)], [make(5), None]
    yield make.row_strided(4, 8), [make(6, 8)], [None]
    yield make.transposed(3, 4, 8), [make.row_strided(6, 8)], [make(6)]
    yield make(0, 8), [make(3, 8), make(2, 8)], [None, make(2)]
    yield make(70, 8), [make(3, 8)], [None]


def linears(make: Maker) -> Iterator[Sample]:
    for x, weights, biases in _linear_inputs(make):
        yield Sample((x, weights, biases))
        if len(weights) == 1:
            yield Sample((x, weights, biases), {"residual": make(*x.shape[:-1], weights[0].shape[0])})
    yield Sample((make(2, 8), [], []))


def rms_norm_linears(make: Maker) -> Iterator[Sample]:
    for at, (x, weights, biases) in enumerate(_linear_inputs(make)):
        gain = None if at == 2 else make(x.shape[-1])
        yield Sample((x, gain, EPS, float(at % 2), at % 3 == 0, weights, biases), {"keeps_norm": at % 2 == 1})


def silu_mul_linears(make: Maker) -> Iterator[Sample]:
    for x, weights, biases in _linear_inputs(make):
        residual = make(*x.shape[:-1], weights[0].shape[0]) if len(weights) == 1 else None
        yield Sample((x, make(*x.shape), weights, biases, residual))


def gated_linears(make: Maker) -> Iterator[Sample]:
    for at, (x, weights, biases) in enumerate(_linear_inputs(make)):
        gate, up = weights[0], make(*weights[0].shape)
        yield Sample((x, [gate, up], [biases[0], None], ("silu", "gelu", "gelu_tanh")[at % 3]))


def rms_norm_gated_linears(make: Maker) -> Iterator[Sample]:
    for at, (x, weights, biases) in enumerate(_linear_inputs(make)):
        gain = None if at == 2 else make(x.shape[-1])
        gate, up = weights[0], make(*weights[0].shape)
        yield Sample((x, gain, EPS, float(at % 2), at % 3 == 0, [up, gate], [None, biases[0]]))


def _rotary_inputs(make: Maker) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    yield make(2, 3, 5, 8), *(t.unsqueeze(1) for t in make.angles(2, 5, 8))
    yield make(2, 5, 3, 6), *(t.unsqueeze(2) for t in make.angles(1, 5, 6))
    heads_first = make(2, 5, 3, 8).transpose(1, 2).detach().requires_grad_(make.grad)
    yield heads_first, *(t.unsqueeze(1) for t in make.angles(2, 5, 8))
    yield make.row_strided(2, 3, 4, 8), *make.angles(4, 8)
    yield make(6, 4), *make.angles(6, 4)


def rotary(make: Maker) -> Iterator[Sample]:
    for inputs in _rotary_inputs(make):
        yield Sample(inputs)
        yield Sample(inputs, {"interleaved": True})
    x, cos, sin = next(_rotary_inputs(make))
    yield Sample((x, cos[..., :4], sin[..., :4]), {"interleaved": True})
    yield Sample((x, cos.float(), sin.float()))


def rotary_qk(make: Maker) -> Iterator[Sample]:
    for q, cos, sin in _rotary_inputs(make):
        head = next((d for d in range(q.dim() - 1) if cos.dim() == q.dim() and cos.shape[d] == 1 < q.shape[d]), None)
        k = q if head is None else q.narrow(head, 0, 1)
        yield Sample((q, k.detach().clone().requires_grad_(make.grad), cos, sin))
    yield Sample((make(2, 4, 5, 8), make(2, 2, 5, 8), *make.angles(5, 8)), {"interleaved": True})


def rotary_write_(make: Maker) -> Iterator[Sample]:
    angles = tuple(t.unsqueeze(1) for t in make.angles(2, 3, 8))
    yield Sample((make(2, 4, 3, 8), *angles, make(2, 4, 9, 8), make.index(8, 0, 4)))
    yield Sample((make(2, 4, 3, 8), *angles, make(2, 4, 9, 8), make.index(1, 2, 5)), {"interleaved": True})
    flat = tuple(t.unsqueeze(2) for t in make.angles(2, 3, 8))
    yield Sample((make(2, 3, 4, 8), *flat, make(2, 9, 4, 8), make.index(1, 2, 7)), {"dim": 1})


def rotary_qkv_write_(make: Maker) -> Iterator[Sample]:
    for sample in rotary_write_(make):
        k, cos, sin, cache, positions = sample.args
        q = torch.cat((k, k), 1 if cos.shape[1] == 1 else 2)
        yield Sample((q, k, make(*k.shape), cos, sin, cache, make(*cache.shape), positions), sample.options)


def attention(make: Maker) -> Iterator[Sample]:
    q, k, v = make(2, 4, 1, 16), make(2, 2, 24, 16), make(2, 2, 24, 16)
    seen = torch.arange(24, device=make.device) < 17
    yield Sample((q, k, v, seen[None, None, None], 0.25))
    yield Sample((q, k, v, None, 0.25))
    yield Sample((q, k, v, seen[None, None, None], 0.25), {"sinks": make(q.shape[1])})
    yield Sample((q, k, v, torch.zeros(1, 24, device=make.device, dtype=make.dtype).masked_fill(~seen, -1e4), 0.25))
    yield Sample((make(1, 4, 3, 16), make(1, 4, 7, 16), make(1, 4, 7, 16), None, 0.25), {"is_causal": True})
    hidden = torch.ones(3, 7, dtype=torch.bool, device=make.device)
    hidden[1] = False  # attends to nothing
    yield Sample((make(1, 4, 3, 16), make(1, 1, 7, 16), make(1, 1, 7, 16), hidden, 0.25), {"softcap": 3.0})
    heads = make(2, 3, 4, 16).transpose(1, 2), make(2, 9, 2, 32)[..., :16].transpose(1, 2)
    yield Sample((*heads, make(2, 9, 2, 16).transpose(1, 2), hidden[:, :1].expand(2, 4, 3, 9), 0.5))


def paged_attention(make: Maker) -> Iterator[Sample]:
    pages, lengths = make.index(3, 1, 0, 2, 4, 0).view(2, 3), make.index(11, 5)
    yield Sample((make(2, 4, 1, 16), make(5, 2, 4, 16), make(5, 2, 4, 8), pages, lengths, 0.25))
    caches = (make(5, 4, 2, 16).transpose(1, 2) for _ in range(2))  # positions first
    yield Sample((make(2, 4, 3, 16), *caches, pages.int(), lengths.int(), 0.25), {"is_causal": True})


def rotary_attention_(make: Maker) -> Iterator[Sample]:
    def given(tokens: int, angles: int = 16) -> tuple[Any, ...]:
        rows = make(2, 4, tokens, 16), make(2, 2, tokens, 16), make(2, 2, tokens, 16)
        positions = make.index(*range(16, 16 + tokens))
        caches = make(2, 2, 24, 16), make(2, 2, 24, 16)
        return *rows, make(2, 1, tokens, angles), make(2, 1, tokens, angles), *caches, positions, 2

    seen = (torch.arange(24, device=make.device) < 17)[None, None, None]
    yield Sample((*given(1), False, seen, 0.25))
    yield Sample((*given(1), False, None, 0.25), {"softcap": 5.0})
    yield Sample((*given(1, angles=8), True, seen, 0.25))
    yield Sample((*given(2), False, seen, 0.25))
    for tokens, how in ((1, (0.0, True)), (1, (1.0, False)), (2, (0.0, True))):
        gains = make(16), make(16)
        yield Sample((*given(tokens), False, seen, 0.25, 0.0, *gains, EPS, *how))
    yield Sample((*given(1, angles=8), True, seen, 0.25, 0.0, make(16), make(16), EPS))
    yield Sample((*given(1), False, seen, 0.25), {"sinks": make(4)})


def npu_rms_norm(make: Maker) -> Iterator[Sample]:
    yield Sample((make(2, 3, 16), make(16)))
    yield Sample((make(2, 3, 4), make(3, 4), 1e-5))
    yield Sample((make.transposed(3, 4, 8), make(8)))


def npu_add_rms_norm(make: Maker) -> Iterator[Sample]:
    for sample in npu_rms_norm(make):
        x, *rest = sample.args
        yield Sample((x, make(*x.shape), *rest))


def npu_add_rms_norm_quant(make: Maker) -> Iterator[Sample]:
    inputs = make(4, 16), make(4, 16), make(16)
    yield Sample((*inputs, make.positive(16), None))
    yield Sample((*inputs, make.positive(16), make.positive(16)), {"div_mode": False, "epsilon": EPS})
    yield Sample((*inputs, make.positive(16), None, make(16), make.positive(16), make.positive(16)))


def npu_add_rms_norm_dynamic_quant(make: Maker) -> Iterator[Sample]:
    inputs = make(2, 4, 16), make(2, 4, 16), make(16)
    yield Sample(inputs)
    yield Sample(inputs, {"smooth_scale1": make(16), "output_mask": [True, False], "epsilon": EPS})
    yield Sample(inputs, {"smooth_scale1": make(16), "smooth_scale2": make(16), "beta": make(16)})


def npu_dynamic_quant(make: Maker) -> Iterator[Sample]:
    yield Sample((make(2, 3, 16),))
    yield Sample((make(3, 16),), {"smooth_scales": make(16)})
    yield Sample((make(5, 16),), {"smooth_scales": make(3, 16), "group_index": make.index(2, 3, 5)})
    yield Sample((make(3, 16),), {"dst_type": torch.float8_e4m3fn})


def npu_quantize(make: Maker) -> Iterator[Sample]:
    yield Sample((make(4, 16), make.positive(16), None, 12))
    yield Sample((make(4, 16), make.positive(16), make.positive(16), 13, -1))
    yield Sample((make(4, 3, 16), make.positive(3), None, 14, 1, False))
    yield Sample((make(4, 16), make.positive(1), make.positive(1), 1, -1))


def npu_transpose_batchmatmul(make: Maker) -> Iterator[Sample]:
    yield Sample((make(3, 4, 8), make(3, 8, 16)))
    yield Sample((make(4, 3, 8), make(3, 8, 16)), {"perm_x1": [1, 0, 2]})
    yield Sample((make(3, 4, 8), make(3, 16, 8)), {"perm_x2": [0, 2, 1], "perm_y": [0, 1, 2]})
    yield Sample((make(4, 3, 8), make(4, 8, 6)), {"batch_split_factor": 2})


def npu_swiglu(make: Maker) -> Iterator[Sample]:
    yield Sample((make(3, 16),))
    yield Sample((make(2, 6, 5), 1))
    yield Sample((make.row_strided(3, 6),))


def npu_rotary_mul(make: Maker) -> Iterator[Sample]:
    yield Sample((make(2, 3, 4, 8), *make.angles(1, 1, 4, 8)))
    yield Sample((make(2, 3, 4, 8), *make.angles(2, 1, 4, 8), "interleave"))


def npu_dtype_cast(make: Maker) -> Iterator[Sample]:
    yield Sample((make(3, 4), torch.float32))
    yield Sample((make(3, 4), torch.float16))


def npu_scatter_nd_update(make: Maker) -> Iterator[Sample]:
    yield Sample((make(6, 4), make.index(0, 3).unsqueeze(-1), make(2, 4)))
    yield Sample((make(6, 4, 3), make.index(0, 3, 2, 1).view(2, 2), make(2, 3)))


def npu_fused_infer_attention_score(make: Maker) -> Iterator[Sample]:
    heads: dict[str, Any] = {"num_heads": 4, "num_key_value_heads": 2, "scale": 0.5}
    yield Sample((make(2, 3, 32), make(2, 5, 16), make(2, 5, 16)), heads)
    yield Sample((make(2, 4, 3, 8), make(2, 2, 5, 8), make(2, 2, 5, 8)), {**heads, "input_layout": "BNSD"})
    yield Sample(
        (make(2, 3, 4, 8), make(2, 5, 2, 8), make(2, 5, 2, 6)),
        {**heads, "input_layout": "BSND", "sparse_mode": 3, "softmax_lse_flag": True},
    )
    yield Sample(
        (make(2, 4, 3, 8), make(2, 2, 5, 8), make(2, 2, 5, 8)),
        {**heads, "input_layout": "BNSD_BSND", "atten_mask": torch.ones(3, 5, dtype=torch.bool).triu(1)},
    )
    table = make.index(3, 1, 0, 2).view(2, 2)
    paged = {"block_table": table, "block_size": 4, "actual_seq_lengths_kv": [7, 5]}
    yield Sample((make(2, 1, 32), make(4, 4, 16), make(4, 4, 16)), {**heads, **paged})
    yield Sample(
        (make(3, 4, 8), make(4, 2, 4, 8), make(4, 2, 4, 8)),
        {**heads, **paged, "input_layout": "TND", "actual_seq_lengths": [1, 3], "softmax_lse_flag": True},
    )


def npu_fused_infer_attention_score_v2(make: Maker) -> Iterator[Sample]:
    options = {"num_query_heads": 4, "num_key_value_heads": 2, "softmax_scale": 0.5, "input_layout": "BNSD"}
    yield Sample((make(2, 4, 3, 8), make(2, 2, 5, 8), make(2, 2, 5, 8)), options)


def npu_kv_rmsnorm_rope_cache(make: Maker) -> Iterator[Sample]:
    angles = make.angles(2, 1, 3, 4)
    slots = make.index(0, 2, 4, 1, 3, 5).view(2, 3)
    yield Sample((make(2, 1, 3, 12), make(8), *angles, slots, make(2, 1, 6, 4), make(2, 1, 6, 8)))
    pages = make.index(11, 0, 4, -1, 7, 2)
    yield Sample(
        (make(2, 1, 3, 12), make(8), *angles, pages, make(3, 4, 1, 4), make(3, 4, 1, 8)),
        {"cache_mode": "PA", "is_output_kv": True},
    )


def _prolog(make: Maker) -> tuple[Tensor, ...]:
    weights = make(16, 6), make(6, 2 * (5 + 4)), make(2, 5, 8), make(16, 8 + 4), make(6), make(8)
    return make(3, 16), *weights, *reversed(make.angles(3, 4))


def npu_mla_prolog_v3(make: Maker) -> Iterator[Sample]:
    caches = make(3, 4, 1, 8), make(3, 4, 1, 4)
    yield Sample((*_prolog(make), *caches), {"cache_index": make.index(5, 0, 7)})
    yield Sample((*_prolog(make), *caches), {"cache_index": make.index(5, -1, 7), "query_norm_flag": True})


def npu_mla_prolog(make: Maker) -> Iterator[Sample]:
    yield Sample((*_prolog(make), make.index(5, 0, 7), make(3, 4, 1, 8), make(3, 4, 1, 4)))


def scatter_update(make: Maker) -> Iterator[Sample]:
    yield Sample((make(2, 3, 6, 4), make.index(0, 3), make(2, 3, 2, 4), -2))
    yield Sample((make(2, 6), make.index(1, 5), make(2, 1), 1))


def npu_add_rms_norm_v2(make: Maker) -> Iterator[Sample]:
    yield Sample((make(2, 3, 8), make(2, 3, 8), make(8)))


def _bytes(make: Maker, *shape: int) -> Tensor:
    return (make(*shape, dtype=torch.float32) * 40).clamp(-128, 127).detach().to(torch.int8)


def npu_quant_matmul(make: Maker) -> Iterator[Sample]:
    a, b = _bytes(make, 3, 16), _bytes(make, 16, 5)
    yield Sample((a, b, make.positive(5) / 100))
    bias = _bytes(make, 5).to(torch.int32)
    yield Sample(
        (a, b, make.positive(5)),
        {"pertoken_scale": make.positive(3), "bias": bias, "output_dtype": torch.bfloat16},
    )


def npu_weight_quant_batchmatmul(make: Maker) -> Iterator[Sample]:
    yield Sample((make(3, 16), _bytes(make, 16, 5), make(5), make(5)), {"bias": make(5)})
    yield Sample((make(3, 16), _bytes(make, 16, 5), make(2, 5)), {"antiquant_group_size": 8})


def npu_moe_gating_top_k_softmax(make: Maker) -> Iterator[Sample]:
    yield Sample((make(5, 8),), {"k": 3})
    yield Sample((make(3, 8), make.index(0, 1, 0).bool(), 2))


def npu_moe_gating_top_k(make: Maker) -> Iterator[Sample]:
    yield Sample((make(5, 8), 2))
    options = {"k_group": 2, "group_count": 4, "group_select_mode": 1, "norm_type": 1, "routed_scaling_factor": 2.5}
    yield Sample((make(5, 16), 3), {**options, "bias": make(16), "out_flag": True})
    yield Sample((make(5, 16), 3), {**options, "group_select_mode": 0, "norm_type": 0, "renorm": 1})


def npu_moe_init_routing(make: Maker) -> Iterator[Sample]:
    experts = make.index(2, 0, 1, 2, 0, 1).view(3, 2).int()
    yield Sample((make(3, 8), make.index(0, 3, 1, 4, 2, 5).view(3, 2).int(), experts, 3))


def npu_moe_init_routing_v2(make: Maker) -> Iterator[Sample]:
    experts = make.index(2, 0, 1, 2, 0, 3).view(3, 2).int()
    yield Sample((make(3, 8), experts), {"expert_num": 4, "quant_mode": -1})
    options = {
        "expert_num": 4,
        "quant_mode": -1,
        "active_expert_range": [1, 3],
        "expert_tokens_num_type": 1,
        "row_idx_type": 1,
    }
    yield Sample((make(3, 8), experts), options)


def npu_moe_compute_expert_tokens(make: Maker) -> Iterator[Sample]:
    yield Sample((make.index(0, 0, 1, 3, 3).int(), 4))


def npu_moe_finalize_routing(make: Maker) -> Iterator[Sample]:
    place = make.index(0, 3, 1, 4, 2, 5).int()
    yield Sample((make(6, 8), None, None, None, make(3, 2), place, None))
    experts = make.index(2, 0, 1, 2, 0, 1).view(3, 2).int()
    yield Sample((make(6, 8), make(3, 8), make(3, 8), make(3, 8), make(3, 2), place, experts, 2))


def npu_moe_token_permute(make: Maker) -> Iterator[Sample]:
    yield Sample((make(3, 8), make.index(2, 0, 1, 2, 0, 1).view(3, 2).int()))
    yield Sample((make(3, 8), make.index(2, 0, 1), -1))


def npu_moe_token_unpermute(make: Maker) -> Iterator[Sample]:
    yield Sample((make(5, 8), make.index(0, 3, 1, 4, 2, 5).int(), make(3, 2)))
    yield Sample((make(3, 8), make.index(2, 0, 1)))


def npu_grouped_matmul(make: Maker) -> Iterator[Sample]:
    yield Sample(([make(2, 8), make(3, 8)], [make(8, 4), make(8, 4)]))
    grouped = {"split_item": 3, "group_type": 0, "group_list": make.index(1, 1, 5)}
    yield Sample(([make(6, 8)], [make(3, 8, 4)]), {**grouped, "bias": [make(3, 4)]})
    quantised = {"scale": [make.positive(3, 4)], "per_token_scale": [make.positive(6)], "output_dtype": torch.float16}
    counted = {**grouped, **quantised, "group_list": make.index(1, 0, 4), "group_list_type": 1}
    yield Sample(([_bytes(make, 6, 8)], [_bytes(make, 3, 8, 4)]), counted)
    shifted = {**counted, "bias": [_bytes(make, 3, 4).int()], "per_token_scale": None}
    yield Sample(([_bytes(make, 6, 8)], [_bytes(make, 3, 4, 8).transpose(1, 2)]), shifted)


def dropout(make: Maker) -> Iterator[Sample]:
    yield Sample((make(4, 300), make.index(5), 0.25))
    yield Sample((make(3, 5, 8), make.index(-(2**62)), 0.9))
    yield Sample((make(0, 8), make.index(1), 0.5))


def dropout_seeds(make: Maker) -> Iterator[Sample]:
    yield Sample((3, torch.device(make.device)))


SAMPLES: dict[str, Callable[[Maker], Iterator[Sample]]] = {
    "graphex::rms_norm": rms_norm,
    "graphex::rms_norm_add": add_rms_norm,
    "graphex::rms_norm_add_rms_norm": rms_norm_add_rms_norm,
    "graphex::add_rms_norm": add_rms_norm,
    "graphex::add_rms_norm_cast": add_rms_norm,
    "graphex::dynamic_quant": dynamic_quant,
    "graphex::static_quant": static_quant,
    "graphex::rms_norm_dynamic_quant": rms_norm_dynamic_quant,
    "graphex::add_rms_norm_dynamic_quant": add_rms_norm_dynamic_quant,
    "graphex::rms_norm_static_quant": rms_norm_static_quant,
    "graphex::add_rms_norm_static_quant": add_rms_norm_static_quant,
    "graphex::silu_mul": silu_mul,
    "graphex::embedding": embedding,
    "graphex::dropout": dropout,
    "graphex::dropout_seeds": dropout_seeds,
    "graphex::experts": experts,
    "graphex::route": route,
    "graphex::routed_experts": routed_experts,
    "graphex::odd_mm": odd_mm,
    "graphex::argmax": argmax,
    "graphex::append_tokens_": append_tokens_,
    "graphex::silu_mul_dynamic_quant": silu_mul_dynamic_quant,
    "graphex::silu_mul_static_quant": silu_mul_static_quant,
    "graphex::linears": linears,
    "graphex::rms_norm_linears": rms_norm_linears,
    "graphex::silu_mul_linears": silu_mul_linears,
    "graphex::gated_linears": gated_linears,
    "graphex::rms_norm_gated_linears": rms_norm_gated_linears,
    "graphex::rotary": rotary,
    "graphex::rotary_qk": rotary_qk,
    "graphex::rotary_write_": rotary_write_,
    "graphex::rotary_qkv_write_": rotary_qkv_write_,
    "graphex::attention": attention,
    "graphex::paged_attention": paged_attention,
    "graphex::rotary_attention_": rotary_attention_,
    "npu::npu_rms_norm": npu_rms_norm,
    "npu::npu_add_rms_norm": npu_add_rms_norm,
    "npu::npu_add_rms_norm_cast": npu_add_rms_norm,
    "npu::npu_add_rms_norm_quant": npu_add_rms_norm_quant,
    "npu::npu_add_rms_norm_dynamic_quant": npu_add_rms_norm_dynamic_quant,
    "npu::npu_dynamic_quant": npu_dynamic_quant,
    "npu::npu_quantize": npu_quantize,
    "npu::npu_transpose_batchmatmul": npu_transpose_batchmatmul,
    "npu::npu_swiglu": npu_swiglu,
    "npu::npu_rotary_mul": npu_rotary_mul,
    "npu::_npu_dtype_cast": npu_dtype_cast,
    "npu::npu_scatter_nd_update": npu_scatter_nd_update,
    "npu::npu_scatter_nd_update_": npu_scatter_nd_update,
    "npu::npu_fused_infer_attention_score": npu_fused_infer_attention_score,
    "npu::npu_fused_infer_attention_score_v2": npu_fused_infer_attention_score_v2,
    "npu::npu_kv_rmsnorm_rope_cache": npu_kv_rmsnorm_rope_cache,
    "npu::npu_kv_rmsnorm_rope_cache_v2": npu_kv_rmsnorm_rope_cache,
    "npu::npu_kv_rmsnorm_rope_cache_v2_functional": npu_kv_rmsnorm_rope_cache,
    "npu::npu_mla_prolog": npu_mla_prolog,
    "npu::npu_mla_prolog_v2": npu_mla_prolog,
    "npu::npu_mla_prolog_v3": npu_mla_prolog_v3,
    "npu::npu_mla_prolog_v3_functional": npu_mla_prolog_v3,
    "npu::scatter_update": scatter_update,
    "npu::scatter_update_": scatter_update,
    "npu::npu_add_rms_norm_v2": npu_add_rms_norm_v2,
    "npu::npu_add_rms_norm_v2_functional": npu_add_rms_norm_v2,
    "npu::npu_quant_matmul": npu_quant_matmul,
    "npu::npu_weight_quant_batchmatmul": npu_weight_quant_batchmatmul,
    "npu::npu_moe_gating_top_k_softmax": npu_moe_gating_top_k_softmax,
    "npu::npu_moe_gating_top_k": npu_moe_gating_top_k,
    "npu::npu_moe_init_routing": npu_moe_init_routing,
    "npu::npu_moe_init_routing_v2": npu_moe_init_routing_v2,
    "npu::npu_moe_compute_expert_tokens": npu_moe_compute_expert_tokens,
    "npu::npu_moe_finalize_routing": npu_moe_finalize_routing,
    "npu::npu_moe_token_permute": npu_moe_token_permute,
    "npu::npu_moe_token_unpermute": npu_moe_token_unpermute,
    "npu::npu_grouped_matmul": npu_grouped_matmul,
}


def overload(name: str) -> Any:
    """`graphex::rms_norm` -> `torch.ops.graphex.rms_norm.default`"""
    namespace, _, short = name.partition("::")
    return getattr(getattr(torch.ops, namespace), short).default
