"""Our own rules: which families there are, what they are called, and which ops make it worth loading them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

import torch
from torch.fx import Graph

from graphex.fusion.calls import op_of

if TYPE_CHECKING:
    from graphex.fusion.rule import Rule


@dataclass(frozen=True)
class Family:
    """A module of `graphex.fusion` whose `RULES` are about the ops in `about`: it is loaded if a graph holds one."""

    module: str
    rules: tuple[str, ...]
    about: frozenset[str]

    def load(self) -> tuple[Rule, ...]:
        loaded: tuple[Rule, ...] = import_module(f"graphex.fusion.rules.{self.module}").RULES
        return loaded


def _after_norm(module: str, *rules: str) -> Family:
    return Family(module, rules, frozenset({"npu::npu_add_rms_norm"}))


FUSIONS: tuple[Family, ...] = (
    _after_norm(
        "norm_dynamic_quant",
        "add_rms_norm_dynamic_quant",
        "add_rms_norm_smooth_dynamic_quant",
        "add_rms_norm_flatten_dynamic_quant",
        "add_rms_norm_flatten_smooth_dynamic_quant",
    ),
    _after_norm("norm_cast", "add_rms_norm_cast", "add_rms_norm_flatten_cast"),
    Family("batch_matmul", ("transpose_batchmatmul_transpose", "batchmatmul_transpose"), frozenset({"aten::bmm"})),
    _after_norm(
        "norm_quant",
        "add_rms_norm_quant",
        "add_rms_norm_quant_symmetric",
        "add_rms_norm_quant_qint8",
        "add_rms_norm_quant_qint8_symmetric",
    ),
    Family(
        "add_rms_norm",
        ("add_rms_norm", "lifted_add_rms_norm_dynamic_quant", "lifted_add_rms_norm_static_quant"),
        frozenset({"graphex::rms_norm"}),
    ),
    Family(
        "lifted_quant",
        (
            "lifted_rms_norm_dynamic_quant",
            "lifted_rms_norm_static_quant",
            "lifted_add_rms_norm_dynamic_quant",
            "lifted_add_rms_norm_static_quant",
            "lifted_silu_mul_dynamic_quant",
            "lifted_silu_mul_static_quant",
        ),
        frozenset({"graphex::dynamic_quant", "graphex::static_quant"}),
    ),
    Family("rotary_pair", ("rotary_qk",), frozenset({"graphex::rotary"})),
)
LIFTS: tuple[Family, ...] = (
    Family("lift_capped_attention", ("lift_capped_attention",), frozenset({"aten::tanh"})),
    Family("grouped_attention", ("grouped_attention",), frozenset({"graphex::attention", "aten::tanh"})),
    Family("lift_embedding", ("lift_embedding",), frozenset({"aten::embedding"})),
    Family("lift_silu_mul", ("lift_silu_mul",), frozenset({"aten::silu"})),
    Family("lift_rotary", ("lift_rotary",), frozenset({"aten::cat"})),
    Family("lift_quant", ("lift_dynamic_quant", "lift_static_quant"), frozenset({"aten::clamp"})),
    Family("lift_rms_norm", ("lift_rms_norm",), frozenset({"aten::rsqrt", "aten::sqrt", "aten::_fused_rms_norm"})),
)


def load_for(graph: Graph, families: Iterable[Family], without: Iterable[str]) -> list[Rule]:
    """The rules that could apply to a graph, judging by the ops it holds."""
    ops = ops_of(graph)
    unwanted = set(without)
    return [
        rule
        for family in families
        if not ops.isdisjoint(family.about)
        for rule in family.load()
        if rule.name not in unwanted and rule.requires <= ops
    ]


def ops_of(graph: Graph) -> frozenset[str]:
    """The ops a graph calls, as ``aten::add``, under the names it spells them by and under their one name."""
    targets = {target for node in graph.nodes if node.op == "call_function" for target in (node.target, op_of(node))}
    return frozenset(target._schema.name for target in targets if isinstance(target, torch._ops.OpOverload))
