"""The data of a report: what is kept, counted and said, and where reports come from."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import graphex
from graphex.backend import watching
from graphex.evidence.report.compare import compare, has_losses
from graphex.evidence.report.data import report_data
from graphex.evidence.report.page import page, read_data
from graphex.records import Record
from tests.harness.processes import ROOT
from tests.harness.reports import VERSIONS, Gated, explain_gate, explain_llama, explain_training

VENDOR = ROOT / "graphex/evidence/report/assets/vendor"


class Cached(nn.Module):
    """Two updates of inputs: one can be written in place, of the other the old value is still needed."""

    def forward(self, x: Tensor, good: Tensor, bad: Tensor) -> tuple[Tensor, Tensor]:
        row = torch.zeros(1, dtype=torch.int64)
        old = bad.clone()
        good.index_copy_(0, row, x)
        bad.index_copy_(0, row, x)
        return bad.sum(0), old.cos()


def drop_clones(gm: GraphModule, example_inputs: object, config: object) -> None:
    """Nobody can tell a copy from what it was copied from, but for a write in place: here it is in the way."""
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)


def explained(model: nn.Module, *inputs: Tensor, **options: object) -> graphex.Report:
    with torch.no_grad():
        return graphex.explain(model, inputs, options=options, calls=1)


def data_of(report: graphex.Report, path: Path) -> dict:
    return json.loads(report.save(path / "data.json").read_text())


def test_every_pass_has_the_graph_before_and_after_it(llama: graphex.Report, tmp_path: Path) -> None:
    (graph,) = data_of(llama, tmp_path)["graphs"]
    before = 0
    for ran in graph["passes"]:
        assert len(graph["pictures"][before]) == ran["nodes_before"]
        assert len(graph["pictures"][ran["picture"]]) == ran["nodes_after"]
        assert (ran["picture"] > before) == (ran["status"] == "changed")
        before = ran["picture"]
    assert before == len(graph["pictures"]) - 1


def test_a_node_tells_its_shape_memory_module_line_and_origins(llama: graphex.Report, tmp_path: Path) -> None:
    data = data_of(llama, tmp_path)
    (graph,) = data["graphs"]
    final = {graph["nodes"][place]["name"]: graph["nodes"][place] for place in graph["pictures"][-1]}
    given = {graph["nodes"][place]["name"]: graph["nodes"][place] for place in graph["pictures"][0]}
    fused = next(node for node in final.values() if "add_rms_norm" in node["target"])
    assert fused["value"].startswith("(float32[1, 1, 64]")
    assert fused["computes"]
    assert graph["modules"][fused["module"]][0].startswith(("layers.", "norm"))
    assert set(fused["origins"]) <= set(given)
    assert "rsqrt" in {given[name]["target"].split(".")[1] for name in fused["origins"]}
    file, line, function = graph["places"][fused["place"]][-1]
    assert data["files"][file]["name"] == "tiny_llama.py"
    assert "self.attention_norm(x)" in data["files"][file]["blocks"][0]["lines"][line - 1]
    assert function == "forward"
    weight = next(node for node in given.values() if node["target"] == "layers.0.attention.q.weight")
    assert next(node for node in given.values() if node["inputs"] == [weight["name"]])["memory"] == [weight["name"]]


def test_device_ops_are_counted_without_views_sizes_and_parts_of_tuples(tmp_path: Path) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            first, second = torch.sin(x).view(4, 2).split(2)
            return torch.cos(first.t()) + second

    report = explained(Model(), torch.randn(2, 4))
    assert report.summary().splitlines()[0] == "3 device ops -> 3, counted from the final graph."


def test_the_summary_names_updates_that_are_still_copied_and_why(tmp_path: Path) -> None:
    given = (torch.ones(1, 256), torch.zeros(8, 256), torch.zeros(8, 256))
    report = explained(Cached(), *given, post_grad_custom_pre_pass=drop_clones)
    (sentence,) = (line for line in report.summary().splitlines() if "input updates" in line)
    assert sentence.startswith(
        "1 of 2 input updates still copied, 32 KiB a call, because the old value is read later by 'cos'"
    )


def test_a_report_is_small_complete_and_deterministic(llama: graphex.Report, llama_page: Path) -> None:
    text = llama_page.read_text()
    assert len(text) < 5 * 2**20
    assert not re.findall(r'(?:src|href)="(?!data:)', text)
    assert "sourceMappingURL" not in text
    data = read_data(llama_page)
    assert page(data) == text


def test_save_refuses_what_it_cannot_write_in_one_sentence(llama: graphex.Report, tmp_path: Path) -> None:
    with pytest.raises(graphex.InputError, match="save writes"):
        llama.save(tmp_path / "report.pdf")
    with pytest.raises(graphex.InputError, match="no directory"):
        llama.save(tmp_path / "nowhere" / "report.html")
    other = tmp_path / "other.html"
    other.write_text("<html></html>")
    with pytest.raises(graphex.InputError, match="not a report of graphex"):
        read_data(other)


def test_graphs_are_kept_only_where_somebody_asked_for_them() -> None:
    plain, watched = nn.Linear(4, 4), nn.Linear(4, 4)
    x = torch.ones(2, 4)
    compiled = torch.compile(plain, backend="graphex")
    compiled(x)
    assert graphex.journal(compiled).history is None
    with watching() as watch, torch.no_grad():
        torch.compile(watched, backend="graphex")(x)
    (journal,) = watch.journals
    assert journal.history is not None
    assert report_data("bare", [graphex.journal(compiled)])["graphs"][0]["pictures"] == []


def test_watching_sees_every_compilation_and_lays_options_over_them() -> None:
    with watching({"disable_rules": ["plain_copy"]}) as watch, torch.no_grad():
        for function in (lambda x: x.clone() * 2, lambda x: x.clone() * 3):
            torch.compile(function, backend="graphex")(torch.ones(2))
    assert len(watch.journals) == 2
    assert all(record.rule != "plain_copy" for journal in watch.journals for record in journal.rewrites)
    with pytest.raises(graphex.OptionError, match="verfy"), watching({"verfy": True}):
        pass


def test_several_graphs_of_several_models_are_one_report() -> None:
    with watching() as watch:
        model = nn.Linear(4, 4)
        torch.compile(model, backend="graphex")(torch.ones(2, 4)).sum().backward()
        with torch.no_grad():
            torch.compile(lambda x: x + 1, backend="graphex")(torch.ones(2))
    data = report_data("both", watch.journals)
    assert [graph["phase"] for graph in data["graphs"]] == ["forward", "backward", "inference"]
    told = data["summary"][0]["text"]
    assert told == "None of 2 graphs has fewer device ops than before: 3 device ops at most."


def test_the_first_norm_of_a_model_has_no_residual_and_that_is_no_fault(llama: graphex.Report, tmp_path: Path) -> None:
    summary = read_data(llama.save(tmp_path / "report.html"))["summary"]
    (pairs,) = (each for each in summary if "residual add + RMSNorm" in each["text"])
    assert pairs["text"].startswith("4 of 4")
    assert pairs["tone"] == "plain"


def test_streams_and_events_are_read_off_the_nodes(tmp_path: Path) -> None:
    def two_streams(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        with graphex.scope.stream("side"):
            return y.cos()

    report = graphex.explain(two_streams, (torch.ones(3),))
    (graph,) = data_of(report, tmp_path)["graphs"]
    final = [graph["nodes"][place] for place in graph["pictures"][-1]]
    found = [
        (node["name"].split(".")[-1], node.get("stream"), node.get("event"))
        for node in final
        if node["op"] == "call_function"
    ]
    assert found == [
        ("sin", None, None),
        ("event_record_default", None, ["record", "sin"]),
        ("event_wait_default", "side", ["wait", "sin"]),
        ("cos", "side", None),
        ("event_record_default_1", "side", ["record", "cos"]),
        ("event_wait_default_1", None, ["wait", "cos"]),
    ]


def test_a_record_of_a_kind_that_has_no_view_is_in_the_report_as_it_is(tmp_path: Path) -> None:
    report = explained(nn.Linear(4, 4), torch.ones(2, 4))
    name = report.journal.graphs[0].graph
    report.journal.add(Record(name))
    (graph,) = data_of(report, tmp_path)["graphs"]
    assert graph["more"] == [{"kind": "record", "graph": name}]


# -- comparing -----------------------------------------------------------------------------------------------------


def test_a_lost_fusion_is_found_with_its_module_and_line(tmp_path: Path) -> None:
    before, after = (
        read_data(explain_gate(tmp_path / f"{name}.html", **options)) for name, options in VERSIONS.items()
    )
    difference = compare(before, after)
    (lost,) = difference["lost"]
    assert (lost["rule"], lost["where"], lost["times"]) == ("lift_silu_mul", "mlp", 1)
    assert lost["line"].endswith("silu(self.gate(x)) * self.up(x)")
    assert has_losses(difference)
    assert compare(after, before)["won"][0]["rule"] == "lift_silu_mul"
    same = compare(before, before)
    assert not same["lost"]
    assert not same["won"]
    assert all(each["before"] == each["after"] for each in same["numbers"])


def test_lines_that_moved_are_the_same_place(tmp_path: Path) -> None:
    before = read_data(explain_gate(tmp_path / "report.html"))
    text = json.dumps(before)
    moved = json.loads(re.sub(r"reports\.py:(\d+)", lambda found: f"reports.py:{int(found[1]) + 7}", text))
    assert moved != before
    assert not has_losses(compare(before, moved))


def test_a_differing_option_is_named_as_the_likely_cause(tmp_path: Path) -> None:
    before, after = (
        read_data(explain_gate(tmp_path / f"{name}.html", **options)) for name, options in VERSIONS.items()
    )
    assert before["options"] == {"lift_idioms": "always", "inplace_pass": "False"}
    told = [sentence["text"] for sentence in compare(before, after)["summary"]]
    assert told[1] == "Likely cause: the option disable_rules was the default, is lift_silu_mul now."
    assert not any("cause" in sentence["text"] for sentence in compare(before, before)["summary"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device without kernels is the subject")
def test_a_comparison_counts_what_runs_here_and_calls_the_rest_a_preview(tmp_path: Path) -> None:
    before, after = (
        read_data(explain_gate(tmp_path / f"{name}.html", **options)) for name, options in VERSIONS.items()
    )
    told = [sentence["text"] for sentence in compare(before, after)["summary"]]
    (fused,) = re.findall(r"-> (\d+), counted", before["summary"][0]["text"])
    (single,) = re.findall(r"-> (\d+), counted", after["summary"][0]["text"])
    assert f"{fused} device ops -> {single}." in told
    (preview,) = [text for text in told if text.startswith("A preview: ")]
    assert preview.endswith(f"-> {single} on a device with kernels for the ops of graphex.")


def test_more_device_ops_are_no_gain_though_a_rewrite_was_won(tmp_path: Path) -> None:
    def once(x: Tensor) -> Tensor:
        return (x + 0) * 2

    def with_more(x: Tensor) -> Tensor:
        return ((x + 0) * 2).sin().add_(1)

    with torch.no_grad():
        before, after = (
            read_data(graphex.explain(each, (torch.ones(4),)).save(tmp_path / f"{each.__name__}.html"))
            for each in (once, with_more)
        )
    (counted,) = [each for each in compare(before, after)["summary"] if " device ops -> " in each["text"]]
    assert counted["tone"] == "bad"
    assert counted["text"].endswith("more than before, although no rewrite was lost.")


def test_another_torch_is_the_likely_cause_where_no_option_is(tmp_path: Path) -> None:
    before, after = (
        read_data(explain_gate(tmp_path / f"{name}.html", **options)) for name, options in VERSIONS.items()
    )
    after["options"] = before["options"]
    after["made_with"]["torch"] = "9.9.0"
    told = [sentence["text"] for sentence in compare(before, after)["summary"]]
    assert re.match(r"Likely cause: a change of torch \(\S+ -> 9\.9\.0\)\.", told[1])


def test_the_same_loss_in_every_layer_is_one_place(llama: graphex.Report, tmp_path: Path) -> None:
    without = explain_llama(disable_rules=["lift_silu_mul"], verify=True)
    difference = compare(data_of(llama, tmp_path), data_of(without, tmp_path))
    (lost,) = (each for each in difference["lost"] if each["rule"] == "lift_silu_mul")
    assert (lost["where"], lost["times"]) == ("layers.*", 2)
    assert lost["places"] == ["layers.0", "layers.1"]
    (sentence,) = (each["text"] for each in difference["summary"] if "silu" in each["text"] and "Lost" in each["text"])
    assert "layers.* (2 places, layers.0 to layers.1)" in sentence


def test_reports_of_different_models_are_not_compared(llama: graphex.Report, tmp_path: Path) -> None:
    gate = read_data(explain_gate(tmp_path / "gate.html"))
    difference = compare(data_of(llama, tmp_path), gate)
    told = "These are reports of different models: none of their modules (14 in the first, 3 in the second; "
    assert difference["summary"][0]["text"].startswith(told)
    assert not difference["lost"]
    assert has_losses(difference)  # a CI job that compares the wrong reports does not pass
    assert not any(difference[name] for name in ("numbers", "rules", "changed", "won"))
    first, second = (sentence["text"] for sentence in difference["summary"][1:])
    assert first.startswith("The first is of ")
    assert "Gated" in second
    functions = [graphex.explain(each, (torch.ones(3),), calls=1) for each in (torch.sin, lambda x: x.exp().cumsum(0))]
    assert compare(*(data_of(each, tmp_path) for each in functions))["different_models"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device without kernels is the subject")
def test_previews_of_one_report_are_neither_lost_nor_won(tmp_path: Path) -> None:
    preview = read_data(explain_gate(tmp_path / "always.html"))
    plain = read_data(explain_gate(tmp_path / "auto.html", lift_idioms="auto"))
    for difference, which in ((compare(preview, plain), "first"), (compare(plain, preview), "second")):
        told = [sentence["text"] for sentence in difference["summary"]]
        assert told[0] == "0 rewrites lost, 0 won."
        assert not has_losses(difference)
        assert not any("A preview:" in text for text in told)
        assert told[-1].startswith(f"Previews in the {which} report: 1 rewrite ")
        assert all(rule["before"][0] == rule["after"][0] for rule in difference["rules"])


def test_a_region_that_was_measured_slower_is_not_lost(tmp_path: Path) -> None:
    used = read_data(explain_gate(tmp_path / "report.html"))
    left = copy.deepcopy(used)
    (first, *_) = used["graphs"][0]["rewrites"]
    used["graphs"][0]["rewrites"].append(first | {"rule": "region", "effect": "fused"})
    left["graphs"][0]["more"].append({"kind": "region", "region": "", "status": "slower", "lines": [first["line"]]})
    for difference, which in ((compare(used, left), "second"), (compare(left, used), "first")):
        assert not has_losses(difference)
        assert not difference["won"]
        (told,) = (each for each in difference["summary"] if each["text"].startswith(f"Not used in the {which} report"))
        assert told["tone"] == "plain"
    left["graphs"][0]["more"].clear()
    assert has_losses(compare(used, left))


def test_the_summary_counts_losses_as_the_table_does(llama: graphex.Report, tmp_path: Path) -> None:
    before = data_of(llama, tmp_path)
    after = copy.deepcopy(before)
    (graph,) = before["graphs"]
    graph["rewrites"] += [each for each in graph["rewrites"] if each["rule"] == "lift_silu_mul"]
    difference = compare(before, after)
    (lost,) = difference["lost"]
    assert lost["times"] == 2
    after["graphs"][0]["rewrites"] = [
        each for each in after["graphs"][0]["rewrites"] if each["rule"] != "lift_silu_mul"
    ]
    difference = compare(before, after)
    (lost,) = difference["lost"]
    assert lost["times"] == 4
    assert any("(4 times in 2 places, layers.0 to layers.1)" in each["text"] for each in difference["summary"])


def test_a_model_that_grew_is_still_the_same(tmp_path: Path) -> None:
    class Grown(Gated):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.extra(x)

        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Linear(8, 8)

    before, after = (data_of(explained(each, torch.ones(8, 8)), tmp_path) for each in (Gated(), Grown()))
    difference = compare(before, after)
    assert not difference["different_models"]
    told = "The models differ: class Gated -> Grown; modules only in the second: extra (Linear)."
    assert difference["summary"][0]["text"] == told
    assert "good" not in [each["tone"] for each in difference["summary"]]


def test_of_a_model_with_fewer_layers_only_what_both_have_is_lost_or_won(llama: graphex.Report, tmp_path: Path) -> None:
    shorter = explain_llama(layers=1, verify=True, disable_rules=["lift_silu_mul"])
    difference = compare(data_of(llama, tmp_path), data_of(shorter, tmp_path))
    assert difference["model_changes"] == ["2 -> 1 of layers.* (Layer)"]
    assert [(each["rule"], each["where"]) for each in difference["lost"]] == [("lift_silu_mul", "layers.0")]
    first, second = difference["summary"][:2]
    assert first == {"tone": "bad", "text": "The models differ: 2 -> 1 of layers.* (Layer)."}
    assert second == {"tone": "bad", "text": "1 rewrite lost, 0 won, of those in modules that both have."}
    assert "good" not in [each["tone"] for each in difference["summary"]]


# -- how it was made ---------------------------------------------------------------------------------------------------


def test_a_report_says_where_the_time_of_compiling_went(llama_page: Path) -> None:
    data = read_data(llama_page)  # written when it was made: torch remembers the times of its last 64 compilations
    seconds = {each["stage"]: each["seconds"] for each in data["compile_time"]}
    assert {"Dynamo", "AOTAutograd", "passes", "program"} <= set(seconds)
    assert all(each > 0 for each in seconds.values())
    (graph,) = data["graphs"]
    assert sum(ran["seconds"] for ran in graph["passes"]) <= seconds["passes"]


def test_the_time_of_a_backward_is_counted_and_no_compilation_is_counted_twice(tmp_path: Path) -> None:
    report = graphex.explain(nn.Linear(4, 4), (torch.ones(2, 4, requires_grad=True),), calls=1)
    data = data_of(report, tmp_path)
    assert {graph["phase"] for graph in data["graphs"]} == {"forward", "backward"}
    whole = sum(each["seconds"] for each in data["compile_time"])
    alone = sum(each["seconds"] for each in report_data("", [report.journal], compile_id="none")["compile_time"])
    assert 0 == alone < whole


def test_a_report_holds_versions_machine_options_and_generated_code(llama: graphex.Report, tmp_path: Path) -> None:
    data = data_of(llama, tmp_path)
    assert {"graphex", "torch", "python", "device", "system", "threads"} <= set(data["made_with"])
    assert data["options"] == {"lift_idioms": "always", "verify": "True"}
    (graph,) = data["graphs"]
    assert "def forward(" in graph["code"][0]["text"]
    assert "torch.ops.graphex" in graph["code"][0]["text"] or "add_rms_norm" in graph["code"][0]["text"]


# -- links of the summary ----------------------------------------------------------------------------------------------


def leads_of(data: dict) -> dict:
    """What the summary's links lead to, by their text."""
    links = ((sentence["text"], link) for sentence in data["summary"] for link in sentence["links"])
    return {text[slice(*link["at"])]: {key: link[key] for key in link if key != "at"} for text, link in links}


