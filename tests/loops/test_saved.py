"""`graphex.save` and `graphex.load`: a compiled model as one file, called without Dynamo."""

from __future__ import annotations

import os
import pickle
import re
import sys
import textwrap
from types import FunctionType

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph
from torch.nn.modules.module import register_module_forward_hook

import graphex
from graphex.cache.graphs import packed_graph, unpacked_graph
from graphex.torch_private.ahead import moved, unpickled
from graphex.torch_private.symbolic import FakeTensorMode
from tests.harness.processes import in_folder, python


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.full((8,), 2.0))

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        cache.add_(x)
        is_known = type(self).__name__ in {"Step", "Stride", "Stair"}  # a set, which each process orders in its own way
        return torch.nn.functional.gelu(self.linear(x)) * self.scale + (cache if is_known else 0)


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "step.graphex"
    with torch.no_grad():
        graphex.save(Step(), (torch.randn(4, 8), torch.zeros(4, 8)), path)
    return path


@torch.no_grad()
def test_a_loaded_model_uses_the_weights_that_the_module_has_now(saved):
    model = Step()
    loaded = graphex.load(saved, model)
    for _ in range(2):
        x, found, wanted = torch.randn(4, 8), torch.ones(4, 8), torch.ones(4, 8)
        torch.testing.assert_close((loaded(x, found), found), (model(x, wanted), wanted))
        model.linear.weight.copy_(torch.randn(8, 8))
    assert loaded.journal.rewrites
    assert not loaded.journal.passes


@torch.no_grad()
def test_writes_are_counted_as_the_program_makes_them(saved):
    cache = torch.zeros(4, 8)
    graphex.load(saved, Step())(torch.randn(4, 8), cache)
    assert cache._version == 1


@torch.no_grad()
def test_a_call_that_it_was_not_saved_for_is_an_error_that_names_the_input(saved):
    loaded = graphex.load(saved, Step())
    with pytest.raises(graphex.InputError, match=r"arguments: size 0 of argument 0 changed from 4 to 5\.$"):
        loaded(torch.randn(5, 8), torch.zeros(5, 8))


@torch.no_grad()
def test_weights_that_it_was_not_saved_for_are_named(saved):
    told = r"for other weights: dtype of self\.scale changed from Float to Double\.$"
    with pytest.raises(graphex.InputError, match=told):
        graphex.load(saved, Step().double())(torch.randn(4, 8), torch.zeros(4, 8))


@pytest.mark.parametrize(
    ("gradients", "autocast", "sentence"),
    [
        (True, False, r"whether gradients are computed \(torch.no_grad\) differs"),
        (False, True, "torch.autocast on 'cpu'"),
    ],
    ids=["gradients", "autocast"],
)
def test_a_call_in_another_mode_is_an_error_that_names_the_mode(saved, gradients, autocast, sentence):
    loaded = graphex.load(saved, Step())
    with torch.set_grad_enabled(gradients), torch.autocast("cpu", enabled=autocast):
        with pytest.raises(graphex.InputError, match=f"in another mode of torch: {sentence}"):
            loaded(torch.randn(4, 8), torch.zeros(4, 8))


def _doubled(module: nn.Module, *args: object) -> Tensor | None:
    return args[-1] * 2 if isinstance(args[-1], Tensor) else None


HOOKS = {
    "linear._forward_hooks": lambda model: model.linear.register_forward_hook(_doubled),
    "linear._forward_pre_hooks": lambda model: model.linear.register_forward_pre_hook(_doubled),
    "_forward_hooks": lambda model: model.register_forward_hook(_doubled),
    "torch.nn.modules.module._global_forward_hooks": lambda _: register_module_forward_hook(_doubled),
}


@torch.no_grad()
def test_a_hook_that_was_not_there_when_it_was_saved_is_refused_and_named(saved):
    x = torch.randn(4, 8), torch.zeros(4, 8)
    for place, register in HOOKS.items():
        model = Step()
        loaded = graphex.load(saved, model)
        with register(model):
            with pytest.raises(graphex.InputError, match=re.escape(f"`{place}` has a hook")):
                loaded(*x)
            with pytest.raises(graphex.InputError, match=re.escape(f"`{place}` has a hook")):
                graphex.load(saved, model)
        torch.testing.assert_close(loaded(x[0], torch.zeros(4, 8)), model(x[0], torch.zeros(4, 8)))


