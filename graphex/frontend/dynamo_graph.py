"""Dynamo's graph, before it is traced: calls that tracing would lose become ops that survive it, in three parts.

Stream methods. torch 2.12 and newer make these ops themselves. Before, such a call would run once, while the graph is
being traced, and be gone. So would `set_stream`, in every version; what follows it is placed on that stream instead:

    before:  s = get_external_object_by_index(0); t = get_external_object_by_index(1); s.wait_stream(t)
    after:   streams.wait_stream(0, 1)

    before:  set_stream(s); y = sin(x); set_stream(current)
    after:   y = sin(x)                                              meta: stream 1

Masks of attention that are made of numbers alone: their values are known before anything runs. Model libraries make
such masks while they are traced, where eager has none. With a mask, torch can choose from fewer kernels; with a mask of
expanded rows, only plain matrix products are left.

    positions = arange(128)[None, None, :, None]
    mask = (positions >= 0).expand(8, 1, 128, 128)         all True: attention needs no mask
    mask = arange(128)[None, :] <= arange(128)[:, None]    causal: attention has a flag for it

Calls of `F.scaled_dot_product_attention`, as one op where that is faster:

    before:  scaled_dot_product_attention(q, k, v, attn_mask=mask)
    after:   attend(q, k, v, attn_mask=mask, call=...)              graphex.attention, once it is traced

AOTAutograd would take the call apart, with a mask and grouped heads on CUDA down to matrix products of a copied cache.
Whether it is to be kept whole depends on types, sizes and gradients, which are known while `attend` is being traced.
Every other call is left to the original. The decision goes, as a note, with the nodes that come of it.

The op's result has strides of its own. A model can tell: `view` needs the strides that it was written for, and whether
`reshape` copies depends on them. So where the model can tell, the result is copied to the strides that torch would have
given it. Dynamo's graph knows what torch would return:

    scaled_dot_product_attention -> transpose(1, 2) -> reshape(B, T, H * D)      any strides: all give the same
    scaled_dot_product_attention -> anything else                                the strides that torch would give
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node, map_arg
from torch.fx.traceback import annotate
from torch.nn.functional import scaled_dot_product_attention

from graphex.analysis import known_equal
from graphex.analysis.shapes import canonical_dim
from graphex.config import CompilerConfig
from graphex.device import runtimes
from graphex.errors import StreamError
from graphex.ops import has_kernel
from graphex.ops.attention import MOST_COLUMNS, MOST_POSITIONS, MOST_ROWS
from graphex.passes.fuse import Decided, LiftAttention
from graphex.passes.place import label_of, stream_of
from graphex.torch_private.dynamo import is_current_stream, is_object_lookup, is_transformed
from graphex.torch_private.symbolic import guard_or_false, pytree

# -- methods of streams ------------------------------------------------------------------------------------------------


# A method -> the op, how many objects it takes with the one it is called on, and whether the event comes first.
_METHODS = {
    "wait_stream": ("streams.wait_stream", 2, False),
    "wait_event": ("streams.wait_event", 2, True),
    "record_event": ("streams.record_event", 2, True),
    "synchronize": ("graphex.host_wait", 1, False),
    "record_stream": ("graphex.record_tagged_stream", 2, False),
}


def keep_stream_calls(gm: GraphModule) -> None:
    """Replace calls of streams' methods in Dynamo's graph by ops, in place."""
    changed = _place_by_set_stream(gm)
    for node in list(gm.graph.nodes):
        if node.op != "call_method" or node.target not in _METHODS or node.users:
            continue
        numbers = [_number(value) for value in node.args]
        if node.target == "record_stream":
            changed |= _keep_record_stream(gm, node, numbers)
            continue
        op, count, event_first = _METHODS[str(node.target)]
        if None in numbers or len(numbers) != count:
            continue
        args = () if count == 1 else tuple(reversed(numbers) if event_first else numbers)
        with gm.graph.inserting_before(node):
            gm.graph.call_function(_op(op), args).meta.update(node.meta)
        gm.graph.erase_node(node)
        changed = True
    if changed:
        gm.recompile()


def _place_by_set_stream(gm: GraphModule) -> bool:
    setters = {module.set_stream for module in (*runtimes().values(), torch.accelerator)}
    changed, entered = False, None
    for node in list(gm.graph.nodes):
        if node.target in setters and len(node.args) == 1:
            number = _number(node.args[0])
            if number is not None:
                entered = None if is_current_stream(number) else number
                gm.graph.erase_node(node)
                changed = True
        elif entered is not None and node.op.startswith("call"):
            node.meta["custom"] = {"stream": entered, **(node.meta.get("custom") or {})}
    if entered is not None:
        raise StreamError(
            "the compiled function calls set_stream() and does not set the stream it was called on back before it "
            "ends, or before the graph breaks. Set it back, or use `with torch.cuda.stream(...)`."
        )
    return changed


def _keep_record_stream(gm: GraphModule, node: Node, numbers: list[int | None]) -> bool:
    """Replace `tensor.record_stream(s)` by an op; whether it was one."""
    if len(numbers) != 2 or numbers[0] is not None or numbers[1] is None:
        return False
    label = label_of(stream_of(numbers[1]))
    with gm.graph.inserting_before(node):
        gm.graph.call_function(torch.ops.graphex.record_tagged_stream.default, (node.args[0], label))
    gm.graph.erase_node(node)
    return True


def _op(name: str) -> torch._ops.OpOverload:
    namespace, _, short = name.partition(".")
    op: torch._ops.OpOverload = getattr(getattr(torch.ops, namespace), short).default
    return op


def _number(value: object) -> int | None:
    """The number behind a node that fetches a stream or an event."""
    if isinstance(value, Node) and is_object_lookup(value.target) and isinstance(value.args[0], int):
        return value.args[0]
    return None


# -- masks that are known ----------------------------------------------------------------------------------------------


ALL, CAUSAL = "all", "causal"
LARGEST = 2**24  # elements of a value that is computed
_PURE: frozenset[Any] = frozenset(
    {
        *(torch.arange, torch.ones, torch.zeros, torch.full, torch.tril, torch.triu),
        *(operator.add, operator.sub, operator.and_, operator.or_, operator.invert, operator.getitem),
        *(operator.ge, operator.gt, operator.le, operator.lt, operator.eq, operator.ne),
        *("expand", "view", "reshape", "unsqueeze", "new_ones", "new_zeros", "bool", "tril", "triu"),
    }
)


def known_masks(calls: list[Node]) -> dict[Node, str]:
    """The kind of mask of each of these calls of attention, where it is known: `ALL` or `CAUSAL`."""
    masks = {call: call.kwargs.get("attn_mask", call.args[3] if len(call.args) > 3 else None) for call in calls}
    kinds = {mask: _kind(mask) for mask in masks.values() if isinstance(mask, Node)}
    return {call: kinds[mask] for call, mask in masks.items() if isinstance(mask, Node) and kinds[mask]}


def _kind(mask: Node) -> str:
    made_of = _made_of(mask)
    value = _value(mask, {}) if all(map(_is_known, made_of)) and not _is_seen_elsewhere(made_of) else None
    if not isinstance(value, Tensor) or value.dtype != torch.bool or value.dim() < 2 or value.device.type != "cpu":
        return ""
    if bool(value.all()):
        return ALL
    causal = torch.ones(value.shape[-2:], dtype=torch.bool).tril()
    return CAUSAL if torch.equal(value, causal.expand_as(value)) else ""


def _made_of(node: Node) -> set[Node]:
    """A node and everything that it is computed from."""
    found, pending = {node}, [node]
    while pending:
        new = set(pending.pop().all_input_nodes) - found
        found |= new
        pending += new
    return found


def _is_known(node: Node) -> bool:
    """Whether a node only computes, and its value has a fixed and moderate size."""
    sizes = getattr(node.meta.get("example_value"), "shape", ())
    is_small = all(isinstance(each, int) for each in sizes) and torch.Size(sizes).numel() <= LARGEST
    return node.op in ("call_function", "call_method") and node.target in _PURE and is_small


def _is_seen_elsewhere(nodes: set[Node]) -> bool:
    """Whether anything but these functions and attention gets hold of the values, or of views: it may write to them."""
    seen, pending = set(nodes), list(nodes)
    while pending:
        for user in pending.pop().users:
            if user.target is scaled_dot_product_attention or user in seen:
                continue
            if user.target not in _PURE:
                return True
            seen.add(user)
            pending.append(user)
    return False


def _value(node: Node, values: dict[Node, Any]) -> Any:
    """The value of a node, on the host."""
    if node not in values:
        given = map_arg((node.args, node.kwargs), lambda each: _value(each, values))
        args, kwargs = pytree.tree_map_only(torch.device, lambda device: torch.device("cpu"), given)
        kwargs = {name: "cpu" if name == "device" else given for name, given in kwargs.items()}
        method = getattr(Tensor, node.target) if isinstance(node.target, str) else node.target
        values[node] = method(*args, **kwargs)
    return values[node]


# -- attention ---------------------------------------------------------------------------------------------------------


ANY = "any"
BY_POSITIONS = "by positions"  # [B, T, H, D]: as `graphex.attention` makes it
BY_HEADS = "by heads"  # [B, H, T, D]
OTHER = "other"

_SWAPS = ("transpose", torch.transpose, "swapaxes", torch.swapaxes)
_PERMUTES = ("permute", torch.permute)
_FLATTENS = ("reshape", torch.reshape, "flatten", torch.flatten)


def layout_of(call: Node) -> str:
    value = call.meta.get("example_value")
    if not isinstance(value, Tensor) or value.dim() != 4:
        return OTHER
    if _is_unseen(call, value):
        return ANY
    if _lies_in_order(value, (0, 2, 1, 3)):
        return BY_POSITIONS
    return BY_HEADS if _lies_in_order(value, (0, 1, 2, 3)) else OTHER


def _lies_in_order(value: Tensor, order: tuple[int, ...]) -> bool:
    """Whether the elements certainly follow each other in this order of dimensions. One of size 1 can be anywhere."""
    step: Any = 1
    for dim in reversed(order):
        size = value.shape[dim]
        if not known_equal(size, 1) and not known_equal(value.stride(dim), step):
            return False
        step = step * size
    return True


def _is_unseen(call: Node, value: Tensor) -> bool:
    """Whether the result is only used to put the heads of each position side by side."""
    turned = _only_user(call)
    if turned is None or not _puts_positions_first(turned):
        return False
    joined = _only_user(turned)
    if joined is None:
        return False
    if joined.target == "contiguous":
        return len(joined.args) == 1 and not joined.kwargs
    found = joined.meta.get("example_value")
    if joined.target not in _FLATTENS or not isinstance(found, Tensor) or found.dim() == 0:
        return False
    return known_equal(found.shape[-1], math.prod((value.shape[1], value.shape[3])))


def _only_user(node: Node) -> Node | None:
    user = next(iter(node.users)) if len(node.users) == 1 else None
    return user if user is not None and user.args[:1] == (node,) else None


def _puts_positions_first(node: Node) -> bool:
    if node.kwargs:
        return False
    dims = node.args[1:]
    dims = tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], (list, tuple)) else dims
    if not all(isinstance(dim, int) for dim in dims):
        return False
    given = [canonical_dim(dim, 4) for dim in dims if isinstance(dim, int)]
    return (node.target in _SWAPS and sorted(given) == [1, 2]) or (node.target in _PERMUTES and given == [0, 2, 1, 3])


# -- keeping a call whole ----------------------------------------------------------------------------------------------


TYPES = (torch.float16, torch.bfloat16, torch.float32)
_EXTRA = ("call", "forced", "layout", "known")  # what a call of `attend` has beyond the original


@contextmanager
def attention_kept_whole(gm: GraphModule, config: CompilerConfig) -> Iterator[None]:
    """While Dynamo's graph is being traced, its calls of attention go through `attend`."""
    calls = [node for node in gm.graph.nodes if node.target is scaled_dot_product_attention]
    if not calls or not LiftAttention().enabled(config):
        yield
        return
    forced = config.lift_idioms == "always"
    masks = {} if LiftAttention.known_mask in config.disable_rules else known_masks(calls)
    try:
        for node in calls:
            extra = {"call": node.name, "forced": forced, "layout": layout_of(node), "known": masks.get(node, "")}
            _retarget(node, attend, {**node.kwargs, **extra})
        gm.recompile()
        yield
    finally:
        for node in calls:
            given = {name: value for name, value in node.kwargs.items() if name not in _EXTRA}
            _retarget(node, scaled_dot_product_attention, given)
        gm.recompile()


