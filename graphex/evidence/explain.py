"""explain: compile a model, run it on copies of the inputs, and say what happened to it.

report = graphex.explain(model, (x,))
print(report)                       # passes, rewrites, refusals with the user's source lines, captures
report.rule("full_slice").matched   # 3
report.to_json()
report.save("report.html")          # the graphs, pass by pass, in one file for a browser
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from graphex.backend import get_backend
from graphex.errors import InputError, did_you_mean
from graphex.evidence.kernels import KernelRow, kernel_rows
from graphex.evidence.report.film import Film
from graphex.evidence.tensors import clone_together
from graphex.folders import path_of_rank, write_named
from graphex.pipeline import rule_names
from graphex.records import Journal, NearMiss, Refused, Rewrote
from graphex.torch_private.distributed import without_reducing
from graphex.torch_private.dynamo import room_to_recompile
from graphex.torch_private.trees import pytree


@dataclass(frozen=True)
class RuleSummary:
    """How one rewrite rule did: where it was applied, and where it was refused or did not match to the end."""

    name: str
    rewrites: tuple[Rewrote, ...]
    near_misses: tuple[Refused | NearMiss, ...]

    @property
    def matched(self) -> int:
        return len(self.rewrites)


class Report:
    """What `explain` found. Prints as tables, serialises to JSON, and keeps both results for comparison."""

    def __init__(
        self, name: str, journal: Journal, rules: Collection[str], outputs: Any, eager_outputs: Any, calls: int
    ) -> None:
        self.name = name
        self.journal = journal
        self._rules = rules
        self.outputs = outputs
        self.eager_outputs = eager_outputs
        self.calls = calls

    def rule(self, name: str) -> RuleSummary:
        """The record of one rule; a rule that found nothing has an empty one."""
        rewrites = tuple(record for record in self.journal.rewrites if record.rule == name)
        refusals = tuple(record for record in self.journal.refusals if record.rule == name)
        misses = tuple(record for record in self.journal.near_misses if record.rule == name)
        if not (rewrites or refusals or misses):
            self._check_rule(name)
        return RuleSummary(name, rewrites, refusals + misses)

    def _check_rule(self, name: str) -> None:
        """Refuse a name that nothing answers to: a test of "this did not fuse" would hold for ever."""
        if name in self._rules:
            return
        hint = did_you_mean(name, self._rules, "`graphex rules` lists those that there are", most=3)
        raise InputError(f"there is no rule {name!r} ({hint}).")

    @property
    def kernels(self) -> list[KernelRow]:
        """Which kernel runs for each op on a GPU, how it was chosen, and what it was measured against."""
        return kernel_rows(self.journal)

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
            "kernels": [asdict(row) for row in self.kernels],
            **self.journal.to_dict(),
        }

    def to_json(self, indent: int | None = 2) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    def summary(self) -> str:
        """What happened, in a few sentences."""
        return "\n".join(sentence["text"] for sentence in self._data()["summary"])

    def save(self, path: str | Path) -> Path:
        """Write the report: as a page for a browser (`.html`), or as the data behind it (`.json`). Returns its path.

        Where there are several ranks, the rank goes into the name.
        """
        from graphex.evidence.report.page import write_page

        target = path_of_rank(Path(path))
        if target.suffix not in (".html", ".json"):
            raise InputError(f"save writes .html or .json, got '{target.name}'; write save('report.html').")
        if not target.parent.is_dir():
            raise InputError(f"'{target.parent}' is no directory. Make it first, or save elsewhere.")
        if target.suffix == ".html":
            return write_page(self._data(), target)
        write_named(target, json.dumps(self._data()))
        return target

    def _data(self) -> dict[str, Any]:
        from graphex.evidence.report.model import report_data

        difference = self.worst_difference
        worst = difference if math.isfinite(difference) else str(difference)
        return report_data(self.name, [self.journal], calls=self.calls, worst_difference=worst)

    def __str__(self) -> str:
        from graphex.evidence.tables import printed

        title = f"graphex explain: {self.name}   {self.calls} calls, largest difference from eager"
        return printed(f"{title} {self.worst_difference:.3g}", self.journal)

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
    if not isinstance(kwargs, (Mapping, type(None))):
        raise InputError(f"kwargs must be a dictionary of the model's keyword arguments, got {type(kwargs).__name__}.")
    if not isinstance(calls, int) or isinstance(calls, bool) or calls < 1:
        raise InputError(f"calls must be a positive number, got {calls!r}.")
    model = getattr(model, "_orig_mod", model)
    backend = get_backend(options)
    backend.journal.film = Film()
    compiled = torch.compile(model, backend=backend)
    inputs = (tuple(args), dict(kwargs or {}))
    with _restored(model), torch.random.fork_rng(devices=_devices(inputs)):
        seed = torch.initial_seed()
        eager = _call(model, inputs, seed)
    with _restored(model), torch.random.fork_rng(devices=_devices(inputs)), room_to_recompile():
        outputs = _call(compiled, inputs, seed)
        for _ in range(calls - 1):
            _call(compiled, inputs, seed)
    return Report(_name(model), backend.journal, rule_names(backend.config), outputs, eager, calls)


def _call(model: Callable[..., Any], inputs: Any, seed: int) -> Any:
    """One call on copies; where gradients flow, the backward too, without touching anybody's `.grad`."""
    flat, spec = pytree.tree_flatten(inputs)
    copies = clone_together(flat)
    args, kwargs = pytree.tree_unflatten(copies, spec)
    torch.manual_seed(seed)
    with without_reducing(getattr(model, "_orig_mod", model)):
        result = model(*args, **kwargs)
    differentiable = [
        leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    parameters = list(model.parameters()) if isinstance(model, torch.nn.Module) else []
    wanted = [leaf for leaf in [*parameters, *copies] if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if differentiable and wanted:
        loss = torch.stack([leaf.float().abs().sum() for leaf in differentiable]).sum()
        torch.autograd.grad(loss, wanted, allow_unused=True)
    return pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, result)


@contextmanager
def _restored(model: Callable[..., Any]) -> Iterator[None]:
    """Put buffers and tensor attributes back as they were, contents included: a batch norm must not notice."""
    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    places = [place for module in modules for place in (module._buffers, module.__dict__)]
    held = [{name: value for name, value in place.items() if isinstance(value, torch.Tensor)} for place in places]
    contents = [{name: value.detach().clone() for name, value in tensors.items()} for tensors in held]
    try:
        yield
    finally:
        with torch.no_grad():
            for place, tensors, values in zip(places, held, contents, strict=True):
                place.update(tensors)
                for name, tensor in tensors.items():
                    tensor.detach().copy_(values[name])


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
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    return float(gap.masked_fill(same, 0.0).nan_to_num(nan=float("inf")).max())


def _name(model: Callable[..., Any]) -> str:
    return type(model).__name__ if isinstance(model, torch.nn.Module) else getattr(model, "__name__", "function")
