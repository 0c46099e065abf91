"""Dropout in regions: the random numbers of a training forward come from seeds, which one op draws for all of them.

    before:  h = native_dropout(x, 0.1, True)             a kernel of its own, between two regions
    after:   s = dropout_seeds(1); h = dropout(x, s[0], 0.1)      h is a part of the region around it

Masks are as random as eager's, differ from step to step and follow the seed of the generator, but are others. The
backward reads the mask, which is saved: nothing is drawn twice.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor
from torch.fx import Node

from graphex.analysis import placement
from graphex.analysis.shapes import known_contiguous
from graphex.config import CompilerConfig
from graphex.rewrite.base import Work, inherit
from graphex.rewrite.metadata import evaluate, fake_mode_of

RULE = "seeded_dropout"
ON = ("cuda",)  # devices where it is worth having masks that are not eager's
TYPES = (torch.float32, torch.float16, torch.bfloat16)
native_dropout = torch.ops.aten.native_dropout.default


def seed_dropouts(work: Work, device: torch.device) -> None:
    """Let every dropout on the device that a region can hold take its random numbers from a seed."""
    if work.phase != "forward" or not work.allows(RULE) or not _is_wanted(work.config, device):
        return
    nodes: list[Node] = []
    for node in work.graph.find_nodes(op="call_function", target=native_dropout):
        if reason := _why_not(node, device):
            work.refuse(node, reason, rule=RULE)
        else:
            nodes.append(node)
    if not nodes:
        return
    for node, seed in zip(nodes, _seeds(work, nodes, device), strict=True):
        node.target, node.args = torch.ops.graphex.dropout.default, (node.args[0], seed, node.args[1])
        work.rewired(node, rule=RULE, because="a region computes the mask from a seed")


def _is_wanted(config: CompilerConfig, device: torch.device) -> bool:
    if config.verify:  # what is drawn is compared with what the graph drew before
        return False
    is_gain = device.type in ON and config.region_numerics == "fast"
    return config.region_dropout == "seeded" or (config.region_dropout == "auto" and is_gain)


def _why_not(node: Node, device: torch.device) -> str:
    """Why a dropout stays as it is; empty if it need not."""
    x, p, trains = (*node.args, *[None] * 3)[:3]
    value = x.meta.get("val") if isinstance(x, Node) else None
    if not isinstance(value, Tensor) or value.device != device or value.dtype not in TYPES:
        return "its argument is on another device, or of an unusual type"
    if trains is not True or not isinstance(p, float) or not 0 < p < 1:
        return "it drops everything, nothing, or nothing that is known"
    if placement(node) is not None:
        return "it is placed on a stream"
    return "" if known_contiguous(value) else "its argument does not lie in memory row by row"


def _seeds(work: Work, nodes: list[Node], device: torch.device) -> list[Node]:
    """A seed for each of these dropouts, drawn by one node before the first."""
    with work.graph.inserting_before(nodes[0]):
        drawn = work.graph.call_function(torch.ops.graphex.dropout_seeds.default, (len(nodes), device))
        seeds = [work.graph.call_function(operator.getitem, (drawn, place)) for place in range(len(nodes))]
    mode = fake_mode_of(work.gm)
    assert mode is not None
    for node in (drawn, *seeds):
        node.meta["val"] = evaluate(work.gm, node, mode)
        inherit(node, *nodes)
    return seeds
