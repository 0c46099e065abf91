"""The kernels on a real GPU, called through their ops: every type, sizes from one row up, capture, opcheck."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphex.ops import SPECS, declined, has_kernel
from tests.harness.kernels.compare import (
    assert_close_to_reference,
    copies,
    exact_results,
    roundings,
    tensors,
    ulps_apart,
)
from tests.harness.kernels.samples import SAMPLES, Maker, Sample, overload

pytestmark = pytest.mark.cuda

WITH_KERNEL = [name for name, spec in SPECS.items() if spec.kernel is not None]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GX, NPU = torch.ops.graphex, torch.ops.npu


def check(name: str, sample: Sample) -> None:
    found_args, wanted_args = copies(sample), copies(sample)
    found = overload(name)(*found_args, **sample.options)
    wanted = SPECS[name].reference(*wanted_args, **sample.options)
    exact = exact_results(name, sample)
    for at, (mine, its) in enumerate(zip(tensors(found), tensors(wanted), strict=True)):
        assert_close_to_reference(mine, its, None if exact is None else exact[at], most_ulps=roundings(name, sample))
        if is_exact(name):
            assert torch.equal(mine, its)
    for mine, its in zip(found_args, wanted_args, strict=True):
        if isinstance(mine, Tensor) and name.endswith("_"):
            assert torch.equal(mine, its)  # what is written has been moved, or rotated


def is_exact(name: str) -> bool:
    """No reduction, and every step rounded alike, or nothing."""
    return name == "graphex::embedding" or ("rotary" in name and "attention" not in name)


def test_every_kernel_is_offered_on_cuda():
    assert all(has_kernel(name, "cuda") for name in WITH_KERNEL)
    assert not any(has_kernel(name, "cpu") for name in SPECS)


@pytest.mark.parametrize("name", WITH_KERNEL)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.no_grad()
def test_samples(name, dtype):
    before = declined()
    samples = list(SAMPLES[name](Maker(dtype, "cuda")))
    if dtype != torch.bfloat16:
        samples = samples[:2]  # the interpreter has seen them all; each new combination of options compiles for a while
    for sample in samples:
        check(name, sample)
    new = sum(count - before.get(key, 0) for key, count in declined().items() if key[0] == name)
    takes_none = dtype == torch.float32 and any(word in name for word in ("linears", "attention", "experts", "grouped"))
    assert takes_none or new < len(samples), "the kernel never ran"


def at_size(name: str, rows: int, columns: int, make: Maker) -> Sample:
    """Arguments of an op over [rows, columns]."""
    x1, x2, weight = make(rows, columns), make(rows, columns), make(columns)
    scale = make.positive(columns)
    return {
        "graphex::rms_norm": Sample((x1, weight, 1e-5)),
        "graphex::rms_norm_add": Sample((x1, x2, weight, 1e-5)),
        "graphex::rms_norm_add_rms_norm": Sample((x1, x2, weight, 1e-5, 1.0, False, scale, 1e-5)),
        "graphex::add_rms_norm": Sample((x1, x2, weight, 1e-5)),
        "graphex::add_rms_norm_cast": Sample((x1, x2, weight, 1e-5)),
        "graphex::add_rms_norm_dynamic_quant": Sample((x1, x2, weight, None, 1e-5)),
        "graphex::add_rms_norm_static_quant": Sample((x1, x2, weight, scale, None, 1e-5)),
        "graphex::dynamic_quant": Sample((x1, weight)),
        "graphex::static_quant": Sample((x1, scale)),
        "graphex::silu_mul": Sample((x1, x2)),
        "graphex::silu_mul_dynamic_quant": Sample((x1, x2)),
        "npu::npu_add_rms_norm_quant": Sample((x1, x2, weight, scale, None)),
        "npu::npu_add_rms_norm_dynamic_quant": Sample((x1, x2, weight)),
        "npu::npu_dynamic_quant": Sample((x1,)),
        "npu::npu_swiglu": Sample((make(rows, 2 * columns),)),
    }[name]


SIZED = (
    "graphex::rms_norm",
    "graphex::rms_norm_add",
    "graphex::rms_norm_add_rms_norm",
    "graphex::add_rms_norm",
    "graphex::add_rms_norm_cast",
    "graphex::add_rms_norm_dynamic_quant",
    "graphex::add_rms_norm_static_quant",
    "graphex::dynamic_quant",
    "graphex::static_quant",
    "graphex::silu_mul",
    "graphex::silu_mul_dynamic_quant",
    "npu::npu_add_rms_norm_quant",
    "npu::npu_add_rms_norm_dynamic_quant",
    "npu::npu_dynamic_quant",
    "npu::npu_swiglu",
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(1, 1152), (8, 2560), (32, 5376), (600, 3840), (5000, 100), (3, 16384), (2, 20000)])
@torch.no_grad()
def test_a_residual_between_two_norms_has_the_bits_of_two_kernels(dtype, size):
    make = Maker(dtype, "cuda")
    x, residual, norms = make(*size), make(*size), [(make(size[1]), 1e-6, 1.0, False) for _ in range(2)]
    y, total = GX.rms_norm_add_rms_norm(x, residual, *norms[0], *norms[1])
    wanted = GX.rms_norm_add(x, residual, *norms[0])
    assert torch.equal(total, wanted)
    assert torch.equal(y, GX.rms_norm(wanted, *norms[1])[0])


SIZES = [(1, 4096), (64, 7168), (1000, 5001), (3000, 128), (5000, 3), (20, 14336), (3, 40001)]
TYPED_SIZES = [(torch.bfloat16, size) for size in SIZES] + [(d, s) for d in DTYPES[1:] for s in SIZES[1:3]]


@pytest.mark.parametrize("name", SIZED)
@pytest.mark.parametrize(("dtype", "size"), TYPED_SIZES, ids=str)
@torch.no_grad()
def test_sizes(name, dtype, size):
    check(name, at_size(name, *size, Maker(dtype, "cuda")))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("batch", "tokens", "heads", "key_heads", "width"), [(1, 1, 32, 8, 128), (3, 700, 16, 1, 64)])
@torch.no_grad()
def test_rotary_sizes(dtype, interleaved, batch, tokens, heads, key_heads, width):
    make = Maker(dtype, "cuda")
    q, k = (make(batch, tokens, n, width).transpose(1, 2) for n in (heads, key_heads))
    cos, sin = (t.unsqueeze(1) for t in make.angles(batch, tokens, width))
    check("graphex::rotary_qk", Sample((q, k, cos, sin), {"interleaved": interleaved}))
    caches = make(batch, key_heads, 800, width), make(batch, key_heads, 800, width)
    positions = torch.randperm(800, device="cuda")[:tokens]
    arguments = q, k, make(batch, key_heads, tokens, width), cos, sin, *caches, positions
    check("graphex::rotary_qkv_write_", Sample(arguments, {"interleaved": interleaved}))


@pytest.mark.parametrize("dst_type", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
@torch.no_grad()
def test_quantised_types(dst_type):
    x = torch.randn(64, 7168, device="cuda", dtype=torch.bfloat16)
    x[3] = 0
    check("npu::npu_dynamic_quant", Sample((x,), {"dst_type": dst_type}))
    q, _ = NPU.npu_dynamic_quant(x, dst_type=dst_type)
    assert not q[3].float().any()


@pytest.mark.parametrize("mode", ["divide", "reciprocal", "multiply"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
@torch.no_grad()
def test_quantised_values_at_the_edges(dtype, mode):
    """Ties, both bounds, infinities and NaN; scales that overflow when inverted, vanish, or are no number."""
    edges = [0.0, 0.5, 1.5, 2.5, 126.5, 127.5, 128.5, 254.5, 255.5, 3e38, 1e30, 1e-30, 1e-38, 1e-40, float("inf")]
    x = torch.tensor([*edges, *(-e for e in edges), float("nan")], device="cuda")
    scales = [1.0, 0.5, 3.0, 0.1, 0.0, 1e-45, 1e-39, 1e-37, 1e-20, 1e20, 1e37, 3e38, float("inf"), float("nan"), -2.0]
    full = {"dtype": dtype, "mode": mode, "quant_min": 0.0, "quant_max": 255.0}
    if dtype == torch.int8:
        full |= {"quant_min": -128.0, "quant_max": 127.0}
    narrow = full | {"quant_min": 0.0, "quant_max": 100.0}
    columns = torch.tensor(scales, device="cuda")
    wide = x[:, None].expand(-1, len(scales)).contiguous()
    for options in (full, narrow):
        wanted = SPECS["graphex::static_quant"].reference(wide, columns, **options)
        assert torch.equal(GX.static_quant(wide, columns, **options), wanted)


@torch.no_grad()
def test_rows_with_infinities_and_nan_are_quantised_as_the_reference_does():
    x = torch.randn(4, 5000, device="cuda", dtype=torch.bfloat16)
    x[1, 7], x[2, 4999] = float("inf"), float("nan")
    weight = torch.ones(5000, device="cuda", dtype=torch.bfloat16)
    for name, args in (
        ("graphex::dynamic_quant", (x,)),
        ("graphex::rms_norm_dynamic_quant", (x, weight, None, 1e-5)),
    ):
        found, wanted = overload(name)(*args), SPECS[name].reference(*args)
        assert torch.equal(found[1].isnan(), wanted[1].isnan())
        assert_close_to_reference(found[0], wanted[0])


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@torch.no_grad()
def test_silu_of_every_number(dtype):
    """Times one, so that it is rounded once."""
    gate = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(dtype)
    gate = gate[~gate.isnan()]
    found, wanted = GX.silu_mul(gate, torch.ones_like(gate)), torch.nn.functional.silu(gate)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert ulps_apart(found, wanted)[~wanted.isnan()].max() <= 1


@torch.no_grad()
def test_more_elements_than_an_int32_counts():
    rows, columns = 2**17 + 3, 2**14
    gate = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16).normal_()
    q, scale = NPU.npu_dynamic_quant(gate)
    wanted, want_scale = SPECS["npu::npu_dynamic_quant"].reference(gate[-5:])
    assert_close_to_reference(q[-5:].clone(), wanted)
    torch.testing.assert_close(scale[-5:], want_scale)
    del q
    found = GX.silu_mul(gate, gate)
    assert_close_to_reference(found[-5:].clone(), SPECS["graphex::silu_mul"].reference(gate[-5:], gate[-5:]))


@pytest.mark.parametrize("name", WITH_KERNEL)
@torch.no_grad()
def test_capture_in_a_cuda_graph(name):
    """A replay with new contents of the same tensors gives what a call gives."""
    sample = next(SAMPLES[name](Maker(torch.bfloat16, "cuda")))
    call = lambda: overload(name)(*sample.args, **sample.options)  # noqa: E731
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = tensors(call())
    for argument in sample.args:
        if isinstance(argument, Tensor) and argument.dtype == torch.bfloat16:
            argument.copy_(torch.randn_like(argument))
    again = Sample(copies(sample), sample.options)
    wanted = tensors(overload(name)(*again.args, **again.options))
    graph.replay()
    for mine, its in zip(captured, wanted, strict=True):
        assert torch.equal(mine, its)
    if name.endswith("_"):
        for mine, its in zip(sample.args, again.args, strict=True):
            assert not isinstance(mine, Tensor) or torch.equal(mine, its)


@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name):
    maker = Maker(torch.float32, "cuda", grad=SPECS[name].gradient is not None)
    sample = next(SAMPLES[name](maker))
    torch.library.opcheck(overload(name), sample.args, sample.options)


@pytest.mark.parametrize("name", [name for name in WITH_KERNEL if SPECS[name].gradient is not None])
def test_gradients_are_those_of_the_reference(name):
    for sample in SAMPLES[name](Maker(torch.float32, "cuda", grad=True)):
        leaves = [a for a in sample.args if isinstance(a, Tensor) and a.requires_grad]
        grads = []
        for call in (overload(name), SPECS[name].reference):
            results = [r for r in tensors(call(*sample.args, **sample.options)) if r.is_floating_point()]
            torch.manual_seed(1)
            loss = sum((r * torch.randn_like(r)).sum() for r in results)
            grads.append(torch.autograd.grad(loss, leaves, allow_unused=True))
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_transposed_matmul_writes_its_layout_without_a_copy():
    a, b = (torch.randn(*s, device="cuda", dtype=torch.bfloat16) for s in ((16, 128, 512), (16, 512, 256)))
    found = NPU.npu_transpose_batchmatmul(a, b)
    torch.testing.assert_close(found, torch.bmm(a, b).transpose(0, 1).contiguous())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        NPU.npu_transpose_batchmatmul(a, b)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert kernels
    assert not any(word in name.lower() for name in kernels for word in ("copy", "elementwise")), kernels
