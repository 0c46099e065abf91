"""The cut of a joint graph into forward and backward: what is saved, what is computed again, and the record of both.

torch's partitioner finds the cut that saves the fewest bytes, where what a region fuses costs nothing to compute again
and matrix products, convolutions and attention are never computed twice. Marks that `torch.utils.checkpoint` leaves on
nodes are respected.

graphex keeps some ops whole that Inductor takes apart before it cuts. These values are computed again:

    logits: bf16[tokens, words] -> log_softmax: f32[tokens, words]      from the logits, which are saved, and on a GPU
                                                                        from two saved numbers a row
    x: bf16[tokens, words] -> f32 -> nll_loss_backward                  which reads nothing of it but its size
    x: bf16 -> pow, mul, add: f32 -> tanh: f32 -> tanh_backward         in the region of its derivative, from x
    x: bf16 -> f32 -> group norm: f32 -> silu_backward                  the same, from x and the saved statistics
    x: bf16 -> f32 -> group_norm_backward                               the same, from x

Convolutions of both graphs read and write channels last, as Inductor has them in one graph: what is saved
between the two lies in memory as the backward's convolutions read it (`lay_out_by_channels`).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from graphex.analysis import Aliases, is_random, node_line, written_arguments
from graphex.analysis.aliasing import RETURNED
from graphex.analysis.effects import bodies_of
from graphex.analysis.memory import bytes_of
from graphex.analysis.shapes import known_contiguous
from graphex.env import regions_enabled
from graphex.frontend.compiler import ACTIVATIONS, compile_joint
from graphex.passes.updates import note_program_writes
from graphex.records import Activation, FellBack, Rewrote
from graphex.regions.compiler import CLEARLY, seconds_of_convolutions, why_no_kernels
from graphex.regions.stage import CompileRegions
from graphex.rewrite.compilation import Compilation
from graphex.rewrite.metadata import correct_values, evaluate, fake_mode_of, inherit_all
from graphex.torch_private.aot import default_partition, memory_budget, min_cut_rematerialization_partition
from graphex.torch_private.graphs import copy_module
from graphex.torch_private.symbolic import pytree

aten = torch.ops.aten
LEAST = 1e-6  # of a budget with which torch asks what has to be saved
_MARK = "recompute"  # torch's mark of a checkpoint on a node
_WITHOUT = "the training graph is partitioned without min-cut"
_VIEWS = (
    *(aten.view.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default),
    *(aten.expand.default, aten.detach.default, aten.slice.Tensor),
)
_CASTS = (aten._to_copy.default,)
_WIDENING = (aten._log_softmax.default,)
_BY_SIZE: dict[Any, int] = {  # arguments whose values are not looked at
    aten.nll_loss_backward.default: 1,
    aten.nll_loss2d_backward.default: 1,
}
_POINTWISE = (aten.tanh.default, aten.sigmoid.default)  # whose derivatives read their results
_STATISTICS_ON = ("cuda",)  # devices where a log-softmax is taken apart for its derivative
_CHANNELS_LAST_ON = ("cuda",)  # devices whose convolutions are faster with channels last
_IN_REGIONS_ON = ("cpu",)  # devices for which Inductor lays out all convolutions so, with the library of Intel's
_APART = frozenset({aten.native_group_norm.default, aten.cat.default})  # on a CPU; see `_are_faster_by_channels`
FEW = 600  # nodes of a joint graph for each convolution: there is too little to gain
SMALL = 64  # channels: if no convolution has more, channels last is slower
_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)
# Ops, besides pointwise ones, that return channels last if they are given it.
_FOLLOW_LAYOUT = frozenset(
    {
        *(aten._native_batch_norm_legit_functional.default, aten.native_batch_norm_backward.default),
        *(aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default),
        *(aten.avg_pool2d.default, aten.avg_pool2d_backward.default),
        *(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d_backward.default),
        *(aten.mean.dim, aten.sum.dim_IntList, aten.cat.default, aten.constant_pad_nd.default),
        *(aten._to_copy.default, aten.detach.default, operator.getitem),
    }
)
_SOURCES = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten._to_copy.default)


def partition(
    joint: GraphModule, inputs: Sequence[Any], *, compilation: Compilation, has_out: bool, **kwargs: Any
) -> Any:
    """Run the passes that ask for the joint graph, cut it, and say which outputs of the forward are the user's.

    The partitioner merges equal values, of which one may be a write of the program and another one none. So the writes
    are noted before it runs.
    """
    note_program_writes(joint.graph, has_out=has_out)
    correct_values(joint)  # each half is given the types of what is saved
    joint = compile_joint(joint, inputs, compilation)
    leave_out_unread(joint)
    again: set[str] = set()
    rewrites: tuple[Rewrote, ...] = ()
    if compilation.config.regions and regions_enabled() and not any(_MARK in node.meta for node in joint.graph.nodes):
        normalize_again(joint)
        joint, rewrites = laid_out(joint, compilation)
        again = take_log_softmaxes_apart(joint) | prefer_computing_again(joint)
    forward, backward = _cut(joint, inputs, compilation, kwargs)
    output = forward.graph.output_node()
    output.meta[RETURNED] = kwargs["num_fwd_outputs"]
    output.meta[ACTIVATIONS] = (*rewrites, *activations(forward, backward, kwargs["num_fwd_outputs"], again))
    for node in (*forward.graph.nodes, *backward.graph.nodes):
        node.meta.pop(_MARK, None)  # it is cut: Inductor of torch 2.12 would cut the regions of each half again
    return forward, backward


def _cut(joint: GraphModule, inputs: Sequence[Any], compilation: Compilation, kwargs: dict[str, Any]) -> Any:
    """Cut a joint graph where the fewest bytes are saved for backward."""
    budget = _keep_random(joint, compilation.config.activation_memory_budget)
    plain = copy_module(joint)
    try:
        halves = _min_cut(joint, inputs, budget, kwargs)
        if overwritten := _overwritten_before_backward(*halves):
            again = copy_module(plain)
            if _save_copies(again, overwritten):
                halves = _min_cut(again, inputs, max(budget, LEAST), kwargs)
                overwritten = _overwritten_before_backward(*halves)
    except Exception as error:
        compilation.fall_back("-", _WITHOUT, error)
        return default_partition(plain, inputs, **kwargs)
    if not overwritten:
        return halves
    reason = f"the backward would recompute from '{min(overwritten)}', which the forward has overwritten by then"
    compilation.journal.fall_back(FellBack("-", _WITHOUT, reason))
    for node in plain.graph.nodes:
        node.meta.pop(_MARK, None)
    return default_partition(plain, inputs, **kwargs)


def _min_cut(joint: GraphModule, inputs: Sequence[Any], budget: float, kwargs: dict[str, Any]) -> Any:
    with memory_budget(budget):
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **kwargs)
    leave_out_statistics(backward)
    return forward, backward


def _keep_random(joint: GraphModule, budget: float) -> float:
    """Have random numbers saved, and return the budget for the rest.

    With a budget torch computes again what it does not know to be random, such as the `bernoulli` of dropout on a CPU,
    and with one of 0 all that is no input: the backward would draw other numbers.
    """
    found = [node for node in joint.graph.nodes if _draws(node) and _MARK not in node.meta]
    if budget >= 1 or not found:
        return budget
    for node in found:
        node.meta[_MARK] = CheckpointPolicy.MUST_SAVE
    return max(budget, LEAST)


def _draws(node: Node) -> bool:
    """Whether a node draws random numbers, or runs a graph that does."""
    return is_random(node) or any(_draws(each) for body in bodies_of(node) for each in body.graph.nodes)


def _overwritten_before_backward(forward: GraphModule, backward: GraphModule) -> set[str]:
    """Inputs that the forward writes to and the backward reads again, or a view of them: it would find new values."""
    aliases, inputs = Aliases(forward.graph), forward.graph.find_nodes(op="placeholder")
    written = {aliases.storages(node): node.name for node in inputs if aliases.is_written(node)}
    read = {node.name for node in backward.graph.find_nodes(op="placeholder") if node.users}
    saved = [node for node in forward.graph.nodes if node.name in read and len(aliases.storages(node)) == 1]
    return {written[found] for node in saved if (found := aliases.storages(node)) in written}


def _save_copies(joint: GraphModule, names: set[str]) -> bool:
    """Let all that reads these inputs read copies, which are saved: whether that can be done for each of them.

    before:  s = sin(b); copy_(b, b + 1)                      backward:  g * sin(b)
    after:   old = clone(b); s = sin(old); copy_(b, old + 1)  backward:  g * sin(old)
    """
    inputs = joint.graph.find_nodes(op="placeholder")
    first = next(node for node in joint.graph.nodes if node.op != "placeholder")
    for node in [each for each in inputs if each.name in names]:
        if not _is_copied_alike(node):
            return False
        readers = [user for user in node.users if node not in written_arguments(user) and user.op != "output"]
        with joint.graph.inserting_before(first):
            copy = _made(node, aten.clone.default, node)
        copy.meta[_MARK] = CheckpointPolicy.MUST_SAVE
        for reader in readers:
            reader.replace_input_with(node, copy)
    joint.recompile()
    return True


def _is_copied_alike(node: Node) -> bool:
    """Whether a copy has the strides of the value, and nothing reads and writes the value at once."""
    found = node.meta["val"]
    if not isinstance(found, Tensor) or found.layout != torch.strided:
        return False
    writes = [user for user in node.users if node in written_arguments(user)]
    is_read_there = any(sum(each is node for each in user.all_input_nodes) != 1 for user in writes)
    return not is_read_there and found.clone().stride() == found.stride()


def leave_out_statistics(backward: GraphModule) -> None:
    """Batch norms of a checkpoint that train are computed again without the running statistics: the forward has
    written these by then, and nothing reads what would become of them.
    """
    for node in backward.graph.find_nodes(op="call_function", target=aten._native_batch_norm_legit_functional.default):
        x, weight, bias, _, _, trains, momentum, eps = node.args
        parts = [user for user in node.users if user.target is operator.getitem]
        if trains is True and len(parts) == len(node.users) and all(part.args[1] in (0, 1, 2) for part in parts):
            node.target = aten._native_batch_norm_legit.no_stats
            node.args = (x, weight, bias, True, momentum, eps)
            node.meta["val"] = node.meta["val"][:3]
    backward.recompile()


def leave_out_unread(joint: GraphModule) -> None:
    """Take running statistics from the derivative of a batch norm that trains: it reads those of the batch."""
    for node in joint.graph.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default):
        if len(node.args) == 10 and node.args[7] is True:
            node.args = (*node.args[:3], None, None, *node.args[5:])


def prefer_computing_again(joint: GraphModule) -> set[str]:
    """Mark ops whose results are larger than what they are computed from, or free to compute where they are read."""
    found = [
        node
        for node in joint.graph.nodes
        if (node.target in _WIDENING and _is_wider(node))
        or (node.target in _POINTWISE and _is_in_a_chain(node))
        or (node.target in _CASTS and _is_wider(node) and (_is_read_by_size(node) or _is_normalized(node)))
    ]
    for node in found:
        node.meta[_MARK] = CheckpointPolicy.PREFER_RECOMPUTE
    return {node.name for node in found}


def normalize_again(joint: GraphModule) -> None:
    """Let a backward compute the result of a group norm from the statistics, which are saved for its derivative.

        before:  y, mean, rstd = group_norm(x, w, b);  silu_backward(dz, y)
        after:   y, mean, rstd = group_norm(x, w, b);  silu_backward(dz, x * (rstd * w) + (b - mean * (rstd * w)))

    That is the arithmetic of the op itself. Only in float32: there the statistics are as exact as those it used.
    """
    backward: dict[Node, None] = {}
    for node in joint.graph.nodes:
        is_given = node.op == "placeholder" and "tangents" in node.name
        if is_given or any(each in backward for each in node.all_input_nodes):
            backward[node] = None
    for norm in joint.graph.find_nodes(op="call_function", target=aten.native_group_norm.default):
        parts = {user.args[1]: user for user in norm.users if user.target is operator.getitem}
        readers = [node for node in backward if 0 in parts and node in parts[0].users]
        if readers and {1, 2} <= parts.keys() and _is_plain_norm(norm):
            with joint.graph.inserting_before(readers[0]):
                again = _normalized(norm, parts[1], parts[2])
            for reader in readers:
                reader.replace_input_with(parts[0], again)
    joint.recompile()


def _is_plain_norm(norm: Node) -> bool:
    """Whether a group norm is one of float32, of known sizes, with a weight and a bias, that leaves strides alone."""
    x, weight, bias, *sizes = norm.args[:7]
    is_known = all(isinstance(each, int) for each in sizes)
    if not is_known or not (isinstance(weight, Node) and isinstance(bias, Node) and isinstance(x, Node)):
        return False
    given, result = x.meta["val"], norm.meta["val"][0]
    return bool(result.dtype == torch.float32 and given.stride() == result.stride())


def _normalized(norm: Node, mean: Node, rstd: Node) -> Node:
    x, weight, bias, batch, width, _, groups, _ = norm.args
    result = norm.meta["val"][0]

    def made(target: Any, *args: Any) -> Node:
        return _made(norm, target, *args)

    def viewed(each: Any, sizes: list[Any]) -> Node:
        return made(aten.view.default, each, sizes)

    of_batch, of_width, of_both = [batch, groups, 1], [1, groups, -1], [batch, width, *[1] * (result.dim() - 2)]
    factor = made(aten.mul.Tensor, viewed(rstd, of_batch), viewed(weight, of_width))
    less = made(aten.mul.Tensor, viewed(mean, of_batch), factor)
    shift = made(aten.sub.Tensor, viewed(bias, of_width), less)
    return made(aten.add.Tensor, made(aten.mul.Tensor, x, viewed(factor, of_both)), viewed(shift, of_both))


def take_log_softmaxes_apart(joint: GraphModule) -> set[str]:
    """Let a backward compute a log-softmax from two numbers a row, which are saved, instead of reading the row twice.

        before:  y = log_softmax(x);                                                log_softmax_backward(g, y)
        after:   m = amax(x); s = log(sum(exp(x - m))); y = (x - m) - s;            log_softmax_backward(g, y)

    That is what Inductor makes of the op in any case, but once the graph is cut, where a backward begins from x.
    """
    found = set()
    for node in joint.graph.find_nodes(op="call_function", target=aten._log_softmax.default):
        if not _is_wider(node) or not _has_plain_rows(node):
            continue
        with joint.graph.inserting_before(node):
            result = _log_softmax(node)
        node.replace_all_uses_with(result)
        joint.graph.erase_node(node)
        result.meta[_MARK] = CheckpointPolicy.PREFER_RECOMPUTE
        found.add(result.name)
    joint.recompile()
    return found


def _has_plain_rows(node: Node) -> bool:
    """Whether a log-softmax is of float32, has rows that are not empty and lie as x does, and is derived."""
    x, dim, _ = node.args
    assert isinstance(x, Node)
    assert isinstance(dim, int)
    given, result = x.meta["val"], node.meta["val"]
    is_plain = result.dtype == torch.float32 and given.stride() == result.stride() and result.dim() > 0
    size = result.shape[dim] if is_plain else 0
    return result.device.type in _STATISTICS_ON and isinstance(size, int) and size > 0 and _is_derived(node)


def _is_derived(node: Node) -> bool:
    """Whether the derivative of a log-softmax reads it; autograd detaches it first."""
    return any(
        user.target is aten._log_softmax_backward_data.default
        or (user.target is aten.detach.default and _is_derived(user))
        for user in node.users
    )


def _log_softmax(node: Node) -> Node:
    x, dim, _ = node.args
    assert isinstance(x, Node)
    if x.meta["val"].dtype != torch.float32:
        x = _made(node, aten._to_copy.default, x, dtype=torch.float32)
    shifted = _made(node, aten.sub.Tensor, x, _made(node, aten.amax.default, x, [dim], True))
    total = _made(node, aten.sum.dim_IntList, _made(node, aten.exp.default, shifted), [dim], True)
    return _made(node, aten.sub.Tensor, shifted, _made(node, aten.log.default, total))


def _made(origin: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A call that stands for a part of what a node computes."""
    node = origin.graph.call_function(target, args, kwargs)
    values = (arg.meta["val"] if isinstance(arg, Node) else arg for arg in args)
    node.meta["val"] = target(*values, **kwargs)
    inherit_all(node, [origin])
    return node


