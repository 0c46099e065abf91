"""Captures that go wrong, at every step: the model runs on, the reason is on record, and the process is healthy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import graphex
from tests.harness.capture import compile_it, reasons, replays

pytestmark = pytest.mark.cuda

CUDA = "cuda"


@torch.library.custom_op("graphex_tests::peeks", mutates_args=())
def peeks(x: Tensor) -> Tensor:
    return x * x.sum().item()  # a synchronisation that the graph does not show


@torch.library.custom_op("graphex_tests::raises", mutates_args=())
def raises(x: Tensor) -> Tensor:
    if torch.cuda.is_current_stream_capturing():
        raise ValueError("not in a capture")
    return x * 4


@torch.library.custom_op("graphex_tests::grabs", mutates_args=())
def grabs(x: Tensor) -> Tensor:
    if torch.cuda.is_current_stream_capturing():
        torch.empty(2**50, device=x.device)  # more than there is
    return x * 4


for op in (peeks, raises, grabs):
    op.register_fake(torch.empty_like)


def failing(at: str, monkeypatch: pytest.MonkeyPatch):
    """A function to compile whose capture fails at one step."""
    graph_class = torch.cuda.CUDAGraph
    begin, end = graph_class.capture_begin, graph_class.capture_end

    def fail(*args, **kwargs):
        raise RuntimeError("injected")

    def begin_then_fail(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        end(self)
        raise RuntimeError("injected")

    def end_then_fail(self):
        end(self)
        raise RuntimeError("injected")

    patches = {
        "pool": (torch.cuda, "graph_pool_handle", fail),
        "begin": (graph_class, "capture_begin", fail),
        "after begin": (graph_class, "capture_begin", begin_then_fail),
        "end": (graph_class, "capture_end", end_then_fail),
    }
    if at in patches:
        monkeypatch.setattr(*patches[at])
        return lambda x: (x + 1) * 2 * 4
    op = {"synchronisation": peeks, "exception": raises, "out of memory": grabs}[at]
    return lambda x: op(x + 1) * 2


STEPS = ["pool", "begin", "after begin", "end", "synchronisation", "exception", "out of memory"]


@torch.no_grad()
@pytest.mark.parametrize("at", STEPS)
def test_a_capture_that_fails_leaves_the_process_healthy(at, monkeypatch):
    x = torch.ones(4, device=CUDA)
    with monkeypatch.context() as patched:
        function = failing(at, patched)
        wanted = function(x)
        compiled = compile_it(function)
        with pytest.warns(graphex.GraphexWarning):
            for _ in range(4):
                torch.testing.assert_close(compiled(x), wanted)
    assert len(reasons(compiled)) == 1
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    other = compile_it(lambda x: nn.functional.dropout(x - 1, 0.5) + x)
    for _ in range(4):
        assert other(x).sum().item() == 4
    assert replays(other) == 3
    a, b = torch.rand(64, device=CUDA), torch.rand(64, device=CUDA)
    assert not torch.equal(a, b)
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
