"""Streams on a GPU: the documented pass, streams of model code, capture, memory over many calls, the user's streams."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import graphex
from tests.harness.capture import compile_it, reasons, replays, statuses
from tests.harness.streams import DocumentedModel, documented_pass

pytestmark = pytest.mark.cuda

CUDA = "cuda"


def streams_of_kernels(call: Any, folder: Path) -> set[int]:
    """The streams that a profiler saw kernels on."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return {event["args"]["stream"] for event in events if event.get("cat") == "kernel"}


@triton.jit
def _multiprocessor_kernel(out, rounds):
    number = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    busy = 0.0
    for step in range(rounds):
        busy = tl.sqrt(busy + step)
    tl.store(out + tl.program_id(0), number + (busy < 0).to(tl.int32))


@torch.library.custom_op("graphex_test::multiprocessors", mutates_args=())
def multiprocessors(x: torch.Tensor) -> torch.Tensor:
    """The multiprocessor that each of 4,000 programs ran on."""
    out = torch.empty(4000, dtype=torch.int32, device=x.device)
    _multiprocessor_kernel[(4000,)](out, 2000)
    return out


@multiprocessors.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(4000, dtype=torch.int32, device=x.device)


@torch.no_grad()
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("label", [None, "side"])
def test_limited_work_stays_on_its_part_of_the_multiprocessors(eager, label):
    def f(x):
        before = multiprocessors(x)
        with graphex.scope.stream(label) if label else nullcontext(), graphex.scope.limit_core_num(20, 24):
            limited, y = multiprocessors(x), x @ x
        return before, limited, multiprocessors(y), y + 1

    compiled = compile_it(f, force_eager=eager)
    x = torch.randn(256, 256, device=CUDA)
    for number in range(50):
        before, limited, after, y = compiled(x)
        if number % 10 == 9:
            assert len(limited.unique()) == 16  # 20, rounded down to what the device can be divided into
            assert len(before.unique()) > 64
            assert len(after.unique()) > 64
            torch.testing.assert_close(y, x @ x + 1)
    assert reasons(compiled) == []
    assert (replays(compiled) > 40) is not eager


def test_a_part_that_is_too_small_is_on_record():
    def f(x):
        with graphex.scope.limit_core_num(4, 8):
            return x + 1

    compiled = compile_it(f)
    with pytest.warns(graphex.GraphexWarning, match="core limits are not applied"):
        compiled(torch.randn(4, device=CUDA))


@torch.no_grad()
@pytest.mark.parametrize("eager", [False, True])
def test_the_documented_pass_over_a_thousand_calls(eager, tmp_path):
    model = DocumentedModel()
    compiled = compile_it(model, post_grad_custom_pre_pass=documented_pass, force_eager=eager)
    inputs = [torch.randn(64, 64, device=CUDA) for _ in range(10)]
    wanted = [model(x) for x in inputs]
    for number in range(1000):
        found = compiled(inputs[number % 10])
        if number % 50 < 10:
            for got, right in zip(found, wanted[number % 10], strict=True):
                torch.testing.assert_close(got, right)
    assert reasons(compiled) == []
    assert (replays(compiled) > 900) is not eager
    if eager:  # a device graph runs a chain of nodes on one stream, wherever they were captured
        assert len(streams_of_kernels(lambda: compiled(inputs[0]), tmp_path)) >= 2