def _is_wider(node: Node) -> bool:
    """Whether a value is cast to a wider type by this op, or was right before."""
    given = node.args[0]
    if isinstance(given, Node) and given.meta["val"].dtype.itemsize < node.meta["val"].dtype.itemsize:
        return True
    while isinstance(given, Node) and given.target in (aten.view.default, aten._to_copy.default):
        if given.target is aten._to_copy.default:
            source = given.args[0]
            assert isinstance(source, Node)
            return bool(source.meta["val"].dtype.itemsize < given.meta["val"].dtype.itemsize)
        given = given.args[0]
    return False


def _is_read_by_size(node: Node) -> bool:
    """Whether a backward is given the value and looks at nothing but its size."""
    places = ((user, _BY_SIZE.get(user.target)) for user in node.users)
    return any(place is not None and user.args[place] is node for user, place in places)


def _is_normalized(node: Node) -> bool:
    """Whether the derivative of a group norm reads a value: a region casts it where it is read."""
    return any(user.target is aten.native_group_norm_backward.default for user in node.users)


def _is_in_a_chain(node: Node) -> bool:
    """Whether a region computes the op's argument too, so that something before it is saved in any case."""
    given = node.args[0]
    return isinstance(given, Node) and given.target in _SOURCES


# -- channels last -----------------------------------------------------------------------------------------------------


