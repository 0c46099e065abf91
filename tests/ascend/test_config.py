"""Options of TorchAir and npugraph_ex: checked, translated, and on record where they mean nothing here."""

from __future__ import annotations

import warnings

import npugraph_ex
import pytest
import torch
import torchair

import graphex
from tests.harness.ascend import Compiled


def ignored(compiled: object) -> list[str]:
    return [record.what for record in graphex.journal(compiled).fallbacks if "ignored" in record.what]


def seen_by_a_pass(config, **options):
    """The configuration that a custom pass of this backend receives."""
    seen = []
    config.post_grad_custom_pre_pass = lambda gm, example_inputs, config: seen.append(config)
    compiled = torch.compile(lambda x: x + 1, backend=torchair.get_npu_backend(compiler_config=config))
    compiled(torch.ones(2))
    return seen[0]


def test_groups_hold_what_is_set():
    config = torchair.CompilerConfig()
    assert config.mode == "max-autotune"
    assert config.debug.graph_dump.type.value is None
    config.debug.graph_dump.type = "py"
    assert config.debug.graph_dump.type == "py"
    assert {"graph_dump", "aclgraph", "run_eagerly"} <= set(dir(config.debug))
    assert config != torchair.CompilerConfig()
    assert torchair.CompilerConfig() == torchair.CompilerConfig()


@pytest.mark.parametrize(("path", "value"), [
    ("mode", "fast"),
    ("debug.graph_dump.type", "svg"),
    ("experimental_config.pattern_fusion_pass", 1),
    ("experimental_config.topology_sorting_strategy", "XFS"),
    ("ge_config.oo_level", "O2"),
    ("dump_config.dump_step", "one"),
])  # fmt: skip
def test_a_bad_value_names_the_option_and_what_it_may_be(path, value):
    group, *parts = torchair.CompilerConfig(), *path.split(".")
    for part in parts[:-1]:
        group = getattr(group, part)
    with pytest.raises(graphex.OptionError, match=rf"'{path}'.*allowed"):
        setattr(group, parts[-1], value)


def test_an_unknown_option_is_an_error_that_offers_the_nearest():
    config = torchair.CompilerConfig()
    with pytest.raises(graphex.OptionError, match=r"did you mean 'experimental_config\.pattern_fusion_pass'"):
        config.experimental_config.pattern_fusion = False
    with pytest.raises(graphex.OptionError, match="no option"):
        config.no_such_group.name = 1
    assert not hasattr(config, "no_such_group")
    with pytest.raises(graphex.OptionError, match="did you mean 'clone_input'"):
        torch.compile(lambda x: x + 1, backend="npugraph_ex", options={"clone_inputs": True})(torch.ones(2))


def test_options_reach_graphex_by_either_way():
    config = torchair.CompilerConfig()
    config.debug.aclgraph.disable_reinplace_inplaceable_ops_pass = True
    config.debug.run_eagerly = True
    config.experimental_config.frozen_parameter = True
    backend = torchair.get_npu_backend(compiler_config=config)
    given = {"inplace_pass": False, "force_eager": True, "frozen_parameter": True}
    assert backend.config.given() == {**given, "capture_error_mode": "global"}


def test_a_pass_receives_the_configuration_it_was_written_for():
    config = torchair.CompilerConfig()
    config.experimental_config.pattern_fusion_pass = False
    config.ge_config.optimization_switch = "a:off"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seen = seen_by_a_pass(config)
    assert seen.experimental_config.pattern_fusion_pass.value is False
    assert seen.ge_config.optimization_switch == "a:off"
    with pytest.raises(graphex.OptionError, match="compilation has started"):
        seen.mode = "reduce-overhead"


def test_a_pass_of_another_form_is_not_touched():
    class Double(torch.fx.Transformer):
        def call_function(self, target, args, kwargs):
            return super().call_function(torch.ops.aten.mul.Tensor, args, kwargs)

    double = graphex.graph_pass(preserves_results=False)(Double)
    compiled = torch.compile(lambda x: x + 5, backend="npugraph_ex", options={"post_grad_custom_pre_pass": double})
    assert compiled(torch.full((2,), 3.0)).tolist() == [15.0, 15.0]


def test_what_means_nothing_here_is_accepted_recorded_and_shown_once():
    config = torchair.CompilerConfig()
    config.ge_config.optimization_switch = "AutomaticUbFusion:off"
    config.ge_config.oo_level = "O3"  # the default: nothing is lost
    with pytest.warns(graphex.GraphexWarning, match="optimization_switch"):
        backend = torchair.get_npu_backend(compiler_config=config)
    compiled = torch.compile(lambda x: x + 1, backend=backend)
    compiled(torch.ones(2))
    assert ignored(compiled) == ["the option 'ge_config.optimization_switch='AutomaticUbFusion:off'' is ignored"]


