"""How graphex is found: by name, without an import, and without loading what is not needed."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.harness.processes import python

installed = pytest.mark.skipif(
    not entry_points(group="torch_dynamo_backends", name="graphex"), reason="graphex is run from its source tree here"
)


def run(code: str, directory: Path, **variables: str) -> str:
    return python("-c", code, cwd=directory, **variables).stdout.strip()


@installed
def test_the_backend_is_known_by_name_without_importing_it(tmp_path):
    code = (
        "import torch\n"
        "from torch._dynamo.backends.registry import list_backends\n"
        "assert 'graphex' in list_backends()\n"
        "print(torch.compile(lambda x: x.clone() + 1, backend='graphex', mode='eager')(torch.ones(2)).tolist())"
    )
    assert run(code, tmp_path, PYTHONPATH="") == "[2.0, 2.0]"


@installed
def test_importing_it_loads_no_compiler(tmp_path):
    heavy = "('torch._dynamo', 'torch._inductor', 'triton', 'torch._functorch.aot_autograd')"
    code = f"import sys, graphex\nprint([name for name in sys.modules if name.startswith({heavy})])"
    assert run(code, tmp_path, PYTHONPATH="") == "[]"


def test_importing_it_from_the_source_tree_makes_the_name_known(tmp_path):
    code = "import torch, graphex\nprint(torch.compile(lambda x: x + 1, backend='graphex')(torch.ones(2)).tolist())"
    assert run(code, tmp_path) == "[2.0, 2.0]"


def test_every_public_name_can_be_had():
    import graphex

    for name in graphex.__all__:
        assert getattr(graphex, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        graphex.no_such_name
