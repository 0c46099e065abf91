"""`cache_compile` and `readable_cache` under their Ascend names."""

from __future__ import annotations

import re

import npugraph_ex
import pytest
import torch
import torchair
from torch import Tensor, nn

import graphex

cache_compile, readable_cache = torchair.inference.cache_compile, torchair.inference.readable_cache


class Model(nn.Module):
    def __init__(self, folder, **given) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.cached = cache_compile(self.step, cache_dir=folder, **given)

    def step(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x)) * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.cached(x)


def called(folder, x: Tensor, device: str = "cpu", **given) -> list[str]:
    """What the cache says of a call in a process that starts, as far as the cache knows."""
    torch._dynamo.reset()
    model = Model(folder, **given).to(device)
    torch.testing.assert_close(model(x), model.step(x).detach())
    return [record.status for record in graphex.journal(model.cached).cache]


@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize("dynamic", [True, False])
def test_the_next_process_loads_what_was_compiled(tmp_path, dynamic, device):
    x = torch.randn(3, 8).to(device)
    assert called(tmp_path, x, device, dynamic=dynamic) == ["miss"]
    assert called(tmp_path, x, device, dynamic=dynamic) == ["hit"]


def test_a_dynamic_graph_serves_other_sizes(tmp_path):
    assert called(tmp_path, torch.randn(3, 8)) == ["miss"]
    assert called(tmp_path, torch.randn(5, 8)) == ["hit"]


def test_the_folder_has_the_name_that_ascend_gives_it(tmp_path):
    path = Model(tmp_path, global_rank=1, tp_rank=0, pp_rank=2, dynamic=False).cached.path
    name = r"Model_static_aclgraphcache_[0-9a-f]{32}/world1global_rank1_tp_rank0_pp_rank2/step/compiled_module"
    assert re.fullmatch(name, path.relative_to(tmp_path).as_posix())


def test_the_folder_is_found_without_being_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Model(None).cached.path.is_relative_to(tmp_path / ".torchair_cache")
    monkeypatch.setenv("TORCHAIR_CACHE_HOME", str(tmp_path / "home"))
    assert Model(None).cached.path.is_relative_to(tmp_path / "home")


def test_an_option_that_differs_is_another_entry(tmp_path):
    config = torchair.CompilerConfig()
    config.mode = "reduce-overhead"
    assert called(tmp_path, torch.randn(3, 8), config=config) == ["miss"]
    other = torchair.CompilerConfig()
    other.mode = "reduce-overhead"
    other.debug.aclgraph.clone_input = False
    assert called(tmp_path, torch.randn(3, 8), config=other) == ["miss"]


def test_ge_cache_is_accepted_with_a_reason(tmp_path):
    with pytest.warns(graphex.GraphexWarning, match="ge_cache"):
        Model(tmp_path, ge_cache=True)


def test_only_a_method_of_a_module_can_be_cached(tmp_path):
    with pytest.raises(graphex.InputError, match=r"takes a method of a torch\.nn\.Module"):
        cache_compile(torch.sin, cache_dir=tmp_path)


def test_npugraph_ex_takes_its_options_as_they_are(tmp_path):
    model = Model(tmp_path)
    cached = npugraph_ex.inference.cache_compile(model.step, options={"inplace_pass": False}, cache_dir=tmp_path)
    x = torch.randn(3, 8)
    torch.testing.assert_close(cached(x), model.step(x).detach())
    assert [record.status for record in cached.journal.cache] == ["miss"]


def test_what_is_kept_can_be_read(tmp_path, capsys):
    model = Model(tmp_path)
    model(torch.randn(3, 8))
    text = readable_cache(model.cached.path, file=tmp_path / "shown.py")
    assert capsys.readouterr().out == text + "\n"
    assert "aten.relu" in text
    assert "option inplace_pass = True" in text
    assert (tmp_path / "shown.py").read_text() == text + "\n"
    assert (tmp_path / "shown.py").stat().st_mode & 0o777 == 0o600


def test_nothing_else_can_be_read(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    for path, problem in ((tmp_path / "none", "is not there"), (tmp_path / "link", "is a link")):
        with pytest.raises(graphex.InputError, match=problem):
            readable_cache(path)
    with pytest.raises(graphex.InputError, match="holds no compiled graph"):
        readable_cache(tmp_path)
