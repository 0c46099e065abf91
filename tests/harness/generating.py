"""Generation with models of transformers at a small size: by transformers' own loop, and by graphex's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import graphex
from tests.harness.models import (
    ARCHITECTURES,
    BATCHED_EXPERTS,
    HIDDEN,
    LLAMA,
    PLAIN_ATTENTION,
    SLIDING,
    Architecture,
)

MORE = {
    "arcee": Architecture("ArceeForCausalLM", "ArceeConfig", LLAMA),
    "cohere": Architecture("CohereForCausalLM", "CohereConfig", LLAMA),
    "cohere2": Architecture("Cohere2ForCausalLM", "Cohere2Config", SLIDING),
    "exaone4": Architecture("Exaone4ForCausalLM", "Exaone4Config", SLIDING | {"sliding_window_pattern": 2}),
    "gemma": Architecture("GemmaForCausalLM", "GemmaConfig", LLAMA | {"head_dim": 8}),
    "glm4": Architecture("Glm4ForCausalLM", "Glm4Config", LLAMA | {"head_dim": 8}),
    "gpt_oss": Architecture(
        "GptOssForCausalLM",
        "GptOssConfig",
        SLIDING | {"num_local_experts": 4, "num_experts_per_tok": 2},
        PLAIN_ATTENTION | {"experts_implementation": "batched_mm"},
    ),
    "granite": Architecture("GraniteForCausalLM", "GraniteConfig", LLAMA),
    "nemotron": Architecture("NemotronForCausalLM", "NemotronConfig", LLAMA | {"head_dim": 8}),
    "olmo2": Architecture("Olmo2ForCausalLM", "Olmo2Config", LLAMA),
    "olmo3": Architecture("Olmo3ForCausalLM", "Olmo3Config", SLIDING | {"num_hidden_layers": 4}),
    "persimmon": Architecture("PersimmonForCausalLM", "PersimmonConfig", HIDDEN | {"intermediate_size": 64}),
    "phi": Architecture("PhiForCausalLM", "PhiConfig", LLAMA),
    "qwen3_moe": Architecture(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        LLAMA | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        BATCHED_EXPERTS,
    ),
    "smollm3": Architecture("SmolLM3ForCausalLM", "SmolLM3Config", LLAMA),
    "stablelm": Architecture("StableLmForCausalLM", "StableLmConfig", LLAMA),
    "starcoder2": Architecture("Starcoder2ForCausalLM", "Starcoder2Config", SLIDING),
}
FAMILIES = {name: each for name, each in ARCHITECTURES.items() if name not in ("bert", "t5")} | MORE
GREEDY = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}


def built(name: str, **sizes: Any) -> Any:
    """A model whose logits differ enough to tell one token from another, and that has no end token of its own."""
    made = FAMILIES[name]
    model: Any = Architecture(made.model, made.config, made.sizes | sizes, made.choices).build("cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    model.generation_config.eos_token_id = None
    return model


def prompt(batch: int = 2, length: int = 7) -> Tensor:
    return torch.randint(3, 96, (batch, length), generator=torch.Generator().manual_seed(1))


def looped(model: Any, given: Tensor | None = None, **wanted: Any) -> Any:
    """What graphex's loop generates."""
    return model.generate(given, custom_generate=graphex.generate, **wanted)


def reasons(model: Any) -> list[str]:
    """Why something of the generations of a model was not done on the device."""
    return [record.reason for record in graphex.generation(model).journal.fallbacks]