def laid_out(joint: GraphModule, compilation: Compilation) -> tuple[GraphModule, tuple[Rewrote, ...]]:
    """The joint graph with its convolutions in channels last, where that is worth it, and the record of it."""
    config, rule = compilation.config, CompileRegions.channels_last
    if config.region_numerics != "fast" or rule in config.disable_rules or not _are_faster_by_channels(joint):
        return joint, ()
    changed = copy_module(joint)
    try:
        lay_out_by_channels(changed)
    except Exception as error:  # a fake may raise anything; the graph as it was is right
        compilation.fall_back("-", "convolutions of a training step keep their layout", error)
        return joint, ()
    found = changed.graph.find_nodes(op="call_function", target=aten.convolution.default)
    names = tuple(node.name for node in found)
    because = "forward and backward compute convolutions in channels last, and values between the two are saved so"
    return changed, (Rewrote("", CompileRegions.name, rule, names, names, because, node_line(found[0])),)


def _are_faster_by_channels(joint: GraphModule) -> bool:
    """Whether convolutions of a training step gain from channels last.

    On a GPU by the rules that Inductor has measured: they lose with groups of several channels, and where there are
    half as many channels after one as before. On a CPU they are timed in both layouts, and what forward saves in
    another than regions compute in is copied in both graphs; graphs in which group norms and concatenations stand
    between convolutions may lose there.
    """
    found = joint.graph.find_nodes(op="call_function", target=aten.convolution.default)
    nodes = [node for node in found if node.meta["val"].dim() == 4]
    values = [value for node in nodes for value in (node.meta["val"], *(_value(each) for each in node.args[:2]))]
    if not nodes or len(joint.graph.nodes) >= FEW * len(nodes):
        return False
    if not all(isinstance(size, int) for value in values for size in value.shape):
        return False
    if all(value.device.type in _IN_REGIONS_ON for value in values):
        has_library = bool(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled)
        is_apart = any(node.target in _APART for node in joint.graph.nodes)
        if not has_library or is_apart or why_no_kernels(values[0].device):
            return False
        are_whole = all(node.args[8] == 1 for node in nodes)
        eager, by_channels = seconds_of_convolutions(joint.graph)
        return by_channels <= (CLEARLY if are_whole else 1.0) * eager if eager else are_whole
    if any(value.device.type not in _CHANNELS_LAST_ON for value in values):
        return False
    weights = [tuple(map(int, _value(node.args[1]).shape)) for node in nodes]
    groups: list[Any] = [node.args[8] for node in nodes]
    are_grouped = any(count > 1 and shape[1] > 1 for count, shape in zip(groups, weights, strict=True))
    shrink = any(2 * after <= before and high > 1 for after, before, high, _ in weights)
    return not are_grouped and not shrink and any(max(shape[:2]) > SMALL for shape in weights)


