"""Every option through torch.compile: what it changes, and how a bad one reaches the user."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

import graphex
from graphex.config import option_names, options_of
from tests.harness.compiling import Observer
from tests.harness.processes import python

aten = torch.ops.aten
X = torch.randn(3, 4)


def model(x):
    return (x.sin().clone() * 2)[:, 0:4] + x.sin()


def compiled(fn=model, **options):
    return torch.compile(fn, backend="graphex", options=options)


def final_targets(**options):
    seen = Observer()
    fast = compiled(**options, post_grad_custom_post_pass=seen)
    torch.testing.assert_close(fast(X), model(X), rtol=0, atol=0)
    return seen.targets


def passes(fast):
    return [record.name for record in graphex.journal(fast).passes]


# -- the effect of each ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune", "eager"])
def test_every_mode_runs_all_passes(mode):
    fast = compiled(mode=mode)
    assert torch.equal(fast(X), model(X))
    assert "merge_common_subexpressions" in passes(fast)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_mode_can_be_given_to_torch_compile(mode):
    seen = []

    def keep(gm, example_inputs, config):
        seen.append(config.mode)

    backend = graphex.get_backend({"post_grad_custom_pre_pass": keep})
    torch.compile(model, backend=backend, mode=mode)(X)
    assert seen == [mode]


def test_mode_alone_is_enough():
    fast = torch.compile(model, backend="graphex", mode="eager")
    assert torch.equal(fast(X), model(X))
    assert "remove_noops" in passes(fast)


@pytest.mark.parametrize("options", [{"mode": "eager"}, {"force_eager": True}, {"dump_tensor_data": True}])
def test_nothing_is_captured_where_asked_not_to(options, device, tmp_path):
    fast = compiled(**options, data_dump_dir=str(tmp_path))
    x = X.to(device)
    for _ in range(3):
        torch.testing.assert_close(fast(x), model(x))
    assert graphex.journal(fast).captures == []


@pytest.mark.cuda
def test_reduce_overhead_captures():
    fast = compiled()
    for _ in range(3):
        fast(X.cuda())
    assert len(graphex.journal(fast).captures) == 1


def test_remove_noop_ops():
    assert aten.clone.default not in final_targets()
    assert aten.clone.default in final_targets(remove_noop_ops=False)


def test_custom_passes_run_before_and_after_ours():
    before, after = Observer(), Observer()
    compiled(post_grad_custom_pre_pass=before, post_grad_custom_post_pass=[after])(X)
    assert aten.clone.default in before.targets
    assert aten.clone.default not in after.targets


def test_strict_decides_whether_a_broken_pass_stops_compilation():
    def broken(gm):
        raise KeyError("x")

    with pytest.raises(graphex.PassError):
        compiled(post_grad_custom_pre_pass=broken, strict=True)(X)
    with pytest.warns(graphex.GraphexWarning):
        compiled(post_grad_custom_pre_pass=broken, strict=False)(X)


def test_verify_leaves_a_verdict():
    fast = compiled(verify=True)
    fast(X)
    fast(X)
    assert [record.status for record in graphex.journal(fast).verifications] == ["equal"]
    plain = compiled()
    plain(X)
    assert graphex.journal(plain).verifications == []


def test_disable_passes_by_the_name_the_journal_gives():
    fast = compiled(disable_passes=["remove_noops", "merge_common_subexpressions"])
    fast(X)
    assert not {"remove_noops", "merge_common_subexpressions"} & set(passes(fast))


def test_disable_a_users_pass_by_its_name():
    seen = Observer()
    fast = compiled(post_grad_custom_pre_pass=seen, disable_passes=["observer"])
    fast(X)
    assert "observer" not in passes(fast)


def test_disable_rules_by_the_name_the_journal_gives():
    targets = final_targets(disable_rules=["equal_calls"])
    assert targets.count(aten.sin.default) == 2
    assert aten.clone.default not in targets


def test_the_old_name_of_a_rule_is_understood_and_answered_with_the_new_one():
    with pytest.warns(DeprecationWarning, match="'call_inplace_variant'"):
        config = graphex.CompilerConfig(disable_rules=["call_inplace_twin"])
    assert config.disable_rules == ("call_inplace_variant",)


@pytest.mark.parametrize("name", ["aten.nope", "aten", "softmax", "aten.add.Tensr"])
def test_an_op_to_keep_out_of_regions_has_to_exist(name):
    with pytest.raises(graphex.OptionError, match=f"'{name}', which is no op"):
        compiled(regions_keep_out=[name])(X)


@pytest.mark.parametrize(
    ("option", "wrong", "right"),
    [("disable_passes", "remove_noop", "remove_noops"), ("disable_rules", "plain_copies", "plain_copy")],
)
def test_a_name_to_disable_that_does_not_exist_is_answered_with_the_closest(option, wrong, right):
    with pytest.raises(graphex.OptionError, match=f"'{wrong}'.*did you mean '{right}'"):
        compiled(**{option: [wrong]})(X)


# -- the data dump -----------------------------------------------------------------------------------------------


def dumped(tmp_path: Path, **options) -> list[Path]:
    fast = compiled(dump_tensor_data=True, data_dump_dir=str(tmp_path), **options)
    assert torch.equal(fast(X), model(X))
    assert torch.equal(fast(X + 1), model(X + 1))
    return sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())


def names(files: list[Path]) -> set[str]:
    return {path.name.split("_device_")[0] for path in files}


def test_dump_of_the_optimised_graph_has_one_file_for_each_node_and_call(tmp_path):
    files = dumped(tmp_path)
    assert all(path.parent == Path("worldsize1_global_rank0") for path in files)
    assert {path.name for path in files} >= {"sin_device_cpu_0.pt", "sin_device_cpu_1.pt"}
    assert "clone" not in names(files)
    assert torch.equal(torch.load(tmp_path / files[0].parent / "sin_device_cpu_0.pt"), X.sin())
    assert torch.equal(torch.load(tmp_path / files[0].parent / "sin_device_cpu_1.pt"), (X + 1).sin())


def test_dump_of_the_original_graph_has_what_the_passes_removed(tmp_path):
    assert {"clone", "sin", "sin_1"} <= names(dumped(tmp_path, data_dump_stage="original"))


@pytest.mark.parametrize(("stage", "has_clone"), [("original", True), ("optimized", False)])
def test_dump_with_force_eager_has_inputs_and_outputs_as_numpy(tmp_path, stage, has_clone):
    numpy = pytest.importorskip("numpy")
    files = dumped(tmp_path, data_dump_stage=stage, force_eager=True)
    assert all(path.suffix == ".npy" for path in files)
    assert any(path.name.startswith("clone-aten.clone.default.OUTPUT.0.") for path in files) is has_clone
    root, graph, step = files[0].parts[:3]
    assert (root, graph.startswith("graph_"), step) == ("worldsize1_global_rank0", True, "0")
    steps = {path.parts[2] for path in files}
    assert steps == {"0", "1"}
    (sine,) = [p for p in files if p.parts[2] == "1" and p.name.startswith("sin-aten.sin.default.INPUT.0.")]
    assert numpy.array_equal(numpy.load(tmp_path / sine), (X + 1).numpy())


def test_dump_writes_bfloat16_as_float32(tmp_path):
    numpy = pytest.importorskip("numpy")
    fast = compiled(lambda x: x.sin(), dump_tensor_data=True, force_eager=True, data_dump_dir=str(tmp_path))
    fast(X.bfloat16())
    (saved,) = tmp_path.rglob("*OUTPUT*.npy")
    assert numpy.load(saved).dtype == numpy.float32


def test_dump_of_a_list_argument_numbers_its_parts(tmp_path):
    pytest.importorskip("numpy")
    fast = compiled(
        lambda x: torch.cat([x, x + 1]), dump_tensor_data=True, force_eager=True, data_dump_dir=str(tmp_path)
    )
    fast(X)
    assert len(list(tmp_path.rglob("cat-aten.cat.default.INPUT.0.[01].*.npy"))) == 2


# -- bad input through torch.compile -----------------------------------------------------------------------------

BAD = {
    **{option.name: 1 for option in options_of() if isinstance(option.default, bool)},
    "mode": "fast",
    "force_eager": 0,
    "capture_limit": 0,
    "activation_memory_budget": 1.5,
    "capture_sizes": [0],
    "capture_error_mode": "local",
    "clone_input": 1,
    "clone_output": "yes",
    "use_graph_pool": 3,
    "remove_noop_ops": 1,
    "stream_safety": "lax",
    "post_grad_custom_pre_pass": "name",
    "post_grad_custom_post_pass": 3,
    "dump_tensor_data": "yes",
    "data_dump_stage": "both",
    "data_dump_dir": "no/such/directory",
    "graph_dump_type": "svg",
    "graph_dump_path": 7,
    "verify": None,
    "strict": 0,
    "disable_passes": "remove_noops",
    "disable_rules": [3],
    "lift_idioms": "yes",
    "fusion_rules": [3],
    "region_dropout": "random",
    "region_numerics": "exact",
    "regions_keep_out": "aten.add",
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_reaches_the_user_as_a_graphex_error(name):
    fast = compiled(**{name: BAD[name]})
    with pytest.raises(graphex.OptionError, match=f"'{name}'") as caught:
        fast(X)
    assert isinstance(caught.value, graphex.GraphexError)
    assert isinstance(caught.value, ValueError)


def test_every_declared_option_is_given_a_bad_value_above():
    assert set(BAD) == set(option_names())


def test_an_unknown_option_reaches_the_user_with_the_closest_name():
    with pytest.raises(graphex.OptionError, match="did you mean 'force_eager'"):
        compiled(force_eagr=True)(X)


def test_a_bad_mode_of_torch_compile_is_an_option_error():
    with pytest.raises(graphex.OptionError, match="'fast'"):
        torch.compile(model, backend="graphex", mode="fast")(X)


def test_after_a_bad_option_the_next_compilation_works():
    with pytest.raises(graphex.OptionError):
        compiled(verify=3)(X)
    assert torch.equal(compiled()(X), model(X))


def test_options_are_given_over_a_configured_backend():
    seen = Observer()
    backend = graphex.get_backend(graphex.CompilerConfig(remove_noop_ops=False))
    options = {"post_grad_custom_post_pass": seen, "disable_rules": ["equal_calls"]}
    torch.compile(model, backend=backend, options=options)(X)
    assert aten.clone.default in seen.targets
    assert seen.targets.count(aten.sin.default) == 2


def test_a_backend_keeps_its_journal_over_several_functions():
    backend = graphex.get_backend()
    torch.compile(model, backend=backend)(X)
    torch.compile(lambda x: x.cos(), backend=backend)(X)
    assert len(backend.journal.graphs) == 2


def test_compile_fx_refuses_what_is_not_a_graph():
    with pytest.raises(graphex.InputError, match="GraphModule"):
        graphex.compile_fx(model, [X])


# -- what broke elsewhere ----------------------------------------------------------------------------------------


def test_force_eager_zero_is_an_error_and_not_on():
    with pytest.raises(graphex.OptionError, match=r"0 \(int\)"):
        compiled(force_eager=0)(X)


@pytest.mark.parametrize("verify", [False, True])
def test_a_mask_of_unknown_size_compiles(verify):
    def positive(x):
        return x[x > 0] * 2

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        fast = torch.compile(positive, backend="graphex", fullgraph=True, options={"verify": verify})
        for x in (X, -X, X.abs()):
            assert torch.equal(fast(x), positive(x))
    assert len(graphex.journal(fast).graphs) == 1
    assert not graphex.journal(fast).fallbacks


@pytest.mark.parametrize("verify", [False, True])
def test_a_number_read_from_a_tensor_compiles(verify):
    def rows(x, n):
        count = n.item()
        torch._check(count >= 0)
        torch._check(count <= x.shape[0])
        return x[:count] + 1, torch.zeros(count)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        fast = torch.compile(rows, backend="graphex", fullgraph=True, options={"verify": verify})
        for n in (0, 1, 3):
            ours, theirs = fast(X, torch.tensor(n)), rows(X, torch.tensor(n))
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not graphex.journal(fast).fallbacks


def test_nonzero_and_what_follows_from_its_size():
    def pairs(x):
        where = x.nonzero()
        return where.float().sum(0) / where.shape[0], where + 1

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        fast = torch.compile(pairs, backend="graphex", fullgraph=True)
        ours, theirs = fast(X), pairs(X)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_importing_and_compiling_installs_no_signal_handler():
    signals = [signal.SIGTERM, signal.SIGINT, signal.SIGABRT, signal.SIGUSR1]
    code = f"""
