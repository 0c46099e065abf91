"""Compile a function, compare it with eager, and ask what became of it.

    compiled = Compiled(model, x, lift_idioms="always")   # called once: results and inputs are eager's, nothing gave up
    compiled(y)                                           # and again, compared as well
    assert compiled.fusions() == ["add_rms_norm"]
    assert compiled.count(aten.rsqrt.default) == 0

`Verified`, `Fused` and `Lifted` are `Compiled` with other options and another comparison; `Optimised` skips Dynamo.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import graphex
from graphex.analysis import Aliases
from graphex.regions.compiler import RegionCode
from tests.harness.comparing import EXACT, assert_leaves_close, assert_same_to_user, copies

aten = torch.ops.aten

CLEAN = ("remove_noops", "remove_redundant_copies", "merge_common_subexpressions")
FUSING = ("fuse_patterns", "lift_idioms", "fuse_joint_patterns")


def uncompiled_region(body: GraphModule, patches: object) -> RegionCode:
    """In place of `compile_region`: the code of a region that runs its nodes, so that its results are eager's."""

    def run(args: list[object]) -> object:
        given = list(args)
        args.clear()
        return body(*given)

    return RegionCode(run, "", ("kernel",), 0.0)


def trace(fn: Callable[..., Any], *inputs: Tensor, dynamic: bool = False) -> GraphModule:
    """An ATen graph of `fn` with values on its nodes, without Dynamo and AOTAutograd: writes stay where they are.

    Without a table, torch 2.14 and newer turn `detach` into `alias`.
    """
    return make_fx(fn, decomposition_table={}, tracing_mode="symbolic" if dynamic else "fake")(*inputs)


class Observer:
    """A custom pass that changes nothing: a copy of the last graph, and all `graphs` as later passes leave them."""

    name = "observer"

    def __init__(self) -> None:
        self.graphs: list[GraphModule] = []
        self.targets: list[Any] = []

    def __call__(self, gm: GraphModule, example_inputs: Any, config: Any) -> None:
        self.graphs.append(gm)
        self.gm = GraphModule(gm, copy.deepcopy(gm.graph))  # later passes go on changing the graph they are given
        self.example_inputs = example_inputs
        self.config = config
        self.metas = {node.name: dict(node.meta) for node in gm.graph.nodes}
        self.targets = [node.target for node in gm.graph.nodes]
        self.ops = [node.op for node in gm.graph.nodes]


class Outcome:
    """The questions: `run` is what was compiled, `seen` observed the graph after all rewrites."""

    run: Any
    seen: Observer

    @property
    def journal(self) -> graphex.Journal:
        return graphex.journal(self.run)

    def rules(self, *passes: str) -> list[str]:
        """The rules of all rewrites, or of those that some passes made."""
        return [record.rule for record in self.journal.rewrites if not passes or record.pass_name in passes]

    def cleaned(self) -> list[str]:
        """The rewrites that the clean passes made, dead code aside."""
        return self.rules(*CLEAN)

    def fusions(self) -> list[str]:
        return self.rules(*FUSING)

    def made(self, rule: str) -> int:
        return self.rules().count(rule)

    @property
    def fused(self) -> dict[str, int]:
        """Rule -> how often it applied."""
        counts = Counter[str]()
        for tried in self.journal.rules:
            counts[tried.rule] += tried.matches
        return {rule: count for rule, count in counts.items() if count}

    def reasons(self, rule: str | None = None) -> list[str]:
        """Why a rule, or any, did not apply: refused or missed."""
        records = (*self.journal.refusals, *self.journal.near_misses)
        return [record.reason for record in records if rule in (None, record.rule)]

    def count(self, op: Any) -> int:
        """How often the graph after all rewrites calls an op."""
        return self.seen.targets.count(op.default if isinstance(op, OpOverloadPacket) else op)

    def ops(self) -> list[str]:
        """The ops of that graph, by name."""
        targets = [target for target in self.seen.targets if isinstance(target, OpOverload)]
        return [target._schema.name.split("::")[1] for target in targets]

    def running(self) -> list[Any]:
        """The ops of the graphs that run in the end, after the memory stage."""
        nodes = [node for gm in self.seen.graphs for node in gm.graph.nodes]
        return [node.target for node in nodes if node.op == "call_function"]

    def full_copies(self, cache: Tensor) -> list[str]:
        """The nodes of the graph that runs which make or move as many elements as the cache has."""
        (gm,) = self.seen.graphs
        aliases = Aliases(gm.graph)
        moving = [node for node in gm.graph.nodes if _moves(node, aliases)]
        return [node.name for node in moving if node.meta["val"].numel() >= cache.numel()]

    def counted(self, what: str) -> int:
        return sum(counter[what] for counter in self.journal.counts.values())

    def captures(self) -> list[str]:
        return [record.status for record in self.journal.captures]

    def assert_nothing_given_up(self) -> None:
        """No fallback, no pass rolled back, and whatever was verified is equal."""
        assert not self.journal.fallbacks
        assert {verdict.status for verdict in self.journal.verifications} <= {"equal"}
        assert [ran for ran in self.journal.passes if ran.status not in ("changed", "unchanged")] == []


