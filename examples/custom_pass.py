"""Write a pass, hand it to graphex, and see what it did: x ** 2 becomes x * x."""

import torch

import graphex

aten = torch.ops.aten


def square_by_multiplying(gm, example_inputs, config):
    for node in list(gm.graph.nodes):
        if node.target is aten.pow.Tensor_Scalar and node.args[1] == 2:
            with gm.graph.inserting_before(node):
                product = gm.graph.call_function(aten.mul.Tensor, (node.args[0], node.args[0]))
            node.replace_all_uses_with(product)
            gm.graph.erase_node(node)


class RMSNorm(torch.nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


options = {"post_grad_custom_pre_pass": square_by_multiplying, "verify": True}
report = graphex.explain(RMSNorm(), (torch.randn(4, 64),), options=options)

ran = report.journal.passes[0]
print(ran.stage, ran.name, ran.status, "removed", ran.removed, "added", ran.added)
print("verified:", report.journal.verifications[0].status)
