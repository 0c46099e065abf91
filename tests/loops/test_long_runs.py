"""Two hundred training steps are eager's, bit for bit, and go on from a checkpoint in another process."""

from __future__ import annotations

import json
from functools import cache
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def step_of(kind: type[nn.Module], *, regions: bool = False) -> tuple[Any, tuple[Any, ...]]:
    model, optimizer, scheduler = parts(kind)
    options = {"regions": regions}
    step = graphex.train_step(model, loss_of, optimizer, scheduler=scheduler, clip_norm=1.0, options=options)
    return step, (model, optimizer, scheduler)


def run(kind: type[nn.Module], steps: range, saved: Path | None = None) -> list[float]:
    """Losses of a captureless step; `saved` is where a checkpoint is read from, or written to at the end."""
    step, stateful = step_of(kind)
    if saved is not None and saved.exists():
        states, generator = torch.load(saved)
        for each, state in zip(stateful, states, strict=True):
            each.load_state_dict(state)
        torch.set_rng_state(generator)
    losses = [float(step(*batch(kind, number))) for number in steps]
    if saved is not None and not saved.exists():
        torch.save(([each.state_dict() for each in stateful], torch.get_rng_state()), saved)
    return losses


@cache
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


both = pytest.mark.parametrize("kind", [SmallGPT, SmallResNet])


@both
def test_two_hundred_steps_are_eagers_bit_for_bit(kind):
    found = run(kind, range(STEPS))
    assert found == in_eager(kind)
    assert found[-1] < found[0]


@both
def test_one_capture_is_replayed_for_two_hundred_steps(kind, where):
    """A learning rate is a float32 on the device, and a double to eager."""
    step, _ = step_of(kind)
    found = [float(step(*batch(kind, number))) for number in range(STEPS)]
    torch.testing.assert_close(found, in_eager(kind), rtol=1e-3, atol=1e-4)
    (counter,) = [each for name, each in step.journal.counts.items() if name.endswith(" step")]
    assert (counter["captured"], counter["recaptured"], counter["replays"]) == (1, 0, STEPS - 3)


@both
def test_two_hundred_steps_with_compiled_regions_are_eagers_within_float_error(kind, monkeypatch):
    monkeypatch.setenv("GRAPHEX_REGIONS", "on")
    step, _ = step_of(kind, regions=True)
    found = [float(step(*batch(kind, number))) for number in range(STEPS)]
    torch.testing.assert_close(found, in_eager(kind), rtol=1e-3, atol=1e-4)
    assert step.journal.regions


def test_runs_go_on_from_checkpoints_in_a_fresh_process(tmp_path):
    kinds = {kind.__name__: kind for kind in (SmallGPT, SmallResNet)}
    for name, kind in kinds.items():
        assert run(kind, range(STEPS // 2), tmp_path / name) == in_eager(kind)[: STEPS // 2]
    script = f"""
import json, torch
from pathlib import Path
from tests.loops import test_long_runs as module
torch.set_num_threads(1)
steps = range(module.STEPS // 2, module.STEPS)
for name in {list(kinds)}:
    print("@", name, json.dumps(module.run(getattr(module, name), steps, Path({str(tmp_path)!r}) / name)))
"""
    told = [line.split(maxsplit=2)[1:] for line in python("-c", script).stdout.splitlines() if line.startswith("@")]
    found = {name: json.loads(losses) for name, losses in told}
    assert found == {name: in_eager(kind)[STEPS // 2 :] for name, kind in kinds.items()}
