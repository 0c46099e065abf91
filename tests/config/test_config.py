"""The options by themselves: what they may hold, and what is said about what they may not."""

from __future__ import annotations

import pytest

import graphex
from graphex.config import config_from, option_names, options_of

FLAGS = [option.name for option in options_of() if isinstance(option.default, bool)]

BAD = {
    "mode": ["fast", "", 1, None, True, ["eager"]],
    "capture_limit": [0, -1, True, 1.0, "64", None],
    "capture_sizes": [3, "1,2", [0], [1, True], [1.0], None, [[1]]],
    "capture_error_mode": ["local", "", None, 1],
    "clone_input": [0, 1, "yes", None],
    "clone_output": [0, 1, "True", None],
    "use_graph_pool": [3, (1,), (1, 2, 3), ("0", 1), (0, True), "pool"],
    "stream_safety": ["lax", "", None, True],
    "data_dump_stage": ["original ", "both", 0, None],
    "data_dump_dir": ["no/such/directory", __file__, 3, None],
    "graph_dump_type": ["svg", "", 1, True],
    "graph_dump_path": [__file__, 3, None],
    "disable_passes": ["remove_noops", 3, [1], None],
    "disable_rules": ["plain_copy", {"plain_copy": 1}, [None], None],
    "lift_idioms": ["yes", True, None, 1],
    "fusion_rules": [3, "name", None],
    "region_dropout": ["off", True, None],
    "region_numerics": ["exact", True, None],
    "regions_keep_out": ["aten.add", 3, [1], None],
    "activation_memory_budget": [-0.1, 1.5, "all", True, None],
    "post_grad_custom_pre_pass": [3, "name", [3], [None]],
    "post_grad_custom_post_pass": [3, "name", [3], [None]],
    **{name: [0, 1, 0.0, "True", "", None, []] for name in FLAGS},
}
GOOD = {
    "mode": ["reduce-overhead", "max-autotune", "eager"],
    "capture_limit": [1, 64, 2**63 - 1],
    "capture_sizes": [[], [1, 2, 4, 8], (8, 1, 1), range(1, 5)],
    "capture_error_mode": ["global", "thread_local", "relaxed"],
    "clone_input": [True, False, "auto"],
    "clone_output": [True, False, "auto"],
    "use_graph_pool": [None, (0, 1), [3, 4]],
    "stream_safety": ["auto", "strict", "shuffle"],
    "data_dump_stage": ["original", "optimized"],
    "data_dump_dir": ["./", "."],
    "graph_dump_type": [None, "txt", "py", "pbtxt"],
    "graph_dump_path": ["./", "no/such/directory"],
    "disable_passes": [[], ["remove_noops"], ("remove_noops",)],
    "disable_rules": [[], ["plain_copy"]],
    "lift_idioms": ["auto", "always", "never"],
    "fusion_rules": [[], ()],
    "region_dropout": ["auto", "seeded", "eager"],
    "region_numerics": ["eager", "fast"],
    "regions_keep_out": [[], ["aten.add", "aten._softmax.default"]],
    "activation_memory_budget": [0, 0.5, 1.0],
    "post_grad_custom_pre_pass": [None, print, [print, print], [], (print, print)],
    "post_grad_custom_post_pass": [None, print, [print, print], [], (print, print)],
    **{name: [True, False] for name in FLAGS},
}


def cases(table):
    return [pytest.param(name, value, id=f"{name}={value!r}") for name, values in table.items() for value in values]


def test_every_option_is_tested_here():
    assert set(BAD) == set(GOOD) == set(option_names())


@pytest.mark.parametrize(("name", "value"), cases(GOOD))
def test_a_good_value_is_taken(name, value):
    graphex.CompilerConfig(**{name: value})


@pytest.mark.parametrize(("name", "value"), cases(BAD))
def test_a_bad_value_is_refused_with_what_was_given_and_what_is_allowed(name, value):
    with pytest.raises(graphex.OptionError, match=f"'{name}' was given .*allowed: ") as caught:
        graphex.CompilerConfig(**{name: value})
    given = value[0] if isinstance(value, list) and value and "custom" in name else value
    assert repr(given) in str(caught.value)
    assert type(given).__name__ in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [pytest.param(n, BAD[n][0], id=n) for n in BAD])
