"""Every way to update an input: no copy of the whole survives, unless somebody still needs the old value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from tests.fuzz import ops
from tests.harness.compiling import Verified

RULE = "write_input_in_place"
CACHE, INDEX, ROWS = torch.randn(6, 4), torch.tensor([1, 3]), torch.randn(2, 4)

Update = Callable[[Tensor, Tensor, Tensor], Any]


def rows_of(i: Tensor) -> Tensor:
    return i[:, None].expand(2, 4)


def slice_assignment(c: Tensor, i: Tensor, k: Tensor) -> None:
    c[2:4] = k


def strided_assignment(c: Tensor, i: Tensor, k: Tensor) -> None:
    c[1:5:2] = k


def select_assignment(c: Tensor, i: Tensor, k: Tensor) -> None:
    c[3] = k[0]


def column_assignment(c: Tensor, i: Tensor, k: Tensor) -> None:
    c[:, 1] = 2.0


def index_assignment(c: Tensor, i: Tensor, k: Tensor) -> None:
    c[i] = k


def window_of_a_window(c: Tensor, i: Tensor, k: Tensor) -> None:
    c[3, 1:3] = k[0, :2]


def augmented_assignment(c: Tensor, i: Tensor, k: Tensor) -> None:
    c[1:3] += k


def two_updates(c: Tensor, i: Tensor, k: Tensor) -> None:
    c.index_copy_(0, i, k)
    c[4:] = k * 2


def many_kinds_in_a_row(c: Tensor, i: Tensor, k: Tensor) -> None:
    c[1:3] = k
    c.t().add_(1)
    c[0].mul_(2)
    c.index_put_((i,), k, accumulate=True)
    c.view(-1)[3:5].zero_()


UPDATES: dict[str, Update] = {
    "index_put_": lambda c, i, k: c.index_put_((i,), k),
    "index_put_ accumulate": lambda c, i, k: c.index_put_((i,), k, accumulate=True),
    "index_copy_": lambda c, i, k: c.index_copy_(0, i, k),
    "index_add_": lambda c, i, k: c.index_add_(0, i, k),
    "index_fill_": lambda c, i, k: c.index_fill_(0, i, 2.0),
    "scatter_": lambda c, i, k: c.scatter_(0, rows_of(i), k),
    "scatter_ of a number": lambda c, i, k: c.scatter_(0, rows_of(i), 1.5),
    "scatter_add_": lambda c, i, k: c.scatter_add_(0, rows_of(i), k),
    "scatter_reduce_": lambda c, i, k: c.scatter_reduce_(0, rows_of(i), k, "amax"),
    "slice": slice_assignment,
    "strided slice": strided_assignment,
    "select": select_assignment,
    "column": column_assignment,
    "index": index_assignment,
    "window of a window": window_of_a_window,
    "augmented": augmented_assignment,
    "narrow": lambda c, i, k: c.narrow(0, 1, 2).copy_(k),
    "copy_": lambda c, i, k: c.copy_(k[:1].expand(6, 4)),
    "fill_": lambda c, i, k: c.fill_(2.0),
    "masked_fill_": lambda c, i, k: c.masked_fill_(k[0] > 0, 2.0),
    "chain": lambda c, i, k: c.mul_(2).add_(1).sub_(k[0]),
    "two updates": two_updates,
    "all kinds": many_kinds_in_a_row,
    "transposed add_": lambda c, i, k: c.t().add_(1),
    "flat mul_": lambda c, i, k: c.view(-1).mul_(2),
    "row add_": lambda c, i, k: c[0].add_(k[0]),
    "index_copy_ of columns": lambda c, i, k: c[:, 1:3].index_copy_(0, i, k[:, 1:3]),
    "index_copy_ of the transposed": lambda c, i, k: c.t().index_copy_(1, i, k.t()),
    "transposed slice": lambda c, i, k: c.t()[:, 1:3].copy_(k.t()),
    "part of a reshaped": lambda c, i, k: c.view(2, 3, 4)[0].index_put_((i - 1,), k),
    "permuted index_put_": lambda c, i, k: c.permute(1, 0)[0].index_put_((i,), k[:, 0]),
    "unsqueezed slice": lambda c, i, k: c.unsqueeze(0)[:, 2:4].copy_(k),
    "diagonal": lambda c, i, k: c.diagonal().copy_(k[0]),
    "custom op": lambda c, i, k: ops.bump(c, 2.0),
    "custom op on a window": lambda c, i, k: ops.bump(c[1:3], 2.0),
    "custom op with a result": lambda c, i, k: ops.push(c, k[0]),
    "declared variant": lambda c, i, k: c.copy_(ops.turn(c)),
}
ITS_OWN_COPY = {"copy_"}  # eager moves all elements here too


def updating(update: Update) -> Callable[..., Tensor]:
    def model(c: Tensor, i: Tensor, k: Tensor) -> Tensor:
        update(c, i, k)
        return c.sum(0)

    return model


@pytest.mark.parametrize("name", UPDATES)
def test_no_copy_of_the_whole_survives(name):
    compiled = Verified(updating(UPDATES[name]), CACHE, INDEX, ROWS)
    assert len(compiled.full_copies(CACHE)) == (name in ITS_OWN_COPY)
    assert compiled.made(RULE) == 1
    assert not compiled.reasons(RULE)


def keeping_the_old_value(update: Update) -> Callable[..., tuple[Tensor, Tensor]]:
    def model(c: Tensor, i: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        old = c.clone()
        update(c, i, k)
        return c.sum(0), old.cos()

    return model


NOT_ITS_OWN = [name for name in UPDATES if name not in ITS_OWN_COPY]


@pytest.mark.parametrize("name", NOT_ITS_OWN)
def test_a_copy_of_the_old_value_is_the_only_one(name):
    compiled = Verified(keeping_the_old_value(UPDATES[name]), CACHE, INDEX, ROWS, exact="transposed" not in name)
    assert compiled.full_copies(CACHE) == ["clone"]  # which eager makes too
    assert compiled.made(RULE) == 1


def drop_clones(gm: GraphModule, example_inputs: Any, config: Any) -> None:
    """In a functional graph a copy is what it was copied from; nobody but a write in place can tell."""
    for node in list(gm.graph.nodes):
        if node.target is torch.ops.aten.clone.default:
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)


@pytest.mark.parametrize("name", NOT_ITS_OWN)
def test_a_later_read_of_the_old_value_blocks_the_write_and_is_named(name):
    model = keeping_the_old_value(UPDATES[name])
    exact = "transposed" not in name
    compiled = Verified(model, CACHE, INDEX, ROWS, exact=exact, post_grad_custom_pre_pass=drop_clones)
    assert compiled.made(RULE) == 0
    assert any("the old value is read later by 'cos'" in reason for reason in compiled.reasons(RULE))
    assert any("return c.sum(0), old.cos()" in reason for reason in compiled.reasons(RULE))


@pytest.mark.parametrize("name", ["index_copy_", "slice", "row add_", "transposed add_", "index_copy_ of columns"])
def test_dynamic_sizes(name):
    with torch._dynamo.config.patch(assume_static_by_default=False):
        compiled = Verified(updating(UPDATES[name]), CACHE, INDEX, ROWS)
    assert not compiled.full_copies(CACHE)
    assert not compiled.reasons(RULE)


def test_an_input_that_lies_otherwise_in_memory_is_written_where_it_is():
    """The new value would be contiguous; the cache is not, and its readers do not mind."""

    def model(c: Tensor, i: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        c.index_copy_(0, i, k)
        return c.t().sum(0), c[1:] @ k.t()

    compiled = Verified(model, CACHE.t().contiguous().t(), INDEX, ROWS)
    assert not compiled.full_copies(CACHE)
    assert compiled.made(RULE) == 1


def test_a_reader_that_depends_on_the_layout_is_an_obstacle():
    def model(c: Tensor, i: Tensor, k: Tensor) -> Tensor:
        c.index_copy_(0, i, k)
        return c.reshape(4, 6) + 1

    compiled = Verified(model, CACHE.t().contiguous().t(), INDEX, ROWS)
    assert compiled.reasons(RULE) == ["the new value has another layout than the input"]


# -- what comes back to the user -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "returned",
    [
        lambda c: c,
        lambda c: c[:, :2],
        lambda c: (c.view(-1), c[0]),
        lambda c: (c[:3] + 1, c, c.t()),
        lambda c: c.detach(),
    ],
    ids=["itself", "slice", "two views", "among others", "detached"],
)
@pytest.mark.parametrize("name", ["index_copy_", "slice", "chain", "custom op"])
def test_a_view_of_the_updated_cache_costs_nothing(name, returned):
    def model(c: Tensor, i: Tensor, k: Tensor) -> Any:
        UPDATES[name](c, i, k)
        return returned(c)

    compiled = Verified(model, CACHE, INDEX, ROWS)
    assert not compiled.full_copies(CACHE)
    cache = CACHE.clone()
    results = compiled.run(cache, INDEX, ROWS)
    views = results if isinstance(results, tuple) else (results,)
    assert any(each.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr() for each in views)


def test_a_view_taken_before_the_update_sees_it():
    def model(c: Tensor, i: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        window = c[:, :2]
        c.index_copy_(0, i, k)
        return window, c.sum(0)

    assert not Verified(model, CACHE, INDEX, ROWS).full_copies(CACHE)


def test_a_new_value_of_its_own_stays_a_tensor_of_its_own():
    def model(c: Tensor, i: Tensor, k: Tensor) -> Tensor:
        new = c.index_copy(0, i, k)
        c.copy_(new)
        return new[:, :2]

    assert Verified(model, CACHE, INDEX, ROWS).reasons(RULE) == ["an output would begin to share memory with an input"]


# -- several inputs ------------------------------------------------------------------------------------------------


def test_a_list_of_caches():
    def model(caches: list[Tensor], i: Tensor, k: Tensor) -> Tensor:
        for layer, cache in enumerate(caches):
            cache.index_copy_(0, i, k + layer)
        return sum(cache.sum(0) for cache in caches)

    compiled = Verified(model, [CACHE, CACHE + 1, CACHE + 2], INDEX, ROWS)
    assert not compiled.full_copies(CACHE)
    assert compiled.made(RULE) == 3


def test_an_optimizer_style_update():
    def model(w: Tensor, m: Tensor, g: Tensor) -> Tensor:
        m.mul_(0.9).add_(g)
        w.addcmul_(m, m, value=-0.1)
        return w.sum(0)

    compiled = Verified(model, CACHE, CACHE * 0, torch.randn(6, 4), exact=False)
    assert compiled.running().count(torch.ops.aten.copy_.default) == 0
    assert len(compiled.full_copies(CACHE)) <= 1  # m * m, where torch takes addcmul_ apart
    assert compiled.made(RULE) == 2


def test_a_custom_op_copies_only_what_is_still_needed():
    def model(a: Tensor, b: Tensor) -> Tensor:
        old = b.cos()
        kept = b.clone()
        ops.swap(a, kept)
        return old + kept

    compiled = Verified(model, CACHE, CACHE + 1)
    copies = [name for name in compiled.full_copies(CACHE) if "cos" not in name and "add" not in name]
    assert len(copies) == 1


# -- hazards -------------------------------------------------------------------------------------------------------


def old_row_read_between(c: Tensor, i: Tensor, k: Tensor) -> Tensor:
    """The row is changed, then the whole is read as it was: the change must wait."""
    changed = c[0] + 1
    seen = c.sum(0)
    c[0] = changed
    return seen


def update_inside_reads_another_row(c: Tensor, i: Tensor, k: Tensor) -> Tensor:
    c[0].add_(c[1])
    return c.sum(0)


def turned_back_the_wrong_way(c: Tensor, i: Tensor, k: Tensor) -> Tensor:
    """A square that is transposed once: not the same elements in their places."""
    square = c[:4]
    square.copy_((square.t() * 2).clone())
    return c.sum(0)


def reshaped_back_the_wrong_way(c: Tensor, i: Tensor, k: Tensor) -> Tensor:
    c.copy_((c.view(4, 6) + 1).t())
    return c.sum(0)


@pytest.mark.parametrize(
    "hazard",
    [
        old_row_read_between,
        update_inside_reads_another_row,
        turned_back_the_wrong_way,
        reshaped_back_the_wrong_way,
    ],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("verify", [True, False], ids=["verified", "unverified"])
def test_a_hazard_inside_of_a_window(hazard, verify):
    Verified(hazard, CACHE, INDEX, ROWS, verify=verify)


def test_what_is_inside_of_a_window_may_still_be_copied_into_it():
    compiled = Verified(update_inside_reads_another_row, CACHE, INDEX, ROWS)
    assert not compiled.full_copies(CACHE)
    assert compiled.made(RULE) == 1


def test_an_op_that_may_round_differently_in_place_is_named():
    compiled = Verified(lambda c: c.cumsum_(0).sum(), CACHE)
    assert any("is not known to give the same bits in place" in reason for reason in compiled.reasons(RULE))


def part_of_a_part(x: Tensor) -> Tensor:
    ops.step(x[1:], x[:-1] * 2, x[1:].clone())
    return x + 1


def a_part_then_the_whole(x: Tensor) -> Tensor:
    x[0].fill_(0.25)
    ops.step(x, x * 2, x.clone())
    return x + 1


def a_row_of_it(x: Tensor) -> Tensor:
    ops.step(x[1], x[0] * 2, x[1].clone())
    return x + 1


@torch.no_grad()
@pytest.mark.parametrize("f", [part_of_a_part, a_part_then_the_whole, a_row_of_it])
@pytest.mark.parametrize("columns", [slice(None), slice(2)], ids=["dense", "with gaps"])
def test_a_custom_op_writes_to_parts_that_begin_anywhere_in_their_memory(f, columns):
    """What an op writes is copied where it has to be: from where it begins in this call, which nobody guards."""
    compiled = torch.compile(f, backend="graphex")
    for first in (0, 2, 2, 4, 0):
        memory = torch.randn(8, 4)
        expected = memory.clone()
        wanted = f(expected[first : first + 3, columns])
        torch.testing.assert_close(compiled(memory[first : first + 3, columns]), wanted)
        torch.testing.assert_close(memory, expected)
