"""The sentences of a summary: what a newcomer reads first, and what stands behind each of them."""

from __future__ import annotations

import copy
import logging
import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphex
from graphex.evidence.report.model import report_data

on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU alone is the subject")


class Attending(nn.Module):
    """A norm, a layer and attention with a boolean mask."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.dense = nn.Parameter(torch.ones(16)), nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        heads = self.dense(x).view(1, 4, 2, 8).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, mask).transpose(1, 2).reshape(1, 4, 16)


class Results(dict[str, Tensor]):
    """Results by item and by attribute, as those of transformers are."""

    def __init__(self, **values: Tensor) -> None:
        super().__init__(values)
        self.__dict__.update(values)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.dense(x)).softmax(-1).sin()


@pytest.fixture
def regions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHEX_REGIONS", "on")
    monkeypatch.setenv("GRAPHEX_TUNING", "off")


def explained(model: nn.Module, *args: Tensor, **options: object) -> graphex.Report:
    with torch.no_grad():
        return graphex.explain(model, args, options=options, calls=1)


def attended(**options: object) -> graphex.Report:
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    return explained(Attending(), torch.randn(1, 4, 16), mask, **options)


# -- counts ------------------------------------------------------------------------------------------------------------


@on_a_cpu
def test_the_count_of_device_ops_before_is_the_same_whatever_the_options():
    summaries = [attended(lift_idioms=choice).summary() for choice in ("always", "auto", "never")]
    assert len({re.search(r"(\d+) device ops ->", summary)[1] for summary in summaries}) == 1


def test_linear_layers_of_a_type_that_no_kernel_takes_are_no_missed_sites():
    report = attended(lift_idioms="always")
    assert "linears" not in report.summary()
    assert [each.nothing_lost for each in report.journal.refusals if each.rule == "linears"] == [True]


@on_a_cpu
def test_what_is_lifted_without_a_kernel_is_a_preview_in_the_journal_and_the_summary(regions):
    report = attended(lift_idioms="always")
    assert all(each.preview for each in report.journal.rewrites if each.rule in ("lift_rms_norm", "lift_attention"))
    assert "A preview: " in report.summary()
    assert "What is fused here is a preview, and no faster on the CPU" in report.summary()


@on_a_cpu
def test_a_line_of_the_log_calls_a_preview_a_preview(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    logger = logging.getLogger("graphex")
    level = logger.level
    monkeypatch.setattr(logger, "handle", lambda record: said.append(record.getMessage()))
    logger.setLevel(logging.INFO)
    try:
        attended(lift_idioms="always")
    finally:
        logger.setLevel(level)
    fused, preview = said[0].split("; ")[:2]
    assert fused.endswith("fused nothing")
    assert preview.startswith("as a preview")
    assert "lift_rms_norm 1 of 1" in preview


# -- regions -----------------------------------------------------------------------------------------------------------


def test_a_summary_says_what_regions_cost_what_to_expect_and_how_to_do_without(regions):
    summary = explained(Net(), torch.randn(4, 64)).summary()
    assert "run in 1 compiled region. They were not measured: expect about the speed of Inductor." in summary
    assert "regions=False or GRAPHEX_REGIONS=off does without" in summary


def test_a_measured_region_says_how_fast_it_is(regions, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GRAPHEX_TUNING")
    report = explained(Net(), torch.randn(4, 64))
    (region,) = report.journal.regions
    said = "slower than single ops" if region.status == "slower" else "Measured here: "
    assert said in report.summary()


def test_differences_by_rounding_are_one_sentence(regions):
    x = torch.randn(64, 64)
    report = explained(_Several(), x)
    if not report.differences:
        pytest.skip("this machine rounds as eager does")
    assert sum("rounded differently from eager" in line for line in report.summary().splitlines()) == 1
    assert not any("Different from eager" in line for line in report.summary().splitlines())


def test_ops_outside_of_regions_are_counted_over_all_graphs(regions):
    table = nn.Embedding(8, 64)

    def broken(tokens: Tensor) -> Tensor:
        first = table(tokens).sin().softmax(-1)
        torch._dynamo.graph_break()
        return first + table(tokens).cos().softmax(-1)

    with torch.no_grad():
        summary = graphex.explain(broken, (torch.arange(4),), calls=1).summary()
    outside = [line for line in summary.splitlines() if line.startswith("Outside of compiled regions")]
    assert len(outside) == 1
    assert outside[0].startswith("Outside of compiled regions: aten.embedding.default and 1 more, because")


class _Several(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple((x * scale).softmax(-1).exp().mean(0) for scale in (1.0, 2.0, 3.0))


def test_the_time_that_regions_take_is_a_share_of_its_own(regions, tmp_path):
    report = explained(Net(), torch.randn(4, 64))
    spent = {each["stage"]: each["seconds"] for each in report_data("net", [report.journal])["compile_time"]}
    whole = next(ran.seconds for ran in report.journal.passes if ran.name == "compile_regions")
    assert spent["regions"] == pytest.approx(whole)
    assert spent["passes"] > 0


def test_sentences_about_regions_lead_to_the_pass_and_to_the_op_outside(regions):
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.net = nn.Embedding(8, 64), Net()

        def forward(self, tokens: Tensor) -> Tensor:
            return self.net(self.table(tokens))

    report = explained(Embedded(), torch.arange(4))
    data = report_data("net", [report.journal])
    for sentence in data["summary"]:
        if "regions" in sentence["text"] or "compiled region" in sentence["text"]:
            assert sentence["links"], sentence["text"]
    (outside,) = [each for each in data["summary"] if each["text"].startswith("Outside of compiled regions")]
    assert "embedding" in [link.get("node") for link in outside["links"]]


def test_the_predicted_peak_does_not_grow_by_compiling_regions(regions):
    def peak(**options: object) -> int:
        return (
            explained(nn.Sequential(*(Net() for _ in range(3))), torch.randn(4, 64), **options)
            .journal.memory[0]
            .peak_after
        )

    assert peak() <= peak(regions=False, inplace_pass=False)


# -- names and graphs --------------------------------------------------------------------------------------------------


def wrong(gm, example_inputs, config):
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
        node.target = torch.ops.aten.cos.default
    gm.recompile()


@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
def test_what_verification_found_is_said_once_with_the_script_that_shows_it():
    report = explained(Net(), torch.randn(4, 64), post_grad_custom_pre_pass=wrong, verify=True)
    found = report.journal.verifications[0]
    (line,) = [line for line in report.summary().splitlines() if found.reason in line]
    assert "by pass 'wrong', which was left out" in line
    assert line.endswith(f"Run {found.repro} to see it.")


def test_an_output_that_has_two_names_is_one_difference():
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Results:
            return Results(logits=x.sin())

    report = explained(Model(), torch.ones(3), post_grad_custom_pre_pass=wrong)
    assert len(report.differences) == 1
    assert "logits" in report.differences[0]


def test_a_remark_of_a_pass_about_some_of_the_graphs_names_them():
    def broken(x: Tensor) -> Tensor:
        y = F.linear(x.sin(), torch.ones(4, 4))
        torch._dynamo.graph_break()
        return y.cos()

    with torch.no_grad():
        summary = graphex.explain(broken, (torch.ones(2, 4),)).summary()
    lines = [line for line in summary.splitlines() if line.startswith("fold_projections changed nothing")]
    assert len(lines) == 1
    assert lines[0].startswith("fold_projections changed nothing in 'broken inference': ")


def test_a_version_that_is_tried_beside_a_graph_is_no_graph_more():
    report = explained(Net(), torch.randn(4, 64))
    journal = copy.copy(report.journal)
    name = journal.graphs[0].graph
    other = journal.name_version(name, "on two streams")
    journal.history.graphs[other] = journal.history.graphs[name]
    assert "counted from the final graph." in report_data("net", [journal])["summary"][0]["text"]


def test_a_journal_counts_the_graph_breaks_that_explain_counts():
    def broken(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    backend = graphex.get_backend()
    compiled = torch.compile(broken, backend=backend, dynamic=False)
    for size in (2, 3, 4):
        compiled(torch.ones(size))
    assert len(backend.journal.breaks) == 3
    assert "1 graph break" in repr(backend.journal)
    assert "1 graph break and" in report_data("broken", [backend.journal])["summary"][0]["text"]


def test_a_value_that_a_graph_break_hands_on_has_no_name_of_dynamos():
    def halves(x: Tensor) -> tuple[Tensor, int]:
        torch._dynamo.graph_break()
        return x + 1, 2

    def broken(x: Tensor) -> Tensor:
        y, count = halves(x)
        return y.cos() * count

    backend = graphex.get_backend()
    compiled = torch.compile(broken, backend=backend, dynamic=False)
    for size in (2, 3):
        compiled(torch.ones(size))
    assert backend.journal.recompilations
    assert not any("___stack" in each.reason for each in backend.journal.recompilations)
