"""The proof that rows are separate: what it accepts is so, and what is not so it refuses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from graphex.analysis.row_independence import MixedRowsError, Rows
from graphex.torch_private.symbolic import free_symbols

ours = torch.ops.graphex

W, V = torch.randn(6, 5), torch.randn(5, 6)
TABLE = torch.randn(7, 6)


def attention(x):
    q = x.unsqueeze(1)
    return F.scaled_dot_product_attention(q, q, q)


def named_attention(x):
    q = x.unsqueeze(1)
    return torch.ops.graphex.attention(q, q, q, None, 0.5)


def decomposed_attention(x):
    scores = torch.bmm(x, x.transpose(1, 2)) / 2.0
    return torch.bmm(scores.softmax(-1), x)


def rotated(x):
    low, high = x.chunk(2, dim=-1)
    return torch.cat((-high, low), dim=-1) * x


def in_place(x):
    y = x * 2
    y.add_(x).mul_(3)
    return y


def looked_up(x):
    index = (x.sum((1, 2)) > 0).long()
    return F.embedding(index, TABLE), ours.embedding(TABLE, index), TABLE[index]


def fresh(x):
    return x + torch.full((x.shape[0], 1, 1), 3.0), torch.zeros(x.shape[0], 4)


def folded(x):
    """Linear layers of few rows, as a pass joins them with what is around them."""
    q, k = ours.linears(x, [V, V[:3]], [V[:, 0].contiguous(), None])
    (wide,) = ours.rms_norm_linears(x, None, 1e-6, 0.0, True, [V], [None])
    (residual,) = ours.silu_mul_linears(q, wide, [W], [None], x)
    normed, _, _ = ours.add_rms_norm(x, residual, None, 1e-6)
    gated = ours.gated_linears(x, [V, V], [None, V[:, 0].contiguous()])
    normed_gated = ours.rms_norm_gated_linears(x, None, 1e-6, 0.0, True, [V, V], [None, None])
    return k, residual, normed, ours.silu_mul(q, wide), gated + normed_gated


SEPARATE = [
    lambda x: x @ W,
    lambda x: F.linear(x, V, V[:, 0]),
    lambda x: (x.reshape(-1, 6) @ W).reshape(x.shape[0], 4, 5),
    lambda x: x.sum(-1) + x.mean(1)[:, 1:5],
    lambda x: x.amax((1, 2)),
    lambda x: x.softmax(-1).log_softmax(1),
    lambda x: F.layer_norm(x, (6,)) * F.rms_norm(x, (4, 6)),
    lambda x: x.transpose(0, 2).contiguous() * 2,
    lambda x: x.permute(1, 0, 2).sin().reshape(4, -1),
    lambda x: x[:, 1:3].unsqueeze(0).expand(2, -1, -1, -1) * x[:, 0].unsqueeze(1),
    lambda x: x.flatten(1).topk(3).values,
    lambda x: x.argmax(-1),
    lambda x: torch.where(x > 0, x, V[0].view(1, 1, 6)),
    lambda x: (W.t() @ x.reshape(-1, 6).t()).t(),
    lambda x: x.unbind(1)[2],
    lambda x: x.cumsum(1) + x.reshape(-1).reshape(x.shape),
    attention,
    named_attention,
    decomposed_attention,
    rotated,
    in_place,
    looked_up,
    fresh,
    folded,
]


def batch_norm(x):
    return F.batch_norm(x, None, None, training=True)


def written_to_all(x):
    total = torch.zeros(4, 6)
    return total.copy_(x[0]) + 1


def last_row(x):
    return x[-1] + x


def shifted(x):
    return torch.cat((x[1:], x[:1])) + 1


def by_count(x):
    return x * x.shape[0]


def up_to_count(x):
    return x + torch.arange(x.shape[0]).view(-1, 1, 1)


def attended_by_all(x):
    q = x.transpose(0, 1).unsqueeze(0)  # rows are keys
    return torch.ops.graphex.attention(q, q, q, None, 0.5)


def mixed(x):
    return x.transpose(0, 1).reshape(x.shape) + 1


MIXING = [
    lambda x: x - x.mean(0),
    lambda x: x / x.sum(),
    lambda x: x.softmax(0),
    lambda x: x.reshape(-1, 6).t() @ x.reshape(-1, 6),
    lambda x: x.cumsum(0),
    lambda x: x.flip(0),
    lambda x: x.sort(0).values,
    lambda x: x.max(),
    lambda x: x.reshape(6, -1) * 2,
    lambda x: x + torch.rand_like(x),
    lambda x: x[x.sum((1, 2)).argsort()],
    batch_norm,
    written_to_all,
    last_row,
    shifted,
    by_count,
    up_to_count,
    attended_by_all,
    mixed,
    lambda x: ours.rms_norm(x.transpose(0, 2).contiguous(), None, 1e-6)[0],
    lambda x: ours.linears(x.reshape(-1, 6), [V], [None], (x.reshape(-1, 6) @ V.t()).flip(0))[0],
    lambda x: ours.linears(V, [x.reshape(-1, 6)], [None])[0],
]


def rows_of(function):
    """The graph of a function of f32[s, 4, 6], and where its rows are."""
    graphs = []
    fast = torch.compile(function, backend="graphex", options={"post_grad_custom_post_pass": keep_in(graphs)})
    x = torch.randn(5, 4, 6)
    torch._dynamo.mark_dynamic(x, 0)
    fast(x)
    (graph,) = graphs
    values = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    (symbol,) = set().union(*(free_symbols(tuple(value.shape)) for value in values if isinstance(value, torch.Tensor)))
    return graph, Rows(graph, symbol)


def keep_in(graphs):
    def keep(gm, example_inputs, config):
        graphs.append(torch.fx.GraphModule(gm, gm.graph))

    return keep


@pytest.mark.parametrize("function", SEPARATE, ids=lambda f: getattr(f, "__name__", ""))
def test_what_is_separate_is_accepted_and_other_rows_do_not_matter(function):
    graph, rows = rows_of(function)
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    leaves = output.args[0] if isinstance(output.args[0], (list, tuple)) else [output.args[0]]
    x = torch.randn(5, 4, 6)
    more = torch.cat((x, torch.full((3, 4, 6), float("nan"))))
    few, many = (torch.utils._pytree.tree_leaves(function(each)) for each in (x, more))
    for leaf, one, other in zip(leaves, few, many, strict=True):
        place = rows.dims[leaf]
        assert place is not None
        torch.testing.assert_close(other.narrow(place.dim, 0, 5 * place.block), one)


@pytest.mark.parametrize("function", MIXING, ids=lambda f: getattr(f, "__name__", ""))
def test_what_mixes_rows_is_refused_at_a_node(function):
    with pytest.raises(MixedRowsError) as refused:
        rows_of(function)
    assert refused.value.reason
    assert refused.value.node.name
