"""What is particular to CUDA: pools and memory, streams, threads, random numbers, and captures that go wrong."""

from __future__ import annotations

import ctypes
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch
from torch import Tensor, nn

import graphex
from examples.tiny_llama import Shape, TinyLlama
from graphex.device.gpu import CudaDevice
from tests.harness.capture import agree, compile_it, count, in_threads, reasons, replays, statuses
from tests.harness.processes import python

pytestmark = pytest.mark.cuda

CUDA = "cuda"


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x)) * 2


def tiny_llama(dtype):
    torch.manual_seed(0)
    return TinyLlama(Shape(layers=2, width=64, heads=4, kv_heads=2, hidden=128, vocabulary=64)).to(CUDA, dtype).eval()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_decode_loop_with_caches_passed_in_equals_eager(dtype):
    model = tiny_llama(dtype)
    compiled = compile_it(model, lift_idioms="never")
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
    assert reasons(compiled) == []


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_decode_loop_with_lifted_idioms_is_as_near_to_float64_as_eager(dtype):
    """Kernels round once where eager rounds after every op: the results differ, and must not be worse."""
    model = tiny_llama(dtype)
    exact = tiny_llama(torch.float64)
    exact.load_state_dict(model.state_dict())
    compiled = compile_it(model)
    caches = {model: model.new_caches(2), compiled: model.new_caches(2), exact: exact.new_caches(2)}
    token = torch.tensor([[1], [2]], device=CUDA)
    errors = {model: 0.0, compiled: 0.0}
    for step in range(12):
        position = torch.tensor([step], device=CUDA)
        wanted = exact(token, position, caches[exact])
        found = {each: each(token, position, caches[each]) for each in errors}
        for each in errors:
            errors[each] = max(errors[each], (found[each] - wanted).abs().max().item())
        if dtype == torch.float32:
            torch.testing.assert_close(found[compiled], found[model])
        token = wanted[:, -1].argmax(-1, keepdim=True)
    assert errors[compiled] <= 1.5 * errors[model]
    assert "lift_rms_norm" in {record.rule for record in graphex.journal(compiled).rewrites}
    assert replays(compiled) == 11
    assert reasons(compiled) == []


# -- memory ------------------------------------------------------------------------------------------------------


def wide(x: Tensor) -> Tensor:
    a = (x * 2).sin()
    b = (a + 1).cos() * a
    return (b + a).relu() * 3 + b


def reserved() -> int:
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


@torch.no_grad()
def grown(sizes) -> int:
    """By how much the memory that is reserved grows when these sizes are captured."""
    torch.compiler.reset()
    before = reserved()
    compiled = compile_it(wide, dynamic=True)
    calls = [(torch.ones(1024 * rows, 1024, device=CUDA),) for rows in sizes]
    assert len(graphex.warm_up(compiled, calls)) == len(calls)
    del calls
    return reserved() - before


def test_sixteen_sizes_reserve_hardly_more_than_the_largest():
    """In a process of its own: what other tests give back late would be taken off. Libraries reserve with the first."""
    code = f"from {__name__} import grown; grown([2]); print(grown([32]), grown(range(2, 33, 2)))"
    largest, together = map(int, python("-W", "ignore", "-c", code).stdout.split())
    assert largest > 0
    assert together <= 1.1 * largest


@torch.no_grad()
def test_two_hundred_sizes_through_an_lru_of_eight_with_flat_memory():
    compiled = compile_it(wide, dynamic=True, capture_limit=8)
    seen = []
    for rows in range(402, 2, -2):
        x = torch.randn(rows, 1024, device=CUDA)
        for _ in range(2):
            found = compiled(x)
        torch.testing.assert_close(found, wide(x))
        if rows % 40 == 2:
            del x, found
            seen.append(reserved())
    assert len(seen) >= 8
    assert max(seen[1:]) <= seen[0] + 8 * 2**20
    assert count(compiled, "captured") == 200
    assert count(compiled, "evicted") == 192
    assert replays(compiled) == 200


@torch.no_grad()
def test_a_model_and_its_captures_give_everything_back():
    before = reserved(), torch.cuda.memory_allocated()

    def use() -> None:
        model = Block(1024).to(CUDA)
        compiled = compile_it(model)
        for _ in range(4):
            compiled(torch.randn(512, 1024, device=CUDA))
        assert replays(compiled) == 3

    use()
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before[1] + 64 * 2**20  # but for a workspace of cuBLAS
    torch.compiler.reset()
    assert reserved() <= before[0] + 64 * 2**20


