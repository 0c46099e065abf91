"""`regions="background"`: first calls run without compiled code, later ones with it, and all compute the same."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

import graphex
from graphex.regions.compiler import RegionCode


@pytest.fixture(autouse=True)
def regions_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHEX_REGIONS", "on")


def wait_for_code() -> None:
    for thread in threading.enumerate():
        if thread.name == "graphex regions":
            thread.join()


class Elsewhere:
    """Stands for the process that compiles: it has the code once a test says so, and counts the regions that run it."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.error: Exception | None = None
        self.raises = False
        self.ran = 0

    def __call__(self, kinds, patches):
        self.may_end.wait()
        if self.error is not None:
            raise self.error
        return [RegionCode(self._running(kind[0][1].body), "", ("kernel",), 1.5) for kind in kinds]

    def _running(self, body):
        def run(args):
            if self.raises:
                raise RuntimeError("no such kernel")
            self.ran += 1
            given = list(args)
            args.clear()
            return body(*given)

        return run

    def end(self) -> None:
        """Let it end, and wait until the code is there."""
        self.may_end.set()
        wait_for_code()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch):
    standing_in = Elsewhere()
    monkeypatch.setattr(import_module("graphex.cache.artefacts"), "compiled_elsewhere", standing_in)
    yield standing_in
    standing_in.end()


def chain(x):
    return torch.sin(x * 2).cos() + x.mean(-1, keepdim=True)


def compiled(fn, **options):
    return torch.compile(fn, backend="graphex", options={"regions": "background", **options})


def statuses(run) -> list[str]:
    return [record.status for record in graphex.journal(run).regions_awaited]


def test_calls_do_not_wait_and_the_code_is_used_once_it_is_there(elsewhere):
    run, x = compiled(chain), torch.randn(4, 8)
    for _ in range(3):
        assert torch.equal(run(x), chain(x))
    assert (statuses(run), elsewhere.ran, graphex.journal(run).regions) == (["begun"], 0, [])
    elsewhere.end()
    assert torch.equal(run(x), chain(x))
    assert elsewhere.ran == 1
    begun, used = graphex.journal(run).regions_awaited
    assert (begun.regions, used.status, used.calls) == (1, "in use", 3)
    assert [(record.region, record.status) for record in graphex.journal(run).regions] == [("region_0", "compiled")]


def test_the_graph_is_captured_again(tape, elsewhere):
    run, x = compiled(chain), torch.randn(4, 8)
    for _ in range(3):
        assert torch.equal(run(x), chain(x))
    assert len(graphex.journal(run).captures) == 1
    elsewhere.end()
    kept = run(x)
    for _ in range(3):
        assert torch.equal(run(x), chain(x))
    assert torch.equal(kept, chain(x))
    assert len(graphex.journal(run).captures) == 2
    assert len(tape.alive) == 1
    assert elsewhere.ran == 2  # a warm-up and a capture


@pytest.mark.parametrize("regions", ["background", False])
def test_explain_shows_what_is_awaited(elsewhere, regions):
    report = graphex.explain(chain, (torch.randn(4, 8),), options={"regions": regions})
    assert ("regions in the background" in str(report)) == (regions == "background")


def test_regions_that_are_alike_get_one_code(elsewhere, monkeypatch):
    monkeypatch.setattr("graphex.regions.grow.SMALL", 0)  # so that small layers have regions of their own
    layers = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softsign()) for _ in range(8)))
    run, x = compiled(layers), torch.randn(2, 4)
    with torch.no_grad():
        run(x)
        elsewhere.end()
        torch.testing.assert_close(run(x), layers(x))
    assert {record.status for record in graphex.journal(run).regions} == {"compiled", "reused"}


def test_a_step_of_training(tape, elsewhere):
    torch.manual_seed(0)
    mine, theirs = (torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Softmax(-1)) for _ in range(2))
    theirs.load_state_dict(mine.state_dict())
    run, x = compiled(mine), torch.randn(3, 4)
    for step in range(8):
        if step == 4:
            elsewhere.end()
        for model, forward in ((mine, run), (theirs, theirs)):
            model.zero_grad()
            (forward(x) * x.sum()).square().sum().backward()
        for left, right in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(left.grad, right.grad)
    assert statuses(run).count("in use") == 2


