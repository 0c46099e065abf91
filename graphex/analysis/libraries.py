"""Which libraries of kernels a graph may call: their switches are part of what a captured graph depends on."""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from graphex.analysis.effects import operator_of
from graphex.ops import SPECS

aten = torch.ops.aten

_WITHOUT_CUDNN = {
    *(aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.embedding),
    *(aten.sum, aten.mean, aten.amax, aten.amin, aten.argmax, aten.argmin, aten.any, aten.all, aten.cumsum),
    *(aten._softmax, aten._log_softmax, aten.native_layer_norm, aten._fused_rms_norm, aten.topk, aten.sort),
    *(aten.cat, aten.index, aten.index_select, aten.gather, aten.scatter, aten.slice_scatter, aten.constant_pad_nd),
    *(aten.index_put, aten.index_put_, aten.index_copy, aten.index_copy_),
    *(aten._to_copy, aten.clone, aten.copy, aten.copy_),
    *(aten.full, aten.zeros, aten.ones, aten.empty, aten.empty_strided, aten.arange, aten.scalar_tensor),
}


def may_use_cudnn(graph: Graph) -> bool:
    """Whether cuDNN may compute an op (convolutions, recurrences, norms of batches ...), for all that is known."""
    return not all(map(_is_without_cudnn, graph.nodes))


def _is_without_cudnn(node: Node) -> bool:
    if node.op in ("placeholder", "get_attr", "output") or node.target is operator.getitem:
        return True
    op = operator_of(node)
    if op is None:
        return False
    spec = SPECS.get(op.name().partition(".")[0])
    if spec is not None and spec.defined_here:
        return True
    is_atens = op.namespace == "aten" and (op.is_view or torch.Tag.pointwise in op.tags)
    return is_atens or op.overloadpacket in _WITHOUT_CUDNN
