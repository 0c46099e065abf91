"""Profiles a decode step kernel by kernel: the device time of each, against the bytes that it must read and write.

The script first records graphex's program without capture, op by op: the kernels that each op launches, and the sizes
of its tensors. Then it profiles the captured step and assigns its kernels to the recorded ones, in order. The times
are therefore those of the real replay. On a CPU, where there are no kernels, it shows the recorded times.
"""

from __future__ import annotations

import difflib
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.decoding import Setting, Step, build, step_of
from benchmarks.measure import synchronize, timed

REPLAYS = 10
MARK = "op "
GATHERS = ("aten.embedding", "graphex.embedding", "aten.index.", "aten.index_select", "aten.gather")
WRITES_A_PART = ("aten.index_copy_", "aten.index_put_", "aten.scatter", "graphex.")
READS_IT_ALL = ("graphex.rotary_attention_",)
OTHER = "of no op"


@dataclass
class Op:
    """One op of the program: its bytes, and its kernels with their times."""

    name: str
    sizes: str
    moved: int
    kernels: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class Kernel:
    name: str
    seconds: float


class Recorder(TorchDispatchMode):
    """Records every op and marks it in the profile."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        with record_function(f"{MARK}{len(self.ops)}"):
            result = func(*args, **kwargs)
        named = {**{each.name: value for each, value in zip(func._schema.arguments, args, strict=False)}, **kwargs}
        into = [named[each.name] for each in func._schema.arguments if each.name in named and _is_written(each)]
        given, made, written = (_tensors(each) for each in (named, result, into))
        self.ops.append(Op(str(func), _sizes(given), moved_by(str(func), given, made, written)))
        return result


def moved_by(name: str, given: list[Tensor], made: list[Tensor], written: list[Tensor]) -> int:
    """The bytes that an op must read and write; 0 for a view.

    An op that writes part of an argument, such as a token into a cache, writes as many bytes as it reads besides, and
    may read the rest of the cache too. A gather reads as many bytes as it returns. A result that shares the memory of
    an argument does not count.
    """
    places = {each.untyped_storage().data_ptr() for each in given}
    fresh = sum(_weight(each) for each in made if each.untyped_storage().data_ptr() not in places)
    inside = sum(_weight(each) for each in written)
    rest = sum(_weight(each) for each in given) - inside
    if not fresh and not inside:
        return 0
    if name.startswith(GATHERS):
        return 2 * fresh
    if name.startswith(READS_IT_ALL):
        return rest + fresh + inside
    return rest + fresh + (min(inside, rest) if name.startswith(WRITES_A_PART) else 2 * inside)


def _tensors(values: object) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _weight(tensor: Tensor) -> int:
    """The bytes of a tensor in memory, without its expanded dimensions."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in pairs if stride) * tensor.element_size()


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _sizes(tensors: Iterable[Tensor]) -> str:
    return ", ".join("x".join(map(str, each.shape)) for each in tensors)


@torch.no_grad()
def profile(setting: Setting, bandwidth: float) -> str:
    """A markdown table of the step's kernels."""
    step = step_of(build(setting), setting)
    ops = recorded(step)
    compiled = _through_graphex(step)
    times = timed(step.call(compiled), rewind=step.rewind)
    replayed = _replayed(step, compiled) if setting.device == "cuda" else []
    if replayed:
        assign(ops, replayed)
    head = f"{setting}: {times.pipelined * 1e6:.0f} us a step, {times.pipelined * bandwidth / step.moved:.2f}x floor"
    return f"{head}\n\n{table(ops, bandwidth)}\n"


def recorded(step: Step) -> list[Op]:
    """The ops of the program that launch something, in order, from a run without capture."""
    recorder = Recorder()
    around: list[AbstractContextManager[Any]] = [nullcontext()]  # Dynamo compiles nothing inside of such a mode

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        from graphex.backend import graphex_backend

        program = graphex_backend(gm, inputs, options={"mode": "eager"})

        def call(*args: Any) -> Any:
            with around[0]:
                return program(*args)

        return call

    torch.compiler.reset()
    run = torch.compile(step.model, backend=backend, fullgraph=True)
    for _ in range(2):
        step.rewind(1)
        step.run(run)
    around[0] = recorder
    step.rewind(1)
    with _profiler() as seen:
        step.run(run)
        synchronize()
    _time(recorder.ops, seen)
    put_in_order(recorder.ops, [kernel.name for kernel in _launched(seen)])
    on_device = step.caches[0].is_cuda
    return [op for op in recorder.ops if (op.kernels if on_device else op.moved)]


def _time(ops: list[Op], seen: torch.profiler.profile) -> None:
    """Gives each op the kernels that it launched, or without kernels the time that it took on the CPU."""
    for event in seen.events():
        if event.name.startswith(MARK) and event.device_type == DeviceType.CPU:
            op = ops[int(event.name[len(MARK) :])]
            nested = [kernel for child in event.cpu_children for kernel in _kernels_of(child)]
            kernels = nested or list(_kernels_of(event))
            op.kernels = [kernel.name for kernel in kernels]
            op.seconds = sum(kernel.seconds for kernel in kernels) if kernels else event.cpu_time_total / 1e6


