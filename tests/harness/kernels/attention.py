"""Random calls of attention, and the comparison of a way to compute them with float64."""

from __future__ import annotations

import torch
from torch import Tensor

from graphex.kernels.attention import Config, Job
from graphex.ops.attention import attention
from tests.harness.kernels.compare import assert_close_to_reference

MASKS = ("none", "prefix", "boolean", "by head", "added", "added -inf", "least", "nothing")
LAYOUTS = ("heads first", "positions first", "sliced")


def tensor(layout: str, batch: int, heads: int, length: int, width: int, dtype: torch.dtype, device: str) -> Tensor:
    """[batch, heads, length, width], however it lies in memory."""
    make = lambda *shape: torch.randn(shape, device=device).to(dtype)  # noqa: E731
    if layout == "positions first":
        return make(batch, length, heads, width).transpose(1, 2)
    if layout == "sliced":
        return make(batch, heads, length + 3, width + 16)[:, :, 2:-1, 8:-8]
    return make(batch, heads, length, width)


def mask_of(kind: str, batch: int, heads: int, positions: int, length: int, dtype: torch.dtype, device: str):
    draw = lambda *shape: torch.rand(shape, device=device)  # noqa: E731
    if kind == "none":
        return None
    if kind == "prefix":  # as in decoding with a static cache
        ends = torch.randint(1, length + 1, (batch, 1, 1, 1), device=device)
        return (torch.arange(length, device=device) < ends).expand(batch, 1, positions, length)
    if kind == "nothing":
        return torch.zeros(positions, length, dtype=torch.bool, device=device)
    if kind == "by head":
        return draw(batch, heads, positions, length) > 0.4
    if kind == "added":
        return draw(1, heads, 1, length).to(dtype)
    allowed = draw(batch, 1, positions, length) > 0.6
    allowed[0, 0, 0] = False  # a query that may attend to nothing
    if kind == "boolean":
        return allowed
    least = -torch.inf if kind == "added -inf" else torch.finfo(dtype).min
    return torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, least)


def job(
    *,
    batch: int = 1,
    group: int = 1,
    heads: int = 1,
    positions: int = 1,
    length: int = 40,
    width: int = 16,
    value_width: int | None = None,
    mask: str = "none",
    layout: str = "heads first",
    dtype: torch.dtype = torch.float16,
    is_causal: bool = False,
    softcap: float = 0.0,
    device: str = "cpu",
) -> Job:
    query = tensor(layout, batch, heads * group, positions, width, dtype, device)
    key = tensor(layout, batch, heads, length, width, dtype, device)
    value = tensor(layout, batch, heads, length, value_width or width, dtype, device)
    masked = None if is_causal else mask_of(mask, batch, heads * group, positions, length, dtype, device)
    return Job(query, key, value, masked, width**-0.5, is_causal, softcap)


def check(way: Config, of: Job) -> None:
    assert_right(of, way.prepare(of)(of))


def assert_right(of: Job, found: Tensor) -> None:
    """Within twice the reference's own distance from float64, and laid out as the op says; both on the CPU."""
    narrow = [x.cpu() if isinstance(x, Tensor) else x for x in of]
    wide = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in narrow]
    assert_close_to_reference(found.cpu(), attention(*narrow), attention(*wide))


def decode_job(width: int, mask: str = "prefix", dtype: torch.dtype = torch.bfloat16, **sizes: int) -> Job:
    return job(group=4, heads=2, length=4096, width=width, mask=mask, dtype=dtype, **sizes)
