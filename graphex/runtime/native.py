"""The check of a replay in C++: compiled once on each machine, loaded once in each process.

The check looks at hundreds of inputs in every call. Its C++ is compiled on the machine it runs on, in a thread while
the first graph is still being made (`load_in_background`):

    $GRAPHEX_CACHE_DIR or ~/.cache/graphex
        native/fits-5f1c0a52e2c1.cpython-312-x86_64-linux-gnu.so.sealed     a shared object behind its hash

Without a compiler or Python's headers the check runs in Python: about 19 us for 300 inputs instead of 2. The C++ has
no header of torch in it, which would take most of a minute to compile. It calls torch's own function for the address
of a tensor, as Inductor's generated code does.

A shared object is code, so one is loaded only if this user (or root) wrote it to a place where no other user can write,
and if its content has the hash that was written with it. Otherwise it is compiled again, with one warning. It is loaded
from a copy in a new folder, so that no other process can change it after the check.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from graphex.env import cache_directory, open_folder, sealed, unsealed
from graphex.errors import one_line, warn_user
from graphex.records import FellBack, Journal
from graphex.torch_private.memory import tensor_begin

Question = Callable[[], object]
Places = tuple[bytes, bytes, bytes, bytearray]
Fits = Callable[[tuple[Question, ...], tuple[object, ...], bytes, bytes, bytes, bytearray, Sequence[Any]], bool]
Say = Callable[[str, str], None]

fits: Fits | None = None
"""`fits(questions, answers, *places, args)`: whether a call is like the one before. See `fits.cpp`, `fast_replay`."""

_SOURCE = Path(__file__).with_name("fits.cpp")
_FLAGS = ("-O2", "-std=c++17", "-shared", "-fPIC")
_PATIENCE = 60.0  # seconds for a compiler


def _warn(what: str, reason: str) -> None:
    warn_user(f"graphex: {what}: {reason}")


def load(say: Say = _warn) -> None:
    """Compile, if that was not done before, and use it from now on. Raises OSError or ImportError, saying why not.

    `say` is told what is wrong with the cache; it works without one.
    """
    global fits
    if tensor_begin is None:
        raise OSError("this torch does not say how to read the address of a tensor")
    module = _module(_SOURCE, say)
    module.use(tensor_begin)
    fits = module.fits


def _module(source: Path, say: Say) -> ModuleType:
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
    about = (source.read_text(), platform.machine(), *_FLAGS)
    digest = hashlib.sha256("\0".join(about).encode()).hexdigest()[:12]
    name = f"{source.stem}-{digest}{suffix}.sealed"
    module, reason = _kept(name, source.stem)
    if module is None:
        if reason:
            say("compiled code in the cache is not used, and is compiled again", reason)
        made = _compiled(source)
        module = _loaded(source.stem, made)
        try:
            with open_folder(cache_directory(), "native") as folder:
                folder.replace(name, sealed(made))
        except OSError as error:
            if not reason:
                say("compiled code is not kept, and is compiled again by every process", str(error))
    return module


def _kept(name: str, module: str) -> tuple[ModuleType | None, str]:
    """The module that another process left, or why there is none to rely on; no reason where there is just none."""
    try:
        with open_folder(cache_directory(), "native") as folder:
            content = folder.read(name)
        return _loaded(module, unsealed(content)), ""
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError, ImportError) as error:
        return None, str(error)


def _loaded(name: str, content: bytes) -> ModuleType:
    """A module from the content of a shared object. Its file is gone once it is loaded."""
    problem: Exception | None = None
    for folder in _private_folders():
        try:
            path = folder / f"{name}.so"
            path.write_bytes(content)
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        except (OSError, ImportError) as error:
            problem = error  # the disk may be full, or nothing on it may be run
        else:
            return module
    raise ImportError(f"it cannot be loaded: {problem}")


def _compiled(source: Path) -> bytes:
    for folder in _private_folders():
        made = folder / f"{source.stem}.so"
        headers = sysconfig.get_paths()["include"]
        _run([_compiler(), *_FLAGS, f"-I{headers}", str(source), "-o", str(made)])
        return made.read_bytes()
    raise OSError("there is no folder for temporary files that can be written to")


def _private_folders() -> Iterator[Path]:
    """New folders of this user alone, gone afterwards: among temporary files, then in the cache."""
    for above in (_temporary, _in_cache):
        try:
            folder = tempfile.TemporaryDirectory(dir=above(), prefix="graphex-", ignore_cleanup_errors=True)
        except OSError:
            continue
        with folder as name:
            yield Path(name)


def _temporary() -> Path:
    return Path(tempfile.gettempdir())


def _in_cache() -> Path:
    with open_folder(cache_directory(), "native") as folder:
        return folder.path


def _run(command: list[str]) -> None:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{command[0]} took longer than {_PATIENCE:.0f} seconds") from error
    if ended.returncode:
        lines = [line for line in ended.stderr.splitlines() if "error" in line]
        raise OSError(f"{command[0]} failed: {lines[0] if lines else ended.stderr.strip()}")


def _compiler() -> str:
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if not found:
        raise FileNotFoundError("there is no C++ compiler")
    return found


# -- while the first graph is being made -------------------------------------------------------------------------------


_beginning = threading.Lock()
_is_begun = False


def load_in_background(journal: Journal) -> None:
    """Load the check in a thread, once in a process. After a failure, which is on record, the check runs in Python."""
    global _is_begun
    with _beginning:
        if not _is_begun:
            _is_begun = True
            about = "graphex: compiling C++"
            threading.Thread(target=_load, args=(journal,), name=about, daemon=True).start()


def _load(journal: Journal) -> None:
    try:
        load(lambda what, reason: journal.fall_back(FellBack("-", what, reason)))
    except Exception as error:
        journal.fall_back(FellBack("-", "replays are checked in Python", one_line(error)), warn=False)
