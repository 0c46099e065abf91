"""The store: compiled graphs as files that one process leaves for the next, and as one file for another machine.

    <cache directory>/graphs/
        <function>-<key>.key      the key, part by part, as text: what `graphex cache` shows and compares
        <function>-<key>.graph    the artefact
        <function>-<key>.hits     one byte for each time it was loaded
        <function>-<key>.<key of a call>.call    a call of the backend that leads to this graph (`graphex.cache.warm`)

Files are sealed by a hash, written as a whole, and read only if no other user can have written them (`graphex.env`).
Two processes that write one entry write the same. Over the limit, the entries that were not used for the longest time
are removed.

An archive has stored graphs in one file, for another machine of the same kind:

    graphs.tar.gz      78f9ac01-5ebf9e7b26cbf558.key, 78f9ac01-5ebf9e7b26cbf558.graph, ...

A graph that is loaded runs code that stands in its file, so an archive is read only where a user asks for it, and what
it holds is said first. Names, sizes and hashes are checked before anything is written; links and folders are refused.
"""

from __future__ import annotations

import io
import re
import tarfile
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

from graphex.cache.keys import CacheKey
from graphex.env import (
    LARGEST,
    Folder,
    UntrustedError,
    cache_directory,
    cache_limit,
    open_folder,
    sealed,
    unsealed,
    written_whole,
)
from graphex.errors import InputError

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