def put_in_order(ops: list[Op], launched: list[str]) -> None:
    """An op's kernels in the order they ran: the profile lists its own kernels before those of the ops it calls."""
    at = 0
    for op in (op for op in ops if op.kernels):
        wanted, count = Counter(op.kernels), len(op.kernels)
        for begin in range(at, len(launched) - count + 1):
            if Counter(launched[begin : begin + count]) == wanted:
                at = begin + count
                op.kernels = launched[begin:at]
                break


def assign(ops: list[Op], replays: list[list[Kernel]]) -> None:
    """Gives each op the times of the replay, the median for each kernel. Kernels of no op (copies) are added."""
    sequences = [tuple(kernel.name for kernel in each) for each in replays]
    usual = statistics.mode(sequences)
    same = [each for each, sequence in zip(replays, sequences, strict=True) if sequence == usual]
    first = same[0]
    medians = [statistics.median(each[at].seconds for each in same) for at in range(len(first))]
    owners = [(op, name) for op in ops for name in op.kernels]
    for op in ops:
        op.seconds = 0.0
    matched: set[int] = set()
    names = [name for _, name in owners], [kernel.name for kernel in first]
    for block in difflib.SequenceMatcher(None, *names, autojunk=False).get_matching_blocks():
        for offset in range(block.size):
            owners[block.a + offset][0].seconds += medians[block.b + offset]
            matched.add(block.b + offset)
    left = [at for at in range(len(first)) if at not in matched]
    ops += [Op(OTHER, _short(first[at].name), 0, [first[at].name], medians[at]) for at in left]


def table(ops: list[Op], bandwidth: float) -> str:
    """The table: one line for all ops of one kind and size, in the order of their first occurrence."""
    kinds: dict[tuple[str, str], list[Op]] = {}
    for op in ops:
        kinds.setdefault((op.name, op.sizes), []).append(op)
    lines = ["| op | on | kernels | times | us each | floor us | x floor | us in all |", f"|{'---|' * 8}"]
    for (name, sizes), same in kinds.items():
        seconds, floor = statistics.median(op.seconds for op in same), same[0].moved / bandwidth
        ratio = f"{seconds / floor:.2f}" if floor else "-"
        kernels = "; ".join(_short(kernel) for kernel in dict.fromkeys(same[0].kernels)) or "-"
        total = sum(op.seconds for op in same)
        figures = f"{len(same)} | {seconds * 1e6:.2f} | {floor * 1e6:.2f} | {ratio} | {total * 1e6:.1f}"
        lines.append(f"| {name} | {sizes} | {kernels} | {figures} |")
    everything, floors = sum(op.seconds for op in ops), sum(op.moved for op in ops) / bandwidth
    ratio = f"{everything / floors:.2f}" if floors else "-"
    return "\n".join([*lines, f"| all | | | {len(ops)} | | {floors * 1e6:.1f} | {ratio} | {everything * 1e6:.1f} |"])


def _replayed(step: Step, compiled: Callable[..., Any]) -> list[list[Kernel]]:
    """The kernels of several replays, each in the order in which they began."""
    found = []
    for _ in range(REPLAYS):
        step.rewind(1)
        synchronize()
        with _profiler() as seen:
            step.run(compiled)
            synchronize()
        found.append(_launched(seen))
    return [each for each in found if each]


def _launched(seen: torch.profiler.profile) -> list[Kernel]:
    """The kernels of a profile in the order in which they began."""
    spans = {event.name for event in seen.events() if event.device_type == DeviceType.CPU}  # shown on both sides
    events = [each for each in seen.events() if each.device_type == DeviceType.CUDA and each.name not in spans]
    events.sort(key=lambda event: event.time_range.start)
    return [Kernel(event.name, event.time_range.elapsed_us() / 1e6) for event in events]


def _through_graphex(step: Step) -> Callable[..., Any]:
    import graphex  # noqa: F401  (a source tree that is not installed has no entry point)

    torch.compiler.reset()
    run = torch.compile(step.model, backend="graphex", fullgraph=True)
    for _ in range(4):
        step.rewind(1)
        step.run(run)
    return run


def _profiler() -> torch.profiler.profile:
    on = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    return torch.profiler.profile(activities=on)


def _kernels_of(event: Any) -> Iterator[Kernel]:
    """The kernels of an op and of all ops that it calls, in order."""
    for kernel in event.kernels:
        yield Kernel(kernel.name, kernel.duration / 1e6)
    for child in event.cpu_children:
        yield from _kernels_of(child)


def _short(kernel: str) -> str:
    """A name that fits into a table: without its template arguments."""
    return (
        kernel.replace("void ", "")
        .replace("(anonymous namespace)::", "")
        .split("<")[0]
        .split("(")[0]
        .replace("|", "/")[:60]
    )