def _retarget(node: Node, target: Any, kwargs: dict[str, Any]) -> None:
    node.target, node.kwargs = target, kwargs


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    call: str,
    forced: bool,
    layout: str = ANY,
    known: str = "",
) -> Tensor:
    """The original, or `graphex.attention` for it; noted either way. No note where nothing could be gained.

    `known` says what the mask is: a call of torch's own is made without one, or with the flag for it.
    """
    if not forced and not has_kernel("graphex::attention", query.device):
        return scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    as_good = _many_positions(query)
    refusal = as_good or _needs_torch(query, key, value, attn_mask)
    refusal = refusal or _does_not_fit(query, key, value, attn_mask, enable_gqa)
    refusal = refusal or _unusual(dropout_p, is_causal, scale, attn_mask, layout)
    refusal = refusal or ("" if forced else _beyond_the_kernel(query, key, value))
    drops_mask = bool(refusal and known) and not is_causal and layout in (ANY, BY_HEADS)
    decided = Decided(call, refusal, nothing_lost=bool(as_good), known_mask=known if drops_mask else "")
    with annotate(decided.as_note()):
        if refusal:
            if drops_mask:
                attn_mask, is_causal = None, known == CAUSAL
            found = scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
            return found.contiguous() if drops_mask and layout == BY_HEADS else found
        factor = 1 / math.sqrt(query.shape[3]) if scale is None else float(scale)
        lifted: Tensor = torch.ops.graphex.attention(query, key, value, attn_mask, factor, is_causal)
        return lifted.clone(memory_format=torch.contiguous_format) if layout == BY_HEADS else lifted


