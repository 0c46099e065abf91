"""Calls that are captured ahead, and calls without Dynamo, on the recording device."""

from __future__ import annotations

from tests.loops.contract import *  # noqa: F403
