"""`torchair.CompilerConfig` and `npugraph_ex.CompilerConfig`: trees of options, checked on assignment.

    config = torchair.CompilerConfig()
    config.debug.graph_dump.type = "pbtxt"
    config.ge_config.optimization_switch = "AutomaticUbFusion:off"      # accepted; recorded as ignored

`translated` makes graphex's configuration of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from graphex.ascend.options import NPUGRAPH_EX, TORCHAIR, AscendOption, same
from graphex.config import CompilerConfig as GraphexConfig
from graphex.config import option_names
from graphex.errors import OptionError, did_you_mean
from graphex.records import FellBack, Journal


class Group:
    """Some of the options: those whose path starts with `prefix`."""

    def __init__(self, values: _Values, prefix: str = "") -> None:
        vars(self)["_values"] = values
        vars(self)["_prefix"] = prefix

    def __getattr__(self, name: str) -> Any:
        values, path = vars(self).get("_values"), f"{vars(self).get('_prefix')}{name}"
        if values is None or name.startswith("__"):
            raise AttributeError(name)
        if path in values.options:
            return values.get(path)
        if any(option.startswith(f"{path}.") for option in values.options):
            return Group(values, f"{path}.")
        raise values.unknown(path)

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)["_values"].set(f"{vars(self)['_prefix']}{name}", value)

    def __dir__(self) -> list[str]:
        prefix = vars(self)["_prefix"]
        paths = [path.removeprefix(prefix) for path in vars(self)["_values"].options if path.startswith(prefix)]
        return sorted({path.split(".")[0] for path in paths})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Group) and dict(_given(self)) == dict(_given(other))

    __hash__ = None  # type: ignore[assignment]  # it is mutable until it is read-only

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{path}={value!r}' for path, value in _given(self))})"


class UnknownOptionError(OptionError, AttributeError):
    """`hasattr` must be able to ask for it."""


class _Values:
    """What was set, and the options there are."""

    def __init__(self, owner: str, options: Sequence[AscendOption]) -> None:
        self.owner = owner
        self.options = {option.path: option for option in options}
        self.given: dict[str, Any] = {}
        self.read_only = False

    def get(self, path: str) -> Any:
        return self.given.get(path, self.options[path].default)

    def set(self, path: str, value: Any) -> None:
        if self.read_only:
            raise OptionError(f"option '{path}' cannot be changed to {value!r}: compilation has started.")
        if path not in self.options:
            raise self.unknown(path)
        self.given[path] = self.options[path].kind.check(path, value)

    def unknown(self, path: str) -> UnknownOptionError:
        hint = did_you_mean(path, self.options, f"the options are {', '.join(self.options)}")
        return UnknownOptionError(f"{self.owner} has no option '{path}' ({hint}). See docs/ascend.md.")


class CompilerConfig(Group):
    """TorchAir's options, in its groups."""

    def __init__(self) -> None:
        super().__init__(_Values("torchair.CompilerConfig", TORCHAIR))


class FlatConfig(Group):
    """The options of npugraph_ex. graphex's own are accepted beside them."""

    def __init__(self) -> None:
        super().__init__(_Values("npugraph_ex.CompilerConfig", flat_options()))


def flat_options() -> list[AscendOption]:
    theirs = {option.path for option in NPUGRAPH_EX}
    return [*NPUGRAPH_EX, *(same(name) for name in option_names() if name not in theirs)]


def flat_config(options: object, mode: object = None) -> FlatConfig:
    """The configuration of `torch.compile(backend="npugraph_ex", options=...)`."""
    config = FlatConfig()
    if not isinstance(options, (Mapping, type(None))):
        raise OptionError(f"options must be a dictionary, got {type(options).__name__}.")
    for name, value in {**(options or {}), **({} if mode is None else {"mode": mode})}.items():
        if not isinstance(name, str):
            raise OptionError(f"option names are strings, got {name!r} ({type(name).__name__}).")
        setattr(config, name, value)
    return config


def translated(config: Group, journal: Journal) -> GraphexConfig:
    """graphex's configuration for one of theirs. What means nothing here is on record, and shown once."""
    values: _Values = vars(config)["_values"]
    seen = _read_only(config)
    found: dict[str, Any] = {}
    for path, value in _given(config):
        option = values.options[path]
        if option.ignored:
            if value != option.default:
                journal.fall_back(FellBack("-", f"the option '{path}={value!r}' is ignored", option.ignored))
        elif option.to.startswith("post_grad_custom"):
            found[option.to] = [_with_config(custom, seen) for custom in value]
        else:
            found[option.to] = option.convert(value)
    return GraphexConfig(**found)


def _with_config(custom: Any, config: Group) -> Any:
    """A function that takes the configuration gets the one it was written for."""
    from graphex.rewrite.adapter import graph_pass, name_of, takes_config

    if not takes_config(custom):
        return custom

    @graph_pass(
        name=name_of(custom),
        stage=getattr(custom, "stage", None) or None,
        preserves_results=getattr(custom, "preserves_results", True),
    )
    def with_config(gm: Any, example_inputs: Any, _: Any) -> Any:
        return custom(gm, example_inputs, config)

    return with_config


def _read_only(config: Group) -> Group:
    """What passes see: the options as they are now."""
    values: _Values = vars(config)["_values"]
    copy = _Values(values.owner, list(values.options.values()))
    copy.given, copy.read_only = dict(values.given), True
    made = object.__new__(type(config))
    Group.__init__(made, copy)
    return made


def _given(config: Group) -> Iterator[tuple[str, Any]]:
    prefix = vars(config)["_prefix"]
    return ((path, value) for path, value in vars(config)["_values"].given.items() if path.startswith(prefix))
