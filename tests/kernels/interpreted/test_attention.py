"""Attention of a few queries: any shape, mask, stride and split, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime.errors import OutOfResources

from graphex.errors import Refusal
from graphex.kernels import attention
from graphex.kernels.attention import AttentionTile, allowing, configs, copied, description
from graphex.kernels.launch import NO_ROOM
from graphex.ops.definition import SPECS
from tests.harness.kernels.attention import LAYOUTS, MASKS, assert_right, check, job
from tests.harness.kernels.compare import launcher

FEW = settings(max_examples=16, deadline=None, derandomize=True, database=None)
small_tiles = st.builds(AttentionTile, st.integers(1, 4), st.sampled_from([16, 32]), st.just(1), st.just(2))


@FEW
@given(
    small_tiles,
    st.integers(1, 2),
    st.sampled_from([1, 2, 3]),
    st.integers(1, 2),
    st.integers(1, 5),
    st.integers(1, 70),
    st.sampled_from([(16, 16), (20, 24), (40, 8)]),
    st.sampled_from(MASKS),
    st.sampled_from(LAYOUTS),
    st.sampled_from([torch.float16, torch.float32]),
    st.sampled_from([0.0, 2.0, 30.0]),
)
def test_any_call(tile, batch, group, heads, positions, length, widths, mask, layout, dtype, softcap):
    torch.manual_seed(0)
    if mask == "least" and softcap and dtype == torch.float16:
        mask = "added -inf"  # the reference itself adds in float16, which loses the scores
    width, value_width = widths
    check(
        tile,
        job(
            batch=batch,
            group=group,
            heads=heads,
            positions=positions,
            length=length,
            width=width,
            value_width=value_width,
            mask=mask,
            layout=layout,
            dtype=dtype,
            softcap=softcap,
        ),
    )


@pytest.mark.parametrize("width", [64, 80, 96, 112, 128, 192, 256])
def test_sizes_of_heads(width):
    check(AttentionTile(2, 32, 4, 2), job(group=4, length=50, width=width, mask="prefix"))


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize(("positions", "length"), [(5, 40), (16, 10), (1, 3)])
def test_causal_positions_are_from_the_beginning(positions, length, softcap):
    check(AttentionTile(2, 16, 1, 2), job(group=2, positions=positions, length=length, is_causal=True, softcap=softcap))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("splits", [1, 3])
def test_masks(mask, splits):
    torch.manual_seed(0)
    check(AttentionTile(splits, 16, 1, 2), job(batch=2, group=2, heads=2, positions=3, length=45, mask=mask))


@pytest.mark.parametrize("splits", [1, 2])
def test_a_query_that_may_attend_to_nothing_gives_zero(splits):
    of = job(positions=2, mask="nothing")
    assert not AttentionTile(splits, 16, 1, 2).prepare(of)(of).any()


def test_what_the_mask_excludes_is_not_read():
    """Positions before the first and after the last that count, in whole tiles."""
    of = job(length=96, mask="none")
    mask = torch.zeros(1, 96, dtype=torch.bool)
    mask[0, 40:50] = True
    of = of._replace(mask=mask)
    wanted = AttentionTile(3, 16, 1, 2).prepare(of)(of)
    for cache in (of.key, of.value):
        cache[:, :, :32] = torch.nan
        cache[:, :, 64:] = torch.nan
    for splits in (1, 3):
        torch.testing.assert_close(AttentionTile(splits, 16, 1, 2).prepare(of)(of), wanted, rtol=2e-3, atol=1e-4)


def test_keys_that_the_mask_excludes_may_be_anything():
    of = job(length=48, mask="none")
    of = of._replace(mask=torch.arange(48)[None] % 2 == 0)
    wanted = AttentionTile(1, 16, 1, 2).prepare(of)(of)
    of.key[:, :, 1::2] = torch.nan
    torch.testing.assert_close(AttentionTile(2, 16, 1, 2).prepare(of)(of), wanted, rtol=2e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
def test_no_number_stays_no_number():
    of = job(positions=2, length=40)
    of.query[0, 0, 1] = torch.nan
    found = AttentionTile(2, 16, 1, 2).prepare(of)(of)
    assert found[0, 0, 1].isnan().all()
    assert not found[0, 0, 0].isnan().any()


def test_every_way_that_is_measured_is_right():
    of = job(group=4, heads=2, length=300, width=32, mask="prefix")
    for way in configs(of, 512):
        check(way, of)


def test_through_the_op():
    of = job(batch=2, group=4, heads=2, length=300, width=32, mask="prefix")
    assert_right(of, launcher("graphex::attention")(*of))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"positions": 13, "group": 5}, "more than 64 queries"),
        ({"width": 272}, "wider than 256"),
        ({"dtype": torch.float64}, "not float16"),
        ({"length": 0}, "no keys"),
    ],
)
def test_what_is_declined(changes, reason):
    found = launcher("graphex::attention")(*job(**changes))
    assert isinstance(found, Refusal)
    assert reason in found.reason


def test_heads_whose_elements_are_apart_are_declined():
    of = job()
    found = launcher("graphex::attention")(*of._replace(key=of.key.repeat_interleave(2, -1)[..., ::2]))
    assert isinstance(found, Refusal)
    assert "adjacent" in found.reason


def test_positions_that_are_too_far_apart_are_declined():
    of = job(length=2)
    far = torch.empty(2**24 + 16, dtype=torch.float16).as_strided((1, 1, 2, 16), (0, 0, 2**24, 1))
    found = launcher("graphex::attention")(*of._replace(key=far))
    assert isinstance(found, Refusal)
    assert "far apart" in found.reason


def test_a_tile_that_the_device_has_no_room_for_is_declined(monkeypatch):
    def no_room(*_):
        raise OutOfResources(300_000, 100_000, "shared memory")

    monkeypatch.setattr(attention, "_PREPARED", {})
    monkeypatch.setattr(attention, "_prepare", lambda of: (no_room, True))
    of = job(length=33)
    for _ in range(2):
        assert launcher("graphex::attention")(*of) == Refusal(NO_ROOM)
    assert_right(of, SPECS["graphex::attention"].reference(*of))


def test_no_queries():
    assert launcher("graphex::attention")(*job(positions=0)).shape == (1, 1, 0, 16)
    assert launcher("graphex::attention")(*job(batch=0)).shape == (0, 1, 1, 16)


# -- what is measured -----------------------------------------------------------------------------------------------


def test_a_mask_for_measuring_allows_everything_and_has_the_same_layout():
    for kind in MASKS[1:]:
        mask = job(batch=2, group=2, positions=3, mask=kind).mask
        free = allowing(mask)
        assert (free.shape, free.stride(), free.dtype) == (mask.shape, mask.stride(), mask.dtype)
        assert free.all() if mask.dtype == torch.bool else not free.any()


def test_copies_for_measuring_have_the_layout_of_the_cache():
    for layout in LAYOUTS:
        key = job(layout=layout).key
        copy = copied(key)
        assert copy.stride() == key.stride()
        assert copy.data_ptr() != key.data_ptr()
        assert torch.equal(copy, key)


def test_measuring_reads_copies_in_turn_and_writes_to_nobody(monkeypatch):
    monkeypatch.setattr(attention, "cold_copies", lambda bytes_read: 3)
    of = job(group=2, length=70, width=32, mask="prefix")
    before = [x.clone() for x in of[:4]]
    wanted = of._replace(mask=allowing(of.mask))
    for candidate in attention.candidates(of, 128).values():
        for _ in range(4):
            assert_right(wanted, candidate.run())
    assert all(torch.equal(x, old) for x, old in zip(of[:4], before, strict=True))


def test_a_cache_that_grows_keeps_its_choice():
    assert description(job(length=1100)) == description(job(length=1101))
    assert description(job(length=1100)) != description(job(length=2100))
    assert description(job(mask="prefix")) != description(job(mask="by head", group=2))


@pytest.mark.parametrize(("positions", "is_causal"), [(1, False), (3, True)])
@pytest.mark.parametrize("lengths", [[41, 0], [7, 64]], ids=str)
def test_keys_in_pages_are_read_where_they_are_and_no_more_of_them(positions, is_causal, lengths):
    torch.manual_seed(0)
    query = torch.randn(2, 4, positions, 16).half()
    keys, values = (torch.randn(9, 8, 2, 16).half().transpose(1, 2) for _ in range(2))
    pages = torch.randperm(9)[:8].view(1, 8).repeat(2, 1)
    given = pages, torch.tensor(lengths), 0.25, is_causal
    wanted = SPECS["graphex::paged_attention"].reference(query, keys, values, *given)
    used = pages[0, : -(-max(lengths) // 8)]
    unused = torch.ones(9, dtype=torch.bool).index_fill(0, used, False)
    dirty = [cache.masked_fill(unused[:, None, None, None], torch.nan) for cache in (keys, values)]
    pages[:, len(used) :] = -1  # no page at all
    found = launcher("graphex::paged_attention")(query, *dirty, *given)
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)
    again = SPECS["graphex::paged_attention"].reference(query, *dirty, *given)
    torch.testing.assert_close(again, wanted)
