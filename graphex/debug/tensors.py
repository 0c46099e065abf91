"""Tensors as evidence: copies that behave like the originals, and how far two of them are apart.

Every kind of tensor is compared through its plain parts (`parts_of`): a sparse one through its indices and values, a
jagged one through values and offsets, a quantised one through its integers and scales, a subclass through
`__tensor_flatten__`. A tensor without readable values says so instead of passing for equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from graphex.torch_private.memory import marked, marks_of, storage_address, whole_storage
from graphex.torch_private.symbolic import is_traceable_wrapper_subclass

INFINITE = float("inf")
UNKNOWN = float("nan")

_SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
_PER_TENSOR = ("q_scale", "q_zero_point")
_PER_CHANNEL = ("q_per_channel_scales", "q_per_channel_zero_points", "q_per_channel_axis")


# -- copies ----------------------------------------------------------------------------------------------------------


def clone_together(values: Sequence[Any], storages: dict[int, Tensor] | None = None) -> list[Any]:
    """Copy tensors so that those which shared memory still do, in the same places. Everything else is passed on.

    `storages` holds the copies that were made before, by the address of their original.
    """
    storages = {} if storages is None else storages
    return [_clone(value, storages) if isinstance(value, Tensor) else value for value in values]


def _clone(tensor: Tensor, storages: dict[int, Tensor]) -> Tensor:
    plain = tensor.detach()
    if not is_plain(plain):
        return plain.clone().requires_grad_(tensor.requires_grad)
    key = storage_address(plain) or id(tensor)
    if key not in storages:
        storages[key] = whole_storage(plain, torch.uint8).clone()
    copy = torch.empty(0, dtype=plain.dtype, device=storages[key].device)
    copy.set_(storages[key].untyped_storage(), plain.storage_offset(), plain.size(), plain.stride())
    return marked(copy, marks_of(plain)).requires_grad_(tensor.requires_grad)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is strides over memory and nothing else; a Parameter is, once it is detached."""
    return (
        type(tensor) is Tensor
        and tensor.layout == torch.strided
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_meta)
    )


# -- memory ----------------------------------------------------------------------------------------------------------


def sharing(outputs: Sequence[Any], inputs: Sequence[Any]) -> list[str]:
    """For each output, the owner of its memory: an input, an earlier output, or itself."""
    owners: dict[int, str] = {}
    for index, value in enumerate(inputs):
        if isinstance(value, Tensor) and (begin := shared_address(value)):
            owners.setdefault(begin, f"input {index}")
    result = []
    for index, value in enumerate(outputs):
        begin = shared_address(value) if isinstance(value, Tensor) else 0
        result.append(owners.setdefault(begin, f"output {index}") if begin else f"output {index}")
    return result


def shared_address(tensor: Tensor) -> int:
    """The address of the memory behind a tensor; 0 if it has none that could be shared."""
    plain = tensor.detach()
    return storage_address(plain) if is_plain(plain) and plain.numel() else 0


# -- parts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """A tensor as plain tensors and Python values, by name; `why_not` says why its values cannot be read."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    why_not: str = ""


def parts_of(tensor: Tensor) -> Parts:
    """The plain parts of a tensor. They share its memory, except those of quantised and MKL-DNN tensors."""
    plain = tensor.detach()
    try:
        return _taken_apart(plain)
    except Exception as error:  # a subclass may refuse anything, and few ops know every kind of tensor
        return Parts(why_not=f"a {type(plain).__name__} cannot be taken apart: {str(error).partition(chr(10))[0]}")


def _taken_apart(plain: Tensor) -> Parts:
    if plain.is_nested:
        return _nested_parts(plain)
    if is_traceable_wrapper_subclass(plain):
        return _flattened(plain)
    if plain.is_meta or (type(plain) is not Tensor and _is_hollow(plain)):
        return Parts(why_not=f"a {type(plain).__name__} on {plain.device} has no values that can be read")
    if type(plain) is not Tensor:
        plain = plain.as_subclass(Tensor)
    if plain.layout in _SPARSE:
        found = {name: getattr(plain, name)() for name in _SPARSE[plain.layout]}
        return Parts(found, {"coalesced": plain.is_coalesced()} if plain.layout == torch.sparse_coo else {})
    if plain.is_quantized:
        return _quantised_parts(plain)
    return Parts({"": plain if plain.layout == torch.strided else plain.to_dense()})


