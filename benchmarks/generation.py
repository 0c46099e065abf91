"""The models of the generation benchmark, the ways to generate with them, and one measurement.

Weights are random and the same in every process; nothing is downloaded. A geometry is the published one, with fewer
layers where that is said. `python -m benchmarks.generation '{"model": ...}'` measures one row and prints it as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

import graphex
from graphex.loops.report import floor_bytes

_LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
_MOE = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
# name -> (class of the model, class of its configuration, its sizes, layers)
MODELS: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "llama-3-8b": ("LlamaForCausalLM", "LlamaConfig", _LLAMA | {"vocab_size": 128256}, 32),
    "qwen3-8b": (
        "Qwen3ForCausalLM",
        "Qwen3Config",
        _LLAMA | {"intermediate_size": 12288, "head_dim": 128, "vocab_size": 151936},
        36,
    ),
    "mistral-window": (
        "MistralForCausalLM",
        "MistralConfig",
        _LLAMA | {"vocab_size": 32000, "sliding_window": 128},
        8,
    ),
    "gemma-2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {
            **{"hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 16, "num_key_value_heads": 8},
            **{"head_dim": 256, "vocab_size": 256000, "sliding_window": 128},
        },
        8,
    ),
    "gemma-3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            **{"hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 8, "num_key_value_heads": 4},
            **{"head_dim": 256, "vocab_size": 262144, "sliding_window": 128},
        },
        12,
    ),
    "phi-3": (
        "Phi3ForCausalLM",
        "Phi3Config",
        {
            **{"hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 32},
            **{"vocab_size": 32064, "pad_token_id": 0},
        },
        32,
    ),
    "qwen3-30b-a3b": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        _MOE
        | {
            **{"intermediate_size": 6144, "moe_intermediate_size": 768, "vocab_size": 151936},
            **{"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
        },
        12,
    ),
    "gpt-oss-20b": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **{"hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8},
            **{"head_dim": 64, "vocab_size": 201088, "num_local_experts": 32, "num_experts_per_tok": 4},
        },
        8,
    ),
}
VARIANTS = ("eager", "stock", "step", "loop")


@dataclass(frozen=True)
class Setting:
    """One row: a model, how many layers of it, the batch, and who generates."""

    model: str = "llama-3-8b"
    variant: str = "loop"
    batch: int = 1
    layers: int = 0  # 0: as the table says
    prompt: int = 128
    tokens: int = 128
    device: str = "cuda"
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        return f"{self.model}, batch {self.batch}, {self.variant}"

    @property
    def depth(self) -> int:
        return self.layers or MODELS[self.model][3]

    def tiny(self) -> Setting:
        return replace(self, layers=2, prompt=8, tokens=8, device="cpu", dtype="float32")


@dataclass(frozen=True)
class Row:
    """`token` and `first` are seconds, `device` those of a captured step by itself; `floor_bytes` is what it reads."""

    setting: Setting
    token: float = 0.0
    first: float = 0.0
    device: float = 0.0
    compile: float = 0.0
    floor_bytes: int = 0
    tokens: tuple[int, ...] = ()
    said: tuple[str, ...] = ()
    failed: str = ""


def build(setting: Setting) -> Any:
    import transformers

    made, configured, sizes, _ = MODELS[setting.model]
    if setting.device == "cpu":
        small = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
        small |= {"head_dim": 16, "vocab_size": 128, "moe_intermediate_size": 32, "num_experts": 8}
        sizes = sizes | {name: size for name, size in small.items() if name in sizes}
    config = getattr(transformers, configured)(
        **sizes, num_hidden_layers=setting.depth, tie_word_embeddings=False, max_position_embeddings=8192
    )
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, setting.dtype))
    with torch.device(setting.device):
        model = getattr(transformers, made)(config).eval()
    torch.set_default_dtype(torch.float32)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.generation_config.eos_token_id = None
    return model


def arguments(setting: Setting) -> dict[str, Any]:
    from transformers import CompileConfig

    if setting.variant == "loop":
        return {"custom_generate": graphex.generate}
    if setting.variant == "eager":
        return {}
    config = CompileConfig(backend="graphex", mode=None) if setting.variant == "step" else CompileConfig()
    config._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": config}


def measure(setting: Setting, rounds: int = 3) -> Row:
    model = build(setting)
    vocabulary = model.config.vocab_size
    prompt = torch.randint(3, vocabulary, (setting.batch, setting.prompt), generator=torch.Generator().manual_seed(1))
    prompt = prompt.to(setting.device)
    given = arguments(setting) | {"do_sample": False, "pad_token_id": 0}

    def run(tokens: int) -> torch.Tensor:
        return model.generate(prompt, min_new_tokens=tokens, max_new_tokens=tokens, **given)[:, setting.prompt :]

    started = time.perf_counter()
    tokens = run(setting.tokens)
    compiled = time.perf_counter() - started
    run(setting.tokens)
    whole = min(seconds(lambda: run(setting.tokens)) for _ in range(rounds))
    if setting.variant in ("stock", "step"):
        run(1)
    first = min(seconds(lambda: run(1)) for _ in range(rounds))
    said: tuple[str, ...] = ()
    alone = 0.0
    if setting.variant == "loop":
        report = graphex.generation(model)
        said, alone = tuple(each.reason for each in report.journal.fallbacks), report.device_seconds or 0.0
    chosen = tuple(tokens[0, : min(32, setting.tokens)].tolist())
    token = (whole - first) / max(1, setting.tokens - 1)
    read = floor_bytes(model, setting.batch, setting.prompt + setting.tokens // 2)
    return Row(setting, token, first, alone, compiled, read, chosen, said)


def seconds(run: Callable[[], Any]) -> float:
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronize()
    started = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    row = measure(Setting(**json.loads(sys.argv[1])))
    print(json.dumps(asdict(row)))
