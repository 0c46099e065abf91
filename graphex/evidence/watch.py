"""Watching what a program compiles, from outside of it: what `graphex explain SCRIPT` does.

with watching() as watch:
    runpy.run_path("model.py")
watch.journals                     # one for each thing that was compiled, with its film

Watches are a plain list and no context variable: a program may well compile in a thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from graphex.config import CompilerConfig, config_from
from graphex.debug.history import Film
from graphex.records import Journal


@dataclass
class Watch:
    """What was compiled, and the options that were laid over the program's own."""

    options: Mapping[str, Any] = field(default_factory=dict)
    on_compile: Callable[[Journal], None] = lambda _: None
    journals: list[Journal] = field(default_factory=list)


_watches: list[Watch] = []


@contextmanager
def watching(
    options: Mapping[str, Any] | None = None, on_compile: Callable[[Journal], None] = lambda _: None
) -> Iterator[Watch]:
    watch = Watch(config_from(options).given(), on_compile)
    _watches.append(watch)
    try:
        yield watch
    finally:
        _watches.remove(watch)


def note_compilation(config: CompilerConfig, journal: Journal) -> CompilerConfig:
    """Tell everybody who watches; the configuration with their options laid over it."""
    for watch in tuple(_watches):
        if not any(known is journal for known in watch.journals):
            watch.journals.append(journal)
        if journal.film is None:
            journal.film = Film()
        if watch.options:
            config = config_from(config)
            config.update(watch.options)
        watch.on_compile(journal)
    return config
