"""Make the names of the Ascend packages available, and the device "npu", where the real ones are missing."""

from __future__ import annotations

import os
import sys
import threading
from importlib import import_module
from typing import Any

import torch

from graphex.ascend.catalogue import NAMES, Name
from graphex.ascend.modules import Finder, ServedModule, is_installed, resolved
from graphex.errors import InputError

VARIABLE = "GRAPHEX_NPU"
TARGETS = ("simulated", "cuda", "cpu")
_installing = threading.RLock()  # what is imported on the way may ask for it again
_ON_CUDA = {"NPUGraph": "CUDAGraph"}  # whose name differs there
_TAKE_A_DEVICE = frozenset(
    {
        "set_device",
        "device",
        "synchronize",
        "get_device_name",
        "get_device_properties",
        "memory_allocated",
        "memory_reserved",
        "max_memory_allocated",
        "max_memory_reserved",
        "reset_peak_memory_stats",
        "get_rng_state",
        "set_rng_state",
        "default_stream",
    }
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
    from graphex.torch_private.privateuse1 import claim, claimed_by, why_not

    if reason := why_not():
        raise InputError(f"{reason}: there is no 'npu'.")
    if other := claimed_by():
        raise InputError(f"torch knows one further device in a process, and here it is '{other}': there is no 'npu'.")
    module = ServedModule("torch.npu")
    claim("npu", module, accelerator=target == "simulated")
    module.serve([name for name in NAMES if name.module == "torch.npu"], lambda name: _value(name, target))
    from graphex.ascend.npu.kernels import install_autocast

    install_autocast(None if target == "simulated" else torch.device(target))
    if target == "simulated":
        from graphex.ascend.npu.kernels import install_kernels, install_storages

        install_kernels()
        install_storages()
    else:
        from graphex.ascend.npu.mapped import install_mapping

        install_mapping(torch.device(target))
    return module


def _value(name: Name, target: str) -> Any:
    """On a GPU torch.npu is torch.cuda as far as that goes."""
    attribute = name.name.rpartition(".")[2]
    theirs = getattr(torch.cuda, _ON_CUDA.get(attribute, attribute), None) if target == "cuda" else None
    if theirs is None:
        return resolved(name.home)
    from graphex.ascend.npu.mapped import with_device_mapped

    return with_device_mapped(theirs, torch.device(target)) if attribute in _TAKE_A_DEVICE else theirs


def _register_backend() -> None:
    from graphex.ascend.api import npugraph_ex_backend
    from graphex.torch_private.dynamo import register_backend

    register_backend(npugraph_ex_backend, name="npugraph_ex")
