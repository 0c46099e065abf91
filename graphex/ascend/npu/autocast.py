"""`torch.autocast("npu")`: that of the device which "npu" stands for; the simulated device has none, and says so."""

from __future__ import annotations

import functools
from typing import Any

import torch

from graphex.errors import NotOfferedError


def install_autocast(target: torch.device | None) -> None:
    """Without a target, switching it off (as models do around float32 parts) is all there is."""
    begin = torch.autocast.__init__

    @functools.wraps(begin)
    def init(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        if device_type == "npu" and target is not None:
            device_type = target.type
        elif device_type == "npu" and enabled:
            raise NotOfferedError(
                "torch.autocast('npu') is not offered on the simulated npu: convert the model, or use --device cuda."
            )
        begin(self, device_type, dtype, enabled, cache_enabled)

    torch.autocast.__init__ = init  # type: ignore[method-assign]
