"""Mutable custom ops as AOTAutograd leaves them: wrapped in `auto_functionalized_v2`, which copies what they write.

Without these names models with mutable custom ops run without graphex's passes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from graphex.torch_private.lookup import private, replaced_in_this_thread
from graphex.torch_private.symbolic import FakeTensorMode, statically_known_true

_NOT_UNWRAPPED = "models with mutable custom ops run without graphex's passes"

# Both are defined where their module is imported.
WRAPPER = private("torch._higher_order_ops.auto_functionalize.auto_functionalized_v2", lost=_NOT_UNWRAPPED)
WRAPPERS = (WRAPPER, private("torch._higher_order_ops.auto_functionalize.auto_functionalized", lost=_NOT_UNWRAPPED))
_storage_length = private("torch._prims_common.compute_required_storage_length", lost=_NOT_UNWRAPPED)
_contiguous_strides = private("torch._prims_common.make_contiguous_strides_for", lost=_NOT_UNWRAPPED)

_NOT_COPIED = "graphex_not_copied"
_CORRECTED = "graphex_slices_corrected"


def written_bases(node: Node) -> list[Any]:
    """The tensors a wrapped op writes to (through copies, until it is unwrapped)."""
    return list(node.kwargs.get("_all_bases", ()))  # type: ignore[arg-type]


def base_of_result(node: Node, index: int) -> Node | None:
    """The tensor whose new version is result number `index` of a wrapped op; None for what the op itself returns."""
    op = node.args[0]
    schema = getattr(op, "_schema", None)
    if schema is None:
        return None
    place = index - max(1, len(schema.returns))
    bases = written_bases(node)
    found = bases[place] if 0 <= place < len(bases) else None
    return found if isinstance(found, Node) else None


def finds_views_by_offset(node: Node) -> bool:
    """Whether a wrapped op is given a view of a tensor that it writes as sizes, strides and a storage offset."""
    return any(name.endswith("_storage_offset") for name in node.kwargs)


def correct_slices(graph: Graph) -> None:
    """Let slices of wrapped ops count from where their base begins. Tracing counts from the start of its storage."""
    if not any(node.target is WRAPPER for node in graph.nodes) or not _slices_count_from_the_storage():
        return
    for node in graph.nodes:
        if node.target is WRAPPER and not node.meta.get(_CORRECTED):
            node.meta[_CORRECTED] = True
            for name in [name for name in node.kwargs if name.endswith("_slice_start")]:
                _correct_slice(node, name.removesuffix("_slice_start"))


def _correct_slice(node: Node, argument: str) -> None:
    dim, start, end, index = (
        node.kwargs.get(argument + part) for part in ("_slice_dim", "_slice_start", "_slice_end", "_base_index")
    )
    base = written_bases(node)[index] if isinstance(index, int) else None
    value = base.meta.get("val") if isinstance(base, Node) else None
    if not isinstance(value, Tensor) or not isinstance(dim, int) or not all(isinstance(at, int) for at in (start, end)):
        return
    stride, offset = value.stride(dim), value.storage_offset()
    if isinstance(stride, int) and isinstance(offset, int) and stride:
        first, last = start - offset // stride, end - offset // stride  # type: ignore[operator]
        node.kwargs = {**node.kwargs, f"{argument}_slice_start": first, f"{argument}_slice_end": last}


def _slices_count_from_the_storage() -> bool:
    """Whether this torch does, asked of an example."""
    find = private("torch._higher_order_ops.auto_functionalize.try_use_slice", None)
    base = torch.empty(8)[4:]
    return find is not None and find(base, base[1:2]) == (0, 5, 6)


def write_directly(node: Node, base: Node) -> None:
    """Let the op write to `base` itself instead of to a copy."""
    chosen = node.meta.setdefault(_NOT_COPIED, set())
    chosen.update(place for place, value in enumerate(written_bases(node)) if value is base)


def unwrap(graph: Graph, mode: FakeTensorMode) -> None:
    """Replace every wrapper by the copies that are still needed and the op itself."""
    for node in graph.nodes:
        if node.target in WRAPPERS:
            node.meta.pop("eager_input_vals", None)  # the values before our passes, which replaced some of them
            _take_the_only_result(node)
        if node.target is WRAPPER:
            direct = node.meta.get(_NOT_COPIED, set())
            copied = [place for place in range(len(written_bases(node))) if place not in direct]
            node.meta["only_clone_these_tensors"] = copied
    inside = private("torch._inductor.virtualized.V", lost=_NOT_UNWRAPPED).set_fake_mode(mode)
    decompose = private("torch._inductor.fx_passes.post_grad.decompose_auto_functionalized", lost=_NOT_UNWRAPPED)
    with inside, _of_any_type(), _copied_from_where_they_begin():
        decompose(graph)


def _take_the_only_result(node: Node) -> None:
    """Let users of the first result take the node itself, where a wrapped op was given nothing to write: torch puts its
    one result in place of the tuple, and `getitem` would take the first row of it.
    """
    value = node.meta.get("val")
    if isinstance(value, (list, tuple)) and len(value) == 1:
        for part in [user for user in node.users if user.target is operator.getitem]:
            part.replace_all_uses_with(node)
            node.graph.erase_node(part)


def _of_any_type() -> AbstractContextManager[None]:
    """Inductor's matcher passes over nodes it has no kernels for (complex numbers); a wrapper needs none."""
    matcher = private("torch._inductor.pattern_matcher", lost=_NOT_UNWRAPPED)
    return replaced_in_this_thread(matcher, "fallback_node_due_to_unsupported_type", lambda *args, **kwargs: False)


def _copied_from_where_they_begin() -> AbstractContextManager[None]:
    """torch copies a written tensor from the start of its storage, and views the copy at the example's storage offset.

    A tensor of a later call may have another storage offset, which no guard checks.
    """
    module = private("torch._higher_order_ops.auto_functionalize", lost=_NOT_UNWRAPPED)
    return replaced_in_this_thread(module, "clone_preserve_strides", lambda original, value: _copy_of(value, original))


def _copy_of(tensor: Tensor, otherwise: Callable[[Tensor], Tensor]) -> Tensor:
    """A copy with the strides of `tensor` that begins where that did in the example: views of it are counted from the
    start of its storage. `otherwise` makes one of a tensor that cannot be copied to, as it shares places with itself.
    """
    size, stride, offset = tensor.size(), tensor.stride(), tensor.storage_offset()
    if any(statically_known_true(step == 0) for step in stride):
        return otherwise(tensor)
    dense = _contiguous_strides(size)
    if all(statically_known_true(one == other) for one, other in zip((offset, *stride), (0, *dense), strict=True)):
        return tensor.clone()
    room = _storage_length(size, stride, offset)
    copy = tensor.new_empty((room,)).as_strided(size, stride, offset)
    copy.copy_(tensor)
    return copy
