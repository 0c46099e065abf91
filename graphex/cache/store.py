"""The store: compiled graphs as files that one process leaves for the next.

    <cache directory>/graphs/
        <function>-<key>.key      the key, part by part, as text: what `graphex cache` shows and compares
        <function>-<key>.graph    the artefact
        <function>-<key>.hits     one byte for each time it was loaded
        <function>-<key>.<key of a call>.call    a call of the backend that leads to this graph (`graphex.cache.calls`)

Files are sealed by a hash, written as a whole, and read only if no other user can have written them (`graphex.env`).
Two processes that write one entry write the same. Over the limit, the entries that were not used for the longest time
are removed.
"""

from __future__ import annotations

import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

from graphex.cache.keys import Key
from graphex.env import LARGEST, Folder, UntrustedError, cache_directory, cache_limit, open_folder, sealed, unsealed

FOLDER = "graphs"
KEY, GRAPH, HITS, CALL = ".key", ".graph", ".hits", ".call"
_UNREADABLE = (FileNotFoundError, UntrustedError, ValueError, TypeError, zlib.error)
_LENGTH = 8  # bytes of a number
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

    def note_hit(self, id: str) -> None:
        """Count a use. A cache that cannot be written to serves all the same."""
        with suppress(OSError), self._open() as folder:
            folder.append(f"{id}{HITS}", b".")

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

    def load_calls(self, key: Key) -> list[tuple[str, bytes]]:
        """The entries of the graphs that a call of the backend leads to, for some sizes each, and what is stored of it.

        Raises ValueError if one is damaged.
        """
        with self._open() as folder:
            names = sorted(name for name in folder.names() if name.endswith(f".{key.digest}{CALL}"))
            return [(name.partition(".")[0], _call(folder, name)[1]) for name in names]

    def save_call(self, id: str, key: Key, call: bytes) -> None:
        """Write a call of the backend that leads to the graph of this entry."""
        about = zlib.compress(key.to_json().encode(), 1)
        with self._open() as folder:
            content = sealed(len(about).to_bytes(_LENGTH, "big") + about + call)
            folder.replace(f"{id}.{key.digest}{CALL}", content)

    def calls_alike(self, key: Key) -> list[Key]:
        """The latest keys of calls of the same function."""
        with self._open() as folder:
            names = [name for name in folder.names() if name.startswith(f"{key.group}-") and name.endswith(CALL)]
            latest = sorted(names, key=lambda name: -folder.about(name).st_mtime)
            return [found for name in latest[:_COMPARED] if (found := _key_of_call(folder, name)) is not None]

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
            for name in (f"{id}{KEY}", f"{id}{GRAPH}", *_calls(folder, id)):
                try:
                    unsealed(folder.read(name))
                except FileNotFoundError:
                    return f"{name} is not there"
                except (OSError, ValueError) as error:
                    return f"{name}: {error}"
        return ""

    def files(self, id: str) -> dict[str, bytes]:
        """The files of an entry, to be taken elsewhere."""
        with self._open() as folder:
            return {name: folder.read(name) for name in (f"{id}{KEY}", f"{id}{GRAPH}", *_calls(folder, id))}

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
    names = set(folder.names())
    for name in names:
        if name.endswith(".new") or (name.endswith(CALL) and f"{name.partition('.')[0]}{GRAPH}" not in names):
            with suppress(FileNotFoundError):
                if time.time() - folder.about(name).st_mtime > _ABANDONED:
                    folder.remove(name)


def _discard(folder: Folder, id: str) -> None:
    for name in (f"{id}{GRAPH}", f"{id}{KEY}", f"{id}{HITS}", *_calls(folder, id)):
        folder.remove(name)


def _calls(folder: Folder, id: str) -> list[str]:
    """The files of the calls that lead to the graph of an entry."""
    return [name for name in folder.names() if name.startswith(f"{id}.") and name.endswith(CALL)]


def _call(folder: Folder, name: str) -> tuple[str, bytes]:
    """The key of a call as text, and what is stored of it."""
    content = unsealed(folder.read(name))
    end = _LENGTH + int.from_bytes(content[:_LENGTH], "big")
    return zlib.decompress(content[_LENGTH:end]).decode(), content[end:]


def _entries(folder: Folder) -> Iterator[Entry]:
    names, calls = set(folder.names()), defaultdict[str, list[str]](list)
    for name in names:
        if name.endswith(CALL):
            calls[name.partition(".")[0]].append(name)
    for name in names:
        if not name.endswith(GRAPH) or name.startswith("."):
            continue
        id = name.removesuffix(GRAPH)
        with suppress(FileNotFoundError):  # another process removes it
            graph = folder.about(name)
            others = [other for other in (f"{id}{KEY}", *calls.get(id, ())) if other in names]
            size = graph.st_size + sum(folder.about(other).st_size for other in others)
            hits = folder.about(f"{id}{HITS}") if f"{id}{HITS}" in names else None
            used = max(graph.st_mtime, hits.st_mtime if hits else 0.0)
            yield Entry(id, size, graph.st_mtime, used, hits.st_size if hits else 0)


def _key(folder: Folder, id: str) -> Key | None:
    with suppress(*_UNREADABLE):
        return Key.from_json(zlib.decompress(unsealed(folder.read(f"{id}{KEY}"))).decode())
    return None


def _key_of_call(folder: Folder, name: str) -> Key | None:
    with suppress(*_UNREADABLE):
        return Key.from_json(_call(folder, name)[0])
    return None