def test_several_threads(tape, elsewhere):
    run, inputs = compiled(chain), [torch.randn(4, 8) for _ in range(24)]
    run(inputs[0])
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(run, inputs)
        elsewhere.end()
        for x, result in zip(inputs, results, strict=True):
            assert torch.equal(result, chain(x))
    run(inputs[0])
    assert statuses(run) == ["begun", "in use"]


@pytest.mark.filterwarnings("ignore")
def test_a_process_that_fails_leaves_the_program_as_it_is(elsewhere):
    elsewhere.error = OSError("the process ended with -9")
    run, x = compiled(chain), torch.randn(4, 8)
    run(x)
    elsewhere.end()
    assert torch.equal(run(x), chain(x))
    assert graphex.journal(run).regions_awaited[-1].reason == "OSError: the process ended with -9"
    assert statuses(run) == ["begun", "failed"]
    assert [record.reason for record in graphex.journal(run).fallbacks] == ["OSError: the process ended with -9"]


@pytest.mark.filterwarnings("ignore")
def test_code_that_raises_is_not_used(elsewhere):
    elsewhere.raises = True
    run, x = compiled(chain), torch.randn(4, 8)
    run(x)
    elsewhere.end()
    for _ in range(2):
        assert torch.equal(run(x), chain(x))
    (record,) = graphex.journal(run).fallbacks
    assert "no such kernel" in record.reason


def test_sizes_that_vary_are_waited_for(monkeypatch, elsewhere):
    def code_of(body, patches):
        return RegionCode(lambda args: body(*args), "", ("kernel",), 0.0)

    monkeypatch.setattr("graphex.regions.stage.compile_region", code_of)
    run = torch.compile(chain, backend="graphex", dynamic=True, options={"regions": "background"})
    for rows in (3, 5):
        x = torch.randn(rows, 8)
        assert torch.equal(run(x), chain(x))
    assert statuses(run) == []
    assert [record.status for record in graphex.journal(run).regions] == ["compiled"]
    (record,) = graphex.journal(run).fallbacks
    assert record.what == "regions are compiled before the first call"


def test_the_code_comes_back_as_bytes(monkeypatch):
    """What the other process does, done in this one."""
    background = import_module("graphex.cache.artefacts")

    class Here:
        def __init__(self, command, **options):
            self.folder = command[-1]

        def wait(self):
            background.serve(self.folder)
            return 0

    monkeypatch.setattr(background, "subprocess", SimpleNamespace(Popen=Here, DEVNULL=None))
    run, x = compiled(chain), torch.randn(4, 8)
    assert torch.equal(run(x), chain(x))
    wait_for_code()
    torch.testing.assert_close(run(x), chain(x))
    (region,) = graphex.journal(run).regions
    assert region.kernels
    assert graphex.journal(run).fallbacks == []


PROGRAM = """
import torch, threading, graphex

def chain(x):
    return torch.sin(x * 2).cos() + x.mean(-1, keepdim=True)

def other(x):
    return torch.tanh(x * 3).exp() - x.sum(-1, keepdim=True)

run, last = (torch.compile(each, backend="graphex", options={"regions": "background"}) for each in (chain, other))
x = torch.randn(4, 8)
run(x)
[thread.join() for thread in threading.enumerate() if thread.name == "graphex regions"]
torch.testing.assert_close(run(x), chain(x))
(region,) = graphex.journal(run).regions
assert region.kernels and not graphex.journal(run).fallbacks
last(x)  # a process compiles for it when this one ends
for each in (run, last):
    print(*(record.status for record in graphex.journal(each).regions_awaited), sep=", ")
"""


@pytest.mark.full
def test_another_process_compiles_and_ends_with_this_one():
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert ended.stdout.splitlines() == ["begun, in use", "begun"], ended.stderr
    assert ended.returncode == 0
