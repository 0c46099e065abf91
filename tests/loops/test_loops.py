"""Calls that are captured ahead, and calls without Dynamo, on the recording device."""

from __future__ import annotations

import torch

import graphex
from tests.loops.contract import *  # noqa: F403


@torch.no_grad()
def test_the_bar_of_warm_up_is_the_only_one_and_says_what_is_compiled(tape, monkeypatch, capsys):
    monkeypatch.setenv("GRAPHEX_REGIONS", "on")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the captured stderr for a terminal
    run = torch.compile(lambda x: (x.sin() + x.cos()).exp() * 2, backend="graphex")
    graphex.warm_up(run, [(torch.ones(64),)], progress=True)
    shown = capsys.readouterr().err
    assert "compiling region 1 of 1" in shown
    assert "graphex: compiling" not in shown  # the line of a process without a bar
