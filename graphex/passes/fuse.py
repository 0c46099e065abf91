"""Fusion by rule, as passes: lift idioms to named ops, fuse named ops, fuse in the joint graph of training.

    x -> pow -> mean -> add -> rsqrt -> mul -> mul          x -> graphex.rms_norm                       lift
    x1, x2 -> add -> npu_rms_norm -> y, s                   x1, x2 -> npu_add_rms_norm -> y, s          fuse

The rules, the matcher and the reasons for what did not match live in `graphex.fusion`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph

from graphex.config import CompilerConfig
from graphex.fusion.registry import users_rules
from graphex.fusion.rules import FUSIONS, LIFTS, load_for, names_of
from graphex.ops import SPECS, has_kernel
from graphex.rewrite.base import GraphPass, Work


class FusePatterns(GraphPass):
    """A user's rules, then ours, to a fixed point."""

    name = "fuse_patterns"
    option = "pattern_fusion_pass"

    def rules(self) -> tuple[str, ...]:
        return names_of(FUSIONS)

    def apply(self, work: Work) -> None:
        without = work.config.disable_rules
        rules: list[Any] = [rule for rule in users_rules(work.config) if not rule.joint and rule.name not in without]
        rules += load_for(work.graph, FUSIONS, without)
        _apply(work, rules)


class FuseJointPatterns(GraphPass):
    """A user's rules about training (`trace_fn=joint_fwd_bwd`), on the joint forward and backward graph."""

    name = "fuse_joint_patterns"
    option = "pattern_fusion_pass"
    stage = "joint"

    def enabled(self, config: CompilerConfig) -> bool:
        return super().enabled(config) and any(rule.joint for rule in users_rules(config))

    def apply(self, work: Work) -> None:
        without = work.config.disable_rules
        _apply(work, [rule for rule in users_rules(work.config) if rule.joint and rule.name not in without])


class LiftIdioms(GraphPass):
    """Plain PyTorch idioms become named ops, where their device has a kernel for these."""

    name = "lift_idioms"
    option = "pattern_fusion_pass"

    def enabled(self, config: CompilerConfig) -> bool:
        return super().enabled(config) and config.lift_idioms != "never"

    def rules(self) -> tuple[str, ...]:
        return names_of(LIFTS)

    def apply(self, work: Work) -> None:
        if work.config.lift_idioms == "always" or _has_kernels(work.graph):
            _apply(work, load_for(work.graph, LIFTS, work.config.disable_rules))
        else:
            work.remark = "no kernels faster than the idioms on this device"


def _apply(work: Work, rules: list[Any]) -> None:
    if rules:
        from graphex.fusion.fuse import apply_rules  # loads the matcher

        apply_rules(work, rules)


def _has_kernels(graph: Graph) -> bool:
    """Whether there is a device in the graph on which a named op is faster than its idiom."""
    values = (node.meta.get("val") for node in graph.nodes)
    devices = {value.device for value in values if isinstance(value, torch.Tensor)}
    return any(has_kernel(name, device) for device in devices for name in SPECS)