@torch.no_grad()
def test_a_hook_that_was_there_when_it_was_saved_is_called(tmp_path):
    x = torch.randn(4, 8), torch.zeros(4, 8)
    models = Step(), Step()
    for model in models:
        model.linear.register_forward_hook(_doubled)
    graphex.save(models[0], x, tmp_path / "hooked.graphex")
    loaded = graphex.load(tmp_path / "hooked.graphex", models[1])
    torch.testing.assert_close(loaded(x[0], torch.zeros(4, 8)), models[1](x[0], torch.zeros(4, 8)))


@torch.no_grad()
def test_an_error_of_the_model_stays_that_error(saved):
    model = Step()
    with pytest.raises(TypeError):
        graphex.load(saved, model)(torch.randn(4, 8))


@torch.no_grad()
def test_the_next_process_needs_no_dynamo_tracing(tmp_path, monkeypatch):
    """In another folder, with weights that are loaded later. The class of the model is importable there."""
    program = textwrap.dedent(
        """
        import sys, torch, graphex
        from tests.loops.test_saved import Step
        torch.set_grad_enabled(False)
        x, model = torch.ones(4, 8), Step()
        loaded = graphex.load(sys.argv[1], model)
        model.load_state_dict(Step().state_dict())
        torch.testing.assert_close(loaded(x, torch.zeros(4, 8)), model(x, torch.zeros(4, 8)))
        print([each.status for each in loaded.journal.regions], torch._dynamo.utils.counters["frames"])
        """
    )
    monkeypatch.setenv("GRAPHEX_REGIONS", "on")
    graphex.save(Step(), (torch.ones(4, 8), torch.zeros(4, 8)), tmp_path / "file", options={"regions": True})
    loaded = python("-c", program, tmp_path / "file", cwd=tmp_path, OMP_NUM_THREADS="1")
    assert loaded.stdout == "['loaded'] Counter()\n"


@torch.no_grad()
def test_each_size_is_saved_as_it_is_whatever_was_saved_before(tmp_path):
    model = Step()
    for rows in (2, 3, 4):
        given = torch.randn(rows, 8), torch.zeros(rows, 8)
        graphex.save(model, given, tmp_path / "file")
        assert graphex.load(tmp_path / "file", model)(*given).shape == (rows, 8)


# -- what torch's guards do not say ------------------------------------------------------------------------------------


class Activated(nn.Module):
    """A model with a function, and one that scores: torch guards both by their identity."""

    def __init__(self, act: object = torch.relu, scorer: object = None) -> None:
        super().__init__()
        self.act, self.scorer = act, scorer

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)


def doubled(x: Tensor) -> Tensor:
    return x * 2


def halved(x: Tensor) -> Tensor:
    return x / 2


@pytest.mark.parametrize(
    "act",
    [
        torch.relu,
        torch._C._nn.gelu,
        nn.functional.silu,
        torch.ops.aten.relu.default,
        doubled,
        lambda x: x + 1,
        FunctionType(doubled.__code__, {**globals(), "__name__": "__main__"}),  # as of a script that loads its own file
        nn.ReLU(),
    ],
)
@torch.no_grad()
def test_a_function_of_the_model_is_known_again(act, tmp_path):
    x = torch.randn(4)
    graphex.save(Activated(act), (x,), tmp_path / "file")
    torch.testing.assert_close(graphex.load(tmp_path / "file", Activated(act))(x), act(x))


@pytest.mark.parametrize(
    ("act", "other"),
    [
        (torch._C._nn.gelu, torch.relu),
        (torch.ops.aten.relu.default, torch.ops.aten.neg.default),
        (doubled, halved),
        (lambda x: x + 1, lambda x: x + 2),
    ],
    ids=["of torch", "an op", "of the user", "without a name"],
)
@torch.no_grad()
def test_another_function_in_its_place_is_refused_and_named(act, other, tmp_path):
    graphex.save(Activated(act), (torch.randn(4),), tmp_path / "file")
    with pytest.raises(graphex.InputError, match=r"was saved where `self\.act.*` was .*; here it is"):
        graphex.load(tmp_path / "file", Activated(other))


