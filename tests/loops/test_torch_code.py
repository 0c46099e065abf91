"""Logits processors of users: torch code on scores alone is a part of the captured step, all else runs on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import graphex
from tests.harness.generating import GREEDY, built, looped, prompt, reasons
from tests.harness.models import transformers

pytestmark = pytest.mark.usefixtures("captures")


class Processor(transformers.LogitsProcessor):
    def __init__(self, scale: float = 0.5) -> None:
        self.scale, self.calls = scale, 0
        self.bias = torch.linspace(-3, 3, 96)[torch.randperm(96, generator=torch.Generator().manual_seed(3))]


class Scores(Processor):
    """Everything depends on scores, and on what the processor holds."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        allowed = torch.arange(scores.shape[-1]) % 2 == 0
        return torch.where(allowed, scores * self.scale + self.bias, -torch.inf)


class Tokens(Processor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.scatter(1, input_ids[:, -1:], -1e9)


class Length(Processor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + self.bias if input_ids.shape[1] % 2 else scores


class Counting(Processor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores + self.bias * self.calls


class Reading(Processor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + self.bias if float(scores.max()) > 1 else scores


class Holding(Scores):
    def __init__(self) -> None:
        super().__init__()
        self.other = Processor()


class Sharing(Processor):
    """Reads a tensor of its class, which another one may replace unseen."""

    shared = torch.linspace(-3, 3, 96)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + self.shared


@pytest.fixture(scope="module")
def model() -> Any:
    return built("llama", num_hidden_layers=1)


def both(model: Any, make: Any) -> tuple[Tensor, Tensor]:
    """What graphex's loop generates with a processor, and what transformers' does with another one."""
    mine, theirs = (transformers.LogitsProcessorList([make()]) for _ in range(2))
    found = looped(model, prompt(), logits_processor=mine, **GREEDY)
    with torch.compiler.set_stance("force_eager"):
        return found, model.generate(prompt(), logits_processor=theirs, **GREEDY)


def test_torch_code_on_scores_is_a_part_of_the_step(model, captures):
    found, wanted = both(model, Scores)
    assert torch.equal(found, wanted)
    assert reasons(model) == []
    assert graphex.generation(model).last.captured


def test_a_processor_that_has_changed_is_another_step(model):
    processor = Scores()
    given = transformers.LogitsProcessorList([processor])
    changes = (
        lambda: None,
        lambda: setattr(processor, "scale", -2.0),
        lambda: processor.bias.mul_(-1),
        lambda: setattr(processor.bias, "data", processor.bias.clone()),
    )
    for change in changes:
        change()
        found = looped(model, prompt(), logits_processor=given, **GREEDY)
        assert torch.equal(found, model.generate(prompt(), logits_processor=given, **GREEDY))
    assert reasons(model) == []


@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Tokens, "Tokens looks at the tokens so far"),
        (Length, "Length looks at the tokens so far"),
        (Counting, "Counting changes itself in every call"),
        (Reading, "Reading cannot be traced"),
        (Holding, "Holding holds a Processor, which may change"),
        (Sharing, "Sharing reads a tensor that it does not hold itself"),
    ],
)
def test_all_others_run_on_the_host_with_the_reason_on_record(model, kind, reason):
    found, wanted = both(model, kind)
    assert torch.equal(found, wanted)
    assert reasons(model)[-1].startswith(reason)
