"""graphex: a torch.compile backend that rewrites graphs, replays them as one device graph, and shows its evidence.

fast = torch.compile(model, backend="graphex")
fast(x)
print(graphex.explain(model, (x,)))
"""

from __future__ import annotations

import os
import sys
import warnings
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphex import config, records

if TYPE_CHECKING:
    from graphex import ops as ops
    from graphex import scope as scope
    from graphex.analysis.asynchronous import register_asynchronous as register_asynchronous
    from graphex.analysis.asynchronous import register_keeps_nothing as register_keeps_nothing
    from graphex.analysis.happens_before import register_core_need as register_core_need
    from graphex.analysis.inplace_variants import register_inplace_variant as register_inplace_variant
    from graphex.backend import Backend as Backend
    from graphex.backend import compile_fx as compile_fx
    from graphex.backend import get_backend as get_backend
    from graphex.backend import journal as journal
    from graphex.config import CompilerConfig as CompilerConfig
    from graphex.debug.orders import random_orders as random_orders
    from graphex.errors import GraphexError as GraphexError
    from graphex.errors import GraphexWarning as GraphexWarning
    from graphex.errors import InputError as InputError
    from graphex.errors import OptionError as OptionError
    from graphex.errors import PassError as PassError
    from graphex.errors import RuleError as RuleError
    from graphex.errors import StreamError as StreamError
    from graphex.evidence.explain import Report as Report
    from graphex.evidence.explain import explain as explain
    from graphex.fusion.register import node_info as node_info
    from graphex.fusion.register import register_replacement as register_replacement
    from graphex.fusion.register import replacement as replacement
    from graphex.loops.decode_loop import decode_loop as decode_loop
    from graphex.loops.generate import GenerationReport as GenerationReport
    from graphex.loops.generate import generate as generate
    from graphex.loops.generate import generation as generation
    from graphex.loops.replayer import replayer as replayer
    from graphex.loops.replayer import warm_up as warm_up
    from graphex.loops.saved import load as load
    from graphex.loops.saved import save as save
    from graphex.loops.train_step import train_step as train_step
    from graphex.records import Journal as Journal
    from graphex.rewrite.adapter import Rewrite as Rewrite
    from graphex.rewrite.adapter import graph_pass as graph_pass
    from graphex.rewrite.base import GraphPass as GraphPass
    from graphex.rewrite.base import Refusal as Refusal
    from graphex.rewrite.base import Work as Work

__version__ = "0.1.0"

# Module -> the public names it holds. They are loaded on first use: importing graphex must not import Dynamo.
_NAMES = {
    "analysis.asynchronous": ("register_asynchronous", "register_keeps_nothing"),
    "analysis.inplace_variants": ("register_inplace_variant",),
    "analysis.happens_before": ("register_core_need",),
    "backend": ("Backend", "compile_fx", "get_backend", "journal"),
    "config": ("CompilerConfig",),
    "debug.orders": ("random_orders",),
    "errors": (
        *("GraphexError", "GraphexWarning", "InputError", "OptionError", "PassError"),
        *("RuleError", "StreamError"),
    ),
    "evidence.explain": ("Report", "explain"),
    "fusion.register": ("node_info", "register_replacement", "replacement"),
    "loops.decode_loop": ("decode_loop",),
    "loops.generate": ("GenerationReport", "generate", "generation"),
    "loops.replayer": ("replayer", "warm_up"),
    "loops.train_step": ("train_step",),
    "loops.saved": ("load", "save"),
    "records": ("Journal",),
    "rewrite.adapter": ("Rewrite", "graph_pass"),
    "rewrite.base": ("GraphPass", "Refusal", "Work"),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(("scope", *_HOMES))
_MODULES = ("ops", "scope")
_RENAMED = {"register_inplace_twin": "register_inplace_variant"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        define()
        return import_module(f"graphex.{name}")
    if name in _RENAMED:
        warnings.warn(f"graphex.{name} is now graphex.{_RENAMED[name]}.", DeprecationWarning, stacklevel=2)
        return getattr(import_module("graphex"), _RENAMED[name])
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'graphex' has no attribute '{name}'")
    define()
    value = getattr(import_module(f"graphex.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


def _check_form(_: config.Passes, custom: Any) -> None:
    """Refuse a custom pass that has none of the forms of a pass."""
    from graphex.rewrite.adapter import as_graph_pass

    as_graph_pass(custom)


def _write_report(journal: Journal, compile_id: str, path: Path) -> None:
    """Write the HTML report on the graphs of one compilation."""
    from graphex.evidence.report.data import report_data
    from graphex.evidence.report.page import write_page

    write_page(report_data(f"compilation {compile_id}", [journal], compile_id=compile_id), path)


# A lower room imports nothing from a higher one: this module, above all rooms, gives it the functions it needs.
config.Passes.check_form = _check_form
records.Journal.write_report = _write_report


@cache
def define() -> None:
    """Define torch.ops.graphex.* and, where torch_npu does not, torch.ops.npu.*. Importing graphex does it.

    A source tree that is not installed has no entry point: the name is made known to torch.compile here.
    """
    from importlib.metadata import entry_points

    import_module("graphex.ops")
    import_module("graphex.scope")
    if not entry_points(group="torch_dynamo_backends", name="graphex"):
        from graphex.backend import register

        register()


def _is_command() -> bool:
    """Whether this process is the command `graphex`, which imports torch (2 s) when a command needs it."""
    if "torch" in sys.modules:
        return False
    if sys.argv[:1] == ["-m"]:  # while Python looks for the module to run
        return "-m" in sys.orig_argv and sys.orig_argv[sys.orig_argv.index("-m") + 1 :][:1] == ["graphex"]
    started = Path(sys.argv[0] if sys.argv else "")
    return started.stem == "graphex" and _folder(started) == _folder(Path(sys.executable))


def _folder(file: Path) -> str:
    """By its plain name: a shell that was given `../.venv/bin/graphex` hands over just that."""
    return os.path.normpath(file.absolute().parent)


if not _is_command():
    define()