@pytest.mark.parametrize(("option", "value"), [
    ("static_kernel_compile", True),
    ("super_kernel_optimize", True),
    ("super_kernel_optimize_options", {"a": "b"}),
])  # fmt: skip
def test_switches_of_cann_are_ignored_by_the_named_backend_too(option, value):
    compiled = torch.compile(lambda x: x + 1, backend="npugraph_ex", options={option: value})
    with pytest.warns(graphex.GraphexWarning, match=option):
        assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
    assert len(ignored(compiled)) == 1


def test_the_journal_of_the_named_backend_is_empty_before_the_first_call():
    compiled = torch.compile(lambda x: x + 1, backend="npugraph_ex")
    assert graphex.journal(compiled).records == []
    compiled(torch.ones(2))
    assert len(graphex.journal(compiled).graphs) == 1


def test_a_flat_configuration_takes_what_the_options_take():
    config = npugraph_ex.CompilerConfig()
    config.force_eager = True
    backend = npugraph_ex.get_npu_backend(compiler_config=config)
    assert backend.config.force_eager is True
    with pytest.raises(graphex.OptionError, match="force_eager"):
        config.force_eager = 0


def test_something_else_than_a_configuration_is_refused():
    with pytest.raises(TypeError, match="CompilerConfig"):
        torchair.get_npu_backend(compiler_config={"mode": "max-autotune"})


def test_both_modes_of_torchair_replay():
    for mode in ("max-autotune", "reduce-overhead"):
        torch._dynamo.reset()
        config = torchair.CompilerConfig()
        config.mode = mode
        compiled = torch.compile(lambda x: (x @ x).relu(), backend=torchair.get_npu_backend(compiler_config=config))
        x = torch.randn(3, 3).npu()
        with torch.no_grad():
            for _ in range(3):
                torch.testing.assert_close(compiled(x), (x @ x).relu())
        assert len(graphex.journal(compiled).captures) == 1


def test_decompositions_of_the_user_are_used():
    table = {torch.ops.aten.silu.default: lambda x: x * torch.sigmoid(x)}
    backend = torchair.get_npu_backend(custom_decompositions=table)
    seen = []
    backend.config.post_grad_custom_post_pass = lambda gm, inputs, config: seen.extend(n.target for n in gm.graph.nodes)
    torch.compile(torch.nn.functional.silu, backend=backend)(torch.randn(3))
    assert torch.ops.aten.sigmoid.default in seen
    assert torch.ops.aten.silu.default not in seen


def test_a_pass_keeps_its_name_and_what_it_declares():
    class Doubles:
        name = "doubles"
        preserves_results = False

        def __call__(self, gm, example_inputs, config):
            for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
                node.target = torch.ops.aten.mul.Tensor

    options = {"post_grad_custom_pre_pass": Doubles(), "verify": True}
    compiled = torch.compile(lambda x: x + 5, backend="npugraph_ex", options=options)
    assert compiled(torch.full((2,), 3.0)).tolist() == [15.0, 15.0]
    assert "doubles" in [record.name for record in graphex.journal(compiled).passes]
    assert graphex.journal(compiled).verifications[0].status == "equal"


# -- as the originals have them ----------------------------------------------------------------------------------------


def test_an_option_has_a_value_and_compares_as_that():
    config = torchair.CompilerConfig()
    config.debug.graph_dump.type = "py"
    limit = config.debug.aclgraph.static_capture_size_limit
    assert (config.mode.value, config.debug.graph_dump.type.value, limit.value) == ("max-autotune", "py", 64)
    assert config.debug.run_eagerly.value is False
    assert not config.debug.run_eagerly
    assert repr(config.debug.run_eagerly) == "False"
    assert config.debug.data_dump.type == None  # noqa: E711
    config.debug.aclgraph.enable_output_clone = config.debug.run_eagerly
    assert config.as_dict()["debug.aclgraph.enable_output_clone"] is False
    assert config.debug.as_dict()["graph_dump.type"] == "py"


def test_the_default_of_capture_error_mode_is_the_originals():
    import npugraph_ex

    assert npugraph_ex.CompilerConfig().capture_error_mode == "global"
    assert torchair.get_npu_backend().config.capture_error_mode == "global"
    seen = []
    options = {"post_grad_custom_pre_pass": lambda gm, inputs, config: seen.append(config)}
    torch.compile(lambda x: x + 1, backend="npugraph_ex", options=options)(torch.ones(2).npu())
    assert seen[0].capture_error_mode.value == "global"


def test_the_first_call_is_captured_if_asked_for():
    torch._dynamo.reset()
    compiled = Compiled(lambda x: x.sin() + 1, capture_first_call=True)
    compiled(torch.randn(4).npu())
    assert compiled.captures() == ["captured"]
    torch._dynamo.reset()
    compiled = Compiled(lambda x: x.sin() + 2)
    compiled(torch.randn(4).npu())
    assert compiled.captures() == []
