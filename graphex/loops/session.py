"""Sessions: what generations of one model share, such as caches, buffers, the compiled step and its captures.

    Wanted      what one generation asks for, read from the arguments that transformers hands to a decoding loop
    Sessions    all of one model, attached to it; a thread borrows one for a generation
    Session     one batch size, length of cache, type of weights and mode of torch: its memory never moves, so that a
                captured step stays right

A step of a session, all of it on the device:

    logits      the compiled model, for the token at `cache.place.length`
    scores      the processors
    token       the best one, or one that is drawn; for a finished sequence the padding token
    counting    the tokens so far, the length, the position; once all sequences are finished nothing counts any more
                (`graphex::append_tokens_`)
"""

from __future__ import annotations

import copy
import inspect
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from graphex.backend import Backend
from graphex.config import config_from
from graphex.device import Device, device_of
from graphex.errors import one_line
from graphex.loops.decode_loop import FixedCall, compiling
from graphex.loops.loop_cache import LoopCache, read, why_not
from graphex.loops.observation import Reached
from graphex.loops.processors import (
    Process,
    Sequence,
    Stop,
    TorchCode,
    described,
    is_criterion,
    is_of_transformers,
    on_device,
    stop_on_device,
)
from graphex.loops.step_state import methods_of, modes
from graphex.records import FellBack, Journal
from graphex.runtime.program import captures_held_back
from graphex.torch_private.frames import compiled_version
from graphex.torch_private.memory import storage_address
from graphex.torch_private.symbolic import is_traceable_wrapper_subclass

ALREADY_KNOWN = {"attention_mask", "position_ids", "past_key_values", "use_cache", "inputs_embeds"}
PLAIN = (bool, int, float, str, type(None))  # other arguments of the model: each value is a compiled step of its own
_HOST = "is not known to work on the device"
_OUT_OF_REACH = "a step reads a tensor that is found on no way from the model, so that another one would not be noticed"


Users = Callable[[Any], tuple[Process, Hashable] | str]  # traces a processor of a user, or says why not


@dataclass(frozen=True)
class StepParts:
    """Processors and criteria of a generation as parts of a step, and `key`, which tells them from others.

    `host` says which of them has to run on the host, and why; empty if all can be part of a step.
    """

    processors: list[Process]
    stops: list[Stop]
    ends: Tensor | None  # the tokens that end a sequence
    limits: list[Any]  # criteria that look at the clock
    host: str
    key: tuple[Any, ...]


def _parts_of(processors: Any, criteria: Any, device: torch.device, users: Users) -> StepParts:
    timed = [each for each in criteria if is_criterion(each, "MaxTimeCriteria")]
    counted = [each for each in criteria if is_criterion(each, "MaxLengthCriteria")]
    others = [each for each in criteria if each not in timed and each not in counted]
    ending = [each.eos_token_id.view(-1).to(device) for each in others if is_criterion(each, "EosTokenCriteria")]
    looking = [each for each in others if not is_criterion(each, "EosTokenCriteria")]
    made = [_as_part(each, device, users) for each in processors]
    stops = [stop_on_device(each, device) for each in looking]
    host = [f"{type(each).__name__} {why}" for each, why in zip(processors, made, strict=True) if isinstance(why, str)]
    host += [f"{type(each).__name__} {_HOST}" for each, found in zip(looking, stops, strict=True) if found is None]
    return StepParts(
        processors=[each[0] for each in made if not isinstance(each, str)],
        stops=[each for each in stops if each is not None],
        ends=torch.cat(ending) if ending else None,
        limits=timed,
        host=host[0] if host else "",
        key=(*(each[1] for each in made if not isinstance(each, str)), *map(described, others)),
    )


def _as_part(processor: Any, device: torch.device, users: Users) -> tuple[Process, Hashable] | str:
    """A processor as part of a step, and what it depends on; or why only the host can call it."""
    if (known := on_device(processor, device)) is not None:
        return known, described(processor)
    return _HOST if is_of_transformers(processor) else users(processor)


