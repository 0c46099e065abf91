"""Why there is a graph, in words: the function it is of, the graph break before it, the guard that failed.

    Net                            the first graph of the module
    Net after line 9               goes on after the graph break at breaks.py:9
    Net recompile 1                size 0 of x changed from 4 to 7

Dynamo knows all of this (`torch_private/frames.py`). Here its texts become records.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import PurePath
from traceback import FrameSummary
from types import CodeType

from graphex.analysis.graphs import Frame, is_users
from graphex.records import GraphBroke, GraphCompiled, Journal, Recompiled, Record
from graphex.rewrite.compilation import Origin
from graphex.torch_private.frames import Break, CompiledFrame, breaks_without_graph, every_break, given_up_since


def origin_of(frame: CompiledFrame, compile_id: str, journal: Journal) -> Origin:
    """Where the graph of a frame comes from, given the graphs that the journal has already."""
    earlier = _earlier_graphs(frame, compile_id, journal)
    recompiled = _recompiled(frame, earlier) if earlier else None
    begun = f" after line {frame.resumed_at}" if frame.resumed_at else ""
    again = f" recompile {len({graph.compile_id for graph in earlier})}" if earlier else ""
    reason = f"goes on after the graph break at {_place(frame)}" if frame.resumed_at else ""
    if recompiled is not None:
        reason = recompiled.reason
    records = [*_breaks(frame, journal), *([recompiled] if recompiled is not None else [])]
    return Origin(f"{frame.name}{begun}{again}", frame.name, _defined_at(frame), reason, tuple(records))


def _earlier_graphs(frame: CompiledFrame, compile_id: str, journal: Journal) -> list[GraphCompiled]:
    """The graphs of other compilations of the same frame: ``0/1`` is the second of frame 0."""
    number, slash, _ = compile_id.rpartition("/")
    if not slash:
        return []
    of_frame = [graph for graph in journal.graphs if graph.compile_id.rpartition("/")[0] == number]
    return [graph for graph in of_frame if graph.function == frame.name and graph.compile_id != compile_id]


def _place(frame: CompiledFrame) -> str:
    return f"{PurePath(frame.code.co_filename).name}:{frame.resumed_at}" if frame.code is not None else ""


def _defined_at(frame: CompiledFrame) -> str:
    if frame.code is None:
        return ""
    return f"{PurePath(frame.code.co_filename).name}:{frame.resumed_at or frame.code.co_firstlineno}"


# -- graph breaks ------------------------------------------------------------------------------------------------------


_BRANCH = "generic_jump"  # torch's title of an `if`, a `while` or an `assert` on a tensor
_FORBIDDEN = " Reason: "  # what torch says in front of why it leaves a call alone
_QUOTED = re.compile(r"(?<!e\.g\. )`([^`]+)`")


def _breaks(frame: CompiledFrame, journal: Journal) -> Iterator[Record]:
    """The break at which the graph ends, and the one before it if no graph ended there."""
    if frame.ended is not None:
        yield broke(frame.name, frame.ended)
    if frame.began is not None:
        before = broke(frame.name, frame.began)
        if not any(known.line == before.line for known in journal.breaks):
            yield before


def breaks_of_process() -> list[GraphBroke]:
    """The graph breaks of this process, each line once: the reason, where nothing was compiled."""
    found = (broke(function, why, graph="-") for function, why in every_break())
    return list({each.line: each for each in found if each.line}.values())


def note_breaks_without_graph(journal: Journal, code: object, backend: object) -> None:
    """Record why no graph of a function has reached the backend: Dynamo asks for it where it has ops to compile."""
    if not isinstance(code, CodeType):
        return
    handed_over = {graph.compile_id for graph in journal.graphs}
    found = [*breaks_without_graph(code, backend, handed_over), *([] if handed_over else given_up_since((), code))]
    known = {each.line for each in journal.breaks}
    for record in (broke(function, why, graph="-") for function, why in found):
        if record.line not in known:
            journal.add(record)
            known.add(record.line)


def broke(function: str, found: Break, graph: str = "") -> GraphBroke:
    """A graph break as a record. torch's text is a title, then lines that begin with `Explanation:` and `Hint:`.

    Its line is the innermost one of the user's. What torch calls behind that, such as a hook, is part of the reason.
    """
    lines = [line.strip() for line in found.text.splitlines() if line.strip()]
    title = lines[0] if lines else "torch does not say why"
    explained = (_said(lines, "Explanation: ") or title).rstrip(".")
    quoted = _QUOTED.search(title) or _QUOTED.search(explained)
    cause = quoted[0] if quoted else title
    hint = _said(lines, "Hint: ")
    if title.startswith(_BRANCH):
        cause = explained = "the branch needs the value of a tensor"
        hint = "use `torch.where` or `torch.cond`"
    _, is_told, why = explained.partition(_FORBIDDEN)
    if is_told:  # the call is one that Dynamo leaves alone, such as that of an LSTM; the reason may end in advice
        explained, _, advice = why.partition(". Set ")
        cause, hint = explained, hint or (advice and f"Set {advice}")
    nowhere = FrameSummary("", 0, "")
    inner = (nowhere, *found.stack)[-1]
    last = next(filter(is_users, reversed(found.stack)), inner)
    if last is not inner:
        explained += f"; it is called at {_line(inner)}"
    return GraphBroke(graph, function, _line(last), cause, explained, hint, last.filename)


def _said(lines: list[str], title: str) -> str:
    return next((line.removeprefix(title) for line in lines if line.startswith(title)), "")


def _line(call: FrameSummary) -> str:
    """``breaks.py:9: if y.sum().item() > 0:``"""
    if not call.filename:
        return ""
    code = call.line or linecache.getline(call.filename, call.lineno or 0)
    return str(Frame(call.filename, call.lineno or 0, call.name, code.strip()))


# -- recompilations ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """The subject of a failed guard: a property (`what`) of a value, what it was and, where torch says so, is now."""

    value: str = ""
    what: str = ""
    before: str = ""
    now: str = ""


_TENSOR = re.compile(
    r"tensor '(?P<value>.+?)' (?P<what>[\w ]+?) mismatch(?: at index (?P<index>\d+))?\."
    r" expected (?P<before>[^,]+)(?:, actual (?P<now>.+))?"
)
_SIZE = re.compile(r"(?P<value>.+)\.(?P<what>size|stride)\(\)\[(?P<index>\d+)\] == (?P<before>\S+)")
_TYPE = re.compile(r"___check_type_id\((?P<value>[^,]+), .*type=<class '(?P<before>[^']+)'>")
_EQUAL = re.compile(r"(?P<value>[\w.\[\]'\"]+) == (?P<before>\S+)")
_CHECKED = ("type", "dispatch key set", "dtype", "device index", "requires_grad", "rank", "size", "stride")
_STATE = re.compile(r"GLOBAL_STATE changed: (?P<what>\w+)")
_OF_A_BREAK = re.compile(r"(?:L\[')?___stack\d+(?:'\])?")  # Dynamo's name for a value that a break hands on
_FROM_BEFORE = "a value from before the graph break"


def _recompiled(frame: CompiledFrame, earlier: list[GraphCompiled]) -> Recompiled:
    """The failed guard of the earlier graph that came nearest to fit; of several, the latest.

    torch tells one guard of each graph, the first to fail: x of another size is nearer than x of another dtype.
    """
    failures = {compile_id: _without_remark(said) for compile_id, said in frame.failures if said}
    asked = [graph for graph in reversed(earlier) if graph.compile_id in failures]
    if not asked:
        return Recompiled("", earlier[-1].graph, "a guard failed, and torch does not say which", "")
    nearest = max(asked, key=lambda graph: _nearness(_change(failures[graph.compile_id])))
    guard = failures[nearest.compile_id]
    change = _change(guard)
    return Recompiled("", nearest.graph, _sentence(change, guard), guard, **asdict(change))


def told_of(guard: str) -> str:
    """A guard that failed, in a sentence's words: ``size 0 of x changed from 4 to 7``."""
    return _sentence(_change(guard), guard)


