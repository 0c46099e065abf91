"""What a caller finds in its inputs and buffers after a call has raised."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import graphex

FITS, OUT_OF_BOUNDS = torch.tensor([1, 2]), torch.tensor([0, 99])


@torch.library.custom_op("graphex_raising::checked", mutates_args=())
def checked(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    if int(index.max()) > 9:
        raise ValueError("a custom op refuses this")
    return x * 2


@checked.register_fake
def _(x, index):
    return torch.empty_like(x)


@torch.library.custom_op("graphex_raising::bump_", mutates_args=("x",))
def bump_(x: torch.Tensor, index: torch.Tensor) -> None:
    x.add_(1)
    if int(index.max()) > 9:
        raise ValueError("a custom op stops halfway")
    x.mul_(2)


@bump_.register_fake
def _(x, index):
    return None


def after_raising(function, *args):
    """The arguments as a call leaves them that must raise."""
    given = [arg.clone() for arg in args]
    with pytest.raises((IndexError, RuntimeError, ValueError)):
        function(*given)
    return given


def compiled_for(function, *args, **options):
    compiled = torch.compile(function, backend="graphex", options=options)
    compiled(*(arg.clone() for arg in args))
    return compiled


def assert_same_state(function, good, bad):
    compiled = compiled_for(function, *good)
    wanted, found = after_raising(function, *bad), after_raising(compiled, *bad)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    return graphex.journal(compiled)


STATE, TABLE = torch.zeros(4, 3), torch.arange(12.0).view(4, 3)
GOOD, BAD = (STATE, TABLE, FITS), (STATE, TABLE, OUT_OF_BOUNDS)


def written_behind(state, table, index):
    new = state + 1
    rows = table[index]
    state.copy_(new)
    return rows


def written_before(state, table, index):
    state.add_(1)
    return table[index]


def written_before_and_behind(state, table, index):
    state.add_(1)
    rows = table[index]
    state[1:].mul_(3)
    return rows


def written_between_two(state, table, index):
    new = (state + 1) * 2
    first = table[index * 0]
    state.copy_(new)
    return first + table[index]


def a_part_written_behind(state, table, index):
    new = state[1:] + 1
    rows = table[index]
    state[1:] = new
    return rows


def overwritten_before(state, table, index):
    state.copy_(table * 2)
    return table[index]


def written_with_out(state, table, index):
    new = state + 1
    rows = table[index]
    torch.mul(new, 2, out=state)
    return rows


def made_by_what_raises(state, table, index):
    state.copy_(state.index_copy(0, index, table[:2]))
    return state.sum()


def raises_halfway(state, table, index):
    state.index_put_((index,), table[:2])
    return state.sum()


def custom_before(state, table, index):
    new = state + 1
    rows = checked(table, index)
    state.copy_(new)
    return rows


def custom_halfway(state, table, index):
    bump_(state, index)
    return state + 1


def custom_halfway_on_a_copy(state, table, index):
    new = state + 1
    bump_(new, index)
    state.copy_(new)


def gathered_behind(state, table, index):
    state.mul_(0).add_(1)
    rows = table.gather(0, index[:, None])
    state.add_(rows.sum())
    return rows


PROGRAMS = [
    written_behind,
    written_before,
    written_before_and_behind,
    written_between_two,
    a_part_written_behind,
    overwritten_before,
    written_with_out,
    made_by_what_raises,
    raises_halfway,
    custom_before,
    custom_halfway,
    custom_halfway_on_a_copy,
    gathered_behind,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=[program.__name__ for program in PROGRAMS])
def test_the_state_after_an_exception_is_that_of_eager(program):
    assert_same_state(program, GOOD, BAD)


def test_a_copy_that_stays_says_what_may_raise():
    journal = assert_same_state(written_behind, GOOD, BAD)
    (refusal,) = [each for each in journal.refusals if each.rule == "write_input_in_place"]
    assert refusal.reason.startswith("'index'")
    assert "may raise" in refusal.reason


def test_what_the_program_wrote_in_place_is_written_in_place():
    for program in (written_before, written_before_and_behind, raises_halfway, custom_halfway):
        compiled = compiled_for(program, *GOOD)
        rewrites = [each for each in graphex.journal(compiled).rewrites if each.rule == "write_input_in_place"]
        assert rewrites, program.__name__


def test_a_value_that_is_overwritten_still_raises():
    def overwritten(table, index, rows):
        found = table[index]
        found.copy_(rows)
        return found

    args = TABLE, OUT_OF_BOUNDS, TABLE[:2]
    compiled = compiled_for(overwritten, TABLE, FITS, TABLE[:2])
    with pytest.raises(IndexError):
        compiled(*args)


@pytest.mark.parametrize("program", [written_behind, written_before, written_before_and_behind])
def test_a_graph_that_was_traced_as_it_is_leaves_what_it_would_leave(program):
    graph = make_fx(program)(*GOOD)
    compiled = graphex.compile_fx(graph, GOOD)
    torch.testing.assert_close(after_raising(compiled, *BAD), after_raising(graph, *BAD), rtol=0, atol=0)


def test_buffers_and_training():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))
            self.weight = torch.nn.Parameter(torch.ones(4, 3))

        def forward(self, index):
            new = self.steps + 1
            rows = (self.weight * 2)[index]
            self.steps.copy_(new)
            return rows.sum()

    model = Model()
    compiled = torch.compile(model, backend="graphex")
    compiled(FITS).backward()
    for _ in range(2):
        with pytest.raises(IndexError):
            compiled(OUT_OF_BOUNDS)
        assert model.steps.item() == 1


# -- random programs -------------------------------------------------------------------------------------------------

WRITES = {
    "add_": lambda s, o: s.add_(1),
    "mul_": lambda s, o: s.mul_(2),
    "rows": lambda s, o: s[1:3].add_(o[1:3]),
    "column": lambda s, o: s[:, 1].copy_(o[:, 0] + 1),
    "turned": lambda s, o: s.t().add_(2),
    "copy_": lambda s, o: s.copy_(s + 3),
    "other": lambda s, o: s.copy_(o * 2),
}
RAISES = {
    "index": lambda t, i: t[i].sum(),
    "index_select": lambda t, i: t.index_select(0, i).sum(),
    "embedding": lambda t, i: torch.nn.functional.embedding(i, t).sum(),
    "custom": lambda t, i: checked(t, i).sum(),
}


def steps():
    write = st.tuples(st.just("write"), st.sampled_from(sorted(WRITES)), st.integers(0, 1))
    kept = st.tuples(st.just("keep"), st.just(""), st.integers(0, 1))
    put = st.tuples(st.just("put"), st.just(""), st.integers(0, 1))
    raising = st.tuples(st.just("raise"), st.sampled_from(sorted(RAISES)), st.just(0))
    return st.lists(st.one_of(write, kept, put, raising, raising), min_size=2, max_size=7)


def program_of(steps):
    """Two states that are written, and a table that is looked up with another index in each step that can raise."""

    def program(left, right, table, *indices):
        states, kept, found, raising = (left, right), [left * 1, right * 1], table.sum(), iter(indices)
        for kind, name, which in steps:
            state, other = states[which], states[1 - which]
            if kind == "write":
                WRITES[name](state, other)
            elif kind == "keep":
                kept[which] = kept[which] + state * 2
            elif kind == "put":
                state.copy_(kept[which])
            else:
                found = found + RAISES[name](table, next(raising))
        return found

    return program


@settings(max_examples=40, deadline=None)
@given(steps())
def test_random_programs_leave_the_state_of_eager_or_that_before_the_call(steps):
    sites = sum(kind == "raise" for kind, _, _ in steps)
    program, states = program_of(steps), (torch.ones(4, 3), torch.full((4, 3), 2.0))
    torch._dynamo.reset()
    compiled = compiled_for(program, *states, TABLE, *[FITS] * sites)
    for site in range(sites):
        bad = (*states, TABLE, *(OUT_OF_BOUNDS if place == site else FITS for place in range(sites)))
        wanted, found = after_raising(program, *bad), after_raising(compiled, *bad)
        for before, eager, mine in zip(states, wanted[:2], found[:2], strict=True):
            assert torch.equal(mine, eager) or torch.equal(mine, before)
