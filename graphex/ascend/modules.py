"""Modules made from the catalogue, and the finder that Python asks for them after it has found nothing itself."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from graphex.ascend.catalogue import PACKAGES, Name, modules
from graphex.errors import NotOfferedError

Values = Callable[[Name], Any]  # what stands for a name


class ServedModule(ModuleType):
    """A module whose names come from the catalogue. One that is not offered can be imported, and says why when used."""

    def __init__(self, name: str) -> None:
        super().__init__(name, f"`{name}`, served by graphex. See docs/ascend.md.")

    def serve(self, names: Sequence[Name], values: Values) -> None:
        for each in names:
            setattr(self, each.name.rpartition(".")[2], values(each) if each.home else NotOffered(each))

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
    """What stands at `module:attribute`."""
    module, _, attribute = home.partition(":")
    if module.startswith("torch.ops."):
        return getattr(getattr(torch.ops, module.removeprefix("torch.ops.")), attribute)
    return getattr(import_module(f"graphex.ascend{module}" if module.startswith(".") else module), attribute)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands last in `sys.meta_path`: a package that is installed is found before."""

    def __init__(self) -> None:
        self._modules = {name: names for name, names in modules().items() if name.split(".")[0] in PACKAGES}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in self._modules:
            return None
        return importlib.util.spec_from_loader(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return ServedModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Parts of a package are there with it: `torchair.scope` needs no import of its own."""
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