@torch.no_grad()
def test_a_function_that_is_declared_to_do_the_same_may_be_another_one(tmp_path):
    graphex.save(Activated(doubled), (torch.ones(2),), tmp_path / "file", declared=["self.act"])
    assert graphex.load(tmp_path / "file", Activated(lambda x: x + x))(torch.ones(2)).tolist() == [2.0, 2.0]


class Watched(Activated):
    def forward(self, x: Tensor) -> Tensor:
        return x if self.scorer is None else x + 1


@torch.no_grad()
def test_an_object_of_another_type_in_its_place_is_refused(tmp_path):
    graphex.save(Watched(scorer=re.compile("a")), (torch.ones(2),), tmp_path / "file")
    assert graphex.load(tmp_path / "file", Watched(scorer=re.compile("a")))(torch.ones(2)).tolist() == [2.0, 2.0]
    with pytest.raises(graphex.InputError, match=r"`self\.scorer` was an object of type re\.Pattern; here it is None"):
        graphex.load(tmp_path / "file", Watched())


FACTOR = 2.0


def scaled(x: Tensor) -> Tensor:
    return x * FACTOR


def test_another_value_of_a_global_is_refused_and_named(tmp_path, monkeypatch):
    graphex.save(scaled, (torch.ones(2),), tmp_path / "file")
    assert graphex.load(tmp_path / "file")(torch.ones(2)).tolist() == [2.0, 2.0]
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    with pytest.raises(graphex.InputError, match=r"FACTOR.* was 2\.0; here it is 3\.0"):
        graphex.load(tmp_path / "file")


class Rates:
    base, steps = 2.0, [1.0, 2.0]

    def scaled(self, x: Tensor) -> Tensor:
        return x * 3

    @classmethod
    def shifted(cls, x: Tensor) -> Tensor:
        return x + 1


class Rated(nn.Module):
    factor = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.rates = Rates()

    def halved(self, x: Tensor) -> Tensor:
        return x / 2

    def forward(self, x: Tensor) -> Tensor:
        x = self.rates.shifted(self.rates.scaled(self.halved(x))) * self.rates.base * self.factor
        for each in (*self.rates.steps, *NUMBERS):
            x = x + each
        for value in TABLE.values():
            x = x * value
        return -x if "negative" in SWITCHES or 7 in ALLOWED else x


NUMBERS, TABLE, SWITCHES, ALLOWED = [1.0, 2.0], {"a": 1.0}, {"positive": 1}, {1, 2}


@pytest.mark.parametrize(
    ("holder", "name", "other", "told"),
    [
        (Rates, "base", 3.0, "['base']` was 2.0; here it is 3.0"),
        (Rates, "steps", [1.0, 2.0, 3.0], "['steps'])` was 2; here it is 3"),
        (Rates, "scaled", lambda self, x: x * 4, "Rates.scaled` was another method"),
        (Rates, "shifted", classmethod(lambda cls, x: x + 2), "Rates.shifted` was another method"),
        (Rated, "factor", 3.0, "['factor']` was 2.0; here it is 3.0"),
        (Rated, "halved", lambda self, x: x / 4, "Rated.halved` was another method"),
        (sys.modules[__name__], "NUMBERS", [1.0, 2.0, 3.0], "NUMBERS)` was 2; here it is 3"),
        (sys.modules[__name__], "TABLE", {"a": 1.0, "b": 2.0}, "TABLE)` was 1; here it is 2"),
        (sys.modules[__name__], "SWITCHES", {"negative": 1}, "SWITCHES` was False; here it is True"),
        (sys.modules[__name__], "ALLOWED", {1, 7}, "ALLOWED` was False; here it is True"),
    ],
    ids=lambda each: each if isinstance(each, str) and each.isidentifier() else "",
)
@torch.no_grad()
def test_what_classes_and_containers_hold_is_compared(holder, name, other, told, tmp_path, monkeypatch):
    x, path = torch.ones(2), tmp_path / "rated.graphex"
    graphex.save(Rated(), (x,), path)
    torch.testing.assert_close(graphex.load(path, Rated())(x), Rated()(x))
    monkeypatch.setattr(holder, name, other)
    with pytest.raises(graphex.InputError, match=re.escape(told)):
        graphex.load(path, Rated())


