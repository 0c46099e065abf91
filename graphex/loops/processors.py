"""Logits processors and stopping criteria, for a sequence whose length is a number on the device.

transformers calls them with the tokens so far, a tensor that grows. A captured step has a buffer of fixed size instead,
and its length as a tensor. Most processors look at the scores alone, and are called as they are (`SCORES_ALONE`). Those
that look at tokens or count them are written again here (`TRANSLATED`), with the same results. `on_device` says which.
`Sequence` is what a translation reads. Only the very classes of transformers are taken: a subclass may do anything.

Processors of users can be a part of a captured step if they are torch code that looks at the scores alone
(`TorchCode`). Dynamo traces a copy of the processor, with scores as they will be and tokens of a symbolic number. The
trace is right for every step if it is one graph without breaks, reads neither the tokens nor their number, guards on
nothing about that number, and leaves the processor unchanged. Then the step runs that graph, and Dynamo's guards tell
when the processor, or something that it reads, has changed. All other processors run on the host.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import functional

from graphex.loops.decode_loop import compiling
from graphex.torch_private.dynamo import input_sources, mark_growing, size_guards
from graphex.torch_private.frames import compiled_version

PROCESSORS = "transformers.generation.logits_process"
CRITERIA = "transformers.generation.stopping_criteria"


@dataclass(frozen=True)
class Sequence:
    """Tokens [B, room] of which the first `length`, a tensor, are there. `newest` [B] are the last of them."""

    tokens: Tensor
    length: Tensor
    newest: Tensor

    def last(self, count: int, otherwise: int = 0) -> Tensor:
        """The last `count` tokens, [B, count], filled with `otherwise` at the front if the sequence is shorter."""
        at = self.length - count + torch.arange(count, device=self.tokens.device)
        found = self.tokens.index_select(1, at.clamp(min=0))
        return torch.where(at >= 0, found, otherwise)

    def is_there(self) -> Tensor:
        """Which places of `tokens` are taken, [room]."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.length


Process = Callable[[Sequence, Tensor], Tensor]
Stop = Callable[[Sequence], Tensor]

SCORES_ALONE = {
    "EncoderRepetitionPenaltyLogitsProcessor",
    "EpsilonLogitsWarper",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "MinPLogitsWarper",
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
}


def on_device(processor: Any, device: torch.device) -> Process | None:
    """A processor as part of a captured step; None if only the host can call it."""
    kind = type(processor)
    if kind.__module__ != PROCESSORS:
        return None
    if kind.__name__ in SCORES_ALONE:
        return lambda sequence, scores: processor(sequence.tokens, scores)
    translate = TRANSLATED.get(kind.__name__)
    return None if translate is None else translate(processor, device)


def is_of_transformers(processor: Any) -> bool:
    return type(processor).__module__ == PROCESSORS


def is_criterion(criterion: Any, name: str) -> bool:
    """Whether a criterion is of this very class of transformers, which is known by name: it may not be installed."""
    kind = type(criterion)
    return (kind.__module__, kind.__name__) == (CRITERIA, name)


def stop_on_device(criterion: Any, device: torch.device) -> Stop | None:
    """A stopping criterion as part of a captured step; None if only the host can call it."""
    kind = type(criterion)
    translate = STOPS.get(kind.__name__) if kind.__module__ == CRITERIA else None
    return None if translate is None else translate(criterion, device)


def described(given: Any) -> tuple[Any, ...]:
    """The settings of a processor or a criterion: two with equal settings do the same."""
    return (type(given).__name__, *sorted((name, _plain(value)) for name, value in vars(given).items()))


