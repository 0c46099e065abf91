"""Generation with a model of transformers, as one captured graph a token.

tokens = model.generate(prompt, max_new_tokens=128, custom_generate=graphex.generate)
print(graphex.generation(model))

transformers prepares inputs, processors and stopping criteria, and calls `generate` instead of its own loop. Here:

    prefill    the prompt, as transformers does it, into a `LoopCache`
    first      its logits are processed, and a token is chosen
    steps      model, processors, choice, stopping criteria and all counting: a `DecodeLoop`

The host does the work that the device cannot (a processor of the user's, for instance) between two captured parts, or
leaves the whole call to transformers. Both are on record: `graphex.generation(model)`.

`Kept` holds scores, logits and generator states of every step. Steps that ran after the last one leave nothing behind:
tokens and caches do not count them, their scores are dropped, and the random generator goes back to where it was.

`GenerationReport` shows the times of a model's generations, and how far they are from the floor. The floor of a token
is the time to read, once, the weights that it needs and the keys and values of all positions. Of stacked experts only
those count that a token chooses. `device_seconds` is the time of a captured step, replayed in a row; for the rest of a
token's time the device waits.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from graphex.device import device_of
from graphex.errors import InputError, OptionError
from graphex.loops.decode_loop import AHEAD, DecodeLoop, FixedCall, Posted, Reading, TokenRing
from graphex.loops.loop_cache import write
from graphex.loops.processors import Process
from graphex.loops.session import (
    ALREADY_KNOWN,
    LONGEST_CAPTURED,
    PLAIN,
    Session,
    Sessions,
    Wanted,
    has_sessions,
    sessions_of,
)
from graphex.loops.step_state import users_hook
from graphex.records import FellBack, Generated, Journal

_OWN_INPUTS = ("Phi3ForCausalLM", "PhimoeForCausalLM")  # theirs differ for prompts beyond the first table of angles
_CAPTURING = "transformers.utils.output_capturing"  # where nothing is to be captured, and else this loop is not asked
_LEFT = "generation is left to transformers"
# A mask of dropout is as large as the cache, and the loop's cache has room for positions to come.
_DRAWS = "the model draws random numbers (dropout in training mode); call model.eval() before it generates"


@torch.no_grad()
def generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Sequence[Any] | None = None,
    stopping_criteria: Sequence[Any] | None = None,
    generation_config: Any = None,
    synced_gpus: bool = False,
    streamer: Any = None,
    graphex_options: Mapping[str, Any] | None = None,
    graphex_prefill: bool = False,
    **model_kwargs: Any,
) -> Any:
    """A decoding loop for `model.generate(..., custom_generate=graphex.generate)`.

    Greedy search and sampling, with the tokens that transformers' own loop would give. `graphex_options` are the
    options of the backend that compiles the step; they are passed to `model.generate` too. So is `graphex_prefill`:
    with it prompts are compiled as well, for a few lengths.
    """
    if generation_config is None:
        raise InputError("transformers calls this: write model.generate(ids, custom_generate=graphex.generate).")
    streamer = streamer if streamer is not None else _from_caller("streamer")
    sessions = sessions_of(model)
    given = (input_ids, logits_processor, stopping_criteria, generation_config)
    leave = partial(_left_to_transformers, sessions, model, given, synced_gpus, streamer, model_kwargs)
    if reason := why_not(model, input_ids, stopping_criteria, generation_config, synced_gpus, model_kwargs):
        return leave(reason)
    if _from_caller("assistant_model") is not None or generation_config.prompt_lookup_num_tokens is not None:
        reason = "assistant_model and prompt_lookup_num_tokens are not used; the tokens are the same without"
        record = FellBack("generation", "no tokens are drafted", reason)
        sessions.journal.fall_back(record)
    if model_kwargs.get("attention_mask") is None and _counts_by_mask(model):
        model_kwargs["attention_mask"] = _nothing_masked(input_ids, model_kwargs)
    wanted = Wanted.of(*given, model_kwargs, partial(_users, sessions, model, input_ids))
    if isinstance(wanted, str):
        return leave(wanted)
    decoding = getattr(model, "_optimize_model_for_decode", nullcontext)
    started = time.perf_counter()
    drawn, trains = random_state(input_ids.device), any(each.training for each in model.modules())
    with _on_device_of(input_ids), sessions.borrowed(wanted, graphex_options) as session:
        while True:
            logits = session.prefill(wanted, generation_config, model_kwargs, compiled=graphex_prefill)
            if trains and not torch.equal(drawn, random_state(input_ids.device)):
                break
            generation = Generation(session, wanted, sessions.journal, streamer)
            generation.begin(logits)
            with decoding():
                if generation.is_right():
                    return generation.run(started)
            set_random_state(input_ids.device, drawn)
    set_random_state(input_ids.device, drawn)
    return leave(_DRAWS)


def why_not(
    model: Any, input_ids: Tensor, criteria: Any, config: Any, synced_gpus: bool, model_kwargs: dict[str, Any]
) -> str:
    """Why a call is not one for this loop, as far as it can be told from the call alone."""
    from transformers.generation.utils import GenerationMixin

    mode = config.get_generation_mode().value
    if mode not in ("greedy_search", "sample", "assisted_generation"):
        return f"the decoding mode is {mode}"
    if model.config.is_encoder_decoder:
        return "the model has an encoder and a decoder"
    if synced_gpus:
        return "several processes generate together"
    if not config.use_cache or model_kwargs.get("past_key_values") is None:
        return "no cache is used"
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        return "attentions or hidden states are wanted"
    if criteria.max_length is None:
        return "no maximum length is given"
    own = type(model).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation
    if own and type(model).__name__ not in _OWN_INPUTS:
        return f"{type(model).__name__} prepares the inputs of a step in its own way"
    short = getattr(model.config, "original_max_position_embeddings", None)
    if own and short is not None and criteria.max_length > short:
        return f"{type(model).__name__} switches its angles at {short} positions"
    if input_ids.device != model.device or len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return "the model and the prompt are not on one device"
    if hook := users_hook(model.modules(), harmless=_CAPTURING):
        return hook
    others = [
        name for name, value in model_kwargs.items() if name not in ALREADY_KNOWN and not isinstance(value, PLAIN)
    ]
    if others:
        return f"the model is called with '{others[0]}'"
    embeds = model_kwargs.get("inputs_embeds")
    more = 0 if embeds is None else max(0, embeds.shape[1] - input_ids.shape[1])
    return _why_no_room(model, model_kwargs["past_key_values"], criteria.max_length - 1 + more)


def _why_no_room(model: Any, cache: Any, positions: int) -> str:
    """Why a cache of the user's may be too small. A window needs no more than its own length."""
    config = model.config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    for layer in getattr(cache, "layers", ()):
        held = getattr(layer, "max_cache_len", None)
        if held is None or held >= positions or (layer.is_sliding and window is not None and held >= window):
            continue
        return f"the cache has room for {held} positions, and {positions} may be needed"
    return ""