def _many_positions(query: Tensor) -> str:
    """Why torch's own op is as good; empty if it may not be."""
    positions = query.shape[2] if isinstance(query, Tensor) and query.dim() == 4 else 0
    if isinstance(positions, int) and positions > MOST_POSITIONS:
        return f"{positions} query positions are more than the {MOST_POSITIONS} of a decode step"
    return ""


def _needs_torch(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> str:
    """Why the call must be torch's own: it asks for something that only torch's op knows. Empty if it does not."""
    tensors = [query, key, value, *([] if mask is None else [mask])]
    if any(not isinstance(each, Tensor) or hasattr(type(each), "__tensor_flatten__") for each in tensors):
        return "an argument is no plain tensor"
    if any(each.layout != torch.strided for each in tensors):
        return "an argument is not strided"
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        return "its gradient is needed"
    if is_transformed():
        return "it is inside a functorch transform"
    if torch.is_autocast_enabled(query.device.type):
        return "autocast decides on its type"
    backends = torch.backends.cuda
    if not (backends.flash_sdp_enabled() and backends.mem_efficient_sdp_enabled() and backends.math_sdp_enabled()):
        return "its backend was chosen by hand"
    return ""


def _does_not_fit(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool) -> str:
    """Why the op does not take such tensors, or would not be faster for them; empty if it does and may be."""
    if not query.dim() == key.dim() == value.dim() == 4:
        return "query, key and value do not have four dimensions"
    if query.dtype not in TYPES or not query.dtype == key.dtype == value.dtype:
        return f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}"
    if mask is not None and mask.dtype not in (torch.bool, torch.float32, query.dtype):
        return f"the mask is {mask.dtype}"
    if mask is not None and mask.dim() > 4:
        return f"the mask has {mask.dim()} dimensions"
    tensors = [key, value, *([] if mask is None else [mask])]
    if any(each.device != query.device for each in tensors):
        return "not all arguments are on one device"
    (batch, heads, _, width), shared = query.shape, key.shape[1]
    fixed = heads, shared, width, key.shape[3], value.shape[1], value.shape[3]
    if not all(isinstance(each, int) for each in fixed):
        return "the number or the size of heads is not fixed"
    if 0 in fixed:
        return "there is nothing to attend with"
    # A guard on these is none of ours: torch's own op asks the same while it is traced.
    if key.shape[3] != width or not (guard_or_false(key.shape[0] == batch) and guard_or_false(value.shape[0] == batch)):
        return "query and key do not fit"
    if value.shape[1] != shared or not guard_or_false(key.shape[2] == value.shape[2]):
        return "key and value do not fit"
    if heads != shared and (not enable_gqa or heads % shared):
        return "the heads are not grouped"
    return ""


def _beyond_the_kernel(query: Tensor, key: Tensor, value: Tensor) -> str:
    """Why the kernel would certainly decline."""
    if query.is_cuda and query.dtype == torch.float32:
        return "query, key and value are float32, which the kernel leaves to torch"
    rows = query.shape[2] * (query.shape[1] // key.shape[1])
    if isinstance(rows, int) and rows > MOST_ROWS:
        return f"{rows} queries share a head of the keys: the kernel takes {MOST_ROWS}"
    if (widest := max(query.shape[3], value.shape[3])) > MOST_COLUMNS:
        return f"heads of {widest} are wider than the {MOST_COLUMNS} that the kernel takes"
    return ""


def _unusual(dropout_p: object, is_causal: object, scale: object, mask: Tensor | None, layout: str) -> str:
    if not isinstance(dropout_p, (int, float)) or dropout_p != 0:
        return "it drops out"
    if not isinstance(is_causal, bool) or (is_causal and mask is not None):
        return "is_causal is not a plain flag"
    if scale is not None and not isinstance(scale, (int, float)):
        return "the scale is not a number"
    if layout == OTHER:
        return "its result lies in memory in an order that the op does not make"
    return ""
