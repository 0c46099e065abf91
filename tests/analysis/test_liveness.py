"""When values die."""

from __future__ import annotations

import torch
from torch.fx import symbolic_trace

from graphex.analysis import last_uses


def deaths(fn) -> dict[str, list[str]]:
    return {node.name: [value.name for value in dying] for node, dying in last_uses(symbolic_trace(fn).graph).items()}


def test_a_value_dies_at_its_last_use():
    def fn(x):
        a = torch.sin(x)
        b = torch.cos(a)
        return torch.add(a, b)

    assert deaths(fn) == {"sin": ["x"], "add": ["sin", "cos"]}


def test_a_value_that_nobody_uses_dies_where_it_is_defined():
    def fn(x):
        torch.sin(x)
        return torch.cos(x)

    assert deaths(fn) == {"sin": ["sin"], "cos": ["x"]}


def test_what_is_returned_never_dies():
    def fn(x):
        a = torch.sin(x)
        return a, torch.cos(a), x

    assert deaths(fn) == {}


def test_an_unused_input_dies_at_once():
    assert deaths(lambda x, y: torch.sin(x)) == {"y": ["y"], "sin": ["x"]}


def test_an_argument_used_twice_dies_once():
    assert deaths(lambda x: torch.add(x, x)) == {"add": ["x"]}


def test_values_in_lists_and_keywords_count_as_used():
    def fn(x):
        a, b = torch.sin(x), torch.cos(x)
        c = torch.cat([a, x])
        return torch.add(c, other=b)

    assert deaths(fn) == {"cat": ["x", "sin"], "add": ["cos", "cat"]}
