"""Replays that go past AOTAutograd's wrapper, and calls that must not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from tests.harness.capture import (
    agree,
    check_with_weights_replaced,
    compile_it,
    count,
    in_threads,
    replays,
    same,
    statuses,
)


def straight(compiled: object) -> int:
    """Replays without AOTAutograd's wrapper."""
    return count(compiled, "straight")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_once_captured_a_replay_is_all_that_a_call_does(mode, where):
    model = nn.Linear(4, 4).to(where).requires_grad_(False)
    compiled = compile_it(model)
    with mode():
        for _ in range(5):
            x = torch.randn(2, 4, device=where)
            found = compiled(x)
            same(found, model(x))
            assert not found.requires_grad
            assert torch.is_grad_enabled() == (mode is torch.enable_grad)
    assert (replays(compiled), straight(compiled)) == (4, 3)


@torch.no_grad()
def test_what_moved_is_noticed_and_captured_again(where):
    model = nn.Linear(4, 4).to(where)
    compiled = compile_it(model)
    check_with_weights_replaced(model, compiled, where)
    assert statuses(compiled) == ["captured", "recaptured", "recaptured"]
    assert straight(compiled) == replays(compiled) - 3


@torch.no_grad()
def test_models_that_share_their_code_take_turns_without_the_wrapper(where):
    models = [nn.Linear(4, 4).to(where) for _ in range(3)]
    compiled = [compile_it(model) for model in models]
    for _ in range(4):
        for model, fast in zip(models, compiled, strict=True):
            x = torch.randn(2, 4, device=where)
            same(fast(x), model(x))
    assert straight(compiled[0]) == replays(compiled[0]) - 3


@torch.no_grad()
def test_a_write_is_counted(where):
    compiled = compile_it(lambda cache, x: cache.add_(x).sum())
    cache, x = torch.zeros(3, device=where), torch.ones(3, device=where)
    for step in range(1, 6):
        before = cache._version
        assert compiled(cache, x).item() == 3 * step
        assert cache._version > before
    assert straight(compiled) == 3


@torch.no_grad()
def test_a_result_that_is_a_view_of_an_input_is_made_by_the_wrapper(where):
    compiled = compile_it(lambda cache, x: (cache.add_(x).view(-1), x + 1))
    cache, x = torch.zeros(2, 2, device=where), torch.ones(2, 2, device=where)
    for _ in range(4):
        view, _ = compiled(cache, x)
        assert view._base is cache
        same(view, cache.view(-1))
    assert replays(compiled) == 3
    assert straight(compiled) == 0


