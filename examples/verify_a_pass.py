"""A pass with a mistake in it: `verify` finds it, names it, and the model still computes the right thing."""

import warnings

import torch

import graphex

aten = torch.ops.aten


def join_scales(gm):
    """x * a * b as one multiplication. It should multiply a and b, and adds them."""
    for node in list(gm.graph.nodes):
        inner = node.args[0] if node.target is aten.mul.Tensor else None
        if isinstance(inner, torch.fx.Node) and inner.target is aten.mul.Tensor:
            (x, a), b = inner.args, node.args[1]
            if isinstance(a, float) and isinstance(b, float):
                node.args = (x, a + b)


def model(x):
    return torch.softmax(x * 0.125 * 0.5, dim=-1)


options = {"post_grad_custom_post_pass": join_scales, "verify": True}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", graphex.GraphexWarning)
    report = graphex.explain(model, (torch.randn(4, 64),), options=options)

verdict = report.journal.verifications[0]
print(verdict.status, "in pass", verdict.pass_name)
print(verdict.reason)
print("the result is eager's all the same:", report.worst_difference < 1e-6)  # but for rounding
print("warned:", [str(warning.message).split(":")[1].strip() for warning in caught])
print("script:", verdict.repro)
