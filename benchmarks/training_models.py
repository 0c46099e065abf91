"""The models of the training benchmark: modules that return their loss, and a batch for each.

Weights and batches are random and the same in every process. Geometries are those of `zoo.py`: published ones at size
`gpu`, small ones at `tiny`. The batch decides whether launches or kernels take the time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import networks
from benchmarks.subjects import HF, Setting, transformer


class WithLoss(nn.Module):
    """A model and the loss of its result. A model that is given labels returns its loss itself."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *args: Tensor, target: Tensor | None = None, **named: Any) -> Tensor:
        result = self.model(*args, **named)
        return result.loss if self.loss is None else self.loss(result, target)


@dataclass(frozen=True)
class Batch:
    """A module that returns a loss, and what it is called with."""

    model: nn.Module
    arguments: tuple[Tensor, ...]
    named: dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """`batches` are those of the table, from where launches dominate to where they do not. A row of the last one needs
    `gib` of the device's memory, one of the others `less`: eager's peak, twice the weights, and the device's context.
    """

    make: Callable[[Setting], Batch]
    packages: tuple[str, ...] = ()
    batches: tuple[int, int, int] = (1, 8, 32)
    gib: float = 12.0
    less: float = 3.5


def _labelled(model: nn.Module, setting: Setting, vocabulary: int, most: int) -> Batch:
    tokens = setting.tokens(most, vocabulary)
    return Batch(WithLoss(model), (), {"input_ids": tokens, "labels": tokens.clone()})


def _gpt2(setting: Setting) -> Batch:
    vocabulary, width = setting.pick(50257, 8000, 100), setting.pick(768, 256, 32)
    geometry = {"n_embd": width, "n_layer": setting.pick(12, 2, 2), "n_head": setting.pick(12, 4, 2)}
    model = transformer("GPT2", "LMHeadModel", vocab_size=vocabulary, use_cache=False, **geometry)
    return _labelled(model, setting, vocabulary, setting.pick(128, 64, 8))


def _bert(setting: Setting) -> Batch:
    vocabulary, width = setting.pick(30522, 4000, 100), setting.pick(768, 256, 32)
    geometry = {"num_hidden_layers": setting.pick(12, 2, 2), "num_attention_heads": setting.pick(12, 4, 2)}
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "vocab_size": vocabulary}
    return _labelled(
        transformer("Bert", "ForMaskedLM", **sizes, **geometry), setting, vocabulary, setting.pick(128, 64, 8)
    )


def _llama(setting: Setting) -> Batch:
    """Four layers of half the width of Llama-3-8B."""
    vocabulary, width = setting.pick(32000, 4000, 100), setting.pick(2048, 256, 64)
    model = transformer(
        *("Llama", "ForCausalLM"),
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=setting.pick(4, 2, 2),
        num_attention_heads=setting.pick(16, 4, 4),
        num_key_value_heads=setting.pick(4, 2, 2),
        intermediate_size=setting.pick(7168, 512, 96),
        use_cache=False,
    )
    return _labelled(model, setting, vocabulary, setting.pick(256, 64, 8))


def _vit(setting: Setting) -> Batch:
    width, pixels = setting.pick(768, 256, 32), setting.image(224, 64, 32)
    model = transformer(
        *("ViT", "ForImageClassification"),
        hidden_size=width,
        num_hidden_layers=setting.pick(12, 2, 2),
        num_attention_heads=setting.pick(12, 4, 2),
        intermediate_size=4 * width,
        image_size=pixels.shape[-1],
        patch_size=setting.pick(16, 16, 8),
        num_labels=10,
    )
    return Batch(WithLoss(model), (), {"pixel_values": pixels, "labels": torch.randint(0, 10, (setting.batch,))})


def _resnet50(setting: Setting) -> Batch:
    model = networks.ResNet(setting.pick(64, 16, 8), setting.pick((3, 4, 6, 3), (1, 1), (1, 1)))
    target = torch.randint(0, 1000, (setting.batch,))
    return Batch(WithLoss(model, functional.cross_entropy), (setting.image(224, 64, 32),), {"target": target})


def _unet(setting: Setting) -> Batch:
    model, image = networks.UNet(setting.pick(64, 16, 8)), setting.image(64, 16, 8)
    arguments = (image, torch.randint(0, 1000, (setting.batch,)))
    return Batch(WithLoss(model, functional.mse_loss), arguments, {"target": torch.randn_like(image)})


MODELS = {
    "gpt2": Case(_gpt2, HF, less=4.0),
    "bert": Case(_bert, HF),
    "vit": Case(_vit, HF, (1, 8, 64), less=3.0),
    "resnet50": Case(_resnet50, batches=(1, 8, 128), less=2.0),
    "unet": Case(_unet, batches=(1, 8, 64), less=1.5),
    "llama": Case(_llama, HF, (1, 2, 16), gib=30.0, less=8.0),
}


def build(setting: Setting) -> Batch:
    torch.manual_seed(0)
    with torch.device(setting.device):
        made = MODELS[setting.model].make(setting)
    made.model.train()
    return made