class CacheStore:
    """The graphs that are stored in a folder. Methods raise OSError where it cannot be used, saying why."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or cache_directory() / FOLDER

    def _open(self) -> AbstractContextManager[Folder]:
        return open_folder(self.path.parent, self.path.name)

    def load(self, key: CacheKey) -> bytes | None:
        """The artefact of a key; None without one. Raises ValueError if it is damaged."""
        try:
            return self.artefact(name_of(key))
        except FileNotFoundError:
            return None

    def note_hit(self, id: str) -> None:
        """Count a use. A cache that cannot be written to serves all the same."""
        with suppress(OSError), self._open() as folder:
            folder.append(f"{id}{HITS}", b".")

    def save(self, key: CacheKey, artefact: bytes) -> int:
        """Write an entry, and make room for it; its size."""
        content, about = sealed(artefact), sealed(zlib.compress(key.to_json().encode(), 1))
        if len(content) > LARGEST:
            raise OSError(f"it has {len(content)} bytes, more than the {LARGEST} that are stored")
        with self._open() as folder:
            folder.replace(f"{name_of(key)}{KEY}", about)
            folder.replace(f"{name_of(key)}{GRAPH}", content)
            make_room(folder, cache_limit(), but=name_of(key))
        return len(content) + len(about)

    def load_calls(self, key: CacheKey) -> list[tuple[str, bytes]]:
        """The entries of the graphs that a call of the backend leads to, for some sizes each, and what is stored of it.

        Raises ValueError if one is damaged.
        """
        with self._open() as folder:
            names = sorted(name for name in folder.names() if name.endswith(f".{key.digest}{CALL}"))
            return [(name.partition(".")[0], _call(folder, name)[1]) for name in names]

    def save_call(self, id: str, key: CacheKey, call: bytes) -> None:
        """Write a call of the backend that leads to the graph of this entry."""
        about = zlib.compress(key.to_json().encode(), 1)
        with self._open() as folder:
            content = sealed(len(about).to_bytes(_LENGTH, "big") + about + call)
            folder.replace(f"{id}.{key.digest}{CALL}", content)

    def calls_alike(self, key: CacheKey) -> list[CacheKey]:
        """The latest keys of calls of the same function."""
        with self._open() as folder:
            names = [name for name in folder.names() if name.startswith(f"{key.group}-") and name.endswith(CALL)]
            latest = sorted(names, key=lambda name: -folder.about(name).st_mtime)
            return [found for name in latest[:_COMPARED] if (found := _key_of_call(folder, name)) is not None]

    def discard(self, id: str) -> None:
        """Remove an entry."""
        with self._open() as folder:
            _discard(folder, id)

    def alike(self, key: CacheKey) -> list[CacheKey]:
        """The latest keys of the same function."""
        with self._open() as folder:
            latest = sorted(_entries(folder), key=lambda entry: -entry.made)
            names = [entry.id for entry in latest if entry.id.startswith(f"{key.group}-")]
            return [found for name in names[:_COMPARED] if (found := _key(folder, name)) is not None]

    def entries(self) -> list[Entry]:
        """Everything that is stored, the latest use first."""
        with self._open() as folder:
            return sorted(_entries(folder), key=lambda entry: -entry.used)

    def key(self, id: str) -> CacheKey | None:
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


def name_of(key: CacheKey) -> str:
    return f"{key.group}-{key.digest}"


def make_room(folder: Folder, limit: int, but: str) -> None:
    """Remove the entries that were not used for the longest time until the rest fits, all but one, and what killed
    processes left half done.
    """
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
        if not (_NAME.fullmatch(name) and name.endswith(GRAPH)):  # somebody else's
            continue
        id = name.removesuffix(GRAPH)
        with suppress(FileNotFoundError):  # another process removes it
            graph = folder.about(name)
            others = [other for other in (f"{id}{KEY}", *calls.get(id, ())) if other in names]
            size = graph.st_size + sum(folder.about(other).st_size for other in others)
            hits = folder.about(f"{id}{HITS}") if f"{id}{HITS}" in names else None
            used = max(graph.st_mtime, hits.st_mtime if hits else 0.0)
            yield Entry(id, size, graph.st_mtime, used, hits.st_size if hits else 0)


def _key(folder: Folder, id: str) -> CacheKey | None:
    with suppress(*_UNREADABLE):
        return CacheKey.from_json(zlib.decompress(unsealed(folder.read(f"{id}{KEY}"))).decode())
    return None


def _key_of_call(folder: Folder, name: str) -> CacheKey | None:
    with suppress(*_UNREADABLE):
        return CacheKey.from_json(_call(folder, name)[0])
    return None


# -- archives ----------------------------------------------------------------------------------------------------------


_WRITE_ONE = "`graphex cache export` writes an archive"
_NAME = re.compile(r"[0-9a-f]{8}-[0-9a-f]{32}(?:\.key|\.graph|\.[0-9a-f]{32}\.call)")


def write_archive(path: Path, store: CacheStore, ids: Iterable[str]) -> int:
    """Write some entries to an archive; its size."""
    with written_whole(path) as file, tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as archive:
        for id in ids:
            for name, content in store.files(id).items():
                about = tarfile.TarInfo(name)
                about.size, about.mode = len(content), 0o600
                archive.addfile(about, io.BytesIO(content))
    return path.stat().st_size


def read_archive(path: Path) -> dict[str, bytes]:
    """The files of an archive, checked. Raises InputError for one that holds anything else than stored graphs."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path, mode="r:gz") as archive:
            for member in archive:
                if not member.isreg() or not _NAME.fullmatch(member.name) or member.size > LARGEST:
                    raise InputError(
                        f"'{path}' holds '{member.name}', which is no stored graph. Nothing was imported; {_WRITE_ONE}."
                    )
                file = archive.extractfile(member)
                assert file is not None
                found[member.name] = file.read(LARGEST)
                unsealed(found[member.name])
    except (tarfile.TarError, EOFError, zlib.error, ValueError, OSError) as error:
        raise InputError(f"'{path}' cannot be read as an archive of stored graphs: {error}; {_WRITE_ONE}.") from error
    for name in found:
        other = name.partition(".")[0] + (KEY if name.endswith(GRAPH) else GRAPH)
        if other not in found:
            raise InputError(f"'{path}' holds '{name}' without '{other}'. Nothing was imported; {_WRITE_ONE}.")
    return found


def keys_of(files: dict[str, bytes]) -> dict[str, CacheKey]:
    """The keys of the graphs in an archive, by their ids."""
    return {
        name.removesuffix(KEY): CacheKey.from_json(zlib.decompress(unsealed(content)).decode())
        for name, content in files.items()
        if name.endswith(KEY)
    }


def store_archive(files: dict[str, bytes], store: CacheStore) -> None:
    """Write the files of an archive to the store: keys first, as the store itself does."""
    for name in sorted(files, key=lambda name: name.endswith(GRAPH)):
        store.put(name, files[name])