def _counts_by_mask(model: Any) -> bool:
    """Whether a model that gets no mask makes one, as long as the cache says on the host: OPT and its like."""
    forwards = {getattr(each.forward, "__func__", each.forward) for each in model.modules()}  # one for all of a class
    return any("past_key_values_length" in _arguments_of(each) for each in forwards)


def _arguments_of(function: Any) -> Collection[str]:
    try:
        return inspect.signature(function).parameters
    except ValueError:  # an object that is called in place of a method, and does not say with what
        return ()


def _nothing_masked(input_ids: Tensor, model_kwargs: dict[str, Any]) -> Tensor:
    embeds = model_kwargs.get("inputs_embeds")
    prompt = input_ids.shape[1] if embeds is None else embeds.shape[1]
    past = int(model_kwargs["past_key_values"].get_seq_length())
    return input_ids.new_ones((input_ids.shape[0], past + prompt))


def _users(sessions: Sessions, model: Any, input_ids: Tensor, processor: Any) -> tuple[Process, Hashable] | str:
    """A processor of the user's as part of a step."""
    head = model.get_output_embeddings()
    if head is None:
        return "is called with scores of a size that is not known"
    scores = torch.zeros((input_ids.shape[0], head.weight.shape[0]), device=input_ids.device)
    return sessions.torch_code.process(processor, scores)


