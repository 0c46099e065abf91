"""Models of `transformers`, tiny and with random weights.

model = ARCHITECTURES["llama"].build("cpu")
model(**ARCHITECTURES["llama"].given("cpu"))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")


BATCH, PROMPT, VOCABULARY = 2, 7, 96


@dataclass(frozen=True)
class Architecture:
    """A model class and a configuration small enough for a test."""

    model: str
    config: str
    sizes: dict[str, Any]
    choices: dict[str, str] = field(default_factory=lambda: {"attn_implementation": "sdpa"})
    generates: bool = True
    inputs: tuple[str, ...] = ("input_ids",)
    full: bool = False

    def build(self, device: str) -> torch.nn.Module:
        torch.manual_seed(0)
        tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        config = getattr(transformers, self.config)(vocab_size=VOCABULARY, **tokens, **self.sizes)
        model = getattr(transformers, self.model)._from_config(config, **self.choices)
        if model.loss_type is None:  # the default, without a log line that Dynamo cannot trace
            model.loss_type = "ForCausalLM"
        return model.to(device).eval()

    def given(self, device: str, seed: int = 1) -> dict[str, torch.Tensor]:
        return {name: tokens(device, seed + index) for index, name in enumerate(self.inputs)}


PLAIN_ATTENTION = {"attn_implementation": "eager"}


# Backward through the other implementations of experts depends on data in a way that AOTAutograd cannot trace.
BATCHED_EXPERTS = {"attn_implementation": "sdpa", "experts_implementation": "batched_mm"}


HIDDEN = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


ENCODER = HIDDEN | {"intermediate_size": 64, "max_position_embeddings": 64}


LLAMA = ENCODER | {"num_key_value_heads": 2}


SLIDING = LLAMA | {"head_dim": 8, "sliding_window": 4}


LATENT_ATTENTION = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}


GROUPED_EXPERTS = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}


OPT = HIDDEN | {"word_embed_proj_dim": 32, "ffn_dim": 64, "max_position_embeddings": 64}


T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "mistral": Architecture("MistralForCausalLM", "MistralConfig", SLIDING),
    "qwen2": Architecture("Qwen2ForCausalLM", "Qwen2Config", LLAMA, full=True),
    "qwen3": Architecture("Qwen3ForCausalLM", "Qwen3Config", LLAMA | {"head_dim": 16}),
    "gemma2": Architecture("Gemma2ForCausalLM", "Gemma2Config", SLIDING, PLAIN_ATTENTION),
    "gemma3": Architecture("Gemma3ForCausalLM", "Gemma3TextConfig", SLIDING),
    "phi3": Architecture("Phi3ForCausalLM", "Phi3Config", LLAMA),
    "gpt2": Architecture("GPT2LMHeadModel", "GPT2Config", GPT2),
    "gpt_neox": Architecture("GPTNeoXForCausalLM", "GPTNeoXConfig", ENCODER, full=True),
    "opt": Architecture("OPTForCausalLM", "OPTConfig", OPT),
    "falcon": Architecture("FalconForCausalLM", "FalconConfig", HIDDEN),
    "bloom": Architecture(
        "BloomForCausalLM", "BloomConfig", {"hidden_size": 32, "n_layer": 2, "n_head": 4}, PLAIN_ATTENTION, full=True
    ),
    "mixtral": Architecture(
        "MixtralForCausalLM",
        "MixtralConfig",
        LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2},
        BATCHED_EXPERTS,
    ),
    "deepseek_v3": Architecture(
        "DeepseekV3ForCausalLM", "DeepseekV3Config", LLAMA | LATENT_ATTENTION | GROUPED_EXPERTS, BATCHED_EXPERTS
    ),
    "bert": Architecture("BertForMaskedLM", "BertConfig", ENCODER, generates=False),
    "t5": Architecture(
        "T5ForConditionalGeneration", "T5Config", T5, PLAIN_ATTENTION, inputs=("input_ids", "decoder_input_ids")
    ),
}


def tokens(device: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (BATCH, PROMPT), generator=generator).to(device)


def training_step(call: Callable[..., Any], model: torch.nn.Module, given: dict[str, torch.Tensor]) -> dict[str, Any]:
    """One step of SGD: the loss, every gradient and every parameter after it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = call(**given, labels=given["input_ids"], use_cache=False).loss
    loss.backward()
    optimizer.step()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"loss": loss.detach(), "gradients": gradients, "parameters": dict(model.named_parameters())}
