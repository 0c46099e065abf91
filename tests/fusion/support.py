"""What the tests of fusion share: compile, compare with eager, and look at what the journal says about rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

import graphex
from tests.passes.support import Observer


class Fused:
    """A function compiled by graphex with `fn` run eagerly beside it: results are compared on construction."""

    def __init__(self, fn: Callable[..., Any], *inputs: Any, dynamic: bool | None = None, **options: Any) -> None:
        self.seen = Observer()
        options.setdefault("post_grad_custom_post_pass", self.seen)
        self.compiled = torch.compile(fn, backend="graphex", dynamic=dynamic, options=options)
        self.again(fn, *inputs)

    def again(self, fn: Callable[..., Any], *inputs: Any) -> None:
        with torch.no_grad():
            want, got = fn(*inputs), self.compiled(*inputs)
        for wanted, found in zip(pytree.tree_leaves(want), pytree.tree_leaves(got), strict=True):
            assert (wanted.dtype, wanted.shape) == (found.dtype, found.shape)
            assert_close(found, wanted)

    @property
    def journal(self) -> graphex.Journal:
        return graphex.journal(self.compiled)

    def fired(self) -> list[str]:
        passes = ("fuse_patterns", "lift_idioms", "fuse_joint_patterns")
        return [record.rule for record in self.journal.rewrites if record.pass_name in passes]

    def reasons(self, rule: str | None = None) -> list[str]:
        """Why a rule did not apply, refused or missed."""
        records = [*self.journal.refusals, *self.journal.near_misses]
        return [r.reason for r in records if r.pass_name == "fuse_patterns" and rule in (None, r.rule)]

    def ops(self) -> list[str]:
        """The ops of the graph after all rewrites by rule, by name."""
        targets = [t for t in self.seen.targets if isinstance(t, torch._ops.OpOverload)]
        return [target._schema.name.split("::")[1] for target in targets]


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    if wanted.dtype.is_floating_point:
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    else:
        assert (found.int() - wanted.int()).abs().max() <= 1 if found.numel() else True
