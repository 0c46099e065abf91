"""explain: compile a model, run it on copies of the inputs, and say what happened to it.

report = graphex.explain(model, (x,))
print(report)                       # passes, rewrites, refusals with the user's source lines, captures
report.rule("full_slice").matched   # 3
report.to_json()
report.save("report.html")          # the graphs, pass by pass, in one file for a browser
"""

from __future__ import annotations

import copy
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from graphex.analysis.effects import COLLECTIVE_NAMESPACES, PURE_NAMESPACES
from graphex.backend import Backend, get_backend
from graphex.debug.history import GraphHistory, history_of
from graphex.debug.tensors import clone_together, is_plain
from graphex.debug.verify import RandomState
from graphex.env import path_of_rank, rank_and_size, tuning, write_named
from graphex.errors import InputError, did_you_mean
from graphex.evidence.reach import reached
from graphex.evidence.tables import SHOWN, TRAINS_IN_EVAL, KernelRow, kernel_rows, rounds_otherwise, trains_in_eval
from graphex.evidence.visible import GRADIENTS, Comparison, NotCompared, Observation, SavedState, compare
from graphex.frontend.origin import broke, note_breaks_without_graph
from graphex.passes.pipeline import rule_names
from graphex.records import Journal, NearMiss, Refused, Rewrote, json_text
from graphex.torch_private.dynamo import room_to_recompile, without_reducing
from graphex.torch_private.frames import attempts, backend_of, code_of, given_up_since
from graphex.torch_private.symbolic import pytree

_OP = re.compile(r"(\w+)\.\w+\.\w+")
_WRAPPER = "auto_functionalized"  # its first argument is the op
SHORT, LONGEST = 0.1, 0.5  # seconds of a call that is timed, and after which no round is begun
ROUNDS, MOST_ROUNDS = 3, 30
_KNOWN = (
    PURE_NAMESPACES | COLLECTIVE_NAMESPACES | {"streams", "higher_order", "quantized", "inductor", "fsdp", "mkldnn"}
)


@dataclass(frozen=True)
class RuleSummary:
    """The record of one rewrite rule: where it was applied, and where it was refused or did not match to the end.

    `remarks` say why it was applied nowhere in a graph, whatever the place.
    """

    name: str
    rewrites: tuple[Rewrote, ...]
    near_misses: tuple[Refused | NearMiss, ...]
    remarks: tuple[str, ...] = ()

    @property
    def matched(self) -> int:
        return len(self.rewrites)


