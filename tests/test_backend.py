"""How the backend is found, its first use by several threads, and compiled modules that travel (pickle, deepcopy)."""

from __future__ import annotations

import copy
import functools
import io
import os
import pickle
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

import graphex
from graphex.backend import graphex_backend
from tests.harness.processes import ROOT, python

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


PROGRAM = """
import sys, threading, traceback
import torch
{before}

def first_use(number):
    def function(x):
        return (x * 2).relu() + number

    x = torch.randn(3, 4 + number)
    together.wait()
    try:
        {use}
        import graphex
        if torch.__version__ >= "2.12":  # before, torch itself crashes: with aot_eager too, and under a lock
            assert torch.equal(compiled(x), function(x))
            assert len(graphex.journal(compiled).graphs) == 1
    except BaseException:
        traceback.print_exc()
        failed.append(number)

failed, together = [], threading.Barrier(6)
threads = [threading.Thread(target=first_use, args=(number,)) for number in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sys.exit(len(failed))
"""
BY_NAME = "compiled = torch.compile(function, backend='graphex')"
BOTH = """import graphex
        compiled = torch.compile(function, backend="graphex" if number % 2 else graphex.get_backend())"""


@pytest.mark.parametrize(
    ("before", "use"),
    [
        pytest.param("", BY_NAME, id="by name"),
        pytest.param("import graphex", BY_NAME, id="by name, imported before"),
        pytest.param("", BOTH, id="by name and as an object"),
    ],
)
def test_threads_that_compile_first_together_all_can(before, use, tmp_path):
    entry_point(tmp_path)
    program = PROGRAM.format(before=before, use=use)
    python("-c", program, cwd=tmp_path, PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}", OMP_NUM_THREADS="1")


def entry_point(folder: Path) -> None:
    """What an installed graphex has, for a source tree too."""
    about = folder / "by_name-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: by-name\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[torch_dynamo_backends]\ngraphex = graphex.backend:graphex_backend\n")


AFTER_A_CALL = """
import pickle, sys, torch, graphex
compiled = pickle.load(open(sys.argv[1], "rb"))
print(len(graphex.journal(compiled).graphs), compiled(torch.ones(2, 4)).tolist(), len(graphex.journal(compiled).graphs))
"""


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu() + 1


def twice(x: torch.Tensor) -> torch.Tensor:
    return x + x


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.permute(1, 0)


def with_torch(model: torch.nn.Module) -> torch.nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def with_pickle(model: torch.nn.Module) -> torch.nn.Module:
    return pickle.loads(pickle.dumps(model))


BACKENDS = {
    "name": lambda: "graphex",
    "object": lambda: graphex.get_backend({"verify": True}),
    "decompositions": lambda: graphex.get_backend({}, {torch.ops.aten.t.default: transposed}),
    "partial": lambda: functools.partial(graphex_backend, options={"verify": True}),
}
every_way = pytest.mark.parametrize("copied", [with_pickle, copy.deepcopy, with_torch])
every_backend = pytest.mark.parametrize("backend", BACKENDS)
between_processes = pytest.mark.parametrize("copied", [with_pickle, with_torch])


@between_processes
@every_backend
def test_a_compiled_module_travels_and_its_copy_has_a_journal_of_its_own(copied, backend):
    compiled = torch.compile(Model(), backend=BACKENDS[backend]())
    x = torch.randn(2, 4)
    with torch.no_grad():
        wanted = compiled(x)
        travelled = copied(compiled)
        torch._dynamo.reset()  # in another process there is no code to share either
        found = travelled(x)
    assert torch.equal(found, wanted)
    assert graphex.journal(travelled) is not graphex.journal(compiled)
    assert len(graphex.journal(travelled).graphs) == len(graphex.journal(compiled).graphs) == 1


@every_way
def test_a_module_compiled_in_place_travels_uncompiled(copied):
    model = Model()
    model.compile(backend="graphex")
    x = torch.randn(2, 4)
    wanted = model(x)
    travelled = copied(model)
    assert torch.equal(travelled(x), wanted)
    with pytest.raises(graphex.InputError, match=r"was not made by torch\.compile"):
        graphex.journal(travelled)


