"""What an option is, and what kinds of values options hold: a check for each, and the words for what it allows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from graphex.errors import OptionError, did_you_mean

if TYPE_CHECKING:
    from graphex.config import CompilerConfig

T = TypeVar("T")

CustomPass = Any  # anything `graphex.passes.adapter` understands: callables, Transformer classes, pattern pairs ...


class Option(Generic[T]):
    """One option: what it is called, what it may hold, what it means."""

    def __init__(self, kind: Kind[T], default: T, doc: str) -> None:
        self.kind = kind
        self.default = default
        self.doc = doc
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, config: None, owner: type) -> Option[T]: ...
    @overload
    def __get__(self, config: CompilerConfig, owner: type) -> T: ...
    def __get__(self, config: CompilerConfig | None, owner: type) -> Option[T] | T:
        if config is None:
            return self
        value: T = config._values.get(self.name, self.default)
        return value

    def __set__(self, config: CompilerConfig, value: Any) -> None:
        if config._is_frozen:
            raise OptionError(
                f"option '{self.name}' cannot be changed to {value!r}: the configuration is read-only once compilation "
                "has started. Set it before the first call."
            )
        config._values[self.name] = self.kind.check(self.name, value)


class Kind(ABC, Generic[T]):
    """What values an option may hold: a check and the words for it."""

    allowed: str

    @abstractmethod
    def check(self, name: str, value: Any) -> T:
        """The value as it is stored; OptionError if it is not allowed."""

    def refuse(self, name: str, value: Any, hint: str = "") -> OptionError:
        given = f"{value!r} ({type(value).__name__})"
        allowed = f"{self.allowed} ({hint})" if hint else self.allowed
        return OptionError(f"option '{name}' was given {given}; allowed: {allowed}. See docs/options.md.")


class Flag(Kind[bool]):
    """True or False and nothing that merely behaves like them: 0 is a mistake, not a False."""

    allowed = "True or False"

    def check(self, name: str, value: Any) -> bool:
        if type(value) is not bool:
            raise self.refuse(name, value)
        return value


class Choice(Kind[str]):
    def __init__(self, *values: str) -> None:
        self.values = values
        self.allowed = ", ".join(repr(value) for value in values)

    def check(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in self.values:
            raise self.refuse(name, value, did_you_mean(value, self.values))
        return value


class Whole(Kind[int]):
    """A whole number of at least `least`; True is not 1."""

    def __init__(self, least: int) -> None:
        self.least = least
        self.allowed = f"a whole number of at least {least}"

    def check(self, name: str, value: Any) -> int:
        if type(value) is not int or value < self.least:
            raise self.refuse(name, value)
        return value


class FlagOrAuto(Kind["bool | str"]):
    allowed = "True, False or 'auto'"

    def check(self, name: str, value: Any) -> bool | str:
        if type(value) is not bool and not (isinstance(value, str) and value == "auto"):
            raise self.refuse(name, value)
        return value


class PoolHandle(Kind["tuple[int, int] | None"]):
    allowed = "None or a pool handle: two whole numbers, as torch.cuda.graph_pool_handle() gives them"

    def check(self, name: str, value: Any) -> tuple[int, int] | None:
        if value is None:
            return None
        if not isinstance(value, (tuple, list)) or len(value) != 2 or not all(type(part) is int for part in value):
            raise self.refuse(name, value)
        return (value[0], value[1])


class Sizes(Kind[tuple[int, ...]]):
    """Sizes to capture for, in any order; kept sorted, each once."""

    allowed = "a list of whole numbers of at least 1"

    def check(self, name: str, value: Any) -> tuple[int, ...]:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise self.refuse(name, value)
        if not all(type(size) is int and size >= 1 for size in value):
            raise self.refuse(name, value)
        return tuple(sorted(set(value)))


class ExistingDirectory(Kind[str]):
    allowed = "the path of a directory that exists"

    def check(self, name: str, value: Any) -> str:
        if not isinstance(value, (str, Path)) or not Path(value).is_dir():
            raise self.refuse(name, value)
        return str(value)


class OptionalChoice(Kind["str | None"]):
    """One of some words, or None."""

    def __init__(self, *values: str) -> None:
        self.values = (None, *values)
        self.allowed = ", ".join(repr(value) for value in self.values)

    def check(self, name: str, value: Any) -> str | None:
        if value is None or (isinstance(value, str) and value in self.values):
            return value
        raise self.refuse(name, value, did_you_mean(value, filter(None, self.values)))


class Folder(Kind[str]):
    allowed = "the path of a folder, which is made if it does not exist"

    def check(self, name: str, value: Any) -> str:
        if not isinstance(value, (str, Path)) or (Path(value).exists() and not Path(value).is_dir()):
            raise self.refuse(name, value)
        return str(value)


class Names(Kind[tuple[str, ...]]):
    """A list of names. Which names exist is known to the pipeline, which checks them when compilation starts."""

    allowed = "a list of names"

    def check(self, name: str, value: Any) -> tuple[str, ...]:
        if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(v, str) for v in value):
            raise self.refuse(name, value)
        return tuple(value)


class Passes(Kind[tuple[CustomPass, ...]]):
    """None, one custom pass or a list of them. A tuple is one pass: (pattern, replacement[, filters])."""

    allowed = "None, a pass, or a list of passes (docs/passes.md lists the forms a pass can take)"
    methods = ("apply", "is_node_supported")  # of a GraphPass, of an OperatorSupportBase

    def check(self, name: str, value: Any) -> tuple[CustomPass, ...]:
        if value is None or (isinstance(value, tuple) and not value):
            return ()
        from graphex.passes.adapter import as_graph_pass

        passes = list(value) if isinstance(value, list) else [value]
        for each in passes:
            if not (callable(each) or isinstance(each, tuple) or any(hasattr(each, name) for name in self.methods)):
                raise self.refuse(name, each)
            as_graph_pass(each)  # refuses what it cannot be
        return tuple(passes)


class Rules(Kind[tuple[Any, ...]]):
    """A list of fusion rules that `graphex.replacement` made."""

    allowed = "a list of rules made with graphex.replacement(...)"

    def check(self, name: str, value: Any) -> tuple[Any, ...]:
        from graphex.fusion.registry import AnyRule

        rules = list(value) if isinstance(value, (list, tuple)) else [value]
        for rule in rules:
            if not isinstance(rule, AnyRule):
                raise self.refuse(name, rule)
        return tuple(rules)
