"""Every error and warning graphex raises, so that `except graphex.GraphexError` catches all of them.

A rewrite that is not made is no error: it is a `Refusal`, the one type for "no, because".
"""

from __future__ import annotations

import difflib
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

if TYPE_CHECKING:
    from torch.fx import Node


_STANDARD = sysconfig.get_paths()["stdlib"]


class GraphexError(Exception):
    """Base of all graphex errors: one sentence saying what was wrong, where, and what to do."""


class OptionError(GraphexError, ValueError):
    """An option has an unknown name, a wrong type or a value that is not allowed."""


class PassError(GraphexError):
    """A user's pass raised, or left the graph broken. `__cause__` is the user's exception, if there was one."""


class RuleError(GraphexError, RuntimeError):
    """A fusion rule cannot work as it was written: it can never match, changes results, or its check raised.

    A RuntimeError, as torch raises for a duplicate.
    """


class StreamError(GraphexError):
    """Work was placed on streams in a way that cannot be right: bad nesting, an event that is missing, a race."""


class InputError(GraphexError, TypeError):
    """A public function was called with something it cannot work on."""


class NotOfferedError(GraphexError, NotImplementedError):
    """Something was used that graphex knows and does not offer: a name of an Ascend package, or a feature of torch."""


class CaptureError(GraphexError):
    """A device graph could not be captured; the caller falls back and records the reason."""


class DoubleBackwardError(GraphexError, RuntimeError):
    """The gradients of a compiled backward were asked for. A RuntimeError, as torch raises."""


class GraphexWarning(UserWarning):
    """Something ran in a way the user did not ask for; the journal holds the record behind every warning."""


def warn_user(text: str) -> None:
    """Warn at the line of the user's program that led here, which is also what `warnings` filters see."""
    frame = users_frame() or sys._getframe(1)  # none in a thread of ours, or of torch's
    module, registry = frame.f_globals.get("__name__"), frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, GraphexWarning, frame.f_code.co_filename, frame.f_lineno, module, registry)


def users_frame() -> FrameType | None:
    """The innermost frame of the user's program in this thread.

    That is one of an installed package only where no other is on the stack, and never one of a compiled function:
    Dynamo's code says of all of its lines that they are the first, `def forward`.
    """
    frames = _frames(sys._getframe(1))
    users = [frame for frame in frames if _is_users(frame.f_code.co_filename) and not _is_compiled(frame.f_code)]
    own = (frame for frame in users if "site-packages" not in frame.f_code.co_filename)
    return next(own, None) or next(iter(users), None)


F = TypeVar("F", bound=Callable[..., Any])
_NO_COLUMNS = 0x80 | 13 << 3  # an entry of Python's table of lines (Objects/locations.md): 1 to 8 units, the same line


def at_users_line(function: F) -> F:
    """The function, as if it stood at the user's line that led here: records and Dynamo's errors name that line."""
    frame, made = users_frame(), cast("FunctionType", function)
    if frame is not None:
        file, units = frame.f_code.co_filename, len(made.__code__.co_code) // 2
        table = b"".join(bytes((_NO_COLUMNS | min(8, units - begun) - 1, 0)) for begun in range(0, units, 8))
        made.__code__ = made.__code__.replace(co_filename=file, co_firstlineno=frame.f_lineno, co_linetable=table)
    return function


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those that called it, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_compiled(code: CodeType) -> bool:
    """Whether Dynamo has written the code: it calls a compiled graph, or goes on after one."""
    return any(name.startswith(("__compiled_fn", "__resume_at")) for name in code.co_names)


def _is_users(file: str) -> bool:
    """Whether code stands in a file that is neither graphex's, torch's nor the standard library's."""
    if file.startswith((*_packages(getattr(sys.modules.get("torch"), "__file__", None)), "<")):
        return False
    return not file.startswith(_STANDARD) or "site-packages" in file


@cache
def _packages(torch: str | None) -> tuple[str, ...]:
    return tuple(str(Path(each).parent) for each in (__file__, torch) if each)


def count_of(count: int, word: str) -> str:
    """``1 graph``, ``2 graphs``"""
    return f"{count} {word}{'' if count == 1 else 's'}"


def did_you_mean(name: object, known: Iterable[str], otherwise: str = "", *, most: int = 1) -> str:
    """`did you mean 'verify'?`, or `otherwise` where nothing that is known looks like it."""
    near = near_names(str(name), known)[:most]
    return f"did you mean {' or '.join(map(repr, near))}?" if near else otherwise


def near_names(name: str, known: Iterable[str]) -> list[str]:
    """The known names that look like `name`, the best match first.

    Names are compared without case, signs and namespace: `rmsnorm` is near `graphex::rms_norm`. One that holds all of
    `name` is near however long it is. Of names that are equally like it, those that begin with it come first, then the
    shorter. Names that are much less like it than the best are left out.
    """
    wanted = _bare(name)
    rated = [(_likeness(wanted, _bare(each)), each) for each in dict.fromkeys(known)]
    least = max(_NEAR, max((rating for rating, _ in rated), default=0.0) - _APART)
    near = [(-rating, not _bare(each).startswith(wanted), len(each), each) for rating, each in rated if rating >= least]
    return [each for *_, each in sorted(near)]


_NEAR, _APART = 0.6, 0.2
_SHORTEST = 3  # letters that say something when another name holds them


def _bare(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower().rpartition("::")[2]))


def _likeness(wanted: str, known: str) -> float:
    ratio = difflib.SequenceMatcher(None, wanted, known).ratio()
    return max(ratio, _NEAR) if len(wanted) >= _SHORTEST and wanted in known else ratio


def one_line(reason: object) -> str:
    """An exception as one sentence: its type and the first line that says something."""
    if isinstance(reason, BaseException):
        try:
            text = str(reason)
        except Exception:  # a user's exception may fail to print
            text = ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return f"{type(reason).__name__}: {lines[0]}" if lines else type(reason).__name__
    return str(reason)


@dataclass(frozen=True)
class Refusal:
    """Why a rewrite was not made, at which node, and what edit would help. False, with a reason.

    A kernel that does not take a call answers with one too: then the op's reference runs.
    `nothing_lost`: the code is as good without the rewrite; the place is recorded and not counted. `expected`: the
    program itself rules the rewrite out (for example, it reads the value again), so nothing is recorded.
    """

    reason: str
    node: Node | None = None
    edit: str = ""
    nothing_lost: bool = False
    expected: bool = False

    def __bool__(self) -> Literal[False]:
        return False
