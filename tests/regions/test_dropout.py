"""Dropout in regions: masks from a seed, as random as eager's; eager's own masks wherever that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import graphex

RULE = "seeded_dropout"


def dropped(x: Tensor) -> Tensor:
    return functional.dropout(torch.sin(x) * 2 + 3, 0.25) * 1.5


def compiled(fn, **options):
    return torch.compile(fn, backend="graphex", options={"region_dropout": "seeded", **options})


def stepped(run, x: Tensor) -> tuple[Tensor, Tensor]:
    """The result of a call and its gradient."""
    x = x.detach().requires_grad_()
    result = run(x)
    result.sum().backward()
    return result.detach(), x.grad


def matches(run) -> int:
    return len([each for each in graphex.journal(run).rewrites if each.rule == RULE])


def near_misses(run) -> list[str]:
    return [each.reason for each in graphex.journal(run).refusals if each.rule == RULE]


def test_a_training_forward_holds_its_dropout_in_one_region():
    run, x = compiled(dropped), torch.randn(64, 96)
    result, gradient = stepped(run, x)
    kept = result != 0
    assert abs(kept.float().mean().item() - 0.75) < 0.03
    torch.testing.assert_close(result, torch.where(kept, (torch.sin(x) * 2 + 3) * 2, 0))
    torch.testing.assert_close(gradient, torch.where(kept, torch.cos(x) * 4, 0))
    (forward,) = [each for each in graphex.journal(run).regions if each.graph.endswith("forward")]
    assert forward.inlined == ("graphex.dropout.default",)
    assert matches(run) == 1


def test_compiled_code_computes_the_masks_of_the_op():
    def fn(x: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.graphex.dropout(torch.cos(x) * 2 + 3, seed, 0.25)

    run, x = compiled(fn), torch.randn(3, 50, 70)
    for seed in (5, -(2**62)):
        for mine, wanted in zip(run(x, torch.tensor([seed])), fn(x, torch.tensor([seed])), strict=True):
            torch.testing.assert_close(mine, wanted)
    assert [each.inlined for each in graphex.journal(run).regions] == [("graphex.dropout.default",)]


COMPILED = "compiled for a GPU, and there is none to run it on"


@pytest.fixture
def ptx(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Inductor writes Triton kernels, which are compiled for a Hopper GPU and go no further."""
    triton = pytest.importorskip("triton", reason="needs triton (Linux)")
    from torch._inductor import config
    from torch._inductor.runtime import triton_heuristics
    from triton.backends.compiler import GPUTarget

    found: list[str] = []
    hopper, really = GPUTarget("cuda", 90, 32), triton.compile

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return hopper

    def compile_only(source: Any, target: object = None, options: dict[str, Any] | None = None) -> None:
        known = {name: value for name, value in (options or {}).items() if name in ("num_warps", "num_stages")}
        found.append(really(source, target=hopper, options=known).asm["ptx"])
        raise RuntimeError(COMPILED)

    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    monkeypatch.setattr(triton_heuristics.triton, "compile", compile_only)
    with config.patch(cpu_backend="triton", compile_threads=1, fx_graph_cache=False):
        yield found


@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
def test_a_region_with_dropout_compiles_for_a_gpu(ptx):
    layer: Callable[[Tensor], Tensor] = nn.LayerNorm(768)
    run = compiled(lambda x: layer(x + functional.dropout(functional.silu(x), 0.1)))
    stepped(run, torch.randn(8, 128, 768))
    assert ptx
    reasons = [each.reason for each in graphex.journal(run).fallbacks]
    assert reasons
    assert all(COMPILED in reason for reason in reasons)


def test_masks_differ_from_step_to_step_and_from_call_to_call_and_repeat_with_the_seed(uncompiled):
    def twice(x: Tensor) -> Tensor:
        return torch.stack([dropped(x), dropped(x)])

    run, x = compiled(twice), torch.randn(16, 32)
    torch.manual_seed(3)
    first, second = stepped(run, x)[0], stepped(run, x)[0]
    assert len({tuple((each != 0).flatten().tolist()) for each in (*first, *second)}) == 4
    torch.manual_seed(3)
    assert torch.equal(stepped(run, x)[0], first)
    assert torch.equal(stepped(run, x)[0], second)
    assert matches(run) == 2


def test_layers_that_are_alike_share_a_region(uncompiled):
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x + functional.dropout(functional.silu(self.linear(x)), 0.1))

    run = compiled(nn.Sequential(*(Layer() for _ in range(8))))
    run(torch.randn(4, 16)).sum().backward()
    statuses = [each.status for each in graphex.journal(run).regions if each.graph.endswith("forward")]
    assert "reused" in statuses
    assert matches(run) == 8


@pytest.mark.parametrize(
    "options", [{"region_dropout": "eager"}, {"region_dropout": "auto"}, {"verify": True}, {"disable_rules": [RULE]}]
)
def test_masks_are_eagers_if_that_is_asked_for_and_on_a_cpu(uncompiled, options):
    run, x = compiled(dropped, **options), torch.randn(8, 16)
    torch.manual_seed(3)
    mine = stepped(run, x)
    torch.manual_seed(3)
    for found, wanted in zip(mine, stepped(dropped, x), strict=True):
        assert torch.equal(found, wanted)
    assert matches(run) == 0


def test_masks_are_eagers_without_a_gradient_and_in_a_checkpoint(uncompiled):
    def again(x: Tensor) -> Tensor:
        return checkpoint(dropped, x, use_reentrant=False)

    x = torch.randn(8, 16)
    plain, checkpointed = compiled(dropped), compiled(again)
    for run, call in ((plain, lambda fn: fn(x)), (checkpointed, lambda fn: stepped(fn, x)[1])):
        torch.manual_seed(3)
        mine = call(run)
        torch.manual_seed(3)
        assert torch.equal(mine, call(dropped))
        assert matches(run) == 0


def test_what_is_not_laid_out_by_rows_stays_eagers_with_the_reason(uncompiled):
    def turned(x: Tensor) -> Tensor:
        return functional.dropout(torch.sin(x).t(), 0.5) * 2

    run, x = compiled(turned), torch.randn(8, 16)
    torch.manual_seed(3)
    mine = stepped(run, x)[0]
    torch.manual_seed(3)
    assert torch.equal(mine, stepped(turned, x)[0])
    assert near_misses(run) == ["its argument does not lie in memory row by row"]
