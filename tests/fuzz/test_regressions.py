"""Programs that once failed, shrunk. Each is kept in its printed form, under the sentence that says what went wrong."""

from __future__ import annotations

import pytest

from tests.fuzz.check import check_source, in_regions

FAILED_ONCE: dict[str, str] = {
    "a dropped copy of a window was written over a window that overlaps it": """
def inputs(n):
    a = numbers(n, 3)
    b = a.view(-1)
    return [a, b]


def model(a, b):
    b[1:] = b[:-1].clone()
    return [a.sum()]


DYNAMIC = False
""",
    "an op that writes complex numbers was not unwrapped and undid the whole pass": """
def inputs(n):
    a = torch.complex(numbers(n, 3), numbers(n, 3, seed=1))
    b = numbers(n, 3, seed=1)
    return [a, b]


def model(a, b):
    ops.bump_all([a[1:][:1], b[1:][:1]], 1.0)
    return [b]


DYNAMIC = False
""",
    "a custom op found its window from the start of the memory of an input that begins later": """
def inputs(n):
    a = numbers(2, n, 3)[1]
    b = numbers(n, 3)
    return [a, b]


def model(a, b):
    a.index_fill_(0, torch.tensor([1, 0]), 2)
    ops.swap(a.t(), b.t())
    return [b]


DYNAMIC = False
""",
    "a copy was dropped although a custom op counts from the start of its memory": """
def inputs(n):
    b = numbers(2, n, 3)[1]
    c = numbers(n, 3, seed=1)
    return [b, c]


def model(b, c):
    v0 = b.clone()
    ops.bump_all([c[:], v0[:]], 1.0)
    return [v0]


DYNAMIC = False
""",
    "a reused buffer began elsewhere than the fresh one that as_strided was told about": """
def inputs(n):
    a = numbers(n, 3)
    return [a]


def model(a):
    v0 = (a * 2)[1:]
    v1 = v0 + 1
    return [v1.as_strided((2, 2), (2, 1), 0) * 2]


DYNAMIC = False
""",
    "an arrangement was tried on strides that do not allow it, and the whole pass was rolled back": """
def inputs(n):
    d = numbers(n, 3, seed=1)
    return [d]


def model(d):
    v1 = d.view(3, -1)
    v1.t().mul_(2)
    return [v1]


DYNAMIC = False
""",
    "a copy that keeps its place in memory was dropped, and an output began at another place of its input": """
def inputs(n):
    a = numbers(n, 3, seed=1)
    d = a[2:]
    return [a, d]


def model(a, d):
    d.t().copy_(torch.where(d.t() > 0, d.t(), d.t().clone()))
    v1 = d.view(d.shape)
    return [v1]


DYNAMIC = True
""",
    "dropout of nothing hands back its argument, and the alias made of it was dropped": """
def inputs(n):
    a = numbers(n, 3)[:0]
    return [a]


def model(a):
    return [torch.nn.functional.dropout(a, 0.5).detach()]


DYNAMIC = False
""",
    "the fake of zero in torch 2.11 forgets the strides, and a scatter over all was taken for what it scatters": """
def inputs(n):
    a = numbers(n, 3, seed=5).t()
    return [a]


def model(a):
    v0 = torch.bernoulli(torch.sigmoid(a))
    a.unsqueeze(0).zero_()
    return [torch.slice_scatter(v0, a * 2, 0, 0, v0.shape[0]) + 1]


DYNAMIC = False
""",
    "dropout of nothing hands back its argument, and a sum was computed in that": """
def inputs(n):
    a = numbers(0, 3)
    return [a]


def model(a):
    return [torch.nn.functional.dropout(a, 0.5) ** 1 + a, torch.nn.functional.dropout(a, 0.5).clone() + 1]


DYNAMIC = False
""",
}


FAILED_ONCE_IN_REGIONS: dict[str, str] = {
    "a region took 2 * s rows, and nothing said what s is": """
def inputs(n):
    a = numbers(n, 3, dtype=torch.float64, seed=3)
    b = numbers(n, 3, dtype=torch.bfloat16)
    return [a, b]


def model(a, b):
    v1, v2 = ops.mix(b * 2, b + 1, a)[:2]
    v4 = torch.cat([v1 * 2, a + 1], 0)
    return [(v4 * 2).bfloat16().float().double()]


DYNAMIC = True
""",
    "what reads a buffer was moved behind the write to it, and all regions were lost": """
def inputs(n):
    a = numbers(n, 3)
    b = numbers(n, 3, seed=1)
    return [a, b]


def model(a, b):
    v0 = torch.sin(b) * 2
    ops.bump(b, 1.0)
    return [(v0 + b).exp() * 2]


DYNAMIC = False
""",
}


@pytest.mark.parametrize("sentence", FAILED_ONCE)
def test_a_program_that_failed_once(sentence):
    verdict = check_source(FAILED_ONCE[sentence])
    assert not verdict.failed, verdict.detail


@pytest.mark.parametrize("sentence", FAILED_ONCE_IN_REGIONS)
def test_a_program_that_failed_once_in_regions(sentence):
    with in_regions():
        verdict = check_source(FAILED_ONCE_IN_REGIONS[sentence])
    assert not verdict.failed, verdict.detail
