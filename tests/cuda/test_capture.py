"""Device-graph capture on a real GPU: what is replayed equals eager, and what cannot be captured says why."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import graphex
from examples.tiny_llama import Shape, TinyLlama

pytestmark = pytest.mark.cuda

CUDA = "cuda"


def replays(compiled: object) -> int:
    return sum(counter["replays"] for counter in graphex.journal(compiled).counts.values())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x)) * 2


@torch.no_grad()
def test_the_second_call_captures_and_later_calls_replay():
    model = Block().to(CUDA)
    compiled = torch.compile(model, backend="graphex")
    for step in range(4):
        x = torch.randn(4, 16, device=CUDA)
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)
        assert replays(compiled) == max(0, step)
    journal = graphex.journal(compiled)
    assert [record.status for record in journal.captures] == ["captured"]
    assert journal.fallbacks == []


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_decode_loop_with_caches_passed_in_equals_eager(dtype):
    model = TinyLlama(Shape(layers=2, width=64, heads=4, kv_heads=2, hidden=128, vocabulary=64)).to(CUDA, dtype).eval()
    compiled = torch.compile(model, backend="graphex")
    mine, theirs = model.new_caches(2), model.new_caches(2)
    token = torch.tensor([[1], [2]], device=CUDA)
    for step in range(12):
        position = torch.tensor([step], device=CUDA)
        wanted, found = model(token, position, theirs), compiled(token, position, mine)
        torch.testing.assert_close(found, wanted)
        token = wanted[:, -1].argmax(-1, keepdim=True)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other)
    assert replays(compiled) == 11
    assert graphex.journal(compiled).fallbacks == []


@torch.no_grad()
def test_an_input_updated_in_place_by_its_owner_is_not_read_stale():
    compiled = torch.compile(lambda x: x + 1, backend="graphex")
    x = torch.zeros(8, device=CUDA)
    for value in range(5):
        x.fill_(value)
        assert compiled(x)[0].item() == value + 1
    assert replays(compiled) == 4


@torch.no_grad()
def test_an_output_that_is_kept_stays_right():
    compiled = torch.compile(lambda x: x * 2, backend="graphex")
    kept = [compiled(torch.full((4,), float(i), device=CUDA)) for i in range(20)]
    assert [out[0].item() for out in kept] == [2.0 * i for i in range(20)]


@torch.no_grad()
def test_swapping_a_parameters_memory_captures_again():
    model = Block().to(CUDA)
    compiled = torch.compile(model, backend="graphex")
    x = torch.randn(4, 16, device=CUDA)
    for _ in range(3):
        compiled(x)
    model.linear.weight.data = torch.randn(16, 16, device=CUDA)
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)
    assert [record.status for record in graphex.journal(compiled).captures] == ["captured", "recaptured"]


@torch.no_grad()
def test_every_size_gets_a_capture_of_its_own():
    model = Block().to(CUDA)
    compiled = torch.compile(model, backend="graphex", dynamic=True)
    for _ in range(3):
        for rows in (2, 3, 5):
            x = torch.randn(rows, 16, device=CUDA)
            torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)
    assert len(graphex.journal(compiled).captures) == 3
    assert replays(compiled) == 6


@torch.no_grad()
@pytest.mark.parametrize(
    "make", [lambda x: x[:, ::2], lambda x: x[:1].expand(6, 8), lambda x: x.t()], ids=["gaps", "expanded", "transposed"]
)
def test_inputs_keep_their_strides(make):
    def f(x: Tensor) -> Tensor:
        return x.reshape(-1) * 2 + x.sum()

    compiled = torch.compile(f, backend="graphex")
    for _ in range(4):
        x = make(torch.randn(6, 8, device=CUDA))
        torch.testing.assert_close(compiled(x), f(x))
    assert replays(compiled) == 3


@torch.no_grad()
def test_outputs_that_share_memory_still_do():
    def f(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x * 2
        return y, y[1:], y.t()

    compiled = torch.compile(f, backend="graphex")
    for _ in range(4):
        x = torch.randn(4, 4, device=CUDA)
        a, b, c = compiled(x)
        for found, wanted in zip((a, b, c), f(x), strict=True):
            torch.testing.assert_close(found, wanted)
            assert found.stride() == wanted.stride()
        assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() == c.untyped_storage().data_ptr()


@torch.no_grad()
def test_an_output_that_is_an_input_is_the_input_of_this_call():
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        x.add_(1)
        return x, x.view(-1)

    compiled = torch.compile(f, backend="graphex")
    for _ in range(4):
        x = torch.zeros(2, 3, device=CUDA)
        same, flat = compiled(x)
        assert same.data_ptr() == x.data_ptr() == flat.data_ptr()
        assert x.sum().item() == 6


@torch.no_grad()
@pytest.mark.parametrize(
    ("f", "reason"),
    [
        (lambda x, s: x[x > 0].sum() + s, "depends on data"),
        (lambda x, s: x * s.to("cpu").to("cuda"), "on the CPU"),
    ],
    ids=["data-dependent", "cpu"],
)
def test_what_cannot_be_captured_runs_and_says_why(f, reason):
    compiled = torch.compile(f, backend="graphex")
    x, s = torch.randn(8, device=CUDA), torch.ones((), device=CUDA)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), pytest.warns(graphex.GraphexWarning):
        for _ in range(3):
            torch.testing.assert_close(compiled(x, s), f(x, s))
    assert replays(compiled) == 0
    assert any(reason in record.reason for record in graphex.journal(compiled).fallbacks)


@torch.library.custom_op("graphex_tests::peeks", mutates_args=())
def peeks(x: Tensor) -> Tensor:
    return x * x.sum().item()  # a synchronisation that the graph does not show


@peeks.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.no_grad()
def test_a_capture_that_fails_half_way_leaves_the_process_healthy():
    compiled = torch.compile(lambda x: peeks(x + 1) * 2, backend="graphex")
    x = torch.ones(4, device=CUDA)
    with pytest.warns(graphex.GraphexWarning):
        for _ in range(4):
            torch.testing.assert_close(compiled(x), torch.full((4,), 32.0, device=CUDA))
    assert len(graphex.journal(compiled).fallbacks) == 1
    other = torch.compile(lambda x: x - 1, backend="graphex")
    for _ in range(4):
        assert other(x).sum().item() == 0
    assert replays(other) == 3


@torch.no_grad()
def test_random_numbers_are_fresh_in_every_replay_and_follow_the_seed():
    compiled = torch.compile(lambda x: nn.functional.dropout(x, 0.5), backend="graphex")
    x = torch.ones(4096, device=CUDA)
    drawn = [compiled(x) for _ in range(5)]
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])
    torch.manual_seed(7)
    first = compiled(x)
    torch.manual_seed(7)
    assert torch.equal(compiled(x), first)


@pytest.mark.parametrize("options", [{"force_eager": True}, {"mode": "eager"}], ids=str)
@torch.no_grad()
def test_no_capture_when_asked_for_none(options):
    compiled = torch.compile(lambda x: x + 1, backend="graphex", options=options)
    x = torch.zeros(3, device=CUDA)
    for _ in range(4):
        assert compiled(x).sum().item() == 3
    assert graphex.journal(compiled).captures == []


def test_twenty_training_steps_equal_eager():
    def trained(compile_it: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(Block(), nn.LayerNorm(16), Block()).to(CUDA)
        step = torch.compile(model, backend="graphex") if compile_it else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            loss = step(torch.randn(8, 16, device=CUDA)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if compile_it:
            assert {record.graph.split()[-1] for record in graphex.journal(step).captures} == {"forward", "backward"}
            assert replays(step) > 0
        return [parameter.detach().clone() for parameter in model.parameters()]

    for mine, theirs in zip(trained(True), trained(False), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_inference_mode_replays():
    model = Block().to(CUDA)
    compiled = torch.compile(model, backend="graphex")
    with torch.inference_mode():
        for _ in range(4):
            x = torch.randn(2, 16, device=CUDA)
            torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)
    assert replays(compiled) == 3


@torch.no_grad()
def test_verify_checks_the_captured_graph_too():
    model = Block().to(CUDA)
    compiled = torch.compile(model, backend="graphex", options={"verify": True})
    for _ in range(4):
        x = torch.randn(4, 16, device=CUDA)
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)
    assert [verdict.status for verdict in graphex.journal(compiled).verifications] == ["equal"]
    assert replays(compiled) > 0
