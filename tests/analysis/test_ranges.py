"""Ranges of integers that a graph counts by itself: what is said holds for every element, and unknown is unknown."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from graphex.analysis.shapes import known_range

STEPS = {
    "shift": lambda x, y, n: x + n,
    "back": lambda x, y, n: n - x,
    "scale": lambda x, y, n: x * n,
    "wrap": lambda x, y, n: x % (abs(n) + 1),
    "sum": lambda x, y, n: x + y,
    "difference": lambda x, y, n: x - y,
    "product": lambda x, y, n: x * y,
    "least": lambda x, y, n: torch.minimum(x, y),
    "row": lambda x, y, n: x.unsqueeze(0).expand(3, -1)[1],
    "part": lambda x, y, n: torch.cat([x, x])[2:7],
    "triangle": lambda x, y, n: torch.triu_indices(len(x), 4, -9)[n % 2][: len(x)],
    "lower triangle": lambda x, y, n: torch.tril_indices(9, 3, 9)[n % 2][: len(x)],
    "narrow": lambda x, y, n: x.int().long(),
    "best": lambda x, y, n: torch.stack([x, y]).argmax(0),
    "places": lambda x, y, n: torch.topk(x, min(3, len(x)))[1],
    "sorted": lambda x, y, n: torch.stack([x, y]).sort(0)[1][n % 2],
    "halves": lambda x, y, n: x.view(torch.int32).long()[: len(x)],
    "pairs": lambda x, y, n: torch.cat([x, x]).int().view(torch.int64),
    "unknown": lambda x, y, n: x * x.max(),
    "float": lambda x, y, n: (x * 1.5).long(),
}


class Checked(Interpreter):
    """Runs a graph and holds every value against the range that is known of it."""

    known = 0

    def run_node(self, n: Node) -> object:
        value = super().run_node(n)
        if isinstance(value, Tensor) and (found := known_range(n)) is not None:
            self.known += 1
            assert found[0] <= value.min().item()
            assert value.max().item() <= found[1]
        return value


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(-9, 9)), min_size=1, max_size=6),
    st.integers(-20, 20),
    st.sampled_from([-3, -1, 1, 2]),
)
def test_every_element_is_in_the_range_that_is_known(steps: list[tuple[str, int]], start: int, step: int) -> None:
    def program() -> Tensor:
        x = y = torch.arange(start, start + 5 * step, step)
        for name, number in steps:
            x = STEPS[name](x, y[: x.shape[0]], number)
        return x

    graph = make_fx(program, tracing_mode="fake")()
    checked = Checked(graph)
    checked.run()
    assert checked.known > 0


def test_what_may_not_fit_into_its_type_is_unknown() -> None:
    graph = make_fx(lambda: torch.arange(3) * 2**62 * 3, tracing_mode="fake")()
    assert known_range(graph.graph.output_node().args[0]) is None