def reads_by_get(x, name):
    return x * 5 if os.environ.get("SAVED_SWITCH") == "on" else x + 1


def reads_by_getenv(x, name):
    return x * 5 if os.getenv("SAVED_SWITCH") == "on" else x + 1


def reads_whether_it_is_set(x, name):
    return x * 5 if "SAVED_SWITCH" in os.environ else x + 1


def reads_a_name_it_is_given(x, name):
    return x * 5 if os.getenv(name) == "on" else x + 1


class Switched(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.read, self.switch = read, "SAVED_SWITCH"

    def forward(self, x):
        return self.read(x, self.switch)


def set_switch(monkeypatch, value):
    if value is None:
        monkeypatch.delenv("SAVED_SWITCH", raising=False)
    else:
        monkeypatch.setenv("SAVED_SWITCH", value)


@pytest.mark.parametrize("read", [reads_by_get, reads_by_getenv, reads_whether_it_is_set, reads_a_name_it_is_given])
@torch.no_grad()
def test_a_variable_of_the_environment_that_traced_code_reads_is_compared(read, tmp_path, monkeypatch):
    path = tmp_path / "model.graphex"
    for before, now, told in ((None, "on", "not set; here it is 'on'"), ("off", None, "'off'; here it is not set")):
        set_switch(monkeypatch, before)
        torch._dynamo.reset()
        graphex.save(Switched(read), (torch.ones(2),), path)
        monkeypatch.setenv("SAVED_OTHER", f"of no matter {now}")
        graphex.load(path, Switched(read))
        set_switch(monkeypatch, now)
        with pytest.raises(graphex.InputError, match=f"the environment variable SAVED_SWITCH was {told}"):
            graphex.load(path, Switched(read))


class Nested(nn.Module):
    def __init__(self, inner: nn.Module, *, scale: float = 2.0, shape: tuple[int, ...] = (4,)) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), inner])
        self.scale, self.shape, self.note = scale, shape, "as it was"

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.reshape(-1, *self.shape) * self.scale


def sequential(*inner: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), *inner)


GELU = nn.GELU().eval()


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (sequential(GELU), sequential(nn.ReLU()), "module '1' was a torch.nn.modules.activation.GELU; here it is a "),
        (sequential(GELU), sequential(nn.GELU("tanh")), "`approximate` of module '1' was 'none'; here it is 'tanh'"),
        (sequential(nn.Softmax(0)), sequential(nn.Softmax(1)), "`dim` of module '1' was 0; here it is 1"),
        (sequential(nn.LeakyReLU(0.1)), sequential(nn.LeakyReLU(0.2)), "`negative_slope` of module '1' was 0.1"),
        (sequential(GELU), sequential(GELU, GELU), "`len(self._modules)` was 2; here it is 3"),
        (Nested(GELU), Nested(nn.SiLU()), "module 'layers.1' was a torch.nn.modules.activation.GELU; here it is a "),
        (Nested(GELU), Nested(GELU, scale=3.0), "`self.scale` was 2.0; here it is 3.0"),
        (Nested(GELU), Nested(GELU, shape=(2, 2)), "`self.shape` was (4); here it is (2, 2)"),
    ],
)
@torch.no_grad()
def test_another_module_or_attribute_is_refused_and_named(before, after, told, tmp_path):
    x, path = torch.randn(2, 4), tmp_path / "model.graphex"
    graphex.save(before, (x,), path)
    torch.testing.assert_close(graphex.load(path, before).without_guards()(x), before(x))
    with pytest.raises(graphex.InputError, match=re.escape(f"was saved where {told}")):
        graphex.load(path, after)


@torch.no_grad()
def test_an_attribute_that_was_not_read_may_be_another(tmp_path):
    x, model, other = torch.randn(2, 4), Nested(GELU), Nested(GELU)
    graphex.save(model, (x,), tmp_path / "model.graphex")
    other.note = "something else"
    torch.testing.assert_close(graphex.load(tmp_path / "model.graphex", other)(x), other(x))


