"""Replays that are found without a search, and everything that asks for one. In C++ and in Python."""

from __future__ import annotations

import contextlib
import gc
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

import graphex
from graphex.runtime import capture, guards
from graphex.runtime.capture_plan import KeyReader
from graphex.runtime.guards import Addresses, CaptureKey, ReplayGuards, make_guard
from graphex.torch_private.cuda import states, switches_for
from tests.harness.capture import agree, compile_it, count, in_threads, interrupted, replays, same, statuses
from tests.harness.host_ops import looks
from tests.harness.tape import TapeDevice


@pytest.fixture(autouse=True, params=["C++", "Python"])
def checked_in(request) -> str:
    """How it is found out whether a call fits."""
    request.getfixturevalue("in_cpp" if request.param == "C++" else "in_python")
    return request.param


@pytest.fixture
def searches(monkeypatch) -> list[CaptureKey]:
    """The keys that were made: a call that fits makes none."""
    made: list[CaptureKey] = []

    class Noting(KeyReader):
        def __call__(self, args: Any) -> CaptureKey:
            made.append(super().__call__(args))
            return made[-1]

    monkeypatch.setattr(capture, "KeyReader", Noting)
    return made


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu().sum()


class Doubling(TorchFunctionMode):
    """Doubles sums, which a compiled model does too."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is Tensor.sum else result


class World:
    """A compiled model, and everything around it that may change between two calls."""

    def __init__(self, tape: TapeDevice, **options: Any) -> None:
        self.tape, self.model, self.rows = tape, Model(), 3
        self.compiled = compile_it(self.model, dynamic=True, **options)
        self.contexts: dict[str, Callable[[], Any]] = {}

    def check(self, times: int = 1) -> None:
        for _ in range(times):
            x = torch.randn(self.rows, 4)
            with contextlib.ExitStack() as stack:
                for enter in self.contexts.values():
                    stack.enter_context(enter())
                found, wanted = self.compiled(x), self.model(x)
            with torch._C.DisableTorchFunction():
                same(found, wanted)

    def toggle(self, name: str, enter: Callable[[], Any]) -> None:
        if self.contexts.pop(name, None) is None:
            self.contexts[name] = enter

    # -- changes ------------------------------------------------------------------------------------------------

    def deterministic(self) -> None:
        torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled())

    def accumulation(self) -> None:
        # Dynamo does not look at this one.
        torch._C._set_cublas_allow_fp16_accumulation(not torch._C._get_cublas_allow_fp16_accumulation())

    def inference(self) -> None:
        self.toggle("inference", torch.inference_mode)

    def mode(self) -> None:
        self.toggle("mode", Doubling)

    def profiler(self) -> None:
        cpu = torch.profiler.ProfilerActivity.CPU
        self.toggle("profiler", lambda: torch.profiler.profile(activities=[cpu]))

    def stream(self) -> None:
        self.tape.stream_number = (self.tape.stream_number + 1) % 3

    def user_captures(self) -> None:
        self.tape.user_captures = not self.tape.user_captures

    def moved(self) -> None:
        self.model.linear.weight.data = torch.randn(4, 4)

    def replaced(self) -> None:
        self.model.linear.bias = nn.Parameter(torch.randn(4), requires_grad=False)

    def size(self) -> None:
        self.rows = 2 + self.rows % 4

    def reset(self) -> None:
        torch.compiler.reset()


CHANGES = [name for name, found in vars(World).items() if callable(found) and name not in ("check", "toggle")][1:]


@pytest.fixture
def world(tape) -> Iterator[Callable[..., World]]:
    """Makes one; the switches of the process are put back."""
    accumulation = torch._C._get_cublas_allow_fp16_accumulation()
    with torch._dynamo.config.patch(recompile_limit=64), torch.no_grad():
        yield lambda **options: World(tape, **options)
    torch._C._set_cublas_allow_fp16_accumulation(accumulation)
    torch.use_deterministic_algorithms(False)


def test_a_call_like_the_one_before_is_a_replay_without_a_search(world, searches):
    made = world()
    made.check(times=3)
    before = len(searches)
    made.check(times=5)
    assert len(searches) == before
    assert count(made.compiled, "straight") == 6


def test_there_is_something_to_change():
    assert {"deterministic", "stream", "moved", "reset"} < set(CHANGES)


@pytest.mark.parametrize("change", CHANGES)
def test_a_call_after_a_change_asks_again_and_is_right(change, world, searches):
    made = world(capture_limit=2)
    made.check(times=4)
    before = len(searches)
    getattr(made, change)()
    made.check()
    assert len(searches) > before or made.tape.user_captures  # then there is nothing to look for
    made.check(times=3)
    for _ in range(2):  # back, where it was one of two states
        getattr(made, change)()
        made.check(times=4)


@pytest.mark.parametrize("options", [{}, {"frozen_parameter": True}, {"capture_limit": 1}, {"clone_output": False}])
def test_random_changes_leave_every_result_right(options, world):
    """Frozen parameters keep their memory: that is what the user promises."""
    chosen = random.Random(str(options))
    changes = [name for name in CHANGES if not (name == "moved" and "frozen_parameter" in options)]
    made = world(**options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(60):
            getattr(made, chosen.choice(changes))()
            made.check(times=chosen.choice((1, 2, 4)))


def test_a_graph_that_was_evicted_is_not_replayed(world, tape):
    made = world(capture_limit=1)
    for _ in range(3):
        made.check(times=4)
        made.size()
    assert len(tape.alive) == 1
    assert count(made.compiled, "evicted") == 2


def test_another_object_at_the_place_of_a_frozen_parameter_is_noticed(world):
    made = world(frozen_parameter=True)
    for _ in range(12):
        made.check(times=3)
        del made.model.linear.bias
        gc.collect()
        made.model.linear.bias = nn.Parameter(torch.randn(4), requires_grad=False)


SCATTERS: dict[str, Callable[[Tensor], Tensor]] = {
    "select": lambda x: torch.select_scatter(x, x[1] * 2, 0, 1),
    "slice": lambda x: torch.slice_scatter(x, x[:2] * 2, 0, 1, 3),
    "diagonal": lambda x: torch.diagonal_scatter(x, x[0, :3] * 2),
    "two of them": lambda x: torch.select_scatter(torch.select_scatter(x, x[1] * 2, 0, 1), x[2] * 2, 0, 2),
}


@pytest.mark.parametrize("scatter", SCATTERS)
@torch.no_grad()
def test_what_counts_from_the_start_of_a_copy_that_begins_where_an_input_does(scatter, tape):
    def f(x: Tensor) -> Tensor:
        return SCATTERS[scatter](x).as_strided((2, 2), (4, 1), 0) * 2 + 1

    compiled = compile_it(f)
    base = torch.arange(40.0).view(10, 4)
    agree(compiled, f, (base.clone()[2:5] for _ in range(4)))


@torch.no_grad()
def test_what_counts_from_the_start_of_the_memory_notices_another_memory_at_the_same_place(tape):
    def f(x: Tensor) -> Tensor:
        return x.as_strided((2,), (1,), 0) * 2 + 1

    compiled = compile_it(f)
    numbers = np.arange(8, dtype=np.float32)
    inner, outer = torch.from_numpy(numbers[2:])[:4], torch.from_numpy(numbers)[2:6]
    for x in (inner, inner, inner, outer, outer, outer, inner):
        same(compiled(x), f(x))


def test_graphs_of_one_pool_wait_for_each_other_although_their_streams_stay(tape):
    functions = [lambda x: (x * 2).sin(), lambda x: (x * 2 + 1).sin()]
    some, others = (compile_it(function, use_graph_pool=(1, 1)) for function in functions)
    x = torch.ones(3)
    with torch.no_grad():
        for _ in range(4):
            tape.stream_number = 0
            some(x)
            tape.stream_number = 5
            others(x)
    assert tape.waits[-4:] == [(0, 5), (5, 0)] * 2
    assert count(some, "straight") == count(others, "straight") == 2


def test_under_a_profiler_the_replay_is_named(world):
    made = world()
    made.check(times=4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        made.check()
    assert any(event.name.startswith("graphex replay") for event in profile.events())


def test_threads_get_their_own_results_with_one_size_and_with_sizes_of_their_own(world):
    """With one size every call is a replay without a search. With three, for two graphs, the order decides which are
    freed: a call that is no replay is the first since then, and the next one captures.
    """
    made = world(capture_limit=2)
    made.check(times=3)

    def work(given: tuple[int, int]) -> None:
        seed, rows = given
        generator = torch.Generator().manual_seed(seed)
        agree(made.compiled, made.model, (torch.randn(rows, 4, generator=generator) for _ in range(30)))

    def replayed_and_captured() -> int:
        return sum(count(made.compiled, what) for what in ("replays", "captured", "recaptured"))

    in_threads(work, list(enumerate((3, 3, 3, 3))))
    assert count(made.compiled, "straight") == 1 + 4 * 30
    before = replayed_and_captured()
    in_threads(work, list(enumerate((3, 4, 5, 3))))
    assert 4 * 30 - 3 <= replayed_and_captured() - before <= 4 * 30
    assert count(made.compiled, "evicted") > 0


@pytest.mark.parametrize("shares_pool_only", [False, True])
@torch.no_grad()
def test_a_call_in_the_middle_of_another_one_leaves_that_right(shares_pool_only, tape, monkeypatch):
    """A finalizer may call anything, at any time."""
    functions = [lambda x: (x + 1).sin() * 2, lambda x: (x + 2).cos() * 3]
    outer, inner = functions[0], functions[shares_pool_only]
    compiled, other = (compile_it(function, use_graph_pool=(1, 1)) for function in (outer, inner))
    for _ in range(4):
        x = torch.randn(3)
        same(compiled(x), outer(x))
        same(other(x), inner(x))
    running, found, wanted = TapeDevice.running, [], []

    def interrupted(device: TapeDevice, tape: Any) -> None:
        running(device, tape)
        if not wanted:
            y = torch.randn(3)
            wanted.append(inner(y))
            found.append(other(y))

    monkeypatch.setattr(TapeDevice, "running", interrupted)
    with pytest.warns(graphex.GraphexWarning, match="in the middle of another"):
        agree(compiled, outer, (torch.randn(3) for _ in range(2)))
    same(found, wanted)
    assert len(graphex.journal(other).fallbacks) == 1


def looked_at_on_the_way(x: Tensor) -> Tensor:
    """Captured in two pieces; the second one reads a value where the first has left it."""
    a = (x * 2).relu() + 1
    return looks(a).sin() * 3 + a.cos()


@pytest.mark.parametrize("how", ["whole", "padded", "pieces"])
@torch.no_grad()
def test_a_call_in_the_middle_of_another_one_at_any_line_leaves_both_right(how, tape):
    function = looked_at_on_the_way if how == "pieces" else lambda x: (x * 2).relu() + 1
    compiled = compile_it(function, **({"dynamic": True, "capture_sizes": [8]} if how == "padded" else {}))

    def call() -> None:
        agree(compiled, function, [torch.randn(5)])

    for _ in range(4):
        call()
    with pytest.warns(graphex.GraphexWarning, match="in the middle of another"):
        assert interrupted(call, call) > 10
    before = replays(compiled)
    call()
    assert replays(compiled) == before + (2 if how == "pieces" else 1)


def test_what_is_compiled_meanwhile_is_used_from_then_on(world, searches, checked_in, monkeypatch):
    fits, asked = guards.fits, []
    if fits is None:
        pytest.skip("there is nothing to be loaded")

    def noted(*given: Any) -> bool:
        asked.append(fits(*given))
        return asked[-1]

    monkeypatch.setattr(guards, "fits", None)
    made = world()
    made.check(times=4)
    monkeypatch.setattr(guards, "fits", noted)
    made.check()
    before = len(searches)
    made.check(times=2)
    assert len(searches) == before
    assert asked[-2:] == [True, True]


def test_what_the_device_raises_is_raised(world, monkeypatch):
    broken: list[str] = []

    def is_capturing(device: TapeDevice) -> bool:
        if broken:
            raise RuntimeError(broken[0])
        return False

    monkeypatch.setattr(TapeDevice, "is_capturing", is_capturing)
    made = world()
    made.check(times=4)
    broken.append("the device is gone")
    with pytest.raises(RuntimeError, match="the device is gone"):
        made.check()
    broken.clear()
    made.check(times=2)
    assert statuses(made.compiled) == ["captured"]


# -- what is asked ---------------------------------------------------------------------------------------------------


class Limited(TapeDevice):
    """A device with settings of its own."""

    limit = 8

    def settings(self) -> int:
        return self.limit


@contextlib.contextmanager
def switched(name: str, *values: Any) -> Iterator[None]:
    """A switch of torch's set to something else."""
    get, put = getattr(torch._C, f"_get_{name}"), getattr(torch._C, f"_set_{name}")
    before = get()
    put(*(values or (not before,)))
    try:
        yield
    finally:
        put(*(before if isinstance(before, tuple) else (before,)))


