"""Reports of what is not a single tidy graph: every page of them can be opened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import graphex
from graphex.backend import watching
from graphex.evidence.report.data import report_data
from graphex.evidence.report.page import write_page
from tests.harness.browser import Browser
from tests.harness.tape import TapeDevice, run_on

TABS = "1234567"


def nothing() -> dict[str, Any]:
    return report_data("nothing", [])


def without_film() -> dict[str, Any]:
    compiled = torch.compile(lambda x: x.clone() + 1, backend="graphex")
    compiled(torch.ones(2))
    return report_data("bare", [graphex.journal(compiled)])


def training() -> dict[str, Any]:
    with watching() as watch:
        torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend="graphex")(torch.ones(2, 4)).sum().backward()
    return report_data("training", watch.journals)


def changing_sizes() -> dict[str, Any]:
    with watching() as watch, torch.no_grad():
        compiled = torch.compile(lambda x: (x.clone() * x.shape[0]).view(-1), backend="graphex", dynamic=True)
        compiled(torch.ones(3, 4))
    return report_data("changing sizes", watch.journals)


def undone_pass() -> dict[str, Any]:
    def broken(gm: GraphModule, example_inputs: object, config: object) -> None:
        raise ValueError("no good")

    options = {"post_grad_custom_pre_pass": broken, "strict": False}
    with watching(options) as watch, torch.no_grad(), pytest.warns(graphex.GraphexWarning):
        torch.compile(lambda x: x + 1, backend="graphex")(torch.ones(2))
    return report_data("undone", watch.journals)


def wrong_pass() -> dict[str, Any]:
    def wrong(gm: GraphModule, example_inputs: object, config: object) -> None:
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
            node.target = torch.ops.aten.sub.Tensor

    options = {"post_grad_custom_pre_pass": wrong, "verify": True}
    with watching(options) as watch, torch.no_grad(), pytest.warns(graphex.GraphexWarning):
        torch.compile(lambda x: x + 1, backend="graphex")(torch.ones(2))
    return report_data("wrong", watch.journals)


SENTENCES: dict[Callable[[], dict[str, Any]], str] = {
    nothing: "Nothing was compiled with graphex.",
    without_film: "Predicted peak",
    training: "counted from the 2 final graphs",
    changing_sizes: "2 device ops -> 1",
    undone_pass: "Pass 'broken' was rolled back: ValueError: no good.",
    wrong_pass: "Verification: mismatch by pass 'wrong'",
}


@pytest.mark.parametrize("make", SENTENCES, ids=lambda make: make.__name__)
def test_every_page_of_an_odd_report_opens(make: Callable[[], dict[str, Any]], chrome: Browser, tmp_path: Path) -> None:
    chrome.open(write_page(make(), tmp_path / "report.html"))
    assert any(SENTENCES[make] in sentence for sentence in chrome.texts(".summary li"))
    for key in TABS:
        chrome.press(key)
        assert chrome.text("[role=tabpanel]:not([hidden])") != ""


def test_after_a_mismatch_the_graph_that_runs_is_shown(chrome: Browser, tmp_path: Path) -> None:
    data = wrong_pass()
    chrome.open(write_page(data, tmp_path / "report.html"), "tab=graph")
    chrome.press("l")
    assert any("aten.add.Tensor" in code for code in chrome.texts(".row .code"))
    assert data["graphs"][0]["runs"] == 0


def test_several_graphs_are_looked_at_one_by_one(chrome: Browser, tmp_path: Path) -> None:
    data = training()
    names = [graph["name"] for graph in data["graphs"]]
    chrome.open(write_page(data, tmp_path / "report.html"))
    assert chrome.texts("header select option") == names
    chrome.press("2", "l")
    forward = chrome.texts(".row .code")
    chrome.run("const s = document.querySelector('header select'); s.value = '1'; s.dispatchEvent(new Event('change'))")
    chrome.painted()
    assert chrome.texts(".row .code") != forward


def test_captures_show_keys_hits_and_what_runs_outside(
    chrome: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_on(monkeypatch, TapeDevice())

    def model(x: Tensor) -> Tensor:
        kept = (x + 1).relu()
        return kept[kept > 0].sum() + kept.sum()  # how many there are is known only when it has run

    traced_whole = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
    with watching() as watch, torch.no_grad(), traced_whole:
        compiled = torch.compile(model, backend="graphex", fullgraph=True)
        for _ in range(4):
            compiled(torch.ones(4))
    data = report_data("captured", watch.journals)
    chrome.open(write_page(data, tmp_path / "report.html"), "tab=captures")
    shown = chrome.text("#panel-captures")
    (graph,) = data["graphs"]
    assert graph["captures"]
    assert graph["cuts"]
    assert graph["cuts"][0]["reason"] in shown
    replays = sum(counts.get("replays", 0) for counts in graph["counts"].values())
    assert replays > 0
    assert f"replayed {replays} times" in " ".join(sentence["text"] for sentence in data["summary"])


def test_a_node_that_cannot_be_described_costs_the_graphs_of_the_report_and_nothing_else() -> None:
    class Unprintable:
        def __str__(self) -> str:
            raise RuntimeError("not for show")

    def place(gm: GraphModule, example_inputs: object, config: object) -> None:
        add = next(node for node in gm.graph.nodes if node.name == "add")
        add.meta["nn_module_stack"] = {"layer": (Unprintable(), "Layer")}
        with gm.graph.inserting_after(add):
            gm.graph.call_function(torch.ops.aten.sin.default, (add,))

    with watching({"post_grad_custom_pre_pass": place}) as watch, torch.no_grad():
        with pytest.warns(graphex.GraphexWarning, match="reports are without graphs: RuntimeError: not for show"):
            result = torch.compile(lambda x: x + 1, backend="graphex")(torch.ones(2))
    assert result.tolist() == [2.0, 2.0]
    (graph,) = report_data("bare", watch.journals)["graphs"]
    assert graph["pictures"] == []
    assert graph["passes"]
