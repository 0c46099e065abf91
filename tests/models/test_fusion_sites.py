"""Every RMSNorm, SwiGLU and rotary embedding of `transformers` models is fused: n of n, by their modules.

Lookups of more than 64 tokens stay: PyTorch's own are as good.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import graphex
from tests.harness.compiling import Observer
from tests.harness.models import ARCHITECTURES, HIDDEN, LATENT_ATTENTION, Architecture

pytest.importorskip("transformers")

LONGCAT = {
    "num_layers": 2,
    "head_dim": LATENT_ATTENTION["qk_rope_head_dim"],
    "ffn_hidden_size": 64,
    "expert_ffn_hidden_size": 32,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "moe_topk": 2,
    "max_position_embeddings": 64,
}
LONGCAT_FLASH = Architecture("LongcatFlashForCausalLM", "LongcatFlashConfig", HIDDEN | LATENT_ATTENTION | LONGCAT)
MODELS = {name: ARCHITECTURES[name] for name in ("llama", "qwen3", "deepseek_v3")} | {"longcat_flash": LONGCAT_FLASH}

# The experts of LongCat loop over data, which no graph can hold: they are taken out.
WITHOUT_EXPERTS = {"longcat_flash"}


def unchanged(hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return hidden


def sites(model: torch.nn.Module, name: str) -> dict[str, int]:
    """How often each idiom occurs in a model, by the names that transformers gives to modules."""
    kinds = Counter(kind for module in model.modules() for kind in kinds_of(type(module).__name__))
    swiglus = kinds["MLP"] + (0 if name in WITHOUT_EXPERTS else kinds["Experts"])
    return {"lift_rms_norm": kinds["RMSNorm"], "lift_silu_mul": swiglus, "lift_rotary": 2 * kinds["Attention"]}


def kinds_of(module: str) -> list[str]:
    endings = {kind: kind for kind in ("RMSNorm", "MLP", "Experts", "Attention")}
    endings |= {"MLA": "Attention", "NaiveMoe": "Experts"}
    return [kind for ending, kind in endings.items() if module.endswith(ending)]


def compiled_model(name: str, device: str, dtype: torch.dtype) -> tuple[graphex.Journal, list[Any], dict[str, int]]:
    """(journal, ops of the optimised graphs, sites of the model), after a run that equals eager's."""
    model = MODELS[name].build(device).to(dtype)
    for module in model.modules() if name in WITHOUT_EXPERTS else ():
        if "Experts" in kinds_of(type(module).__name__):
            module.forward = unchanged
    left: list[Any] = []

    class Seen(Observer):
        def __call__(self, gm: Any, example_inputs: Any, config: Any) -> None:
            left.extend(node.target for node in gm.graph.nodes)

    options = {"lift_idioms": "auto" if device == "cuda" else "always", "post_grad_custom_post_pass": Seen()}
    compiled = torch.compile(model, backend="graphex", fullgraph=True, options=options)
    # more than 64 rows: of fewer, norms and residuals join the projections (test_projections.py)
    given = {key: ids.repeat(1, 6) for key, ids in MODELS[name].given(device).items()}
    with torch.no_grad():
        found, expected = (call(**given, use_cache=False).logits for call in (compiled, model))
    near = 0.0 if device == "cpu" else {torch.float32: 1e-4, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(found, expected, rtol=near, atol=near)
    return graphex.journal(compiled), left, sites(model, name)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.bfloat16) for name in MODELS]
    + [("llama", torch.float32)]
    + [pytest.param(name, torch.float32, marks=pytest.mark.full) for name in MODELS if name != "llama"],
)
def test_every_site_is_fused(name: str, dtype: torch.dtype, device: str) -> None:
    journal, left, wanted = compiled_model(name, device, dtype)
    fused = Counter[str]()
    for tried in journal.rules:
        fused[tried.rule] += tried.matches
    fused["lift_silu_mul"] += fused["lift_experts"]  # which has the gate of its experts inside
    assert min(wanted.values()) > 0
    assert {rule: fused[rule] for rule in wanted} == wanted
    assert fused["rotary_qk"] * 2 == wanted["lift_rotary"]
    assert fused["add_rms_norm"] > 0
    refused = [each for each in journal.refusals if each.pass_name in ("lift_idioms", "fuse_patterns")]
    assert [(each.rule, each.nothing_lost) for each in refused] == [("lift_embedding", True)]
    assert torch.ops.aten.rsqrt.default not in left
    assert torch.ops.aten.silu.default not in left
    assert left.count(torch.ops.aten.embedding.default) == 1
    assert torch.ops.graphex.rotary.default not in left