@torch.no_grad()
def test_overlapping_inputs_go_through_the_wrapper(where):
    def f(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return a + b * 2

    compiled = compile_it(f)
    mine, theirs = torch.arange(4.0, device=where), torch.arange(4.0, device=where)
    for _ in range(4):
        same(compiled(mine[:3], mine[1:]), f(theirs[:3], theirs[1:]))
    same(mine, theirs)
    assert straight(compiled) == 0


@torch.no_grad()
def test_a_tensor_subclass_goes_through_the_wrapper(where):
    from torch.testing._internal.two_tensor import TwoTensor

    compiled = compile_it(lambda x: x * 2 + 1)
    for _ in range(4):
        x = TwoTensor(torch.randn(3, device=where), torch.randn(3, device=where))
        found = compiled(x)
        assert isinstance(found, TwoTensor)
        same(found.a, x.a * 2 + 1)
        same(found.b, x.b * 2 + 1)
    assert straight(compiled) == 0


@torch.no_grad()
@pytest.mark.parametrize("summed", [False, True])
def test_results_of_a_symbolic_size_are_marked_by_the_wrapper(summed, where):
    def f(x: Tensor) -> Tensor:
        return (x * 2 + 1).sum() if summed else x * 2 + 1

    compiled = compile_it(f, dynamic=True)
    for size in (3, 4, 5):
        agree(compiled, f, (torch.randn(size, device=where) for _ in range(3)))
    assert (replays(compiled), straight(compiled)) == (6, 3 if summed else 0)


@torch.no_grad()
def test_a_graph_compiled_under_autocast_keeps_the_wrapper(where):
    model = nn.Linear(4, 4).to(where)
    compiled = compile_it(model)
    x = torch.randn(2, 4, device=where)
    for enabled in (True, False, True):
        with torch.autocast(where, dtype=torch.bfloat16, enabled=enabled):
            for _ in range(4):
                found, wanted = compiled(x), model(x)
                assert found.dtype == wanted.dtype == (torch.bfloat16 if enabled else torch.float32)
                torch.testing.assert_close(found, wanted)
    assert straight(compiled) == 2  # those in between, without autocast
    assert replays(compiled) > 2


def test_a_model_that_leaves_grad_mode_changed_does_so_in_every_call(where):
    def f(x: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        return (x @ x).relu()

    compiled = compile_it(f)
    x = torch.randn(3, 3, device=where)
    try:
        for _ in range(5):
            torch.set_grad_enabled(True)
            same(compiled(x), (x @ x).relu())
            assert not torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)


@torch.no_grad()
def test_while_a_profiler_looks_the_wrapper_is_there(where):
    compiled = compile_it(lambda x: (x @ x).relu())
    x = torch.randn(3, 3, device=where)
    for _ in range(3):
        compiled(x)
    before = straight(compiled)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        compiled(x)
    assert straight(compiled) == before
    assert any(event.name.startswith("graphex replay") for event in profile.events())
    compiled(x)
    assert straight(compiled) == before + 1


class _Listening(TorchFunctionMode):
    """Doubles what `clone` returns, and keeps the names of what it hears."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if not torch.compiler.is_compiling():
            self.heard.append(func.__name__)
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is Tensor.clone else result


@torch.no_grad()
@pytest.mark.parametrize("cloned", [False, True])
def test_a_torch_function_mode_does_not_see_the_copies_of_a_replay(cloned, where):
    def f(x: Tensor) -> Tensor:
        return (x @ x).relu() + (x.clone() if cloned else x)

    compiled = compile_it(f)
    x = torch.ones(3, 3, device=where)
    with _Listening() as mode:
        for _ in range(5):
            mode.heard.clear()
            found = compiled(x)
            heard = list(mode.heard)
            with torch._C.DisableTorchFunction():
                assert found.unique().item() == (5 if cloned else 4)
    assert straight(compiled) == 3
    assert not {"clone", "copy_", "_foreach_copy_"}.intersection(heard)


COMPUTED = {
    "a product": lambda x: (x @ x).relu() + 1,
    "a fused op": lambda x: torch.nn.functional.rms_norm(x, (4,), eps=1e-6) + 1,
    "a convolution": lambda x: torch.nn.functional.conv1d(x[None], x[:, :, None]),
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(
        x[None, None], x[None, None], x[None, None]
    ),
    "a custom op": lambda x: torch.ops.graphex_tests.handed_on(x) + 1,
}


@torch.library.custom_op("graphex_tests::handed_on", mutates_args=())
def handed_on(x: Tensor) -> Tensor:
    return x.clone()


handed_on.register_fake(torch.empty_like)


@contextmanager
def opposite(get: Callable[[], Any], put: Callable[[Any], None]) -> Iterator[None]:
    before = get()
    put(not before)
    try:
        yield
    finally:
        put(before)


@contextmanager
def in_reverse() -> Iterator[None]:
    """The same implementations of attention are allowed, and the last one is asked first."""
    with sdpa_kernel(SDPA[::-1], set_priority=True):
        yield


SDPA = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION]
SWITCHED: dict[str, Callable[[], Any]] = {  # torch's own tests freeze the flags of torch.backends
    "reductions": lambda: opposite(
        torch._C._get_cublas_allow_fp16_accumulation, torch._C._set_cublas_allow_fp16_accumulation
    ),
    "attention": lambda: opposite(torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    "order of attention": in_reverse,
    "cudnn": lambda: opposite(torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
}


@pytest.mark.parametrize(
    ("computed", "switch", "captures"),
    [
        ("a product", "reductions", 2),
        ("a product", "attention", 1),
        ("a product", "order of attention", 1),
        ("a product", "cudnn", 1),
        ("a fused op", "cudnn", 1),
        ("a convolution", "cudnn", 2),
        ("attention", "attention", 2),
        ("attention", "order of attention", 2),
        ("a custom op", "cudnn", 2),  # whatever it may call
        ("a custom op", "order of attention", 2),
    ],
)
@torch.no_grad()
def test_a_switch_that_is_set_between_two_replays_is_noticed_if_it_may_matter(computed, switch, captures, where):
    function = COMPUTED[computed]
    compiled = compile_it(function)
    x = torch.randn(4, 4, device=where)
    for _ in range(3):
        compiled(x)
    with SWITCHED[switch]():
        for _ in range(3):
            torch.testing.assert_close(compiled(x), function(x))
    assert statuses(compiled) == ["captured"] * captures


@torch.no_grad()
def test_threads_get_their_own_results(where):
    compiled = compile_it(lambda x: (x @ x).relu() + 1)

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(20):
            x = torch.randn(4, 4, generator=generator).to(where)
            torch.testing.assert_close(compiled(x), (x @ x).relu() + 1, atol=1e-4, rtol=1e-5)

    work(0)
    in_threads(work, [1, 2, 3])
    assert straight(compiled) > 60
