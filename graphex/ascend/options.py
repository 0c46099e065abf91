"""Every option of TorchAir and of npugraph_ex: where it is set, what it may hold, and what becomes of it here.

An option either sets one of graphex's (`to`), or means nothing without CANN and is accepted, recorded as ignored and
shown once (`ignored` says why). `docs/ascend.md` lists both tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphex.config import Choice, CompilerConfig, Flag, Kind, Option, Whole


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


class Optional(Kind[Any]):
    """None, or what another kind allows."""

    def __init__(self, kind: Kind[Any]) -> None:
        self.kind = kind
        self.allowed = f"None, {kind.allowed}"

    def check(self, name: str, value: Any) -> Any:
        return None if value is None else self.kind.check(name, value)


class Dictionary(Kind["dict[str, Any] | None"]):
    allowed = "None or a dictionary"

    def check(self, name: str, value: Any) -> dict[str, Any] | None:
        if value is not None and not isinstance(value, dict):
            raise self.refuse(name, value)
        return value


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
    option: Option[Any] = vars(CompilerConfig)[name]
    return AscendOption(path or name, option.kind, option.default, to=name, **kwargs)


def ignored(path: str, kind: Kind[Any], default: Any, reason: str) -> AscendOption:
    return AscendOption(path, kind, default, ignored=reason)


NPUGRAPH_EX: tuple[AscendOption, ...] = (
    AscendOption("mode", Choice("npugraph_ex"), "npugraph_ex", to="mode", convert=lambda _: "reduce-overhead"),
    *map(
        same,
        (
            "force_eager",
            "use_graph_pool",
            "reuse_graph_pool_in_same_fx",
            "capture_limit",
            "clone_input",
            "clone_output",
            "frozen_parameter",
            "remove_noop_ops",
            "remove_cat_ops",
            "inplace_pass",
            "input_inplace_pass",
            "pattern_fusion_pass",
            "post_grad_custom_pre_pass",
            "post_grad_custom_post_pass",
            "dump_tensor_data",
            "data_dump_stage",
            "data_dump_dir",
            "force_recapture",
            "capture_error_mode",
            "graph_dump_type",
            "graph_dump_path",
            "deadlock_check",
        ),
    ),
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
        "aclgraph_config.use_custom_pool", vars(CompilerConfig)["use_graph_pool"].kind, None, to="use_graph_pool"
    ),
)
