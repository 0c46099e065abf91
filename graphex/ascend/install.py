"""Serve the Ascend names and the device "npu" where the real packages are missing.

`install` claims torch's spare device key for "npu", fills `torch.npu` from the catalogue, and puts a finder last into
`sys.meta_path`. Python asks the finder for `torch_npu`, `torchair` or `npugraph_ex` only after it has found no
installed package of that name; the finder makes a module of the catalogue's names.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from graphex.ascend.catalogue import NAMES, PACKAGES, Name, modules
from graphex.errors import InputError, NotOfferedError

VARIABLE = "GRAPHEX_NPU"
TARGETS = ("simulated", "cuda", "cpu")
_installing = threading.RLock()  # an import on the way may ask for the installation again
_ON_CUDA = {"NPUGraph": "CUDAGraph"}  # the one name that differs in torch.cuda
_TAKE_A_DEVICE = (
    "set_device device synchronize get_device_name get_device_properties memory_allocated memory_reserved"
    " max_memory_allocated max_memory_reserved reset_peak_memory_stats get_rng_state set_rng_state"
    " default_stream"
)


def install(target: str | None = None) -> None:
    """Serve what is not installed. `target` says what "npu" is: a simulated device, the GPU or the CPU."""
    target = _checked(target or os.environ.get(VARIABLE, TARGETS[0]))
    with _installing:
        if is_installed("torch_npu") or any(isinstance(finder, Finder) for finder in sys.meta_path):
            return  # the real device brings the rest along; or all this has been done
        npu = _install_device(target)
        sys.meta_path.append(Finder())
        npu.npugraph_ex = import_module("npugraph_ex")  # type: ignore[attr-defined]
        _register_backend()


def _checked(target: str) -> str:
    if target not in TARGETS:
        raise InputError(f"{VARIABLE} is {target!r}; it can be {', '.join(TARGETS)}.")
    if target == "cuda" and not torch.cuda.is_available():
        raise InputError("the npu cannot be mapped to cuda: torch finds no CUDA device. Use simulated or cpu.")
    return target


def _install_device(target: str) -> ServedModule:
    from graphex.ascend import mapped, simulated
    from graphex.torch_private.privateuse1 import claim, claimed_by, why_not

    if reason := why_not():
        raise InputError(f"{reason}: there is no 'npu'.")
    if other := claimed_by():
        raise InputError(f"torch knows one further device in a process, and here it is '{other}': there is no 'npu'.")
    module = ServedModule("torch.npu")
    is_simulated = target == "simulated"
    claim("npu", module, accelerator=is_simulated)
    module.serve([name for name in NAMES if name.module == "torch.npu"], lambda name: _value(name, target))
    mapped.install_autocast(None if is_simulated else torch.device(target))
    if is_simulated:
        simulated.install_kernels()
        simulated.install_storages()
    else:
        mapped.install_mapping(torch.device(target))
    return module


def _value(name: Name, target: str) -> Any:
    """The object behind a name of torch.npu: on a GPU that of torch.cuda, where there is one."""
    from graphex.ascend.mapped import with_device_mapped

    attribute = name.name.rpartition(".")[2]
    theirs = getattr(torch.cuda, _ON_CUDA.get(attribute, attribute), None) if target == "cuda" else None
    if theirs is None:
        return resolved(name.home)
    return with_device_mapped(theirs, torch.device(target)) if attribute in _TAKE_A_DEVICE.split() else theirs


def _register_backend() -> None:
    from graphex.ascend.api import npugraph_ex_backend
    from graphex.torch_private.dynamo import register_backend

    register_backend(npugraph_ex_backend, name="npugraph_ex")


# -- modules made from the catalogue -----------------------------------------------------------------------------------


class ServedModule(ModuleType):
    """A module whose names come from the catalogue. A name that is not offered imports, and says why when used."""

    def __init__(self, name: str) -> None:
        super().__init__(name, f"`{name}`, served by graphex. See docs/ascend.md.")

    def serve(self, names: Sequence[Name], value: Callable[[Name], Any]) -> None:
        for each in names:
            setattr(self, each.name.rpartition(".")[2], value(each) if each.home else NotOffered(each))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"module '{self.__name__}', which graphex serves, has no '{name}'. See docs/ascend.md.")


class NotOffered:
    """Stands for a function that is known and not here."""

    def __init__(self, name: Name) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotOfferedError(f"{self._name.name} is not offered here: {self._name.note}. See docs/ascend.md.")

    def __repr__(self) -> str:
        return f"<{self._name.name}, not offered by graphex>"


def resolved(home: str) -> Any:
    """The object at `module:attribute`."""
    module, _, attribute = home.partition(":")
    if module.startswith("torch.ops."):
        return getattr(getattr(torch.ops, module.removeprefix("torch.ops.")), attribute)
    return getattr(import_module(f"graphex.ascend{module}" if module.startswith(".") else module), attribute)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes the Ascend packages. It stands last in `sys.meta_path`, so an installed package is found before."""

    def __init__(self) -> None:
        self._modules = {name: names for name, names in modules().items() if name.split(".")[0] in PACKAGES}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in self._modules:
            return None
        return importlib.util.spec_from_loader(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return ServedModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Fill a module, submodules included: `torchair.scope` needs no import of its own."""
        assert isinstance(module, ServedModule)
        module.serve(self._modules[module.__name__], lambda name: resolved(name.home))
        prefix = f"{module.__name__}."
        for name in self._modules:
            if name.startswith(prefix) and "." not in name.removeprefix(prefix):
                setattr(module, name.removeprefix(prefix), import_module(name))


def is_installed(package: str) -> bool:
    """Whether the real package is there."""
    if package in sys.modules:
        return not isinstance(sys.modules[package], ServedModule)
    spec = importlib.util.find_spec(package)
    return spec is not None and not isinstance(spec.loader, Finder)