@torch.no_grad()
def test_a_call_names_the_attribute_that_was_changed_after_loading(tmp_path):
    x, path = torch.randn(2, 4), tmp_path / "model.graphex"
    graphex.save(sequential(nn.Dropout(0.5)).eval(), (x,), path)
    model = sequential(nn.Dropout(0.5))
    loaded = graphex.load(path, model)  # before `eval`
    with pytest.raises(graphex.InputError, match=r"^this was saved where `training` of module '1' was False; here it"):
        loaded(x)
    model.eval()
    torch.testing.assert_close(loaded(x), model(x))


@torch.no_grad()
def test_a_module_that_is_declared_to_do_the_same_may_be_another_one(tmp_path):
    x, other = torch.randn(2, 4), Nested(nn.GELU("tanh"))
    graphex.save(Nested(nn.GELU()), (x,), tmp_path / "model.graphex", declared=["self.layers.1"])
    assert graphex.load(tmp_path / "model.graphex", other).without_guards()(x).shape == (2, 4)


@torch.no_grad()
def test_a_module_of_a_subclass_is_refused_and_named(tmp_path):
    class Other(Rated):
        pass

    graphex.save(Rated(), (torch.ones(2),), tmp_path / "rated.graphex")
    with pytest.raises(graphex.InputError, match=r"of type Rated; this one is .*Other"):
        graphex.load(tmp_path / "rated.graphex", Other())


NET = """
import functools, torch
from collections import OrderedDict

class Output(OrderedDict):
    pass

def decorated(forward):
    @functools.wraps(forward)
    def wrapper(self, *args):
        return forward(self, *args)
    return wrapper

class Net(torch.nn.Module):
    @decorated
    def forward(self, x):
        return Output(y=torch._C._nn.gelu(x) + 1)
"""


def test_the_next_process_refuses_functions_that_were_changed_since(tmp_path):
    """Of a model as transformers has them: decorated, with outputs that Dynamo makes again. Lines may move."""
    start = "import pathlib, torch, graphex, net\nx, file = torch.zeros(2), pathlib.Path('net.py')\n"
    program = textwrap.dedent(
        """
        print(graphex.load("file", net.Net())(x)["y"])
        file.write_text(file.read_text().replace("+ 1", "+ 2"))
        try:
            graphex.load("file", net.Net())
        except graphex.InputError as error:
            print(error)
        """
    )
    (tmp_path / "net.py").write_text(NET)
    in_folder(f"{start}graphex.save(net.Net(), (x,), 'file')", tmp_path)
    (tmp_path / "net.py").write_text(f"# a remark\n{NET}")
    result, error = in_folder(start + program, tmp_path).splitlines()
    assert result == "tensor([1., 1.])"
    assert "was saved before `@decorated` in" in error


# -- another device index ----------------------------------------------------------------------------------------------


def test_everything_in_a_saved_graph_is_for_the_device_it_is_loaded_for(monkeypatch):
    """Values, arguments of nodes, constants. No device is needed: the values are fake, where torch looks for none."""
    monkeypatch.setattr("torch._subclasses.fake_tensor.init_gpu_context", lambda device: None)
    with FakeTensorMode() as mode:
        x, host = torch.empty(4, device="cuda:0"), torch.empty(2)
    graph = Graph()
    given = graph.placeholder("x")
    made = graph.call_function(torch.ops.aten.zeros.default, ([4],), {"device": torch.device("cuda", 0)})
    kept = graph.call_function(torch.ops.aten.ones.default, ([2],), {"device": torch.device("cpu")})
    graph.output((given, made, kept))
    given.meta["val"], made.meta["val"], kept.meta["val"] = x, x, host
    data = pickle.dumps((packed_graph(graph), torch.ones(3)))
    with moved(torch.device("cuda", 0), torch.device("cuda", 1)):
        stored, constant = unpickled(data)
    there = unpacked_graph(stored, mode)
    devices = [str(node.meta["val"].device) for node in there.nodes if node.op != "output"]
    assert devices == ["cuda:1", "cuda:1", "cpu"]
    assert [str(node.kwargs["device"]) for node in there.nodes if node.kwargs] == ["cuda:1", "cpu"]
    assert constant.tolist() == [1.0, 1.0, 1.0]
    assert str(unpickled(data)[0].nodes[0].meta["val"].device) == "cuda:0"


