"""More models of the models benchmark, one of each class that users compile: they were not looked at while graphex was
written, and are here to find the classes that it is slow at.

Sizes are those of `benchmarks/zoo.py`. A model of transformers is a row of `OF_TRANSFORMERS`: its class, how it is
called, and its configuration for each size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from benchmarks import wider_networks as networks
from benchmarks.subjects import HF, VISION, Case, Setting, Subject, of_torchvision, transformer

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """A model of transformers. `tiny` is laid over `config` at the sizes `tiny` and `cpu`; `given` makes its inputs."""

    name: str
    kind: str
    given: Callable[[Setting, nn.Module], Mapping[str, Any]]
    config: Config
    tiny: Config = field(default_factory=dict)

    def make(self, setting: Setting) -> Subject:
        config = {**self.config, **setting.pick({}, self.tiny, self.tiny)}
        model = transformer(self.name, self.kind, **config)
        return Subject(model, named=self.given(setting, model))


def text(setting: Setting, model: nn.Module) -> dict[str, Any]:
    tokens = setting.tokens(setting.pick(128, 32, 8), model.config.vocab_size)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def prompt(setting: Setting, model: nn.Module) -> dict[str, Any]:
    return {**text(setting, model), "use_cache": False}


def translation(setting: Setting, model: nn.Module) -> dict[str, Any]:
    read, written = (setting.tokens(setting.pick(128, 32, 8), model.config.vocab_size) for _ in range(2))
    return {"input_ids": read, "decoder_input_ids": written, "use_cache": False}


def pixels(setting: Setting, model: nn.Module) -> dict[str, Any]:
    config = getattr(model.config, "vision_config", model.config)
    side = config.image_size if isinstance(getattr(config, "image_size", None), int) else setting.pick(512, 128, 64)
    return {"pixel_values": torch.randn(setting.batch, 3, side, side)}


def pixels_and_text(setting: Setting, model: nn.Module) -> dict[str, Any]:
    tokens = setting.tokens(setting.pick(64, 16, 8), model.config.text_config.vocab_size)
    return {**pixels(setting, model), "input_ids": tokens}


def sound(setting: Setting, model: nn.Module) -> dict[str, Any]:
    return {"input_values": torch.randn(setting.batch, setting.pick(80000, 8000, 2000))}


def series(setting: Setting, model: nn.Module) -> dict[str, Any]:
    config = model.config
    return {"past_values": torch.randn(setting.batch, config.context_length, config.num_input_channels)}


def _bert_like(**more: int) -> Config:
    few = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return {**few, "intermediate_size": 128, **more}


def _bart_like(**more: Any) -> Config:
    few = {"vocab_size": 100, "d_model": 64, "max_position_embeddings": 64}
    sides = ("encoder", "decoder")
    each = {
        f"{side}_{what}": n for side in sides for what, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 128))
    }
    return {**few, **each, **more}


_CLIP = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
_SIGHT = {**_CLIP, "image_size": 32, "patch_size": 8}
_WORDS = {**_CLIP, "vocab_size": 100, "projection_dim": 64}
_BASE_DECODER = {"hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16}

OF_TRANSFORMERS = {
    "distilbert": Row(
        "DistilBert", "Model", text, {}, {"vocab_size": 100, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128}
    ),
    "albert": Row(
        "Albert",
        "Model",
        text,
        _bert_like(
            vocab_size=30000, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072
        ),
        _bert_like(embedding_size=32),
    ),
    "deberta": Row(
        "DebertaV2",
        "Model",
        text,
        {
            "vocab_size": 128100,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 256,
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
            "position_biased_input": False,
        },
        _bert_like(position_buckets=8),
    ),
    "electra": Row("Electra", "ForPreTraining", text, {}, _bert_like(embedding_size=32)),
    "fnet": Row("FNet", "Model", lambda s, m: {"input_ids": text(s, m)["input_ids"]}, {}, _bert_like()),
    "opt": Row("OPT", "ForCausalLM", prompt, {}, _bert_like(ffn_dim=128, word_embed_proj_dim=64)),
    "bloom": Row(
        "Bloom",
        "ForCausalLM",
        prompt,
        {"hidden_size": 1024, "n_layer": 12, "n_head": 16},
        {"vocab_size": 100, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    ),
    "gpt-neox": Row("GPTNeoX", "ForCausalLM", prompt, {**_BASE_DECODER, "intermediate_size": 4096}, _bert_like()),
    "falcon": Row("Falcon", "ForCausalLM", prompt, _BASE_DECODER, _bert_like()),
    "mamba": Row(
        "Mamba",
        "ForCausalLM",
        prompt,
        {"num_hidden_layers": 4},
        {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    ),
    "mamba2": Row(
        "Mamba2",
        "ForCausalLM",
        prompt,
        {
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_heads": 24,
            "head_dim": 64,
            "vocab_size": 32000,
            "n_groups": 1,
        },
        {
            "vocab_size": 100,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_heads": 4,
            "head_dim": 16,
            "state_size": 8,
            "chunk_size": 8,
        },
    ),
    "bart": Row("Bart", "Model", translation, {"d_model": 768, "encoder_layers": 6, "decoder_layers": 6}, _bart_like()),
    "marian": Row(
        "Marian",
        "MTModel",
        translation,
        {
            "d_model": 512,
            "encoder_layers": 6,
            "decoder_layers": 6,
            "encoder_attention_heads": 8,
            "decoder_attention_heads": 8,
            "encoder_ffn_dim": 2048,
            "decoder_ffn_dim": 2048,
        },
        _bart_like(pad_token_id=0, decoder_start_token_id=0, eos_token_id=1, bos_token_id=1),
    ),
    "clip": Row(
        "CLIP", "Model", pixels_and_text, {}, {"text_config": _WORDS, "vision_config": _SIGHT, "projection_dim": 64}
    ),
    "siglip": Row("Siglip", "Model", pixels_and_text, {}, {"text_config": _WORDS, "vision_config": _SIGHT}),
    "dinov2": Row("Dinov2", "Model", pixels, {}, _SIGHT),
    "segformer": Row(
        "Segformer",
        "ForSemanticSegmentation",
        pixels,
        {"num_labels": 150},
        {
            "hidden_sizes": [16, 16, 32, 32],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 1, 2, 2],
            "decoder_hidden_size": 32,
        },
    ),
    "wav2vec2": Row("Wav2Vec2", "Model", sound, {}, {**_bert_like(), "conv_dim": [32] * 7}),
    "hubert": Row("Hubert", "Model", sound, {}, {**_bert_like(), "conv_dim": [32] * 7}),
    "patchtst": Row(
        "PatchTST",
        "ForPrediction",
        series,
        {"num_input_channels": 7, "context_length": 512, "prediction_length": 96},
        {"context_length": 32, "prediction_length": 8},
    ),
}


def _detr(setting: Setting) -> Subject:
    import transformers

    small: Config = {"embedding_size": 16, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]}
    backbone = transformers.ResNetConfig(out_features=["stage4"], **setting.pick({}, small, small))
    few = {**_bart_like(), "num_queries": 10}
    tiny: Config = {key: few[key] for key in few if key not in ("vocab_size", "max_position_embeddings")}
    options = {
        "use_timm_backbone": False,
        "use_pretrained_backbone": False,
        "backbone": None,
        "backbone_config": backbone,
    }
    model = transformer("Detr", "ForObjectDetection", **options, **setting.pick({}, tiny, tiny))
    return Subject(model, named={"pixel_values": setting.image(512, 128, 64)})


def _of(make: Callable[[Setting], nn.Module], given: Callable[[Setting], tuple[torch.Tensor, ...]]) -> Case:
    return Case(lambda setting: Subject(make(setting), given(setting)))


def _rows(setting: Setting, width: int) -> torch.Tensor:
    return torch.randn(setting.batch, width)


def _tokens(setting: Setting, length: int, width: int) -> torch.Tensor:
    return torch.randn(setting.batch, length, width)


def _clicks(setting: Setting) -> tuple[torch.Tensor, ...]:
    rows = setting.batch * setting.pick(256, 32, 4)
    return torch.randn(rows, 13), torch.randint(0, 100, (26, rows * 4)), torch.arange(0, rows * 4, 4).repeat(26, 1)


def _graph(setting: Setting) -> tuple[torch.Tensor, ...]:
    points = setting.pick(4096, 256, 32)
    return torch.randn(points, setting.pick(128, 32, 16)), torch.randint(0, points, (2, 8 * points))


WRITTEN = {
    "lstm": _of(
        lambda s: networks.Tagger(nn.LSTM, 1000, s.pick(512, 64, 16)),
        lambda s: (s.tokens(s.pick(128, 32, 8), 1000),),
    ),
    "gru": _of(
        lambda s: networks.Tagger(nn.GRU, 1000, s.pick(512, 64, 16)),
        lambda s: (s.tokens(s.pick(128, 32, 8), 1000),),
    ),
    "dlrm": _of(lambda s: networks.DLRM(26, s.pick(100000, 1000, 100), s.pick(64, 16, 8)), _clicks),
    "gnn": _of(lambda s: networks.GraphNetwork(s.pick(128, 32, 16), 4), _graph),
    "gat": _of(lambda s: networks.GraphAttention(s.pick(128, 32, 16), 3), _graph),
    "flex": _of(
        lambda s: networks.FlexibleAttention(s.pick(512, 64, 32), s.pick(4, 2, 1), s.pick(8, 4, 2)),
        lambda s: (_tokens(s, s.pick(512, 128, 16), s.pick(512, 64, 32)),),
    ),
    "dit": _of(
        lambda s: networks.DiT(s.pick(384, 64, 32), s.pick(12, 2, 2), s.pick(6, 4, 2)),
        lambda s: (torch.randn(s.batch, 4, *[s.pick(32, 16, 8)] * 2), torch.rand(s.batch), torch.arange(s.batch)),
    ),
    "mixer": _of(
        lambda s: networks.Mixer(s.pick(196, 49, 16), s.pick(512, 64, 32), s.pick(8, 2, 2)),
        lambda s: (_tokens(s, s.pick(196, 49, 16), s.pick(512, 64, 32)),),
    ),
    "nerf": _of(
        lambda s: networks.NeRF(s.pick(256, 64, 16)),
        lambda s: (torch.randn(s.batch * s.pick(8192, 256, 16), 3), torch.randn(s.batch * s.pick(8192, 256, 16), 3)),
    ),
    "policy": _of(lambda s: networks.Policy(s.pick(256, 64, 16)), lambda s: (_rows(s, 48),)),
    "kan": _of(lambda s: networks.kan(s.pick(256, 32, 8), 4), lambda s: (_rows(s, s.pick(256, 32, 8)),)),
    "fno": _of(
        lambda s: networks.FNO(s.pick(64, 16, 8), s.pick(16, 4, 2), 4),
        lambda s: (torch.randn(s.batch, 1, *[s.pick(64, 32, 16)] * 2),),
    ),
    "encoder": _of(
        lambda s: networks.torch_encoder(s.pick(512, 64, 32), s.pick(6, 2, 2)),
        lambda s: (_tokens(s, s.pick(128, 32, 8), s.pick(512, 64, 32)),),
    ),
    "tcn": _of(
        lambda s: networks.tcn(s.pick(256, 32, 8), s.pick(8, 4, 3)),
        lambda s: (torch.randn(s.batch, s.pick(256, 32, 8), s.pick(1024, 64, 32)),),
    ),
}

_PICTURES = ("efficientnet_b0", "mobilenet_v3_large", "regnet_y_400mf", "densenet121", "shufflenet_v2_x1_0")

WIDER = {
    **{name: Case(row.make, HF) for name, row in OF_TRANSFORMERS.items()},
    "detr": Case(_detr, HF, slow=1.5),
    **{name: Case(of_torchvision(name), VISION, slow=1.5) for name in _PICTURES},
    "maxvit_t": Case(of_torchvision("maxvit_t", (224, 224, 224)), VISION, slow=1.5),
    "inception_v3": Case(
        of_torchvision("inception_v3", (224, 128, 96), aux_logits=False, init_weights=False), VISION, slow=1.5
    ),
    "deeplabv3": Case(
        of_torchvision("segmentation.deeplabv3_mobilenet_v3_large", weights_backbone=None), VISION, slow=1.5
    ),
    **WRITTEN,
}
