"""Generation on a GPU: one captured graph a token, with the tokens of the uncaptured loop and of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import graphex
from tests.harness.decoding import DECODERS
from tests.harness.generating import FAMILIES
from tests.harness.models import transformers

pytestmark = pytest.mark.cuda
GREEDY = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def no_warning(recwarn: pytest.WarningsRecorder) -> Iterator[None]:
    """Nothing falls back, unless a test says so by clearing this."""
    yield
    assert not [each for each in recwarn if issubclass(each.category, graphex.GraphexWarning)]


def built(name: str, dtype: torch.dtype) -> Any:
    model: Any = (DECODERS.get(name) or FAMILIES[name]).build("cuda")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)
    return model.to(dtype)


def prompt(batch: int = 2) -> torch.Tensor:
    return torch.randint(3, 90, (batch, 9), generator=torch.Generator().manual_seed(1)).cuda()


def looped(model: Any, given: torch.Tensor, **wanted: Any) -> Any:
    return model.generate(given, custom_generate=graphex.generate, **wanted)


@pytest.mark.parametrize("name", DECODERS)
def test_tokens_are_those_of_transformers(name: str) -> None:
    model = built(name, torch.float32)
    wanted = model.generate(prompt(), **GREEDY)
    for _ in range(2):
        assert torch.equal(looped(model, prompt(), **GREEDY), wanted)
    report = graphex.generation(model)
    assert report.last is not None
    assert report.last.captured
    assert len(report.journal.captures) == 1
    assert report.device_seconds is not None


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - DECODERS.keys()))
def test_tokens_of_other_families_are_those_of_transformers(name: str) -> None:
    model = built(name, torch.float32)
    if name == "bloom" and "prepare_inputs_for_generation" in vars(type(model)):  # transformers 5.17
        pytest.skip("left to transformers")
    wanted = GREEDY | {"max_new_tokens": 16}
    assert torch.equal(looped(model, prompt(), **wanted), model.generate(prompt(), **wanted))
    report = graphex.generation(model)
    assert report.last is not None
    assert report.last.captured
    assert report.journal.fallbacks == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "mixtral", "qwen3_moe"])
def test_tokens_are_those_of_transformers_loop_over_the_same_step(name: str, dtype: torch.dtype) -> None:
    """Both compile the same model for a cache of the same size; 16-bit types round as the kernels do."""
    model = built(name, dtype)
    found = looped(model, prompt(), **GREEDY)
    config = transformers.CompileConfig(backend="graphex", mode=None, fullgraph=False)
    cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    wanted = model.generate(prompt(), past_key_values=cache, compile_config=config, **GREEDY)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_captured_loop_gives_the_tokens_of_an_uncaptured_one(
    name: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    from graphex.device import Device
    from graphex.loops import session

    model = built(name, torch.bfloat16)
    captured = looped(model, prompt(), **GREEDY)
    del model.__dict__["_graphex_generation"]
    assert not any(issubclass(each.category, graphex.GraphexWarning) for each in recwarn)
    monkeypatch.setattr(session, "device_of", lambda devices: Device())
    assert torch.equal(looped(model, prompt(), **GREEDY), captured)
    recwarn.clear()  # a device without graphs does not write on the host, and that is told


def test_a_seed_gives_the_tokens_of_transformers_and_leaves_the_generator_where_it_does() -> None:
    model = built("llama", torch.float32)
    found = []
    ends = list(range(40, 44))
    sampled = GREEDY | {"do_sample": True, "temperature": 1.5, "top_k": 30, "top_p": 0.9, "eos_token_id": ends}
    for generate in (model.generate, lambda *args, **given: looped(model, *args, **given)):
        for _ in range(3):
            torch.manual_seed(5)
            found.append((generate(prompt(), **sampled), torch.rand(1, device="cuda")))
    for tokens, after in found[1:]:
        assert torch.equal(tokens, found[0][0])
        assert torch.equal(after, found[0][1])


def test_another_seed_gives_other_tokens() -> None:
    model = built("llama", torch.float32)
    found = []
    for seed in range(3):
        torch.manual_seed(seed)
        found.append(looped(model, prompt(), **GREEDY | {"do_sample": True, "temperature": 3.0}))
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_weights_that_were_replaced_are_read(name: str) -> None:
    model = built(name, torch.float32)
    looped(model, prompt(), **GREEDY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.flip(0).clone()
    assert torch.equal(looped(model, prompt(), **GREEDY), model.generate(prompt(), **GREEDY))


def test_a_batch_with_padding_that_stops_at_different_steps() -> None:
    model = built("mistral", torch.float32)
    mask = torch.ones_like(prompt())
    mask[0, :4] = 0
    free = model.generate(prompt(), attention_mask=mask, **GREEDY)
    stopping = GREEDY | {"eos_token_id": [int(free[0, 15]), int(free[1, 25])], "attention_mask": mask}
    assert torch.equal(looped(model, prompt(), **stopping), model.generate(prompt(), **stopping))


def test_an_interrupted_generation_leaves_the_model_usable() -> None:
    class Interrupting:
        put_so_far = 0

        def put(self, value: torch.Tensor) -> None:
            self.put_so_far += 1
            if self.put_so_far == 10:
                raise KeyboardInterrupt

        def end(self) -> None:
            raise AssertionError("it was interrupted")

    model = built("mistral", torch.float32)
    wanted = model.generate(prompt(), **GREEDY)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            looped(model, prompt(), streamer=Interrupting(), **GREEDY)
        assert torch.equal(looped(model, prompt(), **GREEDY), wanted)


def test_end_tokens_are_found_on_the_device_and_the_next_generation_only_replays() -> None:
    model = built("llama", torch.float32)
    free = model.generate(prompt(), **GREEDY)
    stopping = GREEDY | {"eos_token_id": [int(free[0, 15]), int(free[1, 25])]}
    wanted = model.generate(prompt(), **stopping)
    assert torch.equal(looped(model, prompt(), **stopping), wanted)
    counts = [dict(each) for each in graphex.generation(model).journal.counts.values()]
    assert torch.equal(looped(model, prompt(), **stopping), wanted)
    assert [dict(each) for each in graphex.generation(model).journal.counts.values()] == counts


def test_tokens_are_written_on_the_host_by_the_step_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def copied(*given: object) -> None:
        raise AssertionError("a step was copied to the host")

    monkeypatch.setattr("graphex.loops.decode_loop.Reading.send", copied)
    model = built("llama", torch.float32)
    wanted = model.generate(prompt(), **GREEDY)
    end = int(wanted[0, 20])
    for extra in ({}, {"eos_token_id": end}, {"eos_token_id": end}, {"max_new_tokens": 30}):
        given = GREEDY | extra
        assert torch.equal(looped(model, prompt(), **given), model.generate(prompt(), **given))


@pytest.mark.parametrize("done", [False, True])
def test_a_report_in_pinned_memory_is_that_of_the_reference(done: bool) -> None:
    def state(where: str) -> list[torch.Tensor]:
        tokens, unfinished = torch.zeros(3, 9, dtype=torch.long), torch.tensor([True, False, True])
        made = (torch.tensor([12, 11, 5]), tokens, tokens[:, :1].clone(), torch.tensor(4), unfinished)
        return [each.to(where) for each in (*made, torch.tensor(done))]

    last = {"pad": torch.tensor(1), "ends": torch.tensor([5, 12])}
    expected, pinned = torch.full((3, 4), -1), torch.full((3, 4), -1).pin_memory()
    torch.ops.graphex.append_tokens_(*state("cpu"), **last, report=expected)
    torch.ops.graphex.append_tokens_(
        *state("cuda"), **{name: each.cuda() for name, each in last.items()}, report=pinned
    )
    torch.cuda.synchronize()
    assert torch.equal(pinned, expected)
    assert (expected[1] == torch.tensor([12, 1, 5, 1])).all() != done


def test_two_threads_generate_with_one_model() -> None:
    model = built("llama", torch.float32)
    wanted = [model.generate(prompt(batch), **GREEDY) for batch in (1, 2, 1)]
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda batch: looped(model, prompt(batch), **GREEDY), (1, 2, 1)))
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.equal(mine, theirs)


def test_a_decode_loop_without_transformers() -> None:
    count = torch.zeros((), dtype=torch.long, device="cuda")

    def step(state: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        state["count"].add_((state["count"] < 10).long())
        return state["count"][None] * 2, state["count"] >= 10

    loop = graphex.decode_loop(step, {"count": count}, max_steps=50)
    assert [int(tokens) for tokens in loop] == [2 * (at + 1) for at in range(10)]
    assert [record.status for record in loop.journal.captures] == ["captured"]