def _left_to_transformers(
    sessions: Sessions,
    model: Any,
    given: tuple[Any, ...],
    synced_gpus: bool,
    streamer: Any,
    model_kwargs: dict[str, Any],
    reason: str,
) -> Any:
    """transformers' own method for this mode of decoding, with a record and one warning.

    Raises OptionError, a ValueError, where transformers would raise one.
    """
    from transformers.generation.utils import GENERATION_MODES_MAPPING

    input_ids, processors, criteria, config = given
    mode = config.get_generation_mode()
    name = GENERATION_MODES_MAPPING[mode]
    if "/" in name:
        raise OptionError(
            f"{mode.value} is no part of transformers: its code is at https://hf.co/{name}. Call `generate` with "
            f"`custom_generate='{name}', trust_remote_code=True` in place of `graphex.generate`."
        )
    if mode.value == "beam_search" and streamer is not None:
        raise OptionError("transformers has no streamer for beam search. Set `num_beams` to 1, or leave it out.")
    if name == "_assisted_decoding":
        name = "_sample"  # an assistant guesses the tokens that this gives
    sessions.journal.fall_back(FellBack("generation", _LEFT, reason))
    method = getattr(type(model), name)
    extra = {"streamer": streamer} if "streamer" in inspect.signature(method).parameters else {}
    return method(
        model,
        input_ids,
        logits_processor=processors,
        stopping_criteria=criteria,
        generation_config=config,
        synced_gpus=synced_gpus,
        **extra,
        **model_kwargs,
    )