@every_way
def test_a_module_travels_in_the_middle_of_training(copied):
    compiled = torch.compile(Model(), backend="graphex")
    x = torch.randn(2, 4)
    compiled(x).sum().backward()
    travelled = copied(compiled)
    travelled.zero_grad()
    travelled(x).sum().backward()
    for one, other in zip(compiled.parameters(), travelled.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@every_way
def test_a_copy_that_shares_code_with_its_original_shares_the_journal(copied):
    compiled = torch.compile(Model(), backend="graphex")
    x = torch.randn(2, 4)
    with torch.no_grad():
        compiled(x)
        travelled = copied(compiled)
        travelled(x)
    assert graphex.journal(travelled) is graphex.journal(compiled)


@pytest.mark.parametrize("make", [lambda: torch.nn.Sequential(torch.nn.Linear(4, 4)), lambda: torch.nn.functional.gelu])
def test_a_cell_that_compiles_again_finds_the_journal_of_the_first_time(make):
    x = torch.randn(2, 4)
    first, second = (torch.compile(make(), backend="graphex") for _ in range(2))
    with torch.no_grad():
        first(x), second(x)
    assert len(graphex.journal(second).graphs) == 1


def test_modules_of_torch_have_a_journal_each():
    compiled = torch.compile(torch.nn.Sequential(torch.nn.Linear(4, 4)), backend="graphex")
    other = torch.compile(torch.nn.Linear(4, 4), backend="graphex")
    compiled(torch.randn(2, 4))
    assert graphex.journal(compiled).graphs
    assert not graphex.journal(other).graphs


def test_another_process_compiles_what_it_was_sent(tmp_path):
    compiled = torch.compile(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), backend="graphex")
    wanted = compiled(torch.ones(2, 4))
    (tmp_path / "model").write_bytes(pickle.dumps(compiled))
    done = python("-c", AFTER_A_CALL, tmp_path / "model")
    assert done.stdout.strip() == f"0 {wanted.tolist()} 1"


@pytest.mark.parametrize("backend", ["name", "partial"])
def test_a_copied_module_has_a_journal_of_its_own_unless_its_backend_is_an_object(backend):
    compiled = torch.compile(Model(), backend=BACKENDS[backend]())
    x = torch.randn(2, 4)
    with torch.no_grad():
        compiled(x)
        copied = copy.deepcopy(compiled)
        torch._dynamo.reset()
        copied(x)
    assert graphex.journal(copied) is not graphex.journal(compiled)
    assert len(graphex.journal(copied).graphs) == len(graphex.journal(compiled).graphs) == 1


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copied_backend_object_shares_the_journal(copied):
    backend = graphex.get_backend({"verify": True}, {torch.ops.aten.t.default: transposed})
    held = copied({"backend": backend})["backend"]  # as transformers copies its CompileConfig
    torch.compile(twice, backend=held)(torch.ones(2))
    assert backend.journal.verifications[0].status == "equal"
    assert held.config.given() == backend.config.given()
    assert held.custom_decompositions == backend.custom_decompositions


@between_processes
def test_a_backend_object_travels_with_its_configuration_alone(copied):
    backend = graphex.get_backend({"verify": True}, {torch.ops.aten.t.default: transposed})
    torch.compile(twice, backend=backend)(torch.ones(2))
    travelled = copied(backend)
    assert travelled.config.given() == backend.config.given()
    assert travelled.custom_decompositions == backend.custom_decompositions
    assert backend.journal.graphs
    assert not travelled.journal.records


def test_the_journal_of_a_partial_is_found_before_the_first_call():
    compiled = torch.compile(twice, backend=functools.partial(graphex_backend, options={"verify": True}))
    assert not graphex.journal(compiled).graphs
    compiled(torch.ones(2))
    assert graphex.journal(compiled).graphs
