"""The tables of docs/ascend.md, from the declarations that the code runs on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from graphex.ascend.catalogue import NAMES, Name
from graphex.ascend.options import NPUGRAPH_EX, TORCHAIR, AscendOption, negated
from graphex.ascend.scenarios import BETTER, NOT_OFFERED

Rows = Iterator[tuple[str, ...]]


def everything() -> dict[str, list[tuple[str, ...]]]:
    """Every table by its name."""
    makers = (names, torchair_options, npugraph_ex_options, scenarios_not_offered, better_scenarios)
    return {make.__name__: list(make()) for make in makers}


def names() -> Rows:
    """(name, what it maps to, state)"""
    yield ("name", "here", "state")
    for name in NAMES:
        yield f"`{name.name}`", _home(name), _state(name)


def torchair_options() -> Rows:
    return _options(TORCHAIR)


def npugraph_ex_options() -> Rows:
    return _options(NPUGRAPH_EX)


def scenarios_not_offered() -> Rows:
    yield ("scenario", "why")
    for number, reason in NOT_OFFERED.items():
        yield str(number), reason


def better_scenarios() -> Rows:
    yield ("scenario", "there", "here")
    for number, (there, here) in BETTER.items():
        yield str(number), there, here


def _options(options: Sequence[AscendOption]) -> Rows:
    yield ("option", "default", "here")
    for option in options:
        if option.ignored:
            here = f"ignored: {option.ignored}"
        else:
            opposite = "the opposite of " if option.convert is negated else ""
            here = f"{opposite}[`{option.to}`](options.md#{option.to})"
            here += f"; {option.note}" if option.note else ""
        yield f"`{option.path}`", f"`{[] if option.default == () else option.default!r}`", here


def _home(name: Name) -> str:
    if not name.home:
        return ""
    module, _, attribute = name.home.partition(":")
    return f"`{f'graphex.ascend{module}' if module.startswith('.') else module}.{attribute}`"


def _state(name: Name) -> str:
    if name.state == "works":
        return f"works ({name.note})" if name.note else "works"
    return f"{name.state}: {name.note}"
