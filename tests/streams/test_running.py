"""How a graph with several streams runs: which calls reach the device, and when memory is given back."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch._dynamo import config as dynamo
from torch._inductor import config as inductor
from torch.utils._python_dispatch import TorchDispatchMode

import graphex
from tests.harness.compiling import trace
from tests.harness.processes import python
from tests.harness.streams import Finished, aten, find, in_scope, ours, scoped

X = torch.randn(4, 4)


def branches(x):
    left = (x @ x).relu()
    right = x.cos()
    return left + right


SIDE = in_scope("side", aten.mm.default, aten.relu.default)


@pytest.mark.parametrize("options", [{}, {"force_eager": True}, {"mode": "eager"}])
def test_work_is_given_to_its_stream_between_the_events(paper, options):
    done = Finished(branches, X, passes=SIDE, **options)
    (made,) = paper.made
    assert made.calls == [
        [
            "record begin on None",
            "wait begin on side",
            "enter side",
            "record relu on side",
            "enter None",
            "wait relu on None",
        ]
    ]
    assert torch.equal(done.results, branches(X))


def test_streams_and_events_do_not_grow_with_calls(paper):
    done = Finished(branches, X, passes=SIDE)
    for _ in range(1000):
        with torch.no_grad():
            result = done.run(X)
    (made,) = paper.made
    assert torch.equal(result, branches(X))
    assert made.streams == {None, "side"}
    assert len({tuple(call) for call in made.calls}) == 1


def test_the_call_ends_on_the_stream_it_came_from(paper):
    Finished(lambda x: x.sin(), X, passes=in_scope("side", aten.sin.default))
    (made,) = paper.made
    assert made.calls[0][-1] == "enter None"


def test_labels_have_priorities(paper):
    def fn(x):
        with graphex.scope.stream("first", priority=-1):
            y = x.sin()
        with graphex.scope.stream("second"):
            z = x.cos()
        return y + z

    Finished(fn, X)
    (made,) = paper.made
    assert made.priorities == {"first": -1, "second": 0}


class Alive(TorchDispatchMode):
    """At each call of an op: which of its results are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[str, weakref.ref[torch.UntypedStorage]] = {}
        self.seen: dict[str, set[str]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        gc.collect()
        self.seen[name] = {made for made, tensor in self.made.items() if tensor() is not None}
        result = func(*args, **(kwargs or {}))
        self.made[name] = weakref.ref(result)
        return result


@pytest.mark.parametrize("event", [False, True])
def test_memory_is_kept_until_its_stream_has_waited_for_all_who_use_it(paper, event):
    """`sin` is made on a stream of its own and read on the current one: the next work there may not get its memory."""

    def fn(x):
        a = x.sin()
        b = a.cos()  # current
        c = x.exp()
        return b.sum(), c.tan()

    def placing(gm, example_inputs, config):
        scoped(gm, "side", aten.sin.default, aten.sin.default)
        scoped(gm, "side", aten.exp.default, aten.exp.default)
        if event:
            with gm.graph.inserting_after(find(gm, aten.cos.default)):
                gm.graph.call_function(ours.tagged_event_record.default, ("read",))
            keys = (["_user_stream_label"], ["side"])
            with gm.graph.inserting_before(find(gm, aten.exp.default)):
                gm.graph.call_function(ours.scope_enter.default, keys)
                gm.graph.call_function(ours.tagged_event_wait.default, ("read",))
                gm.graph.call_function(ours.scope_exit.default, ())

    done = Finished(trace(fn, X), passes=placing, inplace_pass=False)
    with Alive() as alive, torch.no_grad():
        done.run(X)
    assert ("sin" in alive.seen["exp"]) is not event


def test_the_program_that_is_written_down_shows_streams_and_runs(tmp_path, paper):
    with inductor.patch({"trace.enabled": True}), dynamo.patch(debug_dir_root=str(tmp_path)):
        Finished(branches, X, passes=SIDE)
    (script,) = tmp_path.rglob("output_code.py")
    assert "enter('side')" in script.read_text()
    assert "ran: [(4, 4)]" in python(script).stdout


def limited(x):
    y = x.sin()
    with graphex.scope.limit_core_num(8, 16):
        z = y.cos() + 1
    with graphex.scope.limit_core_num(32, 32):
        w = z.relu()
    return w * 2


@pytest.mark.parametrize("fewest", [8, 16])
def test_limited_work_gets_its_part_of_the_cores_or_the_journal_says_why_not(paper, fewest, recwarn):
    paper.fewest = fewest
    run = torch.compile(limited, backend="graphex")
    torch.testing.assert_close(run(X), limited(X))
    said = [(record.what, record.node) for record in graphex.journal(run).fallbacks]
    if fewest == 8:
        (made,) = paper.made
        assert made.calls == [["enter None with 8 cores", "enter None"]]  # all cores are no limit
        assert said == []
    else:
        assert (paper.made, said) == ([], [("core limits are not applied", "cos")])


def test_a_limit_ends_at_an_event_and_begins_again_behind_it(paper):
    paper.fewest = 8

    def f(x):
        with graphex.scope.stream("side"), graphex.scope.limit_core_num(8, 8):
            y = x.cos()
            moment = graphex.scope.record()
            z = y.sin()
        graphex.scope.wait(moment)
        return x.relu() + z

    run = torch.compile(f, backend="graphex", options={"inplace_pass": False})
    torch.testing.assert_close(run(X), f(X))
    ((*calls,),) = paper.made[0].calls
    side = [call for call in calls if "side" in call]
    begin = side.index("enter side with 8 cores")
    assert side[begin + 1].startswith("record")
    assert side[begin + 2] == "enter side with 8 cores"
