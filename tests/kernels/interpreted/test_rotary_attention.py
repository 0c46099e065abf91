"""Attention that rotates its query and adds a token to the caches: any shape, mask, stride, split and place."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime.errors import OutOfResources

from graphex.errors import Refusal
from graphex.kernels import attention
from graphex.kernels.attention import AttentionTile, Library
from graphex.kernels.launch import NO_ROOM
from tests.harness.kernels.attention import LAYOUTS, MASKS
from tests.harness.kernels.compare import launcher
from tests.harness.kernels.rotary_attention import by, check, step

FEW = settings(max_examples=24, deadline=None, derandomize=True, database=None)
small_tiles = st.builds(AttentionTile, st.integers(1, 4), st.sampled_from([16, 32]), st.just(1), st.just(2))
OP = launcher("graphex::rotary_attention_")


def through_the_op(of):
    return OP(*of)


@pytest.fixture(autouse=True)
def nothing_is_prepared(monkeypatch):
    monkeypatch.setattr(attention, "_PREPARED", {})


@FEW
@given(
    small_tiles,
    st.integers(1, 2),
    st.sampled_from([1, 3, 4]),
    st.integers(1, 2),
    st.integers(1, 70),
    st.integers(0, 69),
    st.sampled_from([(16, 16), (20, 24), (40, 8)]),
    st.sampled_from(MASKS),
    st.sampled_from(LAYOUTS),
    st.sampled_from([torch.float16, torch.float32]),
    st.sampled_from([0.0, 2.0, 30.0]),
    st.booleans(),
    st.booleans(),
)
def test_any_call(
    tile, batch, group, heads, length, place, widths, mask, layout, dtype, softcap, interleaved, own_angles
):
    torch.manual_seed(0)
    if mask == "least" and softcap and dtype == torch.float16:
        mask = "added -inf"  # the reference itself adds in float16, which loses the scores
    width, value_width = widths
    of = step(
        batch=batch,
        group=group,
        heads=heads,
        length=length,
        place=place % length,
        width=width,
        value_width=value_width,
        mask=mask,
        layout=layout,
        dtype=dtype,
        softcap=softcap,
        interleaved=interleaved,
        own_angles=own_angles,
    )
    check(by(tile), of)


@pytest.mark.parametrize("width", [64, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 4, 8])
def test_sizes_of_heads_and_groups(width, group):
    check(by(AttentionTile(2, 32, 4, 2)), step(group=group, heads=2, length=50, width=width, place=33, mask="prefix"))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("place", [0, 15, 16, 31, 44])
@pytest.mark.parametrize("mask", MASKS)
def test_first_last_and_other_places(place, mask, splits):
    torch.manual_seed(place)
    check(by(AttentionTile(splits, 16, 1, 2)), step(batch=2, group=2, heads=2, length=45, place=place, mask=mask))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("place", [-1, 45, 2**32 + 3])
def test_outside_of_the_caches_nothing_is_written_or_added(place, splits):
    check(by(AttentionTile(splits, 16, 1, 2)), step(group=2, length=45, place=place, mask="boolean", batch=2))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_places_of_both_integer_types(dtype):
    of = step(place=7)
    found = OP(*of._replace(positions=of.positions.to(dtype)))
    torch.testing.assert_close(found, OP(*of), rtol=0, atol=0)


def test_only_the_token_itself_may_be_attended_to():
    """The first token of a sequence: its value is the result."""
    of = step(group=2, length=40, place=0)._replace(mask=(torch.arange(40) < 1)[None])
    of.values[:] = torch.nan
    of.keys[:] = torch.nan
    of.values[:, :, 1:] = of.keys[:, :, 1:] = 0.0
    torch.testing.assert_close(OP(*of), of.v.expand(1, 2, 1, 16), rtol=0, atol=0)


def test_a_token_that_the_mask_forbids_is_written_and_adds_nothing():
    of = step(group=2, length=40, place=9)._replace(mask=(torch.arange(40) != 9)[None])
    check(by(AttentionTile(2, 16, 1, 2)), of)


def test_tokens_one_after_the_other():
    """As in decoding: each step attends to what the steps before have written."""
    of = step(batch=2, group=2, heads=2, length=20)
    for place in range(5):
        mask = (torch.arange(20) <= place)[None]
        check(through_the_op, of._replace(q=torch.randn_like(of.q), positions=torch.tensor([place]), mask=mask))


@pytest.mark.parametrize("shape", [(32,), (1, 32), (2, 1, 1, 32), (2, 4, 1, 32)])
def test_angles_that_are_broadcast_in_any_way(shape):
    of = step(batch=2, group=2, heads=2, width=32)
    if shape[1:2] == (4,):  # one for each head, as the key has too
        of = of._replace(q=of.q[:, :2])
        shape = (2, 2, 1, 32)
    cos, sin = (each.flatten().expand(shape) for each in (of.cos, of.sin))
    check(through_the_op, of._replace(cos=cos, sin=sin))


def test_every_layout_through_the_op():
    for layout in LAYOUTS:
        check(through_the_op, step(batch=2, group=4, heads=2, length=300, width=32, mask="prefix", layout=layout))


# -- what runs instead ------------------------------------------------------------------------------------------------


def test_where_torchs_attention_is_faster_the_two_ops_run(monkeypatch):
    monkeypatch.setattr(attention, "chosen_config", lambda job: (Library(), True))
    check(through_the_op, step(group=2, heads=2, mask="prefix"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"width": 272}, "wider than 256"),
        ({"group": 65}, "more than 64 queries"),
        ({"dtype": torch.float64}, "not float16"),
    ],
)
def test_what_is_declined(changes, reason):
    found = OP(*step(**changes))
    assert isinstance(found, Refusal)
    assert reason in found.reason


def declined(**changes):
    of = step(group=2, heads=2)
    found = OP(*of._replace(**{name: change(of) for name, change in changes.items()}))
    assert isinstance(found, Refusal)
    return found.reason


def test_tensors_that_are_declined():
    assert "more than one token" in declined(
        q=lambda of: of.q.repeat(1, 1, 2, 1), positions=lambda of: torch.tensor([1, 2])
    )
    assert "third" in declined(dim=lambda of: 1)
    assert "one type" in declined(
        cos=lambda of: of.cos.float(), sin=lambda of: of.sin.float(), keys=lambda of: of.keys.float()
    )
    assert "angles of their own" in declined(
        q=lambda of: of.q[:, :2],
        cos=lambda of: of.cos.repeat(1, 2, 1, 1),
        sin=lambda of: of.sin.repeat(1, 2, 1, 1),
    )
    assert "overlap or repeat" in declined(keys=lambda of: of.keys[:, :1].expand(of.keys.shape))
    assert "overlap or repeat" in declined(keys=lambda of: of.keys.as_strided(of.keys.shape, (640, 320, 8, 1)))
    for strides in ((640, 16, 24, 1), (640, 32, 16, 1)):  # one head reads what another writes, elsewhere
        assert "overlap or repeat" in declined(keys=lambda of, to=strides: of.keys.as_strided(of.keys.shape, to))
    assert "differ in length" in declined(values=lambda of: of.values[:, :, 1:])


def test_memory_that_is_read_and_written_is_declined():
    shares = "shares its memory"
    assert shares in declined(values=lambda of: of.keys)
    assert shares in declined(v=lambda of: of.values[:, :, :1])
    both = torch.randn(2, 1, 2, 40, 16).half()
    assert shares in declined(keys=lambda of: both[0], values=lambda of: both[1])
    assert shares in declined(mask=lambda of: of.keys[:, :1, :, 0])


def test_a_tile_that_the_device_has_no_room_for_is_declined(monkeypatch):
    def no_room(*_):
        raise OutOfResources(300_000, 100_000, "shared memory")

    monkeypatch.setattr(attention, "_prepare_step", lambda of: (no_room, True))
    of = step()
    before = of.keys.clone()
    for _ in range(2):
        assert OP(*of) == Refusal(NO_ROOM)
    assert torch.equal(of.keys, before)
