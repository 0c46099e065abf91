"""Why there are several graphs: graph breaks and recompilations, in the journal, the summary and the report's data."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import graphex


class Breaking(nn.Module):
    """A break between two graphs, and one that no graph ends at."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        print(end="")
        return y + 1


def item(x: Tensor) -> Tensor:
    scale = x.sum().item()
    return x * scale


def in_a_loop(x: Tensor) -> Tensor:
    for _ in range(2):
        x = x + 1
        print(end="")
    return x


def sized(x: Tensor) -> Tensor:
    return x.relu() + 1


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_journal(fn, *calls) -> graphex.Journal:
    compiled = torch.compile(fn, backend="graphex")
    for args in calls:
        compiled(*args)
    return graphex.journal(compiled)


# -- names -----------------------------------------------------------------------------------------------------------


def test_graphs_are_named_after_their_module_and_the_line_they_go_on_after():
    report = graphex.explain(Breaking(), (torch.ones(3),))
    first = Breaking.forward.__code__.co_firstlineno
    assert [graph.graph for graph in report.journal.graphs] == [
        "Breaking inference",
        f"Breaking after line {first + 3} inference",
    ]


def test_forward_and_backward_of_a_function_have_its_name():
    report = graphex.explain(sized, (torch.ones(3, requires_grad=True),))
    assert [graph.graph for graph in report.journal.graphs] == ["sized forward", "sized backward"]


def test_names_do_not_depend_on_what_was_compiled_before():
    names = [[g.graph for g in graphex.explain(sized, (torch.ones(3),)).journal.graphs] for _ in range(2)]
    assert names == [["sized inference"], ["sized inference"]]


def test_a_module_of_torch_has_its_own_name():
    with torch.no_grad():
        report = graphex.explain(nn.Sequential(nn.ReLU()), (torch.ones(3),))
    assert [graph.function for graph in report.journal.graphs] == ["Sequential"]


def test_an_aten_graph_is_named_after_its_module():
    traced = torch.fx.experimental.proxy_tensor.make_fx(sized)(torch.ones(3))
    (graph,) = graphex.journal(graphex.compile_fx(traced, [torch.ones(3)])).graphs
    assert graph.graph == f"{type(traced).__name__} inference"


# -- graph breaks ----------------------------------------------------------------------------------------------------


def test_a_graph_break_is_a_record_with_its_line_and_its_cause():
    journal = compiled_journal(item, [torch.ones(3)])
    (found,) = journal.breaks
    assert found.graph == journal.graphs[0].graph == "item inference"
    assert found.line.endswith("scale = x.sum().item()")
    assert found.line.startswith("test_origins.py:")
    assert found.cause == "`Tensor.item()`"
    assert "capture_scalar_outputs" in found.edit
    assert journal.graphs[1].reason == f"goes on after the graph break at {found.line.partition(': ')[0]}"


def test_a_break_that_no_graph_ends_at_is_told_by_the_graph_after_it():
    journal = graphex.explain(Breaking(), (torch.ones(3),)).journal
    assert [record.cause for record in journal.breaks] == ["`torch._dynamo.graph_break()`", "`print`"]


def test_the_summary_and_the_printed_report_name_every_break():
    report = graphex.explain(item, (torch.ones(3),))
    line = report.journal.breaks[0].line.partition(": ")[0]
    (said,) = [each for each in report.summary().splitlines() if each.startswith("Graph break")]
    assert said.startswith(f"Graph break at {line} (`Tensor.item()`): scale = x.sum().item(). To avoid it: ")
    assert "capture_scalar_outputs" in said
    assert "2 graphs, because of 1 graph break." in report.summary().splitlines()
    assert "`Tensor.item()`" in str(report)


def test_a_layer_that_dynamo_leaves_alone_is_said_with_what_would_help():
    layers = torch.nn.Sequential(torch.nn.GRU(4, 4))
    report = graphex.explain(lambda x: layers[0](x.sin())[0].cos(), (torch.ones(3, 2, 4),))
    (found,) = {(each.cause, each.reason, each.edit.partition("=")[0]) for each in report.journal.breaks}
    assert "RNN, GRU, or LSTM" in found[0]
    assert found[1:] == ("Dynamo does not support RNN, GRU, or LSTM", "Set torch._dynamo.config.allow_rnn")
    assert "To avoid it: Set torch._dynamo.config.allow_rnn=True" in report.summary()


def test_a_function_that_dynamo_gives_up_on_is_named_with_the_line():
    report = graphex.explain(in_a_loop, (torch.ones(3),))
    assert not report.journal.graphs
    (found,) = {(each.function, each.line.partition(": ")[2], each.cause) for each in report.journal.breaks}
    assert found == ("in_a_loop", 'print(end="")', "`print`")
    assert "'in_a_loop' runs in eager: graph break at" in report.summary()


def breaks_and_loops(x: Tensor) -> Tensor:
    x = x.sin()
    torch._dynamo.graph_break()
    for _ in range(2):
        print(end="")
    return x.cos()


def test_the_rest_of_a_function_that_dynamo_gives_up_on_is_named_by_the_line_before_it():
    line = breaks_and_loops.__code__.co_firstlineno + 2
    assert (
        f"'breaks_and_loops after line {line}' runs in eager"
        in graphex.explain(breaks_and_loops, (torch.ones(3),)).summary()
    )