@dataclass(eq=False, repr=False)
class Report:
    """The result of `explain`. It prints as tables, serialises to JSON, and keeps both results for comparison.

    `seconds` has the shortest call in eager and with graphex, where both were timed: see `_Subject.timed`. `is_eval`:
    the model is a module in eval mode.
    """

    name: str
    journal: Journal
    _rules: Collection[str]
    outputs: Any
    eager_outputs: Any
    calls: int
    _comparison: Comparison
    seconds: Mapping[str, float]
    is_eval: bool = False

    def rule(self, name: str) -> RuleSummary:
        """The record of one rule; it is empty where the rule found nothing, or verification undid what it made."""
        gone = self.journal.replaced
        made = any(record.rule == name for record in self.journal.of(Rewrote))
        rewrites = tuple(record for record in self.journal.rewrites if record.rule == name)
        refusals = tuple(each for each in self.journal.refusals if each.rule == name and each.graph not in gone)
        misses = tuple(each for each in self.journal.near_misses if each.rule == name and each.graph not in gone)
        if not (made or refusals or misses):
            self._check_rule(name)
        remarks = (each.remark for each in self.journal.rules if each.rule == name and each.remark)
        return RuleSummary(name, rewrites, refusals + misses, tuple(dict.fromkeys(remarks)))

    def _check_rule(self, name: str) -> None:
        """Refuse the name of a rule that does not exist: a test of "this did not fuse" would always pass."""
        if name in self._rules:
            return
        hint = did_you_mean(name, self._rules, "`graphex rules` lists them", most=3)
        raise InputError(f"there is no rule {name!r} ({hint}).")

    @property
    def kernels(self) -> list[KernelRow]:
        """Which kernel runs for each op on a GPU, how it was chosen, and what it was measured against."""
        return kernel_rows(self.journal)

    @property
    def worst_difference(self) -> float:
        """The largest difference between an eager and a compiled call, over everything a caller sees.

        It is infinite for a difference in kind (a shape, an alias, a missing item), and NaN where no difference is
        known but a value could not be compared. 0.0 means that everything except `not_compared` is equal.
        """
        return self._comparison.worst

    @property
    def differences(self) -> tuple[str, ...]:
        """The differences from eager, one sentence each: results, arguments, state of the model, gradients."""
        return tuple(map(str, self._comparison.differences))

    @property
    def rounding(self) -> tuple[str, ...]:
        """Those of `differences` that the types of the computation explain, the largest first."""
        step = _coarsest_step(history_of(self.journal))
        found = [each for each in self._comparison.differences if each.is_rounding(step)]
        return tuple(map(str, sorted(found, key=lambda each: -each.error)))

    @property
    def not_compared(self) -> tuple[NotCompared, ...]:
        """The values that a caller can see and `explain` could not compare, each with the reason."""
        return self._comparison.not_compared

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.name,
            **self._facts(),
            "kernels": [asdict(row) for row in self.kernels],
            **self.journal.to_dict(),
        }

    def _facts(self) -> dict[str, Any]:
        return {
            "calls": self.calls,
            "worst_difference": self.worst_difference,
            "differences": list(self.differences),
            "rounding": list(self.rounding),
            "not_compared": [asdict(each) for each in self.not_compared],
            "seconds": dict(self.seconds),
            "is_eval": self.is_eval,
        }

    def to_json(self, indent: int | None = 2) -> str:
        return json_text(self.to_dict(), indent=indent)

    def summary(self) -> str:
        """The report in a few sentences."""
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
        write_named(target, json_text(self._data()))
        return target

    def _data(self) -> dict[str, Any]:
        from graphex.evidence.report.data import report_data

        return report_data(self.name, [self.journal], **self._facts())

    def __str__(self) -> str:
        from graphex.evidence.tables import printed

        title = f"graphex explain: {self.name}   {self.calls} calls, largest difference from eager"
        tables = printed(f"{title} {self.worst_difference:.3g}", self.journal)
        return "\n".join([tables, *self._remarks()])

    def _remarks(self) -> list[str]:
        """The lines below the tables: training graphs of a model in eval mode, differences from eager, and values that
        were not compared.
        """
        rounding = self.rounding if rounds_otherwise(self.journal) else ()
        phases = [graph.phase for graph in self.journal.graphs]
        lines = ["", TRAINS_IN_EVAL] if trains_in_eval(phases, is_eval=self.is_eval) else []
        for title, found in (
            ("different from eager", [each for each in self.differences if each not in rounding]),
            ("equal to eager within rounding", rounding),
            ("not compared with eager", self.not_compared),
        ):
            if found:
                lines += ["", title, *(f"  {each}" for each in found[:SHOWN])]
            if len(found) > SHOWN:
                lines.append(f"  ... and {len(found) - SHOWN} more in the JSON")
        return lines

    __repr__ = __str__


def explain(
    model: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    options: Any = None,
    calls: int = 3,
) -> Report:
    """Compile `model`, call it `calls` times from one state, compare each call with eager, and report.

    The calls work on copies of the inputs. Everything that the model keeps and can write (parameters, buffers,
    gradients, attributes, caches in lists and dictionaries, closures) is as it was afterwards. With gradients enabled,
    the backward is compiled and compared too, also of a model in eval mode, and the report says so. On a CPU some more
    calls are made to time a short model beside eager.
    """
    _check(model, args, kwargs, calls)
    model = getattr(model, "_orig_mod", model)
    backend = get_backend(options)
    backend.journal.history = GraphHistory()
    compiled = torch.compile(model, backend=backend)
    subject = _Subject(model, (tuple(args), dict(kwargs or {})))
    eager, eager_outputs = subject.call(model)
    worst, outputs, seconds = Comparison(), None, dict[str, float]()
    known = attempts()
    with room_to_recompile():
        for number in range(calls):
            seen, result = subject.call(compiled)
            found = compare(seen, eager)
            if not number or _is_worse(found, worst):
                worst, outputs = found, result
        custom = _kept_by_custom_ops(history_of(backend.journal))
        if subject.took < SHORT and not (custom or any(given_up_since(known))) and _may_be_timed(backend):
            seconds = subject.timed({"eager": model, "graphex": compiled}, backend.journal)
    for function, why in given_up_since(known):
        backend.journal.add(broke(function, why, graph="-"))
    note_breaks_without_graph(backend.journal, code_of(compiled), backend_of(compiled))
    worst = replace(worst, not_compared=worst.not_compared + custom)
    rules = rule_names(backend.config)
    owner = getattr(model, "__self__", model)  # of a bound method, such as `model.generate`
    is_eval = isinstance(owner, torch.nn.Module) and not owner.training
    return Report(_name(model), backend.journal, rules, outputs, eager_outputs, calls, worst, seconds, is_eval)


