"""Captures made ahead of time, and calls without Dynamo around them."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

import graphex
from examples.tiny_llama import Shape, TinyLlama
from tests.harness.capture import agree, compile_it, count, replays, same, statuses
from tests.harness.host_ops import between, reads_back


@torch.library.custom_op("graphex_tests::fetched", mutates_args=(), tags=(torch.Tag.data_dependent_output,))
def fetched(x: Tensor) -> Tensor:
    return x.clone()


fetched.register_fake(torch.empty_like)

SMALL = Shape(layers=2, width=32, heads=4, kv_heads=2, hidden=48, vocabulary=64, positions=16)


def generator_state(where: str) -> torch.Tensor:
    return torch.cuda.get_rng_state() if where == "cuda" else torch.get_rng_state()


@torch.no_grad()
def test_warm_up_captures_every_call_and_the_next_ones_replay(where):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(where)
    compiled = compile_it(model, dynamic=True)
    records = graphex.warm_up(compiled, [(torch.randn(rows, 4, device=where),) for rows in (2, 5, 3)])
    assert [eval(record.key)[0] for record in records] == [5, 3, 2]  # the largest first
    before = replays(compiled)
    agree(compiled, model, (torch.randn(rows, 4, device=where) for rows in (3, 2, 5)))
    assert replays(compiled) == before + 3
    assert len(statuses(compiled)) == 3


@torch.no_grad()
def test_warm_up_leaves_caches_and_generators_as_they_were(where):
    def step(cache, x, *, scale):
        cache.add_(torch.nn.functional.dropout(x, 0.5) * scale)
        return cache + 1

    compiled = compile_it(step)
    cache, x = torch.zeros(4, device=where), torch.ones(4, device=where)
    state = generator_state(where)
    graphex.warm_up(compiled, [{"cache": cache, "x": x, "scale": 2.0}], progress=True)
    assert cache.eq(0).all()
    assert torch.equal(generator_state(where), state)
    compiled(cache=cache, x=x, scale=2.0)
    assert statuses(compiled) == ["captured"]


@torch.no_grad()
@pytest.mark.parametrize("off", [False, True], ids=["on", "off"])
def test_warm_up_of_what_is_not_captured_leaves_caches_as_they_were(off, monkeypatch):
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            cache[1:].copy_(x)
            torch._dynamo.graph_break()
            return cache.mul_(2) * self.calls

    monkeypatch.setenv("GRAPHEX_DISABLE", "1" if off else "0")
    model, cache = Step(), torch.zeros(4)
    compiled = torch.compile(model, backend="graphex", options={"mode": "eager"})
    assert graphex.warm_up(compiled, [(cache, torch.ones(3))]) == []
    assert model.calls == 0
    assert cache.eq(0).all()
    assert compiled(cache, torch.ones(3)).tolist() == [0, 2, 2, 2]


@torch.no_grad()
def test_warm_up_of_a_graph_in_pieces(where):
    compiled = compile_it(between)
    x, w = torch.randn(3, 4, device=where), torch.randn(4, 4, device=where)
    assert len(graphex.warm_up(compiled, [(x, w)])) == 2
    before = replays(compiled)
    agree(compiled, between, ((torch.randn(3, 4, device=where), w) for _ in range(2)))
    assert replays(compiled) == before + 4
    assert statuses(compiled) == ["captured", "captured"]


@torch.no_grad()
def test_warm_up_writes_once_to_what_one_piece_makes_and_another_writes_to(where):
    def model(index, table):
        index = fetched(index)
        index.add_(1).mul_(1).add_(0)
        return table[fetched(index)] * 2  # a second 1 would be one too many

    index, table = torch.zeros(3, dtype=torch.long, device=where), torch.randn(2, 4, device=where)
    traced = make_fx(model, tracing_mode="symbolic")(index, table)
    compiled = graphex.compile_fx(traced, [index, table])
    assert len(graphex.warm_up(compiled, [(index, table)])) == 1
    agree(compiled, model, ((index, torch.randn(2, 4, device=where)) for _ in range(2)))
    assert statuses(compiled) == ["captured"]


@torch.no_grad()
def test_warm_up_of_what_is_captured_already_changes_nothing(where):
    compiled = compile_it(lambda x: x * 2)
    x = torch.ones(3, device=where)
    assert len(graphex.warm_up(compiled, [(x,)])) == 1
    assert graphex.warm_up(compiled, [(x,), (x,)]) == []


@pytest.mark.parametrize("calls", [3, "x", torch.ones(2), [3], [torch.ones(2)], None], ids=repr)
def test_warm_up_refuses_what_is_no_list_of_calls(calls):
    with pytest.raises(graphex.InputError, match="example call"):
        graphex.warm_up(compile_it(lambda x: x * 2), calls)


def test_warm_up_refuses_what_was_not_compiled():
    with pytest.raises(graphex.InputError, match="not made by torch"):
        graphex.warm_up(lambda x: x, [(torch.ones(2),)])


def test_a_replayer_is_of_a_function():
    with pytest.raises(graphex.InputError, match=r"replayer takes what torch\.compile returned"):
        graphex.replayer(3)


@torch.no_grad()
def test_a_replayer_decodes_like_the_model(where):
    model = TinyLlama(SMALL).to(where).eval()
    compiled = compile_it(model)
    mine, theirs = model.new_caches(2), model.new_caches(2)
    token, position = torch.tensor([[1], [2]], device=where), torch.tensor([0], device=where)
    step = graphex.replayer(compiled, token, position, mine)
    assert all(cache.eq(0).all() for pair in mine for cache in pair)
    for number in range(8):
        token.copy_(torch.tensor([[number], [number + 1]]))
        position.fill_(number)
        found = step() if number % 2 else step(token.clone(), position.clone(), mine)
        torch.testing.assert_close(found, model(token, position, theirs))
    torch.testing.assert_close(mine, theirs)
    assert statuses(compiled) == ["captured"]
    assert (count(compiled, "replays"), count(compiled, "straight")) == (9, 8)


@torch.no_grad()
def test_a_replayer_rebuilds_the_models_result(where):
    def f(x, state):
        state["n"].add_(1)
        return {"out": (x * 2, [x + 1]), "same": state["n"], "k": 3, "none": None}

    compiled = compile_it(f)
    x, state = torch.ones(3, device=where), {"n": torch.zeros(1, device=where)}
    step = graphex.replayer(compiled, x, state)
    for turn in range(1, 4):
        x.fill_(turn)
        found = step()
        assert found["k"] == 3
        assert found["none"] is None
        assert found["out"][0][0].item() == 2 * turn
        assert found["out"][1][0][0].item() == turn + 1
        assert found["same"].item() == turn
        assert found["same"].data_ptr() == state["n"].data_ptr()


@torch.no_grad()
def test_a_replayer_of_a_graph_in_pieces(where):
    compiled = compile_it(between)
    x, w = torch.randn(3, 4, device=where), torch.randn(4, 4, device=where)
    step = graphex.replayer(compiled, x, w)
    for _ in range(3):
        x.copy_(torch.randn(3, 4))
        torch.testing.assert_close(step(), between(x, w))


@torch.no_grad()
def test_a_replayer_needs_one_captured_graph(where):
    def broken(x):
        y = (x * 2).sin()
        torch._dynamo.graph_break()
        return (y + 1).cos()

    with pytest.raises(graphex.InputError, match="runs 2"):
        graphex.replayer(compile_it(broken), torch.ones(3, device=where))
    with pytest.warns(graphex.GraphexWarning), pytest.raises(graphex.InputError, match="reads a value back"):
        graphex.replayer(compile_it(lambda x: reads_back(x) + 1), torch.ones(3, device=where))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["integer", "float", "size", "truth"])
def test_a_replayer_returns_no_number_that_a_graph_reads_back(where, kind):
    def step(x, w):
        a = (x @ w).relu() * 2 + 1
        read = {
            "integer": lambda: a.sum().int().item() + 1,
            "float": lambda: a.sum().item(),
            "size": lambda: a[a > 1.5].shape[0],
            "truth": lambda: (a.sum() > 3).item(),
        }
        return (a @ w).sin() * 3 + a, read[kind]()

    x, w = torch.randn(3, 4, device=where), torch.randn(4, 4, device=where)
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        with pytest.raises(graphex.InputError, match="a number in the result"):
            graphex.replayer(compile_it(step), x, w)


def reads_at_the_end(x, w):
    y = (x @ w).relu() * 2 + 1
    return y, y.argmax().item()


def reads_all_at_the_end(x, w):
    y = (x @ w).relu() * 2 + 1
    return y, y.tolist()


def decides_at_the_end(x, w):
    y, z = (x @ w).relu() * 2 + 1, (x @ w).sin() * 2
    return y if z.sum() > 0 else z


def reads_at_the_beginning(x, w):
    scale = x.tolist()[0][0]
    return (x @ w).relu() * scale + 1


@torch.no_grad()
@pytest.mark.parametrize("step", [reads_at_the_end, reads_all_at_the_end, decides_at_the_end, reads_at_the_beginning])
def test_a_replayer_passes_over_nothing_that_python_does_around_a_graph(where, step):
    x, w = torch.randn(3, 4, device=where), torch.randn(4, 4, device=where)
    with pytest.raises(graphex.InputError, match="breaks before or after"):
        graphex.replayer(compile_it(step), x, w)


@torch.no_grad()
def test_a_replayer_returns_numbers_that_are_the_same_in_every_call(where):
    x = torch.ones(3, device=where)
    step = graphex.replayer(compile_it(lambda x: (x * 2, x.shape[0] + 1, x.is_cuda), dynamic=True), x)
    assert step(x * 2)[1:] == (4, x.is_cuda)


@torch.no_grad()
def test_a_replayer_of_a_model_on_the_cpu_says_that_there_are_no_graphs_and_what_to_do():
    with pytest.raises(graphex.InputError) as told:
        graphex.replayer(compile_it(lambda x: x + 1), torch.ones(3))
    assert str(told.value) == (
        "a replayer needs a call that runs exactly one captured graph, this one runs 0 "
        "(its tensors are on cpu, where there are no device graphs); "
        "move the model and its inputs to a GPU, or call the compiled model itself."
    )


def test_a_replayer_computes_no_gradients(where):
    compiled = compile_it(nn.Linear(4, 4).to(where))
    with pytest.raises(graphex.InputError, match="no_grad"):
        graphex.replayer(compiled, torch.ones(2, 4, device=where))


@torch.no_grad()
def test_a_replayer_counts_what_it_is_given(where):
    step = graphex.replayer(compile_it(lambda x, y: x + y), torch.ones(3, device=where), torch.ones(3, device=where))
    with pytest.raises(graphex.InputError, match="made for 2 values, 1"):
        step(torch.ones(3, device=where))


class Scale:
    """An argument of which nobody but the model knows what is in it."""

    def __init__(self, by: torch.Tensor) -> None:
        self.by = by


@torch.no_grad()
@pytest.mark.parametrize("kind", ["number", "text", "object"])
def test_a_replayer_does_not_pass_over_an_argument_that_is_no_tensor(where, kind):
    def model(x, how):
        if isinstance(how, Scale):
            return x * how.by
        return x * how if isinstance(how, int) else (x + 1 if how == "up" else x - 1)

    def scale(by):
        return Scale(torch.full((3,), by, device=where))

    made_for, other = {"number": (3, 5), "text": ("up", "down"), "object": (scale(2.0), scale(4.0))}[kind]
    x = torch.ones(3, device=where)
    step = graphex.replayer(compile_it(model), x, made_for)
    same(step(x * 2, made_for), model(x * 2, made_for))
    with pytest.raises(graphex.InputError, match="make another one"):
        step(x, other)


@torch.no_grad()
def test_a_replayer_made_with_one_tensor_for_two_arguments_takes_no_two(where):
    x, y = torch.randn(4, 4, device=where), torch.randn(4, 4, device=where)
    step = graphex.replayer(compile_it(lambda x, y: x @ y + 1), x, x)
    same(step(y, y), y @ y + 1)
    with pytest.raises(graphex.InputError, match="one tensor for two arguments"):
        step(x, y)


@torch.no_grad()
def test_a_replayer_of_overlapping_arguments_writes_to_no_others(where):
    def model(x, y):
        return x.mul_(2), y.add_(1)

    memory, other = torch.arange(16.0, device=where), torch.arange(16.0, device=where)
    step = graphex.replayer(compile_it(model), memory[:8], memory[4:12])
    step()
    model(other[:8], other[4:12])
    same(memory, other)
    with pytest.raises(graphex.InputError, match="share memory"):
        step(other[:8], other[4:12])
    same(memory, other)


@torch.no_grad()
def test_a_replayer_takes_arguments_by_name_in_any_order(where):
    x, y = torch.randn(3, device=where), torch.randn(3, device=where)
    step = graphex.replayer(compile_it(lambda x, y: x - y), x=x, y=y)
    same(step(y=x, x=y), y - x)


@torch.no_grad()
@pytest.mark.parametrize("given", ["by name", "in another order", "in another container"])
def test_a_replayer_takes_no_arguments_of_another_form(given, where):
    x, y = torch.randn(3, device=where), torch.randn(3, device=where)
    step = graphex.replayer(compile_it(lambda x, pair: x - pair["y"] * pair["z"]), x, {"y": y, "z": x})
    calls = {
        "by name": lambda: step(pair={"y": y, "z": x}, x=x),
        "in another order": lambda: step(x, {"z": x, "y": y}),
        "in another container": lambda: step(x, (y, x)),
    }
    with pytest.raises(graphex.InputError, match="as they were when it was made"):
        calls[given]()


@torch.no_grad()
def test_a_replayer_takes_nothing_for_a_tensor_but_a_tensor(where):
    step = graphex.replayer(compile_it(lambda x: x + 1), torch.ones(3, device=where))
    with pytest.raises(graphex.InputError, match=r"made for a tensor, 2\.0 was given"):
        step(2.0)


@dataclass
class Boxed:
    value: torch.Tensor


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sum: torch.Tensor | int = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sum = self.sum + x
        return x * 2


@torch.no_grad()
@pytest.mark.parametrize(
    "model",
    [lambda x: Boxed(x * 2), lambda x: (x * 2, Boxed(x)), lambda x: (x * 2).numpy(), Sums()],
    ids=["object", "input in an object", "array", "attribute"],
)
def test_a_replayer_leaves_nothing_behind_that_a_model_does_with_its_results(model, where, request):
    if where != "cpu" and request.node.callspec.id == "array":
        pytest.skip("numpy has no arrays on this device")
    model = copy.deepcopy(model)  # the sum of another device's run of this test is no part of it
    with pytest.raises(graphex.InputError, match="keeps a part of it, or returns some in another kind of object"):
        graphex.replayer(compile_it(model), torch.ones(3, device=where))


@torch.no_grad()
def test_a_model_may_warm_up_another_one_while_it_is_warmed_up(where):
    inner, x = compile_it(lambda x: (x + 3) * 2), torch.ones(3, device=where)

    @torch.compiler.disable
    def get_ready() -> None:
        graphex.warm_up(inner, [(x,)], progress=False)

    def model(x: torch.Tensor) -> torch.Tensor:
        y = (x + 1).sin()
        get_ready()
        return (y * 2).cos()

    compiled = compile_it(model)
    found = graphex.warm_up(compiled, [(x,)], progress=False)
    assert [record.status for record in found] == ["captured", "captured"]
    assert statuses(inner) == ["captured"]


@torch.no_grad()
def test_a_replayer_returns_an_argument_that_the_graph_does_not_take(where):
    x, kept, other = (torch.randn(3, device=where) for _ in range(3))
    step = graphex.replayer(compile_it(lambda x, d: {"sum": x + d["b"], "kept": d["a"]}), x, {"a": kept, "b": x})
    assert step()["kept"] is kept
    found = step(x, {"a": other, "b": x})
    assert found["kept"] is other
    same(found["sum"], x + x)


@torch.no_grad()
def test_a_replayer_takes_no_tensors_that_are_made_of_others(where):
    x = TwoTensor(torch.ones(3, device=where), torch.ones(3, device=where))
    with pytest.raises(graphex.InputError, match="plain tensors"):
        graphex.replayer(compile_it(lambda x: x * 2 + 1), x)


@torch.no_grad()
def test_what_is_not_compiled_is_not_called_for_a_replayer(where):
    cache = torch.zeros(3, device=where)
    with pytest.raises(graphex.InputError, match=r"not made by torch\.compile"):
        graphex.replayer(lambda cache: cache.add_(1), cache)
    assert cache.eq(0).all()
