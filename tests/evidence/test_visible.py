"""What explain compares and puts back: a pass that turns every add into a sub is seen wherever it shows."""

from __future__ import annotations

import json
from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass

import numpy
import pytest
import torch
from torch import Tensor, nn

import graphex
from graphex.evidence.report.page import read_data

aten = torch.ops.aten
Pair = namedtuple("Pair", "first second")
LOG: list[Tensor] = []
COUNT = 0


@dataclass
class Result:
    name: str
    value: Tensor


class Cache:
    """A cache as models write them: an object with lists of tensors."""

    def __init__(self) -> None:
        self.keys = [torch.zeros(3)]
        self.length = 0

    def update(self, x: Tensor) -> Tensor:
        self.keys[0].copy_(self.keys[0] + x)
        self.length += 1
        return self.keys[0]


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: Tensor) -> None:
        self.held = held


def subtract(gm):
    for node in gm.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        node.target = aten.sub.Tensor


WRONG = {"post_grad_custom_pre_pass": [subtract]}
X = torch.tensor([1.0, 2.0, 3.0])


def wrong(model, args=(X,), **options):
    """The report of a model that was compiled wrongly."""
    return graphex.explain(model, args, options={**WRONG, **options}, calls=2)


def right(model, args=(X,), **options):
    return graphex.explain(model, args, options=options, calls=2)


def module(forward, **attributes):
    """A module with these attributes; tensors become buffers, parameters stay what they are."""
    made = type("Model", (nn.Module,), {"forward": forward})()
    for name, value in attributes.items():
        if type(value) is Tensor:
            made.register_buffer(name, value)
        else:
            setattr(made, name, value)
    return made


# -- results ---------------------------------------------------------------------------------------------------------


def own_buffer(self, x):
    self.total.copy_(self.total + x)
    return self.total


def view_of_own_buffer(self, x):
    self.total.copy_(self.total + x)
    return self.total[1:]


def input_itself(self, x):
    return x.copy_(x + 1)


def view_of_input(self, x):
    x.copy_(x + 1)
    return x[:2]


RESULTS = {
    "own buffer": own_buffer,
    "view of own buffer": view_of_own_buffer,
    "input": input_itself,
    "view of input": view_of_input,
    "item": lambda self, x: (x + 1).sum().item(),
    "int": lambda self, x: int((x + 1).sum()),
    "bool": lambda self, x: bool((x + 1).sum() > 5),
    "string": lambda self, x: "large" if (x + 1).sum() > 5 else "small",
    "dataclass": lambda self, x: Result("r", x + 1),
    "namedtuple": lambda self, x: Pair(x, x + 1),
    "dict": lambda self, x: {"a": [x, {"b": (x + 1, None)}]},
    "ordered dict": lambda self, x: OrderedDict(a=x + 1),
    "list of numbers": lambda self, x: (x + 1).tolist(),
    "complex": lambda self, x: torch.complex(x, x) + 1,
    "bool tensor": lambda self, x: (x + 1) > 1,
    "integers": lambda self, x: (x.long() << 60) + 1,
    "nan": lambda self, x: torch.where(x + 1 > 0, x, float("nan")),
    "infinity": lambda self, x: torch.where(x + 1 > 0, x, float("inf")),
    "float8": lambda self, x: (x + 1).to(torch.float8_e4m3fn),
    "conjugate": lambda self, x: (torch.complex(x, x) + 1j).conj(),
}


@pytest.mark.parametrize("forward", RESULTS.values(), ids=RESULTS)
@torch.no_grad()
def test_a_wrong_result_is_a_difference_and_a_right_one_is_none(forward):
    model = module(forward, total=torch.ones(3))
    bad, good = wrong(model), right(model)
    assert bad.worst_difference > 0, bad.differences
    assert any(said.startswith("result") for said in bad.differences)
    assert (good.worst_difference, good.differences, good.not_compared) == (0.0, (), ())
    assert torch.equal(model.total, torch.ones(3))


