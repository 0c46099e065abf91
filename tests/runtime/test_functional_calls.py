"""Calls that autograd, functorch or a mode has to see: nothing they look for is lost, whatever kind of program runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, func, nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import graphex
from tests.harness.capture import agree, compile_it, count, reasons, replays, statuses
from tests.harness.tape import TapeDevice, run_on

Function = Callable[[Tensor], Any]
Look = Callable[[Function, Tensor, Tensor], Any]
KINDS = ["straight line", "captured", "pieces", "padded", "training"]
SAID = "an input carries a tangent (forward-mode AD)"
SAID_OF_VMAP = "the call is inside of a transform of torch.func (vmap, grad, jvp ...), or gradients are batched"


@pytest.fixture(autouse=True)
def warned_about() -> Iterator[None]:
    """What runs in another way than asked says so once; here that is in the journal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", graphex.GraphexWarning)
        yield


def model(x: Tensor) -> Tensor:
    doubled = x * 2
    return torch.cat([doubled.sin(), doubled.relu() * 3], -1) + 1


def through_the_host(x: Tensor) -> Tensor:
    there = ((x * 2).sin() + 1).double().exp()
    return (there.float() * 3 + x).cos().sin()


class Trained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def program(kind: str, monkeypatch: Any) -> tuple[Function, Function]:
    """A function, and what it is compiled to, after calls that capture where that kind does."""
    if kind != "straight line":
        device = TapeDevice()
        run_on(monkeypatch, device)
    function = {"pieces": through_the_host, "training": Trained()}.get(kind, model)
    compiled = compile_it(function, capture_sizes=[8]) if kind == "padded" else compile_it(function)
    for _ in range(4):
        x = torch.randn(4, 3)
        if kind == "padded":
            torch._dynamo.mark_dynamic(x, 0)
        result = compiled(x)
        if kind == "training":
            result.sum().backward()
    assert bool(replays(compiled)) == (kind != "straight line")
    assert len({record.graph for record in graphex.journal(compiled).captures}) == {
        "straight line": 0,
        "pieces": 2,
        "training": 2,
    }.get(kind, 1)
    assert count(compiled, "padded") == (4 if kind == "padded" else 0)
    return function, compiled


