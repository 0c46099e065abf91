"""Compiled kernels: compiled in threads, or found in Triton's cache without Triton's own search for them.

Triton knows a kernel in its cache by a hash that takes long to compute in a process that starts: it reads all of its
own library (400 MB), parses the kernel and asks an assembler for its version. graphex keeps that hash under what it
knows of a kernel without any of these:

    $GRAPHEX_CACHE_DIR or ~/.cache/graphex
        kernels/nvidia-h200-5f1c0a52e2c1.json       {kernel: {hash of what it is compiled for: {"name": Triton's hash}}}

The file's own name stands for the versions of torch and Triton, for the files that both hashes depend on (sources of
kernels by their content, Triton's by size and time), and for the device. A kernel that Triton's cache does not have any
more is compiled. Where kernels are going to be, `start_triton` computes in a thread what Triton's own search needs.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from functools import cache
from inspect import getclosurevars, isfunction
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.errors import OutOfResources

from graphex.env import ChoiceFile, Choices, cache_directory, cache_enabled, collector_paused

MOST_THREADS = 16
OFTEN = 0.0005  # seconds that a thread works before it lets another one
LONGEST = 60.0  # seconds to wait for a thread


def compile_ahead(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Compile a kernel, in a thread inside of `compiling_in_threads`. One that is kept is read from Triton's cache."""
    keep_hashes(kernel)
    try:
        Context().run(_read, kernel, grid, arguments, options)  # Triton asks the context whether there are threads
    except _NotKeptError:
        wait_for_triton()
        kernel.warmup(*arguments, grid=grid, **options)


