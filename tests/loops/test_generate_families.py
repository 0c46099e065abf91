"""The tokens of many families of decoders: graphex's loop gives those of transformers, captured and compiled."""

from __future__ import annotations

import operator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import graphex
from tests.harness.generating import FAMILIES, GREEDY, built, looped, prompt, reasons

COMPILED = ("llama", "mistral", "gemma3", "gpt_oss", "opt")


@pytest.mark.usefixtures("captures", "uncompiled")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_captured_loop_gives_transformers_tokens(name):
    model = built(name)
    mask = torch.ones_like(prompt())
    mask[0, :3] = 0
    for extra in ({}, {"attention_mask": mask}):
        assert torch.equal(looped(model, prompt(), **GREEDY, **extra), model.generate(prompt(), **GREEDY, **extra))
    if name == "bloom" and "prepare_inputs_for_generation" in vars(type(model)):  # transformers 5.17
        assert {"prepares the inputs" in reason for reason in reasons(model)} == {True}
        return
    assert reasons(model) == []
    assert all(record.captured for record in graphex.generation(model).generations)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in COMPILED else pytest.mark.full) for name in FAMILIES]
)
def test_a_compiled_step_serves_all_tokens(name):
    model = built(name)
    wanted = GREEDY | {"max_new_tokens": 20}
    assert torch.equal(looped(model, prompt(), **wanted), model.generate(prompt(), **wanted))
    journal = graphex.generation(model).journal
    assert len(journal.graphs) == 1
    assert journal.fallbacks == []
    assert looped(model, prompt(length=4), **wanted).shape == (2, 24)
    assert len(journal.graphs) == 1


@pytest.mark.usefixtures("captures")
def test_a_generation_like_the_last_one_only_replays_and_another_one_does_not():
    model = built("llama", num_hidden_layers=1)

    def calls() -> list[int]:
        wanted = model.generate(prompt(), **GREEDY)
        assert torch.equal(looped(model, prompt(), **GREEDY), wanted)
        return [count["calls"] for count in graphex.generation(model).journal.counts.values()]

    first = calls()
    assert calls() == first
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.flip(0).clone()
    (again,) = calls()
    assert again > first[0]
    model.model.layers[0].self_attn.scaling *= 0.5
    both = calls()
    assert len(both) == 2
    torch.compiler.reset()
    assert sum(calls()) > sum(both)


@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_steps_that_ran_before_a_change_of_the_model_was_seen_leave_nothing(name):
    model = built(name)
    random = {"do_sample": True, "temperature": 0.7, "max_new_tokens": 12, "pad_token_id": 0}
    attention, heard = model.model.layers[0].self_attn, Heard()
    scale = attention.scaling
    for scaling in (scale, scale, scale * 0.5, scale * 0.5, scale):
        attention.scaling = scaling
        torch.manual_seed(3)
        wanted = model.generate(prompt(1), **random)
        state, heard.tokens = torch.get_rng_state(), []
        torch.manual_seed(3)
        assert torch.equal(looped(model, prompt(1), streamer=heard, **random), wanted)
        assert torch.equal(torch.get_rng_state(), state)
        assert heard.tokens == wanted[0].tolist()
    assert graphex.generation(model).last.captured


@pytest.mark.usefixtures("captures")
def test_numbers_that_are_not_finite_and_were_written_before_a_change_was_seen_are_not_read():
    model = built("llama")
    attention = model.model.layers[0].self_attn
    scale = attention.scaling
    for scaling in (float("nan"), float("nan"), scale):
        attention.scaling = scaling
        found = looped(model, prompt(), **GREEDY)
    assert torch.equal(found, model.generate(prompt(), **GREEDY))


def test_behind_a_long_prompt_nothing_runs_before_a_change_is_seen(captures, monkeypatch):
    model = built("llama", num_hidden_layers=1)
    replays = []
    for longest in (1024, 1024, 13, 13):  # positions of a short prompt; there are 14
        monkeypatch.setattr("graphex.loops.generate.LONGEST_CAPTURED", longest)
        model.model.layers[0].self_attn.scaling *= 0.5
        before = len(captures.replayed)
        assert torch.equal(looped(model, prompt(), **GREEDY), model.generate(prompt(), **GREEDY))
        replays.append(len(captures.replayed) - before)
    assert replays[1] - replays[0] == 3  # of the step before the change
    assert replays[2:] == [replays[0]] * 2


STEERING: list[torch.Tensor | None] = [torch.zeros(32)]


