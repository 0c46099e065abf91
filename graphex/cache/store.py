"""The store: compiled graphs as files that one process leaves for the next.

    <cache directory>/graphs/
        <function>-<key>.key      the key, part by part, as text: what `graphex cache` shows and compares
        <function>-<key>.graph    the artefact
        <function>-<key>.hits     one byte for each time it was loaded

Files are sealed by a hash, written as a whole, and read only if no other user can have written them (`graphex.env`).
Two processes that write one entry write the same. Over the limit, the entries that were not used for the longest time
are removed.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

from graphex.cache.keys import Key
from graphex.env import LARGEST, Folder, UntrustedError, cache_directory, cache_limit, open_folder, sealed, unsealed

FOLDER = "graphs"
KEY, GRAPH, HITS = ".key", ".graph", ".hits"
_COMPARED = 8  # entries of a function that a miss is compared with
_ABANDONED = 3600.0  # seconds after which a file that was never finished is removed


@dataclass(frozen=True)
class Entry:
    """A stored graph, as its files tell: `used` and `made` are times, `hits` how often it was loaded."""

    id: str
    bytes: int
    made: float
    used: float
    hits: int


class Store:
    """The graphs that are stored in a folder. Methods raise OSError where it cannot be used, saying why."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or cache_directory() / FOLDER

    def _open(self) -> AbstractContextManager[Folder]:
        return open_folder(self.path.parent, self.path.name)

    def load(self, key: Key) -> bytes | None:
        """The artefact of a key; None without one. Raises ValueError if it is damaged."""
        with self._open() as folder:
            try:
                return unsealed(folder.read(f"{name_of(key)}{GRAPH}"))
            except FileNotFoundError:
                return None

    def note_hit(self, key: Key) -> None:
        """Count a use. A cache that cannot be written to serves all the same."""
        with suppress(OSError), self._open() as folder:
            folder.append(f"{name_of(key)}{HITS}", b".")

    def save(self, key: Key, artefact: bytes) -> int:
        """Write an entry, and make room for it; its size."""
        content, about = sealed(artefact), sealed(zlib.compress(key.to_json().encode(), 1))
        if len(content) > LARGEST:
            raise OSError(f"it has {len(content)} bytes, more than the {LARGEST} that are stored")
        with self._open() as folder:
            folder.replace(f"{name_of(key)}{KEY}", about)
            folder.replace(f"{name_of(key)}{GRAPH}", content)
            make_room(folder, cache_limit(), but=name_of(key))
        return len(content) + len(about)

    def discard(self, id: str) -> None:
        """Remove an entry."""
        with self._open() as folder:
            _discard(folder, id)

    def alike(self, key: Key) -> list[Key]:
        """The latest keys of the same function."""
        with self._open() as folder:
            latest = sorted(_entries(folder), key=lambda entry: -entry.made)
            names = [entry.id for entry in latest if entry.id.startswith(f"{key.group}-")]
            return [found for name in names[:_COMPARED] if (found := _key(folder, name)) is not None]

    def entries(self) -> list[Entry]:
        """Everything that is stored, the latest use first."""
        with self._open() as folder:
            return sorted(_entries(folder), key=lambda entry: -entry.used)

    def key(self, id: str) -> Key | None:
        """The key of an entry; None if it cannot be read."""
        with self._open() as folder:
            return _key(folder, id)

    def artefact(self, id: str) -> bytes:
        """The artefact of an entry. Raises ValueError if it is damaged."""
        with self._open() as folder:
            return unsealed(folder.read(f"{id}{GRAPH}"))

    def problem(self, id: str) -> str:
        """Why an entry cannot be used; empty if its files are what was written."""
        with self._open() as folder:
            for suffix in (KEY, GRAPH):
                try:
                    unsealed(folder.read(f"{id}{suffix}"))
                except FileNotFoundError:
                    return f"{id}{suffix} is not there"
                except (OSError, ValueError) as error:
                    return f"{id}{suffix}: {error}"
        return ""

    def files(self, id: str) -> dict[str, bytes]:
        """The files of an entry, to be taken elsewhere."""
        with self._open() as folder:
            return {f"{id}{suffix}": folder.read(f"{id}{suffix}") for suffix in (KEY, GRAPH)}

    def put(self, name: str, content: bytes) -> None:
        """Write a file that `files` has given in another place."""
        with self._open() as folder:
            folder.replace(name, content)


def name_of(key: Key) -> str:
    return f"{key.group}-{key.digest}"


def make_room(folder: Folder, limit: int, but: str = "") -> None:
    """Remove what was not used for the longest time until the rest fits, and what killed processes left half done."""
    entries = sorted(_entries(folder), key=lambda entry: entry.used)
    size = sum(entry.bytes for entry in entries)
    for entry in entries:
        if size <= limit:
            break
        if entry.id != but:
            _discard(folder, entry.id)
            size -= entry.bytes
    for name in folder.names():
        if name.endswith(".new"):
            with suppress(FileNotFoundError):
                if time.time() - folder.about(name).st_mtime > _ABANDONED:
                    folder.remove(name)


def _discard(folder: Folder, id: str) -> None:
    for suffix in (GRAPH, KEY, HITS):
        folder.remove(f"{id}{suffix}")


def _entries(folder: Folder) -> Iterator[Entry]:
    names = set(folder.names())
    for name in names:
        if not name.endswith(GRAPH) or name.startswith("."):
            continue
        id = name.removesuffix(GRAPH)
        with suppress(FileNotFoundError):  # another process removes it
            graph = folder.about(name)
            key = folder.about(f"{id}{KEY}").st_size if f"{id}{KEY}" in names else 0
            hits = folder.about(f"{id}{HITS}") if f"{id}{HITS}" in names else None
            used = max(graph.st_mtime, hits.st_mtime if hits else 0.0)
            yield Entry(id, graph.st_size + key, graph.st_mtime, used, hits.st_size if hits else 0)


def _key(folder: Folder, id: str) -> Key | None:
    try:
        return Key.from_json(zlib.decompress(unsealed(folder.read(f"{id}{KEY}"))).decode())
    except (FileNotFoundError, UntrustedError, ValueError, TypeError, zlib.error):
        return None