def tangents(function: Function, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
    with forward_ad.dual_level():
        result = forward_ad.unpack_dual(function(forward_ad.make_dual(x, v)))
        return result.primal.detach(), result.tangent


def tangents_without_grad(function: Function, x: Tensor, v: Tensor) -> Any:
    with torch.no_grad():
        return tangents(function, x, v)


def jacobian(function: Function, x: Tensor, v: Tensor) -> Any:
    return torch.autograd.functional.jacobian(function, x, strategy="forward-mode", vectorize=True)


LOOKS: dict[str, Look] = {
    "jvp": lambda f, x, v: func.jvp(f, (x,), (v,)),
    "vjp": lambda f, x, v: func.vjp(f, x)[1](torch.ones_like(f(x))),
    "jacfwd": lambda f, x, v: func.jacfwd(f)(x),
    "jacrev": lambda f, x, v: func.jacrev(f)(x),
    "hessian": lambda f, x, v: func.hessian(lambda z: f(z).sum())(x),
    "vmap": lambda f, x, v: func.vmap(f)(torch.stack([x, v])),
    "grad of vmap": lambda f, x, v: func.grad(lambda z: func.vmap(f)(torch.stack([z, v])).sum())(x),
    "functionalize": lambda f, x, v: func.functionalize(f)(x),
    "linearize": lambda f, x, v: func.linearize(f, x)[1](v),
}


@pytest.mark.parametrize("look", [tangents, tangents_without_grad, jacobian])
@pytest.mark.parametrize("kind", KINDS)
def test_tangents_go_through_every_kind_of_program(kind, look, monkeypatch):
    function, compiled = program(kind, monkeypatch)
    before = replays(compiled)
    for _ in range(2):
        x, v = torch.randn(4, 3), torch.randn(4, 3)
        torch.testing.assert_close(look(compiled, x, v), look(function, x, v))
    assert replays(compiled) == before
    assert set(reasons(compiled)) <= {SAID, SAID_OF_VMAP}  # torch 2.15 does not call a backend's program with them


@pytest.mark.parametrize("kind", KINDS)
def test_a_dual_level_without_tangents_changes_nothing(kind, monkeypatch):
    function, compiled = program(kind, monkeypatch)
    before = replays(compiled)
    with forward_ad.dual_level():
        agree(compiled, function, (torch.randn(4, 3) for _ in range(2)))
    assert (replays(compiled) > before) == (kind != "straight line")
    assert reasons(compiled) == []


def test_calls_behind_one_with_tangents_are_replays_again(tape):
    x, v = torch.randn(4, 3), torch.randn(4, 3)
    compiled = compiled_graph(model, x)
    for _ in range(2):
        tangents(compiled, x, v)
        before = replays(compiled)
        torch.testing.assert_close(compiled(x), model(x))
        assert replays(compiled) == before + 1
    assert reasons(compiled) == [SAID]


def test_a_tangent_of_a_parameter_is_seen(tape):
    layer = nn.Linear(3, 2).requires_grad_(False)

    def called(weight: Tensor, run: Callable[..., Tensor]) -> Tensor:
        return func.functional_call(run, {"weight": weight}, (x,)) if run is layer else run(x, weight)

    compiled = compile_it(lambda x, weight: nn.functional.linear(x, weight, layer.bias))
    x, v = torch.randn(4, 3), torch.randn(2, 3)
    for _ in range(4):
        compiled(x, layer.weight)
    found = tangents(lambda weight: called(weight, compiled), layer.weight, v)
    torch.testing.assert_close(found, tangents(lambda weight: called(weight, layer), layer.weight, v))


def test_forward_over_reverse_through_a_training_step(monkeypatch):
    function, compiled = program("training", monkeypatch)

    def hessian(f: Function) -> Any:
        strategy = {"vectorize": True, "outer_jacobian_strategy": "forward-mode"}
        return torch.autograd.functional.hessian(lambda z: f(z).sum(), torch.ones(4, 3), **strategy)

    torch.testing.assert_close(hessian(compiled), hessian(function))


def test_batched_gradients_go_through_a_captured_backward(monkeypatch):
    function, compiled = program("training", monkeypatch)
    x, v = torch.randn(4, 3, requires_grad=True), torch.randn(5, 4, 2)
    for _ in range(4):
        found, wanted = (torch.autograd.grad(f(x), x, v, is_grads_batched=True) for f in (compiled, function))
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("look", [tangents, jacobian])
def test_ops_of_graphex_have_every_derivative(look):
    def norm(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * torch.ones(3)

    compiled = compile_it(norm, lift_idioms="always")
    x, v = torch.randn(4, 3), torch.randn(4, 3)
    torch.testing.assert_close(compiled(x), norm(x))
    assert "lift_rms_norm" in {record.rule for record in graphex.journal(compiled).rewrites}
    torch.testing.assert_close(look(compiled, x, v), look(norm, x, v))


@pytest.mark.parametrize("look", [tangents, jacobian, LOOKS["vmap"]])
def test_scopes_and_events_mean_nothing_to_a_call_above_autograd(look):
    def branches(x: Tensor) -> Tensor:
        with graphex.scope.stream("side"):
            side = x.sin()
            done = graphex.scope.record()
        other = x.cos()
        graphex.scope.wait(done)
        return side * other

    x, v = torch.randn(4, 3), torch.randn(4, 3)
    torch.testing.assert_close(look(compile_it(branches), x, v), look(lambda x: x.sin() * x.cos(), x, v))


def test_a_write_to_an_input_takes_its_tangent_along(tape):
    def update(state: Tensor, x: Tensor) -> Tensor:
        state.mul_(x)
        return state + 1

    def written(f: Callable[[Tensor, Tensor], Tensor], x: Tensor, v: Tensor) -> Any:
        with forward_ad.dual_level():
            state = torch.ones(4, 3)
            results = f(state, forward_ad.make_dual(x, v)), state
            return [tuple(forward_ad.unpack_dual(result)) for result in results]

    compiled, state = compile_it(update), torch.ones(4, 3)
    for _ in range(4):
        compiled(state, torch.ones(4, 3))
    x, v = torch.randn(4, 3), torch.randn(4, 3)
    torch.testing.assert_close(written(compiled, x, v), written(update, x, v))


# -- results of compile_fx, and replayers: no guard of Dynamo's stands before them ---------------------------------


def compiled_graph(function: Function, x: Tensor) -> Function:
    compiled = graphex.compile_fx(make_fx(function)(x), [x])
    for _ in range(4):
        compiled(x)
    return compiled


@pytest.mark.parametrize("where", ["captured", "not captured"])
@pytest.mark.parametrize("name", LOOKS)
def test_transforms_of_functorch_around_a_compiled_graph(name, where, request):
    if where == "captured":
        request.getfixturevalue("tape")
    x, v = torch.randn(4, 3), torch.randn(4, 3)
    compiled = compiled_graph(model, x)
    torch.testing.assert_close(LOOKS[name](compiled, x, v), LOOKS[name](model, x, v))


@pytest.mark.parametrize("name", LOOKS)
def test_transforms_of_functorch_around_what_torch_compile_made(name, monkeypatch):
    if name in ("functionalize", "linearize"):
        pytest.skip("torch.compile refuses these, with any backend")
    function, compiled = program("captured", monkeypatch)
    x, v = torch.randn(4, 3), torch.randn(4, 3)
    torch.testing.assert_close(LOOKS[name](compiled, x, v), LOOKS[name](function, x, v))


def test_transforms_inside_of_what_is_compiled(tape):
    def derivative(x: Tensor) -> tuple[Tensor, Tensor]:
        return func.jvp(model, (x,), (torch.ones_like(x),))

    compiled = compile_it(derivative)
    agree(compiled, derivative, (torch.randn(4, 3) for _ in range(4)))
    assert replays(compiled) == 3


@pytest.mark.parametrize("where", ["captured", "not captured"])
def test_an_argument_that_requires_grad_gets_its_gradient(where, request):
    if where == "captured":
        request.getfixturevalue("tape")
    x = torch.randn(4, 3)
    compiled = compiled_graph(model, x)
    grown = x.clone().requires_grad_()
    found, wanted = (torch.autograd.grad(f(grown).square().sum(), grown) for f in (compiled, model))
    torch.testing.assert_close(found, wanted)
    assert reasons(compiled) == ["gradients are recorded, and a tensor requires some; call it under torch.no_grad()"]
    with torch.no_grad():
        assert not compiled(grown).requires_grad


def test_a_view_of_another_kind_is_not_taken_for_the_memory_behind_it(tape):
    x = torch.randn(4, 3, dtype=torch.complex64)
    compiled = compiled_graph(lambda z: z * 2j, x)
    for other in (x.conj(), torch._neg_view(x), x.conj().conj(), torch._efficientzerotensor((4, 3), dtype=x.dtype)):
        torch.testing.assert_close(compiled(other), other * 2j)


class Tagged(Tensor):
    """A tensor that sees every op and marks what comes out of it."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Tagged:
        made: Tagged = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        plain = torch.utils._pytree.tree_map_only(Tagged, lambda each: each.inner, (args, kwargs or {}))
        return torch.utils._pytree.tree_map_only(Tensor, Tagged, op(*plain[0], **plain[1]))


@pytest.mark.parametrize("where", ["captured", "not captured"])
def test_a_subclass_comes_out_of_a_compiled_graph_as_one(where, request):
    if where == "captured":
        request.getfixturevalue("tape")
    x = torch.randn(4, 3)
    found = compiled_graph(model, x)(Tagged(x))
    assert type(found) is Tagged
    torch.testing.assert_close(found.inner, model(x))


class Logged(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.ops.append(op._schema.name)
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["captured", "pieces", "padded"])
def test_a_dispatch_mode_sees_the_ops_of_a_call(kind, tape):
    function = through_the_host if kind == "pieces" else model
    x = torch.randn(4, 3)
    graph = make_fx(function, tracing_mode="symbolic" if kind == "padded" else "real")(x)
    compiled = graphex.compile_fx(graph, [x], {"capture_sizes": [8]} if kind == "padded" else None)
    for _ in range(4):
        compiled(x)
    before = replays(compiled)
    with Logged() as mode:
        torch.testing.assert_close(compiled(x), function(x))
    assert "aten::sin" in mode.ops or "aten::sin_" in mode.ops
    assert replays(compiled) == before
    compiled(x)
    assert replays(compiled) > before


def test_flops_of_a_captured_backward_are_counted(tape):
    def flops(run: Callable[[Tensor], Tensor]) -> int:
        loss = run(torch.ones(4, 3)).sum()
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        return counter.get_total_flops()

    trained = Trained()
    compiled = compile_it(trained)
    for _ in range(4):
        compiled(torch.randn(4, 3)).sum().backward()
    assert flops(compiled) == flops(trained) > 0


def test_fake_tensors_go_through_a_captured_graph(tape):
    x = torch.randn(4, 3)
    compiled = compiled_graph(model, x)
    with FakeTensorMode() as mode:
        found = compiled(mode.from_tensor(x))
    assert (type(found).__name__, found.shape) == ("FakeTensor", (4, 6))


@pytest.mark.parametrize("look", [tangents, LOOKS["vmap"], LOOKS["jvp"]])
@pytest.mark.parametrize("in_what", ["in_cpp", "in_python"])
def test_a_replayer_takes_what_a_replay_would_drop(look, in_what, tape, request):
    request.getfixturevalue(in_what)
    x, v = torch.randn(4, 3), torch.randn(4, 3)
    with torch.no_grad():
        step = graphex.replayer(compile_it(model), x)
        for _ in range(3):
            torch.testing.assert_close(step(x), model(x))
        torch.testing.assert_close(look(step, x, v), look(model, x, v))
        torch.testing.assert_close(step(x), model(x))


OPS: list[Function] = [
    torch.sin,
    torch.relu,
    torch.neg,
    lambda x: x * 2,
    lambda x: x.t().contiguous().t(),
    lambda x: torch.cat([x, x + 1])[: x.shape[0]],
    lambda x: x.softmax(-1),
    lambda x: (x @ x.t()) @ x,
    lambda x: x.clone().mul_(x),
]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from(range(len(OPS))), min_size=1, max_size=6), st.booleans())
def test_tangents_of_random_programs_are_those_of_eager(chosen, captured):
    def chain(x: Tensor) -> Tensor:
        for place in chosen:
            x = OPS[place](x) + x * 0.5
        return x

    torch.manual_seed(len(chosen))
    x, v = torch.randn(4, 3) * 0.5, torch.randn(4, 3)
    with pytest.MonkeyPatch.context() as monkeypatch:
        if captured:
            device = TapeDevice()
            run_on(monkeypatch, device)
        compiled = compiled_graph(chain, x)
        assert (statuses(compiled) == ["captured"]) == captured
        for look in (tangents, LOOKS["vmap"], LOOKS["vjp"]):
            torch.testing.assert_close(look(compiled, x, v), look(chain, x, v))


def test_tangents_see_what_verification_left_of_a_graph(tmp_path, monkeypatch):
    def wrong(gm: torch.fx.GraphModule, inputs: Any, config: Any) -> None:
        for node in gm.graph.nodes:
            if node.target is torch.ops.aten.sin.default:
                node.target = torch.ops.aten.cos.default

    monkeypatch.chdir(tmp_path)
    x, v = torch.randn(4, 3), torch.randn(4, 3)
    compiled = graphex.compile_fx(make_fx(model)(x), [x], {"post_grad_custom_pre_pass": wrong, "verify": True})
    torch.testing.assert_close(compiled(x), model(x))
    torch.testing.assert_close(tangents(compiled, x, v), tangents(model, x, v))