def _check(model: Any, args: Any, kwargs: Any, calls: Any) -> None:
    if not callable(model):
        raise InputError(f"explain takes a module or a function, got {type(model).__name__}.")
    if not isinstance(args, (tuple, list)):
        raise InputError(f"args must be a tuple of the model's arguments, got {type(args).__name__}; write (x,).")
    if not isinstance(kwargs, (Mapping, type(None))):
        raise InputError(f"kwargs must be a dictionary of the model's keyword arguments, got {type(kwargs).__name__}.")
    if not isinstance(calls, int) or isinstance(calls, bool) or calls < 1:
        raise InputError(f"calls must be a positive number, got {calls!r}.")


def _may_be_timed(backend: Backend) -> bool:
    """Whether the outside does not notice more calls: no graph breaks, a CPU, one process, no file for each call."""
    devices = {device for graph in backend.journal.graphs for device in graph.devices}
    is_alone = devices == {"cpu"} and rank_and_size()[1] == 1
    return is_alone and not (backend.journal.breaks or backend.config.dump_tensor_data) and tuning() != "off"


class _Subject:
    """A model and its inputs, called repeatedly from the state in which they are now."""

    def __init__(self, model: Callable[..., Any], inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        self._model = model
        self._flat, self._spec = pytree.tree_flatten(inputs)
        objects = [leaf for leaf in self._flat if not isinstance(leaf, torch.Tensor)]
        self._before = SavedState({"model": model, "args": objects})
        self._random = RandomState(self._before.generators)
        self.took = math.inf  # seconds of the shortest call that was observed

    def call(self, model: Callable[..., Any]) -> tuple[Observation, Any]:
        """Observe one call, and its backward where gradients flow; also returns a copy of the result."""
        args, kwargs, leaves = self._inputs()
        self._random.restore()
        try:
            with without_reducing(self._model):
                began = time.perf_counter()
                result = model(*args, **kwargs)
                self.took = min(self.took, time.perf_counter() - began)
            gradients = _gradients(result, leaves)
            roots = {"model": self._model, "args": args, "kwargs": kwargs, "result": result, GRADIENTS: gradients}
            return self._before.observe(roots), _copied(result)
        finally:
            self._before.restore()
            self._random.restore()

    def timed(self, models: Mapping[str, Callable[..., Any]], journal: Journal) -> dict[str, float]:
        """The seconds of the shortest call of each model, called in turns from one state. The journal does not count
        these calls. Nothing where a call raises, which those before did not, or where they are too long to be repeated.
        """
        counts = {graph: Counter(found) for graph, found in journal.counts.items()}
        found: dict[str, list[float]] = {name: [] for name in models}
        ends = time.perf_counter() + LONGEST
        with suppress(Exception):
            while len(found["eager"]) < MOST_ROUNDS and time.perf_counter() < ends:
                for name, model in models.items():
                    found[name].append(self._seconds(model))
        for graph, counter in journal.counts.items():
            counter.clear()
            counter.update(counts.get(graph, Counter()))
        is_enough = all(len(each) >= ROUNDS for each in found.values())
        return {name: min(each) for name, each in found.items()} if is_enough else {}

    def _seconds(self, model: Callable[..., Any]) -> float:
        args, kwargs, _ = self._inputs()
        self._random.restore()
        try:
            with without_reducing(self._model):
                began = time.perf_counter()
                model(*args, **kwargs)
                return time.perf_counter() - began
        finally:
            self._before.restore()
            self._random.restore()

    def _inputs(self) -> tuple[Any, Any, dict[str, Any]]:
        """Copies of the arguments, and everything that takes a gradient.

        A tensor that shares the memory of the model is passed as it is: that memory is put back in any case.
        """
        apart = [leaf for leaf in self._flat if isinstance(leaf, torch.Tensor) and not self._before.holds(leaf)]
        copies = dict(zip(map(id, apart), clone_together(apart), strict=True))
        flat = [copies.get(id(leaf), leaf) for leaf in self._flat]
        args, kwargs = pytree.tree_unflatten(flat, self._spec)
        given = {f"argument {number}": leaf for number, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor)}
        wanted = {name: leaf for name, leaf in given.items() if leaf.requires_grad}
        return args, kwargs, {**self._before.leaves, **wanted}


