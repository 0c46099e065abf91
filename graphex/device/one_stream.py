"""For scripts that show how a graph with several streams runs: they run on one, where its order is right too."""

from __future__ import annotations


def enter(stream: str | None, cores: int | None = None) -> None:
    """What follows is on this stream, and on so many cores at most."""


def record(event: str, stream: str | None) -> None:
    """The work of a stream up to here."""


def wait(event: str, stream: str | None) -> None:
    """A stream goes on after that."""
