"""Which device a graph runs on. Graphs on CUDA are compiled, not run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import graphex


@pytest.fixture(autouse=True)
def any_number_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is a GPU, torch would touch each that a fake tensor names."""
    monkeypatch.setattr(fake_tensor, "init_gpu_context", lambda device: None)


def both(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return (a @ a).relu().sin(), (b @ b).relu().cos()


def reasons(*devices: str, **options: object) -> list[str]:
    with FakeTensorMode():
        inputs = [torch.empty(4, 4, device=device) for device in devices]
    journal = graphex.journal(graphex.compile_fx(make_fx(both)(*inputs), options=options))
    return [fallback.reason for fallback in journal.fallbacks]


def test_a_graph_on_two_gpus_is_not_captured_and_says_so() -> None:
    with pytest.warns(graphex.GraphexWarning, match="without capture"):
        assert reasons("cuda:0", "cuda:1") == ["its tensors are on cuda:0 and cuda:1"]


def test_a_graph_on_two_gpus_has_no_regions_and_says_so(monkeypatch) -> None:
    monkeypatch.setenv("GRAPHEX_REGIONS", "on")
    assert reasons("cuda:0", "cuda:1", mode="eager") == [
        "its tensors are on cuda:0 and cuda:1, and a region is compiled for one device"
    ]


def test_nobody_who_asked_for_no_capture_is_told_that_there_is_none() -> None:
    assert reasons("cuda:0", "cuda:1", mode="eager") == []


def test_a_graph_on_the_host_has_nothing_to_say() -> None:
    assert reasons("cpu", "cpu") == []
