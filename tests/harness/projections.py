"""Folded projections: a function compiled with idioms lifted and verified, equal to eager bit for bit.

folded = Folded(lambda x, w: linear(x, w).relu(), half(2, 3, WIDTH), *weights(KV))
assert folded.shown == ["linears"]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

import graphex
from tests.harness.comparing import EXACT
from tests.harness.compiling import Lifted

ops = torch.ops.graphex

WIDTH, KV, HIDDEN = 16, 8, 24
FOLDING = ("fold_projections", "fold_gates")


class Folded(Lifted):
    """The references of the ops round as eager does, so results are eager's to the bit, and lie as eager's do."""

    defaults: ClassVar[Mapping[str, Any]] = {**Lifted.defaults, "verify": True}
    with_grad = False
    exactly: ClassVar[Mapping[str, Any]] = {**EXACT, "check_stride": True}

    @property
    def counts(self) -> dict[str, tuple[int, int]]:
        """Rule -> (how often it applied, of how many places)."""
        tried = [record for record in self.journal.rules if record.pass_name in FOLDING]
        return {record.rule: (record.matches, record.candidates) for record in tried}

    @property
    def shown(self) -> list[str]:
        """The ops of ours, and the products that are left, in the order of the graph."""
        targets = [target for target in self.seen.targets if isinstance(target, torch._ops.OpOverload)]
        shown = {"aten::mm": "mm", "aten::addmm": "addmm", "aten::add": "add"}
        names = [target._schema.name for target in targets]
        return [shown.get(name, name.removeprefix("graphex::")) for name in names if name in shown or "graphex" in name]


def half(*shape: int) -> Tensor:
    return torch.randn(shape).half()


def weights(*rows: int, columns: int = WIDTH) -> list[Tensor]:
    return [half(each, columns) / columns**0.5 for each in rows]


def norm(x: Tensor, gain: Tensor) -> Tensor:
    wide = x.float()
    return gain * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return functional.linear(x, weight, bias)


def folds(journal: graphex.Journal, graph: str) -> dict[str, tuple[int, int]]:
    """Rule -> (how often it folded a projection of a graph, of how many places)."""
    tried = [each for each in journal.rules if each.graph == graph and each.pass_name == FOLDING[0]]
    return {each.rule: (each.matches, each.candidates) for each in tried}


def folds_of_decoding(model: torch.nn.Module, layers: int) -> dict[str, tuple[int, int]]:
    """All of a decode step: each layer has a norm before its attention and one before its MLP, and a residual after
    both; then one norm more.
    """
    linears = sum(isinstance(module, torch.nn.Linear) for module in model.modules())
    folded = {"rms_norm_linears": 2 * layers + 1, "silu_mul_linears": layers, "linears_residual": 2 * layers}
    return {rule: (count, count) for rule, count in {"linears": linears, **folded}.items()}