@dataclass(frozen=True)
class Wanted(StepParts):
    """The arguments of one generation. `position` and `mask` are those of the prompt; `mask` is None for a prompt
    without padding. `extra` is given to the model in every step. The `cache` holds `past` positions already; `room` is
    the cache size for the whole generation.
    """

    input_ids: Tensor
    logits_processor: Any
    stopping_criteria: Any
    sample: bool
    pad: Tensor | None
    pad_tokens: tuple[int, ...] | None  # the same, on the host: reading them waits for the device
    max_steps: int
    keeps_scores: bool
    keeps_logits: bool
    returns_dict: bool
    cache: Any
    past: int
    room: int
    mask: Tensor | None
    position: Tensor | None
    extra: dict[str, Any]
    returns_cache: bool
    plain_prompt: bool  # whether the prompt is all there is: no padding, embeddings, cache before it, chunks, positions

    @classmethod
    def of(
        cls,
        input_ids: Tensor,
        processors: Any,
        criteria: Any,
        config: Any,
        model_kwargs: dict[str, Any],
        users: Users,
    ) -> Wanted | str:
        """Read the arguments of a call of transformers, or say why not."""
        cache = model_kwargs["past_key_values"]
        if reason := why_not(cache):
            return reason
        steps = criteria.max_length - input_ids.shape[1]
        if steps < 1 or not input_ids.shape[0]:
            return "there is nothing to generate"
        device = input_ids.device
        pad = config._pad_token_tensor.to(device) if any(hasattr(each, "eos_token_id") for each in criteria) else None
        past = int(cache.get_seq_length())
        extra = {name: value for name, value in model_kwargs.items() if name not in ALREADY_KNOWN}
        mask, embeds = model_kwargs.get("attention_mask"), model_kwargs.get("inputs_embeds")
        position = model_kwargs.get("position_ids")
        prompt = max(input_ids.shape[1], 0 if embeds is None else embeds.shape[1])
        return cls(
            **vars(_parts_of(processors, criteria, device, users)),
            input_ids=input_ids,
            logits_processor=processors,
            stopping_criteria=criteria,
            sample=bool(config.do_sample),
            pad=pad,
            pad_tokens=None if pad is None else tuple(pad.view(-1).tolist()),
            max_steps=steps,
            keeps_scores=bool(config.return_dict_in_generate and config.output_scores),
            keeps_logits=bool(config.return_dict_in_generate and config.output_logits),
            returns_dict=bool(config.return_dict_in_generate),
            cache=cache,
            past=past,
            room=bucket(past + prompt + steps),
            mask=mask,
            position=position,
            extra=extra,
            returns_cache=bool(config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)),
            # Not every release of transformers leaves out a mask of ones, and some models count positions by it.
            plain_prompt=(mask is None or (mask.dim() == 2 and bool(mask.all())))
            and embeds is None
            and not past
            and config.prefill_chunk_size is None
            and input_ids.shape[1] > 1
            and extra.keys() <= {"logits_to_keep"}
            and (position is None or bool((position == torch.arange(input_ids.shape[1], device=device)).all())),
        )

    @property
    def batch(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def step_key(self) -> tuple[Any, ...]:
        """The key of a captured step: everything that it depends on besides the memory it works on."""
        keeps = self.keeps_scores or self.keeps_logits
        return bool(self.host), self.sample, keeps, self.pad_tokens, self.key

    @property
    def memory_key(self) -> tuple[Any, ...]:
        """The key of the memory that a generation needs."""
        position = None if self.position is None else (*self.position.shape[:-1], self.position.dtype)
        mask = None if self.mask is None else self.mask.dtype
        return self.batch, self.room, str(self.input_ids.device), position, mask, repr(self.extra)


def bucket(length: int) -> int:
    """The size of a cache for so many positions: four sizes for every power of two, so that few are compiled."""
    step = max(64, 1 << max(0, length.bit_length() - 3))
    return -(-length // step) * step


# -- sessions ----------------------------------------------------------------------------------------------------------


_ATTACHED = "_graphex_generation"
_attaching = threading.Lock()
KEPT = 4  # sessions of a model that nobody uses, and captured steps and prompts of a session
REPORTED = 8  # steps whose tokens are on the host, read or not
LONGEST_CAPTURED = 1024  # positions of a prompt: the kernels of a longer one take longer than their launches


class Sessions:
    """The sessions of one model, each for one generation at a time. A copy of the model has none."""

    def __init__(self, model: Any) -> None:
        self.journal = Journal()  # of generations; each session has one of what it compiled
        self.torch_code = TorchCode()
        self._model = weakref.ref(model)
        self._idle: OrderedDict[tuple[Any, ...], list[Session]] = OrderedDict()
        self._made: weakref.WeakSet[Session] = weakref.WeakSet()
        self._last: weakref.ref[Session] | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    @contextmanager
    def borrowed(self, wanted: Wanted, options: Mapping[str, Any] | None) -> Iterator[Session]:
        """A session that fits. After an error or an interruption it is not used again."""
        model = self._model()
        assert model is not None  # the caller holds it
        tensors = tensors_of(model)
        types = tuple(each.dtype for each in tensors)
        # Dynamo has no guard on methods: a step that was compiled with another one is another session's.
        how = repr(sorted((options or {}).items(), key=str))
        key = (*wanted.memory_key, types, modes(), methods_of(model.modules()), how)
        with self._lock:
            found = self._idle.pop(key, [])
            session = found.pop() if found else None
            if found:
                self._idle[key] = found
        if session is None:
            session = Session(model, wanted, options)
            with self._lock:
                self._made.add(session)
        session.tensors = tensors
        try:
            yield session
        except BaseException:
            session.device.synchronize()
            session.free()
            raise
        finally:
            session.rest()  # it does not keep what goes with the model
        with self._lock:
            if session.newest is not None:
                self._last = weakref.ref(session)
            self._idle.setdefault(key, []).append(session)
            self._idle.move_to_end(key)
            if sum(map(len, self._idle.values())) <= KEPT:
                return
            oldest = next(iter(self._idle))
            spare = self._idle[oldest].pop()
            if not self._idle[oldest]:
                del self._idle[oldest]
        spare.free()

    @property
    def last(self) -> Session | None:
        """The session that was used last, if it is still there."""
        return None if self._last is None else self._last()

    @property
    def compiled(self) -> list[Journal]:
        """The journals of the sessions that are still there."""
        with self._lock:
            return [session.journal for session in self._made]


def tensors_of(model: Any) -> list[Tensor]:
    """The tensors that the modules of a model hold, before every generation: parameters, buffers, and attributes that
    are neither, by themselves or in a list, tuple or dict. One that is made of others stands for these.
    """
    found: list[Any] = []
    modules, seen = [model], {id(model)}
    while modules:
        module = modules.pop()
        found += module._parameters.values()
        found += module._buffers.values()
        own = vars(module)
        for name in own.keys() - _EVERY_MODULES:
            held = own[name]
            if isinstance(held, (list, tuple, dict)):
                found += held.values() if isinstance(held, dict) else held
            else:
                found.append(held)
        for part in module._modules.values():
            if part is not None and id(part) not in seen:
                seen.add(id(part))
                modules.append(part)
    tensors = (each for each in found if isinstance(each, Tensor))
    return [part for each in tensors for part in ((each,) if type(each) in _OF_ONE else _parts(each))]


_EVERY_MODULES = frozenset(vars(Module()))  # attributes that hold no tensors of a user's
_OF_ONE = (Tensor, Parameter)


def _parts(tensor: Tensor) -> list[Tensor]:
    """The tensors that a subclass is made of; itself, if it is made of none."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _parts(getattr(tensor, name))]


def sessions_of(model: Any) -> Sessions:
    """The sessions that are attached to a model."""
    with _attaching:
        found = model.__dict__.get(_ATTACHED)
        if not isinstance(found, Sessions):
            found = model.__dict__[_ATTACHED] = Sessions(model)
        return found


def has_sessions(model: Any) -> bool:
    return isinstance(getattr(model, "__dict__", {}).get(_ATTACHED), Sessions)


def model_step(
    model: Any, token: Tensor, position: Tensor | None, mask: Tensor | None, cache: Any, extra: dict[str, Any]
) -> Tensor:
    """The logits after one token, [B, V]: what is compiled."""
    given = extra if position is None else {**extra, "position_ids": position}
    found = model(
        input_ids=token, attention_mask=mask, past_key_values=cache, use_cache=True, return_dict=True, **given
    )
    logits: Tensor = found.logits[:, -1]
    return logits


def prompt_step(model: Any, tokens: Tensor, positions: Tensor | None, cache: Any, last: Tensor) -> Tensor:
    """The logits after the token at `last`, [B, V], of a prompt that may go on behind it."""
    given = {} if positions is None else {"position_ids": positions}
    found = model(
        input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=last, return_dict=True, **given
    )
    logits: Tensor = found.logits[:, -1]
    return logits


def _keeps_some_logits(model: Any) -> bool:
    """Whether a model takes the places of a prompt whose logits it computes."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def _angles_by_length(model: Any) -> str:
    """The kind of a rotary embedding whose angles depend on the longest position of a call; empty if there is none."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
            if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):  # as transformers asks for it
                return kind
    return ""


def report_to_host(device: Device, batch: int, where: torch.device) -> Tensor | str:
    """Memory of the host that `append_tokens_` reports to, or why it cannot, which trying it shows."""
    zeros = partial(torch.zeros, dtype=torch.long, device=where)
    chosen = torch.arange(1, batch + 1, device=where)
    state = zeros((batch, 1)), zeros((batch, 1)), zeros(()), torch.ones(batch, dtype=torch.bool, device=where)
    try:
        report = device.host_buffer(zeros((REPORTED, batch + 1))).fill_(-1)
        done = torch.zeros((), dtype=torch.bool, device=where)
        torch.ops.graphex.append_tokens_(chosen, *state, done, report=report)
        event = device.event()
        event.record()
        event.synchronize()
    except Exception as error:  # by a kernel, by torch, by a device that is none of these
        return one_line(error)
    is_there = report[0].tolist() == [*range(1, batch + 1), 0]
    return report if is_there else "what the device writes there does not arrive"


Calls = OrderedDict[tuple[Any, ...], FixedCall]
Arguments = Callable[[], tuple[Any, dict[str, Any]]]


def with_own_code(function: Any, name: str) -> Any:
    """A copy of a function for which Dynamo keeps its own compiled code: there is a limit for each code object.

    Records and the cache call it by this name.
    """
    return FunctionType(function.__code__.replace(co_qualname=name), function.__globals__, function.__name__)


class Session:
    """Memory that never moves, for one batch size and length of cache, and the step on it."""

    def __init__(self, model: Any, wanted: Wanted, options: Mapping[str, Any] | None) -> None:
        where, batch = wanted.input_ids.device, wanted.batch
        self.device = device_of({where})
        self._reference = weakref.ref(model)
        self.cache = LoopCache.of(model.config, wanted.room, where, padded=wanted.mask is not None)
        self.tokens = torch.zeros((batch, wanted.room + 2), dtype=torch.long, device=where)
        self.token = torch.zeros((batch, 1), dtype=torch.long, device=where)
        self.length = torch.zeros((), dtype=torch.long, device=where)
        self.unfinished = torch.ones(batch, dtype=torch.bool, device=where)
        self.done = torch.zeros((), dtype=torch.bool, device=where)
        self.mask = None if wanted.mask is None else wanted.mask.new_ones((batch, wanted.room))
        self.position = None if wanted.position is None else torch.zeros_like(wanted.position[..., :1])
        self.tensors: list[Tensor] = []  # of the model, in the generation that goes on
        self._extra = wanted.extra
        backend = Backend(config_from({"force_eager": True, **(options or {})}))
        self.journal = backend.journal
        report = report_to_host(self.device, batch, where)
        self._report = None if isinstance(report, str) else report
        if isinstance(report, str):
            self.journal.fall_back(FellBack("generation", "tokens are copied to the host after each step", report))
        self._function = with_own_code(model_step, f"{type(model).__name__}.step")
        self._step = torch.compile(self._function, backend=backend, dynamic=False)
        self._prompt_function = with_own_code(prompt_step, f"{type(model).__name__}.prompt")
        self._prompt = torch.compile(self._prompt_function, backend=backend, dynamic=False)
        self._calls: Calls = OrderedDict()
        self._prompts: Calls = OrderedDict()
        self._buffers: dict[int, dict[str, Any]] = {}
        self._counts: dict[str, int] = {}
        self._settled: dict[tuple[Any, ...], tuple[str, tuple[int, ...]] | None] = {}  # graph and weights of a call
        self._reached: Reached | None = None
        self._inputs: list[Any] = []  # of the graphs that a rehearsal runs
        self._is_reached = False  # whether a step reads tensors that only the model's Python code leads to

    @property
    def _model(self) -> Any:
        """The model, which a session does not keep alive."""
        return self._reference()

    # -- before the loop -----------------------------------------------------------------------------------------------

    def prefill(self, wanted: Wanted, config: Any, model_kwargs: dict[str, Any], *, compiled: bool) -> Tensor:
        """Run the prompt. Returns the logits after it, [B, V].

        A compiled one is padded on the right to one of a few lengths: no token looks at those behind it, and what the
        padding leaves in the cache is behind its end. The first prompt of a session runs as it is: it makes the cache.
        """
        self.cache.clear()
        self.cache.begin(wanted.past)
        length = bucket(wanted.input_ids.shape[1])
        if compiled and (kind := _angles_by_length(self._model)):
            why = f"the angles of a rotary embedding ('{kind}') depend on the length of the prompt, and it is padded"
            self.journal.fall_back(FellBack("generation", "the prompt is not compiled", why))
            compiled = False
        if compiled and wanted.plain_prompt and _keeps_some_logits(self._model) and self.cache.takes(length):
            return self._compiled_prefill(wanted, length)
        if wanted.past:
            read(wanted.cache, self.cache, wanted.past)
        config = copy.copy(config)
        config.disable_compile = True
        given = {**model_kwargs, "past_key_values": self.cache}
        found = self._model._prefill(wanted.input_ids, config, given, is_first_iteration=True)
        logits: Tensor = found.logits[:, -1]
        self.cache.decode()
        self._begin(wanted)
        return logits

    def _compiled_prefill(self, wanted: Wanted, length: int) -> Tensor:
        """From the second prompt of a length on it is captured, unless it is so long that launches take no time."""
        count, given = wanted.input_ids.shape[1], self._prompt_buffers(wanted, length)
        given["tokens"].zero_()[:, :count] = wanted.input_ids
        given["last"].fill_(count - 1)

        def arguments() -> tuple[Any, dict[str, Any]]:
            self.cache.begin(0)  # as it is before a prompt: each has counted its positions
            return self._prompt_function, {"model": self._model, **given}

        def run() -> Tensor:
            logits: Tensor = self._prompt(self._model, **given)
            return logits

        if length > LONGEST_CAPTURED:
            with compiling:
                logits = run()
        else:
            key = ("prompt", length)
            prompt = self._call(self._prompts, key, run, arguments)
            self._confirms(self._prompts, key, arguments)
            logits = prompt()
        self.cache.decode(count)
        self._begin(wanted)
        return logits

    def _prompt_buffers(self, wanted: Wanted, length: int) -> dict[str, Any]:
        """The arguments of `prompt_step` besides the model, at addresses that never change."""
        found = self._buffers.get(length)
        if found is None:
            where = wanted.input_ids.device
            tokens = torch.zeros((wanted.batch, length), dtype=torch.long, device=where)
            positions = None if self.position is None else torch.arange(length, device=where)[None]
            last = torch.zeros(1, dtype=torch.long, device=where)
            found = {"tokens": tokens, "positions": positions, "cache": self.cache, "last": last}
            self._buffers[length] = found
        return found

    def _begin(self, wanted: Wanted) -> None:
        count = wanted.input_ids.shape[1]
        self.tokens[:, :count] = wanted.input_ids
        self.length.fill_(count)
        self.unfinished.fill_(True)
        self.done.fill_(False)
        if self.position is not None and wanted.position is not None:
            self.position.copy_(wanted.position[..., -1:] + 1)
        if self.mask is not None and wanted.mask is not None:
            self.mask.fill_(1)
            self.mask[:, : wanted.mask.shape[1]] = wanted.mask

    # -- a step --------------------------------------------------------------------------------------------------------

    def forward(self) -> Tensor:
        """The logits after `token`."""
        logits: Tensor = self._step(self._model, self.token, self.position, self.mask, self.cache, self._extra)
        return logits

    def choose(self, wanted: Wanted, logits: Tensor, *, first: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """The next tokens, and the logits and scores that they are chosen by. The `first` ones follow a prompt."""
        if wanted.sample or wanted.processors or wanted.keeps_scores or wanted.keeps_logits:
            logits = logits.to(dtype=torch.float32, copy=True)
        scores, so_far = logits, Sequence(self.tokens, self.length, self.token[:, 0])
        for process in wanted.processors:
            scores = process(so_far, scores)
        tokens = self.take(wanted, scores, first=first)
        for stop in wanted.stops:
            self.unfinished.logical_and_(~stop(so_far))
        if wanted.stops:
            self.done.copy_(~self.unfinished.any())
        return tokens, logits, scores

    def take(self, wanted: Wanted, scores: Tensor, *, first: bool) -> Tensor:
        """Choose the next tokens and append them to the sequences. The model's input token now counts as cached,
        unless all sequences had finished before.
        """
        if wanted.sample:
            tokens = torch.multinomial(scores.softmax(-1), num_samples=1)[:, 0]
        else:
            tokens = torch.ops.graphex.argmax(scores)
        counted = (None, None) if first else (self.cache.place.length, self.position)
        state = (self.tokens, self.token, self.length, self.unfinished, self.done)
        torch.ops.graphex.append_tokens_(tokens, *state, *counted, wanted.pad, wanted.ends, self.report(wanted))
        return self.token[:, 0]

    def report(self, wanted: Wanted) -> Tensor | None:
        """The memory of the host that steps write their tokens to. None if tokens are copied: the host or a stopping
        criterion has the last word on them, or the device cannot write there.
        """
        return None if wanted.host or wanted.stops else self._report

    def captured_part(self, wanted: Wanted) -> FixedCall:
        """The captured part of a step: all of it, or the model alone if the host does the rest. Replay it after
        `confirms`. Before that, replay it only if a wrong step can be undone.
        """

        def step() -> tuple[Tensor, ...]:
            tokens, logits, scores = self.choose(wanted, self.forward())
            return tokens, self.done, logits, scores

        body = self.forward if wanted.host else step
        return self._call(self._calls, wanted.step_key, body, self._step_arguments)

    def confirms(self, wanted: Wanted) -> bool:
        """Whether Dynamo's guards say that the captured part is still the model's. It is rehearsed if they do not."""
        return self._confirms(self._calls, wanted.step_key, self._step_arguments)

    def _step_arguments(self) -> tuple[Any, dict[str, Any]]:
        values = {"model": self._model, "token": self.token, "position": self.position, "mask": self.mask}
        return self._function, {**values, "cache": self.cache, "extra": self._extra}

    def _call(self, calls: Calls, key: tuple[Any, ...], body: Callable[[], Any], arguments: Arguments) -> FixedCall:
        """The call for a key, captured or to be captured. `arguments` gives the function that it compiles, and the
        values of its local variables. The call is rehearsed if weights have moved, or if Dynamo's guards cannot tell
        which graph it runs.
        """

        def state() -> Hashable:
            ran = self._ran()
            version = compiled_version(*arguments()) if len(ran) == 1 and not self.journal.breaks else None
            if version is None:
                self._inputs.clear()
            elif not self._finds_inputs():
                calls[key].stay_as_it_is(_OUT_OF_REACH)
            addresses = self._addresses()
            self._settled[key] = None if version is None else (version, addresses)
            return ran, addresses, self._values() if version is None else None

        found = calls.get(key)
        if found is None:
            watched = partial(captures_held_back, self._inputs.extend)
            run = torch.no_grad()(body)
            found = calls[key] = FixedCall(run, self.device, self.journal, "generation", state, watched)
        calls.move_to_end(key)
        while len(calls) > KEPT:
            calls.popitem(last=False)[1].free()
        settled = self._settled.get(key)
        if settled is None or settled[1] != self._addresses():
            self._settled[key] = None
            found.rehearse()
            self._ran()
        return found

    def _confirms(self, calls: Calls, key: tuple[Any, ...], arguments: Arguments) -> bool:
        """Whether a call would run the graph that it ran when it was rehearsed; else it is rehearsed once more."""
        settled = self._settled.get(key)
        if settled is not None and settled[0] == compiled_version(*arguments()):
            return True
        self._settled[key] = None
        calls[key].rehearse()
        self._ran()
        return False

    def _ran(self) -> tuple[str, ...]:
        """The graphs that ran since this was last asked."""
        counts = {name: found["calls"] for name, found in self.journal.counts.items()}
        ran = tuple(name for name, count in counts.items() if count != self._counts.get(name, 0))
        self._counts = counts
        return ran

    def _finds_inputs(self) -> bool:
        """Whether all tensors that were inputs of the rehearsed graph are looked at before every generation: most are
        parameters and the like, others are looked for where the model's Python code leads to.
        """
        own = [*self.tensors, *self._memory(), *(each for each in self._extra.values() if isinstance(each, Tensor))]
        known = {storage_address(each) for each in own}
        inputs = {storage_address(each) for each in self._inputs if isinstance(each, Tensor) and each.numel()}
        self._inputs.clear()
        if self._is_reached or inputs <= known:
            return True
        self._is_reached = True
        return inputs <= known | {storage_address(each) for each in self._look().tensors.values()}

    def _memory(self) -> Iterator[Tensor]:
        state = (self.tokens, self.token, self.length, self.unfinished, self.done, self.mask, self.position)
        layers = (each for each in self.cache.layers if each.is_initialized)
        prompts = (each for held in self._buffers.values() for each in held.values())
        kept = chain(state, prompts, (self.cache.place.length,), *((each.keys, each.values) for each in layers))
        return (each for each in kept if isinstance(each, Tensor))

    def _addresses(self) -> tuple[int, ...]:
        """The addresses of the weights, and of other tensors that a step reads: a capture holds for these."""
        found = [each.data_ptr() for each in self.tensors]
        if self._is_reached:
            found += [storage_address(each) for each in self._look().tensors.values()]
        return tuple(found)

    def _look(self) -> Reached:
        """The values that the model's Python code can reach. It holds none of them when the generation ends."""
        self._reached = self._reached or Reached((self._model,), ())
        self._reached.look()
        return self._reached

    def _values(self) -> Hashable:
        """A version number of these values, and where tensors are. It is the only check for parts of a step that run
        without Dynamo's guards.
        """
        reached = self._look()
        return reached.version, tuple(storage_address(each) for each in reached.tensors.values())

    def rest(self) -> None:
        """Hold nothing of the model until the next generation."""
        self.tensors = []
        if self._reached is not None:
            self._reached.let_go()

    @property
    def newest(self) -> FixedCall | None:
        """The captured part that was used last."""
        return next(reversed(self._calls.values()), None)

    def free(self) -> None:
        for calls in (self._calls, self._prompts):
            for call in calls.values():
                call.free()
            calls.clear()
