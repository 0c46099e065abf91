"""The tables of docs/ascend.md, from the declarations that the code runs on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from graphex.ascend.catalogue import NAMES, Name
from graphex.ascend.options import NPUGRAPH_EX, TORCHAIR, AscendOption, negated

# -- scenarios ---------------------------------------------------------------------------------------------------------
# The 64 scenarios npugraph_ex is tested with: where graphex does otherwise on purpose, and which it does not offer.
#
# All others hold as they are: tests/ascend/test_conformance_*.py has a test with the number of each.


BETTER: dict[int, tuple[str, str]] = {
    3: ("at `capture_limit` all graphs are dropped and the model runs eagerly for ever", "the oldest graph is freed"),
    6: ("other weights are another key", "the same key is captured again, and the journal says what moved"),
    8: (
        "results are the graph's memory, which the next call writes",
        "kept results stay right, unless asked otherwise",
    ),
    21: ("a chain of updates keeps one copy of the whole", "it keeps none"),
    28: ("parts of a `cat` along dimension 0, of one type", "along any dimension, and types are respected"),
    30: ("what a pass did is in the text of a log", "it is in the journal, as records"),
    60: ("18 files with fixed names", "one for each pass that ran, a journal, and programs that run by themselves"),
    63: ("a list of values and types", "one sentence: the option, what it was given, what it may be"),
}

_CACHE = "graphex does not keep compiled graphs between processes yet"

NOT_OFFERED: dict[int, str] = {
    13: "the simulated npu is one device; on GPUs tests/cuda has a second one",
    17: "tasks of a captured graph are not updated: another length is another key",
    18: "tasks of a captured graph are not updated: another length is another key",
    **dict.fromkeys(range(47, 59), _CACHE),
    59: "static kernels are binaries for the NPU",
}


# -- tables ------------------------------------------------------------------------------------------------------------


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
