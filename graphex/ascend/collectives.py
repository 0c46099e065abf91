"""The process-group backends `hccl` and `npu`: gloo on the host memory behind simulated tensors, nccl on a GPU.

    torch.distributed.init_process_group("hccl")        as in a script for Ascend

A collective on tensors of the simulated npu is the same collective on their host memory: nothing is copied, and what
gloo cannot do fails as gloo says. Process groups are torch's own, so torch traces collectives in compiled functions.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from graphex.ascend.simulated import KEY, NOT_TRACED, run_on_host
from graphex.torch_private.dynamo import disable

NAMES = ("hccl", "npu")

_OPS = (
    "_allgather_base_ _reduce_scatter_base_ allgather_ allgather_coalesced_ allgather_into_tensor_coalesced_ allreduce_"
    " allreduce_coalesced_ alltoall_ alltoall_base_ barrier broadcast_ gather_ recv_ recv_any_source_ reduce_"
    " reduce_scatter_ reduce_scatter_tensor_coalesced_ scatter_ send"
)
_libraries: list[torch.library.Library] = []


def install(target: torch.device | None) -> None:
    """Register the names, with what the device behind "npu" has; None is the simulated one."""
    if not dist.is_available():
        return
    if target is None:
        _run_on_host()
    devices = ["npu", "cpu"] if target is None or target.type == "cpu" else ["npu", target.type]
    for name in NAMES:
        if not hasattr(dist.Backend, name.upper()):
            dist.Backend.register_backend(name, _creator(target), devices=devices)


def _creator(target: torch.device | None) -> Any:
    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        if target is not None and target.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return dist.ProcessGroupNCCL(store, rank, size, options)
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    return create


def _run_on_host() -> None:
    """Let every collective op relabel its tensors; torch's own kernels for the key look for a backend in C++."""
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        for name in _OPS.split():
            packet = getattr(torch.ops.c10d, name, None)
            if packet is not None:  # not every version of torch has all of them
                library.impl(name, disable(partial(run_on_host, packet.default), NOT_TRACED), KEY, allow_override=True)
    _libraries.append(library)