def _read(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    _only_kept.set(True)
    kernel.warmup(*arguments, grid=grid, **options)


# -- a call that only compiles -----------------------------------------------------------------------------------------


@dataclass
class Seen:
    """The launches of a call: the names of kernels, and the kind and signature of the choices that it asks for."""

    kernels: list[str] = field(default_factory=list)
    choices: list[tuple[str, str]] = field(default_factory=list)


class _Thread(threading.local):
    seen: Seen | None = None  # while kernels are only compiled


_thread = _Thread()


@contextmanager
def only_compiling() -> Iterator[Seen]:
    """`launch` compiles in this thread, and runs nothing. Yields what it would have run."""
    _thread.seen = seen = Seen()
    try:
        yield seen
    finally:
        _thread.seen = None


def seen() -> Seen | None:
    """The launches so far, while kernels are only compiled; None otherwise."""
    return _thread.seen


# -- Triton's hashes ---------------------------------------------------------------------------------------------------


_only_kept: ContextVar[bool] = ContextVar("only_kept", default=False)
_in_pool: ContextVar[bool] = ContextVar("in_pool", default=False)  # of threads: the end of all writes the table
_UNUSUAL = ("always_compile", "override", "dump_ir", "listener")  # settings with which Triton does more than to look


class _NotKeptError(Exception):
    """A kernel has to be compiled."""


class Compiler:
    """The compile function of graphex's kernels: Triton's own, behind a look at the hashes that are kept."""

    def __init__(self, compile: Callable[..., Any]) -> None:
        self.compile = compile

    def __call__(self, source: Any, target: Any = None, options: Any = None, **rest: Any) -> Any:
        table, signature = _table(), _signature(source, target, options)
        made = None if table is None or not signature else _from_cache(source, table.hash_of(source.name, signature))
        if made is not None:
            return made
        if _only_kept.get():
            raise _NotKeptError
        made = self.compile(source, target=target, options=options, **rest)
        if table is not None and signature:
            table.note(source.name, signature, made.hash)
            if not _in_pool.get():
                table.write()
        return made


def keep_hashes(kernel: Any) -> None:
    """Let a kernel be compiled through a `Compiler`. An interpreted kernel is not compiled."""
    if (caches := getattr(kernel, "device_caches", None)) is not None:
        caches[triton.runtime.driver.active.get_current_device()]  # the first time on a device, Triton sets its own
    found = getattr(kernel, "compile", None)
    if found is not None and type(found) is not Compiler:
        kernel.compile = Compiler(found)


class Table:
    """The hashes in one file, and the new ones that `write` adds to it."""

    def __init__(self, store: ChoiceFile) -> None:
        self._store, self._kept = store, store.read()
        self._new: Choices = {}
        self._lock = threading.Lock()

    def hash_of(self, kernel: str, signature: str) -> str:
        return str(self._kept.get(kernel, {}).get(signature, {}).get("name", ""))

    def note(self, kernel: str, signature: str, hash: str) -> None:
        with self._lock:
            for table in (self._new, self._kept):
                table.setdefault(kernel, {})[signature] = {"name": hash}

    def write(self) -> None:
        with self._lock:
            new, self._new = self._new, {}
        if new:
            self._store.add_all(new)


def _from_cache(source: Any, hash: str) -> Any:
    """The kernel that Triton's cache has under a hash; None without one, or if Triton is to look for itself."""
    knobs = triton.knobs
    if not hash or any(getattr(knobs.compilation, name, None) for name in _UNUSUAL):
        return None
    if getattr(knobs.runtime, "add_stages_inspection_hook", None) is not None:
        return None
    with suppress(Exception):  # a file may be gone or damaged, which Triton says
        group = triton.runtime.cache.get_cache_manager(hash).get_group(f"{source.name[:150]}.json")
        made = triton.compiler.CompiledKernel(source, group, hash)
        return made if made.metadata.hash == hash else None
    return None


def _signature(source: Any, target: Any, options: Any) -> str:
    """A hash of what a kernel is compiled for; empty where that cannot be told from its text."""
    with suppress(ImportError):
        from triton._C.libtriton import get_cache_invalidating_env_vars

        about = source.fn.__module__, source.signature, source.constants, source.attrs, str(target)
        text = repr((*about, sorted((options or {}).items()), sorted(get_cache_invalidating_env_vars().items())))
        return "" if " at 0x" in text else hashlib.sha256(text.encode()).hexdigest()
    return ""


def _table() -> Table | None:
    with suppress(OSError):  # no folder: Triton looks for itself
        return _table_of(torch.cuda.get_device_name(), cache_directory()) if cache_enabled() else None
    return None


def forget() -> None:
    """Read the hashes again, as a new process does. For tests."""
    _table_of.cache_clear()


@cache
def _table_of(device: str, directory: Path) -> Table:
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    files = {"sources": sources_of_kernels(), "Triton's files": _files_of_triton()}
    about = {"device": device, **versions, **files}
    return Table(ChoiceFile(about, folder="kernels", what="hashes of compiled kernels", again="computed"))


@cache
def sources_of_kernels() -> str:
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


@cache
def _files_of_triton() -> str:
    """Sizes and times of everything that takes part in compiling a kernel."""
    found = hashlib.sha256()
    for folder, names, files in os.walk(os.path.dirname(triton.__file__)):
        names[:] = sorted(name for name in names if name not in ("__pycache__", "include"))
        for name in sorted(files):
            about = os.stat(os.path.join(folder, name))
            found.update(f"{folder}/{name} {about.st_size} {about.st_mtime_ns}\n".encode())
    return found.hexdigest()


# -- threads -----------------------------------------------------------------------------------------------------------


@contextmanager
def compiling_in_threads(threads: int = MOST_THREADS) -> Iterator[list[Exception]]:
    """Compile in threads. Yields a list of the kernels that did not compile: each is compiled again when it runs.

    Garbage waits: up to Python 3.11 a collection that begins while one thread reads a kernel's source lets others read
    theirs, and the depths of their syntax trees are counted as one ("AST constructor recursion depth mismatch").
    """
    with collector_paused(), _Compilers(min(threads, os.cpu_count() or 1)) as compilers:
        with triton.AsyncCompileMode(compilers, ignore_errors=True):
            yield compilers.failures
        for kernel in compilers.failed:
            _forget_failures(kernel)
    if (table := _table()) is not None:
        table.write()


class _Compilers(ThreadPoolExecutor):
    """Threads that make kernels ready to run: the launcher is compiled too, and the code is loaded on the device."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self.failures: list[Exception] = []
        self.failed: list[Any] = []  # the kernels they are about, as far as Triton says
        self._launchers: set[str] = set()

    def submit(self, compile: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        device = torch.cuda.current_device()

        def ready() -> Any:
            _in_pool.set(True)
            torch.cuda.set_device(device)
            try:
                with self._launcher_meanwhile(compile):
                    kernel = compile(*args, **kwargs)
                with suppress(OutOfResources):  # raised again when it is launched
                    kernel.run  # noqa: B018  (made when it is first asked for)
            except Exception as error:
                self.failures.append(error)
                self.failed.append(getattr(_source_of(compile), "fn", None))
                raise
            return kernel

        return super().submit(ready)

    @contextmanager
    def _launcher_meanwhile(self, compile: Callable[..., Any]) -> Iterator[None]:
        """Compile the launcher beside the kernel. Some versions of Triton do so for each signature, afterwards."""
        source = _source_of(compile)
        signature = str(getattr(source, "signature", None))
        if source is None or signature in self._launchers:
            yield
            return
        self._launchers.add(signature)
        thread = threading.Thread(target=_make_launcher, args=(source,), name="graphex: compiling a launcher")
        thread.start()
        try:
            yield
        finally:
            thread.join()


def _source_of(compile: Callable[..., Any]) -> Any:
    return getclosurevars(compile).nonlocals.get("src") if isfunction(compile) else None


def _forget_failures(kernel: Any) -> None:
    """Drop failed compilations from a kernel's cache. Triton 3.7 keeps them, and a launch would raise their error."""
    for kernels, *_ in getattr(kernel, "device_caches", {}).values():
        for key, made in list(kernels.items()):
            if type(made).__name__ == "FutureKernel" and made.__dict__.get("kernel") is None:
                del kernels[key]


def _make_launcher(source: Any) -> None:
    """Leave the launcher in Triton's cache. An error here shows again where the launcher is needed."""
    with suppress(Exception):
        triton.runtime.driver.active.launcher_cls(source, _NotCompiled())


class _NotCompiled:
    """The metadata of a kernel that is not compiled yet, for its launcher: none of it is in the C code."""

    tensordesc_meta = None

    def __getattr__(self, name: str) -> int:
        return 0


# -- Triton's own start ------------------------------------------------------------------------------------------------


_begun: list[threading.Thread] = []


def start_triton() -> None:
    """Start Triton in a thread, once in a process: it has work to do before it compiles its first kernel."""
    if not _begun:
        _begun.append(threading.Thread(target=_get_triton_ready, name="graphex: getting Triton ready", daemon=True))
        _begun[0].start()


def wait_for_triton() -> None:
    """Wait for the thread that starts Triton, if there is one, instead of starting it a second time."""
    for thread in _begun:
        thread.join(LONGEST)


def _get_triton_ready() -> None:
    """Let Triton compile the code that asks the driver, and read all of its own files, whose hash names its caches."""
    with suppress(Exception), _switching_often():
        from triton.runtime.cache import triton_key
        from triton.runtime.driver import driver

        triton_key()
        driver.active.get_current_target()


@contextmanager
def _switching_often() -> Iterator[None]:
    """Let Python switch threads more often: Triton reads its files in hundreds of pieces, and waits after each."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, OFTEN))
    try:
        yield
    finally:
        sys.setswitchinterval(before)
