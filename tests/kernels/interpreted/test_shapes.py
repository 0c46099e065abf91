"""Any shape, any stride, any option: random ones for each family of kernels."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from graphex.errors import Refusal
from graphex.kernels import layout, norm, rotary
from graphex.kernels.tokens import copy_rows
from graphex.ops.definition import SPECS
from tests.harness.kernels.compare import assert_close_to_reference, launcher, tensors

FEW = settings(max_examples=10, deadline=None, derandomize=True, database=None)
leading = st.lists(st.integers(0, 4), max_size=3)
columns = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 127, 257]))
dtypes = st.sampled_from([torch.float16, torch.float32])
layouts = st.sampled_from(["contiguous", "sliced", "permuted", "sliced twice"])


def laid_out(shape: list[int], dtype: torch.dtype, layout: str) -> Tensor:
    if layout == "sliced":
        return torch.randn(*shape[:-1], shape[-1] + 3).to(dtype)[..., 2:-1]
    if layout == "permuted" and len(shape) > 2:
        return torch.randn(shape[1], shape[0], *shape[2:]).to(dtype).transpose(0, 1)
    if layout == "sliced twice" and len(shape) > 2:
        return torch.randn(*shape[:-2], shape[-2] + 2, shape[-1] + 1).to(dtype)[..., 1:-1, :-1]
    return torch.randn(*shape).to(dtype)


def check(name: str, *args: object, **options: object) -> bool:
    """Whether the kernel took these arguments; if it did, it was right."""
    found = launcher(name)(*args, **options)
    if isinstance(found, Refusal):
        assert found.reason
        return False
    for mine, its in zip(tensors(found), tensors(SPECS[name].reference(*args, **options)), strict=True):
        assert_close_to_reference(mine, its)
    return True


@FEW
@given(leading, columns, dtypes, layouts, layouts, st.booleans(), st.sampled_from([0.0, 1.0]))
def test_norms(lead, width, dtype, layout, other, cast_first, offset):
    torch.manual_seed(0)
    x1, x2 = laid_out([*lead, width], dtype, layout), laid_out([*lead, width], dtype, other)
    weight = torch.randn(width).to(dtype)
    took = check("graphex::add_rms_norm", x1, x2, weight, 1e-5, offset, cast_first)
    took &= check("graphex::add_rms_norm_dynamic_quant", x1, x2, weight, None, 1e-5, offset, cast_first)
    took &= check("graphex::rms_norm_static_quant", x1, weight, torch.rand(width) + 0.1, None, 1e-5, offset, cast_first)
    assert took or layout != "contiguous" or other != "contiguous"


def assert_is_two_norms(x: Tensor, residual: Tensor, first: Sequence[object], second: Sequence[object]) -> bool:
    """Whether the kernel with both took these; if it did, it made the bits of the two that it stands for."""
    found = launcher("graphex::rms_norm_add_rms_norm")(x, residual, *first, *second)
    total = launcher("graphex::rms_norm_add")(x, residual, *first)
    assert isinstance(found, Refusal) == isinstance(total, Refusal)
    if isinstance(found, Refusal):
        return False
    y, _ = launcher("graphex::rms_norm")(total, *second)
    for mine, its in zip(found, (y, total), strict=True):
        assert (mine.dtype, mine.stride()) == (its.dtype, its.stride())
        torch.testing.assert_close(mine, its, rtol=0, atol=0, equal_nan=True)
    return True


norms = st.tuples(
    st.sampled_from([None, 0, 1]), st.sampled_from([1e-5, 0.0]), st.sampled_from([0.0, 1.0]), st.booleans()
)


@FEW
@given(leading, columns, dtypes, layouts, layouts, norms, norms)
def test_a_residual_between_two_norms(lead, width, dtype, layout, other, first, second):
    torch.manual_seed(0)
    weights = {None: None, 0: torch.randn(width).to(dtype), 1: torch.randn(width).to(dtype)}
    x, residual = laid_out([*lead, width], dtype, layout), laid_out([*lead, width], dtype, other)
    took = assert_is_two_norms(x, residual, (weights[first[0]], *first[1:]), (weights[second[0]], *second[1:]))
    assert took or layout != other


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("value", [0.0, 1e-30, 1e30, torch.inf, torch.nan])
def test_two_norms_of_rows_that_have_none(value):
    x, weight = torch.randn(5, 7), torch.randn(7)
    x[1], x[3, 2] = value, value
    assert assert_is_two_norms(x, torch.randn(5, 7), (weight, 0.0, 1.0, False), (None, 0.0, 0.0, True))


@FEW
@given(leading, columns, dtypes, layouts, layouts)
def test_elementwise_and_quantisation(lead, width, dtype, layout, other):
    torch.manual_seed(0)
    gate, up = laid_out([*lead, width], dtype, layout), laid_out([*lead, width], dtype, other)
    took = check("graphex::silu_mul", gate, up)
    took &= check("graphex::dynamic_quant", gate)
    took &= check("graphex::silu_mul_dynamic_quant", gate, up)
    took &= check("graphex::static_quant", gate, torch.rand(width) + 0.1, torch.randint(-9, 9, (width,)))
    assert took or layout != "contiguous" or other != "contiguous"


@FEW
@given(
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 9),
    st.sampled_from([1, 2, 3]),
    st.integers(1, 20),
    dtypes,
    st.booleans(),
    st.booleans(),
)
def test_rotary(batch, tokens, heads, groups, half, dtype, interleaved, heads_first):
    torch.manual_seed(0)
    q, k = torch.randn(batch, tokens, heads * groups, 2 * half), torch.randn(batch, tokens, heads, 2 * half)
    q, k = q.to(dtype), k.to(dtype)
    angle = torch.rand(batch, tokens, 2 * half) * 6
    cos, sin = angle.cos().to(dtype).unsqueeze(2), angle.sin().to(dtype).unsqueeze(2)
    if heads_first:
        q, k, cos, sin = (t.transpose(1, 2) for t in (q, k, cos, sin))
    assert check("graphex::rotary_qk", q, k, cos, sin, interleaved)
    assert check("graphex::rotary", k, cos, sin, interleaved)


@pytest.mark.parametrize(
    "name",
    [
        "graphex::rms_norm_dynamic_quant",
        "graphex::rms_norm",
        "graphex::rms_norm_add_rms_norm",
        "graphex::dynamic_quant",
    ],
)
def test_rows_wider_than_a_tile(name):
    x = torch.randn(2, 20001).half()
    weight = torch.randn(20001).half()
    args = {
        "graphex::rms_norm": (x, weight, 1e-5),
        "graphex::rms_norm_add_rms_norm": (x, x.flip(0), weight, 1e-5, 0.0, True, weight, 1e-5),
        "graphex::rms_norm_dynamic_quant": (x, weight, None, 1e-5),
        "graphex::dynamic_quant": (x, weight),
    }
    assert check(name, *args[name])


@pytest.fixture
def nothing_is_few(monkeypatch):
    """The tiles for many rows and elements, without them: the interpreter is slow."""
    for module in (layout, norm, rotary):
        for threshold in ("FEW_ROWS", "FEW_ELEMENTS"):
            monkeypatch.setattr(module, threshold, 0, raising=False)


@pytest.mark.usefixtures("nothing_is_few")
def test_many_rows_share_programs():
    x, weight, scale = torch.randn(7, 1030).half(), torch.randn(1030).half(), torch.rand(1030) + 0.1
    assert check("graphex::rms_norm", x, weight, 1e-5)
    for width in (3, 100, 1030):
        norm = weight[:width], 1e-5, 1.0, False
        assert assert_is_two_norms(x[:, :width].contiguous(), torch.randn(7, width).half(), norm, norm)
    assert check("graphex::rms_norm_static_quant", x, weight, scale, None, 1e-5)
    assert check("graphex::static_quant", x, scale)
    assert check("graphex::dynamic_quant", x)


@pytest.mark.usefixtures("nothing_is_few")
def test_many_heads_share_their_angles():
    q, k = torch.randn(1, 21, 5, 256).half(), torch.randn(1, 3, 5, 256).half()
    angle = torch.rand(1, 1, 5, 256) * 6
    assert check("graphex::rotary_qk", q, k, angle.cos().half(), angle.sin().half())


def far_apart(values: Tensor, head: int) -> Tensor:
    """The same values, with so much between their heads that 32 bits do not count it; only what is used is memory."""
    step, rest = 2**31 // (values.shape[head] - 1), values.numel()
    unreserved = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE has no name before Python 3.13
    memory = torch.frombuffer(mmap.mmap(-1, 2 * (2**31 + rest), flags=unreserved), dtype=torch.float16)
    strides = [step if dim == head else stride for dim, stride in enumerate(values[:, :1].contiguous().stride())]
    return memory.as_strided(values.shape, strides).copy_(values)


def test_heads_further_apart_than_32_bits_count():
    q, k, v = (far_apart(torch.randn(1, 3, 2, 8).half(), 1) for _ in range(3))
    angle = torch.rand(1, 1, 2, 8) * 6
    cos, sin = angle.cos().half(), angle.sin().half()
    assert check("graphex::rotary", q, cos, sin)
    keys, values = (far_apart(torch.zeros(1, 3, 4, 8).half(), 1) for _ in range(2))
    positions = torch.tensor([3, 1])
    turned = launcher("graphex::rotary_qkv_write_")(q, k, v, cos, sin, keys, values, positions)
    assert_close_to_reference(turned, SPECS["graphex::rotary"].reference(q, cos, sin))
    assert_close_to_reference(keys[:, :, positions], SPECS["graphex::rotary"].reference(k, cos, sin))
    assert torch.equal(values[:, :, positions], v)


@pytest.mark.parametrize(("smallest", "largest"), [(-128.0, 200.0), (-300.0, 0.0), (5.0, -5.0)])
def test_a_range_beyond_that_of_the_type_is_declined(smallest, largest):
    result = launcher("graphex::dynamic_quant")(torch.randn(2, 8), quant_min=smallest, quant_max=largest)
    assert isinstance(result, Refusal)
    assert "range" in result.reason


def test_rows_of_zeros_and_tiny_rows():
    x = torch.zeros(4, 16)
    x[1] = torch.randn(16) * 1e-38
    x[2] = torch.randn(16) * 1e-30
    q, scale = launcher("npu::npu_dynamic_quant")(x)
    wanted, _ = SPECS["npu::npu_dynamic_quant"].reference(x)
    assert (q.int() - wanted.int()).abs().max() <= 1
    assert not q[0].any()
    assert scale[0] == 0


def test_a_row_with_a_nan_has_no_scale():
    x = torch.randn(3, 40)
    x[1, 7] = float("nan")
    q, scale = launcher("graphex::dynamic_quant")(x)
    assert scale.isnan().squeeze(-1).tolist() == [False, True, False]
    assert not q[1].any()


@pytest.mark.parametrize("name", ["graphex::static_quant", "graphex::rms_norm_static_quant"])
@pytest.mark.parametrize("before_round", [False, True])
def test_a_fraction_of_the_zero_point_is_rounded_only_before_rounding(name, before_round):
    """Compared exactly: within 1, which other quantised values are compared to, both would pass."""
    x, scale, zero_point = torch.randn(6, 8), torch.tensor(0.25), torch.full((8,), 0.75)
    args = (x, scale, zero_point) if name == "graphex::static_quant" else (x, torch.ones(8), scale, zero_point, 1e-6)
    found = launcher(name)(*args, zero_point_before_round=before_round)
    torch.testing.assert_close(found, SPECS[name].reference(*args, zero_point_before_round=before_round))


def test_positions_outside_the_cache_are_not_written():
    k, cos = torch.randn(1, 2, 3, 4), torch.ones(1, 1, 3, 4)
    memory = torch.zeros(3, 2, 5, 4)
    assert launcher("graphex::rotary_write_")(k, cos, cos * 0, memory[1:2], torch.tensor([-1, 2, 5])) is None
    assert not memory[0].any()
    assert not memory[2].any()
    torch.testing.assert_close(memory[1, :, 2], k[0, :, 1])
    assert not memory[1][:, [0, 1, 3, 4]].any()


CACHE = torch.randn(1, 2, 6, 4)


@pytest.mark.parametrize(
    ("name", "args", "reason"),
    [
        (
            "graphex::rotary_write_",
            (CACHE[:, :, :2], torch.ones(4), torch.ones(4), CACHE, torch.tensor([1, 2])),
            "shares its memory",
        ),
        ("graphex::rms_norm", (torch.randn(2, 4).double(), None, 1e-5), "float64"),
        ("graphex::rms_norm", (torch.randn(4, 2).t(), None, 1e-5), "not adjacent"),
        ("graphex::silu_mul", (torch.randn(1, 4).expand(3, 4), torch.randn(3, 4)), "overlap or repeat"),
        ("graphex::dynamic_quant", (torch.randn(2, 0),), "no columns"),
        ("graphex::rotary", (torch.randn(1, 1, 1, 2, 4), torch.ones(4), torch.ones(4)), "more than four"),
        ("graphex::rotary", (torch.ones(2**21 + 1, 2), torch.ones(2), torch.ones(2)), "than a grid has blocks"),
    ],
)
def test_what_a_kernel_declines_it_declines_with_a_reason(name, args, reason):
    result = launcher(name)(*args)
    assert isinstance(result, Refusal)
    assert reason in result.reason


@FEW
@given(leading, columns, dtypes, layouts, layouts)
def test_rows_are_copied_from_one_layout_into_another(before, width, dtype, read, written):
    source, target = (laid_out([*before, width], dtype, each) for each in (read, written))
    untouched = target.clone()
    assert torch.equal(target, source if copy_rows(target, source) else untouched)


@pytest.mark.parametrize("columns", [13, 1023, 1025, 2500])
def test_padded_rows_are_copied_into_adjacent_ones(columns):
    source, target = torch.randn(2, 3, columns + 3)[..., :columns], torch.zeros(2, 3, columns)
    assert copy_rows(target, source)
    assert torch.equal(target, source)


@pytest.mark.parametrize("source", [torch.ones(3, 4).t(), torch.ones(4, 3).long(), torch.ones(())])
def test_what_is_no_rows_is_not_copied(source):
    assert not copy_rows(torch.zeros_like(source), source)