@contextlib.contextmanager
def assigned(thing: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(thing, name)
    setattr(thing, name, value)
    try:
        yield
    finally:
        setattr(thing, name, before)


SWITCHES = switches_for({"cublas", "cudnn", "attention", "linalg"})

ELSEWHERE: dict[str, Callable[[Limited], Any]] = {
    "inference mode": lambda device: torch.inference_mode(),
    "a mode": lambda device: Doubling(),
    "a profiler": lambda device: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "a capture": lambda device: assigned(device, "user_captures", True),
    "settings": lambda device: assigned(device, "limit", 4),
    "stream": lambda device: assigned(device, "stream_number", 3),
    "fp16 reductions": lambda device: switched("cublas_allow_fp16_reduced_precision_reduction", False, False),
    "bf16 reductions": lambda device: switched("cublas_allow_bf16_reduced_precision_reduction", False, False),
    "fp16 accumulation": lambda device: switched("cublas_allow_fp16_accumulation"),
    "fp16 and bf16 reductions in attention": lambda device: switched("math_sdp_allow_fp16_bf16_reduction"),
    "cudnn": lambda device: switched("cudnn_enabled"),
    "deterministic": lambda device: switched("deterministic_algorithms"),
    "an error where nothing is deterministic": lambda device: deterministic_with_warnings(),
    "deterministic fill": lambda device: switched("deterministic_fill_uninitialized_memory"),
    "cudnn deterministic": lambda device: switched("cudnn_deterministic"),
    "cudnn benchmark": lambda device: switched("cudnn_benchmark"),
    "TF32": lambda device: assigned(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "TF32 in convolutions": lambda device: assigned(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
    **{
        f"{name} attention": lambda device, name=name: switched_attention(name)
        for name in ("flash", "mem_efficient", "math", "cudnn", "overrideable")
    },
    "the order of attentions": lambda device: sdpa_kernel(
        [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION], True
    ),
    "a part of the device for products": lambda device: carved_out(8),
}


@contextlib.contextmanager
def deterministic_with_warnings() -> Iterator[None]:
    before = torch._C._get_deterministic_algorithms(), torch._C._get_deterministic_algorithms_warn_only()
    torch._C._set_deterministic_algorithms(before[0], warn_only=not before[1])
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(before[0], warn_only=before[1])


@contextlib.contextmanager
def carved_out(cores: int) -> Iterator[None]:
    put = torch._C._set_sm_carveout_experimental
    put(cores)
    try:
        yield
    finally:
        put(None)


@contextlib.contextmanager
def switched_attention(name: str) -> Iterator[None]:
    before = getattr(torch._C, f"_get_{name}_sdp_enabled")()
    put = getattr(torch._C, f"_set_sdp_use_{name}")
    put(not before)
    try:
        yield
    finally:
        put(before)


@pytest.mark.parametrize("where", ELSEWHERE)
def test_a_call_fits_only_where_everything_is_as_it_was(where):
    device, x = Limited(), torch.randn(3)
    key = CaptureKey((), states(SWITCHES), device.settings())
    fits = make_guard(ReplayGuards(device, SWITCHES), key, device.stream(), Addresses([0], [x]))
    assert fits((x,))
    assert not fits((torch.randn(3),))
    with ELSEWHERE[where](device):
        assert not fits((x,))
    assert fits((x,))


def _attends(x: Tensor) -> Tensor:
    return torch.ops.graphex.attention(x, x, x, None, 0.5) + 1


def _attends_as_on_ascend(x: Tensor) -> Tensor:
    return torch.ops.npu.npu_fused_infer_attention_score(x, x, x, num_heads=4, scale=0.5, input_layout="BNSD")[0] + 1


@pytest.mark.parametrize("model", [_attends, _attends_as_on_ascend])
def test_a_graph_is_not_replayed_where_torch_attends_in_another_way(tape, model):
    compiled, x = compile_it(model), torch.randn(2, 4, 3, 8)
    for _ in range(3):
        same(compiled(x), model(x))
    assert count(compiled, "captured") == 1
    with switched_attention("flash"):
        for _ in range(3):
            same(compiled(x), model(x))
        assert count(compiled, "captured") == 2


def test_a_switch_that_another_thread_turns_meanwhile_is_noticed():
    device, x = TapeDevice(), torch.randn(3)
    key = CaptureKey((), states(SWITCHES), device.settings())
    with switched("cudnn_benchmark"):
        fits = make_guard(ReplayGuards(device, SWITCHES), key, device.stream(), Addresses([0], [x]))
        assert not fits((x,))
    assert fits((x,))
