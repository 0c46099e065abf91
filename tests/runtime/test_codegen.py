"""What a pass puts into a node arrives at its op as torch.fx.Interpreter would bring it: by type, never by `repr`."""

from __future__ import annotations

import ast
import collections
import enum
import functools
import math
import operator
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.fx import GraphModule, Interpreter

import graphex
from tests.harness.compiling import trace

aten = torch.ops.aten
X = torch.arange(6.0).reshape(2, 3)
RAN = "(_ for _ in ()).throw(AssertionError('a repr was run'))"


class Count(int):
    def __repr__(self) -> str:
        return RAN


class Amount(float):
    def __repr__(self) -> str:
        return f"0\n{RAN}\n"


class Word(str):
    def __repr__(self) -> str:
        return RAN


class Thing:
    def __repr__(self) -> str:
        return "<no code>"


class Silent:
    def __repr__(self) -> str:
        raise ValueError("no text")


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 3


class Pair(NamedTuple):
    left: Any
    right: Any


class Words(list):
    """A list of a kind of its own."""


OBJECTS: list[Any] = [
    Count(3),
    Amount(2.5),
    Word("word"),
    Thing(),
    Thing().__repr__,
    Colour.RED,
    Level.HIGH,
    Level,
    np.float64(4.0),
    np.float32("nan"),
    np.int64(-1),
    np.bool_(True),
    np.datetime64("2020-01-01"),
    range(3),
    torch.finfo(torch.float16),
    torch.per_tensor_affine,
    frozenset({1}),
    bytearray(b"abc"),
    functools.partial(max, 1),
    lambda value: value,
    math.sqrt,
    operator.add,
    print,
    Pair,
    torch.float32,
    torch.strided,
    torch.channels_last,
    torch.device("cpu"),
    torch.device("meta"),
    torch.Generator(),
]
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.binary(max_size=8),
    st.just(...),
    st.sampled_from([5000, -5000]).map(lambda digits: int(math.copysign(1, digits)) * 10 ** abs(digits)),
    st.sampled_from([-0.0, math.inf, -math.inf, math.nan, complex(math.nan, -math.inf)]),
    st.sampled_from([torch.float64, torch.sparse_coo, torch.preserve_format, torch.device("cpu", 0)]),
)
VALUES = st.recursive(
    st.one_of(PLAIN, st.integers(0, len(OBJECTS) - 1).map(lambda place: OBJECTS[place])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Pair, inner, inner),
        st.builds(torch.Size, st.lists(st.integers(0, 9), max_size=3)),
        st.builds(slice, inner, inner, inner),
        st.dictionaries(st.one_of(st.text(), st.integers(), st.none()), inner, max_size=2),
        st.builds(Words, st.lists(inner, max_size=2)),
        st.builds(collections.OrderedDict, st.dictionaries(st.text(), inner, max_size=2)),
    ),
    max_leaves=6,
)
quick = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
RECEIVED: list[Any] = []


def received(x: torch.Tensor, *values: Any, **named: Any) -> torch.Tensor:
    RECEIVED.append((values, named))
    return x.clone()


def model(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2


def handing_over(*args: Any, **kwargs: Any) -> Callable[[GraphModule], None]:
    """A pass that calls `received` with the result of `sin` and these; the string "node" stands for that result."""

    def hand_over(gm: GraphModule) -> None:
        (node,) = gm.graph.find_nodes(op="call_function", target=aten.sin.default)
        with gm.graph.inserting_after(node):
            new = gm.graph.call_function(received, (node, *args), kwargs)
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)

    return hand_over


def changing(target: Any, *args: Any, **kwargs: Any) -> Callable[[GraphModule], None]:
    def change(gm: GraphModule) -> None:
        (node,) = gm.graph.find_nodes(op="call_function", target=target)
        node.args, node.kwargs = (node.args[0], *args), kwargs

    return change