def _from_caller(name: str) -> Any:
    """An argument of the `model.generate` that called: transformers does not hand these to a custom loop."""
    from transformers.generation.utils import GenerationMixin

    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = sys._getframe(1)
    for _ in range(6):
        if frame.f_code is code:
            return frame.f_locals.get(name)
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def _on_device_of(tensor: Tensor) -> Any:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def random_state(device: torch.device) -> Tensor:
    """The state of the generator that ops on a device draw from."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Put a device's generator back to a state."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


# -- one run -----------------------------------------------------------------------------------------------------------


_BETWEEN = "a part of each step runs on the host, between two steps"


class Kept:
    """Scores, logits and states of the random generator, one of each for every step that was launched."""

    def __init__(self, wanted: Wanted, *, ahead: bool) -> None:
        self.scores: list[Tensor] | None = [] if wanted.keeps_scores else None
        self.logits: list[Tensor] | None = [] if wanted.keeps_logits else None
        self._states: list[Tensor] | None = [] if wanted.sample and ahead else None
        self._device = wanted.input_ids.device
        self.steps = 0

    def add(self, logits: Tensor, scores: Tensor) -> None:
        """Keep copies: a captured step returns memory of its own, which the next one writes to."""
        self.steps += 1
        if self.scores is not None:
            self.scores.append(scores.clone())
        if self.logits is not None:
            self.logits.append(logits.clone())
        if self._states is not None:
            self._states.append(random_state(self._device))

    def cut(self, steps: int) -> None:
        """Drop what was kept of later steps, and put the random generator back to where it was after the last."""
        if self._states is not None and steps < self.steps:
            set_random_state(self._device, self._states[steps - 1])
        for kept in (self.scores, self.logits):
            if kept is not None:
                del kept[steps:]


class Generation:
    """A generation that runs on a session until all its sequences are finished.

        begin       the first token, and replays of the captured step behind it
        is_right    whether that capture is still the model's step; the host asks while the device runs it
        run         all other tokens; if the capture was not right, the prompt is run again instead

    After a short prompt the device waits for the host, and Dynamo's guards take most of that time. So the first replays
    are launched before the guards are asked. That is safe: the weights are where they were, and running the prompt
    again overwrites what a wrong step has left. After a long prompt the device is still busy, so the guards come first.
    """

    def __init__(self, session: Session, wanted: Wanted, journal: Journal, streamer: Any) -> None:
        self._session, self._wanted, self._journal, self._streamer = session, wanted, journal, streamer
        # What the clock ends is not known to the device, and a cache that is returned must not have more in it.
        self._ahead = 1 if wanted.host or (wanted.limits and wanted.returns_cache) else AHEAD
        self._kept = Kept(wanted, ahead=self._ahead > 1 and session.device.captures)
        rows = session.report(wanted)
        self._ring = None if rows is None else TokenRing(rows, wanted.input_ids.shape[1])
        if wanted.host:
            journal.fall_back(FellBack("generation", _BETWEEN, wanted.host))
        self._part = session.captured_part(wanted) if wanted.max_steps > 1 else None
        self._loop = None if self._part is None else self._loop_of(self._part)

    def begin(self, logits: Tensor) -> None:
        """Launch the choice of the tokens after the prompt, and steps behind them."""
        self._reading = self._first(logits)
        positions = self._session.cache.prefilled - self._wanted.past
        self._is_ahead = positions * self._wanted.batch <= LONGEST_CAPTURED and self._launch()

    def is_right(self) -> bool:
        """Whether the steps that were launched, if any, are the model's. A wrong capture is not replayed again."""
        if self._loop is None:
            return True
        if not self._session.confirms(self._wanted) and self._is_ahead:
            self._reading.wait()
            self._loop.settle()
            return False
        self._launch()
        return True

    def _launch(self) -> bool:
        """Launch replays behind the first token, if they are captured and may run ahead of it. Returns whether."""
        if self._loop is None or self._part is None or not self._part.is_ready or self._ahead == 1:
            return False
        self._loop.launch()
        return True

    def run(self, started: float) -> Any:
        """From the tokens after the prompt to what `model.generate` returns."""
        tokens, finished = self._reading.wait()
        self._put(tokens)
        steps, first, compiling = 1, time.perf_counter(), 0.0
        loop, compiled = self._loop, len(self._session.journal.graphs)
        if loop is not None and not finished and not self._time_is_up():
            for tokens in loop:
                steps += 1
                if steps == 2 and len(self._session.journal.graphs) > compiled:
                    compiling = time.perf_counter() - first
                self._put(tokens)
                if loop.finished:
                    break
                if self._time_is_up():
                    loop.settle()
                    break
        is_captured = steps > 1 and self._part is not None and self._part.is_captured
        self._kept.cut(steps)
        if self._streamer is not None:
            self._streamer.end()
        wanted, seconds = self._wanted, time.perf_counter() - first
        sizes = (wanted.batch, wanted.input_ids.shape[1], steps)
        self._journal.add(Generated("generation", *sizes, first - started, seconds, is_captured, compiling))
        return self._result(steps)

    def _first(self, logits: Tensor) -> Reading | Posted:
        """The tokens after the prompt, on their way to the host."""
        device = self._session.device
        reading = Posted(self._ring, device) if self._ring else Reading(self._session.token[:, 0], device)
        reading.send(*(self._choose_on_host(logits, first=True) if self._wanted.host else self._choose(logits)))
        return reading

    def _loop_of(self, part: FixedCall) -> DecodeLoop:
        def captured() -> tuple[Tensor, Tensor]:
            tokens, done, logits, scores = part()
            self._kept.add(logits, scores)
            return tokens, done

        def in_parts() -> tuple[Tensor, Tensor]:
            return self._choose_on_host(part())

        step: Callable[[], tuple[Tensor, Tensor]] = in_parts if self._wanted.host else captured
        steps = self._wanted.max_steps - 1
        return DecodeLoop(step, self._session.device, max_steps=steps, ahead=self._ahead, ring=self._ring)

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        tokens, *found = self._session.choose(self._wanted, logits, first=True)
        self._kept.add(*found)
        return tokens, self._session.done

    def _choose_on_host(self, logits: Tensor, *, first: bool = False) -> tuple[Tensor, Tensor]:
        """`Session.choose` with transformers' own processors and criteria, which see a sequence that grows."""
        session, wanted, kept = self._session, self._wanted, self._kept
        count = wanted.input_ids.shape[1] + kept.steps
        logits = logits.to(dtype=torch.float32, copy=True)
        scores = wanted.logits_processor(session.tokens[:, :count].clone(), logits)
        kept.add(logits, scores)
        tokens = session.take(wanted, scores, first=first)
        seen = None if kept.scores is None else tuple(kept.scores)
        stops = wanted.stopping_criteria(session.tokens[:, : count + 1].clone(), seen)
        session.unfinished.logical_and_(~stops)
        session.done.copy_(~session.unfinished.any())
        return tokens, session.done

    def _put(self, tokens: Tensor) -> None:
        if self._streamer is not None:
            self._streamer.put(tokens)

    def _time_is_up(self) -> bool:
        return any(time.time() - each.initial_timestamp > each.max_time for each in self._wanted.limits)

    def _result(self, steps: int) -> Any:
        from transformers.generation.utils import GenerateDecoderOnlyOutput

        session, wanted, kept = self._session, self._wanted, self._kept
        count = wanted.input_ids.shape[1]
        sequences = torch.cat([wanted.input_ids, session.tokens[:, count : count + steps]], dim=1)
        if wanted.returns_cache:
            write(wanted.cache, session.cache, session.cache.prefilled + steps - 1)
        if not wanted.returns_dict:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=None if kept.scores is None else tuple(kept.scores),
            logits=None if kept.logits is None else tuple(kept.logits),
            past_key_values=wanted.cache,
        )


