"""Masks of attention that are made of numbers alone: where they are known, and where they must not be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import graphex

T = 8


def causal(x: Tensor) -> Tensor:
    place = torch.arange(T, device=x.device) + 0
    return (place[None, None, None, :] <= place[None, None, :, None]).expand(x.shape[0], -1, T, T)


def everything(x: Tensor) -> Tensor:
    return (torch.arange(T, device=x.device)[None, None, :, None] >= 0).expand(x.shape[0], -1, T, T)


def written(x: Tensor) -> Tensor:
    mask = torch.ones(T, T, dtype=torch.bool, device=x.device)
    mask[:, 3] = False
    return mask


def written_through_a_view(x: Tensor) -> Tensor:
    mask = torch.ones(T, T, dtype=torch.bool, device=x.device)
    mask[0].view(T).logical_not_()
    return mask


class Attention(nn.Module):
    def __init__(self, mask) -> None:
        super().__init__()
        self.mask, self.inner = mask, nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.view(-1, T, 2, 8).transpose(1, 2) for each in self.inner(x).chunk(3, -1))
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(x))
        return found.transpose(1, 2).reshape(-1, T, 16)


def known(mask, *, dynamic: bool = False, **options) -> list[str]:
    """Which masks were known, after a comparison of results and gradients with eager's."""
    torch.manual_seed(0)
    model, x = Attention(mask), torch.randn(2, T, 16, requires_grad=True)
    run = torch.compile(model, backend="graphex", dynamic=dynamic, options={"lift_idioms": "always", **options})
    mine, theirs = run(x), model(x)
    torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(each.square().sum(), x) for each in (mine, theirs)))
    assert not graphex.journal(run).fallbacks
    return [each.because for each in graphex.journal(run).rewrites if each.rule == "known_mask"]


def test_a_mask_that_is_true_everywhere_is_none():
    assert known(everything) == ["the mask of 'found' is True everywhere: torch's op needs none"]


def test_a_causal_mask_is_a_flag():
    assert known(causal) == ["the mask of 'found' is causal: torch's op has a flag for it"]


@pytest.mark.parametrize(
    "mask",
    [
        written,
        written_through_a_view,
        lambda x: x[0, :, 0, None] > -10,
        lambda x: causal(x).logical_not(),
        lambda x: torch.arange(T)[None] < 5,
        lambda x: torch.zeros(T, T),
    ],
    ids=["written", "written through a view", "of data", "unknown op", "other numbers", "added"],
)
def test_other_masks_stay(mask):
    assert known(mask) == []


def test_a_mask_stays_where_sizes_vary_and_where_the_rule_is_off():
    assert known(lambda x: causal(x)[..., : x.shape[1]], dynamic=True) == []
    assert known(causal, disable_rules=["known_mask"]) == []
    assert known(causal, lift_idioms="auto") == []
