"""Choices that come with graphex, one JSON file for each device they were measured on.

    nvidia-h200.json        {"device": "NVIDIA H200", "choices": {kind: {signature: {"name": ..., "us": {...}}}}}

`python -m graphex.kernels.tuned` writes such a file from what this device's store holds. A choice names a candidate;
one that no longer exists is measured anew (`graphex.kernels.tuning.shipped`).
"""