def _plain(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    content = hashlib.sha256(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    return repr((value.dtype, tuple(value.shape), content))


# -- processors --------------------------------------------------------------------------------------------------------


class _Chosen:
    """Some tokens as a mask over the vocabulary, made in the first call: looking for many of them waits for a GPU."""

    def __init__(self, tokens: Any, device: torch.device) -> None:
        self._tokens = tokens.to(device).view(-1)
        self._mask: Tensor | None = None

    def mask(self, scores: Tensor) -> Tensor:
        if self._mask is None or self._mask.shape[0] != scores.shape[-1]:  # the vocabulary may have grown
            self._mask = torch.isin(torch.arange(scores.shape[-1], device=scores.device), self._tokens)
        return self._mask


def _without(tokens: Any, device: torch.device, applies: Callable[[Sequence], Tensor] | None = None) -> Process:
    """Rule out some tokens, always or while `applies`."""
    banned = _Chosen(tokens, device)

    def process(sequence: Sequence, scores: Tensor) -> Tensor:
        mask = banned.mask(scores) if applies is None else banned.mask(scores) & applies(sequence)
        return torch.where(mask, -math.inf, scores)

    return process


def _min_length(given: Any, device: torch.device) -> Process:
    least = given.min_length
    return _without(given.eos_token_id, device, lambda sequence: sequence.length < least)


def _min_new_tokens(given: Any, device: torch.device) -> Process:
    least = given.prompt_length_to_skip + given.min_new_tokens
    return _without(given.eos_token_id, device, lambda sequence: sequence.length < least)


def _suppress_at_begin(given: Any, device: torch.device) -> Process:
    begin = given.begin_index
    return _without(given.begin_suppress_tokens, device, lambda sequence: sequence.length == begin)


def _forced(tokens: Any, device: torch.device, length: int) -> Process:
    """Rule out all other tokens at one length."""
    wanted = _Chosen(tokens, device)

    def process(sequence: Sequence, scores: Tensor) -> Tensor:
        only = torch.where(wanted.mask(scores), 0.0, -math.inf).to(scores.dtype)
        return torch.where(sequence.length == length, only, scores)

    return process


def _repetition_penalty(given: Any, device: torch.device) -> Process | None:
    if given.logits_indices is not None or given.cu_seq_lens_q is not None:
        return None
    penalty, ignored = given.penalty, given.prompt_ignore_length
    if ignored is None:
        ignored = 0
    elif isinstance(ignored, Tensor):
        ignored = ignored.to(device)[:, None]  # as many for each sequence as its padding is long

    def process(sequence: Sequence, scores: Tensor) -> Tensor:
        size = scores.shape[-1]
        counts = sequence.is_there() & (torch.arange(sequence.tokens.shape[1], device=scores.device) >= ignored)
        tokens = torch.where(counts, sequence.tokens.clamp(max=size), size)
        padded = functional.pad(scores, (0, 1))
        found = torch.gather(padded, 1, tokens)
        found = torch.where(found < 0, found * penalty, found / penalty)
        return padded.scatter(1, tokens, found)[..., :size]

    return process


def _no_repeated_ngram(given: Any, device: torch.device) -> Process:
    count = given.ngram_size

    def process(sequence: Sequence, scores: Tensor) -> Tensor:
        if sequence.tokens.shape[1] < count:
            return scores
        size = scores.shape[-1]
        windows = sequence.tokens.unfold(1, count, 1)
        matches = (windows[..., :-1] == sequence.last(count - 1).unsqueeze(1)).all(-1)
        matches &= sequence.is_there()[count - 1 :]  # a window is there if its last token is
        tokens = torch.where(matches, windows[..., -1].clamp(max=size), size)
        banned = scores.new_zeros((scores.shape[0], size + 1), dtype=torch.bool).scatter_(1, tokens, True)
        return scores.masked_fill(banned[:, :size], -math.inf)

    return process


def _sequence_bias(given: Any, device: torch.device) -> Process:
    single = {tokens[0]: bias for tokens, bias in given.sequence_bias.items() if len(tokens) == 1}
    longer = [
        (torch.tensor(tokens[:-1], device=device), tokens[-1], bias)
        for tokens, bias in given.sequence_bias.items()
        if len(tokens) > 1
    ]
    of_size: dict[int, Tensor] = {}

    def process(sequence: Sequence, scores: Tensor) -> Tensor:
        size = scores.shape[-1]
        if size not in of_size:
            given._prepare_bias_variables(scores)  # raises for tokens that the model does not have
            of_size[size] = given.length_1_bias if single else torch.zeros(size, device=scores.device)
        bias = torch.zeros_like(scores) + of_size[size]
        # Some releases of transformers pass over sequences that are longer than the tokens so far.
        more = 0 if hasattr(given, "multi_token_biases") else 1
        for prefix, token, value in longer:
            found = (sequence.last(len(prefix)) == prefix).all(1) & (sequence.length >= len(prefix) + more)
            bias[:, token] += torch.where(found, value, 0.0)
        return scores + bias

    return process


def _exponential_decay(given: Any, device: torch.device) -> Process:
    start, factor, ends = given.regulation_start, given.regulation_factor, given.eos_token_id.to(device)

    def process(sequence: Sequence, scores: Tensor) -> Tensor:
        beyond = (sequence.length - start).clamp(min=0)
        found = scores[:, ends]
        penalty = found.abs() * (torch.pow(factor, beyond.double()) - 1).to(scores.dtype)
        penalty = penalty.masked_fill(~torch.isfinite(found), 0.0)
        return scores + torch.zeros_like(scores).index_copy(1, ends, penalty)  # a token may be named twice

    return process


def _eta(given: Any, device: torch.device) -> Process:
    epsilon, least, fill = given.epsilon.to(device), given.min_tokens_to_keep, given.filter_value

    def process(sequence: Sequence, scores: Tensor) -> Tensor:
        logs = scores - scores.logsumexp(-1, keepdim=True)
        probabilities = scores.softmax(-1)
        entropy = -(logs.clamp(min=torch.finfo(logs.dtype).min) * logs.softmax(-1)).sum(-1)
        eta = torch.min(epsilon, torch.sqrt(epsilon) * torch.exp(-entropy))[..., None]
        kept = torch.topk(scores, min(least, scores.shape[-1]))[0][..., -1, None]
        return scores.masked_fill((probabilities < eta) & (scores < kept), fill)

    return process


TRANSLATED: dict[str, Callable[[Any, torch.device], Process | None]] = {
    "EtaLogitsWarper": _eta,
    "ExponentialDecayLengthPenalty": _exponential_decay,
    "ForcedBOSTokenLogitsProcessor": lambda given, device: _forced(torch.tensor([given.bos_token_id]), device, 1),
    "ForcedEOSTokenLogitsProcessor": lambda given, device: _forced(given.eos_token_id, device, given.max_length - 1),
    "MinLengthLogitsProcessor": _min_length,
    "MinNewTokensLengthLogitsProcessor": _min_new_tokens,
    "NoBadWordsLogitsProcessor": _sequence_bias,
    "NoRepeatNGramLogitsProcessor": _no_repeated_ngram,
    "RepetitionPenaltyLogitsProcessor": _repetition_penalty,
    "SequenceBiasLogitsProcessor": _sequence_bias,
    "SuppressTokensAtBeginLogitsProcessor": _suppress_at_begin,
    "SuppressTokensLogitsProcessor": lambda given, device: _without(given.suppress_tokens, device),
}


# -- stopping criteria -------------------------------------------------------------------------------------------------


def _stop_strings(given: Any, device: torch.device) -> Stop:
    """Where there are fewer tokens than it looks at, the others are none of the vocabulary, which match nothing."""
    unknown = given.embedding_vec.shape[0]
    given.embedding_vec, given.target_lens = given.embedding_vec.to(device), given.target_lens.to(device)
    return lambda sequence: given(sequence.last(given.maximum_token_len, otherwise=unknown), None)


STOPS: dict[str, Callable[[Any, torch.device], Stop]] = {"StopStringCriteria": _stop_strings}


# -- processors of users -----------------------------------------------------------------------------------------------


KEPT = 16
_PLAIN = (bool, int, float, complex, str, bytes, Tensor, torch.dtype, torch.device, type(None))
_TOKENS, _SCORES, _PROCESSOR = "L['input_ids']", "L['scores']", "L['processor']"


def processed(processor: Any, input_ids: Tensor, scores: Tensor) -> Any:
    """The call of a processor, as Dynamo traces it."""
    return processor(input_ids, scores)


@dataclass
class Traced:
    """A processor as Dynamo traced it. `reason` is why its graph is not right for every step; empty if it is."""

    function: FunctionType
    tokens: Tensor
    scores: Tensor
    reason: str = ""
    graphs: int = 0
    own: frozenset[str] = frozenset()
    compiled: Callable[..., Any] = field(init=False)

    def __post_init__(self) -> None:
        self.compiled = torch.compile(self.function, backend=self._record, fullgraph=True, dynamic=False)

    def _record(self, graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs += 1
        guards, sources = size_guards(), input_sources(graph)
        if guards is None or guards or any(_TOKENS in each for each in sources):
            self.reason = "looks at the tokens so far"
        elif not all(isinstance(each, Tensor) for each in inputs):
            self.reason = "reads numbers that may change"
        elif not all(map(self._is_own, sources)):
            self.reason = "reads a tensor that it does not hold itself"
        return graph

    def _is_own(self, source: str) -> bool:
        """Whether an input is the scores, or a tensor that the processor holds and that is a part of its key."""
        return source == _SCORES or any(source.startswith(f"{_PROCESSOR}.{each}") for each in self.own)

    def version(self, processor: Any) -> str | None:
        values = {"processor": processor, "input_ids": self.tokens, "scores": self.scores}
        return compiled_version(self.function, values)


class TorchCode:
    """The processors that were traced for one model."""

    def __init__(self) -> None:
        self._traced: OrderedDict[Hashable, Traced] = OrderedDict()

    def process(self, processor: Any, scores: Tensor) -> tuple[Process, Hashable] | str:
        """A processor as part of a step on such scores, and what it depends on; or why only the host can call it."""
        if mark_growing is None:
            return "is not known to look at the scores alone"
        if (held := _not_plain(processor)) is not None:
            return f"holds a {held}, which may change"
        key = (type(processor), described(processor), tuple(scores.shape), scores.device)
        with compiling:
            found = self._traced.get(key)
            version = None if found is None else found.version(processor)
            if found is None or (version is None and not found.reason):
                found = self._traced[key] = _trace(processor, scores)
                version = found.version(processor)
            self._traced.move_to_end(key)
            while len(self._traced) > KEPT:
                self._traced.popitem(last=False)
        if found.reason or version is None:
            return found.reason or "reads something that changes"
        run, tokens = found.compiled, found.tokens

        def process(sequence: Sequence, scores: Tensor) -> Tensor:
            with compiling:
                result: Tensor = run(processor, tokens, scores)
            return result

        return process, (id(processor), key[1], version, tuple(map(Tensor.data_ptr, _tensors_of(processor))))


def _trace(processor: Any, scores: Tensor) -> Traced:
    function = FunctionType(processed.__code__.replace(), processed.__globals__, processed.__name__)
    tokens = torch.zeros((scores.shape[0], 4), dtype=torch.long, device=scores.device)
    assert mark_growing is not None
    mark_growing(tokens, 1)
    found = Traced(function, tokens, scores)
    try:
        trial = copy.deepcopy(processor)
        before, found.own = described(trial), frozenset(vars(trial))
        result = found.compiled(trial, tokens, scores.clone())
        after = described(trial)
    except Exception as error:  # whatever a user's code raises on scores that are none
        found.reason = found.reason or f"cannot be traced ({type(error).__name__})"
        return found
    if found.graphs != 1:
        found.reason = "is not traced as one graph"
    elif after != before:
        found.reason = "changes itself in every call"
    elif not isinstance(result, Tensor) or result.shape != scores.shape:
        found.reason = "does not return scores of the shape that it gets"
    return found


def _not_plain(processor: Any) -> str | None:
    """The type of something that a processor holds and that may change unseen; None if there is none."""
    if not hasattr(processor, "__dict__"):
        return type(processor).__name__
    return next((type(each).__name__ for each in _held_by(processor) if not isinstance(each, _PLAIN)), None)


def _tensors_of(processor: Any) -> list[Tensor]:
    return [each for each in _held_by(processor) if isinstance(each, Tensor)]


def _held_by(processor: Any) -> Iterator[Any]:
    """The attributes of a processor, and the elements of those that are containers."""
    left: list[Any] = list(vars(processor).values())
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            left += value
        else:
            yield value
