"""Three RMSNorms, two of which fuse. docs/debugging.md finds out why the third does not, and corrects it.

graphex explain --set lift_idioms=always --set regions=false examples/one_norm.py
"""

import torch
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + 1e-6))


class WatchedNorm(RMSNorm):
    """Keeps the largest variance of the last call."""

    def __init__(self, width):
        super().__init__(width)
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x):
        variance = x.pow(2).mean(-1, keepdim=True)
        self.largest.copy_(variance.max())
        return self.weight * (x * torch.rsqrt(variance + 1e-6))


class Model(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.first, self.second, self.last = RMSNorm(width), RMSNorm(width), WatchedNorm(width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        x = self.up(self.first(x))
        x = self.down(self.second(x))
        return self.last(x)


if __name__ == "__main__":
    torch.manual_seed(0)
    compiled = torch.compile(Model(), backend="graphex")
    with torch.no_grad():
        print("mean of the result:", round(float(compiled(torch.randn(4, 64)).mean()), 4))
