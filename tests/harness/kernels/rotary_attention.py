"""Random calls of rotary_attention_, and the comparison of a way to compute them with the two ops it stands for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from graphex.kernels.attention import AttentionTile, Job, Step
from graphex.kernels.launch import launch
from graphex.ops.definition import SPECS
from tests.harness.kernels.attention import assert_right, mask_of, tensor


def step(
    *,
    batch: int = 1,
    group: int = 1,
    heads: int = 1,
    length: int = 40,
    width: int = 16,
    value_width: int | None = None,
    place: int = 5,
    mask: str = "none",
    layout: str = "heads first",
    own_angles: bool = False,
    interleaved: bool = False,
    dtype: torch.dtype = torch.float16,
    softcap: float = 0.0,
    device: str = "cpu",
) -> Step:
    row = "positions first" if layout == "heads first" else layout  # a projection has the heads of a token together
    angle = torch.randn(batch if own_angles else 1, 1, 1, width, device=device)
    value_width = value_width or width
    return Step(
        tensor(row, batch, heads * group, 1, width, dtype, device),
        tensor(row, batch, heads, 1, width, dtype, device),
        tensor(row, batch, heads, 1, value_width, dtype, device),
        angle.cos().to(dtype),
        angle.sin().to(dtype),
        tensor(layout, batch, heads, length, width, dtype, device),
        tensor(layout, batch, heads, length, value_width, dtype, device),
        torch.tensor([place], device=device),
        2,
        interleaved,
        mask_of(mask, batch, heads * group, 1, length, dtype, device),
        width**-0.5,
        softcap,
    )


def by(tile: AttentionTile) -> Callable[[Step], Tensor]:
    """The kernel, cut in a certain way."""

    def run(of: Step) -> Tensor:
        return tile.prepare(of.attention(), of.new())(of.attention(), launch, of.new())

    return run


def check(run: Callable[[Step], Tensor], of: Step) -> None:
    """The caches have the bits that the ops leave in them; the result is as close to float64 as attention's.

    What was in the row before is no number: nobody may read it. Outside of the caches nothing is written.
    """
    wanted = of._replace(keys=_copied(of.keys), values=_copied(of.values))
    place = int(of.positions.item())
    if 0 <= place < of.keys.shape[2]:
        of.keys[:, :, place] = of.values[:, :, place] = torch.nan
        turned = SPECS["graphex::rotary_qkv_write_"].reference(*wanted[:10])
    else:
        turned = SPECS["graphex::rotary"].reference(of.q, of.cos, of.sin, of.interleaved)
    found = run(of)
    assert torch.equal(of.keys, wanted.keys)
    assert torch.equal(of.values, wanted.values)
    assert_right(Job(turned, wanted.keys, wanted.values, of.mask, of.scale, False, of.softcap), found)


def _copied(cache: Tensor) -> Tensor:
    return torch.empty_strided(cache.shape, cache.stride(), dtype=cache.dtype, device=cache.device).copy_(cache)
