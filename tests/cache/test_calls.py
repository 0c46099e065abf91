"""A call that the cache knows is not traced by AOTAutograd again, and does what AOTAutograd did around it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphex
from graphex import Journal
from tests.harness.cached import asked
from tests.harness.cached import why_traced as why
from tests.harness.processes import forked

aten = torch.ops.aten


def function(x: Tensor) -> Tensor:
    return (x * 2).relu()


def writes(x: Tensor, state: Tensor) -> Tensor:
    state.mul_(2)
    state[1:].add_(x[1:])
    return state + x


def test_the_second_call_is_not_traced(run):
    assert why(run(function, torch.ones(2))) is None
    journal = run(function, torch.ones(2))
    assert asked(journal) == ["hit"]
    assert why(journal) == ""
    assert [(graph.inputs, graph.outputs, graph.devices) for graph in journal.graphs] == [(1, 1, ("cpu",))]


def test_writes_to_inputs_are_made_and_counted(run):
    counts = []
    for _ in range(2):
        torch._dynamo.reset()
        compiled = torch.compile(writes, backend="graphex")
        state = nn.Parameter(torch.ones(4))
        with torch.no_grad():
            compiled(torch.ones(4), state)
        assert state.tolist() == [2.0, 3.0, 3.0, 3.0]
        counts.append(state._version)
    assert why(graphex.journal(compiled)) == ""
    assert counts[0] == counts[1] > 0


def test_inputs_in_one_memory_are_another_call(run):
    def doubled(x, state):
        return x + 1, state.mul_(2) + x

    run(doubled, torch.ones(4), torch.ones(4))
    assert why(run(doubled, torch.ones(4), torch.ones(4))) == ""
    memory, eager = torch.arange(6.0), torch.arange(6.0)
    torch._dynamo.reset()
    compiled = torch.compile(doubled, backend="graphex")
    found = compiled(memory[:4], memory[2:])
    torch.testing.assert_close((found, memory), (doubled(eager[:4], eager[2:]), eager))
    assert why(graphex.journal(compiled)) != ""


def test_constants_of_the_trace_are_stored(run):
    def function(x):
        return x * torch.tensor([1.0, 2.0]) + torch.tensor(3.0)

    run(function, torch.ones(2))
    assert why(run(function, torch.ones(2))) == ""


def test_results_are_marked_as_dynamic_as_before(run):
    """Dynamo makes a graph with symbolic sizes of what takes them."""
    marks = []
    for _ in range(2):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="graphex", dynamic=True)
        marks.append(vars(compiled(torch.ones(5))))
    assert marks[0] == marks[1] != {}
    assert why(graphex.journal(compiled)) == ""


def halved(x: Tensor) -> Tensor:
    """A decomposition that is another one for odd sizes."""
    return torch.clamp_min(x, 0) if x.shape[0] % 2 == 0 else torch.maximum(x, torch.zeros_like(x))


def test_guards_of_the_trace_are_added_again(folder):
    """AOTAutograd alone asks whether a size is even: a loaded graph must not be called with an odd one."""

    def compiled():
        torch._dynamo.reset()
        backend = graphex.get_backend({}, custom_decompositions={aten.relu.default: halved})
        return torch.compile(function, backend=backend, dynamic=True)

    compiled()(torch.ones(4))
    loaded = compiled()
    for size in (6, 8, 7):
        torch.testing.assert_close(loaded(torch.ones(size)), function(torch.ones(size)))
    first, *others = graphex.journal(loaded).cache
    assert (first.status, first.reason) == ("hit", "")
    assert len(others) == 1
    for sizes in ((5, 9), (4, 2)):  # there are two graphs now, and each is found
        found = compiled()
        for size in sizes:
            torch.testing.assert_close(found(torch.ones(size)), function(torch.ones(size)))
        assert why(graphex.journal(found)) == ""


# -- training steps ----------------------------------------------------------------------------------------------------


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 3))


def state_after(step: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    """Two steps: the loss, gradients of weights and of an input that has a history, and buffers that were written."""
    before = x.clone().requires_grad_()
    for _ in range(2):
        loss = step(before * 2).square().sum()
        loss.backward()
    return [loss.detach(), before.grad, *(each.grad for each in model.parameters()), *model.buffers()]


def trained(model: nn.Module, x: Tensor, **options: Any) -> tuple[list[Tensor], Journal]:
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="graphex", **options)
    return state_after(compiled, model, x), graphex.journal(compiled)


def reasons(journal: Journal) -> list[tuple[str, str]]:
    return [(record.status, record.reason) for record in journal.cache]


def test_a_training_step_is_not_traced_again(run):
    x = torch.randn(6, 4)
    first, cold = trained(net(), x)
    second, warm = trained(net(), x)
    assert asked(cold) == ["miss", "miss"]
    assert reasons(warm) == [("hit", ""), ("hit", "")]
    assert not warm.passes
    eager = net()
    torch.testing.assert_close(first, second, rtol=0.0, atol=0.0)
    torch.testing.assert_close(second, state_after(eager, eager, x))


def test_a_loaded_training_step_tells_what_it_saves(run):
    (_, cold), (_, warm) = (trained(net(), torch.ones(6, 4)) for _ in range(2))
    assert [graph.phase for graph in warm.graphs] == ["forward", "backward"]
    assert warm.activations == cold.activations != []
    assert [(graph.nodes, graph.inputs, graph.outputs) for graph in warm.graphs] == [
        (graph.nodes, graph.inputs, graph.outputs) for graph in cold.graphs
    ]


def test_the_graph_of_a_loaded_training_step_is_retained_if_asked(run):
    """Also where the process that compiled it never did so."""
    trained(net(), torch.ones(6, 4))
    torch._dynamo.reset()
    model = net()
    compiled = torch.compile(model, backend="graphex")
    loss = compiled(torch.arange(24.0, requires_grad=True).view(6, 4) * 2).square().sum()
    loss.backward(retain_graph=True)
    once = model[0].weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(model[0].weight.grad, once * 2)
    with pytest.raises(RuntimeError):
        loss.backward()
    assert reasons(graphex.journal(compiled)) == [("hit", ""), ("hit", "")]


def test_a_loaded_training_step_is_traced_by_compiled_autograd(run):
    x = torch.randn(6, 4)
    first, _ = trained(net(), x)
    model = net()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="graphex")
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        second = state_after(compiled, model, x)
    torch.testing.assert_close(first, second)
    assert reasons(graphex.journal(compiled))[0] == ("hit", "")


def test_a_loaded_training_step_is_captured_as_before(run, tape):
    """Both graphs, with what the forward saves where the backward finds it."""
    x, states = torch.randn(6, 4), []
    for _ in range(2):
        torch._dynamo.reset()
        model = net()
        compiled = torch.compile(model, backend="graphex")
        states.append([state_after(compiled, model, x) for _ in range(3)])
    journal = graphex.journal(compiled)
    assert reasons(journal) == [("hit", ""), ("hit", "")]
    assert {graph.phase for graph in journal.graphs if graph.graph in {each.graph for each in journal.captures}} == {
        "forward",
        "backward",
    }
    assert all(counter["straight"] > 0 for counter in journal.counts.values())  # past AOTAutograd's wrappers
    torch.testing.assert_close(states[0], states[1])


def test_a_training_step_whose_backward_is_gone_is_compiled(run, folder):
    x = torch.randn(6, 4)
    first, cold = trained(net(), x)
    (folder / f"{cold.cache[1].key}.graph").unlink()
    second, warm = trained(net(), x)
    assert asked(warm) == ["hit", "miss"]
    torch.testing.assert_close(first, second, rtol=0.0, atol=0.0)
    assert reasons(trained(net(), x)[1]) == [("hit", ""), ("hit", "")]


STEP = textwrap.dedent(
    """
    import sys, threading
    import torch, graphex
    from torch import nn
    from graphex.cache import artefacts

    load, threads = artefacts.unpacked_code, []

    def loaded(*args):
        threads.append(threading.current_thread() is threading.main_thread())
        if len(threads) > 1 and "broken" in sys.argv:
            raise OSError("there is no room")
        return load(*args)

    artefacts.unpacked_code = loaded
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Softmax(-1))
    compiled, x = torch.compile(net, backend="graphex"), torch.randn(4, 8)

    def gradients(run):
        net.zero_grad()
        run(x).square().sum().backward()
        return [each.grad.clone() for each in net.parameters()]

    found, expected = gradients(compiled), gradients(net)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(compiled), expected)
    journal = graphex.journal(compiled)
    print([each.status for each in journal.cache], threads)
    print([(each.graph, each.what, each.reason) for each in journal.fallbacks])
    """
)


def test_the_code_of_a_backward_is_loaded_beside_the_first_forward(folder):
    """If it cannot be loaded then, the backward does without, says so, and is compiled by the next process."""

    def process(*arguments: str) -> list[str]:
        return forked(STEP, *arguments, GRAPHEX_REGIONS="on").splitlines()

    loaded, nothing = "['hit', 'hit'] [True, False]", "[]"
    assert process() == ["['miss', 'miss'] []", nothing]
    assert process() == [loaded, nothing]
    status, lost = process("broken")
    assert status == loaded
    assert "backward', 'region_0 runs without compiled code', 'the compiled code raised OSError: there is no" in lost
    assert process()[0].startswith("['hit', 'miss']")
    assert process() == [loaded, nothing]


def test_a_backward_is_loaded_at_once_if_the_first_call_is_captured(run, tape):
    """Loading code beside a capture would end it."""
    x = torch.randn(6, 4)
    first, _ = trained(net(), x, options={"capture_first_call": True})
    second, warm = trained(net(), x, options={"capture_first_call": True})
    torch.testing.assert_close(first, second)
    assert reasons(warm) == [("hit", ""), ("hit", "")]
    assert not warm.fallbacks


def test_several_threads_train_with_a_loaded_step(run):
    x, model = torch.randn(6, 4), net().eval()

    def gradient(step: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.autograd.grad(step(x).square().sum(), model[0].weight)[0]

    gradient(torch.compile(model, backend="graphex"))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="graphex")
    with ThreadPoolExecutor(4) as threads:
        for found in threads.map(gradient, [compiled] * 8):
            torch.testing.assert_close(found, gradient(model))
    assert set(asked(graphex.journal(compiled))) == {"hit"}


def test_a_frozen_weight_is_another_training_step(run):
    trained(net(), torch.ones(6, 4))
    model = net()
    model[0].weight.requires_grad_(False)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="graphex")
    compiled(torch.ones(6, 4)).sum().backward()
    assert asked(graphex.journal(compiled)) == ["miss", "miss"]
    assert model[0].weight.grad is None
    assert model[3].weight.grad is not None


def test_hooks_on_saved_tensors_are_traced(run):
    """Those of this process are called: they take part in what AOTAutograd traces, or in its wrapper."""
    x = torch.randn(6, 4)
    trained(net(), x)
    with torch.autograd.graph.saved_tensors_hooks(lambda value: value, lambda value: value):
        assert "hooks" in reasons(trained(net(), x)[1])[0][1]


def test_a_training_step_of_symbolic_sizes_is_traced(run):
    x = torch.randn(6, 4)
    trained(net(), x, dynamic=True)
    assert all(reason for _, reason in reasons(trained(net(), x, dynamic=True)[1]))


def test_a_training_step_that_returns_a_view_of_an_input_is_traced(run):
    def step(weight: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return weight * x, x[1:]

    for _ in range(2):
        torch._dynamo.reset()
        compiled, x = torch.compile(step, backend="graphex"), torch.ones(3)
        product, view = compiled(torch.ones(3, requires_grad=True), x)
        product.sum().backward()
        view.add_(1)
        assert x.tolist() == [1.0, 2.0, 2.0]
    assert all(reason for _, reason in reasons(graphex.journal(compiled)))


class LikeTransformers(nn.Module):
    """Makes a list of layers in each call, which torch counts, and computes angles without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            angles = (x * 2).cos()
        for layer in self.layers[:2]:
            x = layer(x) * angles
        return x