def test_another_kind_of_device_is_refused(saved):
    with pytest.raises(graphex.InputError, match="was saved for 'cpu', not for 'cuda'"):
        graphex.load(saved, Step(), device="cuda:1")


# -- what cannot be saved or loaded ------------------------------------------------------------------------------------


def test_training_is_not_saved(tmp_path):
    with pytest.raises(graphex.GraphexError, match=r"gradients are enabled; call save under torch\.no_grad\(\)"):
        graphex.save(Step(), (torch.randn(4, 8), torch.zeros(4, 8)), tmp_path / "file")
    assert not (tmp_path / "file").exists()


def test_a_path_that_cannot_be_written_is_refused_before_compiling(tmp_path):
    for path, told in ((tmp_path / "none" / "file", "is no directory. Make it first"), (tmp_path, "is a directory")):
        with pytest.raises(graphex.InputError, match=told):
            graphex.save(3, (), path)


def test_what_torch_compile_returned_is_refused_before_compiling(tmp_path):
    for model in (Step(), lambda x: x + 1):
        with pytest.raises(graphex.InputError, match=r"pass the model, not what torch\.compile returned"):
            graphex.save(torch.compile(model, backend="graphex"), (), tmp_path / "file")


class Talking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        print("forward")
        return x + 1


def test_a_line_that_dynamo_cannot_trace_is_named(tmp_path):
    told = r"builtin operator .*\(test_saved\.py:\d+: print\(\"forward\"\)\)\. .* `print`"
    with pytest.raises(graphex.InputError, match=told):
        graphex.save(Talking(), (torch.ones(2),), tmp_path / "file")


def test_a_result_that_is_a_view_of_an_input_is_not_saved(tmp_path):
    with pytest.raises(graphex.GraphexError, match="view of an input"):
        graphex.save(lambda x: (x.t(), x + 1), (torch.ones(2, 3),), tmp_path / "file")


def test_a_file_that_others_can_write_to_is_not_loaded_unless_it_is_trusted(saved):
    saved.chmod(0o666)
    with pytest.raises(graphex.InputError, match="others may write to"):
        graphex.load(saved, Step())
    graphex.load(saved, Step(), trusted=True)


@pytest.mark.parametrize("content", [b"", b"text", b"graphex saved function 1\nno hash\n{}"])
def test_another_file_is_refused_in_a_sentence(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(graphex.InputError, match="cannot be loaded: "):
        graphex.load(tmp_path / "file", Step())


@pytest.mark.parametrize("trusted", [True, False])
def test_a_file_that_is_not_there_is_said_to_be_missing(trusted):
    with pytest.raises(graphex.InputError, match="there is no file"):
        graphex.load("/tmp/none/model.graphex", Step(), trusted=trusted)


def test_a_file_that_was_cut_off_is_refused(saved):
    saved.write_bytes(saved.read_bytes()[:-1])
    with pytest.raises(graphex.InputError, match="its content is not what was written"):
        graphex.load(saved, Step())


def test_a_file_of_another_version_is_refused_and_named(saved, monkeypatch):
    from graphex.loops import saved as module

    here = module.machine_of(())
    monkeypatch.setattr(module, "machine_of", lambda devices: {**here, "torch": "9.9"})
    with pytest.raises(graphex.InputError, match=r"was saved where torch was .*; here it is 9\.9"):
        graphex.load(saved, Step())


def test_the_module_must_be_given_where_there_is_one(saved, tmp_path):
    with pytest.raises(graphex.InputError, match="pass the module"):
        graphex.load(saved)
    graphex.save(torch.sin, (torch.ones(2),), tmp_path / "function")
    torch.testing.assert_close(graphex.load(tmp_path / "function")(torch.ones(2)), torch.ones(2).sin())


@torch.no_grad()
def test_a_module_of_torchs_own_is_saved_too(tmp_path):
    def made() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.GELU())

    x, other = torch.randn(2, 4), made()
    graphex.save(made(), (x,), tmp_path / "file")
    torch.testing.assert_close(graphex.load(tmp_path / "file", other)(x), other(x))
