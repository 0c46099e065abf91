"""The steady state of a replay: how many Python frames a call costs, and which programs get that far."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import graphex
from tests.harness.capture import compile_it, count, replays, same


def frames_of(call: Callable[[], object]) -> list[str]:
    """The functions of graphex's that a call enters, in order."""
    found: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and "/graphex/runtime/" in frame.f_code.co_filename:
            found.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


@torch.no_grad()
def test_a_replay_enters_these_functions_and_no_other(in_cpp, where):
    model = nn.Linear(4, 4).to(where)
    compiled = compile_it(model)
    x = torch.randn(2, 4, device=where)
    for _ in range(5):
        compiled(x)
    found = frames_of(lambda: compiled(x))
    assert [name for name in found if name != "<lambda>"] == ["forward", "replayed", "replay", "take"]
    assert found.count("<lambda>") <= 1  # the results need no input


@torch.no_grad()
def test_a_verified_program_is_replayed_past_the_wrapper_too(where):
    model = nn.Linear(4, 4).to(where)
    compiled = compile_it(model, verify=True)
    for _ in range(6):
        x = torch.randn(2, 4, device=where)
        same(compiled(x), model(x))
    assert graphex.journal(compiled).of(graphex.records.Verified)[0].status == "equal"
    assert count(compiled, "straight") == replays(compiled) - 1