def _quantised_parts(plain: Tensor) -> Parts:
    per_tensor = plain.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric)
    found = {name: getattr(plain, name)() for name in (_PER_TENSOR if per_tensor else _PER_CHANNEL)}
    read = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    facts = {name: value for name, value in found.items() if name not in read}
    return Parts({"int_repr": plain.int_repr(), **read}, {"qscheme": str(plain.qscheme()), **facts})


def _nested_parts(nested: Any) -> Parts:
    if nested.layout != torch.jagged:
        return Parts({f"[{index}]": part for index, part in enumerate(nested.unbind())})
    lengths = nested.lengths()
    found = {"values": nested.values(), "offsets": nested.offsets()}
    return Parts(
        found if lengths is None else {**found, "lengths": lengths}, {"ragged": getattr(nested, "_ragged_idx", 1)}
    )


def _flattened(tensor: Any) -> Parts:
    names, context = tensor.__tensor_flatten__()
    found: dict[str, Tensor] = {}
    facts = {"context": context}
    for name in names:
        value = getattr(tensor, name)
        inner = parts_of(value) if isinstance(value, Tensor) else Parts(facts={"": value})
        if inner.why_not:
            return inner
        found |= {f"{name}.{each}".rstrip("."): value for each, value in inner.tensors.items()}
        facts |= {f"{name}.{each}": value for each, value in inner.facts.items()}
    return Parts(found, facts)


def _is_hollow(tensor: Tensor) -> bool:
    """Whether a subclass that cannot be taken apart has no memory of its own."""
    try:
        return tensor.numel() > 0 and not storage_address(tensor)
    except (RuntimeError, NotImplementedError):  # fake tensors and the like refuse to tell
        return tensor.layout == torch.strided


# -- differences -----------------------------------------------------------------------------------------------------


def traits(tensor: Tensor) -> dict[str, Any]:
    """The properties of a tensor that a caller sees beside its values."""
    found: dict[str, Any] = {
        "class": type(tensor).__name__,
        "layout": tensor.layout,
        "dtype": tensor.dtype,
        "device": tensor.device,
    }
    if not tensor.is_nested:  # a ragged size is a symbol of its own each time
        found["shape"] = tuple(tensor.shape)
        if tensor.layout == torch.strided and tensor.numel():
            found["strides"] = _steps(tensor)
    return found


def mismatch(found: dict[str, Any], original: dict[str, Any]) -> str:
    """The first trait in which two tensors differ, whatever their values; empty if in none."""
    for name, theirs in original.items():
        if found.get(name) != theirs:
            return f"{name} {found.get(name)} instead of {theirs}"
    return ""


def _steps(tensor: Tensor) -> tuple[int, ...]:
    """The strides of dimensions with more than one element: others differ with how a value was computed."""
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


def same_value(found: Any, original: Any) -> bool:
    """Whether two Python values are of one type and equal; a NaN equals a NaN."""
    if type(found) is not type(original):
        return False
    if found is original or (found != found and original != original):
        return True
    return bool(found == original)


def gap(found: Tensor, original: Tensor) -> float:
    """The largest difference between two plain tensors of one shape; 0.0 only if every element is equal.

    Equal NaNs are equal. An infinity or a NaN that stands against anything else is an infinite difference.
    """
    ours, theirs = numbers(found), numbers(original).to(found.device)
    unequal = (ours != theirs) & ~((ours != ours) & (theirs != theirs))
    if not bool(unequal.any()):
        return 0.0
    wide = torch.complex128 if ours.is_complex() else torch.float64
    worst = float((ours[unequal].to(wide) - theirs[unequal].to(wide)).abs().nan_to_num(nan=INFINITE).max())
    return worst or 1.0  # integers that float64 cannot tell apart


def numbers(tensor: Tensor) -> Tensor:
    """The values in a type that can be compared: small floats widened, packed ones as their bytes."""
    plain = tensor.resolve_conj().resolve_neg()
    if plain.dtype == torch.complex32:
        return plain.to(torch.complex64)
    if plain.is_complex() or not plain.is_floating_point():
        return plain.view(torch.uint8) if str(plain.dtype).startswith("torch.bits") else plain
    if plain.dtype in (torch.float32, torch.float64):
        return plain
    try:
        return plain.to(torch.float32)
    except NotImplementedError:  # two float4 in a byte
        return plain.view(torch.uint8)