import signal, torch
before = [signal.getsignal(s) for s in {[int(s) for s in signals]}]
import graphex
assert before == [signal.getsignal(s) for s in {[int(s) for s in signals]}]
torch.compile(lambda x: x + 1, backend="graphex")(torch.ones(2))
assert before == [signal.getsignal(s) for s in {[int(s) for s in signals]}]
print("untouched")
"""
    assert python("-c", code).stdout.strip() == "untouched"


def test_graphex_disable_turns_the_backend_into_plain_execution(monkeypatch):
    monkeypatch.setenv("GRAPHEX_DISABLE", "1")
    off = compiled()
    assert torch.equal(off(X), model(X))
    journal = graphex.journal(off)
    assert (journal.graphs, journal.passes) == ([], [])
    assert journal.fallbacks[0].reason == "GRAPHEX_DISABLE=1 is set"


@pytest.mark.parametrize("value", ["true", "yes", "ON"])
def test_whoever_sets_graphex_disable_has_meant_it(monkeypatch, value):
    monkeypatch.setenv("GRAPHEX_DISABLE", value)
    off = compiled()
    off(X)
    assert graphex.journal(off).fallbacks[0].reason == f"GRAPHEX_DISABLE={value} is set"


@pytest.mark.parametrize("value", ["0", "", "false", "off"])
def test_a_no_leaves_graphex_on(monkeypatch, value):
    monkeypatch.setenv("GRAPHEX_DISABLE", value)
    fast = compiled()
    fast(X)
    assert graphex.journal(fast).passes


def test_disabled_trains_too(monkeypatch):
    monkeypatch.setenv("GRAPHEX_DISABLE", "1")
    x = X.clone().requires_grad_()
    compiled()(x).sum().backward()
    eager = X.clone().requires_grad_()
    model(eager).sum().backward()
    torch.testing.assert_close(x.grad, eager.grad)
