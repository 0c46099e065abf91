"""The versions of torch that graphex was tried with, and what is different on each."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["TRIED", "Tried", "is_newer_than_tried", "is_too_old"]


@dataclass(frozen=True)
class Tried:
    """The whole test suite passes on `version`. `differs` is what a user of it can notice."""

    version: str
    differs: str = ""


TRIED = (
    Tried(
        "2.11.0",
        "`event = stream.record_event()` inside a compiled function orders only what values need. Attention without a "
        "single head ends the process, in eager too.",
    ),
    Tried("2.12.1"),
    Tried("2.13.0", "The version of development."),
    Tried(
        "2.14.1",
        "On the CPU, attention of tensors with three dimensions takes torch's flash kernel, which rounds in another "
        "way than the plain one.",
    ),
    Tried(
        "2.15.0",
        "AOTAutograd compares the sizes of a result with those of the result it is a view of. If they are equal in the "
        "first call only, a size that was marked dynamic is specialised, and `mark_dynamic` raises, with "
        '`backend="aot_eager"` too. Parts of a GPU need the package `cuda-bindings`, which comes with torch.',
    ),
)
"""From the oldest, which is the oldest that graphex works with, to the newest."""


def is_too_old(version: str = "") -> bool:
    return _minor(version or torch.__version__) < _minor(TRIED[0].version)


def is_newer_than_tried(version: str = "") -> bool:
    """Whether torch is of a later minor version: a patch release keeps torch's private names."""
    return _minor(version or torch.__version__) > _minor(TRIED[-1].version)


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])
