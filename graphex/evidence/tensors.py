"""Copies of a call's tensors that behave like the originals, and how far two results are apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphex.torch_private.memory import marked, marks_of, whole_storage


def clone_together(values: Sequence[Any]) -> list[Any]:
    """Copy tensors so that those which shared memory still do, in the same places. Everything else is passed on."""
    storages: dict[int, Tensor] = {}
    return [_clone(value, storages) if isinstance(value, Tensor) else value for value in values]


def _clone(tensor: Tensor, storages: dict[int, Tensor]) -> Tensor:
    plain = tensor.detach()
    if type(plain) is not Tensor or plain.layout != torch.strided or plain.is_quantized:
        return tensor.clone()
    key = plain.untyped_storage().data_ptr() or id(tensor)
    if key not in storages:
        storages[key] = whole_storage(plain, torch.uint8).clone()
    copy = torch.empty(0, dtype=plain.dtype, device=plain.device)
    copy.set_(storages[key].untyped_storage(), plain.storage_offset(), plain.size(), plain.stride())
    return marked(copy, marks_of(plain)).requires_grad_(tensor.requires_grad)


def sharing(outputs: Sequence[Any], inputs: Sequence[Any]) -> list[str]:
    """For each output, whose memory it lives in: an input's, an earlier output's, or its own."""
    owners: dict[int, str] = {}
    for index, value in enumerate(inputs):
        if isinstance(value, Tensor) and (address := _address(value)):
            owners.setdefault(address, f"input {index}")
    result = []
    for index, value in enumerate(outputs):
        address = _address(value) if isinstance(value, Tensor) else 0
        result.append(owners.setdefault(address, f"output {index}") if address else f"output {index}")
    return result


def _address(tensor: Tensor) -> int:
    """The address of the memory behind a tensor; 0 if it has none that could be shared."""
    if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.numel() == 0:
        return 0
    return tensor.untyped_storage().data_ptr()


def _steps(tensor: Tensor) -> list[int]:
    """The strides that lead somewhere: those of dimensions with one element differ with how a value was computed."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def difference(found: Any, original: Any, exact: Any | None) -> tuple[str, float]:
    """(what is wrong, error): nothing is wrong if `found` is as near to `exact` as `original` is, within a factor 2.

    Without an exact value the two are compared with the usual tolerances of their type.
    """
    if not isinstance(original, Tensor):
        same = type(found) is type(original) and bool(found == original)
        return ("" if same else f"{found!r} instead of {original!r}"), 0.0
    if not isinstance(found, Tensor):
        return f"a {type(found).__name__} instead of a tensor", 0.0
    shape = (found.shape, found.dtype, found.device)
    if shape != (original.shape, original.dtype, original.device):
        return f"shape, type or device {shape} instead of {(original.shape, original.dtype, original.device)}", 0.0
    if original.layout == torch.strided and found.numel() and _steps(found) != _steps(original):
        return f"strides {found.stride()} instead of {original.stride()}", 0.0
    if type(original) is not Tensor or original.layout != torch.strided:
        return "", 0.0
    if not (original.is_floating_point() or original.is_complex()):
        return ("" if torch.equal(found, original) else "different integers"), 0.0
    return _float_difference(found, original, exact)


def _float_difference(found: Tensor, original: Tensor, exact: Any) -> tuple[str, float]:
    wide = torch.complex128 if original.is_complex() else torch.float64
    a, b = found.to(wide), original.to(wide)
    finite = torch.isfinite(b)
    alike = finite | (a == b) | (a.isnan() & b.isnan())
    if not torch.equal(finite, torch.isfinite(a)) or not bool(alike.all()):
        return "other infinities or NaNs", float("inf")
    if not bool(finite.any()):
        return "", 0.0
    if not isinstance(exact, Tensor) or exact.shape != original.shape:
        worst = float((a - b)[finite].abs().max())
        try:
            torch.testing.assert_close(found, original, equal_nan=True)
        except AssertionError:
            return f"values differ by up to {worst:.3g}", worst
        return "", worst
    reference = exact.to(wide)
    finite &= torch.isfinite(reference)
    if not bool(finite.any()):
        return "", 0.0
    mine = float((a - reference)[finite].abs().max())
    theirs = float((b - reference)[finite].abs().max())
    slack = torch.finfo(original.dtype).eps * float(reference[finite].abs().max())
    if mine <= 2 * theirs + slack:
        return "", mine
    return f"the error against float64 is {mine:.3g}; the original graph's is {theirs:.3g}", mine