@torch.no_grad()
def test_two_models_share_a_pool_that_they_are_given():
    pool = torch.cuda.graph_pool_handle()
    models = [Block(64).to(CUDA), nn.Sequential(nn.Linear(64, 64), nn.Tanh()).to(CUDA)]
    compiled = [compile_it(model, use_graph_pool=pool) for model in models]
    kept = []
    for _ in range(5):
        for model, fast in zip(models, compiled, strict=True):
            x = torch.randn(8, 64, device=CUDA)
            kept.append((fast(x), model(x)))
    for found, wanted in kept:
        torch.testing.assert_close(found, wanted)
    assert all(statuses(fast) == ["captured"] for fast in compiled)


@torch.no_grad()
def test_captures_with_pools_of_their_own():
    compiled = compile_it(wide, dynamic=True, reuse_graph_pool_in_same_fx=False)
    agree(compiled, wide, (torch.randn(rows, 16, device=CUDA) for rows in (2, 2, 2, 3, 3, 3, 2, 3)))
    assert statuses(compiled) == ["captured", "captured"]


@torch.no_grad()
def test_captures_after_all_of_a_pool_were_freed():
    for _ in range(3):
        torch.compiler.reset()
        gc.collect()
        compiled = compile_it(wide, capture_limit=1, dynamic=True)
        agree(compiled, wide, (torch.randn(rows, 16, device=CUDA) for rows in (4, 4, 4, 5, 5, 5, 4, 4)))
        assert reasons(compiled) == ["more than capture_limit=1 combinations of sizes are in use"]


# -- copies ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_all_copies_of_a_call_go_in_one_launch_each_way():
    def f(a, b, c):
        return (a * 2, b + 1, ~c)

    compiled = compile_it(f)

    def call():
        a, b = torch.randn(64, device=CUDA), torch.arange(64, device=CUDA)
        return compiled(a, b, torch.ones(64, device=CUDA, dtype=torch.bool))

    for _ in range(4):
        call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    if not names:
        pytest.skip("the profiler sees no kernels here")
    assert sum("multi_tensor_apply" in name for name in names) == 2, names


@torch.no_grad()
def test_a_number_on_the_cpu_is_captured_by_value():
    compiled = compile_it(lambda x, scale: (x * 2 + 1).relu() * scale)
    for value in (2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 2.0):
        x, scale = torch.randn(4, device=CUDA), torch.tensor(value)
        torch.testing.assert_close(compiled(x, scale), (x * 2 + 1).relu() * scale)
    assert statuses(compiled) == ["captured", "captured"]
    assert graphex.journal(compiled).cuts == []


# -- streams and threads -----------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_stream_that_was_destroyed_is_not_followed():
    compiled = compile_it(lambda x: (x @ x).relu() * 2 + 1)
    x, handle = torch.randn(64, 64, device=CUDA), ctypes.c_void_p()
    runtime = torch.cuda.cudart()
    for _ in range(4):
        wanted = compiled(x)
        assert int(runtime.cudaStreamCreate(ctypes.addressof(handle))) == 0
        assert handle.value is not None
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.ExternalStream(handle.value)):
            found = compiled(x)
        assert int(runtime.cudaStreamDestroy(handle.value)) == 0
        torch.testing.assert_close(compiled(x), wanted)
        torch.testing.assert_close(found, wanted)
    assert replays(compiled) == 11


@torch.no_grad()
def test_torch_made_its_own_streams_and_nobody_can_destroy_them():
    device, handle = CudaDevice(0), ctypes.c_void_p()
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1)):
        with torch.cuda.stream(stream):
            assert device.stream_lasts()
    runtime = torch.cuda.cudart()
    runtime.cudaStreamCreate(ctypes.addressof(handle))
    assert handle.value is not None
    with torch.cuda.stream(torch.cuda.ExternalStream(handle.value)):
        assert not device.stream_lasts()
    runtime.cudaStreamDestroy(handle.value)


@torch.no_grad()
def test_replays_on_several_streams_do_not_overtake_each_other():
    compiled = compile_it(wide)
    x = torch.randn(2048, 1024, device=CUDA)
    for _ in range(3):
        compiled(x)
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    torch.cuda.synchronize()
    for turn in range(12):
        given = x + turn
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[turn % 3]):
            results.append((given, compiled(given)))
    torch.cuda.synchronize()
    for given, found in results:
        torch.testing.assert_close(found, wide(given))


