"""The process's surroundings: environment variables, folders and files, the garbage collector, a line on the terminal.

Environment variables switch graphex in a program that is not to be changed. A file is written as a whole: a reader sees
the old content or the new, never a part. Files that one process leaves for the next are in folders that no other user
can write to:

    with open_folder(cache_directory(), "native") as folder:
        folder.read("fits.so")          its bytes, if it is a plain file that only this user, or root, can have written
        folder.replace("fits.so", ...)  written as a whole
        with folder.lock("fits.lock"):  one process at a time

A folder is opened once, its owner and mode are asked of the open descriptor, and files are opened relative to it,
without following links: nothing can be swapped in between. A folder or file of another user, or that others may write
to, is refused. `sealed` adds a hash to a file, by which `unsealed` notices one that was cut off or damaged. The hash
proves nothing about the writer; owner and mode do. A `ChoiceFile` has what several processes measure or find out.
"""

from __future__ import annotations

import errno
import gc
import hashlib
import itertools
import json
import os
import re
import secrets
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from graphex.errors import warn_user

# Environment variables


DISABLE, TUNING, LEAN_IMPORTS = "GRAPHEX_DISABLE", "GRAPHEX_TUNING", "GRAPHEX_LEAN_IMPORTS"
REGIONS, CACHE, CACHE_MIB = "GRAPHEX_REGIONS", "GRAPHEX_CACHE", "GRAPHEX_CACHE_MIB"
_MOST_MIB = 2048
_YES, _NO = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")
_TUNING = {"": "on", "1": "on", "on": "on", "0": "off", "off": "off", "again": "again"}


def why_off() -> str:
    """Why GRAPHEX_DISABLE turns graphex off; empty if it does not. Any value other than a no counts as yes."""
    given = os.environ.get(DISABLE, "")
    return "" if given.lower() in _NO else f"{DISABLE}={given} is set"


def lean_imports() -> bool:
    """Whether torch's pattern matcher may be imported without the rest of Inductor."""
    return _is_on(LEAN_IMPORTS)


def regions_enabled() -> bool:
    """Whether regions of a graph are compiled; the option `regions` can still say no."""
    return _is_on(REGIONS)


def cache_enabled() -> bool:
    """Whether compiled graphs are kept for the next process; the option `cache` can still say no.

    Warns of a limit that is no number: a process that only loads would not ask for it.
    """
    cache_limit()
    return _is_on(CACHE)


def cache_asked_for() -> bool:
    """Whether GRAPHEX_CACHE=on is set, which devices other than CPUs and CUDA GPUs need for graphs to be kept."""
    return bool(os.environ.get(CACHE)) and cache_enabled()


def _is_on(switch: str) -> bool:
    """Whether a switch is on: by default, and unless the environment has a no for it. An empty value is none."""
    return _means_on(switch, os.environ.get(switch) or "on")


@cache
def _means_on(switch: str, given: str) -> bool:
    if given.lower() not in (*_YES, *_NO):
        warn_user(f"graphex: {switch}={given} is neither on nor off, and counts as on")
    return given.lower() not in _NO


def cache_limit() -> int:
    """The bytes that stored graphs may take."""
    return _mebibytes(os.environ.get(CACHE_MIB, "")) * 2**20


@cache
def _mebibytes(given: str) -> int:
    if given and not given.isdecimal():
        warn_user(f"graphex: {CACHE_MIB}={given} is no whole number, and {_MOST_MIB} holds instead")
    return int(given) if given.isdecimal() else _MOST_MIB


def tuning() -> str:
    """Whether kernels may be measured: `on`, `off`, or `again`."""
    return _tuning(os.environ.get(TUNING, ""))


@cache
def _tuning(given: str) -> str:
    found = _TUNING.get(given.lower())
    if found is None:
        warn_user(f"graphex: {TUNING}={given} is none of on, off and again, and counts as on")
    return found or "on"


# Folders, ranks, and files written as a whole


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
    """Write a file so that a reader sees its old content or the new, never a part."""
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