def _value(node: Any) -> Tensor:
    value: Tensor = node.meta["val"]
    return value


def lay_out_by_channels(joint: GraphModule) -> None:
    """Have convolutions, and what stands between them, compute in channels last.

        before:  c = convolution(x, w); y = relu(c); z = view(y, ...)
        after:   a = clone(x, channels_last); b = clone(w, channels_last)
                 c = convolution(a, b); y = relu(c); z = view(clone(y), ...)

    What other ops read, results and gradients are laid out as they were.
    """
    layout = _Layout(joint)
    for node in list(joint.graph.nodes):
        layout.visit(node)
    joint.graph.lint()
    joint.recompile()


class _Layout:
    """Layouts of the values of a joint graph, while its convolutions are given channels last."""

    def __init__(self, joint: GraphModule) -> None:
        mode = fake_mode_of(joint)
        assert mode is not None
        self.gm, self.mode = joint, mode
        self.promised: dict[Node, Any] = {}  # the values that have another layout now, as they were
        self.copies: dict[tuple[Node, torch.memory_format], Node] = {}

    def visit(self, node: Node) -> None:
        if node.op not in ("call_function", "output"):
            return
        is_convolution = node.target in _CONVOLUTIONS and _value(node.args[1]).dim() == 4
        moved = [each for each in node.all_input_nodes if each in self.promised]
        if is_convolution or (moved and self._follows(node)):
            for each in node.all_input_nodes:
                self._read(node, each, torch.channels_last)
            self._evaluate(node)
        else:
            for each in moved:
                self._read(node, each, torch.contiguous_format)

    def _follows(self, node: Node) -> bool:
        """Whether an op returns channels last if it reads it, and returned contiguous values before.

        Random numbers are drawn in the order of memory, so that those of another layout would be others.
        """
        tags = getattr(node.target, "tags", ())
        if node.target not in _FOLLOW_LAYOUT and (torch.Tag.pointwise not in tags or is_random(node)):
            return False
        if written_arguments(node) or node.kwargs.get("memory_format") not in (None, torch.preserve_format):
            return False
        values = [each for each in pytree.tree_leaves(node.meta["val"]) if isinstance(each, Tensor)]
        return all(map(known_contiguous, values))

    def _read(self, reader: Node, value: Node, layout: torch.memory_format) -> None:
        """Let a node read a value in a layout, by a copy if it has another one."""
        found, is_wanted = value.meta["val"], layout is torch.channels_last
        if not isinstance(found, Tensor) or (is_wanted and (found.dim() != 4 or not known_contiguous(found))):
            return
        if is_wanted and found.is_contiguous(memory_format=layout):
            return
        if is_wanted and self._casts_for_convolutions(value):
            value.kwargs = {**value.kwargs, "memory_format": layout}
            self._evaluate(value)
            return
        if (value, layout) not in self.copies:
            graph = self.gm.graph
            is_given = value.op == "placeholder"  # no node may stand between these
            with graph.inserting_before(reader) if is_given else graph.inserting_after(value):
                self.copies[value, layout] = self._copy(value, layout)
        reader.replace_input_with(value, self.copies[value, layout])

    def _copy(self, value: Node, layout: torch.memory_format) -> Node:
        found = value.meta["val"]
        if not found.is_contiguous(memory_format=layout):
            return _made(value, aten.clone.default, value, memory_format=layout)
        flat = _made(value, aten.view.default, value, [size for size in found.shape if size != 1])
        with self.gm.graph.inserting_after(flat):  # strides differ in dimensions of one element
            return _made(value, aten.view.default, flat, list(found.shape))

    def _casts_for_convolutions(self, node: Node) -> bool:
        """Whether a cast is read by convolutions alone: it writes their layout itself."""
        is_cast = node.target is aten._to_copy.default and "memory_format" not in node.kwargs
        return is_cast and all(user.target in _CONVOLUTIONS for user in node.users)

    def _evaluate(self, node: Node) -> None:
        before, after = node.meta["val"], evaluate(self.gm, node, self.mode)
        node.meta["val"] = after
        node.meta.pop("tensor_meta", None)
        if not _are_laid_out_alike(before, after):
            self.promised[node] = before