@pytest.mark.parametrize("is_training", [False, True])
def test_what_transformers_puts_into_a_graph_is_not_traced_again(folder, is_training):
    model, x = LikeTransformers(), torch.arange(8.0).view(2, 4).requires_grad_(is_training)
    expected = torch.autograd.grad(model(x).sum(), (*model.parameters(), x)) if is_training else ()
    for _ in range(2):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="graphex")
        with torch.set_grad_enabled(is_training):
            result = compiled(x)
        found = torch.autograd.grad(result.sum(), (*model.parameters(), x)) if is_training else ()
        torch.testing.assert_close((result, *found), (model(x), *expected))
        assert result.requires_grad is is_training
        assert torch.is_grad_enabled()
    assert [(each.status, each.reason) for each in graphex.journal(compiled).cache] == [("hit", "")] * (1 + is_training)


def test_a_function_that_leaves_gradients_off_does_so_again(folder):
    def function(x):
        torch._C._set_grad_enabled(False)
        return x * 2

    for _ in range(2):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="graphex")
        with torch.enable_grad():
            assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
            assert not torch.is_grad_enabled()


# -- calls that are traced ---------------------------------------------------------------------------------------------


@torch._dynamo.allow_in_graph
def of_the_user(x):
    return x * 2


def test_a_function_of_the_users_in_the_graph_is_traced(run):
    def function(x):
        return of_the_user(x) + 1

    run(function, torch.ones(2))
    assert "of_the_user" in why(run(function, torch.ones(2)))


