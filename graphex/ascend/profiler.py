"""`torch_npu.profiler` on torch.profiler: the same blocks, and a trace that TensorBoard and Perfetto open."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

import torch
from torch.profiler import profile as torch_profile
from torch.profiler import schedule

from graphex.errors import GraphexWarning

__all__ = ["profile", "schedule", "tensorboard_trace_handler"]


class ProfilerActivity(Enum):
    CPU = "CPU"
    NPU = "NPU"


class ProfilerLevel(Enum):
    Level_none = "Level_none"
    Level0 = "Level0"
    Level1 = "Level1"
    Level2 = "Level2"


class AiCMetrics(Enum):
    PipeUtilization = "PipeUtilization"
    ArithmeticUtilization = "ArithmeticUtilization"
    Memory = "Memory"
    MemoryL0 = "MemoryL0"
    MemoryUB = "MemoryUB"
    ResourceConflictRatio = "ResourceConflictRatio"
    L2Cache = "L2Cache"
    MemoryAccess = "MemoryAccess"
    AiCoreNone = "AiCoreNone"


class ExportType(Enum):
    Text = "text"
    Db = "db"


class _ExperimentalConfig:
    """Counters of the NPU's cores and caches. They are accepted; there is nothing here to count."""

    def __init__(self, **settings: Any) -> None:
        known = (
            "profiler_level aic_metrics l2_cache op_attr data_simplification record_op_args gc_detect_threshold"
            " msprof_tx mstx export_type host_sys mstx_domain_include mstx_domain_exclude sys_io sys_interconnection"
        )
        for name in settings:
            if name not in known.split():
                raise TypeError(f"_ExperimentalConfig has no setting '{name}'; it has {', '.join(known.split())}.")
        self.settings = settings


class profile(torch_profile):  # noqa: N801  (torch's name)
    """torch.profiler.profile that takes torch_npu's arguments. `step()` after the block does nothing."""

    def __init__(
        self,
        *,
        activities: Iterable[ProfilerActivity] | None = None,
        experimental_config: _ExperimentalConfig | None = None,
        **kwargs: Any,
    ) -> None:
        if experimental_config is not None and experimental_config.settings:
            names = ", ".join(experimental_config.settings)
            warnings.warn(
                f"graphex: the profiler ignores {names}: they count what only an NPU has", GraphexWarning, stacklevel=2
            )
        super().__init__(activities=_activities(activities), **kwargs)
        self._is_running = False

    def start(self) -> None:
        super().start()
        self._is_running = True

    def stop(self) -> None:
        self._is_running = False
        super().stop()

    def step(self) -> None:
        if self._is_running:  # torch's profiler must not be told of steps once it has been stopped
            super().step()


def supported_activities() -> set[ProfilerActivity]:
    return set(ProfilerActivity)


def tensorboard_trace_handler(
    dir_name: str, worker_name: str | None = None, analyse_flag: bool = True, async_mode: bool = False
) -> Callable[[Any], None]:
    """Write `<worker>.<time>.pt.trace.json` to a folder, for TensorBoard, Perfetto and chrome://tracing."""
    handler: Callable[[Any], None] = torch.profiler.tensorboard_trace_handler(dir_name, worker_name)
    return handler


def _activities(given: Iterable[ProfilerActivity] | None) -> list[torch.profiler.ProfilerActivity]:
    """The npu is the GPU where the name is mapped to it, and the CPU where it is simulated."""
    found = {torch.profiler.ProfilerActivity.CPU}
    for activity in ProfilerActivity if given is None else given:
        if not isinstance(activity, ProfilerActivity):
            raise TypeError(f"activities are of torch_npu.profiler.ProfilerActivity, got {activity!r}.")
        if activity is ProfilerActivity.NPU and torch.cuda.is_available():
            found.add(torch.profiler.ProfilerActivity.CUDA)
    return sorted(found, key=str)