@torch.no_grad()
def test_results_of_transformers_are_compared():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    report = wrong(lambda x: outputs.BaseModelOutput(last_hidden_state=x + 1, hidden_states=(x,)))
    assert report.worst_difference == 2
    assert right(lambda x: outputs.BaseModelOutput(last_hidden_state=x + 1)).worst_difference == 0


@torch.no_grad()
def test_results_without_elements_are_compared_by_their_shape():
    assert right(lambda x: x[:0] + 1).worst_difference == 0
    assert different(lambda x: x[:0], lambda x: x[:0].view(0, 2)).worst_difference == float("inf")


@torch.no_grad()
def test_integers_that_floats_cannot_tell_apart_are_different():
    big = torch.tensor([2**60])
    report = graphex.explain(lambda x: x + 1, (big,), options=WRONG)
    assert report.worst_difference >= 1


@torch.no_grad()
def test_equal_nans_and_infinities_are_equal():
    report = right(lambda x: (x * float("nan"), x / 0, -x / 0, torch.complex(x, x / 0)))
    assert report.worst_difference == 0


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["jagged", "strided nested", "coo", "csr", "quantised", "per channel", "mkldnn"])
def test_every_kind_of_tensor_is_compared_through_its_parts(kind):
    def jagged(x):
        return torch.nested.nested_tensor_from_jagged(x.repeat(2) + 1, torch.tensor([0, 2, 6]))

    kinds = {
        "jagged": jagged,
        "strided nested": lambda x: torch.nested.nested_tensor([x + 1, x[:2] + 1]),
        "coo": lambda x: (x + 1).to_sparse(),
        "csr": lambda x: torch.outer(x + 1, x).to_sparse_csr(),
        "quantised": lambda x: torch.quantize_per_tensor(x + 1, 0.1, 0, torch.qint8),
        "per channel": lambda x: torch.quantize_per_channel(x + 1, torch.ones(3), torch.zeros(3), 0, torch.qint8),
        "mkldnn": lambda x: (x + 1).to_mkldnn(),
    }
    make = torch.compiler.disable(kinds[kind])
    assert right(lambda x: (make(x), x * 2)).worst_difference == 0
    report = different(make, lambda x: make(x + 2))
    assert report.worst_difference > 0
    assert not report.not_compared


def different(eager, compiled):
    """The report of a function that does one thing in eager and another when compiled."""

    def model(x):
        return compiled(x) if torch.compiler.is_compiling() else eager(x)

    return right(model)


@torch.no_grad()
@pytest.mark.parametrize(
    ("eager", "compiled", "said"),
    [
        (lambda x: x + 1, lambda x: (x + 1)[:2], "shape"),
        (lambda x: x + 1, lambda x: (x + 1).double(), "dtype"),
        (lambda x: x.expand(2, 3) + 1, lambda x: (x.expand(2, 3) + 1).t().contiguous().t(), "strides"),
        (lambda x: x + 1, lambda x: (x + 1).to("meta"), "meta"),
        (lambda x: x.view(3), lambda x: x.clone(), "shares the memory of"),
        (lambda x: x.clone(), lambda x: x.view(3), "shares the memory of"),
        (lambda x: (x + 1, x), lambda x: (x + 1,), "result"),
        (lambda x: {"a": 1}, lambda x: {"b": 1}, "missing"),
        (lambda x: [x + 1], lambda x: (x + 1,), "instead of"),
        (lambda x: 1, lambda x: 1.0, "instead of"),
        (lambda x: None, lambda x: x + 1, "instead of"),
        (lambda x: x * float("nan"), lambda x: x + 1, "inf"),
    ],
)
def test_another_kind_of_result_is_a_mismatch_that_is_said(eager, compiled, said):
    report = different(eager, compiled)
    assert report.worst_difference == float("inf")
    assert any(said in each for each in report.differences), report.differences