def test_a_function_of_the_users_under_the_name_of_torchs_is_traced(run, monkeypatch):
    def function(x):
        return nn.functional.silu(x) * 2 + 1

    run(function, torch.ones(2))
    other = torch._dynamo.allow_in_graph(wraps(nn.functional.silu)(lambda x, inplace=False: torch.sigmoid(x)))
    monkeypatch.setattr(nn.functional, "silu", other)
    journal = run(function, torch.ones(2))
    assert asked(journal) == ["miss"]
    assert "silu" in why(run(function, torch.ones(2)))


def test_a_method_of_tensors_in_the_place_of_another_is_another_call(run, monkeypatch):
    def function(x):
        return x.sin() * 2 + 1

    run(function, torch.ones(2))
    monkeypatch.setattr(Tensor, "sin", Tensor.cos)
    assert asked(run(function, torch.ones(2))) == ["miss"]


def test_a_result_that_is_a_view_of_an_input_is_made_by_autograd(run):
    def function(x):
        return x[1:], x + 1

    run(function, torch.ones(4))
    assert why(run(function, torch.ones(4))).startswith("nothing is stored")


def test_autocast_is_traced(run):
    with torch.autocast("cpu"):
        run(function, torch.ones(2))
        assert why(run(function, torch.ones(2))) == "autocast is on"


