"""Two hundred training steps are eager's, bit for bit, and go on from a checkpoint in another process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import graphex
from tests.harness.processes import python

STEPS = 200


class SmallGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, 16)
        self.mix, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Dropout(0.1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        query, key, value = self.mix(self.norms[0](x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return (x + self.mlp(self.norms[1](x))) @ self.tokens.weight.T


class SmallResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, 4)

    def forward(self, image: Tensor) -> Tensor:
        x = self.first(image)
        return self.head(functional.relu(x + self.block(x)).mean((2, 3)))


def batch(kind: type[nn.Module], number: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(number)
    if kind is SmallGPT:
        tokens = torch.randint(0, 16, (2, 9), generator=made)
        return tokens[:, :-1], tokens[:, 1:]
    return torch.randn(4, 3, 6, 6, generator=made), torch.randint(0, 4, (4,), generator=made)


def loss_of(result: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(result.flatten(0, -2), target.flatten())


def parts(kind: type[nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def run(kind: type[nn.Module], steps: range, saved: Path | None = None) -> list[float]:
    """Losses of a captureless step; `saved` is where a checkpoint is read from, or written to at the end."""
    model, optimizer, scheduler = parts(kind)
    step = graphex.train_step(model, loss_of, optimizer, scheduler=scheduler, clip_norm=1.0, options={"regions": False})
    stateful = (model, optimizer, scheduler)
    if saved is not None and saved.exists():
        states, generator = torch.load(saved)
        for each, state in zip(stateful, states, strict=True):
            each.load_state_dict(state)
        torch.set_rng_state(generator)
    losses = [float(step(*batch(kind, number))) for number in steps]
    if saved is not None and not saved.exists():
        torch.save(([each.state_dict() for each in stateful], torch.get_rng_state()), saved)
    return losses


def in_eager(kind: type[nn.Module]) -> list[float]:
    model, optimizer, scheduler = parts(kind)
    losses = []
    for number in range(STEPS):
        x, y = batch(kind, number)
        loss = loss_of(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("kind", [SmallGPT, SmallResNet])
def test_two_hundred_steps_are_eagers_bit_for_bit(kind):
    found = run(kind, range(STEPS))
    assert found == in_eager(kind)
    assert found[-1] < found[0]


def test_a_run_goes_on_from_a_checkpoint_in_a_fresh_process(tmp_path):
    saved = tmp_path / "half_way.pt"
    whole = in_eager(SmallGPT)
    assert run(SmallGPT, range(STEPS // 2), saved) == whole[: STEPS // 2]
    script = f"""
import json, torch
from pathlib import Path
from tests.loops.test_long_runs import STEPS, SmallGPT, run
torch.set_num_threads(1)
print("@", json.dumps(run(SmallGPT, range(STEPS // 2, STEPS), Path({str(saved)!r}))))
"""
    done = python("-c", script)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("@")]
    assert json.loads(line[1:]) == whole[STEPS // 2 :]
