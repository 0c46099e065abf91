"""The rules there are: graphex's own, a family a module, and those of users.

A module begins with drawings of what its rules do, which are also their documentation, and ends with `RULES`. Read
`common` first (how a rule is declared), then a short family (`simple`), then one with variants (`rotary`). A family
is loaded if a graph holds an op that it is about. Users' rules are those of the whole process
(`register_replacement`) and those of one configuration.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

import torch
from torch.fx import Graph

from graphex.analysis.inplace_variants import Handle
from graphex.config import AnyRule, CompilerConfig
from graphex.fusion.calls import op_of

if TYPE_CHECKING:
    from graphex.fusion.rule import Rule


@dataclass(frozen=True)
class Family:
    """The rules of one origin in a module of this folder: it is loaded if a graph holds one of the ops in `about`."""

    module: str
    origin: str
    about: frozenset[str]

    def load(self) -> tuple[Rule, ...]:
        rules: tuple[Rule, ...] = import_module(f"{__name__}.{self.module}").RULES
        return tuple(rule for rule in rules if rule.origin == self.origin)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its rules, which variants share."""
        return tuple(dict.fromkeys(rule.name for rule in self.load()))

    @property
    def doc(self) -> str:
        return inspect.cleandoc(import_module(f"{__name__}.{self.module}").__doc__ or "")


def _fusion(module: str, *about: str) -> Family:
    return Family(module, "default", frozenset(about))


def _lift(module: str, *about: str) -> Family:
    return Family(module, "lift", frozenset(about))


FUSIONS: tuple[Family, ...] = (
    _fusion("npu", "npu::npu_add_rms_norm", "aten::bmm"),
    _fusion("rms_norm", "graphex::rms_norm"),
    _fusion("quant", "graphex::dynamic_quant", "graphex::static_quant"),
    _fusion("rotary", "graphex::rotary"),
)
LIFTS: tuple[Family, ...] = (
    _lift("attention", "graphex::attention", "aten::tanh", "aten::max"),
    _lift("simple", "aten::embedding", "aten::silu"),
    _lift("rotary", "aten::cat"),
    _lift("quant", "aten::clamp"),
    _lift("rms_norm", "aten::rsqrt", "aten::sqrt", "aten::_fused_rms_norm"),
)


def names_of(families: Iterable[Family]) -> tuple[str, ...]:
    """The names of all rules of some families. Loads every family."""
    return tuple(dict.fromkeys(name for family in families for name in family.names))


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


# -- the rules of users ------------------------------------------------------------------------------------------------


class Registry:
    """Rules in the order they were registered."""

    def __init__(self) -> None:
        self._rules: list[AnyRule] = []

    def add(self, rule: AnyRule) -> RuleHandle:
        self._rules.append(rule)
        return RuleHandle(self, rule)

    def discard(self, rule: AnyRule) -> None:
        self._rules = [other for other in self._rules if other is not rule]

    def __iter__(self) -> Iterator[AnyRule]:
        return iter(tuple(self._rules))

    def __len__(self) -> int:
        return len(self._rules)


class RuleHandle(Handle):
    """The registration of a rule. That of a duplicate that was skipped is false, and removing it does nothing."""

    def __init__(self, registry: Registry, rule: AnyRule, *, skipped: bool = False) -> None:
        text = f"rule {rule.name!r}{', skipped' if skipped else ''}"
        super().__init__(text, (lambda: None) if skipped else partial(registry.discard, rule))
        self.rule, self._skipped = rule, skipped

    @property
    def name(self) -> str:
        return self.rule.name

    def __bool__(self) -> bool:
        return not self._skipped


process_rules = Registry()
"""The rules that `register_replacement` adds to."""


def users_rules(config: CompilerConfig) -> list[AnyRule]:
    """The rules of one configuration, then those of the process, each followed by itself for other ranks."""
    return [each for rule in (*config.fusion_rules, *process_rules) for each in (rule, *rule.ranks)]
