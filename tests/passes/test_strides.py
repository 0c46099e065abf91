"""The strides of results, those of dimensions with one element included."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import graphex

TURNS = {
    "ends": lambda x: x.transpose(0, -1),
    "first": lambda x: x.transpose(0, 1),
    "unsqueeze": lambda x: x.unsqueeze(0),
}
STEPS = {
    **TURNS,
    "add": lambda x: x + 1,
    "clone": lambda x: x.clone(),
    "cast": lambda x: x.double().float(),
    "copy": lambda x: torch.empty_like(x).copy_(x),
    "compare": lambda x: (x > 0).float(),
    "double": lambda x: x + x,
    "mean": lambda x: x - x.mean(-1, keepdim=True),
    "mul": lambda x: x * 2,
    "norm": lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
    "relu": lambda x: x.relu(),
    "reshape": lambda x: x.reshape(x.shape),
    "rows": lambda x: x.reshape(-1, x.shape[-1]),
    "select": lambda x: x[0] if x.dim() > 2 else x,
    "sigmoid": lambda x: x.sigmoid(),
    "silu": torch.nn.functional.silu,
    "where": lambda x: torch.where(x > 0, x, -x),
}


def assert_laid_out_as_in_eager(f, *args):
    torch._dynamo.reset()
    with torch.no_grad():
        wanted, found = f(*args), torch.compile(f, backend="graphex")(*args)
    assert found.stride() == wanted.stride()
    assert torch.equal(found, wanted)


def test_a_turned_dimension_of_one_element_behind_pointwise_ops():
    assert_laid_out_as_in_eager(lambda x: (x.transpose(0, 1) * 2).relu() + 1, torch.randn(1, 5, 1))


def test_a_view_that_changes_nothing_but_such_a_stride():
    def f(x):
        turned = x.transpose(0, 1).unsqueeze(0)
        return turned.reshape(turned.shape) + 1

    assert_laid_out_as_in_eager(f, torch.randn(2, 1, 5, 2))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([1, 1, 2, 5]), min_size=2, max_size=4),
    st.sampled_from(sorted(TURNS)),
    st.lists(st.sampled_from(sorted(STEPS)), min_size=2, max_size=6),
)
def test_chains_of_views_and_pointwise_ops(shape, turn, steps):
    def f(x):
        for name in (turn, *steps):
            x = STEPS[name](x)
        return x

    assert_laid_out_as_in_eager(f, torch.randn(shape))


def test_memory_is_still_reused_where_rows_lie_one_after_the_other():
    run = torch.compile(lambda x: ((x * 2).relu() + 1) @ torch.ones(4, 3), backend="graphex")
    run(torch.randn(1, 1, 4))
    assert [each.rule for each in graphex.journal(run).rewrites].count("compute_in_place") == 2
