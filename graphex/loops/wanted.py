"""What one generation asks for, read from the arguments that transformers hands to a decoding loop."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphex.loops.loop_cache import why_not
from graphex.loops.processors import (
    Process,
    Stop,
    described,
    is_eos,
    is_of_transformers,
    on_device,
    stop_on_device,
)

ALREADY_KNOWN = {"attention_mask", "position_ids", "past_key_values", "use_cache", "inputs_embeds"}
PLAIN = (bool, int, float, str, type(None))  # other arguments of the model: each value is a compiled step of its own
_HOST = "is not known to work on the device"


@dataclass(frozen=True)
class Wanted:
    """`host` says which processor or criterion has to run on the host, and why; empty if all can be part of a step.

    `position` and `mask` are those of the prompt; `mask` is None for a prompt without padding. `extra` is given to the
    model in every step. `past` positions are in the `cache` already, and `room` is the size of one for all to come.
    """

    input_ids: Tensor
    logits_processor: Any
    stopping_criteria: Any
    processors: list[Process]
    stops: list[Stop]
    ends: Tensor | None  # the tokens that end a sequence
    limits: list[Any]  # criteria that look at the clock
    host: str
    key: tuple[Any, ...]
    sample: bool
    pad: Tensor | None
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
        users: Callable[[Any], tuple[Process, Hashable] | str],
    ) -> Wanted | str:
        """What a call of transformers asks for, or why that cannot be done here. `users` traces processors of users."""
        cache = model_kwargs["past_key_values"]
        if reason := why_not(cache):
            return reason
        steps = criteria.max_length - input_ids.shape[1]
        if steps < 1 or not input_ids.shape[0]:
            return "there is nothing to generate"
        device = input_ids.device
        timed = [each for each in criteria if type(each).__name__ == "MaxTimeCriteria"]
        counted = [each for each in criteria if type(each).__name__ == "MaxLengthCriteria"]
        others = [each for each in criteria if each not in timed and each not in counted]
        ending = [each.eos_token_id.view(-1).to(device) for each in others if is_eos(each)]
        looking = [each for each in others if not is_eos(each)]
        made = [_as_part(each, device, users) for each in processors]
        stops = [stop_on_device(each, device) for each in looking]
        host = [
            f"{type(each).__name__} {why}" for each, why in zip(processors, made, strict=True) if isinstance(why, str)
        ]
        host += [f"{type(each).__name__} {_HOST}" for each, found in zip(looking, stops, strict=True) if found is None]
        has_eos = any(hasattr(each, "eos_token_id") for each in criteria)
        past = int(cache.get_seq_length())
        extra = {name: value for name, value in model_kwargs.items() if name not in ALREADY_KNOWN}
        mask, embeds = model_kwargs.get("attention_mask"), model_kwargs.get("inputs_embeds")
        position = model_kwargs.get("position_ids")
        prompt = max(input_ids.shape[1], 0 if embeds is None else embeds.shape[1])
        return cls(
            input_ids=input_ids,
            logits_processor=processors,
            stopping_criteria=criteria,
            processors=[each[0] for each in made if not isinstance(each, str)],
            stops=[each for each in stops if each is not None],
            ends=torch.cat(ending) if ending else None,
            limits=timed,
            host=host[0] if host else "",
            key=(*(each[1] for each in made if not isinstance(each, str)), *map(described, others)),
            sample=bool(config.do_sample),
            pad=config._pad_token_tensor.to(device) if has_eos else None,
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
        """What a captured step depends on, besides the memory that it works on."""
        pad = None if self.pad is None else tuple(self.pad.view(-1).tolist())
        return bool(self.host), self.sample, self.keeps_scores or self.keeps_logits, pad, self.key

    @property
    def memory_key(self) -> tuple[Any, ...]:
        """What the memory of a generation depends on."""
        position = None if self.position is None else (*self.position.shape[:-1], self.position.dtype)
        mask = None if self.mask is None else self.mask.dtype
        return self.batch, self.room, str(self.input_ids.device), position, mask, repr(self.extra)


def _as_part(
    processor: Any, device: torch.device, users: Callable[[Any], tuple[Process, Hashable] | str]
) -> tuple[Process, Hashable] | str:
    """A processor as part of a step, and what it depends on; or why only the host can call it."""
    if (known := on_device(processor, device)) is not None:
        return known, described(processor)
    return _HOST if is_of_transformers(processor) else users(processor)


def bucket(length: int) -> int:
    """The size of a cache for so many positions: four sizes for every power of two, so that few are compiled."""
    step = max(64, 1 << max(0, length.bit_length() - 3))
    return -(-length // step) * step
