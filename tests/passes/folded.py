"""What the tests of folded projections share: a function compiled with lifts forced, equal to eager bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree

import graphex
from tests.passes.support import Observer

ops = torch.ops.graphex

WIDTH, KV, HIDDEN = 16, 8, 24
FOLDING = ("fold_projections", "fold_gates")


class Folded:
    """`fn` through graphex: the references of the ops round as eager does, so results are eager's to the bit.

    `varies`: the dimensions that are symbolic, as (input, dimension).
    """

    def __init__(self, fn: Callable[..., Any], *inputs: Any, varies: Any = (), **options: Any) -> None:
        self.fn, self.seen, self.varies = fn, Observer(), varies
        options = {"lift_idioms": "always", "post_grad_custom_post_pass": self.seen, "verify": True} | options
        self.compiled = torch.compile(fn, backend="graphex", fullgraph=True, options=options)
        self.again(*inputs)
        assert {verdict.status for verdict in self.journal.verifications} <= {"equal"}
        assert self.journal.fallbacks == []

    def again(self, *inputs: Any) -> None:
        with torch.no_grad():
            mine, theirs = ([_copy(value) for value in inputs] for _ in range(2))
            for place, dim in self.varies:
                torch._dynamo.maybe_mark_dynamic(mine[place], dim)
            found, wanted = pytree.tree_leaves(self.compiled(*mine)), pytree.tree_leaves(self.fn(*theirs))
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, check_stride=True)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)

    @property
    def journal(self) -> graphex.Journal:
        return graphex.journal(self.compiled)

    @property
    def counts(self) -> dict[str, tuple[int, int]]:
        """Rule -> (how often it applied, of how many places)."""
        tried = [record for record in self.journal.rules if record.pass_name in FOLDING]
        return {record.rule: (record.matches, record.candidates) for record in tried}

    @property
    def ops(self) -> list[str]:
        """The ops of ours, and the products that are left, in the order of the graph."""
        names = [target._schema.name for target in self.seen.targets if isinstance(target, torch._ops.OpOverload)]
        shown = {"aten::mm": "mm", "aten::addmm": "addmm", "aten::add": "add"}
        return [shown.get(name, name.removeprefix("graphex::")) for name in names if name in shown or "graphex" in name]

    def reasons(self, rule: str) -> list[str]:
        refusals = [record for record in self.journal.refusals if record.pass_name in FOLDING]
        return [record.reason for record in refusals if record.rule == rule]


def half(*shape: int) -> Tensor:
    return torch.randn(shape).half()


def weights(*rows: int, columns: int = WIDTH) -> list[Tensor]:
    return [half(each, columns) / columns**0.5 for each in rows]


def norm(x: Tensor, gain: Tensor) -> Tensor:
    wide = x.float()
    return gain * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return functional.linear(x, weight, bias)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
