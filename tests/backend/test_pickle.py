"""A compiled module travels (pickle, deepcopy, torch.save) as with other backends: the compiled code stays behind."""

from __future__ import annotations

import copy
import functools
import io
import pickle

import pytest
import torch

import graphex
from graphex.backend import graphex_backend
from tests.harness.processes import python

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


@every_way
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


def test_another_process_compiles_what_it_was_sent(tmp_path):
    compiled = torch.compile(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), backend="graphex")
    wanted = compiled(torch.ones(2, 4))
    (tmp_path / "model").write_bytes(pickle.dumps(compiled))
    done = python("-c", AFTER_A_CALL, tmp_path / "model")
    assert done.stdout.strip() == f"0 {wanted.tolist()} 1"


@every_way
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
