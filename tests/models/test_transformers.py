"""Models of `transformers`, tiny and with random weights: forward, greedy decoding and a training step equal eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import graphex

transformers = pytest.importorskip("transformers")

BATCH, PROMPT, NEW_TOKENS, VOCABULARY = 2, 7, 4, 96


@dataclass(frozen=True)
class Architecture:
    """A model class and a configuration small enough for a test."""

    model: str
    config: str
    sizes: dict[str, Any]
    attention: str = "sdpa"
    generates: bool = True
    given: tuple[str, ...] = ("input_ids",)

    def build(self, device: str) -> torch.nn.Module:
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)
        model = getattr(transformers, self.model)._from_config(config, attn_implementation=self.attention)
        return model.to(device).eval()


# What nearly every decoder of the Llama line is described by.
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}

ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "mistral": Architecture("MistralForCausalLM", "MistralConfig", LLAMA | {"sliding_window": 4, "head_dim": 8}),
    "qwen2": Architecture("Qwen2ForCausalLM", "Qwen2Config", LLAMA),
    "qwen3": Architecture("Qwen3ForCausalLM", "Qwen3Config", LLAMA | {"head_dim": 16}),
    "gemma2": Architecture("Gemma2ForCausalLM", "Gemma2Config", LLAMA | {"head_dim": 8, "sliding_window": 4}, "eager"),
    "gemma3": Architecture("Gemma3ForCausalLM", "Gemma3TextConfig", LLAMA | {"head_dim": 8, "sliding_window": 4}),
    "phi3": Architecture("Phi3ForCausalLM", "Phi3Config", LLAMA),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    ),
    "gpt_neox": Architecture(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
        },
    ),
    "opt": Architecture(
        "OPTForCausalLM",
        "OPTConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "ffn_dim": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
        },
    ),
    "falcon": Architecture(
        "FalconForCausalLM",
        "FalconConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
    "bloom": Architecture(
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        "eager",
    ),
    "mixtral": Architecture(
        "MixtralForCausalLM", "MixtralConfig", LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "deepseek_v3": Architecture(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        LLAMA
        | EXPERTS
        | {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "bert": Architecture(
        "BertForMaskedLM",
        "BertConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
        },
        generates=False,
    ),
    "t5": Architecture(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        "eager",
        given=("input_ids", "decoder_input_ids"),
    ),
}
every_architecture = pytest.mark.parametrize("name", ARCHITECTURES)
every_generator = pytest.mark.parametrize("name", [name for name, it in ARCHITECTURES.items() if it.generates])


def tokens(device: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (BATCH, PROMPT), generator=generator).to(device)


def inputs(architecture: Architecture, device: str, seed: int = 1) -> dict[str, torch.Tensor]:
    return {name: tokens(device, seed + index) for index, name in enumerate(architecture.given)}


def assert_compiled(journal: graphex.Journal, *phases: str) -> None:
    """Every one of these graphs went through all passes, and nothing was given up on the way."""
    assert {graph.phase for graph in journal.graphs} >= set(phases)
    assert list(journal.fallbacks) == []
    assert [ran for ran in journal.passes if ran.status not in ("changed", "unchanged")] == []


def assert_replayed(journal: graphex.Journal, device: str) -> None:
    if device == "cpu":
        return
    assert journal.captures
    for graph in journal.graphs:
        assert journal.counts[graph.graph]["replays"] > 0, graph.graph


@every_architecture
def test_forward_equals_eager(name: str, device: str) -> None:
    architecture = ARCHITECTURES[name]
    model = architecture.build(device)
    compiled = torch.compile(model, backend="graphex", fullgraph=True)
    with torch.no_grad():
        for seed in range(4):
            given = inputs(architecture, device, seed)
            expected, found = model(**given, use_cache=False), compiled(**given, use_cache=False)
            torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=0)
    journal = graphex.journal(compiled)
    assert_compiled(journal, "inference")
    assert_replayed(journal, device)


@every_generator
def test_greedy_decoding_with_a_static_cache_gives_eagers_tokens(name: str, device: str) -> None:
    model = ARCHITECTURES[name].build(device)
    prompt = tokens(device, seed=1)
    how = {
        "cache_implementation": "static",
        "max_new_tokens": NEW_TOKENS,
        "min_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "disable_compile": True,
    }
    expected = model.generate(prompt, **how)
    model.forward = torch.compile(model.forward, backend="graphex", fullgraph=True)
    found = model.generate(prompt, **how)
    assert found.tolist() == expected.tolist()
    assert_compiled(graphex.journal(model.forward), "inference")


@every_architecture
def test_training_step_equals_eager(name: str, device: str) -> None:
    architecture = ARCHITECTURES[name]
    model = architecture.build(device)
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, backend="graphex", fullgraph=True)
    given = inputs(architecture, device)
    expected, found = step(model, model, given), step(compiled, twin, given)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert_compiled(graphex.journal(compiled), "forward", "backward")


def step(call: Callable[..., Any], model: torch.nn.Module, given: dict[str, torch.Tensor]) -> dict[str, Any]:
    """One step of SGD: the loss, every gradient and every parameter after it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = call(**given, labels=given["input_ids"], use_cache=False).loss
    loss.backward()
    optimizer.step()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"loss": loss.detach(), "gradients": gradients, "parameters": dict(model.named_parameters())}