def difference(found: Any, original: Any, exact: Any | None, terms: int = 1) -> tuple[str, float]:
    """(problem, error): there is no problem if `found` is as near to `exact` as `original` is, within a factor 2.

    Where so many `terms` are added one after the other, `found` may be off by what their rounding amounts to. Without
    an exact value the two are compared with the usual tolerances of their type. The error is NaN where the values
    cannot be read; the problem is then the reason.
    """
    if not isinstance(original, Tensor):
        return ("" if same_value(found, original) else f"{found!r} instead of {original!r}"), 0.0
    if not isinstance(found, Tensor):
        return f"a {type(found).__name__} instead of a tensor", 0.0
    if wrong := mismatch(traits(found), traits(original)):
        return wrong, 0.0
    ours, theirs = parts_of(found), parts_of(original)
    if why := theirs.why_not or ours.why_not:
        return why, UNKNOWN
    truths = parts_of(exact).tensors if isinstance(exact, Tensor) else {}
    if ours.tensors.keys() != theirs.tensors.keys() or not same_facts(ours, theirs):
        return f"{type(found).__name__} is made of other parts", INFINITE
    worst = 0.0
    for name, part in theirs.tensors.items():
        problem, error = _plain_difference(ours.tensors[name], part, truths.get(name), terms)
        worst = max(worst, error)
        if problem:
            return f"{name}: {problem}" if name else problem, error
    return "", worst


def same_facts(ours: Parts, theirs: Parts) -> bool:
    try:
        return bool(ours.facts == theirs.facts)
    except (RuntimeError, ValueError, TypeError):  # a subclass may keep anything in its context
        return False


def _plain_difference(found: Tensor, original: Tensor, exact: Tensor | None, terms: int) -> tuple[str, float]:
    if found.shape != original.shape:
        return f"shape {tuple(found.shape)} instead of {tuple(original.shape)}", INFINITE
    ours, theirs = numbers(found), numbers(original)
    if not (theirs.is_floating_point() or theirs.is_complex()):
        return ("" if torch.equal(ours, theirs) else "different integers"), 0.0
    return _float_difference(found, original, exact, terms)


def _float_difference(found: Tensor, original: Tensor, exact: Tensor | None, terms: int) -> tuple[str, float]:
    wide = torch.complex128 if original.is_complex() else torch.float64
    a, b = found.to(wide), original.to(wide)
    finite = torch.isfinite(b)
    alike = finite | (a == b) | (a.isnan() & b.isnan())
    if not torch.equal(finite, torch.isfinite(a)) or not bool(alike.all()):
        return "other infinities or NaNs", INFINITE
    if exact is None or exact.shape != original.shape:
        return _close(found, original, finite)
    reference = exact.to(wide)
    known = finite & torch.isfinite(reference)
    problem, worst = _close(found, original, finite & ~known)  # where the exact value is of no use
    if problem or not bool(known.any()):
        return problem, worst
    mine = float((a - reference)[known].abs().max())
    theirs = float((b - reference)[known].abs().max())
    growth = _growth(original.dtype, terms)
    slack = growth * torch.finfo(original.dtype).eps * float(reference[known].abs().max())
    if mine <= max(2, growth) * theirs + slack:
        return "", max(mine, worst)
    return f"the error against float64 is {mine:.3g}; the original graph's is {theirs:.3g}", mine


def _growth(dtype: torch.dtype, terms: int) -> float:
    """How many times the rounding of one number is expected of a sum of so many; those of 16 bits are added in float32.

    Each addition rounds. The errors have either sign, so they grow as the root of their number. Where the terms cancel
    out, as in the gradient of a bias before a batch norm, the error of the original says how large they were.
    """
    eps = torch.finfo(dtype).eps
    return max(1.0, sqrt(terms) * min(eps, torch.finfo(torch.float32).eps) / eps)


def _close(found: Tensor, original: Tensor, where: Tensor) -> tuple[str, float]:
    """Compare with the usual tolerances of the type, at the elements that `where` chooses."""
    if not bool(where.any()):
        return "", 0.0
    ours, theirs = found[where], original[where]
    worst = gap(ours, theirs)
    try:
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    except AssertionError:
        return f"values differ by up to {worst:.3g}", worst
    return "", worst
