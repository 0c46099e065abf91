"""Warnings and errors speak of the user's program: its lines, its arguments, its words."""

from __future__ import annotations

import linecache
import traceback
import warnings
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import graphex


def failing(gm):
    raise ValueError("no")


def test_a_warning_points_at_the_line_that_called_the_compiled_model():
    compiled = torch.compile(
        lambda x: x.sin(), backend="graphex", options={"post_grad_custom_pre_pass": failing, "strict": False}
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled(torch.ones(3))
    (warning,) = [each for each in caught if issubclass(each.category, graphex.GraphexWarning)]
    assert warning.filename == __file__
    assert (
        warning.lineno == test_a_warning_points_at_the_line_that_called_the_compiled_model.__code__.co_firstlineno + 6
    )


def test_a_filter_on_the_users_module_catches_a_warning():
    compiled = torch.compile(
        lambda x: x.cos(), backend="graphex", options={"post_grad_custom_pre_pass": failing, "strict": False}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", graphex.GraphexWarning)
        warnings.filterwarnings("ignore", category=graphex.GraphexWarning, module=__name__)
        compiled(torch.ones(3))


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((torch.ones(3),), {}, "It was called with 1 argument: a value."),
        ((torch.ones(3), torch.ones(3)), {}, "It was called with 2 arguments: a value, a value."),
        ((torch.ones(3), [torch.ones(3)] * 3), {}, "It was called with 2 arguments: a value, a list of 3."),
        ((torch.ones(3),), {"y": [torch.ones(3)]}, "called with 2 arguments: a value, y (by name) (a list of 1)."),
        ((), {}, "It was called with no arguments."),
    ],
)
def test_a_wrong_call_says_what_was_expected_without_torchs_tree_specs(args, kwargs, said):
    class Sum(torch.nn.Module):
        def forward(self, x, parts):
            return x + parts[0] * parts[1]

    example = (torch.ones(3), [torch.ones(3), torch.ones(3)])
    module = torch.export.export(Sum(), example).module(check_guards=False)
    run = graphex.compile_fx(module, list(example))
    with pytest.raises(graphex.InputError) as error:
        run(*args, **kwargs)
    assert "TreeSpec" not in str(error.value)
    assert "the graph was traced for 2 arguments: x, parts (a list of 2)." in str(error.value)
    assert said in str(error.value)


@pytest.mark.parametrize(("trace", "name"), [("export", "x"), ("make_fx", "arg0_1")])
def test_a_call_with_too_many_arguments_says_which_there_are(trace, name):
    class Sine(torch.nn.Module):
        def forward(self, x):
            return x.sin()

    x = torch.ones(3)
    module = torch.export.export(Sine(), (x,)).module() if trace == "export" else make_fx(Sine())(x)
    run = graphex.compile_fx(module, [x])
    with pytest.raises(graphex.InputError, match=rf"the graph takes 1 argument \({name}\), got 2\."):
        run(x, x)


def test_a_call_by_a_name_that_is_none_says_which_there_are():
    class Scaled(torch.nn.Module):
        def forward(self, x, *, scale):
            return x * scale

    x = torch.ones(3)
    module = torch.export.export(Scaled(), (x,), {"scale": x}).module(check_guards=False)
    run = graphex.compile_fx(module, [x, x])
    with pytest.raises(graphex.InputError) as error:
        run(x=x, y=x)
    assert "the graph was traced for 2 arguments: x, scale (by name)" in str(error.value)
    assert "It was called with 2 arguments: x (by name), y (by name)." in str(error.value)


def test_torchs_mode_without_cuda_graphs_is_a_mode():
    compiled = torch.compile(lambda x: x.sin(), backend="graphex", mode="max-autotune-no-cudagraphs")
    assert torch.equal(compiled(torch.ones(3)), torch.ones(3).sin())
    assert not graphex.journal(compiled).captures


class Halved(torch.nn.Module):
    def forward(self, x):
        return x.sin()


def wrong(gm, example_inputs, config):
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
        node.target = torch.ops.aten.cos.default
    gm.recompile()


def test_a_warning_of_verification_stands_at_the_call_and_not_at_the_models_forward():
    compiled = torch.compile(
        Halved(), backend=graphex.get_backend({"verify": True, "post_grad_custom_pre_pass": wrong})
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled(torch.ones(3))  # here
    (warning,) = [each for each in caught if issubclass(each.category, graphex.GraphexWarning)]
    assert warning.filename == __file__
    assert linecache.getline(__file__, warning.lineno).strip() == "compiled(torch.ones(3))  # here"


def test_an_error_about_an_option_says_nothing_of_bugs_in_torch():
    compiled = torch.compile(Halved(), backend="graphex", options={"verfy": True})
    with pytest.raises(graphex.OptionError) as raised:
        compiled(torch.ones(3))
    assert str(raised.value) == "unknown option 'verfy' (did you mean 'verify'?). See docs/options.md."
    frames = [frame.filename for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert not [name for name in frames if Path(graphex.__file__).parent in Path(name).parents]
    inside = ("convert_frame.py", "output_graph.py", "symbolic_convert.py")
    assert not [name for name in frames if name.endswith(inside)]
