"""The documented pass: mm and abs on a stream of their own, sub after abs. As written, but for the import."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo import config as dynamo
from torch._inductor import config as inductor

import graphex
from tests.harness.streams import DocumentedModel, Finished, documented_pass, events, ours, without

X = torch.randn([3, 3])


@pytest.mark.parametrize("when", ["passes", "after"])
def test_the_pass_works_as_it_is_written(when):
    done = Finished(DocumentedModel(), X, **{when: documented_pass}, verify=True)
    assert done.streams == {"stream_1": ("mm", "abs_1"), "(current)": ("add", "sub")}
    assert done.order() == [
        "record begin",
        "wait begin on stream_1",
        "mm",
        "abs_1",
        "record record_default",
        "wait record_default on (current)",  # add needs abs, and the pass does not say so
        "add",
        "wait record_default on (current)",  # what the pass says
        "sub",
    ]
    for got, wanted in zip(done.results, DocumentedModel()(X), strict=True):
        assert torch.equal(got, wanted)
    assert not done.journal.fallbacks
    assert done.journal.verifications[0].status == "equal"
    assert not graphex.random_orders(done.gm, [X]).differences


def test_the_dump_shows_streams_and_events(tmp_path):
    with inductor.patch({"trace.enabled": True}), dynamo.patch(debug_dir_root=str(tmp_path)):
        Finished(DocumentedModel(), X, passes=documented_pass)
    (final,) = tmp_path.rglob("*_after_schedule_streams.txt")
    text = final.read_text()
    assert "#   stream_1: wait begin, mm, abs_1, record record_default" in text
    assert "#   (current): record begin, wait record_default, add, wait record_default, sub" in text


def test_explain_shows_the_streams():
    report = graphex.explain(DocumentedModel(), (X,), options={"post_grad_custom_pre_pass": documented_pass})
    assert "stream_1" in str(report)
    assert report.to_dict()["records"]
    assert report.journal.streams[0].added_events == 1


def test_a_wait_that_does_nothing_is_found():
    """A graph whose records and waits are dropped on the way to the device runs, and is wrong now and then."""

    def side_pass(gm, example_inputs, config):
        documented_pass(gm, example_inputs, config)
        (moment,) = (node for node in gm.graph.nodes if node.target is torch.ops.air.record.default)
        (add,) = (node for node in gm.graph.nodes if node.target is torch.ops.aten.add.Tensor)
        with gm.graph.inserting_before(add):
            gm.graph.call_function(torch.ops.air.wait.default, ([moment],))

    done = Finished(DocumentedModel(), X, passes=side_pass)
    kept = done.gm
    for wait in events(kept, ours.event_wait.default):
        kept = without(kept, wait.name)
    tried = graphex.random_orders(kept, [X])
    assert tried.differences
    assert tried.differences[0].what.startswith("output")


@pytest.mark.parametrize(
    ("inputs", "orders", "said"),
    [([], 20, "1 inputs, 0 were"), (torch.ones(2), 20, "Tensor was"), ([torch.ones(2)], 0, "orders must be")],
    ids=["none", "no list", "no orders"],
)
def test_random_orders_of_other_inputs_are_refused(inputs, orders, said):
    graph = torch.fx.symbolic_trace(torch.nn.ReLU())
    with pytest.raises(graphex.InputError, match=said):
        graphex.random_orders(graph, inputs, orders=orders)
