"""graphex: a torch.compile backend that rewrites graphs, replays them as one device graph, and shows its evidence.

fast = torch.compile(model, backend="graphex")
fast(x)
print(graphex.explain(model, (x,)))
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from graphex import ops as ops  # defines torch.ops.npu.* (where torch_npu does not) and torch.ops.graphex.*
from graphex import scope as scope

if TYPE_CHECKING:
    from graphex.analysis.asynchronous import register_asynchronous, register_keeps_nothing
    from graphex.analysis.inplace_variants import register_inplace_twin
    from graphex.analysis.races import register_core_need
    from graphex.backend import Backend, compile_fx, get_backend, journal
    from graphex.config import CompilerConfig
    from graphex.debug.orders import random_orders
    from graphex.errors import GraphexError, GraphexWarning, InputError, OptionError, PassError, RuleError, StreamError
    from graphex.evidence.explain import Report, explain
    from graphex.fusion.register import node_info, register_replacement, replacement
    from graphex.loops.replayer import replayer
    from graphex.loops.warm_up import warm_up
    from graphex.records import Journal
    from graphex.rewrite.adapter import Rewrite, graph_pass
    from graphex.rewrite.base import GraphPass, Refusal, Work

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "CompilerConfig",
    "GraphPass",
    "GraphexError",
    "GraphexWarning",
    "InputError",
    "Journal",
    "OptionError",
    "PassError",
    "Refusal",
    "Report",
    "Rewrite",
    "RuleError",
    "StreamError",
    "Work",
    "compile_fx",
    "explain",
    "get_backend",
    "graph_pass",
    "journal",
    "node_info",
    "random_orders",
    "register_asynchronous",
    "register_core_need",
    "register_inplace_twin",
    "register_keeps_nothing",
    "register_replacement",
    "replacement",
    "replayer",
    "scope",
    "warm_up",
]

# Public name -> the module it lives in. Loaded on first use: importing graphex must not import Dynamo.
_HOMES = {
    "Backend": "backend",
    "CompilerConfig": "config",
    "GraphPass": "rewrite.base",
    "GraphexError": "errors",
    "GraphexWarning": "errors",
    "InputError": "errors",
    "Journal": "records",
    "OptionError": "errors",
    "PassError": "errors",
    "Refusal": "rewrite.base",
    "Report": "evidence.explain",
    "Rewrite": "rewrite.adapter",
    "RuleError": "errors",
    "StreamError": "errors",
    "Work": "rewrite.base",
    "compile_fx": "backend",
    "explain": "evidence.explain",
    "get_backend": "backend",
    "graph_pass": "rewrite.adapter",
    "journal": "backend",
    "node_info": "fusion.register",
    "random_orders": "debug.orders",
    "register_replacement": "fusion.register",
    "replacement": "fusion.register",
    "register_asynchronous": "analysis.asynchronous",
    "register_core_need": "analysis.races",
    "register_inplace_twin": "analysis.inplace_variants",
    "register_keeps_nothing": "analysis.asynchronous",
    "replayer": "loops.replayer",
    "warm_up": "loops.warm_up",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'graphex' has no attribute '{name}'")
    value = getattr(import_module(f"graphex.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if not entry_points(group="torch_dynamo_backends", name="graphex"):
    # A source tree that is not installed has no entry point: make the name known to torch.compile here.
    from graphex.backend import register

    register()
