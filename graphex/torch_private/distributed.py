"""DistributedDataParallel: calls whose gradients are not accumulated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.parallel import DistributedDataParallel

_UNTOUCHED = ("require_backward_grad_sync", "require_forward_param_sync", "_static_graph_delay_allreduce_enqueued")


@contextmanager
def without_reducing(module: object) -> Iterator[None]:
    """Calls of a DistributedDataParallel that nobody calls `backward` on: they are none of its iterations.

    `no_sync` alone would do for most. But the call after it does not broadcast buffers, and with `static_graph=True`
    the first call of all is the one in which gradients are reduced late.
    """
    if not isinstance(module, DistributedDataParallel):
        yield
        return
    state = vars(module)
    kept = {name: state[name] for name in _UNTOUCHED if name in state}
    state["require_backward_grad_sync"] = False
    if module.static_graph:
        state["_static_graph_delay_allreduce_enqueued"] = True
    try:
        yield
    finally:
        state.update(kept)
