"""Products of one row are told the weights that the next product reads; no result depends on it."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import graphex
from examples.tiny_llama import Shape, TinyLlama
from graphex.analysis.graphs import named_arguments
from tests.harness.projections import Folded, half, linear, norm, weights

ops = torch.ops.graphex
RULE = "read_ahead"
WIDTH, HIDDEN = 256, 384  # the smallest weight is one that is worth asking for


class Asked(Folded):
    """Products this large are summed in another order than eager's on a CPU."""

    exactly: ClassVar[dict[str, Any]] = {"rtol": 2e-2, "atol": 2e-2, "check_stride": True}

    @property
    def tried(self) -> tuple[int, int]:
        """How many products ask, of how many that have another one after them."""
        found = [(record.matches, record.candidates) for record in self.journal.rules if record.rule == RULE]
        return found[0] if found else (0, 0)


class Calls(TorchDispatchMode):
    """The weights of each product, and those that it is told, by their addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[list[int], ...]] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "graphex" and "linears" in func.__name__:
            call = named_arguments(func, args, kwargs or {})
            self.made.append(tuple([w.data_ptr() for w in call[name] or ()] for name in ("weights", "ahead")))
        return func(*args, **(kwargs or {}))


def block(x: Tensor, gain: Tensor, q: Tensor, k: Tensor, o: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    y = norm(x, gain)
    h = x + linear(linear(y, q) * linear(y, k), o)
    gate, up = linear(norm(h, gain), gate_up).chunk(2, -1)
    return h + linear(functional.silu(gate) * up, down)


def given(*shape: int) -> tuple[Tensor, ...]:
    squares = weights(WIDTH, WIDTH, WIDTH, columns=WIDTH)
    wide, down = weights(2 * HIDDEN, columns=WIDTH), weights(WIDTH, columns=HIDDEN)
    return half(*shape, WIDTH), half(WIDTH), *squares, *wide, *down


def pair(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return linear(linear(x, first).relu(), second)


def two(*shape: int) -> tuple[Tensor, ...]:
    return half(*shape, WIDTH), *weights(WIDTH, WIDTH, columns=WIDTH)


# -- what is asked for -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_each_product_is_told_the_weights_of_the_next(shape: tuple[int, ...]) -> None:
    args = given(*shape)
    compiled = Asked(lambda *args: block(block(*args), *args[1:]), *args)
    assert compiled.tried == (7, 7)
    with torch.no_grad(), Calls() as calls:
        compiled.run(*args)
    read, told = [weights for weights, _ in calls.made], [ahead for _, ahead in calls.made]
    assert told == [*read[1:], []]
    _, _, q, k, o, gate_up, down = (each.data_ptr() for each in args)
    assert read == [[q, k], [o], [gate_up, gate_up + HIDDEN * WIDTH * 2], [down]] * 2


def test_results_are_the_same_to_the_bit() -> None:
    args = given(1, 1)
    asking, plain = Asked(block, *args), Asked(block, *args, disable_passes=[RULE])
    assert (asking.tried, plain.tried) == ((3, 3), (0, 0))
    with torch.no_grad():
        torch.testing.assert_close(asking.run(*args), plain.run(*args), rtol=0, atol=0)


def test_a_decode_step_asks_from_the_first_layer_to_the_last_product() -> None:
    shape = Shape(layers=2, width=WIDTH, heads=4, kv_heads=2, hidden=HIDDEN, vocabulary=512, positions=16)
    model = TinyLlama(shape).bfloat16().eval()
    compiled = torch.compile(model, backend="graphex", fullgraph=True, options={"lift_idioms": "always"})
    mine, theirs = model.new_caches(1), model.new_caches(1)
    step = torch.tensor([[3]]), torch.tensor([5])
    with torch.no_grad():
        found, expected = compiled(*step, mine), model(*step, theirs)
    torch.testing.assert_close((found, mine), (expected, theirs), rtol=3e-2, atol=2e-2)
    journal = graphex.journal(compiled)
    assert not journal.fallbacks
    (tried,) = (record for record in journal.rules if record.rule == RULE)
    assert (tried.matches, tried.candidates) == (4 * shape.layers, 4 * shape.layers)


@pytest.mark.parametrize("off", [{"disable_passes": [RULE]}, {"disable_rules": [RULE]}, {"pattern_fusion_pass": False}])
def test_it_can_be_switched_off(off: dict[str, Any]) -> None:
    assert Asked(pair, *two(1), **off).tried == (0, 0)


# -- what is not -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2,), (1, 5), (64,)])
def test_several_rows_ask_for_nothing(shape: tuple[int, ...]) -> None:
    compiled = Asked(block, *given(*shape))
    assert "linears" in compiled.shown
    assert compiled.tried == (0, 0)


def test_rows_that_vary_ask_for_nothing() -> None:
    compiled = Asked(pair, *two(3), varies=[(0, 0)])
    assert compiled.shown == ["linears", "linears"]
    assert compiled.tried == (0, 0)


def test_training_asks_for_nothing() -> None:
    x, first, second = two(1)
    run = torch.compile(pair, backend="graphex", options={"lift_idioms": "always"})
    run(x, first.requires_grad_(), second).sum().backward()
    assert RULE not in {record.rule for record in graphex.journal(run).rules}


def test_a_device_without_kernels_asks_for_nothing() -> None:
    assert Asked(pair, *two(1), lift_idioms="auto").tried == (0, 0)


def test_small_weights_are_not_asked_for() -> None:
    assert Asked(pair, half(1, 16), *weights(16, 16, columns=16)).tried == (0, 0)


def test_a_product_on_another_stream_in_between() -> None:
    def placed(gm: GraphModule, example_inputs: Any, config: Any) -> None:
        products = (node for node in gm.graph.nodes if node.target is torch.ops.aten.mm.default)
        for node, stream in zip(products, (None, "side", None), strict=True):
            node.meta["custom"] = {"stream": stream} if stream else {}

    def model(x: Tensor, one: Tensor, other: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        y = linear(x, one)
        return linear(x * 2, other), linear(y * 2, last)

    args = half(1, WIDTH), *weights(WIDTH, WIDTH, WIDTH, columns=WIDTH)
    compiled = Asked(model, *args, post_grad_custom_pre_pass=placed)
    assert compiled.tried == (0, 2)
    assert all("run on different streams" in reason for reason in compiled.reasons(RULE))


def test_weights_that_are_made_in_between() -> None:
    def model(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        y = linear(x, first)
        return linear(y, second * y.sum())

    compiled = Asked(model, *two(1))
    assert compiled.tried == (0, 1)
    (reason,) = compiled.reasons(RULE)
    assert "is made behind it" in reason


def test_a_weight_that_is_written_in_between_is_read_as_written() -> None:
    def model(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        y = linear(x, first)
        second.mul_(2)
        return linear(y, second)

    Asked(model, *two(1))


@pytest.mark.parametrize(("rows", "asks"), [(2**16, 1), (2**16 + 512, 0)])
def test_what_is_read_in_between_must_leave_room_in_the_cache(rows: int, asks: int) -> None:
    def model(x: Tensor, at: Tensor, table: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return linear(linear(x, first) + functional.embedding(at, table).sum(-1), second)

    args = half(1, WIDTH), torch.tensor([3]), torch.zeros(rows, WIDTH - 1, dtype=torch.float16)
    compiled = Asked(model, *args, *weights(WIDTH, WIDTH, columns=WIDTH))
    assert compiled.tried == (asks, 1)
    assert [reason.startswith("32 MiB are read") for reason in compiled.reasons(RULE)] == [True] * (1 - asks)
