"""What every call does for hundreds of inputs, in C++, compiled once on the machine it runs on.

    $GRAPHEX_CACHE_DIR or ~/.cache/graphex
        native/fits-5f1c0a52e2c1.cpython-312-x86_64-linux-gnu.so

Where there is no compiler, or Python's headers are missing, the same is done in Python and takes the host longer.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from graphex.folders import cache_directory
from graphex.torch_private.layout import tensor_layout
from graphex.torch_private.memory import tensor_begin

Question = Callable[[], object]
Places = tuple[bytes, bytes, bytes, bytes, bytearray]
Fits = Callable[[tuple[Question, ...], tuple[object, ...], bytes, bytes, bytes, bytes, bytearray, Sequence[Any]], bool]

fits: Fits | None = None
"""`fits(questions, answers, *places, args)`: whether everything is as it was. See the source, and `addresses`."""

_SOURCE = Path(__file__).with_name("fits.cpp")
_FLAGS = ("-O2", "-std=c++17", "-shared", "-fPIC")
_PATIENCE = 60.0  # seconds for a compiler


def load() -> None:
    """Compile, if that was not done before, and use it from now on. Raises OSError or ImportError, saying why not."""
    global fits
    if tensor_begin is None:
        raise OSError("this torch does not say how to read the address of a tensor")
    module = _module(_SOURCE)
    layout = tensor_layout()
    module.use(tensor_begin, layout or (), (torch.Tensor, torch.nn.Parameter) if layout else ())
    fits = module.fits


def _module(source: Path) -> ModuleType:
    path = _compiled(source)
    spec = importlib.util.spec_from_file_location(source.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compiled(source: Path) -> Path:
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
    about = (source.read_text(), platform.machine(), *_FLAGS)
    digest = hashlib.sha256("\0".join(about).encode()).hexdigest()[:12]
    path = cache_directory() / "native" / f"{source.stem}-{digest}{suffix}"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        headers = sysconfig.get_paths()["include"]
        command = [_compiler(), *_FLAGS, f"-I{headers}", str(source), "-o", str(made)]
        _run(command)
        os.replace(made, path)  # as a whole: other processes may be looking for it
    return path


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