def test_requires_grad_is_compared():
    w = torch.ones(3, requires_grad=True)
    report = different(lambda x: x * w, lambda x: x * w.detach())
    assert any("requires_grad" in said for said in report.differences)


def test_gradients_are_compared():
    def model(x):
        return (x * 2).relu()

    def backward_only(gm):
        for node in gm.graph.find_nodes(op="call_function", target=aten.threshold_backward.default):
            with gm.graph.inserting_after(node):
                new = gm.graph.call_function(aten.neg.default, (node,))
            node.replace_all_uses_with(new, delete_user_cb=lambda user, new=new: user is not new)

    report = graphex.explain(
        model, (X.clone().requires_grad_(),), options={"post_grad_custom_pre_pass": [backward_only]}
    )
    assert report.worst_difference > 0
    assert any(said.startswith("gradients") for said in report.differences)


def test_how_autograd_lays_out_a_gradient_is_no_difference():
    a, b = (torch.ones(2, 3, requires_grad=True) for _ in range(2))
    report = right(lambda a, b: ((a + b).sum(), a.t() * 2), (a, b))
    assert (report.worst_difference, report.differences) == (0.0, ())


@torch.no_grad()
def test_what_cannot_be_compared_is_listed_with_a_reason_and_is_not_zero(tmp_path):
    report = right(lambda x: (x + 1, torch.empty(3, device="meta")))
    (unknown,) = report.not_compared
    assert unknown.what == "result[1]"
    assert unknown.reason
    assert report.worst_difference != report.worst_difference  # NaN
    assert unknown.reason in str(report)
    assert unknown.reason in report.summary()
    data = json.loads(report.to_json(), parse_constant=pytest.fail)
    assert data["not_compared"] == [{"what": unknown.what, "reason": unknown.reason}]
    for name in ("report.html", "report.json"):
        assert read_data(report.save(tmp_path / name))["facts"]["not_compared"] == data["not_compared"]


# -- what the model writes -------------------------------------------------------------------------------------------


def writes_buffer(self, x):
    self.total.add_((x + 1).sum())
    return x * 2


def writes_parameter(self, x):
    self.weight.copy_(self.weight + x)
    return x * 2


def appends(self, x):
    self.held.append(x + 1)
    return x * 2


def stores(self, x):
    self.held["k"] = self.held["k"] + x
    return x * 2


def writes_into_list(self, x):
    self.held[0].copy_(self.held[0] + x)
    return x * 2


def updates(self, x):
    self.held.update(x)
    return x * 2


def rebinds(self, x):
    self.step = self.step + 1
    self.last = x + self.step
    return x * 2


def writes_slot(self, x):
    self.held.held = self.held.held + x
    return x * 2


STATE = {
    "buffer": (writes_buffer, lambda: {"total": torch.zeros(3)}),
    "parameter": (writes_parameter, lambda: {"weight": nn.Parameter(torch.ones(3))}),
    "list": (appends, lambda: {"held": []}),
    "deque": (appends, lambda: {"held": deque()}),
    "dict": (stores, lambda: {"held": {"k": torch.ones(3)}}),
    "tensor in a list": (writes_into_list, lambda: {"held": [torch.ones(3)]}),
    "tensor in a tuple": (writes_into_list, lambda: {"held": (torch.ones(3),)}),
    "object": (updates, lambda: {"held": Cache()}),
    "attributes": (rebinds, lambda: {"step": 0, "last": None}),
    "slots": (writes_slot, lambda: {"held": Slotted(torch.ones(3))}),
}


