"""explain: compile a model, run it on copies of the inputs, and say what happened to it.

    report = graphex.explain(model, (x,))
    print(report)                       # passes, rewrites, refusals with the user's source lines, captures
    report.rule("full_slice").matched   # 3
    report.to_json()
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graphex.backend import get_backend
from graphex.errors import InputError
from graphex.evidence.tensors import clone_together
from graphex.records import Journal, Refused, Rewrote

WIDTH = 118
SHOWN = 12  # rewrites and refusals printed in full; the JSON has all of them


@dataclass(frozen=True)
class RuleSummary:
    """How one rewrite rule did: where it was applied and where it was refused."""

    name: str
    rewrites: tuple[Rewrote, ...]
    near_misses: tuple[Refused, ...]

    @property
    def matched(self) -> int:
        return len(self.rewrites)


class Report:
    """What `explain` found. Prints as tables, serialises to JSON, and keeps both results for comparison."""

    def __init__(self, name: str, journal: Journal, outputs: Any, eager_outputs: Any, calls: int) -> None:
        self.name = name
        self.journal = journal
        self.outputs = outputs
        self.eager_outputs = eager_outputs
        self.calls = calls

    def rule(self, name: str) -> RuleSummary:
        """The record of one rule; a rule that found nothing has empty ones."""
        rewrites = tuple(record for record in self.journal.rewrites if record.rule == name)
        refusals = tuple(record for record in self.journal.refusals if record.rule == name)
        return RuleSummary(name, rewrites, refusals)

    @property
    def worst_difference(self) -> float:
        """The largest difference between a result of eager and the same result compiled."""
        pairs = zip(pytree.tree_leaves(self.outputs), pytree.tree_leaves(self.eager_outputs), strict=True)
        return max((_difference(ours, theirs) for ours, theirs in pairs), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.name,
            "calls": self.calls,
            "worst_difference": self.worst_difference,
            **self.journal.to_dict(),
        }

    def to_json(self, indent: int | None = 2) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=WIDTH)
        for part in _tables(self):
            console.print(part)
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        return text.rstrip()

    __repr__ = __str__


def explain(
    model: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    options: Any = None,
    calls: int = 3,
) -> Report:
    """Compile `model`, call it `calls` times on copies of the inputs, and report.

    The model's buffers and gradients are left as they were. With gradients enabled, the backward is compiled too.
    """
    if not callable(model):
        raise InputError(f"explain takes a module or a function, got {type(model).__name__}.")
    if not isinstance(args, (tuple, list)):
        raise InputError(f"args must be a tuple of the model's arguments, got {type(args).__name__}; write (x,).")
    if not isinstance(calls, int) or isinstance(calls, bool) or calls < 1:
        raise InputError(f"calls must be a positive number, got {calls!r}.")
    model = getattr(model, "_orig_mod", model)
    backend = get_backend(options)
    compiled = torch.compile(model, backend=backend)
    inputs = (tuple(args), dict(kwargs or {}))
    with _restored(model), torch.random.fork_rng(devices=_devices(inputs)):
        seed = torch.initial_seed()
        eager = _call(model, inputs, seed)
    with _restored(model), torch.random.fork_rng(devices=_devices(inputs)), _room_to_recompile():
        outputs = _call(compiled, inputs, seed)
        for _ in range(calls - 1):
            _call(compiled, inputs, seed)
    return Report(_name(model), backend.journal, outputs, eager, calls)


def _call(model: Callable[..., Any], inputs: Any, seed: int) -> Any:
    """One call on copies; where gradients flow, the backward too, without touching anybody's `.grad`."""
    flat, spec = pytree.tree_flatten(inputs)
    copies = clone_together(flat)
    args, kwargs = pytree.tree_unflatten(copies, spec)
    torch.manual_seed(seed)
    result = model(*args, **kwargs)
    differentiable = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    parameters = list(model.parameters()) if isinstance(model, torch.nn.Module) else []
    wanted = [leaf for leaf in [*parameters, *copies] if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if differentiable and wanted:
        loss = torch.stack([leaf.float().abs().sum() for leaf in differentiable]).sum()
        torch.autograd.grad(loss, wanted, allow_unused=True)
    return pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, result)


@contextmanager
def _restored(model: Callable[..., Any]) -> Iterator[None]:
    """Put the buffers back as they were: a batch norm, or a cache, must not notice."""
    buffers = list(model.buffers()) if isinstance(model, torch.nn.Module) else []
    saved = [buffer.detach().clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, saved, strict=True):
                buffer.copy_(value)


