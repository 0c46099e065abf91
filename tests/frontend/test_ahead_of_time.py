"""`torch.compile(...).aot_compile`: compiled before the first call, and called without Dynamo."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import graphex

X = torch.randn(3, 4)


@pytest.fixture(autouse=True)
def enabled():
    """torch 2.11 has to be asked for it."""
    with torch._dynamo.config.patch(enable_aot_compile=True):
        yield


def function(x: Tensor) -> Tensor:
    return (x.clone() + 1).sin() * 2


def ahead(fn, *args, **options):
    return torch.compile(fn, fullgraph=True, backend="graphex", options=options).aot_compile((args, {}))


@pytest.mark.parametrize("backend", ["graphex", graphex.get_backend({"verify": True})])
def test_what_was_compiled_ahead_computes_what_eager_does(backend):
    compiled = torch.compile(function, fullgraph=True, backend=backend).aot_compile(((X,), {}))
    torch.testing.assert_close(compiled(X), function(X), rtol=0, atol=0)
    assert [graph.phase for graph in graphex.journal(compiled).graphs] == ["inference"]
    assert graphex.journal(compiled).fallbacks == []


def test_its_gradients_are_those_of_eager():
    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.linear(x, weight).relu().square().sum()

    weight = torch.randn(2, 4, requires_grad=True)
    compiled = ahead(loss, X, weight)
    found, wanted = (torch.autograd.grad(run(X, weight), weight) for run in (compiled, loss))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert {graph.phase for graph in graphex.journal(compiled).graphs} == {"forward", "backward"}


def test_it_serves_every_size_that_was_marked_as_dynamic():
    example = torch.randn(5, 4)
    torch._dynamo.mark_dynamic(example, 0)
    compiled = ahead(function, example)
    for rows in (2, 7):
        torch.testing.assert_close(compiled(torch.ones(rows, 4)), function(torch.ones(rows, 4)))


def test_it_is_saved_and_loaded_again(tmp_path):
    path = tmp_path / "saved"
    ahead(function, X).save_compiled_function(str(path))
    with path.open("rb") as file:
        loaded = torch.compiler.load_compiled_function(file)
    torch.testing.assert_close(loaded(X), function(X), rtol=0, atol=0)


def test_where_it_cannot_be_saved_one_sentence_says_why(tmp_path):
    compiled = ahead(lambda x: x * 2, X.clone().requires_grad_())
    with pytest.raises(graphex.GraphexError, match="cannot be saved: gradients are enabled; call save under"):
        compiled.save_compiled_function(str(tmp_path / "saved"))
    torch.testing.assert_close(compiled(X.clone().requires_grad_()), X * 2)


def test_it_works_with_graphex_switched_off(monkeypatch):
    monkeypatch.setenv("GRAPHEX_DISABLE", "1")
    torch.testing.assert_close(ahead(function, X)(X), function(X))


def test_options_reach_it():
    compiled = ahead(function, X, disable_passes=["remove_noops"])
    assert "remove_noops" not in {record.name for record in graphex.journal(compiled).passes}
