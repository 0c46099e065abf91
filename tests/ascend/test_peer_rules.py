"""Rules of the shapes that a large serving system registers on Ascend: they register as they are, and fuse.

Norm and quantisation (with and without bias), norm and dynamic quantisation, norms of queries and keys with rotary
embedding, all-reduce and norm. None of them is registered without its self-test.
"""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
import torchair
from torch._subclasses.fake_tensor import FakeTensorMode

import graphex
from tests.harness.ascend import Compiled

HEADS, KV_HEADS, SIZE, EPS = 4, 2, 16, 1e-6

_library = torch.library.Library("peer", "DEF")


def _op(schema, fn):
    """An op as such a system defines it: one implementation for all devices, which is also its fake."""
    _library.define(schema)
    _library.impl(schema.partition("(")[0], fn, "CompositeExplicitAutograd")
    return fn


@lambda fn: _op("quantize(Tensor x, Tensor scale, Tensor reciprocal, Tensor offset) -> Tensor", fn)
def quantize(x, scale, reciprocal, offset):
    """It multiplies by the reciprocal, and the fused op divides by the scale."""
    return (x * reciprocal + offset).round().clamp(-128, 127).to(torch.int8)


@lambda fn: _op("add_norm_bias(Tensor x, Tensor r, Tensor w, Tensor b, float eps) -> (Tensor, Tensor, Tensor)", fn)
def add_norm_bias(x, r, w, b, eps):
    y, rstd, total = torch.ops.npu.npu_add_rms_norm(x, r, w, eps)
    return y + b, rstd, total


@lambda fn: _op("rope(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor, Tensor)", fn)
def rope(q, k, cos, sin):
    return torch.ops.npu.npu_rotary_mul(q, cos, sin), torch.ops.npu.npu_rotary_mul(k, cos, sin)


@lambda fn: _op("qkv_norm_rope(Tensor x, Tensor wq, Tensor wk, Tensor c, Tensor s) -> (Tensor, Tensor, Tensor)", fn)
def qkv_norm_rope(x, wq, wk, c, s):
    q, k, v = (part.clone() for part in x.split([HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE], dim=-1))
    q = torch.ops.npu.npu_rms_norm(q.view(-1, HEADS, SIZE), wq, EPS)[0]
    k = torch.ops.npu.npu_rms_norm(k.view(-1, KV_HEADS, SIZE), wk, EPS)[0]
    q, k = rope(q.reshape(1, -1, HEADS, SIZE), k.reshape(1, -1, KV_HEADS, SIZE), c, s)
    return q, k, v


@lambda fn: _op("all_reduce(Tensor x, str group) -> Tensor", fn)
def all_reduce(x, group):
    return x * 2


@lambda fn: _op("mm_all_reduce_add_norm(Tensor x, Tensor w, Tensor r, Tensor g, str group) -> (Tensor, Tensor)", fn)
def mm_all_reduce_add_norm(x, w, r, g, group):
    y, _, total = torch.ops.npu.npu_add_rms_norm(torch.mm(x, w.t()) * 2, r, g, EPS)
    return y, total


# -- the five shapes: (search, replace, examples, arguments of a model) ------------------------------------------------


def norm_quant(dtype):
    def search(x, residual, weight, scale, reciprocal, offset):
        y, _, total = torch.ops.npu.npu_add_rms_norm(x, residual, weight, EPS)
        return torch.ops.peer.quantize(y, scale, reciprocal, offset), total

    def replace(x, residual, weight, scale, reciprocal, offset):
        q, _, total = torch.ops.npu.npu_add_rms_norm_quant(x, residual, weight, scale, offset, epsilon=EPS)
        return q, total

    def made(rows, width, scale):
        x, residual = (torch.randn(rows, width, dtype=dtype, device="npu") for _ in range(2))
        ones = torch.ones(width, dtype=dtype, device="npu")
        return [x, residual, torch.randn_like(ones), ones * scale, ones / scale, torch.zeros_like(ones)]

    return search, replace, made(2, 4, 1.0), made(3, 32, 0.25)


