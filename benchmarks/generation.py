"""The models of the generation benchmark, the ways to generate with them, and the process that measures one row.

Weights are random and the same in every process; nothing is downloaded. A geometry is the published one, with fewer
layers where that is said.

    python benchmarks/generation.py '{"settings": [...]}'       a worker, in the stages of `decode_worker.py`

    start     import torch and transformers; the device is untouched
    build     the model
    compile   two generations                                    } for each setting: they differ in
    measure   generations of all tokens, and of one              } who generates
"""

from __future__ import annotations

import fcntl
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import graphex
from benchmarks.measure import synchronize
from benchmarks.variants import Variant
from graphex.kernels import tuning
from graphex.loops.generate import floor_bytes
from graphex.loops.session import _ATTACHED

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
VARIANTS = {  # who generates, and a generous estimate of the seconds of a row
    "eager": Variant("eager", seconds=20),
    "stock": Variant("stock", "inductor", seconds=60),
    "step": Variant("step", "graphex", seconds=40),
    "loop": Variant("loop", "graphex", seconds=35),
    "prefill": Variant("prefill", "graphex", seconds=60),
}
LOOPS = ("loop", "prefill")  # the second compiles its prompts, too
FEWER = {"eager": (24, 2), "stock": (64, 3), "step": (64, 3)}  # tokens and rounds of those that take longer


@dataclass(frozen=True)
class Setting:
    """One row: a model, how many layers of it, the batch, and who generates."""

    model: str = "llama-3-8b"
    variant: str = "loop"
    batch: int = 1
    layers: int = 0  # at most; 0: as the table says
    prompt: int = 128
    tokens: int = 128
    device: str = "cuda"
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        return f"{self.model}, batch {self.batch}, {self.variant}"

    @property
    def depth(self) -> int:
        most = MODELS[self.model][3]
        return min(self.layers or most, most)

    @property
    def seconds(self) -> float:
        """A generous estimate of the time of a row."""
        return VARIANTS[self.variant].seconds * (0.5 + self.depth / 32)

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
    compiled: str = "alone"
    seconds: float = 0.0
    failed: str = ""

    @property
    def pipelined(self) -> float:
        return self.token


@dataclass(frozen=True)
class Job:
    """The rows of one model and batch, which one process measures in turn: a task of `benchmarks/workers.py`."""

    settings: tuple[Setting, ...]

    def __str__(self) -> str:
        return f"{self.setting.model}, batch {self.setting.batch}"

    @property
    def setting(self) -> Setting:
        return self.settings[0]

    @property
    def variant(self) -> Variant:
        return VARIANTS[self.setting.variant]

    @property
    def given(self) -> dict[str, Any]:
        return {"settings": [asdict(each) for each in self.settings]}

    @property
    def script(self) -> Path:
        return Path(__file__)

    @property
    def reference(self) -> str:
        """Rows compare tokens, not results: none waits for another."""
        return str(self).replace(", ", "-").replace(" ", "")

    @property
    def seconds(self) -> float:
        """Of the first row."""
        return self.setting.seconds

    @property
    def bytes(self) -> int:
        """Of weights, of the chosen experts' weights that transformers copies, and of all else on the device."""
        sizes, batch = MODELS[self.setting.model][2], self.setting.batch
        experts = sizes.get("num_experts", sizes.get("num_local_experts", 1))
        inner = sizes.get("moe_intermediate_size", sizes["intermediate_size"])
        chosen = batch * sizes.get("num_experts_per_tok", 0)
        layer = sizes["hidden_size"] * (3 * inner * experts + 4 * sizes["hidden_size"])
        copied = sizes["hidden_size"] * 3 * inner * chosen
        weights = layer * self.setting.depth + 2 * sizes["vocab_size"] * sizes["hidden_size"]
        return 2 * (weights + copied) + 2 * 2**30

    def row(self, facts: dict[str, Any], **about: Any) -> Row:
        """The row that a worker has just measured. The process of one that is not known has failed."""
        found = {name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()}
        setting = self.settings[found.pop("row", 0)]
        return Row(setting, **{**about, **found, "failed": about.get("failed") or found.get("failed", "")})


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

    if setting.variant in LOOPS:
        return {"custom_generate": graphex.generate, "graphex_prefill": setting.variant == "prefill"}
    if setting.variant == "eager":
        return {}
    config = CompileConfig(backend="graphex", mode=None) if setting.variant == "step" else CompileConfig()
    config._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": config}


