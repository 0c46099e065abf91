"""Networks of `benchmarks/wider_zoo.py` that no package provides, written as users write them, in plain modules."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention


class Tagger(nn.Module):
    """A label for each token, by a recurrent network that reads both ways."""

    def __init__(self, kind: type[nn.RNNBase], vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.recurrent = kind(width, width, num_layers=2, batch_first=True, bidirectional=True)
        self.norm, self.head = nn.LayerNorm(2 * width), nn.Linear(2 * width, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        found, _ = self.recurrent(self.embedding(tokens))
        return functional.log_softmax(self.head(self.norm(found)), -1)


class DLRM(nn.Module):
    """Recommendation: bags of embeddings and dense features, the products of all pairs, an MLP."""

    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        top = (nn.Linear(pairs + width, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1))
        self.top = nn.Sequential(*top)
        rows_, columns = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("row", rows_)
        self.register_buffer("column", columns)

    def forward(self, dense: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
        x = self.bottom(dense)
        bags = [table(each, start) for table, each, start in zip(self.tables, indices, offsets, strict=True)]
        together = torch.stack([x, *bags], 1)
        pairs = torch.bmm(together, together.transpose(1, 2))[:, self.row, self.column]
        return torch.sigmoid(self.top(torch.cat((x, pairs), 1)))


class GraphNetwork(nn.Module):
    """Message passing over the edges of a graph, with attention over the edges of a node in each layer."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.messages = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.weights = nn.ModuleList(nn.Linear(width, 1) for _ in range(layers))
        self.updates = nn.ModuleList(nn.GRUCell(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges[0], edges[1]
        for message, weight, update in zip(self.messages, self.weights, self.updates, strict=True):
            sent = functional.leaky_relu(message(torch.cat((x[source], x[target]), -1)))
            score = torch.exp(torch.tanh(weight(sent)))
            total = torch.zeros(x.shape[0], 1, dtype=x.dtype, device=x.device).index_add(0, target, score)
            shared = score / total[target]
            received = torch.zeros_like(x).index_add(0, target, sent * shared)
            x = update(received, x)
        return self.head(x)


class DiTBlock(nn.Module):
    """Attention and an MLP, scaled and shifted by the time step and the class."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.told = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, told: Tensor) -> Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.told(told).unsqueeze(1).chunk(6, -1)
        batch, length, width = x.shape
        y = self.norms[0](x) * (1 + scale) + shift
        q, k, v = self.qkv(y).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = x + gate * self.out(y)
        return x + gate2 * self.mlp(self.norms[1](x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    """A diffusion transformer on latent images of four channels, in patches of two by two."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.enter = nn.Conv2d(4, width, 2, 2)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.classes = nn.Embedding(1000, width)
        self.blocks = nn.ModuleList(DiTBlock(width, heads) for _ in range(layers))
        self.norm, self.told = nn.LayerNorm(width, elementwise_affine=False), nn.Linear(width, 2 * width)
        self.leave = nn.Linear(width, 16)

    def forward(self, x: Tensor, time: Tensor, label: Tensor) -> Tensor:
        rates = torch.exp(-math.log(10000) * torch.arange(128, device=x.device) / 128)
        angles = time[:, None].float() * rates
        told = self.time(torch.cat((angles.cos(), angles.sin()), -1).to(x.dtype)) + self.classes(label)
        batch, _, high, wide = x.shape
        x = self.enter(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x, told)
        shift, scale = self.told(functional.silu(told)).unsqueeze(1).chunk(2, -1)
        x = self.leave(self.norm(x) * (1 + scale) + shift).view(batch, high // 2, wide // 2, 2, 2, 4)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(batch, 4, high, wide)


class MixerBlock(nn.Module):
    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.across, self.within = self._mlp(length, length // 2), self._mlp(width, 4 * width)

    @staticmethod
    def _mlp(width: int, hidden: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(self.norms[1](x))


class Mixer(nn.Module):
    def __init__(self, length: int, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(MixerBlock(length, width) for _ in range(layers)))
        self.head = nn.Linear(width, 100)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x).mean(1))


class NeRF(nn.Module):
    """Density and colour of points, by sines of their places and a skip connection."""

    def __init__(self, width: int, bands: int = 10) -> None:
        super().__init__()
        wide = 3 + 6 * bands
        self.bands = bands
        self.first = nn.ModuleList(nn.Linear(wide if not each else width, width) for each in range(4))
        self.second = nn.ModuleList(nn.Linear(width + wide if not each else width, width) for each in range(4))
        self.density, self.colour = nn.Linear(width, 1), nn.Sequential(nn.Linear(width + wide, 128), nn.ReLU())
        self.leave = nn.Linear(128, 3)

    def _waves(self, x: Tensor) -> Tensor:
        angles = x[..., None] * 2.0 ** torch.arange(self.bands, device=x.device, dtype=x.dtype)
        return torch.cat((x, angles.sin().flatten(-2), angles.cos().flatten(-2)), -1)

    def forward(self, places: Tensor, directions: Tensor) -> Tensor:
        seen = self._waves(places)
        x = seen
        for layer in self.first:
            x = functional.relu(layer(x))
        x = torch.cat((x, seen), -1)
        for layer in self.second:
            x = functional.relu(layer(x))
        directions = functional.normalize(directions, dim=-1)
        colour = torch.sigmoid(self.leave(self.colour(torch.cat((x, self._waves(directions)), -1))))
        return torch.cat((colour, functional.softplus(self.density(x))), -1)


class Policy(nn.Module):
    """An actor and a critic, of a few small layers: nothing but launches. Observations are normalised and clipped."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(48))
        self.register_buffer("variance", torch.ones(48))
        self.actor, self.critic = (self._mlp(width, outputs) for outputs in (12, 1))
        self.spread = nn.Parameter(torch.zeros(12))

    @staticmethod
    def _mlp(width: int, outputs: int) -> nn.Module:
        hidden = [each for _ in range(2) for each in (nn.Linear(width, width), nn.ELU())]
        return nn.Sequential(nn.Linear(48, width), nn.ELU(), *hidden, nn.Linear(width, outputs))

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        seen = ((seen - self.mean) / torch.sqrt(self.variance + 1e-5)).clamp(-5, 5)
        return torch.tanh(self.actor(seen)), self.spread.exp().expand(seen.shape[0], -1), self.critic(seen).squeeze(-1)


class KANLayer(nn.Module):
    """A spline on each edge: basis functions by de Boor's recursion, then one product."""

    def __init__(self, before: int, after: int, intervals: int = 5, order: int = 3) -> None:
        super().__init__()
        self.order = order
        knots = torch.arange(-order, intervals + order + 1).float() * (2.0 / intervals) - 1.0
        self.register_buffer("knots", knots.expand(before, -1).contiguous())
        self.base = nn.Linear(before, after)
        self.spline = nn.Parameter(torch.randn(after, before * (intervals + order)) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        knots, wide = self.knots, x.unsqueeze(-1)
        basis = ((wide >= knots[:, :-1]) & (wide < knots[:, 1:])).to(x.dtype)
        for k in range(1, self.order + 1):
            left = (wide - knots[:, : -(k + 1)]) / (knots[:, k:-1] - knots[:, : -(k + 1)])
            right = (knots[:, k + 1 :] - wide) / (knots[:, k + 1 :] - knots[:, 1:(-k)])
            basis = left * basis[..., :-1] + right * basis[..., 1:]
        return self.base(functional.silu(x)) + functional.linear(basis.flatten(1), self.spline)


def kan(width: int, layers: int) -> nn.Module:
    return nn.Sequential(*(KANLayer(width, width) for _ in range(layers)))


class FNO(nn.Module):
    """A Fourier neural operator in two dimensions; transforms are in float32."""

    def __init__(self, width: int, modes: int, layers: int) -> None:
        super().__init__()
        self.modes = modes
        self.enter, self.leave = nn.Conv2d(1, width, 1), nn.Conv2d(width, 1, 1)
        shape = (layers, 2, width, width, modes, modes, 2)
        self.weights = nn.Parameter(torch.randn(shape) / width)
        self.skips = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(layers))

    def _filtered(self, x: Tensor, weights: Tensor) -> Tensor:
        seen = torch.fft.rfft2(x.float())
        low, high = torch.view_as_complex(weights.float().contiguous())
        result = torch.zeros_like(seen)
        m = self.modes
        result[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", seen[:, :, :m, :m], low)
        result[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", seen[:, :, -m:, :m], high)
        return torch.fft.irfft2(result, s=x.shape[-2:]).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for weights, skip in zip(self.weights, self.skips, strict=True):
            x = functional.gelu(self._filtered(x, weights) + skip(x))
        return self.leave(x)


def torch_encoder(width: int, layers: int) -> nn.Module:
    """torch's own TransformerEncoder, which has a fast path of its own in eager mode."""
    layer = nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


class Dilated(nn.Module):
    """A causal convolution with a gate, as in WaveNet."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.room = 2 * dilation
        self.gated, self.out = nn.Conv1d(width, 2 * width, 3, dilation=dilation), nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        signal, gate = self.gated(functional.pad(x, (self.room, 0))).chunk(2, 1)
        return x + self.out(torch.tanh(signal) * torch.sigmoid(gate))


def tcn(width: int, layers: int) -> nn.Module:
    return nn.Sequential(*(Dilated(width, 2**layer) for layer in range(layers)))


class GraphAttention(nn.Module):
    """Attention over the edges that enter a node, with lookups, maxima and sums by index."""

    def __init__(self, width: int, layers: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.values = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.scores = nn.ParameterList(torch.randn(2, heads, width // heads) for _ in range(layers))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        for layer, score in zip(self.values, self.scores, strict=True):
            value = layer(x).unflatten(-1, (self.heads, -1))
            sent, received = ((value * each).sum(-1) for each in score)
            weight = functional.leaky_relu(sent[source] + received[target], 0.2)
            largest = torch.full_like(sent, -torch.inf)
            largest = largest.scatter_reduce(0, target[:, None].expand_as(weight), weight, "amax")
            weight = torch.exp(weight - largest[target])
            total = torch.zeros_like(sent).index_add(0, target, weight)
            weight = weight / (total[target] + 1e-6)
            x = torch.zeros_like(value).index_add(0, target, value[source] * weight[..., None]).flatten(1)
            x = functional.elu(x)
        return x


class FlexibleAttention(nn.Module):
    """Attention by `flex_attention`, with a capped score that falls with the distance."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        def score(value: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return torch.where(i >= j, 20 * torch.tanh(value / 20) - (i - j) * 0.1, -torch.inf)

        for norm, qkv, out in zip(self.norms, self.qkv, self.out, strict=True):
            q, k, v = qkv(norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            x = x + out(flex_attention(q, k, v, score_mod=score).transpose(1, 2).flatten(2))
        return x