# -- what generations took ---------------------------------------------------------------------------------------------


_REPLAYS = 8


class GenerationReport:
    """The generations of one model with `graphex.generate`; the figures are those of the last one."""

    def __init__(self, model: Any, sessions: Sessions) -> None:
        self._model, self._session = model, sessions.last
        self.journal = _joined(sessions.journal, sessions.compiled)
        self.generations = self.journal.of(Generated)

    @property
    def last(self) -> Generated | None:
        """The last generation, of more than one token if there is such; None if all were left to transformers."""
        longer = [each for each in self.generations if each.tokens > 1]
        return next(reversed(longer or self.generations), None)

    @property
    def token_seconds(self) -> float | None:
        """The time of a token after the first one, without the one for which the step was compiled."""
        if self.last is None:
            return None
        others = self.last.tokens - (2 if self.last.compile_seconds else 1)
        return (self.last.seconds - self.last.compile_seconds) / others if others > 0 else None

    @cached_property
    def device_seconds(self) -> float | None:
        """The time of a captured step by itself; None where nothing is captured."""
        return None if self._session is None else _step_alone(self._session)

    @cached_property
    def floor_bytes(self) -> int:
        """The bytes that the last token read at least."""
        if self.last is None:
            return 0
        return floor_bytes(self._model, self.last.batch, self.last.prompt + self.last.tokens)

    @cached_property
    def floor_seconds(self) -> float | None:
        """`floor_bytes` at the speed of a large copy on the device; None on a CPU."""
        where = self._model.device
        return self.floor_bytes / _copy_speed(where) if where.type == "cuda" and self.last is not None else None

    def __str__(self) -> str:
        if self.last is None:
            reasons = "; ".join(dict.fromkeys(each.reason for each in self.journal.fallbacks))
            return f"no generation ran in graphex's loop: {reasons or 'none was asked for'}"
        return "\n".join(self._lines(self.last))

    def _lines(self, last: Generated) -> list[str]:
        lines = [f"{last.tokens} tokens after {last.prompt}, batch {last.batch}"]
        lines.append(f"first token     {last.first_token_seconds * 1e3:.2f} ms")
        if last.compile_seconds:
            lines.append(f"second token    {last.compile_seconds:.2f} s, compiling included")
        if (token := self.token_seconds) is not None:
            lines.append(f"every other     {token * 1e3:.3f} ms, {last.batch / token:.0f} tokens/s")
        if token is not None and self.device_seconds is not None:
            idle = max(0.0, 1 - self.device_seconds / token)
            lines.append(f"step alone      {self.device_seconds * 1e3:.3f} ms: the device waits {idle:.1%} of the time")
        read = f"{self.floor_bytes / 1e9:.3f} GB" if self.floor_bytes >= 1e8 else f"{self.floor_bytes / 1e6:.3g} MB"
        lines.append(f"floor           {read} of weights, keys and values")
        if token is not None and self.floor_seconds is not None:
            lines[-1] += f": {self.floor_seconds * 1e3:.3f} ms, a token takes {token / self.floor_seconds:.2f}x that"
        device = device_of({self._model.device})
        why = "" if device.captures else f": the device '{device.name}' has no graphs"
        lines.append("captured        " + ("one graph a token" if last.captured else f"nothing{why}"))
        lines += [f"{each.what}: {each.reason}" for each in dict.fromkeys(self.journal.fallbacks)]
        return lines