def test_sentences_of_the_summary_lead_to_what_they_name(missed: graphex.Report, tmp_path: Path) -> None:
    data = data_of(missed, tmp_path)
    leads = leads_of(data)
    assert leads["RMSNorm"] == {"rule": "lift_rms_norm", "graph": 0}
    (place,) = (lead for text, lead in leads.items() if text.startswith("tiny_llama.py:55"))
    assert data["files"][place["file"]]["name"] == "tiny_llama.py"
    assert place["line"] == 55
    assert leads["input updates"] == {"tab": "memory"}


def test_a_sentence_leads_to_the_node_it_names(tmp_path: Path) -> None:
    def updated(state: Tensor) -> Tensor:
        new = state.sin()
        total = (state * new).cos()
        state.copy_(new)
        return total

    report = graphex.explain(updated, (torch.randn(8, 8),))
    assert leads_of(data_of(report, tmp_path))["mul"] == {"node": "mul", "graph": 0}


# -- what is vendored ------------------------------------------------------------------------------------------------


def test_libraries_are_the_pinned_ones_with_their_licences() -> None:
    pinned = dict(
        re.findall(r"^\| `(\S+\.js)` .* `([0-9a-f]{64})` \|$", (VENDOR / "README.md").read_text(), re.MULTILINE)
    )
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in VENDOR.glob("*.js")}
    assert found == pinned
    for name in found:
        licence = VENDOR / f"{name.partition('.')[0]}.LICENSE"
        assert "Permission is hereby granted" in licence.read_text()


def test_a_training_step_is_one_timeline_with_memory_over_it(tmp_path: Path) -> None:
    (parts,) = read_data(explain_training().save(tmp_path / "report.html"))["training"]
    assert [part["phase"] for part in parts] == ["forward", "backward"]
    forward, backward = parts
    assert forward["before"] == backward["held"] == 0
    assert forward["held"] == backward["before"] > 0
    assert max(forward["curve"]) == forward["most"]
    assert min(backward["curve"]) >= backward["before"]


def test_the_timeline_of_a_step_counts_what_a_compiled_region_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHEX_REGIONS", "on")
    monkeypatch.setenv("GRAPHEX_TUNING", "off")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Tanh())
    report = graphex.explain(model, (torch.randn(32, 64),))
    assert any(each.region and each.graph.endswith("forward") for each in report.journal.regions)
    ((forward, _),) = read_data(report.save(tmp_path / "report.html"))["training"]
    assert forward["curve"][-1] >= forward["held"] > 0


def test_inference_has_no_training_step(llama: graphex.Report, llama_page: Path) -> None:
    assert read_data(llama_page)["training"] == []
