"""Which libraries of kernels a graph may call: their switches are part of what a captured graph depends on."""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from graphex.analysis.effects import operator_of
from graphex.analysis.launches import does_nothing
from graphex.ops import SPECS

aten = torch.ops.aten

_NOTHING: frozenset[str] = frozenset()
_CUBLAS = frozenset({"cublas"})
_ATTENTION = frozenset({"cublas", "attention"})
_EVERYTHING = frozenset({"cublas", "cudnn", "attention", "linalg"})

_PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm}
_PLAIN = {
    *(aten.sum, aten.mean, aten.amax, aten.amin, aten.argmax, aten.argmin, aten.any, aten.all, aten.cumsum),
    *(aten._softmax, aten._log_softmax, aten.native_layer_norm, aten._fused_rms_norm, aten.topk, aten.sort),
    *(aten.cat, aten.index, aten.index_select, aten.gather, aten.scatter, aten.slice_scatter, aten.constant_pad_nd),
    *(aten.index_put, aten.index_put_, aten.index_copy, aten.index_copy_, aten.embedding),
    *(aten._to_copy, aten.clone, aten.copy, aten.copy_),
    *(aten.full, aten.zeros, aten.ones, aten.empty, aten.empty_strided, aten.arange, aten.scalar_tensor),
}
_ATTENDING = {"graphex::attention", "graphex::rotary_attention_"}


def libraries_of(graph: Graph) -> frozenset[str]:
    """What may compute some of the ops, for all that is known: `cublas`, `cudnn`, `attention` (torch's choice among its
    implementations of it) and `linalg`.
    """
    return _NOTHING.union(*map(_libraries_of, graph.nodes))


def _libraries_of(node: Node) -> frozenset[str]:
    if node.op in ("placeholder", "get_attr", "output") or node.target is operator.getitem:
        return _NOTHING
    op = operator_of(node)
    if op is None:
        return _EVERYTHING
    spec = SPECS.get(op.name().partition(".")[0])
    if spec is not None and spec.defined_here:
        return _ATTENTION if spec.name in _ATTENDING else _CUBLAS
    if op.overloadpacket in _PRODUCTS:
        return _CUBLAS
    is_plain = op.overloadpacket in _PLAIN or does_nothing(node)
    is_atens = op.namespace == "aten" and (op.is_view or torch.Tag.pointwise in op.tags)
    return _NOTHING if is_plain or is_atens else _EVERYTHING