def frozen(value):
    """A value as text, whatever it is made of."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: frozen(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [frozen(each) for each in value]
    if isinstance(value, (Cache, nn.Module)):
        return frozen({key: each for key, each in vars(value).items() if key != "_is_torch_compile"})
    return frozen(value.held) if isinstance(value, Slotted) else value


@pytest.mark.parametrize(("forward", "attributes"), STATE.values(), ids=STATE)
@torch.no_grad()
def test_state_that_a_model_writes_is_compared_and_put_back(forward, attributes):
    model = module(forward, **attributes())
    before = frozen(model)
    bad, good = wrong(model), right(model)
    assert bad.worst_difference > 0
    assert any(said.startswith("model") for said in bad.differences), bad.differences
    assert (good.worst_difference, good.differences, good.not_compared) == (0.0, (), ())
    assert frozen(model) == before


@torch.no_grad()
def test_inputs_that_are_written_are_compared_wherever_they_are():
    def model(x, many, named, *, cache):
        x.add_(1)
        many[0].copy_(many[0] + 1)
        named["k"] = named["k"] + 1
        cache.update(x)

    def given():
        return (X.clone(), [X.clone()], {"k": X.clone()}), {"cache": Cache()}

    args, kwargs = given()
    report = graphex.explain(model, args, kwargs, options=WRONG)
    places = {said.split(":")[0] for said in report.differences}
    assert {"args[0]", "args[1][0]", "args[2]['k']", "kwargs['cache'].keys[0]"} <= places
    assert frozen((args, kwargs)) == frozen(given())
    assert graphex.explain(model, args, kwargs).differences == ()


@torch.no_grad()
def test_closures_globals_defaults_and_class_attributes_are_compared_and_put_back():
    total, steps = torch.zeros(3), 0

    class Model(nn.Module):
        shared = [torch.zeros(3)]

        def forward(self, x, held=[torch.zeros(3)]):  # noqa: B006, B008
            global COUNT
            nonlocal steps
            steps += 1
            COUNT += 1
            total.copy_(total + x)
            LOG.append(x + 1)
            held[0].copy_(held[0] + x)
            self.shared[0].copy_(self.shared[0] + x)
            return x * 2

    model = Model()
    report = wrong(model)
    text = "\n".join(report.differences)
    for place in ("total", "LOG[0]", "__defaults__[0][0]", "shared[0]"):
        assert place in text
    assert right(model).differences == ()
    assert (steps, COUNT, LOG) == (0, 0, [])
    assert not any(bool(each.any()) for each in (total, Model.shared[0], Model.forward.__defaults__[0][0]))


def test_gradients_sizes_and_leaves_are_put_back():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.register_buffer("cache", torch.zeros(2, 3))

        def forward(self, x):
            y = self.linear(x)
            self.cache[0] = y
            return y.sum()

    model = Model()
    model(X).backward()
    model.cache = torch.zeros(2, 3)
    grads = {name: (each.grad, each.grad.clone()) for name, each in model.named_parameters()}
    cache = model.cache
    right(model)
    assert model.cache is cache
    assert (cache.is_leaf, cache.requires_grad) == (True, False)
    assert not cache.any()
    for name, parameter in model.named_parameters():
        kept, value = grads[name]
        assert parameter.grad is kept
        assert torch.equal(kept, value)


def test_a_training_step_is_compared_and_undone():
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    before = frozen(model)
    report = right(step)
    assert report.worst_difference < 1e-5
    assert frozen(model) == before
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())


@torch.no_grad()
def test_numpy_arrays_and_lazy_modules_stay_usable():
    lazy = nn.LazyLinear(2)
    assert right(lazy).worst_difference == 0
    assert lazy(X).shape == (2,)
    counts = numpy.zeros(2)

    def model(x):
        counts[0] += 1
        return x * 2

    right(model)
    assert counts.tolist() == [0, 0]


@torch.no_grad()
def test_an_input_that_is_the_models_own_memory_stays_so():
    model = module(lambda self, x: self.total.add_(1) + x, total=torch.zeros(3))
    report = right(model, (model.total,))
    assert report.worst_difference == 0
    assert report.eager_outputs.tolist() == [2, 2, 2]
    assert model.total.tolist() == [0, 0, 0]


@torch.no_grad()
def test_a_model_that_raises_leaves_nothing_changed():
    def fail(self, x):
        self.total.add_(1)
        self.held.append(x)
        raise ValueError("too bad")

    model = module(fail, total=torch.zeros(3), held=[])
    with pytest.raises(ValueError, match="too bad"):
        right(model)
    assert model.total.tolist() == [0, 0, 0]
    assert model.held == []


@torch.no_grad()
def test_a_subclass_is_compared_through_its_inner_tensors():
    from torch.testing._internal.two_tensor import TwoTensor

    pair = TwoTensor(X.clone(), X.clone() * 2)
    report = wrong(lambda p: p + 1, (pair,))
    assert report.worst_difference == 2
    assert right(lambda p: p + 1, (pair,)).worst_difference == 0


@torch.no_grad()
@pytest.mark.parametrize("kind", ["DynamicCache", "StaticCache"])
def test_caches_of_transformers_are_compared_and_put_back(kind):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(num_hidden_layers=1, num_attention_heads=1, hidden_size=4, vocab_size=8)
    cache = transformers.DynamicCache() if kind == "DynamicCache" else transformers.StaticCache(config, max_cache_len=8)

    def model(x):
        x = x + 1
        keys, _ = cache.update(x, x, 0)
        return keys.sum()

    x = torch.ones(1, 1, 2, 4)
    before = cache.get_seq_length()
    report = wrong(model, (x,))
    assert any("cache" in said for said in report.differences), report.differences
    assert int(cache.get_seq_length()) == int(before)
    assert right(model, (x,)).differences == ()


# -- random numbers --------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_eager_and_compiled_calls_draw_the_same_numbers_and_the_users_go_on_undisturbed():
    torch.manual_seed(3)
    torch.rand(5)
    state = torch.get_rng_state()
    report = right(lambda x: torch.rand_like(x) + nn.functional.dropout(x))
    assert report.worst_difference == 0
    assert torch.equal(torch.get_rng_state(), state)


@torch.no_grad()
def test_a_generator_of_the_users_starts_from_one_state_and_is_put_back():
    generator = torch.Generator().manual_seed(7)
    state = generator.get_state()
    model = module(lambda self, x: x + torch.rand(3, generator=self.generator), generator=generator)
    assert right(model).worst_difference == 0
    assert torch.equal(generator.get_state(), state)


# -- custom ops --------------------------------------------------------------------------------------------------------


@torch.library.custom_op("graphex_test::remembers", mutates_args=())
def remembers(x: Tensor) -> Tensor:
    return x * 2


remembers.register_fake(torch.empty_like)


@torch.no_grad()
def test_what_a_custom_op_keeps_is_said_not_to_be_compared():
    report = right(lambda x: remembers(x) + 1)
    assert [each.what for each in report.not_compared] == ["graphex_test.remembers.default"]
    assert report.worst_difference == 0


# -- what is out of reach ----------------------------------------------------------------------------------------------


@torch.no_grad()
def test_globals_that_a_function_of_another_file_writes_are_said_not_to_be_compared(tmp_path, monkeypatch):
    (tmp_path / "elsewhere_counted.py").write_text("N = 0\ndef count(x):\n    global N\n    N += 1\n    return x * 2\n")
    (tmp_path / "model_of_elsewhere.py").write_text(
        "from elsewhere_counted import count\ndef model(x):\n    return count(x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    from model_of_elsewhere import model

    report = right(model)
    assert [(each.what, "globals N" in each.reason) for each in report.not_compared] == [
        ("model_of_elsewhere.count", True)
    ]
    assert report.worst_difference == 0


@torch.no_grad()
def test_objects_that_cannot_be_looked_into_are_said():
    model = module(lambda self, x: x * 2, numbers=iter([1, 2, 3]))
    (unknown,) = right(model).not_compared
    assert unknown.what == "model.numbers"
    report = right(lambda x: (x * 2, iter([1])))
    assert [each.what for each in report.not_compared] == ["result[1]"]
    assert report.worst_difference != report.worst_difference  # NaN
