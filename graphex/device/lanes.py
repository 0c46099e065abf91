"""What generated code calls where a graph runs on several streams."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

Boxed = Callable[[list[Any]], Any]


class Lanes(ABC):
    """The streams and events of one compiled graph, made once and used by every call. None is the current stream."""

    @abstractmethod
    def around(self, body: Boxed) -> Boxed:
        """The program with everything a call needs before and after it."""

    @abstractmethod
    def enter(self, stream: str | None, cores: int | None = None) -> None:
        """What follows is given to this stream, and to so many cores of the device at most.

        A limit holds until the next call of any method, and is given only to a device that has `limits_cores`.
        """

    @abstractmethod
    def record(self, event: str, stream: str | None) -> None: ...

    @abstractmethod
    def wait(self, event: str, stream: str | None) -> None: ...
