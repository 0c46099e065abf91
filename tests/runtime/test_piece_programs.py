"""Random programs around ops that cannot be captured: writes, views across cuts, results kept and written to."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import graphex
from graphex.debug.tensors import sharing
from tests.harness.capture import compile_it
from tests.harness.host_ops import doubles, doubles_outside, looks, looks_and_keeps
from tests.harness.tape import TapeDevice, run_on

ROWS, COLUMNS = 3, 4


def writes(x: Tensor, y: Tensor) -> Tensor:
    return x.add_(y.sin())


def writes_a_part(x: Tensor, y: Tensor) -> Tensor:
    x[0].mul_(0.5)
    return x


def replaces(x: Tensor, y: Tensor) -> Tensor:
    return x.copy_(y.cos() + 1)


def replaces_a_row(x: Tensor, y: Tensor) -> Tensor:
    x[1].copy_(y[0] * 0.5)
    return x


def doubled(x: Tensor, y: Tensor) -> Tensor:
    doubles(x)
    return x.mul_(0.5)


def a_part_doubled_outside(x: Tensor, y: Tensor) -> Tensor:
    doubles_outside(x[1:])
    x[1:].mul_(0.4)
    return x


OPS: dict[str, Any] = {
    "several": lambda x, y: ((x + y).sin() * 0.5).tanh() + 1,
    "product": lambda x, y: (x @ (y.t() @ y)).tanh(),
    "looks": lambda x, y: looks(x).tanh() + y,
    "looked at": lambda x, y: looks(x.tanh()) * 0.1,
    "kept": lambda x, y: looks_and_keeps(x.tanh()) * 0.1 + y,
    "host": lambda x, y: (x.double() * 2).float().tanh(),
    "fetched": lambda x, y: x.double().float(),
    "view": lambda x, y: x.view(-1).view(x.shape),
    "rows": lambda x, y: x[1:],
    "first": lambda x, y: x[:1],
    "reversed": lambda x, y: x.t()[:2].t(),
    "writes": writes,
    "writes a part": writes_a_part,
    "replaces": replaces,
    "replaces a row": replaces_a_row,
    "doubled": doubled,
    "a part doubled outside": a_part_doubled_outside,
}
number = st.integers(0, 20)
often = ["several", "several", "several", "looks", "looked at"]
instructions = st.lists(st.tuples(st.sampled_from([*sorted(OPS), *often]), number, number), min_size=4, max_size=12)
options = st.fixed_dictionaries(
    {
        "clone_output": st.sampled_from(["auto", True, False]),
        "clone_input": st.sampled_from(["auto", True, False]),
        "reuse_graph_pool_in_same_fx": st.booleans(),
        "input_inplace_pass": st.booleans(),
        "inplace_pass": st.booleans(),
        "use_graph_pool": st.sampled_from([None, (0, 7)]),
    }
)
calls = st.lists(st.sampled_from(["same", "new", "written"]), min_size=4, max_size=6)
seen: Counter[str] = Counter()


def model_of(program: list[tuple[str, int, int]], returned: list[int]) -> Any:
    def model(x: Tensor, cache: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        values = [(x * 2).sin() + 1, cache, x, w * 1]
        for op, left, right in program:
            one, other = values[left % len(values)], values[right % len(values)]
            if one.shape != (ROWS, COLUMNS) and op in ("writes a part", "replaces a row", "a part doubled outside"):
                op = "several"
            if op in ("rows", "first", "reversed") and one.shape != (ROWS, COLUMNS):
                op = "view" if one.is_contiguous() else "several"
            if op == "view" and not one.is_contiguous():
                op = "several"
            values.append(OPS[op](one, fitting(other, one)))
        return tuple(values[place % len(values)] for place in returned)

    return model


def fitting(value: Tensor, like: Tensor) -> Tensor:
    """Some of it, or its sums, in the shape of another."""
    if value.shape == like.shape:
        return value
    return (value.sum(0).sum(0) * 0.1).expand(like.shape)


class Run:
    """One function over several calls: what it returns, what is left in its inputs, who shares memory with whom."""

    def __init__(self, function: Any, seed: int) -> None:
        self.function = function
        self.draw = torch.Generator().manual_seed(seed)
        self.cache = torch.ones(ROWS, COLUMNS)
        self.w = torch.randn(ROWS, COLUMNS, generator=self.draw)
        self.x = torch.randn(ROWS, COLUMNS, generator=self.draw)
        self.kept: list[list[Tensor]] = []

    def call(self, how: str) -> tuple[list[Tensor], list[str]]:
        if how == "new":
            self.x = torch.randn(ROWS, COLUMNS, generator=self.draw)
        if how == "written" and self.kept:
            for tensor in self.kept[-1]:
                tensor.mul_(0.25)
        inputs = [self.x, self.cache, self.w]
        results = list(self.function(*inputs))
        owners = sharing(results, inputs)
        self.kept.append(results)
        return [tensor.clone() for tensor in (*results, *inputs)], owners


def compiled(program: Any, returned: Any, given_options: dict[str, Any]) -> Any:
    example = [torch.randn(ROWS, COLUMNS) for _ in range(3)]
    traced = make_fx(model_of(program, returned), tracing_mode="symbolic")(*[tensor.clone() for tensor in example])
    return graphex.compile_fx(traced, example, options=given_options)


@torch.no_grad()
@settings(
    max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)
@given(instructions, st.lists(number, min_size=1, max_size=5), options, calls, st.integers(0, 99))
def check_programs(monkeypatch, program, returned, given_options, how, seed):
    device = TapeDevice()
    run_on(monkeypatch, device)
    run = compiled(program, returned, given_options)
    mine, theirs = Run(run, seed), Run(model_of(program, returned), seed)
    may_keep = given_options["clone_output"] == "auto"
    for each in how:
        each = each if may_keep else each.replace("written", "same")
        found, wanted = mine.call(each), theirs.call(each)
        torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-5, equal_nan=True)
        if may_keep:
            assert found[1] == wanted[1]
    if may_keep:
        torch.testing.assert_close(mine.kept, theirs.kept, rtol=1e-5, atol=1e-5, equal_nan=True)
    journal = graphex.journal(run)
    seen["replayed in pieces"] += bool(journal.cuts) and any(count["replays"] for count in journal.counts.values())


def test_pieces_equal_the_program(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_programs(monkeypatch)
    assert seen["replayed in pieces"] > 5


ROWWISE: dict[str, Any] = {
    "several": lambda x, y, w: ((x + y).sin() * 0.5).tanh() + 1,
    "product": lambda x, y, w: (x @ w).tanh(),
    "looks": lambda x, y, w: looks(x).tanh() + y,
    "host": lambda x, y, w: (x.double() * 2).float().tanh(),
    "view": lambda x, y, w: x.view(-1, 2, 2).flatten(1),
    "every other": lambda x, y, w: x[:, ::2].repeat(1, 2),
    "softmax": lambda x, y, w: x.softmax(-1) + y,
    "rows turned": lambda x, y, w: x.flip(1),
    "writes": lambda x, y, w: x.add_(y.sin()),
    "of sizes": lambda x, y, w: x * x.shape[0] + y,
    "sums": lambda x, y, w: x + y.sum(0),
}
rowwise = st.lists(st.tuples(st.sampled_from([*sorted(ROWWISE), "several", "product"]), number, number), max_size=8)
sizes = st.lists(st.sampled_from([2, 3, 4, 5, 7, 9]), min_size=5, max_size=8)


def rows_of(program: list[tuple[str, int, int]], returned: list[int]) -> Any:
    def model(x: Tensor, cache: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        cache.mul_(0.5).add_(w[0])
        values = [(x * 2).sin() + 1, x @ w, x + cache]
        for op, left, right in program:
            values.append(ROWWISE[op](values[left % len(values)], values[right % len(values)], w))
        return tuple(values[place % len(values)] for place in returned)

    return model


@torch.no_grad()
@settings(
    max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)
@example([("several", 0, 1), ("product", 3, 0), ("writes", 4, 1)], [3, 4, 0], "auto", [4, 8], [2, 3, 5, 7, 9])
@given(
    rowwise,
    st.lists(number, min_size=1, max_size=4),
    st.sampled_from(["auto", True, False]),
    st.sampled_from([[], [4, 8]]),
    sizes,
)
def check_sizes(monkeypatch, program, returned, clone_output, capture_sizes, rows):
    device = TapeDevice()
    run_on(monkeypatch, device)
    torch._dynamo.reset()
    model = rows_of(program, returned)
    run = compile_it(model, clone_output=clone_output, capture_sizes=capture_sizes)
    mine, theirs, w = torch.ones(COLUMNS), torch.ones(COLUMNS), torch.randn(COLUMNS, COLUMNS)
    kept = []
    for count in [*rows, *rows]:
        x = torch.randn(count, COLUMNS)
        given_rows = x.clone()
        torch._dynamo.maybe_mark_dynamic(given_rows, 0)
        found, wanted = run(given_rows, mine, w), model(x.clone(), theirs, w)
        torch.testing.assert_close((found, mine), (wanted, theirs), rtol=1e-4, atol=1e-4, equal_nan=True)
        kept.append((found, wanted))
    if clone_output is not False:
        for found, wanted in kept:
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4, equal_nan=True)
    seen["padded"] += any(counter["padded"] for counter in graphex.journal(run).counts.values())


def test_every_size_equals_the_program(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_sizes(monkeypatch)
    assert seen["padded"]
