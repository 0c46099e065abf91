"""FX graphs and the operators that their nodes call, in three parts.

graphs         copies that share only values, modules around graphs, nodes that are gone or replaced, names of targets
operators      composite or not, written arguments, conditions, and ways into a kernel that cost the host less
mutable ops    custom ops as AOTAutograd leaves them, wrapped in `auto_functionalized_v2`, which copies what they write

A `GraphModule` writes its graph as code, by the `repr` of the arguments, whenever it gets a graph. graphex generates
its own code, so that work is skipped here; for an argument whose `repr` is no code it could not be done at all. Without
the names of the third part models with mutable custom ops run without graphex's passes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from graphex.errors import GraphexError
from graphex.quoting import object_text, value_text
from graphex.torch_private.lookup import private, replaced_in_this_thread

if TYPE_CHECKING:
    from graphex.torch_private.symbolic import FakeTensorMode

_name = private("torch.fx.node._get_qualified_name", repr)
_Lazy = private("torch.fx._lazy_graph_module._LazyGraphModule", GraphModule)


def qualified_name(target: Callable[..., Any]) -> str:
    """The dotted name of a target: `torch.ops.aten.add.Tensor`."""
    return str(_name(target))


def copy_graph(graph: Graph) -> Graph:
    """A copy with nodes of its own; metadata dictionaries are copied, the values in them are not."""
    copy = Graph(tracer_cls=graph._tracer_cls)
    copy._codegen = graph._codegen
    mapping: dict[Node, Node] = {}
    returned = copy.graph_copy(graph, val_map=mapping, return_output_node=True)
    if isinstance(returned, tuple):
        value, output = returned
        node = copy.output(value, type_expr=getattr(output, "type", None))
        node.meta = dict(output.meta)
    return copy


def graph_module(root: torch.nn.Module, graph: Graph, class_name: str = "GraphModule") -> GraphModule:
    """A module that runs a graph, with the submodules, parameters and constants of `root`.

    Its code is written when it is first called or looked at.
    """
    module: GraphModule = _Lazy(root, graph, class_name)
    return module


def copy_module(gm: GraphModule) -> GraphModule:
    """A module with a graph of its own; submodules, parameters and constants are shared."""
    return graph_module(gm, copy_graph(gm.graph))


def is_erased(node: Node) -> bool:
    """Whether a node has been taken out of its graph."""
    return bool(node._erased)


def pytree_of(graph: Graph) -> Any:
    """How the arguments and results of a graph's module are nested; None if they are flat."""
    return getattr(graph._codegen, "pytree_info", None)


@contextmanager
def replacements_told(gm: GraphModule, note: Callable[[Node, str, Node], None]) -> Iterator[None]:
    """Tell `note` of every node of a module that another replaces: the old one, the new name, a reader."""
    gm._register_replace_node_hook(note)
    try:
        yield
    finally:
        gm._unregister_replace_node_hook(note)


def set_graph(gm: GraphModule, graph: Graph) -> None:
    """Give a module another graph."""
    if is_writable(graph):
        gm.graph = graph
    else:
        gm._graph = graph
        graph.owning_module = gm
        write_code(gm)


def write_code(gm: GraphModule) -> None:
    """Let the module's code be that of its graph; it raises if it is called where torch cannot write it."""
    if is_writable(gm.graph):
        gm.recompile()
    else:
        type(gm).forward = _without_code  # the class is the module's own


def is_writable(graph: Graph) -> bool:
    """Whether torch's code for a graph says what the graph does: by `repr`, all of its arguments can be written."""
    return all(_is_writable(value) for node in graph.nodes for value in (node.args, node.kwargs))


def _is_writable(value: Any) -> bool:
    try:
        value_text(value, _text_for_torch)
    except Exception:  # besides what has no text, an object may fail in any way when it is asked
        return False
    return True


def _text_for_torch(value: Any) -> str:
    """Nodes, types and functions of torch's, which torch writes by their names. Raises TypeError for the rest."""
    if isinstance(value, (Node, torch.SymInt, torch.SymFloat, torch.SymBool)) or object_text(value):
        return ""
    raise TypeError


def _without_code(gm: GraphModule, *_: Any, **__: Any) -> Any:
    raise GraphexError(
        "a node of this graph has an argument that cannot be written as code; run it with torch.fx.Interpreter."
    )


# -- operators ---------------------------------------------------------------------------------------------------------


print_options: Callable[..., Any] = private(
    "torch._tensor_str.printoptions", lambda **_: nullcontext(), lost="npu_print prints tensors as print does"
)
"""How tensors are printed within a block."""