@contextmanager
def _room_to_recompile() -> Iterator[None]:
    """Every report compiles anew; torch's limit is meant for one program that recompiles by accident."""
    import torch._dynamo.config

    with torch._dynamo.config.patch(recompile_limit=1024, accumulated_recompile_limit=4096):
        yield


def _devices(inputs: Any) -> list[int]:
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.is_cuda]
    return sorted({tensor.get_device() for tensor in tensors})


def _difference(ours: Any, theirs: Any) -> float:
    if not (isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor)):
        return 0.0
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return float("inf")
    if not ours.numel() or ours.layout != torch.strided:
        return 0.0
    gap = (ours.to(torch.complex128) - theirs.to(torch.complex128)).abs()
    both_nan = ours.isnan() & theirs.isnan() if ours.is_floating_point() else torch.zeros_like(gap, dtype=torch.bool)
    same = both_nan | (ours == theirs)
    return float(gap.masked_fill(same, 0.0).nan_to_num(nan=float("inf")).max())


def _name(model: Callable[..., Any]) -> str:
    return type(model).__name__ if isinstance(model, torch.nn.Module) else getattr(model, "__name__", "function")


# -- the printed form ----------------------------------------------------------------------------------------------


def _tables(report: Report) -> Iterator[Any]:
    journal = report.journal
    yield f"[bold]graphex explain: {report.name}[/]   {report.calls} calls, largest difference from eager {report.worst_difference:.3g}"
    yield _graphs(journal)
    yield _passes(journal)
    if journal.rewrites:
        yield _rules(journal)
    if journal.refusals:
        yield _refusals(journal)
    yield _running(journal)
    for verdict in journal.verifications:
        blame = f" in pass '{verdict.pass_name}'" if verdict.pass_name else ""
        yield f"verified {verdict.graph}: {verdict.status}{blame} {verdict.reason} (against {verdict.reference or 'nothing'})"


def _table(title: str, *columns: str) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _graphs(journal: Journal) -> Any:
    table = _table("graphs", "graph", "phase", "nodes", "inputs", "outputs", "devices")
    for graph in journal.graphs:
        sizes = map(str, (graph.nodes, graph.inputs, graph.outputs))
        table.add_row(graph.graph, graph.phase, *sizes, ", ".join(graph.devices))
    return table


def _passes(journal: Journal) -> Any:
    table = _table("passes", "graph", "stage", "pass", "status", "nodes", "ms", "what changed")
    for ran in journal.passes:
        changes = [f"-{count} {name}" for name, count in ran.removed.items()]
        changes += [f"+{count} {name}" for name, count in ran.added.items()]
        nodes = f"{ran.nodes_before} -> {ran.nodes_after}" if ran.nodes_before != ran.nodes_after else str(ran.nodes_after)
        what = ", ".join(changes[:4]) + (" ..." if len(changes) > 4 else "") or ran.reason
        table.add_row(ran.graph, ran.stage, ran.name, ran.status, nodes, f"{ran.seconds * 1000:.1f}", what)
    return table


def _rules(journal: Journal) -> Any:
    table = _table("rewrites", "rule", "made", "refused", "for example", "because")
    made = Counter(record.rule for record in journal.rewrites)
    refused = Counter(record.rule for record in journal.refusals)
    first = {record.rule: record for record in reversed(journal.rewrites)}
    for rule, count in made.most_common():
        example = first[rule]
        where = example.line or ", ".join(example.nodes)
        table.add_row(rule, str(count), str(refused[rule]), where, example.because)
    return table


def _refusals(journal: Journal) -> Any:
    table = _table("refused", "rule", "node", "reason", "line")
    for record in journal.refusals[:SHOWN]:
        table.add_row(record.rule, record.node, record.reason, record.line)
    if len(journal.refusals) > SHOWN:
        table.add_row("", "", f"... and {len(journal.refusals) - SHOWN} more in the JSON", "")
    return table


def _running(journal: Journal) -> Any:
    table = _table("running", "graph", "calls", "captured", "replayed", "remark")
    reasons = {record.graph: f"{record.what}: {record.reason}" for record in journal.fallbacks}
    for graph in journal.graphs:
        if graph.phase == "joint":
            continue
        counts = journal.counts.get(graph.graph, Counter())
        captured = counts["captured"] + counts["recaptured"]
        calls = counts["calls"] - captured + counts["replays"]  # a capture runs the program once without computing
        remark = reasons.get(graph.graph) or ("" if captured else "straight-line code; no device graph")
        table.add_row(graph.graph, str(calls), str(captured), str(counts["replays"]), remark)
    return table
