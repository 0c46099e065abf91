"""Inputs written in place, dead intermediates reused: where it must happen, where it must not, and equal to eager."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.harness.compiling import Verified

INPUT = "write_input_in_place"
DEAD = "compute_in_place"


CACHE, INDEX, ROWS = torch.randn(6, 4), torch.tensor([1, 3]), torch.randn(2, 4)


def put(c: Tensor, i: Tensor, k: Tensor) -> Tensor:
    c[i] = k
    return c.sum()


def index_copy(c: Tensor, i: Tensor, k: Tensor) -> Tensor:
    c.index_copy_(0, i, k)
    return c.sum()


def scatter(c: Tensor, i: Tensor, k: Tensor) -> Tensor:
    c.scatter_(0, i[:, None].expand(2, 4), k)
    return c.sum()


def assign_slice(c: Tensor, i: Tensor, k: Tensor) -> Tensor:
    c[2:4] = k
    return c.sum()


def assign_window_of_window(c: Tensor, i: Tensor, k: Tensor) -> Tensor:
    c[3, 1:3] = k[0, :2]
    return c.sum()


def narrow_copy(c: Tensor, i: Tensor, k: Tensor) -> Tensor:
    c.narrow(0, 1, 2).copy_(k)
    return c.sum()


def chain(c: Tensor, i: Tensor, k: Tensor) -> Tensor:
    c.mul_(2)
    c.add_(1)
    c.index_add_(0, i, k)
    return c.sum()


def two_updates(c: Tensor, i: Tensor, k: Tensor) -> Tensor:
    c[i] = k
    c[0] = k[1]
    return c.sum()


def read_before_and_after(c: Tensor, i: Tensor, k: Tensor) -> Tensor:
    before = c.sum()
    c[i] = k
    return before * 2 + c.mean()


def through_a_view_taken_before(c: Tensor, i: Tensor, k: Tensor) -> Tensor:
    row = c[1]
    c.index_copy_(0, i, k)
    return row + 1


UPDATES = [
    put,
    index_copy,
    scatter,
    assign_slice,
    assign_window_of_window,
    narrow_copy,
    chain,
    two_updates,
    read_before_and_after,
    through_a_view_taken_before,
]


@pytest.mark.parametrize("update", UPDATES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_an_updated_input_is_written_in_place(update, dynamic):
    with torch._dynamo.config.patch(assume_static_by_default=not dynamic):
        compiled = Verified(update, CACHE, INDEX, ROWS)
    assert compiled.made(INPUT) == 1
    assert not compiled.reasons(INPUT)


@pytest.mark.parametrize("update", [put, chain, assign_slice], ids=lambda f: f.__name__)
def test_the_option_and_the_rule_turn_it_off(update):
    for options in (
        {"input_inplace_pass": False},
        {"disable_rules": [INPUT]},
        {"disable_passes": ["restore_input_writes"]},
    ):
        torch._dynamo.reset()
        assert Verified(update, CACHE, INDEX, ROWS, **options).made(INPUT) == 0


def old_value_read_later(c: Tensor, i: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    new = torch.index_copy(c, 0, i, k)
    late = c.cos()  # still the old one
    c.copy_(new)
    return late, c.sum()


def shifted_onto_itself(c: Tensor, i: Tensor, k: Tensor) -> Tensor:
    c[1:] = c[:-1].clone()
    return c.sum()


def new_value_returned(c: Tensor, i: Tensor, k: Tensor) -> Tensor:
    new = torch.index_copy(c, 0, i, k)
    c.copy_(new)
    return new


def source_is_a_view_of_the_input(c: Tensor, i: Tensor, k: Tensor) -> Tensor:
    c.copy_(c.index_copy(0, i, c[:2]))
    return c.sum()


@pytest.mark.parametrize(
    ("hazard", "reason"),
    [
        (old_value_read_later, "the old value is read later by"),
        (shifted_onto_itself, "the update reads the memory it would write"),
        (new_value_returned, "an output would begin to share memory with an input"),
        (source_is_a_view_of_the_input, "the update reads the memory it would write"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_hazard_blocks_it_and_is_named(hazard, reason):
    compiled = Verified(hazard, CACHE, INDEX, ROWS)
    assert compiled.made(INPUT) == 0
    assert any(reason in each for each in compiled.reasons(INPUT))


def test_a_refused_write_names_the_line_that_reads():
    compiled = Verified(old_value_read_later, CACHE, INDEX, ROWS)
    (refusal,) = [record for record in compiled.journal.refusals if record.rule == INPUT]
    assert "late = c.cos()" in refusal.reason


def test_two_caches_swapped():
    def swap(a: Tensor, b: Tensor) -> Tensor:
        kept = a.clone()
        a.copy_(b)
        b.copy_(kept)
        return a - b

    Verified(swap, CACHE, CACHE + 1)


def test_a_list_of_caches_and_an_optimizer_style_update():
    def step(w: Tensor, m: Tensor, g: Tensor) -> Tensor:
        m.mul_(0.9).add_(g)
        w.sub_(m * 0.1)
        return w.norm()

    assert Verified(step, CACHE, CACHE * 0, torch.randn(6, 4)).made(INPUT) == 2


def test_the_same_cache_given_twice_stays_right():
    def f(a: Tensor, b: Tensor) -> Tensor:
        a[0] = b[1] * 2
        return a + b

    run = torch.compile(f, backend="graphex", options={"verify": True})
    x, y = CACHE.clone(), CACHE.clone()
    with torch.no_grad():
        torch.testing.assert_close(run(x, x), f(y, y), rtol=0, atol=0)
    torch.testing.assert_close(x, y, rtol=0, atol=0)


# -- intermediates -------------------------------------------------------------------------------------------------


def test_a_chain_of_intermediates_reuses_one_buffer():
    assert Verified(lambda x, y: ((x * y + x).relu() - y).tanh(), CACHE, CACHE + 1).made(DEAD) == 4


@pytest.mark.parametrize(
    "f",
    [
        lambda x, y: x.add(1),
        lambda x, y: (lambda z: (z, z + 1))(x * y),
        lambda x, y: (lambda z: (z[0], z + 1))(x * y),
        lambda x, y: (lambda z: (z + 1, z.sum()))(x * y),
        lambda x, y: (lambda z: z + z.t())((x * y)[:4, :4]),
        lambda x, y: (x * y).sum(0).expand(6, 4) + 1,
        lambda x, y: (x > y).mul(2.5),
        lambda x, y: x.argmax(0) + 0.5,
    ],
    ids=["input", "returned", "view returned", "read later", "aliased operand", "expanded", "bool", "promotion"],
)
def test_what_is_still_needed_is_not_overwritten(f):
    assert Verified(f, CACHE, CACHE + 1).made(DEAD) == 0


def test_the_option_turns_it_off():
    assert Verified(lambda x: (x * 2 + 1).relu(), CACHE, inplace_pass=False).made(DEAD) == 0


def test_an_op_that_returns_its_input_without_saying_so_is_seen_through():
    """native_dropout outside training hands back its input; writing over the result would write over the input."""

    def f(x: Tensor) -> Tensor:
        kept, _ = torch.native_dropout(x, 0.5, False)
        return kept.add(1)

    Verified(f, CACHE)


def test_random_ops_are_left_alone():
    def f(x: Tensor) -> Tensor:
        return torch.bernoulli((x * 0) + 0.5)

    run = torch.compile(f, backend="graphex")
    x = torch.ones(64)
    torch.manual_seed(3)
    found = run(x)
    torch.manual_seed(3)
    assert torch.equal(found, f(x))