@torch.no_grad()
def stages(settings: Sequence[Setting]) -> Iterator[dict[str, Any]]:
    """Runs one stage for each value requested."""
    import transformers  # noqa: F401

    yield {}
    model = build(settings[0])
    yield {}
    for number, setting in enumerate(settings):
        facts = {**_NOTHING, "row": number}
        generation = Generation(model, setting)
        try:
            facts["compile"] = generation.compile()
        except Exception as error:  # of one row: the others are still measured
            facts["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        yield facts
        yield {} if facts["failed"] else generation.measure()
        forget(model)


_NOTHING = {"token": 0.0, "first": 0.0, "device": 0.0, "compile": 0.0, "floor_bytes": 0, "failed": ""}
_NOTHING |= {"tokens": (), "said": ()}


@dataclass
class Generation:
    """The generations of one row."""

    model: Any
    setting: Setting

    def __call__(self, tokens: int) -> torch.Tensor:
        setting, random = self.setting, torch.Generator().manual_seed(1)
        prompt = torch.randint(3, self.model.config.vocab_size, (setting.batch, setting.prompt), generator=random)
        given = arguments(setting) | {"do_sample": False, "pad_token_id": 0}
        whole = self.model.generate(prompt.to(setting.device), min_new_tokens=tokens, max_new_tokens=tokens, **given)
        return whole[:, setting.prompt :]  # type: ignore[no-any-return]

    def compile(self) -> float:
        """Seconds of the first generation, after which a second one has captured what there is to capture."""
        taken = seconds(lambda: self(self.setting.tokens))
        self(self.setting.tokens)
        if self.setting.variant in ("stock", "step"):
            self(1)
        return taken

    def measure(self) -> dict[str, Any]:
        setting, found = self.setting, {}
        rounds = FEWER.get(setting.variant, (0, 5))[1]
        whole = min(seconds(lambda: self(setting.tokens)) for _ in range(rounds))
        first = min(seconds(lambda: self(1)) for _ in range(rounds))
        if setting.variant in LOOPS:
            report = graphex.generation(self.model)
            found["said"] = [each.reason for each in report.journal.fallbacks]
            found["device"] = report.device_seconds or 0.0
        read = floor_bytes(self.model, setting.batch, setting.prompt + setting.tokens // 2)
        found |= {"token": (whole - first) / max(1, setting.tokens - 1), "first": first, "floor_bytes": read}
        return {**found, "tokens": self(setting.tokens)[0, : min(32, setting.tokens)].tolist()}


def forget(model: Any) -> None:
    """Give back what was compiled and captured for a model, and its caches."""
    for name in (_ATTACHED, "_compiled_call", "_last_compile_config", "_cache"):
        model.__dict__.pop(name, None)
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def seconds(run: Callable[[], Any]) -> float:
    synchronize()
    started = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - started


def take_turns(lock: Path) -> None:
    """Processes that compile beside each other measure tiles and regions one after the other."""
    measured = tuning._seconds_on

    def alone(device: Any, candidates: Sequence[tuning.Candidate]) -> dict[str, float]:
        with open(lock, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
            return measured(device, candidates)

    tuning._seconds_on = alone


def main() -> None:
    given = json.loads(sys.argv[1])
    take_turns(Path(given["reference"]).with_name("measuring"))
    steps = stages([Setting(**each) for each in given["settings"]])
    for _ in sys.stdin:
        print(f"\n@{json.dumps(next(steps, {}))}", flush=True)


if __name__ == "__main__":
    main()
