"""How graphex is found: by name, without an import, and without loading what is not needed."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

installed = pytest.mark.skipif(
    not entry_points(group="torch_dynamo_backends", name="graphex"), reason="graphex is run from its source tree here"
)


def run(code: str, directory: Path, *, from_source: bool = False) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT) if from_source else ""}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=directory, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@installed
def test_the_backend_is_known_by_name_without_importing_it(tmp_path):
    code = (
        "import torch\n"
        "from torch._dynamo.backends.registry import list_backends\n"
        "assert 'graphex' in list_backends()\n"
        "print(torch.compile(lambda x: x.clone() + 1, backend='graphex', mode='eager')(torch.ones(2)).tolist())"
    )
    assert run(code, tmp_path) == "[2.0, 2.0]"


@installed
def test_importing_it_loads_no_compiler(tmp_path):
    heavy = "('torch._dynamo', 'torch._inductor', 'triton', 'torch._functorch.aot_autograd')"
    code = f"import sys, graphex\nprint([name for name in sys.modules if name.startswith({heavy})])"
    assert run(code, tmp_path) == "[]"


def test_importing_it_from_the_source_tree_makes_the_name_known(tmp_path):
    code = "import torch, graphex\nprint(torch.compile(lambda x: x + 1, backend='graphex')(torch.ones(2)).tolist())"
    assert run(code, tmp_path, from_source=True) == "[2.0, 2.0]"


def test_importing_and_compiling_installs_no_signal_handler(tmp_path):
    code = (
        "import signal, torch\n"
        "def state(): return [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]\n"
        "before = state()\n"
        "import graphex\n"
        "torch.compile(lambda x: x + 1, backend='graphex')(torch.ones(2))\n"
        "print(state() == before)"
    )
    assert run(code, tmp_path, from_source=True) == "True"


def test_every_public_name_can_be_had():
    import graphex

    for name in graphex.__all__:
        assert getattr(graphex, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        graphex.no_such_name