def _gradients(result: Any, leaves: dict[str, Any]) -> dict[str, Any]:
    """The gradients of the leaves, computed without touching their `.grad`."""
    tensors = [value for _, value in reached({"result": result}) if isinstance(value, torch.Tensor)]
    differentiable = [tensor for tensor in tensors if tensor.requires_grad]
    if not (differentiable and leaves):
        return {}
    directions = [_direction(tensor) for tensor in differentiable]
    found = torch.autograd.grad(differentiable, list(leaves.values()), directions, allow_unused=True)
    return dict(zip(leaves, map(_packed, found), strict=True))


def _packed(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """A gradient in memory of its own: autograd is free to choose its strides and aliases."""
    if gradient is None or not is_plain(gradient.detach()):
        return gradient
    return gradient.detach().clone(memory_format=torch.contiguous_format)


def _direction(tensor: torch.Tensor) -> torch.Tensor:
    """The gradient of a result: numbers that do not depend on the result, and under which few terms cancel."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_nested or tensor.layout != torch.strided:
        return torch.ones_like(tensor)
    numbers = torch.arange(tensor.numel(), dtype=torch.float32, device=tensor.device).cos()
    return numbers.view(tensor.shape).to(tensor.dtype)


def _copied(result: Any) -> Any:
    """A result that later calls do not change; an object that cannot be copied is handed over as it is."""
    tensors = [value for _, value in reached({"result": result}) if isinstance(value, torch.Tensor)]
    try:
        copies = [each.requires_grad_(False) for each in clone_together(tensors)]
        return copy.deepcopy(result, dict(zip(map(id, tensors), copies, strict=True)))
    except Exception:  # locks, handles, kinds of tensors that cannot be cloned
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)


def _is_worse(found: Comparison, known: Comparison) -> bool:
    order = [math.inf if math.isnan(each.worst) else each.worst for each in (found, known)]
    return order[0] > order[1] or len(found.differences) > len(known.differences)


def _kept_by_custom_ops(history: GraphHistory) -> tuple[NotCompared, ...]:
    """The ops of the graphs that neither torch nor graphex defines: the state inside of one is not compared."""
    calls = {facts for snapshots in history.graphs.values() for facts in snapshots.nodes if facts.op == "call_function"}
    named = [_OP.match(facts.args if _WRAPPER in facts.target else facts.target) for facts in calls]
    custom = sorted({found[0] for found in named if found and found[1] not in _KNOWN})
    return tuple(NotCompared(op, "what a custom op keeps for itself cannot be looked into") for op in custom)


def _coarsest_step(history: GraphHistory) -> float:
    """The step of the coarsest float type that a value is rounded to and computed on with; 0 where nothing is known."""
    types: set[torch.dtype] = set()
    for snapshots in history.graphs.values():
        calls = [facts for facts in snapshots.nodes if facts.op == "call_function"]
        read = {name for facts in calls for name in facts.inputs}
        types.update(dtype for facts in calls if facts.name in read for dtype in facts.types)
    return max((torch.finfo(dtype).eps for dtype in types if dtype.is_floating_point or dtype.is_complex), default=0.0)


def _name(model: Callable[..., Any]) -> str:
    return type(model).__name__ if isinstance(model, torch.nn.Module) else getattr(model, "__name__", "function")
