"""Mixtures of experts of transformers become one op, the choice of experts another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphex
from tests.harness.compiling import Observer
from tests.harness.generating import FAMILIES
from tests.harness.models import transformers

op = torch.ops.graphex.experts.default
router = torch.ops.graphex.route.default
joined = torch.ops.graphex.routed_experts.default
SPARSE = {"mixtral": 2, "qwen3_moe": 2, "gpt_oss": 2, "deepseek_v3": 1}


def decoded(model: Any, run: Any, batch: int) -> Tensor:
    cache = transformers.StaticCache(config=model.config, max_cache_len=8)
    tokens = torch.arange(3, 3 + batch * 5).view(batch, 5)
    with torch.no_grad():
        model(tokens[:, :4], past_key_values=cache)
        return run(tokens[:, 4:], past_key_values=cache, logits_to_keep=1).logits


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("batch", [1, 3])
def test_every_mixture_of_a_decode_step_is_one_op(name, batch):
    model, seen = FAMILIES[name].build("cpu"), Observer()
    options = {"lift_idioms": "always", "verify": True, "post_grad_custom_post_pass": seen}
    compiled = torch.compile(model, backend="graphex", fullgraph=True, options=options)
    torch.testing.assert_close(decoded(model, compiled, batch), decoded(model, model, batch), rtol=1e-4, atol=1e-4)
    journal = graphex.journal(compiled)
    assert seen.targets.count(op) == SPARSE[name]
    if name in ("mixtral", "qwen3_moe"):  # the angles of all layers are such a product with transformers 5.17
        assert seen.targets.count(torch.ops.aten.bmm.default) <= 1
    assert seen.targets.count(router) == SPARSE[name]
    assert torch.ops.aten.topk.default not in seen.targets
    for rule in ("lift_experts", "lift_route"):
        (tried,) = (record for record in journal.rules if record.rule == rule)
        assert (tried.matches, tried.candidates) == (SPARSE[name], SPARSE[name])
    assert {verdict.status for verdict in journal.verifications} == {"equal"}


@pytest.mark.parametrize("name", SPARSE)
def test_every_mixture_of_a_prompt_is_one_op(name):
    """The form of transformers with grouped products, which it takes for prompts; on a CPU for all."""
    model, seen = FAMILIES[name].build("cpu").to(torch.bfloat16), Observer()
    model.set_experts_implementation("grouped_mm")
    options = {"lift_idioms": "always", "verify": True, "post_grad_custom_post_pass": seen}
    options["disable_rules"] = ["lift_sink_attention"]  # rounds less than GPT-OSS does in bfloat16
    compiled = torch.compile(model, backend="graphex", fullgraph=True, options=options)
    with torch.no_grad():
        compiled(torch.arange(3, 13).view(2, 5), use_cache=False)
    if name == "deepseek_v3":  # its choice has a correction
        assert seen.targets.count(op) == seen.targets.count(router) == SPARSE[name]
    else:
        assert seen.targets.count(joined) == SPARSE[name]
    assert not {torch.ops.aten._grouped_mm.default, torch.ops.aten.sort.default} & set(seen.targets)
    assert {verdict.status for verdict in graphex.journal(compiled).verifications} == {"equal"}


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("batch", [1, 3])
def test_experts_of_few_tokens_in_16_bits_are_chosen_where_they_are_computed(name, batch):
    model, seen = FAMILIES[name].build("cpu").to(torch.bfloat16), Observer()
    options = {"lift_idioms": "always", "verify": True, "post_grad_custom_post_pass": seen}
    options["disable_rules"] = ["lift_sink_attention"]  # rounds less than GPT-OSS does in bfloat16
    compiled = torch.compile(model, backend="graphex", fullgraph=True, options=options)
    decoded(model, compiled, batch)
    assert seen.targets.count(joined) == SPARSE[name]
    assert not {op, router} & set(seen.targets)
    assert {verdict.status for verdict in graphex.journal(compiled).verifications} == {"equal"}


class Mixture(nn.Module):
    """As transformers writes it; `also` is another use of what is inside."""

    def __init__(self, also: str = "", *, gate: Any = nn.functional.silu) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 16, 8)), nn.Parameter(torch.randn(4, 8, 8))
        self.also, self.gate = also, gate

    def choose(self, scores: Tensor) -> tuple[Tensor, ...]:
        """Weights and numbers of experts; what comes after them is returned."""
        weights, chosen = scores.topk(2)
        return weights, chosen

    def forward(self, x: Tensor, scores: Tensor) -> Any:
        weights, chosen, *best = self.choose(scores)
        rows, numbers = x.repeat_interleave(2, dim=0), chosen.reshape(-1)
        if self.also.startswith("clamped"):
            numbers = numbers.clamp(0, 3 if self.also == "clamped" else 1)
        inner = torch.bmm(self.up[numbers], rows.unsqueeze(-1)).squeeze(-1)
        gate, up = inner.chunk(2, dim=-1)
        found = torch.bmm(self.down[numbers], (self.gate(gate) * up).unsqueeze(-1)).squeeze(-1)
        total = (found * weights.reshape(-1).unsqueeze(-1)).view(x.shape[0], 2, 8).sum(dim=1)
        if self.also == "residual":
            return total.view(x.shape[0], 1, 8) + x.view(x.shape[0], 1, 8)
        others = [*best, *([inner] if self.also == "inner" else [])]
        return (total, *others) if others else total


class Softmax(Mixture):
    def choose(self, scores: Tensor) -> tuple[Tensor, ...]:
        best, chosen = scores.softmax(-1).topk(2)
        weights = best / best[:, :1] if self.also == "largest" else best
        weights = weights / weights.sum(-1, keepdim=True)
        return (weights, chosen, best) if self.also == "best" else (weights, chosen)


def explained(model: nn.Module) -> graphex.Report:
    with torch.no_grad():
        return graphex.explain(model, (torch.randn(3, 8), torch.rand(3, 4)), options={"lift_idioms": "always"})


def test_a_mixture_without_transformers():
    assert explained(Mixture()).rule("lift_experts").matched == 1


def test_what_is_also_used_elsewhere_is_left_alone():
    journal = explained(Mixture("inner")).journal
    (refused,) = (record for record in journal.refusals if record.rule == "lift_experts")
    assert refused.reason.endswith("is also returned")


def test_another_gate_is_left_alone():
    report = explained(Mixture(gate=nn.functional.gelu))
    assert not [record for record in report.journal.rewrites if record.rule == "lift_experts"]


def test_training_is_left_alone():
    model = Mixture()
    compiled = torch.compile(model, backend="graphex", options={"lift_idioms": "always"})
    x, scores = torch.randn(3, 8), torch.rand(3, 4)
    compiled(x, scores).sum().backward()
    mine = model.up.grad.clone()
    model.zero_grad()
    model(x, scores).sum().backward()
    torch.testing.assert_close(mine, model.up.grad)
    assert not [record for record in graphex.journal(compiled).rewrites if record.rule == "lift_experts"]


def seen_in(model: nn.Module, x: Tensor) -> tuple[Observer, Any, Any]:
    """What is in the graph, what it computes, and what the model does."""
    observer, scores = Observer(), torch.rand(x.shape[0], 4)
    compiled = torch.compile(
        model, backend="graphex", options={"lift_idioms": "always", "post_grad_custom_post_pass": observer}
    )
    with torch.no_grad():
        return observer, compiled(x, scores), model(x, scores)


def test_a_residual_is_added_inside():
    observer, found, wanted = seen_in(Mixture("residual"), torch.randn(3, 8))
    torch.testing.assert_close(found, wanted)
    assert op in observer.targets
    assert torch.ops.aten.add.Tensor not in observer.targets


@pytest.mark.parametrize("also", ["", "clamped"])
def test_a_choice_without_transformers(also):
    observer, found, wanted = seen_in(Softmax(also), torch.randn(3, 8))
    torch.testing.assert_close(found, wanted)
    assert router in observer.targets
    assert torch.ops.aten.clamp.default not in observer.targets


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Mixture(), "its experts are chosen in a form that is not known"),
        (Softmax("largest"), "its experts are chosen in a form that is not known"),
        (Softmax("clamped to two"), "its experts are chosen in a form that is not known"),
        (Softmax("best"), "is also returned"),
    ],
    ids=["scores", "another scale", "other experts", "used elsewhere"],
)
def test_another_choice_is_left_alone(model, reason):
    journal = explained(model).journal
    (refused,) = (record for record in journal.refusals if record.rule == "lift_route")
    assert reason in refused.reason
    assert not [record for record in journal.rewrites if record.rule == "lift_route"]


@pytest.mark.parametrize(
    ("tokens", "dtype", "reason"),
    [
        (3, torch.float32, "its logits are torch.float32, not 16-bit numbers"),
        (17, torch.bfloat16, "it may have more than 32 pairs of a token and an expert"),
    ],
)
def test_a_choice_that_is_a_launch_of_its_own_says_why(tokens, dtype, reason):
    given = torch.randn(tokens, 8, dtype=dtype), torch.rand(tokens, 4, dtype=dtype)
    with torch.no_grad():
        report = graphex.explain(Widened().to(dtype), given, options={"lift_idioms": "always"})
    (refused,) = (record for record in report.journal.refusals if record.rule == "join_route")
    assert refused.reason == reason


class Widened(Mixture):
    """Scores in float32, as of all models whose numbers have 16 bits."""

    def choose(self, scores: Tensor) -> tuple[Tensor, ...]:
        weights, chosen = scores.softmax(-1, dtype=torch.float32).topk(2)
        return weights.to(scores.dtype), chosen


def test_a_choice_that_is_used_elsewhere_is_not_joined():
    class Shown(Widened):
        def choose(self, scores: Tensor) -> tuple[Tensor, ...]:
            weights, chosen = super().choose(scores)
            return weights, chosen, chosen + 1

    given = torch.randn(3, 8, dtype=torch.bfloat16), torch.rand(3, 4, dtype=torch.bfloat16)
    with torch.no_grad():
        report = graphex.explain(Shown().to(torch.bfloat16), given, options={"lift_idioms": "always"})
    (refused,) = (record for record in report.journal.refusals if record.rule == "join_route")
    assert "is also" in refused.reason
