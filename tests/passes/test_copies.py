"""Casts that lose nothing on the way are skipped; casts that round stay."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.harness.compiling import Optimised, aten

cast = aten._to_copy.default

EXACT = [
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float16, torch.float64),
    (torch.float32, torch.float64),
    (torch.bool, torch.uint8),
    (torch.bool, torch.bfloat16),
    (torch.uint8, torch.int16),
    (torch.uint8, torch.bfloat16),
    (torch.int8, torch.float16),
    (torch.int16, torch.float32),
    (torch.int32, torch.float64),
    (torch.int32, torch.int64),
]
LOSSY = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float64, torch.float32),
    (torch.bfloat16, torch.float16),
    (torch.float16, torch.bfloat16),
    (torch.int32, torch.float32),
    (torch.int64, torch.float64),
    (torch.int16, torch.float16),
    (torch.int16, torch.int8),
    (torch.float32, torch.int32),
    (torch.uint8, torch.int8),
    (torch.int64, torch.bool),
]


def everything(dtype: torch.dtype) -> torch.Tensor:
    """Values that a wrong detour would change."""
    if dtype == torch.bool:
        return torch.tensor([True, False])
    if dtype.is_floating_point:
        return torch.tensor([0.0, -0.0, 1 / 3, -3.7, 1e4, 6e-8, 65504.0, float("inf"), float("nan")]).to(dtype)
    info = torch.iinfo(dtype)
    return torch.tensor([info.min, info.max, info.max - 1, 0, 1, 77], dtype=dtype)


def there_and_back(dtype, through):
    return lambda x: (
        aten.neg.default(cast(cast(x, dtype=through), dtype=dtype))
        if dtype != torch.bool
        else (aten.logical_not.default(cast(cast(x, dtype=through), dtype=dtype)))
    )


@pytest.mark.parametrize(("dtype", "through"), EXACT, ids=str)
def test_there_and_back_through_a_wider_type_is_no_trip(dtype, through):
    made = Optimised(there_and_back(dtype, through), everything(dtype))
    assert made.cleaned() == ["cast_back"]
    assert made.count(cast) == 0


@pytest.mark.parametrize(("dtype", "through"), LOSSY, ids=str)
def test_there_and_back_through_a_type_that_rounds_stays(dtype, through):
    given = everything(dtype) if dtype.is_floating_point <= through.is_floating_point else torch.tensor([1.5, -2.0])
    made = Optimised(there_and_back(dtype, through), given)
    assert made.cleaned() == []
    assert made.count(cast) == 2


@pytest.mark.parametrize(
    ("source", "middle", "last"),
    [
        (torch.bfloat16, torch.float32, torch.float64),
        (torch.bfloat16, torch.float32, torch.float16),
        (torch.float16, torch.float64, torch.bfloat16),
        (torch.float32, torch.float64, torch.float16),
    ],
    ids=str,
)
def test_a_stop_on_the_way_to_a_third_type_is_skipped(source, middle, last):
    def detour(x):
        return aten.neg.default(cast(cast(x, dtype=middle), dtype=last))

    made = Optimised(detour, everything(source))
    assert made.cleaned() == ["cast_through"]
    assert made.count(cast) == 1


def test_every_exact_detour_is_exact_for_every_16_bit_value():
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    for dtype, through in itertools.product((torch.float16, torch.bfloat16), (torch.float32, torch.float64)):
        values = patterns.view(dtype)
        back = values.to(through).to(dtype)
        assert torch.equal(back.nan_to_num(nan=0.0), values.nan_to_num(nan=0.0))


def test_the_middle_stays_for_those_who_read_it():
    def used_twice(x):
        middle = cast(x, dtype=torch.float32)
        return aten.sin.default(middle), aten.neg.default(cast(middle, dtype=torch.bfloat16))

    given = everything(torch.bfloat16)
    made = Optimised(used_twice, given)
    assert made.cleaned() == ["cast_back"]
    assert made.count(cast) == 1


def test_a_returned_round_trip_of_an_input_is_kept():
    def returned(x):
        return cast(cast(x, dtype=torch.float32), dtype=torch.bfloat16)

    given = everything(torch.bfloat16)
    assert Optimised(returned, given).reasons("cast_back") == ["an output would begin to share memory with an input"]


def test_a_round_trip_across_a_write_is_kept():
    def written(x):
        wide = cast(x, dtype=torch.float64)
        aten.add_.Tensor(x, 1)
        return aten.neg.default(cast(wide, dtype=torch.float32))

    assert Optimised(written, torch.randn(4)).count(cast) == 2


def test_a_stop_is_not_skipped_across_a_write():
    def written(x):
        wide = cast(x, dtype=torch.float64)
        aten.add_.Tensor(x, 1)
        return aten.neg.default(cast(wide, dtype=torch.float16))

    assert Optimised(written, torch.randn(4)).reasons("cast_through") == ["the original is written to in this graph"]


@pytest.mark.parametrize("last", [torch.float32, torch.float16], ids=str)
def test_a_stop_that_is_written_to_is_kept(last):
    def written(x):
        wide = cast(x, dtype=torch.float64)
        aten.zero_.default(aten.slice.Tensor(wide, 0, 0, 1))
        return aten.neg.default(cast(wide, dtype=last))

    made = Optimised(written, torch.randn(4))
    rule = "cast_back" if last == torch.float32 else "cast_through"
    assert made.reasons(rule) == ["the value in between is written to in this graph"]


def test_a_cast_that_also_changes_the_layout_is_kept():
    def relaid(x):
        wide = cast(x, dtype=torch.float64, memory_format=torch.channels_last)
        return aten.neg.default(cast(wide, dtype=torch.float32))

    image = torch.randn(1, 3, 4, 4)
    assert Optimised(relaid, image).cleaned() == []


@pytest.mark.parametrize("rule", ["cast_back", "cast_through"])
def test_the_rules_can_be_disabled(rule):
    last = torch.bfloat16 if rule == "cast_back" else torch.float16

    def detour(x):
        return aten.neg.default(cast(cast(x, dtype=torch.float32), dtype=last))

    assert Optimised(detour, everything(torch.bfloat16), disable_rules=[rule]).cleaned() == []


def test_the_pass_can_be_disabled():
    made = Optimised(
        there_and_back(torch.bfloat16, torch.float32),
        everything(torch.bfloat16),
        disable_passes=["remove_redundant_copies"],
    )
    assert made.count(cast) == 2


# -- sums that are rounded once ----------------------------------------------------------------------------------------


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr("graphex.passes.clean._ROUNDED_ONCE_ON", ("cpu",))


def gradient_of_a_bias(x):
    """As a backward that is traced in autocast has it."""
    wide = aten.sum.dim_IntList(x, [0], True, dtype=torch.float32)
    return cast(cast(aten.view.default(wide, [x.shape[1]]), dtype=x.dtype), dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_sum_that_is_cast_back_is_rounded_by_the_op(as_on_a_gpu, dtype):
    made = Optimised(gradient_of_a_bias, torch.randn(64, 48).to(dtype))
    assert made.cleaned() == ["round_sum"]
    assert made.count(cast) == 1


def test_a_sum_stays_wide_where_its_device_adds_in_another_order():
    made = Optimised(gradient_of_a_bias, torch.randn(64, 48).bfloat16())
    assert made.cleaned() == []
    assert made.count(cast) == 2


@pytest.mark.parametrize(
    ("kept", "dtype"),
    [
        (lambda x: (total := aten.sum.default(x, dtype=torch.float32), cast(total, dtype=x.dtype)), torch.bfloat16),
        (lambda x: cast(aten.sum.default(x, dtype=torch.float32), dtype=torch.float16), torch.bfloat16),
        (lambda x: cast(aten.sum.default(x, dtype=torch.float64), dtype=x.dtype), torch.bfloat16),
        (lambda x: cast(aten.sum.default(x), dtype=torch.bfloat16), torch.float32),
        (lambda x: cast(aten.mean.default(x, dtype=torch.float32), dtype=x.dtype), torch.bfloat16),
    ],
    ids=["read as it is", "another type", "of float64", "of float32", "a mean"],
)
def test_a_sum_that_is_not_only_rounded_stays_as_it_is(as_on_a_gpu, kept, dtype):
    assert Optimised(kept, torch.randn(64, 48).to(dtype)).cleaned() == []


def test_a_sum_that_is_written_to_before_it_is_rounded_stays_wide(as_on_a_gpu):
    def written(x):
        wide = aten.sum.dim_IntList(x, [0], dtype=torch.float32)
        aten.zero_.default(aten.slice.Tensor(wide, 0, 0, 1))
        return aten.neg.default(cast(wide, dtype=x.dtype))

    assert Optimised(written, torch.randn(64, 48).bfloat16()).cleaned() == []


def test_a_sum_over_more_than_one_launch_reaches_stays_wide(as_on_a_gpu, monkeypatch):
    """Results of 16 bits would be rounded between the launches."""
    monkeypatch.setattr("graphex.passes.clean._REACHED", 64 * 48)
    assert Optimised(gradient_of_a_bias, torch.randn(64, 48).bfloat16()).cleaned() == []


# -- copies of memory to itself ----------------------------------------------------------------------------------------


def copied_to_itself(x):
    aten.copy_(x, x)
    return x + 1


def copied_back(x):
    old = x.clone()
    seen = x.sum()
    x.copy_(old)
    return seen + x


def restored(x):
    old = x.clone()
    x.add_(1)
    seen = x.sum()
    x.copy_(old)
    return seen


def copy_changed(x):
    new = x.clone()
    new.mul_(2)
    return x.copy_(new) + 1


@pytest.mark.parametrize(("f", "dropped"), [(copied_to_itself, 1), (copied_back, 1), (restored, 0), (copy_changed, 0)])
def test_memory_is_not_copied_to_itself(f, dropped):
    x = torch.randn(2, 3)
    assert [record.rule for record in Optimised(f, x).journal.rewrites].count("self_copy") == dropped
