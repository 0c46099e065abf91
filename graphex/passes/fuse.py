"""Fusion by rule, as passes: lift idioms to named ops, fuse named ops, fuse in the joint graph of training.

    x -> pow -> mean -> add -> rsqrt -> mul -> mul          x -> graphex.rms_norm                       lift
    F.scaled_dot_product_attention(q, k, v, mask)           graphex.attention(q, k, v, mask, scale)     lift
    x1, x2 -> add -> npu_rms_norm -> y, s                   x1, x2 -> npu_add_rms_norm -> y, s          fuse

The rules, the matcher and the reasons for what did not match live in `graphex.fusion`. Attention is lifted earlier:
torch takes a call of it apart while it is traced, so `graphex.frontend.dynamo_graph` replaces the call before, where no
graph has a name yet, and leaves a note on the nodes that come of it. `LiftAttention` takes the notes to the journal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from graphex.config import CompilerConfig
from graphex.fusion.rules import FUSIONS, LIFTS, load_for, names_of, users_rules
from graphex.ops import SPECS, has_kernel
from graphex.records import NO_KERNELS, RuleTried
from graphex.rewrite.base import GraphPass, Refusal, Work


class FusePatterns(GraphPass):
    """A user's rules, then ours, to a fixed point."""

    name = "fuse_patterns"
    option = "pattern_fusion_pass"

    def rules(self) -> tuple[str, ...]:
        return names_of(FUSIONS)

    def apply(self, work: Work) -> None:
        _apply(work, [*rules_in_use(work), *load_for(work.graph, FUSIONS, work.config.disable_rules)])


class FuseJointPatterns(GraphPass):
    """A user's rules about training (`trace_fn=joint_fwd_bwd`), on the joint forward and backward graph."""

    name = "fuse_joint_patterns"
    option = "pattern_fusion_pass"
    stage = "joint"

    def enabled(self, config: CompilerConfig) -> bool:
        return super().enabled(config) and any(rule.joint for rule in users_rules(config))

    def apply(self, work: Work) -> None:
        _apply(work, rules_in_use(work, joint=True))


def rules_in_use(work: Work, joint: bool = False) -> list[Any]:
    """A user's rules about graphs of one kind, without those that are switched off."""
    return [rule for rule in users_rules(work.config) if rule.joint == joint and work.allows(rule.name)]


class IdiomPass(GraphPass):
    """A pass to ops of graphex, which have kernels on some devices: `lift_idioms` switches it."""

    option = "pattern_fusion_pass"

    def enabled(self, config: CompilerConfig) -> bool:
        return super().enabled(config) and config.lift_idioms != "never"

    def lift(self, work: Work, sites: Iterable[tuple[Node, Any]]) -> None:
        """Replace each site, given with the node that it is known by, or say why not where it is a refusal."""
        lifted = candidates = 0
        for node, site in sites:
            candidates += 1
            if isinstance(site, Refusal):
                work.refuse(node, site, rule=self.rule)
            else:
                self.replace(work, site)
                lifted += 1
        if candidates:
            work.note(lambda graph, name: RuleTried(graph, name, self.rule, lifted, candidates))

    def replace(self, work: Work, site: Any) -> None:
        """Put the op in place of the nodes of one site."""
        raise NotImplementedError


def pays(work: Work, op: str, node: Node) -> bool:
    """Whether an op of graphex in the place of `node` is faster than PyTorch's, or wanted all the same."""
    return work.config.lift_idioms == "always" or has_kernel(f"graphex::{op}", device_of(node))


def device_of(node: Node) -> torch.device:
    """The device of a node's result, or of the first of several."""
    value = node.meta["val"]
    device: torch.device = (value[0] if isinstance(value, (list, tuple)) else value).device
    return device


class LiftIdioms(IdiomPass):
    """Plain PyTorch idioms become named ops, where their device has a kernel for these."""

    name = "lift_idioms"

    def rules(self) -> tuple[str, ...]:
        return names_of(LIFTS)

    def apply(self, work: Work) -> None:
        if work.config.lift_idioms == "always" or _has_kernels(work.graph):
            _apply(work, load_for(work.graph, LIFTS, work.config.disable_rules))
        else:
            work.remark = NO_KERNELS


def _apply(work: Work, rules: list[Any]) -> None:
    if rules:
        from graphex.fusion.fuse import apply_rules  # loads the matcher

        apply_rules(work, rules)


def _has_kernels(graph: Graph) -> bool:
    """Whether there is a device in the graph on which a named op is faster than its idiom."""
    values = (node.meta.get("val") for node in graph.nodes)
    devices = {value.device for value in values if isinstance(value, torch.Tensor)}
    return any(has_kernel(name, device) for device in devices for name in SPECS)


# -- attention ---------------------------------------------------------------------------------------------------------


_KEY = "graphex_attention"


@dataclass(frozen=True)
class Decided:
    """A call of attention, by its name in Dynamo's graph, and why it was left as it is (empty: it was lifted)."""

    call: str
    refusal: str = ""
    nothing_lost: bool = False  # torch's own kernels are as good for it
    known_mask: str = ""  # torch's own op was called without its mask, which is "all" True, or "causal"

    def as_note(self) -> dict[str, Decided]:
        """The annotation of the nodes that are made for the call."""
        return {_KEY: self}


_KNOWN = {"all": "True everywhere: torch's op needs none", "causal": "causal: torch's op has a flag for it"}


class LiftAttention(IdiomPass):
    """Say which calls of attention were lifted, and why others were not."""

    name = "lift_attention"
    rule = "lift_attention"
    known_mask = "known_mask"

    def rules(self) -> tuple[str, ...]:
        return self.rule, self.known_mask

    def concerns(self, graph: Graph) -> bool:
        return any(decided_about(node) is not None for node in graph.nodes)

    def apply(self, work: Work) -> None:
        last: dict[Decided, Node] = {}  # the op of a lifted call; of all nodes that another came to, the last
        for node in work.graph.nodes:
            if (decided := decided_about(node)) is not None:
                if decided.refusal or decided not in last or node.target is torch.ops.graphex.attention.default:
                    last[decided] = node
                node.meta["custom"] = {key: value for key, value in node.meta["custom"].items() if key != _KEY}
        if work.phase == "backward":  # the forward graph has told it
            return
        lifted = 0
        candidates = sum(not decided.nothing_lost for decided in last)
        for decided, node in last.items():
            if decided.known_mask:
                work.rewired(
                    node, rule=self.known_mask, because=f"the mask of '{decided.call}' is {_KNOWN[decided.known_mask]}"
                )
            if decided.refusal:
                work.refuse(node, Refusal(decided.refusal, nothing_lost=decided.nothing_lost), rule=self.rule)
                continue
            lifted += 1
            work.rewired(node, rule=self.rule, because=f"'{decided.call}' was not taken apart while it was traced")
        if candidates:
            work.note(lambda graph, name: RuleTried(graph, name, self.rule, lifted, candidates))


def decided_about(node: Node) -> Decided | None:
    """The call of attention that a node came of, until the pass has told about it."""
    custom = node.meta.get("custom")
    found = custom.get(_KEY) if isinstance(custom, dict) else None
    return found if isinstance(found, Decided) else None