def norm_quant_with_bias(dtype):
    def search(x, residual, weight, bias, scale, reciprocal, offset):
        y, _, total = torch.ops.peer.add_norm_bias(x, residual, weight, bias, EPS)
        return torch.ops.peer.quantize(y, scale, reciprocal, offset), total

    def replace(x, residual, weight, bias, scale, reciprocal, offset):
        q, _, total = torch.ops.npu.npu_add_rms_norm_quant(x, residual, weight, scale, offset, epsilon=EPS, beta=bias)
        return q, total

    def with_bias(values):
        return [*values[:3], torch.randn_like(values[2]), *values[3:]]

    *_, examples, arguments = norm_quant(dtype)
    return search, replace, with_bias(examples), with_bias(arguments)


def norm_dynamic_quant(dtype):
    def search(x, residual, weight):
        y, _, total = torch.ops.npu.npu_add_rms_norm(x, residual, weight, EPS)
        q, scale = torch.ops.npu.npu_dynamic_quant(y)
        return q, total, scale

    def replace(x, residual, weight):
        wide = [value.to(torch.float32) for value in (x, residual)]  # the kernel's own rounding: the sum stays wide
        q, _, _, scale, _ = torch.ops.npu.npu_add_rms_norm_dynamic_quant(
            *wide, weight.to(torch.float32), epsilon=EPS, output_mask=[True, False]
        )
        return q, x + residual, scale

    *_, examples, arguments = norm_quant(dtype)
    return search, replace, examples[:3], arguments[:3]


