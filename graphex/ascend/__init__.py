"""Ascend scripts on other devices: `serve` offers `torch_npu`, `torchair`, `npugraph_ex`, `torch.npu` to this process.

Where the real packages are installed nothing is replaced. The environment variable GRAPHEX_NPU says what the device
"npu" is: `simulated` (its memory is the host's; the default), `cuda` or `cpu`. `graphex run script.py` does the same
for a script that does not call `serve`.

Read `catalogue` first: the table of all names, with the place each is served from. `install` makes modules of it;
`api` and `config` hold what torchair and npugraph_ex offer, `cached` their `cache_compile`, `npu_module` holds
`torch.npu`. The device itself is `simulated`, with its process groups, or `install` maps it to one that exists.
"""

from __future__ import annotations


def serve(device: str | None = None) -> None:
    """Serve what is not installed, for the life of the process. `device` says what "npu" is, before GRAPHEX_NPU."""
    from graphex.ascend.install import install

    install(device)
