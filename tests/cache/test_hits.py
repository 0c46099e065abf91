"""What is compiled once is loaded afterwards, computes the same, and nothing is compiled for it."""

from __future__ import annotations

import logging
import textwrap
import time

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import graphex
from graphex.regions.compiler import Outcome
from tests.harness.cached import asked, missed
from tests.harness.capture import statuses
from tests.harness.processes import forked


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.RMSNorm(8)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        state.add_(x)
        return self.norm(torch.nn.functional.gelu(self.linear(x)) + state)


def of_passes(journal: graphex.Journal) -> set[str]:
    """Every kind of record that something was compiled."""
    return {record.kind for record in journal.records} & {"pass", "kernels"}


@torch.no_grad()
def test_the_second_compilation_loads_what_the_first_one_stored(run):
    net, x = Net(), torch.randn(4, 8)
    first, second = (run(net, x, torch.zeros(4, 8)) for _ in range(2))
    assert asked(first) == ["miss"]
    assert asked(second) == ["hit"]
    assert of_passes(first)
    assert not of_passes(second)
    assert second.rewrites == first.rewrites
    assert second.memory == first.memory


def test_the_log_says_that_a_graph_came_from_the_cache_and_how_to_see_its_graphs(run, monkeypatch):
    said: list[logging.LogRecord] = []
    logger = logging.getLogger("graphex")
    monkeypatch.setattr(logger, "handle", said.append)
    before = logger.level
    try:
        for level in (logging.INFO, logging.INFO, logging.DEBUG):
            logger.setLevel(level)
            run(torch.sin, torch.ones(2))
    finally:
        logger.setLevel(before)
    compiled, loaded, with_graphs = (each.getMessage() for each in said if each.levelno == logging.INFO)
    assert "cache" not in compiled
    assert loaded == f"{compiled}; from the cache"
    assert with_graphs == f"{loaded}; GRAPHEX_CACHE=off compiles it again and prints its graphs"


def wave(x: Tensor) -> Tensor:
    return x.sin().cos()


def test_a_region_that_was_slower_on_a_busy_machine_is_tried_again_after_an_hour(run, monkeypatch):
    """Until then it is loaded: results are the same, and processes that start one after the other compile nothing."""
    monkeypatch.setenv("GRAPHEX_REGIONS", "on")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)

    def tried(is_doubtful: bool, later: float) -> graphex.Journal:
        nonlocal now
        now += later
        outcome = Outcome(is_kept=False, compiled=0.2436, single=0.1, is_doubtful=is_doubtful)
        monkeypatch.setattr("graphex.regions.stage.tried", lambda *_: outcome)
        return run(wave, torch.ones(2))

    assert missed(tried(True, later=0)) == "nothing is stored for 'wave' (inference)"
    loaded = tried(True, later=600)
    assert asked(loaded) == ["hit"]
    assert [(each.status, each.doubtful) for each in loaded.regions] == [("slower", True)]
    assert "tried on a busy machine" in missed(tried(False, later=3600))
    assert asked(tried(False, later=30 * 86_400)) == ["hit"]


def test_a_model_is_saved_on_a_busy_machine_too(run, tmp_path, monkeypatch):
    monkeypatch.setenv("GRAPHEX_REGIONS", "on")
    outcome = Outcome(is_kept=False, compiled=0.2436, single=0.1, is_doubtful=True)
    monkeypatch.setattr("graphex.regions.stage.tried", lambda *_: outcome)
    path = tmp_path / "wave.graphex"
    journal = graphex.save(wave, (torch.ones(2),), path)
    assert [each.status for each in journal.regions] == ["slower"]
    assert graphex.load(path)(torch.ones(2)).tolist() == wave(torch.ones(2)).tolist()


def test_a_training_step_is_loaded_forward_and_backward(run):
    net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    x = torch.randn(4, 8)

    def step() -> list[Tensor]:
        torch._dynamo.reset()
        net.zero_grad()
        compiled = torch.compile(net, backend="graphex")
        compiled(x).sum().backward()
        journals.append(graphex.journal(compiled))
        return [parameter.grad.clone() for parameter in net.parameters()]

    journals: list[graphex.Journal] = []
    first, second = step(), step()
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert [asked(journal) for journal in journals] == [["miss", "miss"], ["hit", "hit"]]


