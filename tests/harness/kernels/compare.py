"""Kernels against references: 16-bit results in ulp, products and float32 against float64, integers within one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from graphex.ops.definition import SPECS, launcher_of
from tests.harness.kernels.samples import Sample


def roundings(name: str, sample: Sample) -> int:
    """How many ulp apart 16-bit results may be: each rounding on the way to them may fall to the other side."""
    rounded_once = name in ("npu::npu_rms_norm", "npu::npu_add_rms_norm", "npu::npu_add_rms_norm_cast")
    if rounded_once or ("rms_norm" in name and sample.options.get("cast_before_weight") is False):
        return 1
    return 2


def launcher(name: str) -> Callable[..., Any]:
    """The function that launches an op's kernel, whatever device the tensors are on."""
    return launcher_of(SPECS[name])


def tensors(result: Any) -> list[Tensor]:
    return [] if result is None else list(result) if isinstance(result, (tuple, list)) else [result]


def copies(sample: Sample) -> tuple[Any, ...]:
    """The arguments, those that an op may write to being copies."""
    return tuple(a.clone() if isinstance(a, Tensor) and a.is_contiguous() else a for a in sample.args)


def ulps_apart(a: Tensor, b: Tensor) -> Tensor:
    """How many representable numbers lie between two 16-bit tensors, element by element."""

    def ordered(x: Tensor) -> Tensor:
        bits = x.contiguous().view(torch.int16).int()
        return torch.where(bits < 0, -32768 - bits, bits)

    return (ordered(a) - ordered(b)).abs()


def assert_close_to_reference(
    found: Tensor, wanted: Tensor, exact: Tensor | None = None, *, most_ulps: int = 2
) -> None:
    """`wanted` is the reference's result, `exact` the same in float64 where there is one."""
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert significant_strides(found) == significant_strides(wanted)
    if not wanted.numel():
        return
    if wanted.dtype in (torch.int64, torch.bool):  # numbers of experts, masks
        assert torch.equal(found, wanted)
    elif exact is not None:
        rounding = max(torch.finfo(wanted.dtype).eps / 2, 2e-7)
        allowed = 2 * (wanted - exact).abs().max() + rounding * exact.abs().max()
        assert (found - exact).abs().max() <= allowed
    elif wanted.dtype in (torch.float16, torch.bfloat16):
        apart = ulps_apart(found, wanted)
        assert apart.max() <= most_ulps, f"{apart.max()} ulp apart"
        assert (apart > 1).float().mean() < 1e-3
        assert (apart > 0).float().mean() < 0.02 or wanted.numel() < 200
    elif wanted.dtype.is_floating_point and wanted.dtype.itemsize == 4:
        # computed from 16-bit values, of which a few may have been rounded the other way
        torch.testing.assert_close(found, wanted, rtol=0.008, atol=1e-5)
        assert ((found - wanted).abs() > 2e-6 * wanted.abs() + 2e-6).float().mean() < 0.01
    elif wanted.dtype.is_floating_point:  # float8: neighbours are up to an eighth apart
        torch.testing.assert_close(found.float(), wanted.float(), rtol=0.126, atol=0.002)
        assert (found.float() != wanted.float()).float().mean() < 0.02 or wanted.numel() < 200
    else:
        apart = (found.int() - wanted.int()).abs()
        assert apart.max() <= 1
        assert (apart > 0).float().mean() < 0.02 or wanted.numel() < 200


def significant_strides(x: Tensor) -> list[int]:
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1] if x.numel() else []


def exact_results(name: str, sample: Sample) -> list[Tensor] | None:
    """The reference in float64: for sums, and for ops on float32 that neither quantise nor write."""
    floats = [a for a in tree_leaves(sample.args) if isinstance(a, Tensor) and a.is_floating_point()]
    is_wide = all(a.dtype == torch.float32 for a in floats)
    of_sums = any(word in name for word in ("linears", "attention", "experts", "grouped", "rms_norm_add", "odd_mm"))
    if not of_sums and ("quant" in name or name.endswith("_") or not is_wide):
        return None
    in_float64 = lambda t: t.double() if t.is_floating_point() else t  # noqa: E731
    args, options = tree_map_only(Tensor, in_float64, (sample.args, sample.options))
    return tensors(SPECS[name].reference(*args, **options))