class Both:
    """A graph compiled with a pass, and the graph that the pass left run by an Interpreter."""

    def __init__(self, custom: Callable[[GraphModule], None], **options: Any) -> None:
        self.left: GraphModule | None = None

        @graphex.graph_pass(preserves_results=False)
        def keeping(gm: GraphModule) -> None:
            custom(gm)
            self.left = gm

        self.run = graphex.compile_fx(trace(model, X), options={"post_grad_custom_post_pass": keeping, **options})

    def wanted(self) -> torch.Tensor:
        return Interpreter(self.left).run(X)


def like(found: Any, wanted: Any) -> bool:
    """Whether two values are alike for an op: the same object, or equal containers and numbers of the same type."""
    if found is wanted:
        return True
    if isinstance(wanted, dict):
        return type(found) is dict and like(list(found.items()), list(wanted.items()))
    if isinstance(wanted, (list, tuple)):
        plain = list if isinstance(wanted, list) else tuple  # torch.fx has lists of its own in nodes
        same_kind = type(found) in (type(wanted), plain) and len(found) == len(wanted)
        return same_kind and all(like(one, other) for one, other in zip(found, wanted, strict=True))
    if isinstance(wanted, slice):
        return all(like(getattr(found, edge), getattr(wanted, edge)) for edge in ("start", "stop", "step"))
    if isinstance(wanted, torch.Tensor):
        return torch.equal(found, wanted)
    return type(found) is type(wanted) and (found == wanted or ascii(found) == ascii(wanted))


@quick
@given(value=VALUES)
@example(value=10**5000)
@example(value=[complex(math.nan, -math.inf), -0.0, {"'": (math.inf, ...)}])
@example(value=Thing())
@example(value=[Amount(1.0), Word("x")])
@example(value=Pair(1, (Count(2), range(2))))
def test_a_value_arrives_as_an_interpreter_brings_it(value):
    both = Both(handing_over(value, named=value))
    RECEIVED.clear()
    found, wanted = both.run(X), both.wanted()
    assert torch.equal(found, wanted)
    ours, theirs = RECEIVED
    assert like(ours, theirs)
    assert not graphex.journal(both.run).fallbacks


@pytest.mark.parametrize(
    "number", [np.float64(4.0), np.float32(0.5), np.int64(3), Count(3), Amount(2.5), Level.HIGH, True]
)
@pytest.mark.parametrize("verify", [False, True])
def test_a_number_of_another_type_is_computed_with(number, verify):
    both = Both(changing(aten.mul.Tensor, number), verify=verify)
    assert torch.equal(both.run(X), both.wanted())
    assert torch.equal(both.run(X), X.sin() * float(number))
    assert not graphex.journal(both.run).fallbacks


def test_nodes_in_a_named_tuple_arrive_in_one():
    def hand_over(gm: GraphModule) -> None:
        (node,) = gm.graph.find_nodes(op="call_function", target=aten.sin.default)
        with gm.graph.inserting_after(node):
            new = gm.graph.call_function(received, (node, Pair(node, [Count(2), node])))
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)

    both = Both(hand_over)
    RECEIVED.clear()
    assert torch.equal(both.run(X), both.wanted())
    ours, theirs = RECEIVED
    assert like(ours, theirs)
    assert type(ours[0][0]) is Pair


def test_several_passes_see_a_graph_with_any_object_in_it():
    seen: list[int] = []

    def looking(gm: GraphModule) -> None:
        seen.append(len(gm.graph.nodes))

    def failing(gm: GraphModule) -> None:
        gm.graph.erase_node(next(reversed(gm.graph.find_nodes(op="call_function", target=aten.cos.default))))

    passes = [handing_over(Thing(), Silent(), Amount(1.0)), looking, failing, looking]
    with pytest.warns(graphex.GraphexWarning, match="'failing' was rolled back"):
        run = graphex.compile_fx(
            trace(model, X), options={"post_grad_custom_pre_pass": passes, "strict": False, "verify": True}
        )
    assert torch.equal(run(X), model(X))
    assert seen == [5, 5]
    (verdict,) = graphex.journal(run).verifications
    assert verdict.status == "equal"


