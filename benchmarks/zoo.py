"""The models of the models benchmark: how each is built, what it is called with, and how large it is.

Weights and inputs are random and the same in every process; nothing is downloaded. There are three sizes: `gpu` has
the geometry that is published under the model's name (the Llama half of it), `cpu` fewer layers and smaller inputs,
`tiny` is for trying the commands. Those of `benchmarks/wider_zoo.py` are measured by name only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import networks
from benchmarks.subjects import (
    HF,
    VISION,
    Case,
    Setting,
    Subject,
    first_floating,
    in_type,
    of_torchvision,
    transformer,
)
from benchmarks.wider_zoo import WIDER


def build(setting: Setting) -> Subject:
    """The model in the setting's type, and its inputs."""
    torch.manual_seed(0)
    with torch.device(setting.device):
        made = MODELS[setting.model].make(setting)
    return in_type(made, getattr(torch, setting.dtype))


@torch.no_grad()
def in_float64(subject: Subject) -> Tensor:
    """The first floating result of the same weights and inputs in float64. The model is changed for good."""
    wide = in_type(subject, torch.float64)
    if hasattr(wide.model, "set_experts_implementation") and hasattr(wide.model.config, "num_local_experts"):
        wide.model.set_experts_implementation("eager")  # the grouped product has no float64
    return first_floating(wide.call(wide.model))


# -- transformers ------------------------------------------------------------------------------------------------------


def _bert(setting: Setting) -> Subject:
    return _bert_of(setting, width=setting.pick(768, 768, 64), layers=setting.pick(12, 3, 2))


def _bert_large(setting: Setting) -> Subject:
    return _bert_of(setting, width=setting.pick(1024, 256, 64), layers=setting.pick(24, 24, 3))


def _bert_of(setting: Setting, width: int, layers: int) -> Subject:
    vocabulary = setting.pick(30522, 4000, 100)
    model = transformer(
        *("Bert", "Model"),
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // setting.pick(64, 64, 16),
        intermediate_size=4 * width,
    )
    tokens = setting.tokens(setting.pick(128, 64, 8), vocabulary)
    return Subject(model, named={"input_ids": tokens, "attention_mask": torch.ones_like(tokens)})


def _gpt2(setting: Setting) -> Subject:
    vocabulary, width = setting.pick(50257, 8000, 100), setting.pick(768, 768, 64)
    model = transformer(
        *("GPT2", "LMHeadModel"),
        vocab_size=vocabulary,
        n_embd=width,
        n_layer=setting.pick(12, 3, 2),
        n_head=width // setting.pick(64, 64, 16),
        use_cache=False,
    )
    return Subject(model, named={"input_ids": setting.tokens(setting.pick(128, 64, 8), vocabulary)})


def _t5(setting: Setting) -> Subject:
    vocabulary, width = setting.pick(32128, 4000, 100), setting.pick(512, 512, 64)
    model = transformer(
        *("T5", "ForConditionalGeneration"),
        vocab_size=vocabulary,
        d_model=width,
        d_kv=setting.pick(64, 64, 16),
        d_ff=4 * width,
        num_layers=setting.pick(6, 2, 2),
        num_heads=width // setting.pick(64, 64, 16),
        use_cache=False,
        decoder_start_token_id=0,
    )
    length = setting.pick(128, 64, 8)
    named = {"input_ids": setting.tokens(length, vocabulary), "decoder_input_ids": setting.tokens(length, vocabulary)}
    return Subject(model, named={**named, "use_cache": False})


def _vit(setting: Setting) -> Subject:
    width = setting.pick(768, 768, 64)
    pixels = setting.image(224, 224, 32)
    model = transformer(
        *("ViT", "Model"),
        hidden_size=width,
        num_hidden_layers=setting.pick(12, 2, 2),
        num_attention_heads=width // setting.pick(64, 64, 16),
        intermediate_size=4 * width,
        image_size=pixels.shape[-1],
        patch_size=setting.pick(16, 16, 8),
    )
    return Subject(model, named={"pixel_values": pixels})


