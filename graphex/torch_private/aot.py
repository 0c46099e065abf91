"""AOTAutograd: tracing, partitioning, and what it knows of a graph's inputs."""

from __future__ import annotations

from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._guards import TracingContext

__all__ = [
    "aot_module_simplified",
    "default_partition",
    "min_cut_rematerialization_partition",
    "static_input_indices",
]


def static_input_indices() -> tuple[int, ...]:
    """Inputs of the forward graph being compiled that keep their address: parameters, buffers, marked tensors."""
    context = TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return ()
    return tuple(context.fw_metadata.static_input_indices)
