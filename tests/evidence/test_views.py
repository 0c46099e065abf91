"""The views of the journal: explain, JSON, debug files, structured traces, profiles and logs."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphex
from graphex.evidence.report.page import read_data
from graphex.records import SCHEMA_VERSION
from tests.harness.processes import python


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        y = self.linear(x)[:, 0:].relu()
        return y.clone() + 1, x.clone()


@pytest.fixture
def report(device) -> graphex.Report:
    model = Model().to(device)
    with torch.no_grad():
        return graphex.explain(model, (torch.randn(3, 4, device=device),), options={"verify": True})


# -- explain -------------------------------------------------------------------------------------------------------


def test_a_report_counts_rewrites_and_names_refusals_with_the_users_line(report):
    rule = report.rule("plain_copy")
    assert rule.matched >= 1
    (miss,) = rule.near_misses
    assert miss.reason == "an output would begin to share memory with an input"
    assert miss.line.endswith("return y.clone() + 1, x.clone()")
    assert report.rule("equal_calls").matched == 0


@pytest.mark.parametrize(
    ("name", "hint"), [("plain_copies", "did you mean 'plain_copy'?"), ("no such rule", "`graphex rules` lists them")]
)
def test_a_rule_that_does_not_exist_is_an_error_that_names_what_comes_close(report, name, hint):
    with pytest.raises(graphex.InputError) as error:
        report.rule(name)
    assert f"there is no rule '{name}'" in str(error.value)
    assert hint in str(error.value)


def test_rules_of_the_users_own_exist_even_where_they_found_nothing(device):
    class Pass(graphex.GraphPass):
        name = "mine"

        def rules(self):
            return ("of_my_pass",)

        def apply(self, work):
            pass

    def search(x):
        return x.sin().cos()

    def replace(x):
        return x.cos().sin()

    rule = graphex.replacement(search, replace, (torch.ones(2),), name="of_mine", self_test=False)
    options = {"post_grad_custom_pre_pass": Pass(), "fusion_rules": [rule]}
    report = graphex.explain(torch.relu, (torch.ones(2, device=device),), options=options)
    assert report.rule("of_my_pass").matched == report.rule("of_mine").matched == 0


def test_a_report_prints_everything_and_serialises(report):
    text = str(report)
    for word in ("remove_noops", "plain_copy", "refused", "test_views.py", "verification", "equal"):
        assert word in text
    data = json.loads(report.to_json())
    assert data["schema_version"] == SCHEMA_VERSION
    assert data["worst_difference"] == 0
    assert {"graph", "pass", "rewrite", "refusal", "verification"} <= {record["kind"] for record in data["records"]}


def test_explain_leaves_the_model_and_the_inputs_alone(device):
    model, x = Model().to(device), torch.randn(3, 4, device=device, requires_grad=True)
    kept = x.detach().clone()
    state = torch.get_rng_state()
    report = graphex.explain(model, (x,), calls=2)
    assert model.calls.item() == 0
    assert all(parameter.grad is None for parameter in model.parameters())
    assert x.grad is None
    assert torch.equal(x, kept)
    assert torch.equal(torch.get_rng_state(), state)
    assert {graph.phase for graph in report.journal.graphs} == {"forward", "backward"}


def test_explain_takes_functions_keywords_and_compiled_models(device):
    x = torch.ones(2, device=device)
    assert graphex.explain(lambda a, *, b: a + b, (x,), {"b": x}).worst_difference == 0
    assert graphex.explain(torch.compile(Model().to(device)), (torch.ones(2, 4, device=device),)).journal.graphs


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: graphex.explain(3), "module or a function"),
        (lambda: graphex.explain(torch.relu, torch.ones(2)), "tuple"),
        (lambda: graphex.explain(torch.relu, (torch.ones(2),), calls=0), "positive"),
        (lambda: graphex.journal(torch.relu), "torch.compile"),
    ],
)
def test_bad_input_is_one_sentence(call, message):
    with pytest.raises(graphex.InputError, match=message):
        call()


# -- the journal ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_journal_of_plain_torch_compile_is_found_for_modules_and_functions(device):
    x = torch.ones(2, 4, device=device)
    for target in (Model().to(device), lambda v: v.clone() * 2):
        compiled = torch.compile(target, backend="graphex")
        assert graphex.journal(compiled).records == []
        compiled(x)
        assert [graph.phase for graph in graphex.journal(compiled).graphs] == ["inference"]


@torch.no_grad()
def test_a_second_torch_compile_of_the_same_function_finds_the_code_it_reuses():
    def f(x: Tensor) -> Tensor:
        return x + 1

    first = torch.compile(f, backend="graphex")
    first(torch.ones(2))
    second = torch.compile(f, backend="graphex")
    second(torch.ones(2))
    assert graphex.journal(second).graphs == graphex.journal(first).graphs
    unrelated = torch.compile(lambda x: x + 1, backend="graphex")
    assert graphex.journal(unrelated).records == []


@torch.no_grad()
def test_run_time_counts_and_does_not_grow(device):
    compiled = torch.compile(lambda x: x * 2, backend="graphex")
    x = torch.ones(2, device=device)
    for _ in range(3):
        compiled(x)
    journal = graphex.journal(compiled)
    records, keys = len(journal.records), {name: set(counter) for name, counter in journal.counts.items()}
    for _ in range(50):
        compiled(x)
    assert len(journal.records) == records
    assert {name: set(counter) for name, counter in journal.counts.items()} == keys
    (counter,) = journal.counts.values()
    assert counter["calls"] - counter["captured"] + counter["replays"] == 53


@torch.no_grad()
def test_recompilations_and_graph_breaks_are_in_one_journal():
    def f(x: Tensor, flag: bool) -> Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1 if flag else y - 1

    compiled = torch.compile(f, backend="graphex")
    compiled(torch.ones(2), True)
    compiled(torch.ones(2), False)
    ids = [graph.compile_id for graph in graphex.journal(compiled).graphs]
    assert len(ids) == len(set(ids)) == 3


# -- profiles ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_profile_names_the_graph(device):
    compiled = torch.compile(lambda x: x * 2, backend="graphex")
    x = torch.ones(2, device=device)
    for _ in range(3):
        compiled(x)
    with torch.profiler.profile() as profile:
        compiled(x)
    assert any(event.name.startswith("graphex") for event in profile.events())


# -- files, in a process of their own --------------------------------------------------------------------------------

SCRIPT = """
import torch, graphex
from torch import nn