def _are_laid_out_alike(before: Any, after: Any) -> bool:
    pairs = zip(pytree.tree_leaves(before), pytree.tree_leaves(after), strict=True)
    return all(one.stride() == other.stride() for one, other in pairs if isinstance(one, Tensor))


# -- the record --------------------------------------------------------------------------------------------------------


def activations(forward: GraphModule, backward: GraphModule, returned: int, again: set[str]) -> tuple[Activation, ...]:
    """The values that a backward needs of its forward, one record for each op and line."""
    leaves: Any = forward.graph.output_node().args[0]
    saved = {leaf.name: leaf for leaf in leaves[returned:] if isinstance(leaf, Node)}
    made = {node.name: node for node in forward.graph.nodes if node.op == "call_function"}
    rows: dict[tuple[str, str, str, str], list[Node]] = {}
    for node in saved.values():
        if isinstance(node.meta.get("val"), Tensor):
            status = "an input" if _is_of_input(node, _VIEWS) else "saved"
            rows.setdefault((status, _op(node), node_line(node), _why_saved(node)), []).append(node)
    for node in backward.graph.nodes:
        if node.op == "call_function" and node.name in made and node.name not in saved:
            rows.setdefault(("computed again", _op(node), node_line(node), _why_again(node, again)), []).append(node)
    found = [
        Activation("", status, nodes[0].name, op, len(nodes), sum(map(bytes_of, nodes)), why, line)
        for (status, op, line, why), nodes in rows.items()
    ]
    return tuple(sorted(found, key=lambda record: (record.status != "saved", -record.bytes)))


