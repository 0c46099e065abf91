"""The guard of a replay: whether a call is like the one before, so that no key is made and no store is searched.

    asked of torch    stream,     profiler_enabled, modes_enabled, dispatch_modes, transform, dual_level,
    answers           as before,  False,            False,         0,              None,      -1,
                      the switches that choose kernels ..., device settings, is_capturing
                      as they were when the key was made,   as before,       False

A tensor keeps its identity when its memory is replaced (`parameter.data = ...`), so the guard asks torch for the
address of every input that was captured by address. That is most of what a replay costs the host: one call of C++
(`fits.cpp`) where that is loaded, 2 us for 300 inputs, else Python, which needs 19 us and takes inputs in runs of
neighbours. Frozen parameters only have to be the same objects.

The C++ is compiled once on each machine, in a thread while the first graph is still being made (`load_in_background`),
and loaded once in each process:

    $GRAPHEX_CACHE_DIR or ~/.cache/graphex
        native/fits-5f1c0a52e2c1.cpython-312-x86_64-linux-gnu.so.sealed     a shared object behind its hash

It has no header of torch in it, which would take most of a minute to compile. It calls torch's own function for the
address of a tensor, as Inductor's generated code does. Where there is no compiler, the guard runs in Python.

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
import weakref
from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from graphex.device import Device
from graphex.env import cache_directory, open_folder, sealed, unsealed
from graphex.errors import one_line, warn_user
from graphex.records import FellBack, Journal
from graphex.torch_private.cuda import Switch, states
from graphex.torch_private.dynamo import dispatch_modes, dual_level, modes_enabled, profiler_enabled, transform
from graphex.torch_private.memory import tensor_begin

Picker = Callable[[Sequence[Any]], Sequence[Any]]
Guard = Callable[[Sequence[Any]], bool]
Values = Callable[[Sequence[Any]], tuple[Any, ...]]
Question = Callable[[], object]
Places = tuple[bytes, bytes, bytes, bytearray]
Fits = Callable[[tuple[Question, ...], tuple[object, ...], bytes, bytes, bytes, bytearray, Sequence[Any]], bool]
Say = Callable[[str, str], None]

fits: Fits | None = None
"""`fits(questions, answers, *places, args)`: whether a call is like the one before. See `fits.cpp`."""

_NOTHING: frozenset[int] = frozenset()


# -- addresses ---------------------------------------------------------------------------------------------------------


class Addresses:
    """The addresses of some of the inputs, and the identity of the `frozen` ones, in one call."""

    def __init__(self, indices: Sequence[int], args: Sequence[Any], frozen: Sequence[int] = ()) -> None:
        self.indices = sorted(indices)
        self._runs = runs(self.indices)
        self.known = self._of(args)
        self._frozen, self._pick_frozen = frozenset(frozen), picker(frozen)
        identities = self._identities = bytearray(self._identities_of(args))
        # A new object may get the place in memory of one that is gone.
        self._watched = [weakref.ref(each, partial(_forget, identities)) for each in self._pick_frozen(args)]
        addresses = array("q", self.known).tobytes()
        self.packed: Places = _packed(self.indices), addresses, _packed(frozen), identities

    def moved(self, args: Sequence[Any]) -> frozenset[int]:
        """The inputs that are elsewhere in this call."""
        if fits is not None and fits((), (), *self.packed, args):
            return _NOTHING
        if self._frozen and self._identities_of(args) != self._identities:
            return self._frozen
        now = self._of(args)
        if now == self.known:
            return _NOTHING
        places = zip(self.indices, now, self.known, strict=True)
        return frozenset(index for index, address, before in places if address != before)

    def _of(self, args: Sequence[Any]) -> list[int]:
        found: list[int] = []
        for run in self._runs:
            found += map(Tensor.data_ptr, args[run])
        return found

    def _identities_of(self, args: Sequence[Any]) -> bytes:
        return array("q", map(id, self._pick_frozen(args))).tobytes()


def _packed(numbers: Sequence[int]) -> bytes:
    return array("i", numbers).tobytes()


def _forget(identities: bytearray, gone: object) -> None:
    """Zero the identities when one of the objects dies: no object is at address 0, so no later one is taken for it."""
    identities[:] = bytes(len(identities))


def picker(indices: Sequence[int]) -> Picker:
    """Several items of a list at once, always as a sequence."""
    if len(indices) > 1:
        return itemgetter(*indices)
    if not indices:
        return lambda args: ()
    (only,) = indices
    return lambda args: (args[only],)


def runs(indices: Sequence[int]) -> list[slice]:
    """Sorted indices as slices.

    [0, 2, 4, 5, 6]   ->   [0:1], [2:3], [4:7]
    """
    found: list[slice] = []
    for index in indices:
        if found and found[-1].stop == index:
            found[-1] = slice(found[-1].start, index + 1)
        else:
            found.append(slice(index, index + 1))
    return found


# -- guards ------------------------------------------------------------------------------------------------------------


class CaptureKey(NamedTuple):
    """The key of a call, which tells one captured graph of a program from another (see `capture_plan`).

    `switches` choose kernels, less those of libraries that the graph does not call; `settings` are the device's.
    """

    values: tuple[Any, ...]
    switches: tuple[object, ...]
    settings: Hashable


_WATCHERS = (profiler_enabled, modes_enabled, dispatch_modes, transform, dual_level)
_UNWATCHED = (False, False, 0, None, -1)


class ReplayGuards:
    """The questions that are asked of torch and of the device in every call of a graph."""

    def __init__(self, device: Device, switches: tuple[Switch, ...]) -> None:
        self._device, self._switches = device, switches
        self._has_settings = type(device).settings is not Device.settings

    def questions(self, stream: Any) -> tuple[Question, ...]:
        """The questions for a call on a stream that an earlier call was made on."""
        device = self._device
        settings = (device.settings,) if self._has_settings else ()
        captures = (device.is_capturing,) if device.can_capture_on(stream) else ()
        return (device.stream, *_WATCHERS, *self._switches, *settings, *captures)

    def answers(self, key: CaptureKey, stream: Any) -> tuple[object, ...]:
        """The answers in a call of this key, on this stream, that no mode sees and that is not being captured."""
        settings = (key.settings,) if self._has_settings else ()
        captures = (False,) if self._device.can_capture_on(stream) else ()
        return (stream, *_UNWATCHED, *key.switches, *settings, *captures)


def make_guard(
    guards: ReplayGuards, key: CaptureKey, stream: Any, places: Addresses, values: Values | None = None
) -> Guard:
    """Whether a call is like one of this key with its inputs at these places; `values` reads the key's, if they vary.

    The answers are those that the key was made of: the switches may have been changed since, by any thread.
    """
    asked, answers = guards.questions(stream), guards.answers(key, stream)
    guard: Guard = (
        partial(_fits_in_python, asked, answers, places)
        if fits is None
        else partial(fits, asked, answers, *places.packed)
    )
    if values is None:
        return guard
    before = key.values
    return lambda args: values(args) == before and guard(args)


def _fits_in_python(
    questions: tuple[Question, ...], answers: tuple[object, ...], places: Addresses, args: Sequence[Any]
) -> bool:
    if fits is not None:
        return False  # it was loaded meanwhile, and the next guard uses it
    try:
        return not places.moved(args) and states(questions) == answers
    except Exception:  # the search that follows asks again, and raises it
        return False


# -- in C++ ------------------------------------------------------------------------------------------------------------


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
    module, reason = _from_cache(name, source.stem)
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


def _from_cache(name: str, module: str) -> tuple[ModuleType | None, str]:
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
