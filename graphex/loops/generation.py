"""One generation on a session: the first token, the loop, and what `model.generate` returns.

`Kept` holds what is wanted of every step. Steps that ran after the last one leave nothing behind: tokens and caches do
not count them, what was kept of them is dropped, and the random generator goes back to where it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from graphex.loops.decode_loop import AHEAD, DecodeLoop, FixedCall, Reading
from graphex.loops.loop_cache import write
from graphex.loops.session import Session
from graphex.loops.wanted import Wanted
from graphex.records import FellBack, Generated, Journal

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
        """What a captured step returns is its own memory, which the next one writes to."""
        self.steps += 1
        if self.scores is not None:
            self.scores.append(scores.clone())
        if self.logits is not None:
            self.logits.append(logits.clone())
        if self._states is not None:
            self._states.append(self._generator())

    def cut(self, steps: int) -> None:
        """Only so many steps count."""
        if self._states is not None and steps < self.steps:
            if self._device.type == "cuda":
                torch.cuda.set_rng_state(self._states[steps - 1], self._device)
            else:
                torch.set_rng_state(self._states[steps - 1])
        for kept in (self.scores, self.logits):
            if kept is not None:
                del kept[steps:]

    def _generator(self) -> Tensor:
        return torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else torch.get_rng_state()


class Generation:
    """A generation that runs on a session until all its sequences are finished."""

    def __init__(self, session: Session, wanted: Wanted, journal: Journal, streamer: Any) -> None:
        self._session, self._wanted, self._journal, self._streamer = session, wanted, journal, streamer
        # What the clock ends is not known to the device, and a cache that is returned must not have more in it.
        self._ahead = 1 if wanted.host or (wanted.limits and wanted.returns_cache) else AHEAD
        self._kept = Kept(wanted, ahead=self._ahead > 1 and session.device.captures)
        if wanted.host:
            journal.fall_back(FellBack("generation", _BETWEEN, wanted.host))

    def run(self, logits: Tensor, started: float) -> Any:
        """From the logits after the prompt to what `model.generate` returns."""
        steps, finished = 1, self._first(logits)
        first = time.perf_counter()
        is_captured = False
        if not finished and self._wanted.max_steps > 1 and not self._time_is_up():
            part = self._session.captured_part(self._wanted)
            loop = self._loop(part)
            for tokens in loop:
                steps += 1
                self._put(tokens)
                if loop.finished or self._time_is_up():
                    break
            is_captured = part.is_captured
        self._kept.cut(steps)
        if self._streamer is not None:
            self._streamer.end()
        wanted, seconds = self._wanted, time.perf_counter() - first
        sizes = (wanted.batch, wanted.input_ids.shape[1], steps)
        self._journal.add(Generated("generation", *sizes, first - started, seconds, is_captured))
        return self._result(steps)

    def _first(self, logits: Tensor) -> bool:
        reading = Reading(self._session.token[:, 0], self._session.device)
        reading.send(*(self._choose_on_host(logits, first=True) if self._wanted.host else self._choose(logits)))
        tokens, finished = reading.wait()
        self._put(tokens)
        return finished

    def _loop(self, part: FixedCall) -> DecodeLoop:
        def captured() -> tuple[Tensor, Tensor]:
            tokens, done, logits, scores = part()
            self._kept.add(logits, scores)
            return tokens, done

        def in_parts() -> tuple[Tensor, Tensor]:
            return self._choose_on_host(part())

        step: Callable[[], tuple[Tensor, Tensor]] = in_parts if self._wanted.host else captured
        steps = self._wanted.max_steps - 1
        return DecodeLoop(step, self._session.device, max_steps=steps, ahead=self._ahead)

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
