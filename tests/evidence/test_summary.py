"""The sentences of a summary: what a newcomer reads first, and what stands behind each of them."""

from __future__ import annotations

import copy
import logging
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphex
from graphex.debug.history import GraphHistory
from graphex.evidence.report.data import report_data
from graphex.evidence.tables import printed
from graphex.records import CacheAsked, RegionCompiled
from graphex.regions.compiler import Outcome

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


def test_lookups_that_compiled_code_makes_are_no_ops_of_their_own(regions):
    class Tabular(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables, self.dense = nn.ModuleList([nn.Embedding(9, 4) for _ in range(3)]), nn.Linear(12, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.dense(torch.cat([table(x[:, place]) for place, table in enumerate(self.tables)], 1)).relu()

    assert "6 device ops -> 3," in explained(Tabular(), torch.randint(9, (8, 3))).summary()


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


@on_a_cpu
def test_a_line_of_the_log_says_what_was_compiled_where_no_rule_fused(regions, monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    logger = logging.getLogger("graphex")
    level = logger.level
    monkeypatch.setattr(logger, "handle", lambda record: said.append(record.getMessage()))
    logger.setLevel(logging.INFO)
    try:
        torch.compile(lambda x: x.sin().cos(), backend="graphex")(torch.ones(2))
    finally:
        logger.setLevel(level)
    assert ": compiled 2 ops in 1 region; refused nothing;" in said[0]


@on_a_cpu
def test_a_line_of_the_log_says_that_a_region_was_compiled_and_is_slower(regions, monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    logger = logging.getLogger("graphex")
    level = logger.level
    monkeypatch.setattr(logger, "handle", lambda record: said.append(record.getMessage()))
    monkeypatch.setattr("graphex.regions.stage.tried", lambda *_: Outcome(is_kept=False, compiled=2.0, single=1.0))
    logger.setLevel(logging.INFO)
    try:
        torch.compile(lambda x: x.sin().cos(), backend="graphex")(torch.ones(2))
    finally:
        logger.setLevel(level)
    assert ": fused nothing; other rewrites: compute_in_place 1; " in said[0]
    assert "; 1 region was compiled and is slower than single ops; refused nothing" in said[0]


@on_a_cpu
def test_a_preview_says_that_its_ops_are_lost_to_compiled_regions(regions):
    lifted = explained(nn.RMSNorm(8), torch.ones(4, 8), lift_idioms="always")
    assert not lifted.journal.regions
    assert "no faster on the CPU, and it keeps the ops out of compiled code: leave" in lifted.summary()


@on_a_cpu
def test_what_no_rule_applies_to_on_a_cpu_is_said_once():
    with torch.no_grad():
        summary = graphex.explain(nn.Linear(4, 4), (torch.ones(2, 4),), calls=1).summary()
    assert "On the CPU no fusion rule applied" in summary
    assert "changed nothing" not in summary


# -- training graphs of a model in eval mode ---------------------------------------------------------------------------

TRAINS = "The model is in eval mode, but gradients are enabled: these are the graphs of a training step."


def test_a_model_in_eval_mode_with_gradients_enabled_is_explained_as_training_and_the_report_says_so():
    model = Net().eval()
    for subject in (model, model.forward):
        report = graphex.explain(subject, (torch.randn(4, 64),), calls=1)
        assert {graph.phase for graph in report.journal.graphs} == {"forward", "backward"}
        assert report.summary().count(TRAINS) == str(report).count(TRAINS) == 1
        assert "call explain under torch.no_grad()" in report.summary()


def test_nothing_is_said_about_gradients_where_the_graphs_are_those_of_the_mode():
    trains, infers = Net(), Net().eval().requires_grad_(requires_grad=False)
    given = torch.randn(4, 64)
    reports = [graphex.explain(model, (given,), calls=1) for model in (trains, infers)]
    for report in [*reports, explained(Net().eval(), given)]:
        assert "eval mode" not in report.summary() + str(report)


# -- regions -----------------------------------------------------------------------------------------------------------


def test_a_summary_says_what_regions_cost_what_to_expect_and_how_to_do_without(regions):
    summary = explained(Net(), torch.randn(4, 64)).summary()
    assert "run in 1 compiled region. They were not measured: expect about the speed of Inductor." in summary
    assert "regions=False or GRAPHEX_REGIONS=off does without" in summary


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            {"seconds_compiled": 2e-3, "seconds_single": 5e-3},
            "Timed alone, it takes 2 ms, and 5 ms op by op: 2.5 times as fast. Eager was not timed.",
        ),
        (
            {"seconds_compiled": 2e-5, "seconds_single": 5e-5},
            "2.5 times as fast. Eager was not timed, and may be faster: torch's guards alone take some 0.01 ms",
        ),
        (
            {"seconds_compiled": 5e-3, "seconds_single": 2e-3, "status": "slower", "region": ""},
            "1 compiled region was slower than single ops, which run instead.",
        ),
        (
            {"seconds_compiled": 1.71, "seconds_single": 1.7},
            "Timed alone, it takes 1.71 s, and 1.7 s op by op: 0.99 times as fast. Eager was not timed.",
        ),
        (
            {"seconds_compiled": 1.7, "seconds_single": 1.71},
            "Timed alone, it takes 1.7 s, and 1.71 s op by op. Eager was not timed.",
        ),
        (
            {"seconds_compiled": 1.71, "seconds_single": 1.7, "doubtful": True},
            "Compiled code is kept: the machine was too busy to tell whether that is faster.",
        ),
    ],
    ids=["faster", "short", "slower", "nearly as fast", "as fast", "doubtful"],
)
def test_a_measured_region_says_how_fast_it_is(found, said, regions):
    journal = explained(Net(), torch.randn(4, 64)).journal
    (region,) = journal.regions
    journal.records = [replace(region, **found) if each is region else each for each in journal.records]
    (tone,) = [each["tone"] for each in report_data("net", [journal])["summary"] if said in each["text"]]
    assert (tone == "good") == ("region" not in found and "doubtful" not in found)


def test_a_region_is_measured_where_tuning_is_on(regions, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GRAPHEX_TUNING")
    (region,) = explained(Net(), torch.randn(4, 64)).journal.regions
    assert region.seconds_compiled > 0
    assert region.seconds_single > 0


@pytest.mark.parametrize(
    ("graphex_takes", "eager_takes", "said"),
    [
        (2e-3, 5e-3, "A single call takes 2 ms with graphex and 5 ms in eager."),
        (5e-3, 2e-3, "A single call takes 5 ms with graphex and 2 ms in eager."),
        (2e-5, 1e-5, "A single call takes 0.02 ms with graphex and 0.01 ms in eager: torch's guards take longer than"),
    ],
)
def test_a_whole_call_is_told_beside_eagers_in_place_of_a_guess(graphex_takes, eager_takes, said, regions):
    journal = explained(Net(), torch.randn(4, 64)).journal
    sentences = report_data("net", [journal], seconds={"graphex": graphex_takes, "eager": eager_takes})["summary"]
    (tone,) = [each["tone"] for each in sentences if each["text"].startswith(said)]
    assert (tone == "good") == (graphex_takes < eager_takes)
    assert not any("Eager was not timed" in each["text"] for each in sentences)


@pytest.mark.parametrize(("eager_takes", "is_told"), [(2e-3, False), (7e-3, True)])
def test_a_trial_that_took_longer_than_eagers_whole_call_gives_no_factor(eager_takes, is_told, regions):
    journal = explained(Net(), torch.randn(4, 64)).journal
    (region,) = journal.regions
    timed = replace(region, seconds_compiled=1e-3, seconds_single=5e-3)
    journal.records = [timed if each is region else each for each in journal.records]
    sentences = report_data("net", [journal], seconds={"graphex": 1e-3, "eager": eager_takes})["summary"]
    (told,) = [each["text"] for each in sentences if "compiled region" in each["text"] and "run in" in each["text"]]
    assert told.endswith("5 times as fast." if is_told else "compiled region.")


@on_a_cpu
def test_whole_calls_are_timed_from_one_state_and_not_counted(regions, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GRAPHEX_TUNING")

    def updated(state: Tensor, x: Tensor) -> Tensor:
        state.add_(1)
        return (x * state).sin()

    state = torch.zeros(4)
    with torch.no_grad():
        report = graphex.explain(updated, (state, torch.ones(4)), calls=2)
    assert {*report.seconds} == {*report.to_dict()["seconds"]} == {"eager", "graphex"}
    assert "A single call takes " in report.summary()
    assert [counts["calls"] for counts in report.journal.counts.values()] == [2]
    assert not state.any()


def test_whole_calls_are_not_timed_where_python_sees_each_of_them(regions, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.delenv("GRAPHEX_TUNING")

    def printing(x: Tensor) -> Tensor:
        print("called")
        return x.sin()

    report = graphex.explain(printing, (torch.ones(4),), calls=1)
    assert capsys.readouterr().out.count("called") == 2
    assert not report.seconds


# -- differences from eager --------------------------------------------------------------------------------------------


def in_red(report: graphex.Report) -> list[str]:
    """The sentences about differences that ask a reader to do something."""
    sentences = report_data("net", [report.journal], differences=report.differences, rounding=report.rounding)
    about = [each for each in sentences["summary"] if "from eager" in each["text"]]
    return [each["text"] for each in about if each["tone"] == "bad"]


class _Several(nn.Module):
    """Three values, each rounded five times in eager."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(((x * scale).sin() * 1.1 + 0.3).cos() * 0.7 for scale in (1.0, 2.0, 3.0))


def test_what_the_type_of_a_model_explains_is_one_sentence_and_no_fault(regions):
    report = explained(_Several(), torch.randn(64, 64, dtype=torch.bfloat16))
    assert len(report.differences) == 3
    assert len(report.rounding) == 3
    (said,) = [line for line in report.summary().splitlines() if "eager within" in line]
    value, _, error = report.rounding[0].partition(": values differ by up to ")
    wanted = f"Equal to eager within rounding, largest difference {error} ({value}), and 2 more. Compiled regions add"
    assert said.startswith(wanted)
    assert "equal to eager within rounding\n" in str(report)
    assert "ifferent from eager" not in f"{report}{report.summary()}"
    assert not in_red(report)
    errors = [float(said.rpartition(" ")[2]) for said in report.rounding]
    assert errors == sorted(errors, reverse=True)


def test_a_result_is_as_exact_as_the_types_it_was_computed_in(regions):
    def widened(x: Tensor) -> Tensor:
        return ((x.bfloat16().sin() * 1.1 + 0.3).cos() * 0.7).float()

    with torch.no_grad():
        report = graphex.explain(widened, (torch.randn(64, 64),), calls=1)
    assert len(report.differences) == len(report.rounding) == 1
    assert not in_red(report)


def scaled_by(factor: float):
    """A pass that multiplies what a graph returns."""

    def scale(gm, example_inputs, config):
        (output,) = gm.graph.find_nodes(op="output")
        with gm.graph.inserting_before(output):
            returned = [gm.graph.call_function(torch.ops.aten.mul.Tensor, (each, factor)) for each in output.args[0]]
        for new, old in zip(returned, output.args[0], strict=True):
            new.meta = dict(old.meta)
        output.args = (tuple(returned),)
        gm.recompile()

    return scale


@pytest.mark.parametrize(
    ("dtype", "factor"), [(torch.float32, 1 + 1e-4), (torch.bfloat16, 1.1)], ids=["float32", "bfloat16"]
)
def test_an_error_that_is_no_rounding_of_the_type_stays_red(dtype, factor, regions):
    x = torch.randn(64, 64, dtype=dtype)
    report = explained(_Several(), x, post_grad_custom_post_pass=scaled_by(factor))
    assert len(report.differences) == 3
    assert not report.rounding
    assert len(in_red(report)) == 3


def test_a_cast_of_a_result_does_not_excuse_the_others(regions):
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        y = (x.sin() * 1.1 + 0.3).cos() * 0.7
        return y, y.bfloat16()

    def slightly_wrong(gm, example_inputs, config):
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
            node.args = (node.args[0], node.args[1] * (1 + 1e-3))
        gm.recompile()

    with torch.no_grad():
        report = graphex.explain(
            both, (torch.randn(64, 64),), options={"post_grad_custom_pre_pass": slightly_wrong}, calls=1
        )
    assert [said for said in in_red(report) if said.startswith("Different from eager: result[0]")]


def test_a_difference_comes_first_with_a_way_to_find_its_cause(regions):
    options = {"post_grad_custom_post_pass": scaled_by(2)}
    first, second, *_ = explained(_Several(), torch.randn(4), **options).summary().splitlines()[2:]
    assert first.startswith("Different from eager: result[2]")
    assert second == "Set verify=True to find the rule or the pass to blame."


def test_integers_are_never_rounded(regions):
    def largest(x: Tensor) -> Tensor:
        return (x.sin() * 1.1).softmax(-1).argmax(-1) + 1000

    options = {"post_grad_custom_post_pass": scaled_by(2)}
    with torch.no_grad():
        report = graphex.explain(largest, (torch.randn(8, 64, dtype=torch.bfloat16),), options=options, calls=1)
    assert len(in_red(report)) == len(report.differences) == 1


def test_without_regions_and_kernels_every_difference_is_red():
    x = torch.randn(64, 64, dtype=torch.bfloat16)
    report = explained(_Several(), x, post_grad_custom_post_pass=scaled_by(1 + 2**-7), regions=False)
    assert len(report.rounding) == 3
    assert len(in_red(report)) == 3


def test_a_gradient_that_cancels_is_compared_with_those_of_its_module(regions):
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 4), nn.Softmax(-1))
    report = graphex.explain(model, (torch.randn(64, 16),), calls=1)
    assert any("model.0.bias" in said for said in report.rounding)
    assert not in_red(report)


# -- more about regions ------------------------------------------------------------------------------------------------


def test_ops_outside_of_regions_are_counted_over_all_graphs(regions):
    def broken(x: Tensor) -> Tensor:
        first = x.atanh().sin().softmax(-1)
        torch._dynamo.graph_break()
        return first + x.atanh().cos().softmax(-1)

    with torch.no_grad():
        summary = graphex.explain(broken, (torch.rand(4, 64),), calls=1).summary()
    outside = [line for line in summary.splitlines() if line.startswith("Outside of compiled regions")]
    assert len(outside) == 1
    assert outside[0].startswith("Outside of compiled regions: 2 ops such as aten.atanh.default, each because")


def test_the_time_that_regions_take_is_a_share_of_its_own(regions, tmp_path):
    report = explained(Net(), torch.randn(4, 64))
    spent = {each["stage"]: each["seconds"] for each in report_data("net", [report.journal])["compile_time"]}
    whole = next(ran.seconds for ran in report.journal.passes if ran.name == "compile_regions")
    assert spent["regions"] == pytest.approx(whole)
    assert spent["passes"] > 0


def test_sentences_about_regions_lead_to_the_pass_and_to_the_op_outside(regions):
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(torch.atanh(x))

    report = explained(Beside(), torch.rand(4, 64))
    data = report_data("net", [report.journal])
    for sentence in data["summary"]:
        if "regions" in sentence["text"] or "compiled region" in sentence["text"]:
            assert sentence["links"], sentence["text"]
    (outside,) = [each for each in data["summary"] if each["text"].startswith("Outside of compiled regions")]
    assert "atanh" in [link.get("node") for link in outside["links"]]


def test_the_predicted_peak_does_not_grow_by_compiling_regions(regions):
    class Chain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin().exp().cos().sin().exp().cos() + 1

    compiled, single = (explained(Chain(), torch.randn(64, 64), regions=on).journal for on in (True, False))
    assert len(compiled.regions) == 1
    assert compiled.memory[0].peak_before == 2 * 64 * 64 * 4
    assert compiled.memory[0].peak_after == single.memory[0].peak_after == 64 * 64 * 4


def test_the_predicted_peak_counts_what_a_region_is_given_beside_its_result(regions):
    class Given(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.atanh().sin().exp().cos() + 1

    journal = explained(Given(), torch.rand(64, 64)).journal
    assert [border.op for border in journal.region_borders] == ["aten.atanh.default"]
    assert journal.memory[0].peak_after == 2 * 64 * 64 * 4


# -- several graphs ----------------------------------------------------------------------------------------------------


def recompiled() -> graphex.Journal:
    """A function that was compiled for two sizes: of its two graphs, one runs in a call."""

    def changing(x: Tensor) -> Tensor:
        return x.sin().cos() @ x.T

    backend = graphex.get_backend({"regions": False})
    compiled = torch.compile(changing, backend=backend, dynamic=False)
    backend.journal.history = GraphHistory()
    with torch.no_grad():
        for rows in (2, 64):
            compiled(torch.ones(rows, 64))
    return backend.journal


def told(journal: graphex.Journal) -> str:
    return "\n".join(sentence["text"] for sentence in report_data("net", [journal])["summary"])


def test_ops_and_peaks_of_graphs_that_never_run_in_one_call_are_not_added_up():
    journal = recompiled()
    summary = told(journal)
    assert "None of 2 graphs has fewer device ops than before: 3 device ops at most." in summary
    small, large = (record.peak_after for record in journal.memory)
    assert large > small > 0
    peak = f"Predicted peak of intermediate memory: {large // 1024} KiB as before, in 'changing recompile 1 inference'"
    assert f"{peak}, the largest of 2 graphs." in summary


def test_graphs_that_changed_are_told_apart_from_those_that_did_not():
    def broken(x: Tensor) -> Tensor:
        y = x.sin() + x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    with torch.no_grad():
        summary = graphex.explain(broken, (torch.ones(2),), calls=1).summary()
    assert "In 'broken inference': 3 device ops -> 2. The other has as many as before." in summary


@pytest.mark.filterwarnings("ignore")
def test_a_branch_on_a_tensor_is_named_with_a_way_to_do_without():
    def branching(x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x.sin()
        return x.cos()

    lines = graphex.explain(branching, (torch.ones(2),), calls=1).summary().splitlines()
    (said,) = [line for line in lines if line.startswith("Graph break")]
    assert said.endswith(
        "(the branch needs the value of a tensor): if x.sum() > 0. To avoid it: use `torch.where` or `torch.cond`."
    )


def test_times_of_regions_of_graphs_that_never_run_in_one_call_are_not_added_up():
    journal = recompiled()
    for graph, single in zip(journal.graphs, (3e-3, 8e-3), strict=True):
        counts = {"nodes": 3, "calls": 3, "generated": 3, "fused_ops": 0, "kernels": (), "seconds": 1.0}
        journal.add(
            RegionCompiled(graph.graph, "region_0", "compiled", **counts, seconds_compiled=2e-3, seconds_single=single)
        )
    assert (
        "6 ops run in 2 compiled regions of 2 graphs. Timed alone, they take 2 ms, and 8 ms op by op in the "
        "longest graph: 1.5 to 4 times as fast." in told(journal)
    )


def test_bytes_of_updates_in_graphs_that_never_run_in_one_call_are_not_added_up():
    def updated(state: Tensor, x: Tensor) -> Tensor:
        state.index_copy_(0, torch.zeros(1, dtype=torch.long), x[:1])
        return x * 2

    backend = graphex.get_backend()
    compiled = torch.compile(updated, backend=backend, dynamic=False)
    for rows in (2, 256):
        compiled(torch.ones(rows, 4), torch.ones(rows, 4))
    most = max(record.certificate.bytes_saved for record in backend.journal.rewrites)
    assert (
        f"All 2 input updates are written in place, which saves copying up to {most // 1024} KiB in every call."
        in told(backend.journal)
    )


@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
def test_a_pass_that_is_rolled_back_in_every_graph_is_told_once():
    def broken(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    def failing(gm, example_inputs, config):
        raise ValueError("no good")

    options = {"post_grad_custom_pre_pass": failing, "strict": False}
    summary = graphex.explain(broken, (torch.ones(2),), options=options, calls=1).summary()
    assert [line for line in summary.splitlines() if "no good" in line] == [
        "Pass 'failing' was rolled back in 2 graphs: ValueError: no good."
    ]


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (1, "0 of 1 sin_exp sites fused, because "),
        (2, "0 of 2 sin_exp sites fused: none, because "),
        (-1, "1 of 2 sin_exp sites fused; 1 was not, because "),
    ],
)
def test_a_sentence_about_sites_that_are_not_fused_can_be_read_aloud(count, said):
    def model(x: Tensor) -> list[Tensor]:
        inner = [(x + place).sin() for place in range(abs(count))]
        fused = [(x * 2).sin().exp()] if count < 0 else []
        return [each for value in inner for each in (value, value.exp())] + fused

    rule = graphex.replacement(
        lambda x: x.sin().exp(), lambda x: (x + 0).sin().exp(), [torch.ones(3)], name="sin_exp", self_test=False
    )
    with torch.no_grad():
        report = graphex.explain(model, (torch.ones(3),), options={"fusion_rules": [rule]}, calls=1)
    assert said in report.summary()


@on_a_cpu
def test_a_rule_that_only_saw_single_ops_of_its_pattern_is_not_told_of_on_a_cpu():
    with torch.no_grad():
        report = graphex.explain(torch.bmm, (torch.ones(2, 3, 128), torch.ones(2, 128, 4)), calls=1)
    assert report.rule("batchmatmul_transpose").near_misses
    assert "batchmatmul_transpose" not in report.summary()


def test_a_step_that_came_from_the_cache_says_that_no_pass_ran():
    journal = graphex.Journal()
    journal.add(CacheAsked("f inference", "hit"))
    assert "None ran: the graphs came from the cache." in printed("f", journal)


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


def broken_twice(x: Tensor) -> Tensor:
    y = F.linear(x.sin() + 1, torch.ones(4, 4)).relu()
    torch._dynamo.graph_break()
    y = F.linear(y, torch.ones(4, 4))
    torch._dynamo.graph_break()
    return F.linear(y, torch.ones(4, 4))


def test_a_remark_of_a_pass_about_some_of_the_graphs_names_them(regions):
    summary = graphex.explain(broken_twice, (torch.ones(2, 4),)).summary()
    (said,) = [line for line in summary.splitlines() if "changed nothing" in line]
    assert said.startswith("compile_regions changed nothing in 'broken_twice after line")
    assert "' and 1 more graph: too few ops to gain anything" in said


@on_a_cpu
def test_kernels_that_need_a_gpu_are_told_of_in_one_sentence(regions):
    summary = graphex.explain(broken_twice, (torch.ones(2, 4, requires_grad=True),)).summary()
    (said,) = [line for line in summary.splitlines() if "CUDA GPU" in line]
    assert said.endswith("(fold_projections, lift_idioms).")
    assert "inference only" not in summary


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
