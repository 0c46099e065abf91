"""Networks of the models benchmark that no package provides: a UNet, a ResNet, a conformer, a residual MLP.

They are written as users write them, in plain modules of torch: nothing in them is arranged for a compiler.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class ResidualMLP(nn.Module):
    """Linear layers with chains of pointwise work between them."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.ups = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(layers))
        self.downs = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            wide = up(norm(x))
            gated = functional.silu(wide) * torch.sigmoid(wide * 1.5) + torch.tanh(wide) * 0.5
            x = x + down(gated * gated.mean(-1, keepdim=True).add(1.0).rsqrt().clamp(max=4.0))
        return x


class Bottleneck(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after)),
        )
        same = before == after and stride == 1
        self.skip = nn.Identity() if same else nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.skip(x))


class ResNet(nn.Module):
    """The shape of ResNet-50, with as many blocks in each stage as `depths` says."""

    def __init__(self, width: int, depths: tuple[int, ...]) -> None:
        super().__init__()
        stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        blocks, before = [], width
        for stage, depth in enumerate(depths):
            for block in range(depth):
                blocks.append(Bottleneck(before, width << stage, 2 if stage and not block else 1))
                before = 4 * (width << stage)
        self.features = nn.Sequential(*stem, *blocks)
        self.head = nn.Linear(before, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


class UNetBlock(nn.Module):
    """Two convolutions after GroupNorm and SiLU, told of the time step between them."""

    def __init__(self, before: int, after: int, told: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList((nn.GroupNorm(8, before), nn.GroupNorm(8, after)))
        self.convolutions = nn.ModuleList(
            (nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1))
        )
        self.time = nn.Linear(told, after)
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.convolutions[0](functional.silu(self.norms[0](x)))
        y = y + self.time(functional.silu(time))[:, :, None, None]
        return self.convolutions[1](functional.silu(self.norms[1](y))) + self.skip(x)


class ImageAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.heads = nn.GroupNorm(8, width), heads
        self.together, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, width, high, wide = x.shape
        qkv = self.together(self.norm(x)).reshape(batch, 3, self.heads, width // self.heads, high * wide)
        query, key, value = qkv.transpose(-1, -2).unbind(1)
        y = functional.scaled_dot_product_attention(query, key, value)
        return x + self.out(y.transpose(-1, -2).reshape(batch, width, high, wide))


class UNet(nn.Module):
    """The denoiser of a small diffusion model: three resolutions, attention at the lowest."""

    def __init__(self, width: int) -> None:
        super().__init__()
        told, wide, widest = 4 * width, 2 * width, 4 * width
        self.time = nn.Sequential(nn.Linear(width, told), nn.SiLU(), nn.Linear(told, told))
        self.enter, self.width = nn.Conv2d(3, width, 3, padding=1), width
        self.down = nn.ModuleList((UNetBlock(width, width, told), UNetBlock(width, wide, told)))
        self.shrink = nn.ModuleList(nn.Conv2d(each, each, 3, 2, 1) for each in (width, wide))
        self.middle = nn.ModuleList((UNetBlock(wide, widest, told), UNetBlock(widest, widest, told)))
        self.attention = ImageAttention(widest, 4)
        self.up = nn.ModuleList((UNetBlock(widest + wide, wide, told), UNetBlock(wide + width, width, told)))
        self.leave = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        rates = torch.exp(-torch.arange(self.width // 2, device=x.device) * (9.2 / (self.width // 2)))
        angles = steps[:, None].float() * rates
        time = self.time(torch.cat((angles.sin(), angles.cos()), -1).to(x.dtype))
        x, kept = self.enter(x), []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            x = block(x, time)
            kept.append(x)
            x = shrink(x)
        x = self.middle[1](self.attention(self.middle[0](x, time)), time)
        for block in self.up:
            x = torch.cat((functional.interpolate(x, scale_factor=2.0, mode="nearest"), kept.pop()), 1)
            x = block(x, time)
        return self.leave(x)


class ConformerLayer(nn.Module):
    """Half a feed-forward step, attention, a gated depthwise convolution, and the other half."""

    def __init__(self, width: int, heads: int, kernel: int = 31) -> None:
        super().__init__()
        self.heads = heads
        self.feeds = nn.ModuleList(self._feed(width) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.enter, self.leave = nn.Conv1d(width, 2 * width, 1), nn.Conv1d(width, width, 1)
        self.depthwise = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width)
        self.batch_norm = nn.BatchNorm1d(width)

    @staticmethod
    def _feed(width: int) -> nn.Module:
        return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.feeds[0](x)
        x = x + self._attended(self.norms[0](x))
        x = x + self._convolved(self.norms[1](x))
        return self.norms[2](x + 0.5 * self.feeds[1](x))

    def _attended(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(x.shape))

    def _convolved(self, x: Tensor) -> Tensor:
        gated = functional.glu(self.enter(x.transpose(1, 2)), 1)
        return self.leave(functional.silu(self.batch_norm(self.depthwise(gated)))).transpose(1, 2)


def conformer(width: int, heads: int, layers: int) -> nn.Module:
    return nn.Sequential(*(ConformerLayer(width, heads) for _ in range(layers)))