def test_a_graph_with_symbolic_sizes_is_loaded_for_another_size(run):
    def function(x):
        return (x.view(-1, 2, x.shape[1] // 2) * x.shape[0]).flatten(1)

    assert asked(run(function, torch.randn(4, 8), dynamic=True)) == ["miss"]
    assert asked(run(function, torch.randn(6, 8), dynamic=True)) == ["hit"]


def test_views_of_inputs_still_share_their_memory(run):
    def function(x, y):
        part = x[1:]
        part.mul_(2)
        return part, x.t(), y.view(2, -1) + 1

    x, y = torch.randn(4, 6), torch.randn(8)
    assert asked(run(function, x, y)) == ["miss"]
    assert asked(run(function, x, y)) == ["hit"]


def test_a_constant_of_the_program_is_the_one_of_this_process(run):
    def function(x):
        return x + torch.tensor([1.0, 2.0])

    assert asked(run(function, torch.ones(2))) == ["miss"]
    assert asked(run(function, torch.ones(2))) == ["hit"]


def test_lines_are_those_of_this_process(run, tmp_path):
    """A comment above a function moves its lines, and changes nothing that is compiled."""
    found = []
    for number, text in enumerate(("", "# a line more\n")):
        path = tmp_path / "program.py"
        path.write_text(text + "def function(x, y):\n    x.copy_(x + y)\n    return (x * 2).relu()\n")
        names: dict[str, object] = {}
        exec(compile(path.read_text(), str(path), "exec"), names)
        journal = run(names["function"], torch.ones(2), torch.ones(2))
        assert asked(journal) == [("miss", "hit")[number]]
        found.append({record.line.split(":")[1] for record in journal.rewrites if record.line})
    assert found == [{"2", "3"}, {"3", "4"}]


def test_an_equal_graph_under_another_name_has_an_entry_of_its_own(run):
    def one(x):
        return x * 2

    def other(x):
        return x * 2

    assert asked(run(one, torch.ones(2))) == ["miss"]
    assert asked(run(other, torch.ones(2))) in (["miss"], ["hit"])


PROGRAM = textwrap.dedent(
    """
    import sys
    import torch, graphex
    from torch import nn
    from torch._inductor.cpu_vec_isa import VecISA

    trials, check_build = [], VecISA.check_build
    VecISA.check_build = lambda *args: trials.append(args) or check_build(*args)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Softmax(-1))
    x = torch.randn(4, 8)
    compiled = torch.compile(net, backend="graphex")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), net(x))
    journal = graphex.journal(compiled)
    print([each.status for each in journal.cache], [each.status for each in journal.regions], len(journal.passes))
    print([each.what for each in journal.fallbacks], "torch._inductor.lowering" in sys.modules, len(trials))
    """
)


def test_the_next_process_compiles_nothing_regions_included(folder, tmp_path):
    """In another working directory, as another rank, with the folder moved: nothing of these is stored.

    Nor are Inductor's code generators imported, or instruction sets tried, each of which takes a process of its own.
    """
    first = forked(PROGRAM, GRAPHEX_REGIONS="on")
    assert first.startswith("['miss'] ['compiled']")
    assert int(first.split()[-1]) > 0  # instruction sets are tried in the first
    moved = tmp_path / "elsewhere"
    folder.parent.rename(moved)
    switches = {"GRAPHEX_CACHE_DIR": str(moved), "GRAPHEX_REGIONS": "on", "RANK": "1", "WORLD_SIZE": "2"}
    assert forked(PROGRAM, cwd=tmp_path, **switches) == "['hit'] ['loaded'] 0\n[] False 0\n"


@torch.no_grad()
def test_a_loaded_graph_answers_before_it_is_captured_and_warm_up_begins_with_the_largest_size(folder, tape):
    net = Net().eval()

    def given(rows: int) -> tuple[Tensor, Tensor]:
        return torch.randn(rows, 8), torch.zeros(rows, 8)

    for status in ("miss", "hit"):
        torch._dynamo.reset()
        compiled = torch.compile(net, backend="graphex", dynamic=True)
        args = given(4)
        torch.testing.assert_close(compiled(*args), net(args[0], torch.zeros(4, 8)))
        assert asked(graphex.journal(compiled)) == [status]
        assert statuses(compiled) == []
    records = graphex.warm_up(compiled, [given(rows) for rows in (2, 5, 3)])
    assert [eval(record.key)[0] for record in records] == [5, 3, 2]
    assert asked(graphex.journal(compiled)) == ["hit"]


@torch.no_grad()
def test_a_loaded_graph_takes_tangents(run):
    """The functional graph, which few processes need, is made of what is stored when a call asks for it."""
    net, x, tangent = nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.randn(2, 4), torch.randn(2, 4)
    run(net, x)
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="graphex")
    compiled(x)
    assert asked(graphex.journal(compiled)) == ["hit"]
    with forward_ad.dual_level():
        found, expected = (forward_ad.unpack_dual(each(forward_ad.make_dual(x, tangent))) for each in (compiled, net))
        torch.testing.assert_close(tuple(found), tuple(expected))


@pytest.mark.parametrize("switch", ["option", "environment"])
def test_the_cache_can_be_turned_off(run, folder, monkeypatch, switch):
    if switch == "environment":
        monkeypatch.setenv("GRAPHEX_CACHE", "off")
    options = {"cache": False} if switch == "option" else {}
    assert asked(run(torch.sin, torch.ones(2), **options)) == []
    assert not folder.exists()


@torch.no_grad()
def test_lifted_ops_and_decisions_about_attention_are_stored(run):
    def function(q, k, v, weight):
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        variance = attended.pow(2).mean(-1, keepdim=True)
        return weight * (attended * torch.rsqrt(variance + 1e-6))

    given = [*(torch.randn(1, 2, 4, 8) for _ in range(3)), torch.ones(8)]
    first, second = (run(function, *given, lift_idioms="always") for _ in range(2))
    assert asked(first) == ["miss"]
    assert asked(second) == ["hit"]
    assert second.rules == first.rules
    assert any(tried.matches for tried in second.rules)


@torch.no_grad()
def test_ops_of_the_user_that_write_to_their_arguments_are_stored(run):
    @torch.library.custom_op("graphex_test_cache::push_", mutates_args=("cache",))
    def push_(cache: Tensor, row: Tensor) -> None:
        cache[0] = row

    def function(cache, row):
        push_(cache, row * 2)
        return cache.sum(0)

    assert asked(run(function, torch.zeros(2, 3), torch.ones(3))) == ["miss"]
    assert asked(run(function, torch.zeros(2, 3), torch.ones(3))) == ["hit"]