def test_a_setting_of_autograd_that_changed_is_named(run):
    run(function, torch.ones(2))
    with torch._functorch.config.patch(cse=False):
        assert why(run(function, torch.ones(2))) == "AOTAutograd's setting 'cse' was True and is False"


def test_gradients_that_are_wanted_now_are_there(run):
    """The same graph, with and without gradients."""
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        run(function, x)
    torch._dynamo.reset()
    torch.compile(function, backend="graphex")(x).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]


def test_an_op_of_torchs_that_somebody_implements_is_traced(run):
    run(function, torch.ones(2))
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("relu", lambda x: torch.clamp_min(x, 1.0), "CompositeImplicitAutograd")
        assert "aten/relu" in why(run(function, torch.ones(2)))


# -- files -------------------------------------------------------------------------------------------------------------


def call_of(folder: Path) -> Path:
    (path,) = folder.glob("*.call")
    return path


def test_a_damaged_call_is_traced_and_written_again(run, folder):
    run(function, torch.ones(2))
    call_of(folder).write_bytes(call_of(folder).read_bytes()[:-1])
    assert why(run(function, torch.ones(2))).startswith("what is stored cannot be used: ")
    assert why(run(function, torch.ones(2))) == ""


def test_a_call_whose_graph_is_gone_is_compiled(run, folder):
    run(function, torch.ones(2))
    for path in folder.glob("*.graph"):
        path.unlink()
    assert asked(run(function, torch.ones(2))) == ["miss"]
    assert why(run(function, torch.ones(2))) == ""
