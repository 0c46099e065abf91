"""Kernels that may wait for each other for ever."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
import torch._dynamo.variables.streams  # defines torch.ops.streams

import graphex
from graphex.device import Cores, Device
from tests.harness.streams import Finished, ours

X = torch.randn(4, 4)


LIBRARY = torch.library.Library("streams_test", "DEF")
LIBRARY.define("exchange(Tensor x) -> Tensor")
LIBRARY.impl("exchange", lambda x: x + 1, "CompositeExplicitAutograd")
torch.library.register_fake("streams_test::exchange", torch.empty_like, lib=LIBRARY)
exchange = torch.ops.streams_test.exchange


def three(x):
    return exchange(x), exchange(x * 2), exchange(x * 3)


def spread(gm, example_inputs, config):
    calls = [node for node in gm.graph.nodes if node.target is exchange.default]
    for label, node in zip("abc", calls, strict=True):
        node.meta["custom"] = {"graphex_stream": label}


@pytest.mark.parametrize(("need", "sets"), [(20, {2: 3}), (16, {3: 1}), (10, {})])
def test_kernels_that_need_too_many_cores_together_are_reported(monkeypatch, need, sets, recwarn):
    monkeypatch.setattr(Device, "cores", lambda self: Cores(24, 32))
    graphex.register_core_need(exchange, vectorcore=need)
    done = Finished(three, X, passes=spread, deadlock_check=True)
    (verdict,) = done.journal.deadlock_checks
    assert verdict.status == ("risk" if sets else "clean")
    sizes = [len(risk.nodes) for risk in verdict.risks]
    assert {size: sizes.count(size) for size in sizes} == sets
    text = str(verdict)
    assert ("'exchange' on a: 0 aicores" in text) if sets else ("no deadlock risk among 3 ops" in text)
    data = [record for record in json.loads(done.journal.to_json())["records"] if record["kind"] == "deadlock check"]
    assert len(data[0]["risks"]) == sum(sets.values())
    assert bool([warning for warning in recwarn if "may wait for each other" in str(warning.message)]) is bool(sets)


@pytest.mark.filterwarnings("ignore:graphex. core limits are not applied")
def test_order_and_limits_take_the_risk_away(monkeypatch):
    monkeypatch.setattr(Device, "cores", lambda self: Cores(24, 32))
    graphex.register_core_need(exchange, vectorcore=32)

    def limited(gm, example_inputs, config):
        spread(gm, example_inputs, config)
        for node in gm.graph.nodes:
            if node.target is exchange.default:
                node.meta["custom"]["graphex_cores"] = (24, 10)

    def one_after_the_other(gm, example_inputs, config):
        spread(gm, example_inputs, config)
        calls = [node for node in gm.graph.nodes if node.target is exchange.default]
        for first, second in pairwise(calls):
            with gm.graph.inserting_before(second):
                node = gm.graph.call_function(ours.wait.default, ([first],))
            node.meta["custom"] = dict(second.meta["custom"])

    for placing in (limited, one_after_the_other):
        (verdict,) = Finished(three, X, passes=placing, deadlock_check=True).journal.deadlock_checks
        assert verdict.status == "clean"


def test_a_device_of_unknown_cores_is_not_checked_and_says_so():
    (verdict,) = Finished(three, X, passes=spread, deadlock_check=True).journal.deadlock_checks
    assert verdict.status == "not checked"
    assert "cores of the device 'cpu'" in str(verdict)


def test_a_bad_need_is_refused():
    with pytest.raises(graphex.InputError, match="takes an operator"):
        graphex.register_core_need("exchange", vectorcore=1)
    with pytest.raises(graphex.InputError, match="number of cores"):
        graphex.register_core_need(exchange, vectorcore=-1)
    with pytest.raises(graphex.InputError, match="says nothing"):
        graphex.register_core_need(exchange)
