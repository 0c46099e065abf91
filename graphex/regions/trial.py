"""Trials of regions: compiled code is timed against the same nodes as single kernels, and stays if it is no slower.

On a GPU both are captured as device graphs, as they will run, and the choice is stored with those of tiles
(`graphex.kernels.tuning`). Code that launches a third less kernels than the nodes is certain to be faster there, and is
taken untried. On a CPU both are called in turns; what is measured while other programs hold the cores is doubtful, and
has to show far more. GRAPHEX_TUNING=off takes the compiled code untried, as does `flex_attention`: as a single kernel
it needs memory for all pairs.

Inputs are made up: normal numbers, zeros for integers, which are in the range of every index, bags of equal sizes.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from graphex import env
from graphex.analysis.effects import is_formula, is_kernel, operator_of
from graphex.kernels.tuning import LAUNCHES, Candidate, choice_of, choose
from graphex.regions.compiler import RegionCode, launches
from graphex.regions.members import is_view
from graphex.torch_private.symbolic import hint_of

COMPILED, SINGLE = "compiled", "single kernels"
ROOM = 3  # the inputs of a trial may take this part of the free memory
ROUNDS, MOST_ROUNDS = 3, 50  # of calls on a CPU
LONGEST = 1.0  # seconds, after which no round is begun
CLOSE = 1.2  # times that differ by less may be the other way round in the next round
SMALLEST, WIDE = 1.02, 2.0  # how much faster single kernels have to be, and in a doubtful measurement
SPREAD = 1.5  # a usual call takes so much longer than the shortest: something else runs too
HELD = 0.5  # the part of the time in which this thread has a core; with less, something else runs too
CERTAIN = 2 / 3  # compiled code launches at most this part of the kernels: it is faster
KERNELS = 240  # in a graph that is timed
BAGS = (torch.ops.aten._embedding_bag.default, torch.ops.aten._embedding_bag_forward_only.default)


@dataclass(frozen=True)
class Outcome:
    """Whether compiled code is kept, and the seconds of both; 0 where they were not measured.

    Doubtful seconds were measured while something else ran on the machine.
    """

    is_kept: bool = True
    compiled: float = 0.0
    single: float = 0.0
    is_doubtful: bool = False


def tried(body: GraphModule, code: RegionCode, key: Hashable, device: torch.device) -> Outcome:
    """The outcome of a trial, or of an earlier one of a region that is alike on this kind of device."""
    if env.tuning() == "off" or any(map(is_formula, body.graph.nodes)):
        return Outcome()
    with torch.no_grad():
        if device.type == "cpu":
            return _on_cpu(body, code)
        return _on_gpu(body, code, key, device) if torch.cuda.current_device() == (device.index or 0) else Outcome()


def _on_gpu(body: GraphModule, code: RegionCode, key: Hashable, device: torch.device) -> Outcome:
    signature = hashlib.sha256(repr(key).encode()).hexdigest()[:24]
    single = sum(map(is_kernel, body.graph.nodes))
    if launches(body, code) <= CERTAIN * single:
        return Outcome()
    args = made_up(body, torch.cuda.mem_get_info(device)[0] // ROOM)
    if args is None or torch.cuda.is_current_stream_capturing():
        return Outcome()
    times = max(2, min(LAUNCHES, KERNELS // single))
    runs = (
        Candidate(COMPILED, lambda: code.run(list(args)), launches=times),
        Candidate(SINGLE, lambda: body(*args), launches=times),
    )
    for each in runs:
        each.run()  # what is chosen inside of them is chosen first
    chosen = choose("region", signature, runs, runs[0])
    found = choice_of("region", signature)
    seconds = {} if found is None else found.seconds
    return Outcome(chosen.name == COMPILED, seconds.get(COMPILED, 0.0), seconds.get(SINGLE, 0.0))


def _on_cpu(body: GraphModule, code: RegionCode) -> Outcome:
    args = made_up(body, 2**30)
    if args is None:
        return Outcome()
    (compiled, single), is_doubtful = _shortest((lambda: code.run(list(args)), lambda: body(*args)))
    return Outcome(compiled <= single * (WIDE if is_doubtful else SMALLEST), compiled, single, is_doubtful)


def _shortest(runs: Sequence[Callable[[], object]]) -> tuple[list[float], bool]:
    """The shortest call of each, in rounds that call each once, and whether they are doubtful.

    Rounds go on for as long as the calls are close or doubtful.
    """
    for run in runs:
        run()  # warms up
    calls: list[list[float]] = [[] for _ in runs]
    began, held = time.perf_counter(), time.thread_time()
    for number in range(1, MOST_ROUNDS + 1):
        for run, seconds in zip(runs, calls, strict=True):
            called = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - called)
        shortest, passed = list(map(min, calls)), time.perf_counter() - began
        is_doubtful = time.thread_time() - held < HELD * passed or any(
            median(seconds) > SPREAD * min(seconds) for seconds in calls
        )
        is_clear = number >= ROUNDS and max(shortest) > CLOSE * min(shortest)
        if (is_clear and not is_doubtful) or passed > LONGEST:
            break
    return shortest, is_doubtful


def made_up(body: GraphModule, room: int) -> list[Any] | None:
    """Inputs like those the graph was traced with; None if they need more memory than there is room for."""
    values = [node.meta.get("val") for node in body.graph.find_nodes(op="placeholder")]
    tensors = [value for value in values if isinstance(value, Tensor)]
    if sum(_extent(value) * value.element_size() for value in tensors) > room:
        return None
    made = [_like(value) if isinstance(value, Tensor) else _number(value) for value in values]
    placeholders = body.graph.find_nodes(op="placeholder")
    for node in body.graph.nodes:
        if operator_of(node) in BAGS:
            _fill_offsets(node, dict(zip(placeholders, made, strict=True)))
    return made


def _fill_offsets(node: Node, made: dict[Node, Any]) -> None:
    """Begin the bags of embeddings at equal distances. With zeros the last one would have everything, and take long."""
    indices, offsets = node.args[1:3]
    assert isinstance(indices, Node)
    assert isinstance(offsets, Node)
    step = hint_of(indices.meta["val"].numel(), 1) // max(1, hint_of(offsets.meta["val"].numel(), 1))
    while is_view(offsets) and offsets not in made:
        offsets = offsets.all_input_nodes[0]
    if offsets in made and made[offsets].dim():
        made[offsets].copy_(torch.arange(made[offsets].shape[-1]) * step)


def _number(value: Any) -> Any:
    return hint_of(value, 1) if isinstance(value, torch.SymInt) else value


def _extent(value: Tensor) -> int:
    """How many elements of memory a tensor reaches over."""
    pairs = [(hint_of(size, 1), hint_of(step, 1)) for size, step in zip(value.shape, value.stride(), strict=True)]
    return 0 if any(not size for size, _ in pairs) else 1 + sum((size - 1) * step for size, step in pairs)


def _like(value: Tensor) -> Tensor:
    flat = torch.zeros(_extent(value), dtype=value.dtype, device=value.device)
    if value.dtype.is_floating_point and value.dtype.itemsize > 1:
        flat.normal_(generator=torch.Generator(value.device).manual_seed(0))
    size, stride = ([hint_of(each, 1) for each in each_of] for each_of in (value.shape, value.stride()))
    return flat.as_strided(size, stride)
