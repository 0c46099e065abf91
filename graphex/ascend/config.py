"""The options of TorchAir and npugraph_ex, as two tables, and the configurations that hold them.

    config = torchair.CompilerConfig()
    config.debug.graph_dump.type = "pbtxt"                              # checked on assignment
    config.ge_config.optimization_switch = "AutomaticUbFusion:off"      # accepted; recorded as ignored

Each row of `NPUGRAPH_EX` and `TORCHAIR` names an option by its path and either the option of graphex that it sets
(`to`), or the reason why it means nothing without CANN (`ignored`). `translated` makes graphex's configuration of one
of theirs; `docs/ascend.md` lists both tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from graphex.config import Choice, Flag, Kind, Option, Optional, Whole, option_names
from graphex.config import CompilerConfig as GraphexConfig
from graphex.errors import OptionError, did_you_mean
from graphex.records import FellBack, Journal

# -- kinds of values ---------------------------------------------------------------------------------------------------


class Anything(Kind[Any]):
    allowed = "anything"

    def check(self, name: str, value: Any) -> Any:
        return value


class Text(Kind["str | None"]):
    allowed = "None or a string"

    def __init__(self, pattern: str = ".*") -> None:
        self._pattern = re.compile(pattern, re.DOTALL)

    def check(self, name: str, value: Any) -> str | None:
        if value is None or (isinstance(value, str) and self._pattern.fullmatch(value)):
            return value
        if isinstance(value, Path):
            return str(value)
        raise self.refuse(name, value)


class Dictionary(Kind["dict[str, Any] | None"]):
    allowed = "None or a dictionary"

    def check(self, name: str, value: Any) -> dict[str, Any] | None:
        if value is not None and not isinstance(value, dict):
            raise self.refuse(name, value)
        return value


# -- the two tables ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AscendOption:
    """An option by its path, such as ``debug.graph_dump.type``."""

    path: str
    kind: Kind[Any]
    default: Any
    to: str = ""
    ignored: str = ""
    convert: Callable[[Any], Any] = lambda value: value
    note: str = ""


def negated(value: bool) -> bool:
    return not value


CANN = "it is a switch of CANN, which does not run here"
GE = "it is a switch of the GE graph engine, which does not run here"
BINARIES = "it builds binaries for the NPU"
AIR = "it is about exporting to .air files"
AUTOMATIC = "graphex does this by itself"
FLAG = Flag()


def same(name: str, path: str = "", **kwargs: Any) -> AscendOption:
    """An option that graphex has under this name."""
    option: Option[Any] = vars(GraphexConfig)[name]
    return AscendOption(path or name, option.kind, option.default, to=name, **kwargs)


DEFAULTS = {"capture_error_mode": "global"}
"""The defaults of the originals that hold under their names."""


def ignored(path: str, kind: Kind[Any], default: Any, reason: str) -> AscendOption:
    return AscendOption(path, kind, default, ignored=reason)


_SAME = (
    "force_eager use_graph_pool reuse_graph_pool_in_same_fx capture_limit clone_input clone_output frozen_parameter"
    " remove_noop_ops remove_cat_ops inplace_pass input_inplace_pass pattern_fusion_pass post_grad_custom_pre_pass"
    " post_grad_custom_post_pass dump_tensor_data data_dump_stage data_dump_dir force_recapture graph_dump_type"
    " graph_dump_path deadlock_check"
)
NPUGRAPH_EX: tuple[AscendOption, ...] = (
    AscendOption("mode", Choice("npugraph_ex"), "npugraph_ex", to="mode", convert=lambda _: "reduce-overhead"),
    *map(same, _SAME.split()),
    replace(same("capture_error_mode"), default=DEFAULTS["capture_error_mode"]),
    ignored("static_kernel_compile", FLAG, False, BINARIES),
    ignored("disable_static_kernel_compile_cache", FLAG, False, BINARIES),
    ignored("super_kernel_optimize", FLAG, False, BINARIES),
    ignored("super_kernel_optimize_options", Dictionary(), None, BINARIES),
    ignored("super_kernel_debug_options", Dictionary(), None, BINARIES),
    ignored("_vllm_aclnn_static_kernel_sym_index", Whole(0), 0, BINARIES),
    ignored("_vllm_aclnn_static_kernel_sym_range", Anything(), None, BINARIES),
)

_STEPS, _LAYERS = r"(((\d+)|(\d+-?\d+))\|?)*", r"[0-9a-zA-Z_\" /\\.]*"

TORCHAIR: tuple[AscendOption, ...] = (
    AscendOption(
        "mode",
        Choice("max-autotune", "reduce-overhead", "npugraph_ex"),
        "max-autotune",
        to="mode",
        convert=lambda mode: "reduce-overhead" if mode == "npugraph_ex" else mode,
        note="both modes replay here",
    ),
    same("post_grad_custom_pre_pass"),
    same("post_grad_custom_post_pass"),
    same("graph_dump_type", "debug.graph_dump.type"),
    same("graph_dump_path", "debug.graph_dump.path"),
    AscendOption("debug.data_dump.type", Optional(Choice("npy")), None, to="dump_tensor_data", convert=bool),
    AscendOption("debug.data_dump.path", Text(), None, to="data_dump_dir", convert=lambda path: path or "./"),
    ignored("debug.data_dump.filter", Anything(), None, "every node is dumped"),
    ignored("debug.fx_summary.type", Optional(Choice("csv")), None, "the journal counts every op: graphex.journal"),
    ignored("debug.fx_summary.path", Text(), None, "the journal counts every op: graphex.journal"),
    ignored("debug.fx_summary.skip_compile", FLAG, True, "the journal counts every op: graphex.journal"),
    AscendOption("debug.run_eagerly", FLAG, False, to="force_eager"),
    AscendOption(
        "debug.aclgraph.disable_reinplace_inplaceable_ops_pass", FLAG, False, to="inplace_pass", convert=negated
    ),
    AscendOption(
        "debug.aclgraph.disable_reinplace_input_mutated_ops_pass", FLAG, False, to="input_inplace_pass", convert=negated
    ),
    AscendOption(
        "debug.aclgraph.disable_mempool_reuse_in_same_fx",
        FLAG,
        False,
        to="reuse_graph_pool_in_same_fx",
        convert=negated,
    ),
    same("capture_limit", "debug.aclgraph.static_capture_size_limit"),
    AscendOption("debug.aclgraph.enable_output_clone", FLAG, False, to="clone_output"),
    same("clone_input", "debug.aclgraph.clone_input"),
    ignored("aoe_config.aoe_mode", Optional(Choice("1", "2", "4")), None, CANN),
    ignored("aoe_config.work_path", Text(), "./", CANN),
    ignored("aoe_config.aoe_config_file", Text(), None, CANN),
    ignored("export.export_mode", FLAG, False, AIR),
    ignored("export.export_path_dir", Text(), "./", AIR),
    ignored("export.export_name", Text(), None, AIR),
    ignored("export.weight_name", Anything(), None, AIR),
    ignored("export.inputs_name", Anything(), None, AIR),
    ignored("export.enable_save_load_mode", FLAG, False, AIR),
    ignored("export.experimental.auto_atc_config_generated", FLAG, False, AIR),
    ignored("export.experimental.enable_record_nn_module_stack", FLAG, False, AIR),
    ignored("export.experimental.enable_lite_export", FLAG, False, AIR),
    AscendOption("dump_config.enable_dump", FLAG, False, to="dump_tensor_data"),
    same("data_dump_dir", "dump_config.dump_path"),
    ignored("dump_config.dump_mode", Choice("input", "output", "all"), "all", "what every node computes is dumped"),
    ignored("dump_config.quant_dumpable", FLAG, False, CANN),
    ignored("dump_config.dump_step", Text(_STEPS), "", "every call is dumped"),
    ignored("dump_config.dump_layer", Text(_LAYERS), "", "every node is dumped"),
    ignored("dump_config.dump_data", Choice("tensor", "stats"), "tensor", "values are dumped, not statistics"),
    ignored("fusion_config.fusion_switch_file", Text(), None, GE),
    ignored("experimental_config.cc_parallel_enable", FLAG, False, GE),
    ignored("experimental_config.keep_inference_input_mutations", FLAG, True, AUTOMATIC),
    ignored("experimental_config.memory_efficiency", FLAG, False, GE),
    same("frozen_parameter", "experimental_config.frozen_parameter"),
    ignored("experimental_config.static_model_ops_lower_limit", Optional(Whole(-1)), None, GE),
    ignored("experimental_config.jit_compile", Choice("auto"), "auto", CANN),
    ignored("experimental_config.npu_fx_pass", FLAG, False, "lift_idioms does this: see docs/fusion.md"),
    ignored(
        "experimental_config.aot_config_enable_joint_graph", FLAG, False, "stage='joint' does this: docs/passes.md"
    ),
    ignored(
        "experimental_config.aot_config_output_loss_index", Whole(0), 0, "the joint graph is partitioned by min-cut"
    ),
    ignored("experimental_config.enable_single_stream", FLAG, False, GE),
    ignored("experimental_config.topology_sorting_strategy", Choice("BFS", "DFS", "RDFS", "StableRDFS"), "DFS", GE),
    ignored("experimental_config.enable_ref_data", FLAG, False, GE),
    ignored("experimental_config.enable_view_optimize", FLAG, True, AUTOMATIC),
    same("remove_noop_ops", "experimental_config.remove_noop_ops"),
    ignored("experimental_config.tiling_schedule_optimize", FLAG, False, GE),
    same("pattern_fusion_pass", "experimental_config.pattern_fusion_pass"),
    ignored("experimental_config.aclgraph._aclnn_static_shape_kernel", FLAG, False, BINARIES),
    ignored("experimental_config.aclgraph._aclnn_static_shape_kernel_build_dir", Text(), None, BINARIES),
    ignored("experimental_config.aclgraph._aclnn_static_shape_kernel_sym_index", Whole(0), 0, BINARIES),
    ignored("experimental_config.aclgraph._aclnn_static_shape_kernel_sym_value_range", Anything(), None, BINARIES),
    ignored(
        "inference_config.dynamic_gears_merge_policy",
        Choice("zip", "product"),
        "zip",
        "there are no gears; the option capture_sizes pads calls",
    ),
    ignored("ge_config.enable_single_stream", FLAG, False, GE),
    ignored("ge_config.oo_level", Choice("O1", "O3"), "O3", GE),
    ignored("ge_config.oo_constant_folding", Optional(FLAG), None, GE),
    ignored("ge_config.oo_dead_code_elimination", Optional(FLAG), None, GE),
    ignored("ge_config.export_compile_stat", Choice("0", "1", "2"), "2", GE),
    ignored("ge_config.aicore_num", Text(), None, GE),
    ignored("ge_config.optimization_switch", Text(), None, GE),
    AscendOption(
        "aclgraph_config.use_custom_pool", vars(GraphexConfig)["use_graph_pool"].kind, None, to="use_graph_pool"
    ),
)


notes: list[FellBack] = []
"""What the program has called and what does nothing here, for the journal of everything that is compiled after it."""


# -- configurations ----------------------------------------------------------------------------------------------------


class _Cell:
    """An option as the originals have it: what is set is its `value`. It compares and counts as that, too."""

    value: Any


class TextCell(_Cell, str):
    """An option that is text."""

    value = property(str.__str__)


class WholeCell(_Cell, int):
    """An option that is a number."""

    value = property(int.__int__)


class FlagCell(_Cell, int):
    """An option that is on or off."""

    value = property(int.__bool__)

    def __repr__(self) -> str:
        return repr(self.value)

    __str__ = __repr__


class ListCell(_Cell, tuple):  # type: ignore[type-arg]
    """An option that is a list."""

    @property
    def value(self) -> tuple[Any, ...]:
        return tuple(self)


class NothingCell(_Cell):
    """An option that is not set."""

    value = None

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, NothingCell)

    def __hash__(self) -> int:
        return hash(None)

    def __repr__(self) -> str:
        return "None"


_CELLS: dict[type, Callable[[Any], Any]] = {
    str: TextCell,
    int: WholeCell,
    bool: FlagCell,
    tuple: ListCell,
    type(None): lambda _: NothingCell(),
}


def as_cell(value: Any) -> Any:
    """The value with an attribute `value`."""
    return _CELLS.get(type(value), lambda it: it)(value)


class Group:
    """The options whose path starts with `prefix`; attributes read and set them."""

    def __init__(self, values: _Values, prefix: str = "") -> None:
        vars(self)["_values"] = values
        vars(self)["_prefix"] = prefix

    def __getattr__(self, name: str) -> Any:
        values, path = vars(self).get("_values"), f"{vars(self).get('_prefix')}{name}"
        if values is None or name.startswith("__"):
            raise AttributeError(name)
        if path in values.options:
            return as_cell(values.get(path))
        if any(option.startswith(f"{path}.") for option in values.options):
            return Group(values, f"{path}.")
        raise values.unknown(path)

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)["_values"].set(f"{vars(self)['_prefix']}{name}", value)

    def as_dict(self) -> dict[str, Any]:
        """All options of the group by their paths, with their values."""
        prefix, values = vars(self)["_prefix"], vars(self)["_values"]
        return {path.removeprefix(prefix): values.get(path) for path in values.options if path.startswith(prefix)}

    def __dir__(self) -> list[str]:
        prefix = vars(self)["_prefix"]
        paths = [path.removeprefix(prefix) for path in vars(self)["_values"].options if path.startswith(prefix)]
        return sorted({path.split(".")[0] for path in paths})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Group) and dict(_given(self)) == dict(_given(other))

    __hash__ = None  # type: ignore[assignment]  # it is mutable until it is read-only

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{path}={value!r}' for path, value in _given(self))})"


class UnknownOptionError(OptionError, AttributeError):
    """An AttributeError too, so that `hasattr` answers."""


class _Values:
    """The options of a configuration, and the values that were set."""

    def __init__(self, owner: str, options: Sequence[AscendOption]) -> None:
        self.owner = owner
        self.options = {option.path: option for option in options}
        self.given: dict[str, Any] = {}
        self.read_only = False

    def get(self, path: str) -> Any:
        return self.given.get(path, self.options[path].default)

    def set(self, path: str, value: Any) -> None:
        if self.read_only:
            raise OptionError(f"option '{path}' cannot be changed to {value!r}: compilation has started.")
        if path not in self.options:
            raise self.unknown(path)
        value = value.value if isinstance(value, _Cell) else value
        self.given[path] = self.options[path].kind.check(path, value)

    def unknown(self, path: str) -> UnknownOptionError:
        hint = did_you_mean(path, self.options, f"the options are {', '.join(self.options)}")
        return UnknownOptionError(f"{self.owner} has no option '{path}' ({hint}). See docs/ascend.md.")


class CompilerConfig(Group):
    """TorchAir's options, in its groups."""

    def __init__(self) -> None:
        super().__init__(_Values("torchair.CompilerConfig", TORCHAIR))


