"""Write a fusion rule, and see where it applied and where it did not: add and norm become one op."""

import torch

import graphex

npu = torch.ops.npu


def search(x1, x2, gamma, eps):
    x = x1 + x2
    y, _ = npu.npu_rms_norm(x, gamma, eps)
    return y, x


def replace(x1, x2, gamma, eps):
    y, _, x = npu.npu_add_rms_norm(x1, x2, gamma, eps)
    return y, x


def is_wide_enough(match):
    width = match.kwargs["x1"].meta["val"].shape[-1]
    return width >= 64 or graphex.Refusal(f"rows of {width} are too short to be worth it", match.nodes[0])


example_inputs = (torch.randn(2, 64), torch.randn(2, 64), torch.randn(64), 1e-6)


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gamma = torch.nn.Parameter(torch.ones(width))

    def forward(self, x, carried):
        x = x + carried
        first, _ = npu.npu_rms_norm(x, self.gamma)
        second, _ = npu.npu_rms_norm((x * 2).half().float(), self.gamma, 1e-5)
        return first, second


with graphex.register_replacement(search, replace, example_inputs, extra_check=is_wide_enough, name="add_norm"):
    for width in (64, 16):
        inputs = torch.randn(4, width), torch.randn(4, width)
        with torch.no_grad():
            journal = graphex.explain(Block(width), inputs).journal
        print(f"width {width}:", *[f"{r.rule} fused {r.matches} of {r.candidates}" for r in journal.rules])
        for miss in journal.near_misses:
            print(f"  matched {miss.matched} of {miss.ops} ops: {miss.reason}")
        for refusal in journal.refusals:
            print(f"  refused: {refusal.reason}")