@contextmanager
def numbered(start: str, end: str) -> Iterator[BinaryIO]:
    """A new file `<start><number><end>`, with the first number that is free: other processes may be counting too."""
    for number in itertools.count():
        path = Path(f"{start}{number}{end}")
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            continue
        with written_whole(path) as file:
            yield file
        return


# Files for the next process


try:
    import fcntl
except ImportError:  # no such locks on this system: what two processes write at once may be lost
    fcntl = None  # type: ignore[assignment]

LARGEST = 64 * 2**20  # bytes of a file that is read
PATIENCE = 10.0  # seconds for a lock that another process holds
_PAUSE = 0.01
_ROOT = 0  # can write anything anyway, and may have prepared a cache for everybody


class UntrustedError(OSError):
    """A file or folder is not as this process, or another one of its user, left it."""


class Folder:
    """An open folder. Names are those of files directly in it."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self.path = path
        self._descriptor = descriptor

    def read(self, name: str) -> bytes:
        """The content of a file; FileNotFoundError without one, UntrustedError if another user may have written it."""
        with self._opened(name, os.O_RDONLY) as descriptor:
            size = os.fstat(descriptor).st_size
            if size > LARGEST:
                raise UntrustedError(f"{self.path / name} has {size} bytes, more than graphex ever writes")
            with os.fdopen(os.dup(descriptor), "rb") as file:
                return file.read(LARGEST)

    def replace(self, name: str, content: bytes) -> None:
        """Write a file as a whole, whatever stands in its place."""
        temporary = f".{name}.{secrets.token_hex(8)}.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o600, dir_fd=self._descriptor)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            os.replace(temporary, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=self._descriptor)
            raise

    def append(self, name: str, content: bytes) -> None:
        """Add to the end of a file, which is made if need be; of two processes at once none loses what it adds."""
        with self._opened(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as descriptor:
            os.write(descriptor, content)

    def names(self) -> list[str]:
        return os.listdir(self._descriptor)

    def about(self, name: str) -> os.stat_result:
        """Size and times of a file; FileNotFoundError without one."""
        return os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)

    def remove(self, name: str) -> None:
        """Remove a file, of any owner; another process may have been faster."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._descriptor)

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Hold the lock of this name. Anything else than a plain file in the place of the lock file is removed."""
        if fcntl is None:
            yield
            return
        flags = os.O_RDWR | os.O_CREAT
        try:
            opened = self._open(name, flags)
        except UntrustedError as error:
            warn_user(f"graphex: a lock was taken away and made anew: {error}")
            os.unlink(name, dir_fd=self._descriptor)
            opened = self._open(name, flags | os.O_EXCL)
        try:
            _wait_for(opened, self.path / name)
            yield
        finally:
            os.close(opened)  # which gives the lock back

    @contextmanager
    def _opened(self, name: str, flags: int) -> Iterator[int]:
        descriptor = self._open(name, flags)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _open(self, name: str, flags: int) -> int:
        """O_NONBLOCK: a pipe that stands there must not hang the process before it is seen to be one."""
        path = self.path / name
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(name, flags, 0o600, dir_fd=self._descriptor)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EMLINK):
                raise UntrustedError(f"{path} is a link") from error
            if error.errno in (errno.ENXIO, errno.EISDIR, errno.ENODEV, errno.EOPNOTSUPP):
                raise UntrustedError(f"{path} is no plain file") from error
            raise
        return _checked(descriptor, path, stat.S_ISREG, "no plain file")


@contextmanager
def open_folder(root: Path, *names: str) -> Iterator[Folder]:
    """The folder `root/names`, made if it is not there, for this user alone. Raises OSError, saying why not.

    `root` may be reached through links, since the user named it; the folders below it may not.
    """
    if not hasattr(os, "geteuid"):
        raise UntrustedError("this system does not say who a file belongs to")
    try:
        descriptor = _descended(root, names)
    except ValueError as error:  # a NUL in the name
        raise OSError(f"{os.fspath(root)!r} cannot be the name of a folder: {error}") from error
    try:
        yield Folder(descriptor, root.joinpath(*names))
    finally:
        os.close(descriptor)


def _descended(root: Path, names: tuple[str, ...]) -> int:
    if not root.exists():
        os.makedirs(root.parent, mode=0o700, exist_ok=True)
    path, descriptor = root, _entered(os.fspath(root), root, follow=True)
    for name in names:
        path, above = path / name, descriptor
        try:
            descriptor = _entered(name, path, above)
        finally:
            os.close(above)
    return descriptor


def _entered(name: str, path: Path, above: int | None = None, *, follow: bool = False) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        try:
            descriptor = os.open(name, flags, dir_fd=above)
        except FileNotFoundError:
            with suppress(FileExistsError):  # another process was faster
                os.mkdir(name, 0o700, dir_fd=above)
            descriptor = os.open(name, flags, dir_fd=above)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise UntrustedError(f"{path} is no folder") from error
        raise
    return _checked(descriptor, path, stat.S_ISDIR, "no folder")


def _checked(descriptor: int, path: Path, is_right: Callable[[int], bool], otherwise: str) -> int:
    """The descriptor, if no other user can write to its file or folder. Closes it and raises UntrustedError if not."""
    found = os.fstat(descriptor)
    reason = ""
    if not is_right(found.st_mode):
        reason = f"{path} is {otherwise}"
    elif found.st_uid not in (os.geteuid(), _ROOT):
        reason = f"{path} belongs to another user (number {found.st_uid})"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        reason = f"others may write to {path} (chmod go-w would change that)"
    if reason:
        os.close(descriptor)
        raise UntrustedError(reason)
    return descriptor


def _wait_for(descriptor: int, path: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise OSError(f"another process holds {path} for more than {PATIENCE:.0f} seconds") from error
            time.sleep(_PAUSE)


def sealed(content: bytes) -> bytes:
    """The content with its hash in front, for `unsealed` to check."""
    return hashlib.sha256(content).hexdigest().encode() + b"\n" + content


def unsealed(data: bytes) -> bytes:
    """The content of a sealed file. Raises ValueError if it was cut off or damaged."""
    seal, _, content = data.partition(b"\n")
    if seal != hashlib.sha256(content).hexdigest().encode():
        raise ValueError("its content is not what was written")
    return content


# Files of choices


Choices = dict[str, dict[str, dict[str, Any]]]  # kind -> signature -> {"name": what was chosen, "us": times}
_LONGEST = 1e12  # microseconds


def name_in_files(device: str) -> str:
    """`NVIDIA H200` -> `nvidia-h200`"""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


class ChoiceFile:
    """A JSON file of choices that processes share, and what they hold under: `conditions`, of which one is the device.

    A choice is added under a lock to what the file says then, and the file is replaced as a whole. One that cannot be
    read, that another user may have written, or that was written under other conditions, is as good as none: a warning
    says so once.
    """

    def __init__(
        self,
        conditions: Mapping[str, str],
        directory: Path | None = None,
        *,
        folder: str = "tuning",
        what: str = "measured choices",
        again: str = "measured",
    ) -> None:
        self.conditions = dict(conditions)
        digest = hashlib.sha256(json.dumps(self.conditions, sort_keys=True).encode()).hexdigest()[:12]
        self.name = f"{name_in_files(self.conditions['device'])}-{digest}.json"
        self._directory, self._in = directory, folder
        self._what, self._again = what, again
        self._has_warned = False

    @property
    def path(self) -> Path:
        return (self._directory or cache_directory() / self._in) / self.name

    def read(self) -> Choices:
        try:
            with self._folder() as folder:
                return self._read(folder)
        except OSError as error:
            self._warn(f"{self._what} cannot be looked up ({error}); set {DIRECTORY}")
            return {}

    def add(self, kind: str, signature: str, entry: dict[str, Any]) -> None:
        self.add_all({kind: {signature: entry}})

    def add_all(self, new: Choices) -> None:
        try:
            with self._folder() as folder, folder.lock(f"{self.name}.lock"):
                choices = self._read(folder)
                for kind, entries in new.items():
                    choices.setdefault(kind, {}).update(entries)
                text = json.dumps({**self.conditions, "choices": choices}, indent=1, sort_keys=True)
                folder.replace(self.name, text.encode())
        except OSError as error:
            self._warn(f"{self._what} cannot be kept ({error}); set {DIRECTORY}")

    def _folder(self) -> AbstractContextManager[Folder]:
        return open_folder(self._directory) if self._directory else open_folder(cache_directory(), self._in)

    def _read(self, folder: Folder) -> Choices:
        """The choices in the file; none, with a warning, if it cannot be relied on."""
        try:
            found, choices = choices_in(folder.read(self.name).decode())
            if any(found.get(name) != value for name, value in self.conditions.items()):
                raise ValueError("it was written under other conditions")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            path = folder.path / self.name
            self._warn(f"the {self._what} in {path} cannot be read and are {self._again} again: {error}")
            return {}
        return choices

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn_user(f"graphex: {text}")


def choices_in(text: str) -> tuple[dict[str, Any], Choices]:
    """Everything in a file of choices, and the choices. Raises ValueError for any other text."""
    try:
        found = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is not a file of choices") from error
    kinds = found.get("choices") if isinstance(found, dict) else None
    if not isinstance(kinds, dict) or not all(isinstance(kind, dict) for kind in kinds.values()):
        raise ValueError("it is not a file of choices")
    if not all(_is_entry(entry) for kind in kinds.values() for entry in kind.values()):
        raise ValueError("it is not a file of choices")
    return found, kinds


def _is_entry(entry: object) -> bool:
    """The name of a candidate, and times of some. What ships with graphex has no times."""
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        return False
    times = entry.get("us", {})
    return isinstance(times, dict) and all(_is_time(time) for time in times.values())


def _is_time(time: object) -> bool:
    """JSON may hold integers beyond all floats, infinity and NaN."""
    return type(time) in (int, float) and 0 <= time < _LONGEST  # type: ignore[operator]


# The garbage collector


MANY = 50_000  # objects made in a pause, beyond which it was a long one
_lock = threading.RLock()  # a finalizer may come in between, and pause it too
_pauses = 0  # of all threads
_is_ours_to_enable = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """The garbage collector waits inside. One that was off stays off; of several threads the last ends the pause.

    What is left after a long pause is old: Python would walk through it three times more, for a tenth of a cold start.
    """
    global _pauses, _is_ours_to_enable
    with _lock:
        if not _pauses:
            _is_ours_to_enable = gc.isenabled()
        _pauses += 1
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if is_over := not _pauses and _is_ours_to_enable:
                gc.enable()
        if is_over and gc.get_count()[0] > MANY:
            _make_old()


def _make_old() -> None:
    """Collect the garbage among objects that are not old, and count the others as old ones."""
    gc.collect(1)
    if not gc.get_freeze_count():  # else a program has objects that it wants to stay frozen
        gc.freeze()
        gc.unfreeze()


# A line on the terminal


SHOWN_AFTER = 2.0  # seconds
_shown_by: list[Callable[[str], None]] = []  # of the process: a script may compile in a thread of its own


@contextmanager
def progress_to(say: Callable[[str], None]) -> Iterator[None]:
    """Tell `say` what is going on while the block runs: a command with a line of progress shows it there."""
    _shown_by.append(say)
    try:
        yield
    finally:
        _shown_by.remove(say)


@contextmanager
def shown_on_terminal() -> Iterator[Callable[[str], None]]:
    """A line on a terminal about what is going on, from `SHOWN_AFTER` seconds on. Yields a function that is told."""
    if _shown_by:
        yield _shown_by[-1]
        return
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    status = Console(stderr=True).status("")
    begin = threading.Timer(SHOWN_AFTER, status.start)
    begin.daemon = True
    begin.start()
    try:
        yield lambda text: status.update(f"graphex: {text}")
    finally:
        begin.cancel()
        begin.join()
        status.stop()