def test_a_subgraph_with_any_object_in_it_is_called_as_an_interpreter_would():
    class Sines(torch.fx.passes.operator_support.OperatorSupportBase):
        def is_node_supported(self, submodules: Any, node: torch.fx.Node) -> bool:
            return node.op == "call_function"

    passes = [graphex.graph_pass(preserves_results=False)(changing(aten.mul.Tensor, Amount(2.5))), Sines()]
    run = graphex.compile_fx(trace(model, X), options={"post_grad_custom_pre_pass": passes, "verify": True})
    assert torch.equal(run(X), X.sin() * 2.5)
    assert not graphex.journal(run).fallbacks


# -- scripts -----------------------------------------------------------------------------------------------------------


def dumped(custom: Callable[[GraphModule], None], folder: Path) -> Path:
    both = Both(custom, graph_dump_type="py", graph_dump_path=folder)
    both.run(X)
    (script,) = folder.glob("*optimized*")
    return script


@pytest.mark.parametrize("number", [math.inf, -0.0, 2**60, complex(0, math.inf)])
def test_a_dumped_program_computes_with_the_same_number(number, tmp_path):
    custom = changing(aten.mul.Tensor, number) if not isinstance(number, complex) else handing_over(number)
    forward = runpy.run_path(str(dumped(custom, tmp_path)))["forward"]
    result = forward([X])
    torch.testing.assert_close(result, Both(custom).wanted(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "value", [np.float64(4.0), Count(3), Amount(2.5), Thing(), Silent(), range(2)], ids=lambda v: type(v).__name__
)
def test_a_dumped_program_says_what_it_cannot_hold(value, tmp_path):
    script = dumped(handing_over(value), tmp_path)
    assert RAN not in script.read_text()
    with pytest.raises(
        SystemExit, match=f"{type(value).__name__} of this graph cannot be written as text: put it where"
    ):
        runpy.run_path(str(script))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(VALUES, max_size=3))
def test_a_dumped_program_is_a_program(values, tmp_path_factory):
    script = dumped(handing_over(*values), tmp_path_factory.mktemp("dump"))
    assert RAN not in script.read_text()
    ast.parse(script.read_text())


# -- passes that compare -----------------------------------------------------------------------------------------------


class Unequal:
    """Neither compared nor hashed without an error."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("it cannot be compared")

    __hash__ = None  # type: ignore[assignment]


def test_numbers_that_print_alike_are_not_one():
    def change(gm: GraphModule) -> None:
        for node, number in zip(gm.graph.find_nodes(op="call_function", target=aten.mul.Tensor), numbers, strict=True):
            node.args = (node.args[0], number)

    numbers = Amount(1.0), Amount(2.5), Amount(1.0)
    gm = trace(lambda x: x * 2 + x * 3 + x * 4, X)
    run = graphex.compile_fx(gm, options={"post_grad_custom_pre_pass": change})
    assert torch.equal(run(X), X * 1.0 + X * 2.5 + X * 1.0)


@pytest.mark.parametrize("number", [2.0, np.int64(2), Count(2)])
def test_a_change_that_python_takes_for_none_is_one(number):
    both = Both(changing(aten.mul.Tensor, number))
    (ran,) = (each for each in graphex.journal(both.run).passes if each.name == "keeping")
    assert ran.status == "changed"


@pytest.mark.parametrize("first", [np.ones(2), torch.ones(2), Unequal()], ids=lambda value: type(value).__name__)
def test_what_cannot_be_compared_can_be_replaced(first):
    def replace(gm: GraphModule) -> None:
        (node,) = gm.graph.find_nodes(op="call_function", target=received)
        node.args = (node.args[0], second)

    second = Unequal() if isinstance(first, Unequal) else first + 1
    run = graphex.compile_fx(
        trace(model, X), options={"post_grad_custom_pre_pass": [handing_over(first), replace], "verify": True}
    )
    assert torch.equal(run(X), model(X))
    assert RECEIVED[-1][0][0] is second