class Moe(nn.Module):
    """A shared expert beside routed ones."""

    def __init__(self, width: int = 256, experts: int = 4) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
        self.up = nn.Parameter(torch.randn(experts, width, width) / 16)
        self.down = nn.Parameter(torch.randn(experts, width, width) / 16)
        self.gate = nn.Linear(width, experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with graphex.scope.stream("shared", priority=-1):
            shared = self.shared(x)
        weights = self.gate(x).softmax(-1).t().unsqueeze(-1)
        hidden = torch.relu(torch.bmm(x.expand(len(self.up), *x.shape), self.up))
        return shared + (torch.bmm(hidden, self.down) * weights).sum(0)


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"force_eager": True}, {"auto_streams": True}])
def test_a_mixture_of_experts_with_a_scope_equals_eager_and_does_not_grow(options):
    torch.manual_seed(0)
    model = Moe().to(CUDA)
    compiled = compile_it(model, **options)
    x = torch.randn(16, 256, device=CUDA)
    wanted = model(x)
    for _ in range(20):
        compiled(x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(1000):
        found = compiled(x)
    torch.cuda.synchronize()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    del found
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
    assert reasons(compiled) == []


@torch.no_grad()
def test_values_on_side_streams_survive_a_busy_allocator():
    """Many short-lived values on three streams: memory that is given back too early would be somebody else's."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        total = x
        for number in range(12):
            with graphex.scope.stream(f"lane {number % 3}"):
                a = (x * number).sin()
                b = a @ x
            c = b.cos() + a
            with graphex.scope.stream(f"lane {(number + 1) % 3}"):
                total = total + (c @ x).tanh()
        return total

    x = torch.randn(512, 512, device=CUDA) / 30
    for options in ({}, {"force_eager": True}):
        torch._dynamo.reset()
        compiled = compile_it(fn, **options)
        wanted = fn(x)
        for _ in range(50):
            torch.testing.assert_close(compiled(x), wanted, rtol=1e-4, atol=1e-4)
        assert reasons(compiled) == []


@torch.no_grad()
def test_streams_and_events_of_torch_inside_a_compiled_function():
    side = torch.cuda.Stream()

    def with_stream(x):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = (x @ x).relu()
        z = x.cos()
        torch.cuda.current_stream().wait_stream(side)
        return y + z

    def with_events(x):
        started, ended = torch.cuda.Event(), torch.cuda.Event()
        started.record()
        with torch.cuda.stream(side):
            started.wait(side)
            y = (x @ x).relu()
            ended.record(side)
        z = x.cos()
        ended.wait()
        return y + z

    def without_events(x):
        with torch.cuda.stream(side):
            y = (x @ x).relu()
        return y + x.cos()

    def with_set_stream(x):
        current = torch.cuda.current_stream()
        torch.cuda.set_stream(side)
        y = (x @ x).relu()
        torch.cuda.set_stream(current)
        return y + x.cos()

    x = torch.randn(256, 256, device=CUDA)
    for fn in (with_stream, with_events, without_events, with_set_stream):
        torch._dynamo.reset()
        torch.cuda.synchronize()
        compiled = compile_it(fn)
        wanted = (x @ x).relu() + x.cos()
        for _ in range(20):
            torch.testing.assert_close(compiled(x), wanted)
        assert len(graphex.journal(compiled).streams) == 1, fn.__name__
        assert reasons(compiled) == [], fn.__name__
        assert statuses(compiled) == ["captured"], fn.__name__


def assert_in_order_with(side, compiled, calls):
    """`compiled` doubles its input: after what `side` was given before the call, before what it is given afterwards."""
    x = torch.zeros(2**22, device=CUDA)
    for number in range(1, calls + 1):
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)
            x.fill_(number)
        y = compiled(x)
        with torch.cuda.stream(side):
            z = y + 1
        torch.cuda.synchronize()
        assert z.min() == z.max() == 2 * number + 1


@torch.no_grad()
def test_the_users_stream_is_in_order_with_the_call():
    """What the stream was given before the call is done before it; what it is given afterwards comes after it."""
    side = torch.cuda.Stream()

    def fn(x):
        with torch.cuda.stream(side):
            y = x * 2
        return y + 0

    assert_in_order_with(side, compile_it(fn), calls=29)


@torch.no_grad()
def test_a_host_that_waits_for_a_stream_inside_has_waited_for_its_work():
    side = torch.cuda.Stream()

    def fn(x):
        with torch.cuda.stream(side):
            side.wait_stream(torch.cuda.current_stream())
            y = (x @ x).relu().sum(0).to("cpu", non_blocking=True)
        side.synchronize()
        return y

    compiled = torch.compile(fn, backend="graphex")
    x = torch.randn(4096, 4096, device=CUDA)
    wanted = (x @ x).relu().sum(0).cpu()
    for _ in range(3):
        torch.testing.assert_close(compiled(x).clone(), wanted, rtol=1e-3, atol=1e-1)


@torch.library.custom_op("graphex_test::scaled_by_sum", mutates_args=(), tags=(torch.Tag.data_dependent_output,))
def scaled_by_sum(x: torch.Tensor) -> torch.Tensor:
    return x * float(x.mean())


scaled_by_sum.register_fake(torch.empty_like)


@torch.no_grad()
def test_what_is_not_worth_a_piece_runs_on_its_streams_and_says_why():
    def fn(x):
        with graphex.scope.stream("side"):
            y = x.relu()
        return y + scaled_by_sum(x)

    compiled = compile_it(fn)
    x = torch.randn(64, 64, device=CUDA)
    with pytest.warns(graphex.GraphexWarning, match="reads a value back"):
        for _ in range(3):
            torch.testing.assert_close(compiled(x), fn(x))
    assert graphex.journal(compiled).streams
    assert replays(compiled) == 0


@torch.no_grad()
@pytest.mark.parametrize("kind", ["labels", "the user's stream"])
@pytest.mark.parametrize("clone_output", ["auto", False])
def test_pieces_with_streams_over_many_calls(kind, clone_output):
    """Large enough for streams to be at work when the host is in the next piece, and memory is used again and again."""
    side = torch.cuda.Stream()
    on_side = partial(graphex.scope.stream, "side") if kind == "labels" else partial(torch.cuda.stream, side)

    def fn(cache, x, beside=nullcontext):
        with beside():
            a = (x @ x).relu() * 2
            b = (a @ x).sin() + 1
        c = x.cos() + cache
        d = scaled_by_sum(c + b)
        with beside():
            e = (d @ x).tanh() + a
            cache.copy_(e.cos() * 0.5)
        f = (d * 2).sin() + c
        g = scaled_by_sum(f + e)
        return (g @ x).tanh() + b, e * 3, cache + f

    compiled = compile_it(lambda cache, x: fn(cache, x, on_side), clone_output=clone_output)
    mine, theirs = torch.zeros(1024, 1024, device=CUDA), torch.zeros(1024, 1024, device=CUDA)
    inputs = [torch.randn(1024, 1024, device=CUDA) / 32 for _ in range(5)]
    for number in range(60):
        x = inputs[number % 5]
        found = compiled(mine, x)
        wanted = fn(theirs, x)
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
        theirs.copy_(mine)  # differences do not add up
    assert not [reason for reason in reasons(compiled) if "clone_output" not in reason]
    assert replays(compiled) > 100
    assert graphex.journal(compiled).cuts


@torch.no_grad()
def test_results_of_pieces_on_streams_can_be_kept():
    def fn(x):
        with graphex.scope.stream("side"):
            a = (x @ x).relu() * 2
        b = scaled_by_sum(x.cos() + 1)
        with graphex.scope.stream("side"):
            c = (a @ b).sin() + 1
        return a, c, (b * 2).tanh() + 1

    compiled = compile_it(fn)
    inputs = [torch.randn(512, 512, device=CUDA) / 22 for _ in range(20)]
    found = [compiled(x) for x in inputs]
    for x, results in zip(inputs, found, strict=True):
        torch.testing.assert_close(results, fn(x), rtol=1e-3, atol=1e-3)
    assert reasons(compiled) == []


@torch.no_grad()
def test_limits_hold_in_the_pieces_of_a_cut_graph():
    def f(x):
        with graphex.scope.limit_core_num(20, 24):
            before, y = multiprocessors(x), (x @ x).relu() * 2
        z = scaled_by_sum(y)
        free = multiprocessors(z)
        with graphex.scope.limit_core_num(32, 32):
            after, w = multiprocessors(z), (z @ x).tanh() + 1
        return before, free, after, w

    compiled = compile_it(f)
    x = torch.randn(256, 256, device=CUDA) / 16
    for number in range(20):
        before, free, after, w = compiled(x)
        if number % 5 == 4:
            assert len(before.unique()) == 16
            assert len(free.unique()) > 64
            assert len(after.unique()) == 32
            torch.testing.assert_close(w, f(x)[3], rtol=1e-3, atol=1e-3)
    assert reasons(compiled) == []
    assert replays(compiled) > 30


@torch.no_grad()
def test_a_call_in_pieces_is_in_order_with_the_users_stream():
    side = torch.cuda.Stream()

    def fn(x):
        with torch.cuda.stream(side):
            y = (x * 2).abs() + 0
        z = scaled_by_sum(y * 0 + 1)
        with torch.cuda.stream(side):
            w = (y + 0) * z
        return w + 0

    assert_in_order_with(side, compile_it(fn), calls=19)


@torch.no_grad()
@pytest.mark.parametrize("order", [False, True])
def test_attention_is_computed_as_the_order_of_backends_says(order):
    """`graphex::attention` asks torch for an implementation wherever it has no kernel of its own."""

    @torch.library.custom_op(f"graphex_test::attends_{order}", mutates_args=())
    def attends(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    attends.register_fake(torch.empty_like)
    compiled = compile_it(lambda x: attends(x) + 1)
    x = torch.randn(1, 2, 64, 32, device=CUDA, dtype=torch.float16)
    backends = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(backends, set_priority=True):
        attends(x)  # torch 2.11 heeds an order only from the second one on
    for given in (backends, backends[::-1] if order else backends):
        with sdpa_kernel(given, set_priority=True):
            for _ in range(3):
                torch.testing.assert_close(compiled(x), attends(x) + 1)
    assert statuses(compiled) == ["captured"] * (1 + order)


def test_a_training_step_with_scopes():
    torch.manual_seed(0)
    model = Moe().to(CUDA)
    compiled = torch.compile(model, backend="graphex")
    x = torch.randn(16, 256, device=CUDA)
    for _ in range(4):
        wanted = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        found = torch.autograd.grad(compiled(x).square().sum(), list(model.parameters()))
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    assert len(graphex.journal(compiled).streams) == 2


@torch.no_grad()
def test_automatic_streams_decide_and_stay_right():
    torch.manual_seed(0)
    width = 2048

    def block(x, a, b, c, d):
        return (x @ a).relu() @ b + (x @ c).tanh() @ d

    weights = [torch.randn(width, width, device=CUDA) / 45 for _ in range(4)]
    x = torch.randn(8, width, device=CUDA)
    compiled = compile_it(block, auto_streams=True)
    wanted = block(x, *weights)
    for _ in range(10):
        torch.testing.assert_close(compiled(x, *weights), wanted, rtol=1e-3, atol=1e-3)
    (decision,) = graphex.journal(compiled).auto_streams
    assert decision.status in ("kept", "dropped")
    assert (decision.status == "kept") is (decision.ratio >= 1.02)


def test_the_deadlock_check_knows_the_cores_of_the_device():
    compiled = torch.compile(lambda x: x.sin(), backend="graphex", options={"deadlock_check": True})
    compiled(torch.randn(4, device=CUDA))
    (verdict,) = graphex.journal(compiled).deadlock_checks
    assert verdict.status == "clean"
    assert verdict.cores[0] == torch.cuda.get_device_properties(0).multi_processor_count
