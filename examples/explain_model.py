"""Explain a model: which rewrites graphex made, which it refused and why, line by line."""

import torch

import graphex


class Gate(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = torch.nn.Linear(64, 64)

    def forward(self, x):
        h = self.proj(x[:, :])
        gated = torch.sigmoid(h) * h + torch.sigmoid(h)
        return gated, x.clone()


with torch.no_grad():
    report = graphex.explain(Gate(), (torch.randn(8, 64),))

for record in report.journal.rewrites:
    print(f"{record.rule:12} {record.line:60} {record.because}")
for record in report.journal.refusals:
    print(f"refused {record.rule:12} {record.line:52} {record.reason}")

assert report.rule("equal_calls").matched == 1
assert report.rule("plain_copy").near_misses[0].reason