@pytest.mark.usefixtures("captures")
def test_a_tensor_that_only_python_leads_to_may_be_replaced():
    model, held = built("llama", num_hidden_layers=1), SimpleNamespace(by=torch.zeros(32))
    mlp = model.model.layers[0].mlp
    inner = mlp.forward
    mlp.forward = lambda x: inner(x) + held.by + STEERING[0]
    changes = (
        lambda by: setattr(held, "by", by),
        lambda by: operator.setitem(STEERING, 0, by),
        lambda by: setattr(held.by, "data", by),
    )
    for seed, change in enumerate((*changes, *changes)):
        change(4 * torch.randn(32, generator=torch.Generator().manual_seed(seed)))
        assert torch.equal(looped(model, prompt(), **GREEDY), model.generate(prompt(), **GREEDY))
    assert graphex.generation(model).last.captured
    assert reasons(model) == []


@pytest.mark.usefixtures("captures")
def test_a_step_that_reads_a_tensor_to_which_no_way_is_known_is_not_captured():
    model, long = built("llama", num_hidden_layers=1), [None] * 2000
    mlp = model.model.layers[0].mlp
    inner = mlp.forward
    mlp.forward = lambda x: inner(x) + long[-1]
    with pytest.warns(graphex.GraphexWarning, match="found on no way from the model"):
        for seed in range(3):
            long[-1] = 4 * torch.randn(32, generator=torch.Generator().manual_seed(seed))
            assert torch.equal(looped(model, prompt(), **GREEDY), model.generate(prompt(), **GREEDY))
    assert not graphex.generation(model).last.captured


class Heard:
    """A streamer of one sequence that keeps its tokens."""

    tokens: list[int]

    def put(self, tokens: torch.Tensor) -> None:
        self.tokens += tokens.view(-1).tolist()

    def end(self) -> None:
        pass


def test_steps_behind_a_first_token_that_ends_the_generation_leave_nothing(captures):
    model = built("llama", num_hidden_layers=1)
    long, short = prompt(1, length=9), prompt(1, length=5)
    end = int(model.generate(short, **GREEDY | {"max_new_tokens": 1})[0, -1])
    replays = []
    for given in (long, long, short, long):
        wanted = model.generate(given, eos_token_id=end, **GREEDY)
        assert torch.equal(looped(model, given, eos_token_id=end, **GREEDY), wanted)
        replays.append(len(captures.replayed))
    assert replays[2] - replays[1] == 3  # launched before the token was read
    assert replays[3] - replays[2] == replays[1] - replays[0]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_compiled_prompt_serves_several_lengths(name):
    model = (
        built(name, num_hidden_layers=1, sliding_window=80) if name == "gemma3" else built(name, num_hidden_layers=1)
    )
    for length in (7, 5, 30):
        wanted = model.generate(prompt(length=length), **GREEDY)
        assert torch.equal(looped(model, prompt(length=length), graphex_prefill=True, **GREEDY), wanted)
    assert len(graphex.generation(model).journal.graphs) == 2  # of the step, and of prompts


@pytest.mark.usefixtures("captures")
def test_a_compiled_prompt_is_captured_and_replayed():
    model = built("llama", num_hidden_layers=1)
    looped(model, prompt(), **GREEDY)  # the first prompt makes the cache
    for length in (7, 5, 30, 6):
        wanted = model.generate(prompt(length=length), **GREEDY)
        assert torch.equal(looped(model, prompt(length=length), graphex_prefill=True, **GREEDY), wanted)
    journal = graphex.generation(model).journal
    assert len(journal.captures) == 2  # of the step, and of prompts
    assert max(count["calls"] for count in journal.counts.values()) == 2


@pytest.mark.usefixtures("captures", "uncompiled")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_padded_prompt_gives_transformers_tokens(name):
    model = built(name)
    looped(model, prompt(length=9), **GREEDY)  # the first prompt makes the cache
    found = looped(model, prompt(), graphex_prefill=True, **GREEDY)
    assert torch.equal(found, model.generate(prompt(), **GREEDY))


def test_generations_in_threads():
    model = built("llama", num_hidden_layers=1)
    wanted = [model.generate(prompt(batch), **GREEDY) for batch in (1, 2, 1)]
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda batch: looped(model, prompt(batch), **GREEDY), (1, 2, 1)))
    assert all(map(torch.equal, found, wanted))


def test_options_of_the_backend_compile_the_step():
    model = built("llama", num_hidden_layers=1)
    looped(model, prompt(), graphex_options={"verify": True}, **GREEDY)
    assert {record.status for record in graphex.generation(model).journal.verifications} == {"equal"}
    with pytest.raises(graphex.OptionError, match="unknown option"):
        looped(model, prompt(), graphex_options={"verfy": True}, **GREEDY)