def _moves(node: Node, aliases: Aliases) -> bool:
    """Whether the node fills memory: fresh memory, or by a copy."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
        return False
    return node.target is aten.copy_.default or any(owner is node for owner, _ in aliases.storages(node))


class Compiled(Outcome):
    """`fn` through torch.compile. With `inputs` it is called on copies of them; every call is compared with eager.

    `varies`: the dimensions that may be symbolic, as (input, dimension). Not `exact` is for what rounds differently.
    """

    backend = "graphex"
    defaults: ClassVar[Mapping[str, Any]] = {}  # options
    fullgraph = False
    calls = 1
    with_grad = False
    exactly: ClassVar[Mapping[str, Any]] = EXACT
    nearly: ClassVar[Mapping[str, Any]] = {"rtol": 1e-5, "atol": 1e-6}

    def __init__(
        self,
        fn: Callable[..., Any],
        *inputs: Any,
        dynamic: bool | None = None,
        varies: Any = (),
        exact: bool = True,
        **options: Any,
    ) -> None:
        self.fn, self.varies, self.seen = fn, varies, Observer()
        self.tolerance = self.exactly if exact else self.nearly
        options = {"post_grad_custom_post_pass": self.seen, **self.defaults, **options}
        self.run = torch.compile(fn, backend=self.backend, fullgraph=self.fullgraph, dynamic=dynamic, options=options)
        if inputs:
            for _ in range(self.calls):
                self(*copies(inputs))
            self.assert_nothing_given_up()
            assert bool(self.journal.verifications) == bool(options.get("verify"))

    def __call__(self, *args: Any) -> Any:
        """Call with `args`, and eagerly with copies of them; results and what is left in the arguments are equal."""
        theirs = copies(args)
        for place, dim in self.varies:
            torch._dynamo.maybe_mark_dynamic(args[place], dim)
        with torch.set_grad_enabled(self.with_grad):
            found, wanted = self.run(*args), self.fn(*theirs)
        self.assert_close(found, wanted)
        self.assert_close(args, theirs)
        return found

    def assert_close(self, found: Any, wanted: Any) -> None:
        assert_leaves_close(found, wanted, **self.tolerance)


class Verified(Compiled):
    """With `verify=True`, called twice."""

    defaults: ClassVar[Mapping[str, Any]] = {"verify": True}
    calls = 2


class Fused(Compiled):
    """Results are eager's but for rounding: quantised ones within one."""

    def assert_close(self, found: Any, wanted: Any) -> None:
        for ours, theirs in zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True):
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            assert_close_or_one_apart(ours, theirs)


def assert_close_or_one_apart(found: Tensor, wanted: Tensor) -> None:
    if wanted.dtype.is_floating_point:
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    else:
        assert (found.int() - wanted.int()).abs().max() <= 1 if found.numel() else True


class Lifted(Compiled):
    """With idioms lifted whatever the device; results are eager's to the bit.

    `dynamic`: all sizes but the last of every tensor may be symbolic, as batch and length are in a model.
    """

    defaults: ClassVar[Mapping[str, Any]] = {"lift_idioms": "always"}
    fullgraph = True
    with_grad = True
    exactly: ClassVar[Mapping[str, Any]] = {**EXACT, "equal_nan": True}

    def __init__(self, fn: Callable[..., Any], *inputs: Any, dynamic: bool = False, **options: Any) -> None:
        torch._dynamo.reset()
        varies = [(place, dim) for place, value in enumerate(inputs) for dim in _outer(value)] if dynamic else ()
        super().__init__(fn, *inputs, **{"varies": varies, **options})

    @property
    def why(self) -> str:
        """All reasons in one text."""
        return "\n".join(self.reasons())


def _outer(value: Any) -> list[int]:
    return [dim for dim, size in enumerate(value.shape[:-1]) if size > 1]


class Optimised(Outcome):
    """`fn`, traced and compiled without Dynamo, so that writes stay. A caller cannot tell it from `fn`."""

    def __init__(self, fn: Callable[..., Any], *inputs: Tensor, dynamic: bool = False, **options: Any) -> None:
        self.seen = Observer()
        options.setdefault("post_grad_custom_post_pass", self.seen)
        self.run = graphex.compile_fx(trace(fn, *inputs, dynamic=dynamic), options=options)
        assert_same_to_user(self.run, fn, *inputs)


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)
