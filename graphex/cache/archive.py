"""Archives: stored graphs in one file, for another machine of the same kind.

    graphs.tar.gz      78f9ac01-5ebf9e7b26cbf558.key, 78f9ac01-5ebf9e7b26cbf558.graph, ...

A graph that is loaded runs code that stands in its file, so an archive is read only where a user asks for it, and what
it holds is said first. Names, sizes and hashes are checked before anything is written; links and folders are refused.
"""

from __future__ import annotations

import io
import re
import tarfile
import zlib
from collections.abc import Iterable
from pathlib import Path

from graphex.cache.keys import Key
from graphex.cache.store import GRAPH, KEY, Store
from graphex.env import LARGEST, unsealed, written_whole
from graphex.errors import InputError

_NAME = re.compile(r"[0-9a-f]{8}-[0-9a-f]{32}(?:\.key|\.graph|\.[0-9a-f]{32}\.call)")


def write_archive(path: Path, store: Store, ids: Iterable[str]) -> int:
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
                    raise InputError(f"'{path}' holds '{member.name}', which is no stored graph. Nothing was imported.")
                file = archive.extractfile(member)
                assert file is not None
                found[member.name] = file.read(LARGEST)
                unsealed(found[member.name])
    except (tarfile.TarError, EOFError, zlib.error, ValueError, OSError) as error:
        raise InputError(f"'{path}' cannot be read as an archive of stored graphs: {error}.") from error
    for name in found:
        other = name.partition(".")[0] + (KEY if name.endswith(GRAPH) else GRAPH)
        if other not in found:
            raise InputError(f"'{path}' holds '{name}' without '{other}'. Nothing was imported.")
    return found


def keys_of(files: dict[str, bytes]) -> dict[str, Key]:
    """The keys of the graphs in an archive, by their ids."""
    return {
        name.removesuffix(KEY): Key.from_json(zlib.decompress(unsealed(content)).decode())
        for name, content in files.items()
        if name.endswith(KEY)
    }


def store_archive(files: dict[str, bytes], store: Store) -> None:
    """Write the files of an archive to the store: keys first, as the store itself does."""
    for name in sorted(files, key=lambda name: name.endswith(GRAPH)):
        store.put(name, files[name])