_has_kernel = private("torch._C._dispatch_has_kernel_for_dispatch_key")


@cache
def is_composite(op: torch._ops.OpOverload) -> bool:
    """Whether the op is a Python-like function over other ops, whose schema does not say when it returns an input."""
    return bool(_has_kernel(op.name(), "CompositeImplicitAutograd"))


@cache
def written_places(op: torch._ops.OpOverload) -> tuple[tuple[int, str], ...]:
    """The places and names of the arguments that an op writes to, as its schema says."""
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def written_in_call(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments of a call that the op writes to."""
    return [args[place] if place < len(args) else kwargs.get(name) for place, name in written_places(op)]


def holds_tensors(kind: Any) -> bool:
    """Whether a schema type is a tensor, or a list or option of tensors."""
    return "Tensor" in str(kind)


def overload_of(given: Any) -> torch._ops.OpOverload | None:
    """The one overload meant by an operator, however it was given; None if that is not clear."""
    given = getattr(given, "_opoverload", given)  # what torch.library.custom_op returns
    if isinstance(given, torch._ops.OpOverloadPacket):
        names = given.overloads()
        given = getattr(given, names[0]) if len(names) == 1 else None
    return given if isinstance(given, torch._ops.OpOverload) else None


# -- conditions on the arguments of an op, which torch can also hold against symbolic sizes ----------------------------


Check = Callable[..., None]


def _raising(kind: type[Exception]) -> Check:
    def check(condition: bool, message: Callable[[], str]) -> None:
        if not condition:
            raise kind(message())

    return check


require: Check = private("torch._check", _raising(RuntimeError))
require_implemented: Check = private("torch._check_not_implemented", _raising(NotImplementedError))


# -- the ways into a kernel that cost less than calling its OpOverload -------------------------------------------------


_BY_OVERLOAD = "generated code calls OpOverloads, which costs the host more"

VARIABLE_FUNCTIONS: Any = private("torch._C._VariableFunctions", SimpleNamespace(), lost=_BY_OVERLOAD)
TENSOR_METHODS: Any = private("torch._C.TensorBase", SimpleNamespace(), lost=_BY_OVERLOAD)
NN_FUNCTIONS: Any = private("torch._C._nn", SimpleNamespace(), lost=_BY_OVERLOAD)
BelowAutograd: Any = private(
    "torch._C._AutoDispatchBelowAutograd", nullcontext, lost="calls pass through autograd, which costs the host more"
)


_IN_TRIALS = "single ops take longer in the trials of regions than in programs"
_Excluding: Any = private("torch._C._ExcludeDispatchKeyGuard", None, lost=_IN_TRIALS)
_KeySet: Any = private("torch._C.DispatchKeySet", None, lost=_IN_TRIALS)
_python_dispatcher: Any = private("torch._C.DispatchKey.PythonDispatcher", None, lost=_IN_TRIALS)


def around_python_dispatcher() -> AbstractContextManager[None]:
    """Call ops as a program does. While AOTAutograd compiles, the Python dispatcher is on: 2 us for each op."""
    if None in (_Excluding, _KeySet, _python_dispatcher):
        return nullcontext()
    guard: AbstractContextManager[None] = _Excluding(_KeySet(_python_dispatcher))
    return guard


# -- mutable ops -------------------------------------------------------------------------------------------------------


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
    """Whether this torch counts slices from the start of the storage, asked of an example."""
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
    """Let Inductor's matcher take nodes that it has no kernels for (complex numbers): a wrapper needs none."""
    matcher = private("torch._inductor.pattern_matcher", lost=_NOT_UNWRAPPED)
    return replaced_in_this_thread(matcher, "fallback_node_due_to_unsupported_type", lambda *args, **kwargs: False)


def _copied_from_where_they_begin() -> AbstractContextManager[None]:
    """Let the copy of a tensor that an op writes begin where the tensor does.

    torch copies from the start of the storage, and views the copy at the example's storage offset. A tensor of a later
    call may have another one, which no guard checks.
    """
    module = private("torch._higher_order_ops.auto_functionalize", lost=_NOT_UNWRAPPED)
    return replaced_in_this_thread(module, "clone_preserve_strides", lambda original, value: _copy_of(value, original))


def _copy_of(tensor: Tensor, otherwise: Callable[[Tensor], Tensor]) -> Tensor:
    """A copy with the strides of `tensor` that begins where that did in the example: views of it are counted from the
    start of its storage. `otherwise` makes one of a tensor that cannot be copied to, as it shares places with itself.
    """
    from graphex.torch_private.symbolic import statically_known_true  # sympy, which `import graphex` does without

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
