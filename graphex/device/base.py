"""The interface a device gives to the runtime. A device without graphs needs nothing but a name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from graphex.errors import CaptureError


class Replay(ABC):
    """A captured device graph."""

    @abstractmethod
    def replay(self) -> None:
        """Run the captured work on the current stream."""

    @abstractmethod
    def free(self) -> None:
        """Give the graph's memory back."""


class Device:
    name = "cpu"
    captures = False

    def pool(self) -> Any:
        """A memory pool that captured graphs may share."""
        return None

    def capture(self, run: Callable[[], Any], pool: Any) -> tuple[Replay, Any]:
        """Record what `run` launches, without executing it. Returns the graph and what `run` returned."""
        raise CaptureError(f"the device '{self.name}' has no graphs")
