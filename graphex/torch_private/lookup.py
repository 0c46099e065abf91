"""Looking up names that torch does not promise: one that is gone breaks no import.

    FakeTensor   = private("torch._subclasses.fake_tensor.FakeTensor")
    register     = private("torch._dynamo.register_backend", lost="the name 'graphex' comes from the entry point only")
    is_capturing = private("torch._C._cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)

The second argument is what serves where the name is gone. Without one, a placeholder does: it can be imported,
subclassed and asked about with `isinstance`, and raises `MissingNameError` where it is used. `lost` says what a user
loses; every compilation writes it into its journal. A name with neither is required: without it models run without
graphex's passes. `later` is for functions whose modules a process that loads compiled code does not need.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from types import MethodType, ModuleType
from typing import Any, NoReturn

import torch

_NOTHING: Any = object()
_WITHOUT_PASSES = "the model runs without graphex's passes"


class MissingNameError(AttributeError):
    """Something was asked for that this torch does not have."""


class _Placeholder(type):
    """The type of placeholders. These are exceptions, so that an `except` clause can name one too."""

    path: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise MissingNameError(_sentence(cls.path))

    def __getattr__(cls, name: str) -> NoReturn:
        raise MissingNameError(_sentence(cls.path))


_required: set[str] = set()
_later: list[Callable[[], Any]] = []
_failures: dict[str, str] = {}  # why an import failed, by path, of modules that are there
losses: dict[tuple[str, str], None] = {}  # (path, what is lost), in the order in which they were looked up


def private(path: str, otherwise: Any = _NOTHING, *, lost: str = "") -> Any:
    """The object of torch's with the dotted name `path`, or the one that serves in its place."""
    try:
        return find(path)
    except (ImportError, AttributeError) as error:
        if not _is_gone(path, error):
            _failures[path] = str(error)
    if otherwise is not _NOTHING:
        if lost:
            losses[path, lost] = None
        return otherwise
    if not lost:
        _required.add(path)
    losses[path, lost or _WITHOUT_PASSES] = None
    return _Placeholder(path.rpartition(".")[2], (Exception,), {"path": path})


def later(path: str, otherwise: Any = _NOTHING, *, lost: str = "") -> Callable[..., Any]:
    """A function of torch's that is looked up, as by `private`, when it is called: its module takes long to import."""
    found = cache(partial(private, path, otherwise, lost=lost))
    _later.append(found)

    def call(*args: Any, **kwargs: Any) -> Any:
        return found()(*args, **kwargs)

    return call


def present(path: str) -> Any:
    """The object behind a name that not every build of torch has; None without it, and nothing is lost."""
    try:
        return find(path)
    except (ImportError, AttributeError):
        return None


_CIRCLE, _ENTRANCE = ("torch._functorch.", "torch._inductor."), "torch._dynamo"
"""Packages whose modules import each other and Dynamo's in a circle, and how torch.compile enters it. By another way an
import may fail half-way, and leaves modules behind with which torch.compile fails too.
"""


def find(path: str) -> Any:
    """The object behind a dotted name. Modules on the way are imported if need be."""
    found, reached = torch, "torch"
    for part in path.split(".")[1:]:
        reached = f"{reached}.{part}"
        if isinstance(found, ModuleType) and not hasattr(found, part):
            if reached.startswith(_CIRCLE):
                import_module(_ENTRANCE)
            module = import_module(reached)
            found = getattr(found, part, module)  # torch.optim takes the names of its modules away
        else:
            found = getattr(found, part)
    return found


def missing_names() -> list[tuple[str, str]]:
    """Losses and their causes: one pair for each name that was looked up in vain so far."""
    return [(lost, _sentence(path)) for path, lost in losses]


def check_required() -> None:
    """Raise `MissingNameError` if this torch lacks a name that passes and programs cannot do without."""
    while _later:
        _later.pop()()
    if _required:
        raise MissingNameError(_sentence(min(_required)))


def _is_gone(path: str, error: Exception) -> bool:
    """Whether torch has no such name; otherwise a module on the way to it is there, and its import has failed."""
    if isinstance(error, ModuleNotFoundError):
        return f"{path}.".startswith(f"{error.name}.")
    return isinstance(error, AttributeError)


def _sentence(path: str) -> str:
    if path in _failures:
        return f"torch {torch.__version__} fails to import {path}: {_failures[path]}"
    return f"torch {torch.__version__} has no {path}"


# -- replacing a function of torch -------------------------------------------------------------------------------------


_replacing = threading.Lock()


class _Replaced:
    """A function of torch that calls a substitute in the threads that have one, and the original in all others."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original
        self.substitutes: dict[int, Callable[..., Any]] = {}  # by thread

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)  # what it replaces may be a method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        substitute = self.substitutes.get(threading.get_ident())
        return self.original(*args, **kwargs) if substitute is None else substitute(self.original, *args, **kwargs)


@contextmanager
def replaced_in_this_thread(module: Any, name: str, substitute: Callable[..., Any]) -> Iterator[None]:
    """Inside, a call of `module.name` in this thread is one of `substitute(original, ...)`. A class may be the module.

    Other threads keep calling the original. The module has its own function back when the last thread is done.
    """
    thread = threading.get_ident()
    with _replacing:
        replaced = getattr(module, name)
        if not isinstance(replaced, _Replaced):
            replaced = _Replaced(replaced)
            setattr(module, name, replaced)
        before = replaced.substitutes.get(thread)
        replaced.substitutes[thread] = substitute
    try:
        yield
    finally:
        with _replacing:
            if before is not None:
                replaced.substitutes[thread] = before
            else:
                del replaced.substitutes[thread]
                if not replaced.substitutes and getattr(module, name) is replaced:
                    setattr(module, name, replaced.original)


# -- the versions of torch that graphex was tried with, and what is different on each ----------------------------------


@dataclass(frozen=True)
class Tried:
    """The whole test suite passes on `version`. `differs` is what a user of it can notice."""

    version: str
    differs: str = ""


TRIED = (
    Tried(
        "2.11.0",
        "`event = stream.record_event()` inside a compiled function orders only what values need. Attention without a "
        "single head ends the process, in eager too. On a CPU, graphs of 16-bit values have no regions with "
        '`region_numerics="eager"`: Inductor would not round as eager does. Before 2.14, a compiled function that is '
        "called while another thread compiles for the first time may raise, with every backend.",
    ),
    Tried("2.12.1", "The same of regions and of threads."),
    Tried("2.13.0", "The version of development."),
    Tried(
        "2.14.1",
        "On the CPU, attention of tensors with three dimensions takes torch's flash kernel, which rounds in another "
        "way than the plain one. A method made by `functools.partialmethod` is not compiled: Dynamo raises, with every "
        "backend.",
    ),
    Tried(
        "2.15.0",
        "AOTAutograd compares the sizes of a result with those of the result it is a view of. If they are equal in the "
        "first call only, a size that was marked dynamic is specialised, and `mark_dynamic` raises, with "
        '`backend="aot_eager"` too. Parts of a GPU need the package `cuda-bindings`, which comes with torch.',
    ),
)
"""From the oldest, which is the oldest that graphex works with, to the newest."""


def is_too_old() -> bool:
    return _minor(torch.__version__) < _minor(TRIED[0].version)


def is_newer_than_tried() -> bool:
    """Whether torch is of a later minor version: a patch release keeps torch's private names."""
    return _minor(torch.__version__) > _minor(TRIED[-1].version)


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])