def _op(node: Node) -> str:
    return "input" if _is_of_input(node, _VIEWS) else str(_source(node).target)


def _source(node: Node) -> Node:
    """The call that a part of a result is of."""
    while node.target is operator.getitem and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _is_of_input(node: Node, ops: tuple[Any, ...]) -> bool:
    """Whether a value is an input, seen through these ops."""
    while node.target in ops and isinstance(node.args[0], Node):
        node = node.args[0]
    return node.op == "placeholder"


def _why_saved(node: Node) -> str:
    if _is_of_input(node, _VIEWS):
        return "an input of the model, which is there anyway"
    if node.meta.get(_MARK) == CheckpointPolicy.MUST_SAVE:
        if _is_of_input(node, (aten.clone.default,)):
            return "an input as it was before the forward wrote to it"
        return "the policy of a checkpoint saves it"
    if torch.Tag.nondeterministic_seeded in getattr(_source(node).target, "tags", ()):
        return "random numbers are not drawn twice"
    if _is_of_input(node, (*_VIEWS, *_CASTS)):
        return "an input in another type, which no region makes where it is read"
    return "the cheapest place to cut: what comes before costs more to compute again, or is larger"


_FREE = "a region computes it where it is read"


def _why_again(node: Node, ours: set[str]) -> str:
    if node.name in ours:
        return "it is larger than what it is computed from" if node.target in (*_WIDENING, *_CASTS) else _FREE
    if node.meta.get(_MARK) in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE):
        return "it is in a checkpoint"
    return _FREE
