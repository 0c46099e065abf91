"""The loop of `graphex.generate` around a model: what transformers' own loop gives, captured and launched ahead."""

from __future__ import annotations

import copy
import gc
import itertools
import time
import weakref
from functools import partial
from typing import Any

import pytest
import torch

import graphex
from graphex.loops import decode_loop
from tests.harness.generating import GREEDY, built, looped, prompt, reasons
from tests.harness.models import transformers

pytestmark = pytest.mark.usefixtures("captures", "uncompiled")
copied = decode_loop.Reading.send
SAMPLED = GREEDY | {"do_sample": True, "temperature": 1.5}


class Streamer:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.given: list[list[int]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.given.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


@pytest.fixture
def model() -> Any:
    return built("mistral")


def assert_same(model: Any, given: torch.Tensor, **wanted: Any) -> None:
    assert torch.equal(looped(model, given, **wanted), model.generate(given, **wanted))


def test_a_call_without_transformers_says_how_to_write_it(model):
    with pytest.raises(graphex.InputError, match=r"custom_generate=graphex\.generate"):
        graphex.generate(model, prompt())


def test_a_step_is_captured_once_and_replayed_in_every_generation(model, captures):
    for number in (1, 2):
        assert_same(model, prompt(), **GREEDY)
        assert len(captures.replayed) == number * 14  # one token comes from the prompt, one step is a rehearsal
    report = graphex.generation(model)
    assert [record.captured for record in report.generations] == [True, True]
    assert len(report.journal.captures) == 1
    assert "16 tokens after 7, batch 2" in str(report)
    assert reasons(model) == []


def test_a_report_is_about_the_last_generation_of_several_tokens(model):
    looped(model, prompt(), **GREEDY)
    looped(model, prompt(), **GREEDY | {"max_new_tokens": 1})
    report = graphex.generation(model)
    assert report.last.tokens == 16
    assert report.device_seconds > 0
    assert report.floor_bytes > sum(each.numel() for each in model.lm_head.parameters())
    assert "the device waits" in str(report)


def test_another_prompt_of_another_length_needs_no_capture(model):
    for length in (7, 12, 3):
        assert_same(model, prompt(length=length), **GREEDY)
    assert len(graphex.generation(model).journal.captures) == 1


def test_sequences_that_end_at_different_steps_are_padded(model):
    free = model.generate(prompt(), **GREEDY)
    ends = [int(free[0, 7 + 4]), int(free[1, 7 + 9])]
    assert_same(model, prompt(), **GREEDY | {"eos_token_id": ends, "pad_token_id": 5})


@pytest.mark.parametrize("at", [0, 1, 2, 14, 15])
def test_a_sequence_that_ends_at_once_or_late(model, at):
    free = model.generate(prompt(1), **GREEDY)
    assert_same(model, prompt(1), **GREEDY | {"eos_token_id": int(free[0, 7 + at])})


def test_a_seed_gives_transformers_tokens_and_leaves_the_generator_where_it_does(model):
    found = []
    for generate in (model.generate, lambda *args, **given: looped(model, *args, **given)):
        torch.manual_seed(3)
        found.append((generate(prompt(), **SAMPLED | {"eos_token_id": [7, 8, 9, 10]}), torch.rand(1)))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_tokens_are_drawn_as_often_as_they_are_likely(model):
    many = prompt(1).expand(2000, -1)
    torch.manual_seed(0)
    drawn = looped(model, many, **SAMPLED | {"max_new_tokens": 2, "top_k": 5})
    first = drawn[0, 7]
    with torch.no_grad():
        after = torch.cat([prompt(1), first[None, None]], 1)
        likely, tokens = (model(after).logits[0, -1] / 1.5).topk(5)
    second = drawn[drawn[:, 7] == first][:, 8]
    counted = (second[:, None] == tokens).float().mean(0)
    assert counted.sum() == 1
    torch.testing.assert_close(counted, likely.softmax(-1), rtol=0, atol=0.06)


def test_scores_logits_and_the_cache_are_returned(model):
    free = model.generate(prompt(), **GREEDY)
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "repetition_penalty": 1.3}
    wanted = GREEDY | asked | {"eos_token_id": [int(free[0, 10]), int(free[1, 12])]}
    theirs, mine = model.generate(prompt(), **wanted), looped(model, prompt(), **wanted)
    assert torch.equal(mine.sequences, theirs.sequences)
    for name in ("scores", "logits"):
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-4, atol=1e-4)
    assert mine.past_key_values.get_seq_length() == theirs.past_key_values.get_seq_length()
    for one, other in zip(mine.past_key_values.layers, theirs.past_key_values.layers, strict=True):
        torch.testing.assert_close((one.keys, one.values), (other.keys, other.values), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_is_continued(name, kind):
    model = built(name)

    def cache() -> Any:
        if kind == "static":
            return transformers.StaticCache(config=model.config, max_cache_len=64)
        return transformers.DynamicCache(config=model.config)

    found = []
    for generate in (model.generate, lambda *args, **given: looped(model, *args, **given)):
        past = cache()
        tokens = generate(prompt(), past_key_values=past, **GREEDY)
        longer = torch.cat([tokens, prompt(length=3)], 1)
        found.append(generate(longer, past_key_values=past, **GREEDY))
    assert torch.equal(found[0], found[1])
    assert reasons(model) == []


@pytest.mark.parametrize("size", [5, 16, 22])
def test_a_prompt_that_does_not_fit_into_the_cache_is_for_transformers_to_refuse(size):
    model = built("llama")
    cache = transformers.StaticCache(config=model.config, max_cache_len=size)
    if size == 22:
        assert torch.equal(looped(model, prompt(), past_key_values=cache, **GREEDY), model.generate(prompt(), **GREEDY))
    else:
        with pytest.warns(graphex.GraphexWarning, match=f"room for {size} positions"), pytest.raises(IndexError):
            looped(model, prompt(), past_key_values=cache, **GREEDY)
    assert_same(model, prompt(), **GREEDY)


def test_a_prompt_that_is_longer_than_the_window_and_all_caches_so_far(model):
    for length in (7, 150, 9):
        assert_same(model, prompt(length=length), **GREEDY)
    assert reasons(model) == []


def test_a_prompt_in_chunks(model):
    assert_same(model, prompt(length=11), prefill_chunk_size=4, **GREEDY)


def test_a_prompt_of_embeddings(model):
    embeds = model.get_input_embeddings()(prompt()).detach()
    theirs = model.generate(inputs_embeds=embeds, **GREEDY)
    assert torch.equal(model.generate(inputs_embeds=embeds, custom_generate=graphex.generate, **GREEDY), theirs)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_a_batch_with_padding(name):
    model = built(name)
    mask = torch.ones_like(prompt(3))
    mask[0, :4], mask[1, :1] = 0, 0
    assert_same(model, prompt(3), attention_mask=mask, **GREEDY)


def test_several_sequences_for_a_prompt(model):
    torch.manual_seed(1)
    theirs = model.generate(prompt(), num_return_sequences=3, **SAMPLED)
    torch.manual_seed(1)
    assert torch.equal(looped(model, prompt(), num_return_sequences=3, **SAMPLED), theirs)


def test_a_streamer_gets_every_token_of_each_step(model):
    theirs, mine = Streamer(), Streamer()
    model.generate(prompt(1), streamer=theirs, **GREEDY)
    looped(model, prompt(1), streamer=mine, **GREEDY)
    assert mine.given == theirs.given
    assert mine.ended


@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
def test_steps_write_their_tokens_on_the_host_and_nothing_is_copied_unless_something_follows(model, monkeypatch):
    sent = []
    monkeypatch.setattr(decode_loop.Reading, "send", lambda *given: sent.append(given) or copied(*given))
    ends = model.generate(prompt(), **GREEDY)[:, 11].tolist()
    for wanted in (GREEDY, GREEDY | {"eos_token_id": ends}, GREEDY | {"max_new_tokens": 40}, SAMPLED):
        torch.manual_seed(1)
        theirs = model.generate(prompt(), **wanted)
        torch.manual_seed(1)
        assert torch.equal(looped(model, prompt(), **wanted), theirs)
    assert not sent
    assert_same(model, prompt(), **GREEDY | {"stopping_criteria": [AfterFive()]})
    assert len(sent) == 5


@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
def test_a_device_that_does_not_write_on_the_host_copies_and_that_is_told(model, captures, monkeypatch):
    def buffer(like: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(like, dtype=torch.int32 if like.dim() == 2 else like.dtype)  # the first is refused

    monkeypatch.setattr(captures, "host_buffer", buffer)
    assert_same(model, prompt(), **GREEDY)
    assert_same(model, prompt(3), **GREEDY)
    told = [each.what for each in graphex.generation(model).journal.fallbacks]
    assert told == ["tokens are copied to the host after each step"] * 2  # a session for each batch


def test_time_that_is_up_ends_a_generation(model):
    tokens = looped(model, prompt(), max_time=1e-6, **GREEDY)
    assert tokens.shape[1] == 8
    assert_same(model, prompt(), max_time=600.0, **GREEDY)


def tokenizer() -> Any:
    """One token for each letter of ASCII: 0 is the space, 33 is A."""
    from tokenizers import Tokenizer, decoders, models

    made = Tokenizer(models.BPE(vocab={chr(32 + number): number for number in range(95)}, merges=[]))
    made.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made)


def test_a_stop_string_ends_a_generation(model):
    from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

    free = model.generate(prompt(1), **GREEDY)
    end = "".join(chr(32 + int(token)) for token in free[0, 11:13])
    criteria = StopStringCriteria(tokenizer=tokenizer(), stop_strings=[end, "never"])
    stopping = GREEDY | {"stopping_criteria": StoppingCriteriaList([criteria])}
    theirs = model.generate(prompt(1), **stopping)
    assert theirs.shape[1] < free.shape[1]
    assert torch.equal(looped(model, prompt(1), **stopping), theirs)
    assert reasons(model) == []


# -- what the host does, and what is left to transformers --------------------------------------------------------------


class OneMore(transformers.LogitsProcessor):
    """A processor with a state, which no captured graph could have."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores.index_fill(1, torch.tensor([self.calls, int(input_ids[0, -1])]), -1e9)


class AfterFive(transformers.StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **given: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 12)


@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
def test_a_processor_of_the_users_runs_on_the_host_and_the_model_is_still_captured(model, captures):
    theirs, mine = OneMore(), OneMore()
    tokens = model.generate(prompt(), logits_processor=transformers.LogitsProcessorList([theirs]), **GREEDY)
    found = looped(model, prompt(), logits_processor=transformers.LogitsProcessorList([mine]), **GREEDY)
    assert torch.equal(found, tokens)
    assert mine.calls == theirs.calls
    assert reasons(model) == ["OneMore is not traced as one graph"]  # nothing is, here
    assert len(captures.replayed) == 14


@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
def test_a_criterion_of_the_users_runs_on_the_host(model):
    assert_same(model, prompt(), stopping_criteria=transformers.StoppingCriteriaList([AfterFive()]), **GREEDY)
    assert reasons(model) == ["AfterFive is not known to work on the device"]


def test_a_subclass_of_a_known_processor_is_not_taken_for_it(model):
    class Mine(transformers.TemperatureLogitsWarper):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return -scores

    given = transformers.LogitsProcessorList([Mine(0.5)])
    with pytest.warns(graphex.GraphexWarning, match="Mine is not traced"):
        found = looped(model, prompt(), logits_processor=given, **GREEDY)
    assert torch.equal(found, model.generate(prompt(), logits_processor=given, **GREEDY))


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({"num_beams": 2}, "the decoding mode is beam_search"),
        ({"use_cache": False}, "no cache is used"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "attentions or hidden states are wanted"),
    ],
    ids=["beams", "no cache", "hidden states"],
)
def test_what_the_loop_does_not_do_is_left_to_transformers(model, wanted, reason):
    with pytest.warns(graphex.GraphexWarning, match=reason):
        mine = looped(model, prompt(), **GREEDY | wanted)
    theirs = model.generate(prompt(), **GREEDY | wanted)
    if isinstance(theirs, torch.Tensor):
        assert torch.equal(mine, theirs)
    else:
        assert torch.equal(mine.sequences, theirs.sequences)
        assert len(mine.hidden_states) == len(theirs.hidden_states)
    assert reasons(model) == [reason]
    assert graphex.generation(model).last is None


@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook", "for all modules"])
def test_a_hook_that_comes_after_a_capture_is_called(model, kind):
    assert_same(model, prompt(), **GREEDY)

    def hook(module: Any, given: Any, result: Any = None) -> Any:
        if module is not model.lm_head:
            return None
        return (-given[0],) if result is None else -result

    for_all = torch.nn.modules.module.register_module_forward_hook
    handle = for_all(hook) if kind == "for all modules" else getattr(model.lm_head, kind)(hook)
    try:
        assert_same(model, prompt(), **GREEDY)
    finally:
        handle.remove()
    assert len(reasons(model)) == 1
    assert_same(model, prompt(), **GREEDY)


def test_what_transformers_hooks_into_a_model_is_not_in_the_way(model):
    model(prompt(), output_hidden_states=True)
    assert_same(model, prompt(), **GREEDY)
    assert reasons(model) == []


def test_plain_arguments_of_a_model_reach_every_step_and_others_are_left_to_transformers(model):
    class Scaled(type(model)):
        def forward(self, input_ids=None, past_key_values=None, scale=1.0, scales=(1.0,), **given):
            found = super().forward(input_ids=input_ids, past_key_values=past_key_values, **given)
            found.logits = found.logits * scale * scales[0]
            return found

    scaled = Scaled(model.config).eval()
    scaled.load_state_dict(model.state_dict())
    scaled.generation_config.eos_token_id = None
    for scale in (1.0, -1.0, 1.0):
        assert_same(scaled, prompt(), scale=scale, **GREEDY)
    assert reasons(scaled) == []
    assert not torch.equal(looped(scaled, prompt(), scale=-1.0, **GREEDY), looped(scaled, prompt(), **GREEDY))
    with pytest.warns(graphex.GraphexWarning, match="the model is called with 'scales'"):
        assert_same(scaled, prompt(), scales=(-1.0,), **GREEDY)


@pytest.mark.parametrize("steering", ["tensor", [0], {0: 0}], ids=["alone", "in a list", "in a dict"])
def test_a_tensor_that_is_no_parameter_may_be_replaced(model, steering):
    """A vector that steers a layer, for instance."""
    layer, alone = model.model.layers[0], steering == "tensor"
    inner = layer.mlp.forward
    layer.mlp.forward = lambda x: inner(x) + (layer.steering if alone else layer.steering[0])
    for seed in range(3):
        vector = 4 * torch.randn(model.config.hidden_size, generator=torch.Generator().manual_seed(seed))
        layer.steering = vector if alone else type(steering)([vector] if steering == [0] else {0: vector})
        assert_same(model, prompt(), **GREEDY)


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_a_prompt_whose_angles_depend_on_its_length_is_not_padded(rope):
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0], "original_max_position_embeddings": 40}
    given = {"rope_type": rope, "factor": 4.0, "rope_theta": 10000.0, **(factors if rope == "longrope" else {})}
    model = built("llama", rope_parameters=given, max_position_embeddings=40)
    wanted = {**GREEDY, "return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 2}
    theirs = model.generate(prompt(length=30), **wanted).logits
    for _ in range(3):
        ours = looped(model, prompt(length=30), graphex_prefill=True, **wanted).logits
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert all(f"('{rope}') depend on the length" in reason for reason in reasons(model))
    assert reasons(model)


def test_a_vocabulary_that_grew(model):
    wanted = GREEDY | {"min_new_tokens": 16, "eos_token_id": 5, "bad_words_ids": [[7], [8, 9]]}
    assert_same(model, prompt(), **wanted)
    model.resize_token_embeddings(model.config.vocab_size + 8, mean_resizing=False)
    assert_same(model, prompt(), **wanted)


@pytest.mark.parametrize("start", [0, 5])
def test_positions_of_the_users_in_a_compiled_prompt(model, start):
    positions = torch.arange(7).expand(2, 7) + start
    theirs = model.generate(prompt(), position_ids=positions, **GREEDY)
    for _ in range(3):
        assert torch.equal(looped(model, prompt(), position_ids=positions, graphex_prefill=True, **GREEDY), theirs)


@pytest.mark.parametrize(
    "wanted",
    [
        {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": "high"},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
        {"num_beams": 2, "force_words_ids": [[5]]},
        {"num_beams": 2, "streamer": Streamer()},
    ],
    ids=["contrastive", "dola", "groups of beams", "forced words", "streamed beams"],
)
def test_what_transformers_refuses_is_refused(model, wanted):
    for generate in (model.generate, lambda *args, **given: looped(model, *args, **given)):
        with pytest.raises(ValueError, match=r"trust_remote_code=True|streamer"):
            generate(prompt(), **GREEDY | wanted)
    assert reasons(model) == []


def test_beams_that_are_sampled_take_a_streamer_as_transformers_does(model):
    wanted = SAMPLED | {"num_beams": 2, "streamer": Streamer()}
    assert looped(model, prompt(), **wanted).shape == model.generate(prompt(), **wanted).shape


def test_layers_that_keep_another_state_are_left_to_transformers(captures):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "vocab_size": 96}
    config = transformers.MambaConfig(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = transformers.MambaForCausalLM(config).eval()
    with pytest.warns(graphex.GraphexWarning, match="left to transformers"):
        mine = looped(model, prompt(), **GREEDY)
    assert torch.equal(mine, model.generate(prompt(), **GREEDY))


def test_an_assistant_is_not_needed(model):
    with pytest.warns(graphex.GraphexWarning, match="assistant_model and prompt_lookup_num_tokens are not used"):
        mine = looped(model, prompt(1), prompt_lookup_num_tokens=3, **GREEDY)
    assert torch.equal(mine, model.generate(prompt(1), **GREEDY))


def test_a_capture_that_fails_is_on_record_and_the_loop_goes_on(model, captures):
    captures.fail_at = "op"
    with pytest.warns(graphex.GraphexWarning, match="the loop runs without capture"):
        mine = looped(model, prompt(), **GREEDY)
    assert torch.equal(mine, model.generate(prompt(), **GREEDY))
    assert not graphex.generation(model).last.captured


# -- the model around it -----------------------------------------------------------------------------------------------


def test_weights_that_were_replaced_are_read(model):
    assert_same(model, prompt(), **GREEDY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.flip(0).clone()
    assert_same(model, prompt(), **GREEDY)
    assert len(graphex.generation(model).journal.captures) == 2


def test_a_method_that_was_replaced_on_a_class_is_called(model, monkeypatch):
    mlp = type(model.model.layers[0].mlp)
    kept = mlp.forward
    for method in (kept, lambda self, x: -3 * kept(self, x), kept):
        monkeypatch.setattr(mlp, "forward", method)
        assert_same(model, prompt(), **GREEDY)
    assert len(graphex.generation(model).journal.captures) == 2
    assert reasons(model) == []


class Scale:
    """What a module may hold."""

    def scaled(self, x):
        return x


def test_a_method_that_was_replaced_on_the_class_of_an_object_that_a_module_holds_is_called(model, monkeypatch):
    mlp = type(model.model.layers[0].mlp)
    kept = mlp.forward
    for layer in model.model.layers:
        layer.mlp.scale = Scale()
    monkeypatch.setattr(mlp, "forward", lambda self, x: self.scale.scaled(kept(self, x)))
    for method in (Scale.scaled, lambda self, x: -3 * x, lambda self, x: 2 * x):
        monkeypatch.setattr(Scale, "scaled", method)
        with torch.compiler.set_stance("default"):  # Dynamo has no guard on it
            assert_same(model, prompt(), **GREEDY)


class Negated:
    """Stands for a method and says nothing of its arguments."""

    def __init__(self, method):
        self.method = method

    def __get__(self, thing, kind=None):
        return self if thing is None else partial(self, thing)

    def __call__(self, *given):
        return -3 * self.method(*given)


def test_an_object_may_stand_for_a_method_on_a_class(model, monkeypatch):
    mlp = type(model.model.layers[0].mlp)
    kept = mlp.forward
    for method in (kept, Negated(kept), kept):
        monkeypatch.setattr(mlp, "forward", method)
        assert_same(model, prompt(), **GREEDY)


@pytest.mark.parametrize("prefill", [False, True], ids=["", "compiled prompt"])
def test_dropout_in_training_mode_is_left_to_transformers(model, prefill):
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()
    tokens, states = [], []
    with pytest.warns(graphex.GraphexWarning, match=r"draws random numbers .* call model.eval\(\)"):
        for run in (model.generate, partial(looped, model, graphex_prefill=prefill)):
            torch.manual_seed(0)
            tokens.append(run(prompt(), **SAMPLED))
            states.append(torch.get_rng_state())
    assert torch.equal(*tokens)
    assert torch.equal(*states)
    assert graphex.generation(model).last is None
    model.eval()
    assert_same(model, prompt(), **GREEDY)
    assert len(reasons(model)) == 1


def test_training_mode_without_dropout_is_captured(model):
    assert_same(model.train(), prompt(), **GREEDY)
    assert graphex.generation(model).last.captured


def test_a_model_of_another_type_and_other_modes_of_torch_are_other_generations(model):
    for inference, autocast, kind in itertools.product((True, False), (True, False), (torch.float32, torch.bfloat16)):
        model.to(kind)
        with torch.inference_mode(inference), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            assert_same(model, prompt(), **GREEDY)
    assert reasons(model) == []


def test_an_interrupted_generation_leaves_the_model_usable(model):
    class Interrupting(Streamer):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.given) == 5:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        looped(model, prompt(1), streamer=Interrupting(), **GREEDY)
    assert_same(model, prompt(1), **GREEDY)
    assert_same(model, prompt(2), **GREEDY)


def test_a_failing_prompt_leaves_the_model_usable(model):
    with pytest.raises(IndexError):
        looped(model, prompt() + 1000, **GREEDY)
    assert_same(model, prompt(), **GREEDY)


def test_a_copy_of_a_model_shares_nothing_and_a_model_that_goes_is_not_kept(model):
    looped(model, prompt(), **GREEDY)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.neg_()
    assert_same(other, prompt(), **GREEDY)
    gone = weakref.ref(other)
    del other
    gc.collect()
    assert gone() is None


def test_a_model_that_has_not_generated_has_no_report(model):
    with pytest.raises(graphex.InputError, match="has not generated with graphex"):
        graphex.generation(model)


def test_the_first_tokens_time_is_on_record(model):
    started = time.perf_counter()
    looped(model, prompt(), **GREEDY)
    last = graphex.generation(model).last
    assert 0 < last.first_token_seconds < time.perf_counter() - started
    assert (last.batch, last.prompt, last.tokens) == (2, 7, 16)


def test_the_time_of_a_token_is_told_without_that_of_compiling(model):
    with torch.compiler.set_stance("default"):
        looped(model, prompt(), **GREEDY)
        first = graphex.generation(model)
        looped(model, prompt(), **GREEDY)
    assert 0 < first.last.compile_seconds < first.last.seconds
    assert first.token_seconds == pytest.approx((first.last.seconds - first.last.compile_seconds) / 14)
    assert "compiling included" in str(first)
    assert not graphex.generation(model).last.compile_seconds


class Steered(torch.nn.Module):
    """A layer with a choice that Python makes, in code that Dynamo does not trace."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer, self.active, self.scales = layer, "one", {"one": 0.5, "other": -0.5}
        self.step = torch.sin

    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.step(x) * self.scales[self.active]


def test_what_python_chooses_in_code_that_is_not_traced_is_chosen_in_every_generation(model):
    steered = model.model.layers[0].mlp = Steered(model.model.layers[0].mlp)
    changes = (
        lambda: None,
        lambda: setattr(steered, "active", "other"),
        lambda: steered.scales.update(other=2.0),
        lambda: setattr(steered, "step", torch.tanh),
        lambda: setattr(steered.layer, "act_fn", torch.nn.ReLU()),
    )
    for change in changes:
        change()
        assert_same(model, prompt(), **GREEDY)
        assert_same(model, prompt(), **GREEDY)
    assert len(graphex.generation(model).journal.captures) == len(changes)
    assert reasons(model) == []