def only_breaks(x: Tensor) -> Tensor:
    print(end="")
    print("", end="")
    return x


def test_a_function_with_breaks_and_no_graph_says_where_they_are():
    compiled = torch.compile(only_breaks, backend="graphex")
    assert not graphex.journal(compiled).records  # it was not called
    compiled(torch.ones(3))
    for journal in (graphex.journal(compiled), graphex.journal(compiled), graphex.explain(only_breaks, (1,)).journal):
        found = [(each.graph, each.function, each.line.partition(": ")[2]) for each in journal.breaks]
        assert found == [("-", "only_breaks", 'print(end="")'), ("-", "only_breaks", 'print("", end="")')]


def test_the_journal_of_a_function_that_dynamo_gives_up_on_says_why():
    (found,) = compiled_journal(in_a_loop, [torch.ones(3)]).breaks
    assert (found.graph, found.function, found.cause) == ("-", "in_a_loop", "`print`")


def test_a_break_inside_of_torch_is_at_the_line_of_the_user():
    """A hook that is not traced, such as those of FSDP, inside of a checkpoint: Python runs all of it."""
    layer = nn.Linear(3, 3)
    layer.register_forward_pre_hook(torch._dynamo.disable(lambda *_: None))

    def checkpointed(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)

    journal = compiled_journal(checkpointed, [torch.ones(3)])
    assert not journal.graphs
    (found,) = journal.breaks
    assert found.line.endswith("return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)")
    assert "it is called at module.py:" in found.reason


def test_a_model_without_breaks_says_nothing_about_them():
    report = graphex.explain(sized, (torch.ones(3),))
    assert not report.journal.breaks
    assert "break" not in report.summary()
    assert report.journal.graphs[0].reason == ""


# -- recompilations --------------------------------------------------------------------------------------------------


def added(x, n):
    return x + n


def flagged(x, flag):
    return x + 1 if flag else x - 1


@pytest.mark.parametrize(
    ("fn", "calls", "reason"),
    [
        (sized, [(torch.ones(4),), (torch.ones(7),)], "size 0 of x changed from 4 to 7"),
        (sized, [(torch.ones(4),), (torch.ones(4, 4),)], "rank of x changed from 1 to 2"),
        (sized, [(torch.ones(4),), (torch.ones(4).double(),)], "dtype of x changed from Float to Double"),
        (added, [(torch.ones(4), 2), (torch.ones(4), 3)], "n is not 2 any more"),
        (flagged, [(torch.ones(4), True), (torch.ones(4), False)], "flag is not True any more"),
    ],
)
def test_a_recompilation_says_in_words_what_changed(fn, calls, reason):
    journal = compiled_journal(fn, *calls)
    (found,) = journal.recompilations
    assert found.reason == reason
    assert found.earlier == f"{fn.__name__} inference"
    assert found.graph == journal.graphs[1].graph == f"{fn.__name__} recompile 1 inference"
    assert journal.graphs[1].reason == reason


def test_a_change_of_grad_mode_recompiles_and_says_so():
    compiled = torch.compile(sized, backend="graphex")
    x = torch.ones(4, requires_grad=True)
    compiled(x)
    with torch.no_grad():
        compiled(x)
    assert [found.reason for found in graphex.journal(compiled).recompilations] == ["grad_mode changed"]


def test_a_recompilation_is_told_against_the_graph_that_is_nearest():
    like = torch.ones(5)
    journal = compiled_journal(sized, (torch.ones(3),), (like,), (like.double(),), (torch.ones(2, 5),))
    *_, last = journal.recompilations
    assert last.reason == "rank of x changed from 1 to 2"
    assert last.earlier == "sized recompile 1 inference"


def test_each_recompilation_tells_the_guard_of_the_latest_graph():
    journal = compiled_journal(flagged, *[(torch.ones(*shape), True) for shape in ((2,), (2, 2), (2, 2, 2))])
    assert [found.reason for found in journal.recompilations] == [
        "rank of x changed from 1 to 2",
        "rank of x changed from 2 to 3",
    ]


def test_one_change_of_a_size_is_one_sentence_however_many_graphs_it_makes_again():
    compiled = torch.compile(Breaking(), backend=(backend := graphex.get_backend()))
    for size in (4, 7):
        compiled(torch.ones(size))
    data = report_of(backend.journal)
    said = [sentence["text"] for sentence in data["summary"] if sentence["text"].startswith("Recompiled")]
    assert said == [
        "Recompiled 'Breaking inference' because size 0 of x changed from 4 to 7, and 1 more for the same change."
    ]


def report_of(journal: graphex.Journal) -> dict:
    from graphex.evidence.report.data import report_data

    return report_data("a model", [journal])


def test_the_data_of_a_report_has_breaks_and_recompilations_with_their_graphs():
    compiled = torch.compile(item, backend=(backend := graphex.get_backend()))
    for size in (4, 7):
        compiled(torch.ones(size))
    data = json.loads(json.dumps(report_of(backend.journal)))
    named = {graph["name"]: graph for graph in data["graphs"]}
    assert named["item inference"]["breaks"][0]["cause"] == "`Tensor.item()`"
    again = named["item recompile 1 inference"]["recompilations"][0]
    assert (again["value"], again["what"], again["before"], again["now"]) == ("x", "size 0", "4", "7")
    assert named["item recompile 1 inference"]["reason"] == "size 0 of x changed from 4 to 7"
