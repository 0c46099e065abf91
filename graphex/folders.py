"""Files: where graphex keeps what the next process can use, names of ranks, and writing a file as a whole."""

from __future__ import annotations

import os
import re
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

DIRECTORY = "GRAPHEX_CACHE_DIR"

# What launchers tell a process before torch.distributed is initialised (if it ever is): torchrun, Open MPI, MPICH,
# MVAPICH, Slurm.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)


def cache_directory() -> Path:
    """$GRAPHEX_CACHE_DIR, or graphex in $XDG_CACHE_HOME or ~/.cache, or one for this user where temporary files are.

    Raises OSError where there is none of these.
    """
    if chosen := os.environ.get(DIRECTORY):
        return Path(chosen).absolute()
    above = Path(os.environ.get("XDG_CACHE_HOME") or "")
    if above.is_absolute():  # the specification has others ignored
        return above / "graphex"
    try:
        return Path.home().absolute() / ".cache" / "graphex"
    except (RuntimeError, KeyError):  # this user has no home
        user = os.geteuid() if hasattr(os, "geteuid") else "user"
        return Path(tempfile.gettempdir()) / f"graphex-{user}"


def rank_and_size() -> tuple[int, int]:
    """This process's rank and how many there are: (0, 1) alone. Never initialises torch.distributed."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    for rank_name, size_name in _LAUNCHERS:
        with suppress(ValueError):  # of a variable that is not there, or no number
            rank = int(os.environ.get(rank_name, ""))
            size = int(os.environ.get(size_name) or rank + 1)
            if 0 <= rank < size:
                return rank, size
    return 0, 1


def path_of_rank(path: Path) -> Path:
    """``report_rank_3.html`` for ``report.html`` where several ranks would write to it; else the path as it is.

    A name that ends in the number of the rank was made for it and stays.
    """
    rank, size = rank_and_size()
    numbers = re.findall(r"\d+", path.stem)
    is_named = bool(numbers) and int(numbers[-1]) == rank
    return path if size == 1 or is_named else path.with_name(f"{path.stem}_rank_{rank}{path.suffix}")


def write_text(path: Path, text: str) -> None:
    """Write a file so that whoever reads it sees what it was or what it is now, never a part."""
    with written_whole(path) as file:
        file.write(text.encode(errors="backslashreplace"))  # a lone surrogate is no UTF-8


def write_named(path: Path, text: str) -> None:
    """`write_text` to a path that the user gave: a link stays one, and the file behind it is written.

    A terminal or a pipe is written to as it is, and so is a file in a folder that takes no new ones.
    """
    target = path.resolve() if path.is_file() else path
    if path.exists() and not (path.is_file() and os.access(target.parent, os.W_OK)):
        path.write_text(text, encoding="utf-8")
    else:
        write_text(target, text)


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file beside `path` that takes its place once it is written."""
    beside = path.with_name(f".{path.name[:100]}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with beside.open("xb") as file:
            yield file
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