@torch.no_grad()
def test_threads_may_call_the_same_and_different_models():
    functions = [wide, lambda x: (x * 3).tanh() + x]
    compiled = [compile_it(function) for function in functions]
    for fast in compiled:  # compilation itself is torch's to serialise
        fast(torch.ones(256, 64, device=CUDA))

    def work(seed: int) -> None:
        generator = torch.Generator(CUDA).manual_seed(seed)
        for _ in range(30):
            for function, fast in zip(functions, compiled, strict=True):
                x = torch.randn(256, 64, device=CUDA, generator=generator)
                torch.testing.assert_close(fast(x), function(x))

    in_threads(work, range(4))
    assert all(replays(fast) > 50 for fast in compiled)


def test_what_a_freed_graph_reads_is_there_until_the_graph_is_gone():
    """While another thread captures, no graph can be given back, and its last replay may still be running."""
    device = CudaDevice(0)
    reads = [torch.ones(8, device=CUDA)]
    pool = device.pool()
    replay, _ = device.capture(lambda: reads[0] + 1, pool, "thread_local")
    memory = weakref.ref(reads[0])
    captures, freed = Event(), Event()

    def slowly() -> Tensor:
        captures.set()
        assert freed.wait(60)
        return torch.ones(8, device=CUDA) * 2

    with ThreadPoolExecutor(1) as other:
        capturing = other.submit(device.capture, slowly, pool, "thread_local")
        assert captures.wait(60)
        replay.free(reads.copy())
        reads.clear()
        assert memory() is not None
        freed.set()
        capturing.result()[0].free()
    assert memory() is None


@torch.no_grad()
def test_a_call_inside_of_the_users_own_capture():
    compiled = compile_it(wide)
    x = torch.randn(64, 64, device=CUDA)
    for _ in range(3):
        compiled(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compiled(x)
    x.copy_(torch.randn(64, 64, device=CUDA))
    graph.replay()
    torch.testing.assert_close(out, wide(x))


def test_a_backward_on_its_own_thread_is_captured():
    model = Block().to(CUDA)
    compiled = compile_it(model)
    for _ in range(4):
        x = torch.randn(4, 16, device=CUDA)
        model.zero_grad()
        compiled(x).sum().backward()
        found = model.linear.weight.grad.clone()
        model.zero_grad()
        model(x).sum().backward()
        torch.testing.assert_close(found, model.linear.weight.grad)
    assert replays(compiled) == 6


# -- random numbers ----------------------------------------------------------------------------------------------


@torch.no_grad()
def test_random_numbers_are_fresh_in_every_replay_and_follow_the_seed():
    compiled = compile_it(lambda x: nn.functional.dropout(x, 0.5))
    x = torch.ones(4096, device=CUDA)
    drawn = [compiled(x) for _ in range(5)]
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])
    torch.manual_seed(7)
    first = compiled(x)
    torch.manual_seed(7)
    assert torch.equal(compiled(x), first)
    torch.manual_seed(7)
    assert torch.equal(nn.functional.dropout(x, 0.5), first)


# -- elsewhere ---------------------------------------------------------------------------------------------------


def test_blocking_launches_still_capture():
    code = (
        "import torch, graphex\n"
        "f = torch.compile(lambda x: x * 2 + 1, backend='graphex')\n"
        "with torch.no_grad():\n"
        "    for i in range(4): assert f(torch.full((4,), float(i), device='cuda'))[0].item() == 2 * i + 1\n"
        "print(len(graphex.journal(f).captures))"
    )
    assert python("-c", code, CUDA_LAUNCH_BLOCKING="1").stdout.strip() == "1"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@torch.no_grad()
def test_a_model_on_the_second_device():
    model = Block().to("cuda:1")
    compiled = compile_it(model)
    agree(compiled, model, (torch.randn(4, 16, device="cuda:1") for _ in range(4)))
    assert replays(compiled) == 3


@torch.no_grad()
def test_verify_checks_the_captured_graph_too():
    model = Block().to(CUDA)
    compiled = compile_it(model, verify=True)
    for _ in range(4):
        x = torch.randn(4, 16, device=CUDA)
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)
    assert [verdict.status for verdict in graphex.journal(compiled).verifications] == ["equal"]
    assert replays(compiled) > 0


@pytest.mark.parametrize("options", [{"mode": "eager"}, {"force_eager": True}], ids=str)
@torch.no_grad()
def test_a_replayer_of_what_was_told_not_to_capture_says_that_this_is_why(options):
    with pytest.raises(graphex.InputError, match=rf"runs 0 \(.*{next(iter(options))}"):
        graphex.replayer(compile_it(lambda x: x + 1, **options), torch.ones(3, device="cuda"))
