"""The rules of users: those of the whole process (`register_replacement`) and those of one configuration.

This module is light: it is imported with the passes, and the matcher only when there is a rule to try.
"""

from __future__ import annotations

from collections.abc import Iterator

from graphex.config import AnyRule, CompilerConfig


class Registry:
    """Rules in the order they were registered."""

    def __init__(self) -> None:
        self._rules: list[AnyRule] = []

    def add(self, rule: AnyRule) -> Handle:
        self._rules.append(rule)
        return Handle(self, rule)

    def discard(self, rule: AnyRule) -> None:
        self._rules = [other for other in self._rules if other is not rule]

    def __iter__(self) -> Iterator[AnyRule]:
        return iter(tuple(self._rules))

    def __len__(self) -> int:
        return len(self._rules)


class Handle:
    """A registration. `remove()` takes it back; as a context manager it does so at the end of the block.

    A handle of a duplicate that was skipped is false, and removing it does nothing.
    """

    def __init__(self, registry: Registry, rule: AnyRule, *, skipped: bool = False) -> None:
        self._registry = registry
        self._skipped = skipped
        self.rule = rule

    @property
    def name(self) -> str:
        return self.rule.name

    def remove(self) -> None:
        """Take the registration back. Models that are compiled already keep what was done to them."""
        if not self._skipped:
            self._registry.discard(self.rule)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __bool__(self) -> bool:
        return not self._skipped

    def __repr__(self) -> str:
        return f"Handle({self.name!r}{', skipped' if self._skipped else ''})"


process_rules = Registry()
"""The rules that `register_replacement` adds to."""


def users_rules(config: CompilerConfig) -> list[AnyRule]:
    """The rules of one configuration, then those of the process, each followed by itself for other ranks."""
    return [each for rule in (*config.fusion_rules, *process_rules) for each in (rule, *rule.ranks)]