def test_assignment_is_checked_like_a_keyword(name, value):
    config = graphex.CompilerConfig()
    with pytest.raises(graphex.OptionError, match=name):
        setattr(config, name, value)
    assert getattr(config, name) == getattr(graphex.CompilerConfig(), name)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("force_eagerly", "force_eager"),
        ("remove_noop", "remove_noop_ops"),
        ("verfy", "verify"),
        ("post_grad_custom_pre_passes", "post_grad_custom_pre_pass"),
        ("disable_rule", "disable_rules"),
    ],
)
def test_an_unknown_name_is_answered_with_the_closest(wrong, right):
    with pytest.raises(graphex.OptionError, match=f"unknown option '{wrong}' \\(did you mean '{right}'\\?\\)"):
        graphex.CompilerConfig(**{wrong: True})


def test_a_name_close_to_none_is_answered_with_the_command_that_lists_all():
    with pytest.raises(graphex.OptionError, match="`graphex options` lists them"):
        graphex.CompilerConfig(zzz=1)


@pytest.mark.parametrize("name", ["triton.cudagraphs", "freezing", "max_autotune", "epilogue_fusion"])
def test_an_option_of_inductor_is_answered_with_what_to_write_instead(name):
    instead = "mode=|compiled regions read|write mode=|set it in"
    with pytest.raises(graphex.OptionError, match=f"is an option of Inductor: ({instead})"):
        graphex.get_backend({name: True})


def test_a_close_value_is_suggested():
    with pytest.raises(graphex.OptionError, match="did you mean 'reduce-overhead'"):
        graphex.CompilerConfig(mode="reduce_overhead")


def test_zero_is_not_false_and_one_is_not_true():
    for value in (0, 1):
        with pytest.raises(graphex.OptionError, match="True or False"):
            graphex.CompilerConfig(force_eager=value)


def test_a_bad_option_changes_none_of_the_later_ones():
    config = graphex.CompilerConfig()
    with pytest.raises(graphex.OptionError):
        config.update({"verify": 1, "strict": False})
    assert (config.verify, config.strict) == (False, True)


def test_a_frozen_config_is_a_read_only_copy():
    config = graphex.CompilerConfig(verify=True)
    frozen = config.frozen()
    with pytest.raises(graphex.OptionError, match="read-only"):
        frozen.verify = False
    config.verify = False
    assert frozen.verify is True


def test_a_frozen_config_refuses_new_names_too():
    with pytest.raises(graphex.OptionError):
        graphex.CompilerConfig().frozen().anything = 1


@pytest.mark.parametrize("options", [3, "eager", [("verify", True)]])
def test_options_are_a_dictionary_or_a_config(options):
    with pytest.raises(graphex.OptionError, match=type(options).__name__):
        graphex.get_backend(options)


def test_option_names_are_strings():
    with pytest.raises(graphex.OptionError, match="3"):
        graphex.get_backend({3: True})


def test_a_config_is_copied_where_it_is_given():
    config = graphex.CompilerConfig(post_grad_custom_pre_pass=[print, (print, print)], disable_passes=["remove_noops"])
    backend = graphex.get_backend(config)
    assert backend.config == config
    config.mode = "eager"
    assert backend.config.mode == "reduce-overhead"


def test_mode_over_options():
    assert config_from({"verify": True}, "eager").mode == "eager"


def test_every_option_says_what_it_does():
    assert all(option.doc and option.name for option in options_of())


def test_errors_are_of_one_family_and_of_pythons_own():
    assert issubclass(graphex.OptionError, (graphex.GraphexError,))
    assert issubclass(graphex.OptionError, ValueError)
    assert issubclass(graphex.PassError, graphex.GraphexError)
    assert issubclass(graphex.InputError, (graphex.GraphexError, TypeError))


def test_the_repr_shows_what_was_set():
    assert repr(graphex.CompilerConfig(mode="eager")) == "CompilerConfig(mode='eager')"
