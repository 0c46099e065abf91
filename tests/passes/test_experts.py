"""Mixtures of experts of transformers become one op, whatever chooses the experts."""

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
    assert torch.ops.aten.bmm.default not in {target for target in seen.targets if name in ("mixtral", "qwen3_moe")}
    (tried,) = (record for record in journal.rules if record.rule == "lift_experts")
    assert (tried.matches, tried.candidates) == (SPARSE[name], SPARSE[name])
    assert {verdict.status for verdict in journal.verifications} == {"equal"}


class Mixture(nn.Module):
    """As transformers writes it; `also` is another use of what is inside."""

    def __init__(self, also: str = "", *, gate: Any = nn.functional.silu) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 16, 8)), nn.Parameter(torch.randn(4, 8, 8))
        self.also, self.gate = also, gate

    def forward(self, x: Tensor, scores: Tensor) -> Any:
        weights, chosen = scores.topk(2)
        rows, numbers = x.repeat_interleave(2, dim=0), chosen.reshape(-1)
        inner = torch.bmm(self.up[numbers], rows.unsqueeze(-1)).squeeze(-1)
        gate, up = inner.chunk(2, dim=-1)
        found = torch.bmm(self.down[numbers], (self.gate(gate) * up).unsqueeze(-1)).squeeze(-1)
        total = (found * weights.reshape(-1).unsqueeze(-1)).view(x.shape[0], 2, 8).sum(dim=1)
        return (total, inner) if self.also == "inner" else total


def explained(model: nn.Module) -> graphex.Report:
    with torch.no_grad():
        return graphex.explain(model, (torch.randn(3, 8), torch.rand(3, 4)), options={"lift_idioms": "always"})


def test_a_mixture_without_transformers():
    assert explained(Mixture()).rule("lift_experts").matched == 1


def test_what_is_also_used_elsewhere_is_left_alone():
    journal = explained(Mixture("inner")).journal
    (refused,) = (record for record in journal.refusals if record.rule == "lift_experts")
    assert refused.reason.endswith("is also used by 'output'")


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
