"""The handle of a declaration about operators."""

from __future__ import annotations

from collections.abc import Callable


class Handle:
    """A declaration that can be taken back; as a context manager it holds for the block."""

    def __init__(self, text: str, take_back: Callable[[], object]) -> None:
        self._text, self._take_back = text, take_back

    def remove(self) -> None:
        """Graphs compiled from now on go without the declaration; those that are compiled stay as they are."""
        self._take_back()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<{self._text}>"