def _nearness(change: Change) -> int:
    """How many of torch's checks of a value came before the one that failed; an expression is checked after them."""
    what = change.what.rstrip(" 0123456789")
    return _CHECKED.index(what) if what in _CHECKED else 0 if what else len(_CHECKED)


def _without_remark(said: str) -> str:
    """The guard alone: torch adds the source line as a comment, and a traceback below."""
    lines = said.strip().splitlines() or [""]
    return re.split(r"\s+#\s", lines[0])[0].strip()


def _change(guard: str) -> Change:
    if found := _TENSOR.match(guard) or _SIZE.match(guard):
        named = found.groupdict()
        what = f"{named['what']} {named['index']}" if named["index"] else named["what"]
        return Change(_value_name(named["value"]), what, named["before"], named.get("now") or "")
    if found := _TYPE.match(guard):
        return Change(_value_name(found["value"]), "type", found["before"])
    if found := _EQUAL.fullmatch(guard):
        return Change(_value_name(found["value"]), "", found["before"])
    if found := _STATE.match(guard):
        return Change("", found["what"])
    return Change()


def _value_name(value: str) -> str:
    return _FROM_BEFORE if _OF_A_BREAK.match(value) else value


def _sentence(change: Change, guard: str) -> str:
    """``size 0 of x changed from 4 to 7``"""
    of = " of ".join(filter(None, (change.what, change.value)))
    if change.now:
        return f"{of} changed from {change.before} to {change.now}"
    if change.value and change.before and "=" not in change.before:
        return f"{of} is not {change.before} any more"
    return f"{of} changed" if of else f"the guard `{_OF_A_BREAK.sub(_FROM_BEFORE, guard)}` failed"
