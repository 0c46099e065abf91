"""Calls padded to a few sizes: only where rows are proven to be separate, and then nobody can tell."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError
from torch.utils import _pytree as pytree

import graphex
from tests.harness.capture import agree, compile_it, count, reasons, replays, statuses

SIZES = [2, 4, 8]
WIDTH = 13  # no number of rows in these tests


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 6)

    def forward(self, tokens, scale):
        x = self.norm(self.embed(tokens)) * scale.unsqueeze(-1)
        y = self.down(nn.functional.silu(self.up(x)))
        return y.softmax(-1), y.argmax(-1), x.transpose(0, 1)


def padded_for(function, *shapes, sizes=SIZES, where="cpu"):
    """The compiled function, after calls of every number of rows from 2 to 9."""
    compiled = compile_it(function, capture_sizes=sizes)
    for rows in (5, 3, 3, 5, 6, 7, 2, 4, 9, 9, 8, 3):
        given = [torch.randn([rows if size is None else size for size in shape], device=where) for shape in shapes]
        for tensor in given:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        torch.testing.assert_close(compiled(*given), function(*given))
    return compiled


@torch.no_grad()
def test_a_few_captures_serve_all_sizes(where):
    model = Classifier().to(where)
    compiled = compile_it(model, capture_sizes=SIZES)
    for rows in (5, 3, 3, 5, 6, 7, 2, 4, 4, 2, 8, 3, 5):
        tokens, scale = torch.randint(0, 11, (rows, WIDTH), device=where), torch.randn(rows, WIDTH, device=where)
        for tensor in (tokens, scale):
            torch._dynamo.mark_dynamic(tensor, 0)
        found, wanted = compiled(tokens, scale), model(tokens, scale)
        torch.testing.assert_close(found, wanted)
        assert [each.stride() for each in found] == [each.stride() for each in wanted]
    assert statuses(compiled) == ["captured"] * 3
    assert replays(compiled) == 10
    assert count(compiled, "padded") == 8
    assert reasons(compiled) == []


@torch.no_grad()
def test_more_rows_than_the_largest_are_captured_as_they_are(where):
    compiled = padded_for(lambda x: (x * 2).sin() + 1, (None, 3), sizes=[2, 4], where=where)
    assert {eval(record.key)[0] for record in graphex.journal(compiled).captures} >= {4, 9}


@torch.no_grad()
def test_rows_that_are_blocks_of_a_dimension(where):
    compiled = padded_for(lambda x: (x.reshape(-1) * 2, (x.reshape(-1) + 1).reshape(x.shape)), (None, 3), where=where)
    assert count(compiled, "padded") > 0
    assert reasons(compiled) == []


@pytest.mark.parametrize(
    "activation", [nn.functional.gelu, nn.functional.mish, torch.abs, lambda x: x.masked_fill(x > 1, 2)]
)
@torch.no_grad()
def test_what_is_computed_in_place_is_padded_too(activation, where):
    compiled = padded_for(lambda x: activation(x * 2) + 1, (None, 3), where=where)
    assert "compute_in_place" in {record.rule for record in graphex.journal(compiled).rewrites}
    assert count(compiled, "padded") > 0
    assert reasons(compiled) == []


@torch.no_grad()
def test_padded_results_are_kept_right(where):
    compiled = compile_it(lambda x: x * 2 + 1, capture_sizes=[8], dynamic=True)
    kept = []
    for rows in range(2, 8):
        x = torch.full((rows, 3), float(rows), device=where)
        torch._dynamo.mark_static(x, 1)
        kept.append(compiled(x))
    assert [(out.shape[0], out[0, 0].item()) for out in kept] == [(rows, 2.0 * rows + 1) for rows in range(2, 8)]
    assert statuses(compiled) == ["captured"]


@torch.no_grad()
def test_numbers_that_are_returned_are_of_this_call(where):
    compiled = compile_it(lambda x: ((x * 2).sin(), x.shape[0] + 1), capture_sizes=[8])
    for rows in (3, 5, 3, 5, 7):
        x = torch.randn(rows, 3, device=where)
        torch._dynamo.mark_dynamic(x, 0)
        found, after = compiled(x)
        torch.testing.assert_close(found, (x * 2).sin())
        assert after == rows + 1
    assert replays(compiled) > 0


def across(x):
    return x - x.mean(0)


def summed(x):
    return x.sum() * x


def divided(x):
    return x / x.shape[0]


def gram(x):
    return x.t() @ x


def mixed(x):
    return x.t().reshape(-1) * 2


def rolled(x):
    return torch.roll(x, 1, 0)


def counted(x):
    return x + torch.arange(x.shape[0], device=x.device).unsqueeze(-1)


def dropped(x):
    return nn.functional.dropout(x, 0.5) * 0


def written(x):
    return x.add_(1) * 2


def itself(x):
    return x.view(-1, 3), x * 2


def twice(x):
    y = x * 2
    return y, y.t()


def sorted_rows(x):
    return x.sort(0).values


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (across, "across rows"),
        (summed, "across rows"),
        (divided, "number of rows"),
        (gram, "sums over rows"),
        (mixed, "mixes rows"),
        (rolled, "not known to treat rows separately"),
        (counted, "number of rows"),
        (dropped, "random"),
        (written, "writes rows to the input"),
        (twice, "shares memory"),
        (sorted_rows, "across rows"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@torch.no_grad()
def test_what_is_not_proven_is_refused_with_a_reason(function, reason, where):
    compiled = compile_it(function, capture_sizes=SIZES)
    with pytest.warns(graphex.GraphexWarning, match="not padded"):
        for rows in (3, 5, 3, 5, 3):
            x, other = torch.randn(rows, WIDTH, device=where), None
            torch._dynamo.mark_dynamic(x, 0)
            other = x.clone()
            torch.testing.assert_close(compiled(x), function(other))
    record = next(r for r in graphex.journal(compiled).fallbacks if r.what.startswith("calls are not padded"))
    assert reason in record.reason
    assert record.node
    assert count(compiled, "padded") == 0


@pytest.mark.parametrize("backend", ["graphex", "aot_eager"])
@torch.no_grad()
def test_a_view_with_the_sizes_of_its_base_by_chance(backend, where):
    """From torch 2.15 on, AOTAutograd asks whether they are equal, which specialises them where they are."""
    compiled, x = torch.compile(twice, backend=backend), torch.randn(3, 3, device=where)
    torch._dynamo.mark_dynamic(x, 0)
    if torch.__version__ < "2.15":
        torch.testing.assert_close(compiled(x), twice(x))
    else:
        with pytest.raises(ConstraintViolationError):
            compiled(x)


@torch.no_grad()
def test_two_sizes_that_vary_are_refused(where):
    compiled = compile_it(lambda x, y: (x * 2, y * 2), capture_sizes=SIZES, dynamic=True)
    with pytest.warns(graphex.GraphexWarning, match="several sizes vary"):
        for rows in (3, 5):
            compiled(torch.randn(rows, 3, device=where), torch.randn(rows + 4, 3, device=where))


@torch.no_grad()
def test_a_graph_of_fixed_sizes_has_nothing_to_pad(where):
    compiled = compile_it(lambda x: x * 2, capture_sizes=SIZES, dynamic=False)
    for _ in range(3):
        compiled(torch.randn(3, 3, device=where))
    assert replays(compiled) == 2
    assert "no size varies" in reasons(compiled)[0]


@torch.no_grad()
def test_warm_up_captures_the_sizes(where):
    model = Classifier().to(where)
    compiled = compile_it(model, capture_sizes=SIZES)

    def call(rows):
        given = torch.randint(0, 11, (rows, WIDTH), device=where), torch.randn(rows, WIDTH, device=where)
        for tensor in given:
            torch._dynamo.mark_dynamic(tensor, 0)
        return given

    assert len(graphex.warm_up(compiled, [call(rows) for rows in SIZES])) == 3
    before = replays(compiled)
    agree(compiled, model, (call(rows) for rows in (3, 5, 6, 7)))
    assert replays(compiled) == before + 4
    assert len(statuses(compiled)) == 3


@torch.no_grad()
def test_linear_layers_of_few_rows_are_padded_too(where):
    """The ops that projections are folded into treat rows separately, and their results share no memory."""
    weights = [(torch.randn(rows, 16) / 4).to(where).bfloat16() for rows in (24, 24, 16)]

    def model(x, gate, up, down):
        wide = x.float()
        y = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        one, two = nn.functional.linear(y, gate), nn.functional.linear(y, up)
        return x + nn.functional.linear((nn.functional.silu(one) * two)[:, :16], down), one, two

    compiled = compile_it(model, capture_sizes=SIZES, lift_idioms="always")
    for rows in (5, 3, 7):
        x = torch.randn(rows, 16, device=where).bfloat16()
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x, *weights), model(x, *weights), rtol=2e-2, atol=2e-2)
    made = {record.rule for record in graphex.journal(compiled).rewrites}
    assert {"linears", "rms_norm_linears", "linears_residual"} <= made
    assert count(compiled, "padded") == 3
    assert reasons(compiled) == []


@torch.no_grad()
def test_rows_of_the_padding_are_rows_of_the_call(where):
    """A token that nobody passes now, such as 0 or one of an earlier call, may have no row in the table."""
    table = torch.randn(9, 4, device=where)

    def looked_up(tokens, first, table):
        return nn.functional.embedding(tokens - first, table)

    compiled = compile_it(looked_up, capture_sizes=SIZES)
    for rows, first in ((5, 1), (3, 100), (5, 50), (3, 10), (7, 1000)):
        tokens = torch.randint(first, first + 9, (rows,), device=where)
        torch._dynamo.mark_dynamic(tokens, 0)
        given = tokens, torch.tensor([first], device=where), table
        torch.testing.assert_close(compiled(*given), looked_up(*given))
    assert count(compiled, "padded") == 5


@pytest.mark.parametrize("shape", [(None, 1), (1, 3), (1, 1)], ids=["across", "along the rows", "both"])
@torch.no_grad()
def test_expanded_inputs_are_padded(shape, where):
    compiled = compile_it(lambda x: x * 2 + 1, capture_sizes=SIZES)
    for rows in (5, 3, 5, 3, 7):
        x = torch.randn([rows if size is None else size for size in shape], device=where).expand(rows, 3)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x), x * 2 + 1)
    assert count(compiled, "padded") == 5


@torch.no_grad()
def test_expanded_inputs_without_elements_are_padded(where):
    """Padded along the last dimension, where there is nothing in the first."""
    compiled = compile_it(lambda x: x * 2 + 1, capture_sizes=SIZES)
    for columns in (5, 3, 5, 3, 7):
        x = torch.randn(1, columns, device=where).expand(0, columns)
        torch._dynamo.mark_dynamic(x, 1)
        torch.testing.assert_close(compiled(x), x * 2 + 1)
    assert count(compiled, "padded") == 5


@torch.no_grad()
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum(1, keepdim=True).expand(-1, 4),
        lambda x: (x * 2)[:, None, :].expand(-1, 3, -1),
        lambda x: (x + 1, torch.ones(1, device=x.device).expand(5)),
    ],
    ids=["columns", "a dimension between", "no rows"],
)
def test_expanded_results_are_cut(function, where):
    compiled = padded_for(function, (None, 3), where=where)
    assert count(compiled, "padded")
    x = torch.randn(3, 3, device=where)
    found, wanted = pytree.tree_leaves(compiled(x)), pytree.tree_leaves(function(x))
    assert [each.stride() for each in found] == [each.stride() for each in wanted]


@torch.no_grad()
def test_strides_that_vary_by_themselves_are_refused(where):
    """Parts of wider tensors: how far their rows are apart is a number of its own."""
    compiled = compile_it(lambda x: x * 2 + 1, capture_sizes=SIZES)
    with pytest.warns(graphex.GraphexWarning, match="its strides do not follow from the number of rows"):
        for rows in (5, 3, 5, 3):
            x = torch.randn(rows, 6, device=where)[:, 2:5]
            torch._dynamo.mark_dynamic(x, 0)
            torch.testing.assert_close(compiled(x), x * 2 + 1)
    assert count(compiled, "padded") == 0
