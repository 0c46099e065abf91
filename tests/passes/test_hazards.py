"""What other systems got wrong about memory, one test each, with verification on and off.

H1 to H8 are hazards of writing in place: equal calls on both sides of a write, inputs that share memory, intermediates
written before inputs, an input copied onto itself, two updates of one input, reads that move across a write, an update
followed by an op that would reuse the "new" value, and random ops taken for equal.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import graphex
from tests.harness.compiling import Verified

aten = torch.ops.aten
CACHE, INDEX, ROWS = torch.randn(6, 4), torch.tensor([1, 3]), torch.randn(2, 4)


@pytest.fixture(params=[True, False], ids=["verified", "unverified"])
def verify(request: pytest.FixtureRequest) -> bool:
    return request.param


def test_h1_equal_calls_on_both_sides_of_a_write_are_two(verify):
    def model(c: Tensor, i: Tensor, k: Tensor) -> Tensor:
        before = c.sum(0)
        c.index_copy_(0, i, k)
        return before - c.sum(0)

    compiled = Verified(model, CACHE, INDEX, ROWS, verify=verify)
    assert compiled.running().count(aten.sum.dim_IntList) == 2
    assert not compiled.full_copies(CACHE)


def test_h2_inputs_that_share_memory(verify):
    def model(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return a + b

    run = torch.compile(model, backend="graphex", options={"verify": verify})
    with torch.no_grad():
        for share in (lambda x: (x, x + 1), lambda x: (x, x), lambda x: (x[1:], x[:-1]), lambda x: (x[:3], x[3:])):
            mine, theirs = CACHE.clone(), CACHE.clone()
            torch.testing.assert_close(run(*share(mine)), model(*share(theirs)), rtol=0, atol=0)
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_h3_intermediates_written_before_inputs_change_nothing(verify):
    """A chain of intermediates that ends in an input, and one that starts from it."""

    def model(c: Tensor, i: Tensor, k: Tensor) -> Tensor:
        rows = (k * 2).add(1).relu()
        c.index_copy_(0, i, rows)
        return (c * 2).add(1).relu().sum(0) + rows.sum(0)

    compiled = Verified(model, CACHE, INDEX, ROWS, verify=verify)
    assert compiled.made("write_input_in_place") == 1
    assert compiled.made("compute_in_place") >= 4


def test_h4_no_input_is_copied_onto_itself(verify):
    def model(c: Tensor, i: Tensor, k: Tensor) -> Tensor:
        c[2:4] = k
        return c.sum(0)

    compiled = Verified(model, CACHE, INDEX, ROWS, verify=verify)
    assert compiled.running().count(aten.copy_.default) == 1  # of two rows
    assert not compiled.full_copies(CACHE)


def test_h5_two_updates_of_one_input_are_two_writes(verify):
    def model(c: Tensor, i: Tensor, k: Tensor) -> Tensor:
        c[:2] = k
        c[4:] = k * 2
        return c.sum(0)

    compiled = Verified(model, CACHE, INDEX, ROWS, verify=verify)
    assert compiled.running().count(aten.copy_.default) == 2
    assert not compiled.full_copies(CACHE)


def test_h6_a_read_that_a_pass_moves_across_a_write_is_noticed():
    """Nothing but the order of the lines says that the sum is of the old values."""

    def model(c: Tensor, k: Tensor) -> Tensor:
        before = c.sum(0)
        c.add_(k)
        return before

    def sink_reads(gm: GraphModule, example_inputs: Any, config: Any) -> None:
        nodes = list(gm.graph.nodes)
        write = next(node for node in nodes if node.target is aten.copy_.default)
        write.append(next(node for node in nodes if node.target is aten.sum.dim_IntList))

    run = torch.compile(model, backend="graphex", options={"post_grad_custom_post_pass": sink_reads})
    with torch.no_grad(), pytest.raises(graphex.PassError, match="across a write"):
        run(CACHE.clone(), torch.ones(4))


def test_h7_an_op_after_the_update_does_not_reuse_the_cache(verify):
    """`add` after the update: the new value is the cache now, and nobody's to overwrite."""

    def model(c: Tensor, i: Tensor, k: Tensor) -> Tensor:
        c.index_put_((i,), k)
        return c + 1

    compiled = Verified(model, CACHE, INDEX, ROWS, verify=verify)
    assert compiled.made("write_input_in_place") == 1
    assert compiled.running().count(aten.add.Tensor) == 1
    assert compiled.running().count(aten.add_.Tensor) == 0


@pytest.mark.parametrize(
    "draw",
    [torch.randn_like, lambda x: torch.empty_like(x).exponential_(), lambda x: torch.nn.functional.dropout(x, 0.5)],
    ids=["randn_like", "exponential", "dropout"],
)
def test_h8_random_ops_draw_twice(draw):
    run = torch.compile(lambda x: draw(x) - draw(x), backend="graphex")
    assert bool(run(torch.ones(64)).any())


# -- the cache of a decode step ------------------------------------------------------------------------------------


def test_add_after_the_cache_update(verify):
    def model(c: Tensor, i: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        new = c.index_copy_(0, i, k)
        return new + 1, (new * 2).add(3)

    assert Verified(model, CACHE, INDEX, ROWS, verify=verify).made("write_input_in_place") == 1


def test_reads_before_and_after_the_cache_update(verify):
    def model(c: Tensor, i: Tensor, k: Tensor) -> Tensor:
        before = c.mean(0)
        c.index_copy_(0, i, k)
        between = c.mean(0)
        c[0] = between
        return before + between * 2 + c.mean(0)

    assert not Verified(model, CACHE, INDEX, ROWS, verify=verify).full_copies(CACHE)


def test_two_caches_swapped(verify):
    def model(a: Tensor, b: Tensor) -> Tensor:
        kept = a.clone()
        a.copy_(b)
        b.copy_(kept)
        return a - b * 2

    Verified(model, CACHE, CACHE + 1, verify=verify)


def test_two_caches_swapped_with_an_update(verify):
    def model(a: Tensor, b: Tensor, k: Tensor) -> Tensor:
        new_a, new_b = b.add(k), a.mul(k)
        a.copy_(new_a)
        b.copy_(new_b)
        return a - b * 2

    Verified(model, CACHE, CACHE + 1, ROWS[0], verify=verify)


def test_a_cache_passed_twice(verify):
    def model(a: Tensor, b: Tensor, i: Tensor, k: Tensor) -> Tensor:
        a.index_copy_(0, i, k)
        b[0] = a[1] * 2
        return a + b

    Verified(model, CACHE, CACHE, INDEX, ROWS, verify=verify)
    torch._dynamo.reset()
    Verified(model, CACHE, CACHE + 1, INDEX, ROWS, verify=verify)


# -- bugs of the original system -----------------------------------------------------------------------------------


def test_bug_6_a_concatenation_of_two_types_is_promoted(verify):
    x = torch.arange(128 * 256).reshape(128, 256)
    compiled = Verified(lambda x, y: torch.cat([x * 2, y + 1]), x, x / 3, verify=verify)
    assert compiled.running().count(aten.cat.default) == 0


def test_bug_6_a_producer_listed_twice_is_computed_once(verify):
    x = torch.randn(128, 256)

    def model(x: Tensor, y: Tensor) -> Tensor:
        twice = x * 2
        return torch.cat([twice, y + 1, twice])

    compiled = Verified(model, x, x + 1, verify=verify)
    assert compiled.running().count(aten.cat.default) == 0
    assert sum(map(compiled.running().count, (aten.mul.Tensor, aten.mul.out))) == 1
