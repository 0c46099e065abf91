"""Choices that come with graphex, one JSON file for each device they were measured on.

    nvidia-h200.json        {"device": "NVIDIA H200", "choices": {kind: {signature: {"name": ..., "us": {...}}}}}

`python -m graphex.kernels.tuned` writes such a file from what this device's store holds. A choice names a candidate;
one that no longer exists is measured anew.
"""

from __future__ import annotations

from pathlib import Path

from graphex.kernels.tuning_store import Choices, file_name, parsed

HERE = Path(__file__).parent


def shipped(device: str) -> Choices:
    path = HERE / f"{file_name(device)}.json"
    return parsed(path.read_text())[1] if path.exists() else {}