def _decoder_geometry(setting: Setting) -> dict[str, Any]:
    """Half the width of Llama-3-8B."""
    width, head = setting.pick(2048, 512, 64), setting.pick(128, 64, 16)
    return {
        "vocab_size": setting.pick(32000, 4000, 100),
        "hidden_size": width,
        "num_attention_heads": width // head,
        "num_key_value_heads": max(1, width // head // 4),
        "max_position_embeddings": 2048,
        "use_cache": False,
    }


def _prompt(setting: Setting, model: nn.Module) -> Subject:
    """One prompt, whose last logits are the result."""
    tokens = torch.randint(0, model.config.vocab_size, (1, setting.pick(1024, 128, 8)))
    return Subject(model, named={"input_ids": tokens, "logits_to_keep": 1})


def _llama(setting: Setting) -> Subject:
    layers, hidden = setting.pick(8, 3, 2), setting.pick(7168, 1792, 96)
    geometry = _decoder_geometry(setting)
    model = transformer(*("Llama", "ForCausalLM"), **geometry, num_hidden_layers=layers, intermediate_size=hidden)
    return _prompt(setting, model)


def _mixtral(setting: Setting) -> Subject:
    model = transformer(
        *("Mixtral", "ForCausalLM"),
        **{**_decoder_geometry(setting), "hidden_size": setting.pick(1024, 512, 64), "num_attention_heads": 8},
        head_dim=setting.pick(128, 64, 16),
        num_hidden_layers=setting.pick(4, 2, 2),
        intermediate_size=setting.pick(3584, 1024, 96),
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    return _prompt(setting, model)


def _whisper(setting: Setting) -> Subject:
    width, frames = setting.pick(512, 384, 64), setting.pick(3000, 400, 32)
    model = transformer(
        *("Whisper", "Model"),
        d_model=width,
        encoder_layers=setting.pick(6, 2, 2),
        encoder_attention_heads=width // setting.pick(64, 64, 16),
        encoder_ffn_dim=4 * width,
        decoder_layers=1,
        decoder_attention_heads=1,
        decoder_ffn_dim=8,
        max_source_positions=frames // 2,
    )
    return Subject(model.encoder, (torch.randn(setting.batch, 80, frames),))


# -- written here ------------------------------------------------------------------------------------------------------


def _resnet(setting: Setting) -> Subject:
    model = networks.ResNet(setting.pick(64, 32, 8), setting.pick((3, 4, 6, 3), (1, 2, 2, 1), (1, 1)))
    return Subject(model, (setting.image(224, 128, 32),))


def _unet(setting: Setting) -> Subject:
    model = networks.UNet(setting.pick(64, 32, 8))
    return Subject(model, (setting.image(64, 32, 8), torch.randint(0, 1000, (setting.batch,))))


def _mlp(setting: Setting) -> Subject:
    width = setting.pick(2048, 512, 32)
    return Subject(networks.ResidualMLP(width, setting.pick(8, 4, 2)), (torch.randn(setting.batch * 64, width),))


def _conformer(setting: Setting) -> Subject:
    width = setting.pick(512, 256, 32)
    model = networks.conformer(width, width // setting.pick(64, 64, 16), setting.pick(8, 3, 1))
    return Subject(model, (torch.randn(setting.batch, setting.pick(256, 128, 16), width),))


USUAL = {
    "bert": Case(_bert, HF),
    "gpt2": Case(_gpt2, HF),
    "t5": Case(_t5, HF),
    "vit": Case(_vit, HF),
    "resnet50": Case(of_torchvision("resnet50"), VISION),
    "convnext": Case(of_torchvision("convnext_tiny", layer_scale=0.1), VISION),
    "swin": Case(of_torchvision("swin_t"), VISION, slow=1.5),
    "unet": Case(_unet),
    "llama": Case(_llama, HF, gib=5),
    "whisper": Case(_whisper, HF),
    "moe": Case(_mixtral, HF, gib=5),
    "mlp": Case(_mlp),
    "conformer": Case(_conformer),
    "bert-large": Case(_bert_large, HF, gib=6, layers=24, slow=2.0),
    "resnet": Case(_resnet),
}
MODELS = {**USUAL, **WIDER}