model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
table = torch.arange(4.0)

def f(x):
    y = model(x)[:, 0:] + table
    return torch.cond(y.sum() > 0, lambda v: v + 1, lambda v: v - 1, (y,)).sum()

compiled = torch.compile(f, backend="graphex")
compiled(torch.randn(2, 4)).backward()
with torch.no_grad():
    compiled(torch.randn(2, 4))
"""
REFUSED = "import torch\nprint(torch.compile(lambda x: x.clone(), backend='graphex')(torch.ones(2)))\n"
EACH_ALONE = """
import os, runpy, sys
import torch

for program in sys.argv[1:]:
    if not (child := os.fork()):
        runpy.run_path(program, run_name="__main__")
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0, program
"""


def run(directory: Path, code: str = SCRIPT, **variables: str) -> subprocess.CompletedProcess[str]:
    script = directory / "script.py"
    script.write_text(code)
    return python(script, cwd=directory, **variables)


def test_torch_compile_debug_writes_every_graph_and_a_program_that_runs(tmp_path):
    run(tmp_path, TORCH_COMPILE_DEBUG="1")
    (root,) = tmp_path.glob("torch_compile_debug/run_*/graphex")
    assert (root / "debug.log").read_text()
    models = sorted(root.glob("model__*"))
    assert len(models) == 2
    for model in models:
        assert (model / "dynamo_out_graph.txt").read_text()
        journal = json.loads((model / "journal.json").read_text())
        assert journal["schema_version"] == SCHEMA_VERSION
        graphs = read_data(model / "report.html")["graphs"]
        assert {graph["phase"] for graph in graphs} == {path.name for path in model.iterdir() if path.is_dir()}
        assert all(graph["pictures"] for graph in graphs)
    phases = {path.name for model in models for path in model.iterdir() if path.is_dir()}
    assert phases == {"forward", "backward", "inference"}
    names = sorted(path.name for path in (models[1] / "inference").glob("*.txt"))
    assert names[0] == "000_aot_inference_graph.txt"
    assert "001_aot_inference_graph_after_remove_noops.txt" in names
    programs = list(root.glob("model__*/*/output_code.py"))
    printed = python("-c", EACH_ALONE, *programs).stdout.splitlines()
    assert len(printed) == len(programs) == 3
    assert all(line.startswith("ran:") for line in printed)


def test_structured_traces_hold_our_graphs_and_the_logger_is_silent(tmp_path):
    assert "after_remove_noops" not in run(tmp_path, TORCH_TRACE=str(tmp_path / "trace")).stderr
    (trace,) = (tmp_path / "trace").glob("*.log")
    artifacts = {
        record["artifact"]["name"]: (record["artifact"]["encoding"], payload)
        for record, payload in traced(trace.read_text())
        if "artifact" in record
    }
    encoding, graph = artifacts["graphex_inference_000_aot_inference_graph"]
    assert encoding == "string"
    assert "torch.ops.aten.addmm.default" in graph
    encoding, journal = artifacts["graphex_journal"]
    assert encoding == "json"
    assert json.loads(journal)["schema_version"] == SCHEMA_VERSION


def traced(text: str) -> Iterator[tuple[dict[str, Any], str]]:
    """The records of a structured trace with their payloads, read as tlparse reads them: the hashes must be right."""
    lines = text.splitlines()
    for place, line in enumerate(lines):
        if line.startswith("\t"):
            continue
        prefix, _, found = line.partition("] ")
        assert re.match(r"[VIWE]\d{4} [\d:.]+ \d+ \S+:\d+$", prefix), line
        record = json.loads(found)
        payload = "\n".join(
            each[1:] for each in itertools.takewhile(lambda each: each.startswith("\t"), lines[place + 1 :])
        )
        if "has_payload" in record:
            assert hashlib.md5(payload.encode()).hexdigest() == record["has_payload"]
        yield record, payload


def test_torch_logs_has_one_line_for_each_graph_and_with_a_plus_graphs_and_refusals(tmp_path):
    plain = run(tmp_path, REFUSED, TORCH_LOGS="graphex").stderr.splitlines()
    verbose = run(tmp_path, SCRIPT + REFUSED, TORCH_LOGS="+graphex").stderr.splitlines()
    about = [line for line in plain if "straight-line code" in line or "device graph" in line]
    assert len(about) == len(plain) == 1
    assert all("fused" in line and "refused" in line for line in about)
    assert not any("share memory" in line for line in plain)
    assert any("refused at" in line and "share memory" in line for line in verbose)
    assert any("after_remove_noops" in line for line in verbose)
