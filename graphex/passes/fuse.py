"""Fusion as passes: lift idioms to named ops, fuse named ops, fuse in the joint graph of training, join small writes.

    x -> pow -> mean -> add -> rsqrt -> mul -> mul          x -> graphex.rms_norm                       lift
    F.scaled_dot_product_attention(q, k, v, mask)           graphex.attention(q, k, v, mask, scale)     lift
    x1, x2 -> add -> npu_rms_norm -> y, s                   x1, x2 -> npu_add_rms_norm -> y, s          fuse
    copy_(mean, a); copy_(var, b)                           _foreach_copy_([mean, var], [a, b])         join

The rules, the matcher and the reasons for what did not match live in `graphex.fusion`. Attention is lifted earlier:
torch takes a call of it apart while it is traced, so `graphex.frontend.dynamo_graph` replaces the call before, where no
graph has a name yet, and leaves a note on the nodes that come of it. `LiftAttention` takes the notes to the journal.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node

from graphex.analysis import node_line, placement, same_layout
from graphex.analysis.shapes import known_contiguous
from graphex.config import CompilerConfig
from graphex.fusion.rules import FUSIONS, LIFTS, load_for, names_of, users_rules
from graphex.ops import SPECS, has_kernel
from graphex.records import NO_KERNELS
from graphex.rewrite.base import GraphPass, Refusal, Work
from graphex.rewrite.metadata import inherit_all


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


aten = torch.ops.aten
JOINED: dict[Any, Any] = {
    aten.copy_.default: aten._foreach_copy_.default,
    aten.add_.Tensor: aten._foreach_add_.Scalar,
}
JOINED_ON = ("cuda",)  # devices where a launch costs more than what it writes
LARGEST = 2**16  # elements: a larger write keeps the device busy by itself


class JoinWrites(GraphPass):
    """Write many small inputs by one op: the statistics of batch norms, and their counters, in a training forward."""

    name = "join_writes"
    rule = "join_writes"

    def concerns(self, graph: Graph) -> bool:
        return any(len(run) > 1 for run in _adjacent_writes(graph))

    def apply(self, work: Work) -> None:
        if work.phase != "forward":
            return
        for run in list(_adjacent_writes(work.graph)):
            if not _are_apart(work, run):
                continue
            kinds: dict[Hashable, list[Node]] = {}
            for node in run:
                value = node.meta["val"]
                number = None if node.target is aten.copy_.default else node.args[1]
                kinds.setdefault((node.target, value.dtype, value.device, number), []).append(node)
            behind = run[-1].next
            for nodes in kinds.values():
                if len(nodes) > 1:
                    self._join(work, nodes, behind)

    def _join(self, work: Work, nodes: list[Node], behind: Node) -> None:
        targets, others = ([node.args[place] for node in nodes] for place in (0, 1))
        second = others if nodes[0].target is aten.copy_.default else others[0]
        with work.graph.inserting_before(behind):
            joined = work.graph.call_function(JOINED[nodes[0].target], (targets, second))
        joined.meta["val"] = None
        inherit_all(joined, nodes)
        because = f"{len(nodes)} small writes to different memory are one launch"
        names, line = [node.name for node in nodes], node_line(nodes[0])
        work.fused(names, [joined], rule=self.rule, because=because, line=line)
        for node in nodes:
            work.graph.erase_node(node)


def _adjacent_writes(graph: Graph) -> Iterator[list[Node]]:
    """Runs of small writes with nothing between them."""
    run: list[Node] = []
    for node in graph.nodes:
        if _is_small_write(node):
            run.append(node)
        elif run:
            yield run
            run = []


def _is_small_write(node: Node) -> bool:
    """Whether it adds a number to a small tensor, or copies one of the same layout, and nothing reads its result."""
    if node.target not in JOINED or node.users or node.kwargs or len(node.args) != 2 or placement(node) is not None:
        return False
    target, other = node.args
    values = [each.meta.get("val") if isinstance(each, Node) else each for each in (target, other)]
    value, second = values
    if not isinstance(value, torch.Tensor) or value.device.type not in JOINED_ON or not known_contiguous(value):
        return False
    if not all(isinstance(size, int) for size in value.shape) or not 0 < prod(value.shape) <= LARGEST:
        return False
    if node.target is aten.add_.Tensor:
        return type(second) is int and not value.dtype.is_complex and value.dtype != torch.bool
    is_alike = isinstance(second, torch.Tensor) and (second.dtype, second.device) == (value.dtype, value.device)
    return is_alike and same_layout(second, value)


def _are_apart(work: Work, run: list[Node]) -> bool:
    """Whether no write of a run reads or writes what another one writes."""
    aliases = work.aliases
    written = [aliases.written_by(node) for node in run]
    read = [aliases.storages(node.args[1]) if isinstance(node.args[1], Node) else frozenset() for node in run]
    everything = frozenset().union(*written)
    return sum(map(len, written)) == len(everything) and everything.isdisjoint(frozenset().union(*read))


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
            work.tried(self.rule, lifted, candidates)

    def replace(self, work: Work, site: Any) -> None:
        """Put the op in place of the nodes of one site."""
        raise NotImplementedError


def pays(work: Work, op: str, node: Node) -> bool:
    """Whether an op of graphex in the place of `node` is faster than PyTorch's, or wanted all the same."""
    return work.config.lift_idioms == "always" or has_kernel(f"graphex::{op}", result_device(node))


def result_device(node: Node) -> torch.device:
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
            work.tried(self.rule, lifted, candidates)


def decided_about(node: Node) -> Decided | None:
    """The call of attention that a node came of, until the pass has told about it."""
    custom = node.meta.get("custom")
    found = custom.get(_KEY) if isinstance(custom, dict) else None
    return found if isinstance(found, Decided) else None