class FlatConfig(Group):
    """The options of npugraph_ex. graphex's own are accepted beside them."""

    def __init__(self) -> None:
        super().__init__(_Values("npugraph_ex.CompilerConfig", flat_options()))


def flat_options() -> list[AscendOption]:
    theirs = {option.path for option in NPUGRAPH_EX}
    return [*NPUGRAPH_EX, *(same(name) for name in option_names() if name not in theirs)]


def flat_config(options: object, mode: object = None) -> FlatConfig:
    """The configuration of `torch.compile(backend="npugraph_ex", options=...)`."""
    config = FlatConfig()
    if not isinstance(options, (Mapping, type(None))):
        raise OptionError(f"options must be a dictionary, got {type(options).__name__}.")
    for name, value in {**(options or {}), **({} if mode is None else {"mode": mode})}.items():
        if not isinstance(name, str):
            raise OptionError(f"option names are strings, got {name!r} ({type(name).__name__}).")
        setattr(config, name, value)
    return config


def translated(config: Group, journal: Journal) -> GraphexConfig:
    """graphex's configuration for one of theirs. An option that means nothing here is recorded, and shown once."""
    values: _Values = vars(config)["_values"]
    seen = _read_only(config)
    found: dict[str, Any] = {}
    for path, value in _given(config):
        option = values.options[path]
        if option.ignored:
            if value != option.default:
                journal.fall_back(FellBack("-", f"the option '{path}={value!r}' is ignored", option.ignored))
        elif option.to.startswith("post_grad_custom"):
            found[option.to] = [_with_config(custom, seen) for custom in value]
        else:
            found[option.to] = option.convert(value)
    for record in notes:
        if record not in journal.fallbacks:
            journal.fall_back(record, warn=False)
    return GraphexConfig(**{**DEFAULTS, **found})


def _with_config(custom: Any, config: Group) -> Any:
    """A custom pass that takes the configuration gets the Ascend one it was written for."""
    from graphex.rewrite.adapter import graph_pass, name_of, takes_config

    if not takes_config(custom):
        return custom

    @graph_pass(
        name=name_of(custom),
        stage=getattr(custom, "stage", None) or None,
        preserves_results=getattr(custom, "preserves_results", True),
    )
    def with_config(gm: Any, example_inputs: Any, _: Any) -> Any:
        return custom(gm, example_inputs, config)

    return with_config


def _read_only(config: Group) -> Group:
    """A read-only copy of the options as they are now, for passes."""
    values: _Values = vars(config)["_values"]
    copy = _Values(values.owner, list(values.options.values()))
    copy.given, copy.read_only = dict(values.given), True
    made = object.__new__(type(config))
    Group.__init__(made, copy)
    return made


def _given(config: Group) -> Iterator[tuple[str, Any]]:
    prefix = vars(config)["_prefix"]
    return ((path, value) for path, value in vars(config)["_values"].given.items() if path.startswith(prefix))