def generation(model: nn.Module) -> GenerationReport:
    """The report on `graphex.generate` for a model: times, the floor, the journal of what was compiled and refused."""
    if not has_sessions(model):
        raise InputError(
            f"{type(model).__name__} has not generated with graphex; "
            "call model.generate(..., custom_generate=graphex.generate) first."
        )
    return GenerationReport(model, sessions_of(model))


def floor_bytes(model: Any, batch: int, positions: int) -> int:
    """The bytes of weights, keys and values that a decode step reads at least, `positions` after the beginning."""
    from transformers.cache_utils import StaticCache

    config = model.config.get_text_config(decoder=True)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    experts = experts or getattr(config, "n_routed_experts", None)
    chosen = min(1.0, batch * config.num_experts_per_tok / experts) if experts else 1.0
    total, head = 0.0, model.get_output_embeddings()
    read = {id(each) for each in head.parameters()} if head is not None else set()
    tables = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)} - read
    for each in model.parameters():
        if id(each) not in tables:
            total += _bytes(each) * (chosen if experts and each.dim() == 3 and each.shape[0] == experts else 1.0)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    one = 2 * batch * heads * width * next(model.parameters()).element_size()
    layers = StaticCache(config=config, max_cache_len=positions).layers
    return int(total + sum(one * getattr(each, "max_cache_len", positions) for each in layers))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _step_alone(session: Session) -> float | None:
    """The seconds of a captured step, replayed in a row. Replays change nothing once all sequences are finished."""
    call = session.newest
    if call is None or not call.is_captured:
        return None
    finished = session.done.clone()
    session.done.fill_(True)
    call()
    seconds = session.device.seconds(lambda: [call() for _ in range(_REPLAYS)]) / _REPLAYS
    session.done.copy_(finished)
    return seconds


def _copy_speed(device: torch.device) -> float:
    """Bytes read and written per second by a copy of 1 GB on a GPU."""
    source = torch.empty(2**28, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    seconds = device_of({device}).seconds(lambda: [target.copy_(source) for _ in range(4)]) / 4
    return 2 * _bytes(source) / seconds


def _joined(first: Journal, others: list[Journal]) -> Journal:
    found = Journal()
    for journal in (first, *others):
        found.records += journal.records
        found.counts |= journal.counts
    return found