def qk_norm_rope(dtype):
    def search(qkv, q_weight, k_weight, cos, sin):
        q, k, v = qkv.split([HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE], dim=-1)
        q_by_head = q.view(*q.shape[:-1], q.shape[-1] // SIZE, SIZE)
        k_by_head = k.view(*k.shape[:-1], k.shape[-1] // SIZE, SIZE)
        q_norm, _ = torch.ops.npu.npu_rms_norm(q_by_head, q_weight, EPS)
        k_norm, _ = torch.ops.npu.npu_rms_norm(k_by_head, k_weight, EPS)
        q_flat, k_flat = q_norm.view(q.shape), k_norm.view(k.shape)
        q_rows = q_flat.contiguous().view(1, q_flat.shape[0], -1, SIZE)
        k_rows = k_flat.contiguous().view(1, k_flat.shape[0], -1, SIZE)
        q_rope, k_rope = torch.ops.peer.rope(q_rows, k_rows, cos, sin)
        return q_rope, k_rope, v

    def replace(qkv, q_weight, k_weight, cos, sin):
        return torch.ops.peer.qkv_norm_rope(qkv, q_weight, k_weight, cos, sin)

    def made(tokens):
        shapes = (tokens, (HEADS + 2 * KV_HEADS) * SIZE), (SIZE,), (SIZE,), (1, tokens, 1, SIZE), (1, tokens, 1, SIZE)
        return [torch.randn(shape, dtype=dtype, device="npu") for shape in shapes]

    return search, replace, made(5), made(7)


def all_reduce_norm(dtype):
    def search(x, weight, residual, gamma):
        reduced = torch.ops.peer.all_reduce(torch.mm(x, weight.t()), "tp")
        y, _, total = torch.ops.npu.npu_add_rms_norm(reduced, residual, gamma, EPS)
        return y, total

    def replace(x, weight, residual, gamma):
        return torch.ops.peer.mm_all_reduce_add_norm(x, weight, residual, gamma, "tp")

    def made(rows):
        return [torch.randn(shape, dtype=dtype, device="npu") for shape in ((rows, 8), (16, 8), (rows, 16), (16,))]

    return search, replace, made(2), made(5)


SHAPES = [norm_quant, norm_quant_with_bias, norm_dynamic_quant, qk_norm_rope, all_reduce_norm]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_the_rule_registers_and_fuses(shape, dtype):
    torch._dynamo.reset()
    search, replace, examples, arguments = shape(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", graphex.GraphexWarning)
        handle = torchair.register_replacement(search, replace, examples, name="of_a_peer")
    with handle:
        compiled = Compiled(lambda *args: tuple(result * 1 for result in search(*args)), exact=False)
        compiled(*arguments)
        assert compiled.fusions() == ["of_a_peer"]


# -- what the self-test asks -------------------------------------------------------------------------------------------


def test_a_rule_that_holds_for_values_that_belong_together_warns_and_names_them():
    search, replace, examples, _ = norm_quant(torch.float16)
    with pytest.warns(graphex.GraphexWarning, match="not for random values of 'scale' and 'reciprocal'"):
        graphex.replacement(search, replace, examples)


def test_a_rule_that_does_not_hold_on_its_own_examples_is_an_error():
    search, replace, examples, _ = norm_quant(torch.float16)
    examples[4] = examples[4] * 3
    with pytest.raises(graphex.RuleError, match="on its example inputs"):
        graphex.replacement(search, replace, examples)


def test_without_values_in_the_examples_random_values_decide():
    search, replace, examples, _ = norm_quant(torch.float16)
    with FakeTensorMode():
        shapes = [torch.empty(value.shape, dtype=value.dtype, device="npu") for value in examples]
        with pytest.raises(graphex.RuleError, match="on random inputs"):
            graphex.replacement(search, replace, shapes)


@pytest.mark.parametrize(
    "replace",
    [lambda x, a, b: x * a, lambda x, a, b: x * a * b * b, lambda x, a, b: x * (a + b)],
    ids=["one value of one argument", "one value of another", "its own examples"],
)
def test_examples_that_happen_to_agree_do_not_make_a_rule_right(replace):
    examples = [torch.randn(2, 3), torch.ones(3), torch.ones(3)]
    with pytest.raises(graphex.RuleError, match="differs from the search function's"):
        graphex.replacement(lambda x, a, b: x * a * b, replace, examples)


def test_what_rounding_explains_is_no_difference_and_more_is():
    def search(x):
        return (x * 1.5).to(torch.float32)

    examples = [torch.randn(4, 64, dtype=torch.bfloat16)]
    graphex.replacement(search, lambda x: x.to(torch.float32) * 1.5, examples)
    with pytest.raises(graphex.RuleError, match="differs from the search function's"):
        graphex.replacement(search, lambda x: x.to(torch.float32) * 1.55, examples)


def test_a_duplicate_is_a_runtime_error_that_says_so():
    search, replace, examples, _ = norm_dynamic_quant(torch.float16)
    with torchair.register_replacement(search, replace, examples):
        with pytest.raises(RuntimeError, match="Duplicate pattern"):
            torchair.register_replacement(search, replace, examples)


def test_examples_may_be_any_iterable():
    search, replace, examples, _ = norm_dynamic_quant(torch.float16)
    torchair.register_replacement(search, replace, iter(examples)).remove()
    with pytest.raises(graphex.RuleError, match="example_inputs"):
        torchair.register_replacement(search, replace, examples[0])


# -- parts of a split, streams -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("returned", [*itertools.permutations("qkv", 2), ("v",), ("q", "k", "v")], ids="".join)
def test_a_part_of_a_split_may_be_returned(returned):
    def search(x):
        q, k, v = x.split([4, 2, 2], dim=-1)
        parts = {"q": q, "k": k, "v": v}
        return (torch.ops.peer.all_reduce(q, "a") + 1, *(parts[name] for name in returned))

    def replace(x):
        q, k, v = (part.clone() for part in x.split([4, 2, 2], dim=-1))
        parts = {"q": q, "k": k, "v": v}
        return (q * 2 + 1, *(parts[name] for name in returned))

    torch._dynamo.reset()
    rule = graphex.replacement(search, replace, [torch.randn(3, 8)], name="part")
    compiled = Compiled(lambda x: tuple(each * 1 for each in search(x)), fusion_rules=[rule])
    compiled(torch.randn(3, 8).npu())
    assert compiled.fusions() == ["part"]


def test_a_check_reads_the_stream_of_every_node():
    seen = []

    def same_stream(match):
        labels = {node.meta.get("stream_label") for node in match.nodes if node.op == "call_function"}
        seen.append(labels)
        return len(labels) == 1

    rule = graphex.replacement(
        lambda x: x.sin().cos(), lambda x: x.sin().cos() * 1, [torch.randn(4)], extra_check=same_stream, name="sincos"
    )

    def model(x):
        with torchair.scope.npu_stream_switch("side"):
            a = x.sin().cos()
        return a, (x + 1).sin().cos()

    torch._dynamo.reset()
    compiled = Compiled(model, fusion_rules=[rule])
    compiled(torch.randn(4).npu())
    assert compiled.fusions() == ["sincos", "sincos"]
    assert {"side"} in seen
    assert {None} in seen
