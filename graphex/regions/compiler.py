"""Compiling regions: Inductor's standalone entry point, called once for regions that are alike, and trials of its code.

The key of a region is its structure, the sizes, strides, types and devices of its values, and the configuration. It is
blind to names: of 32 layers that are equal, one is compiled.

CUDA graphs stay graphex's. With `region_numerics="eager"` Inductor is asked to round where eager does.

In a trial, compiled code is timed against the same nodes as single kernels, and stays if it is no slower. On a GPU both
are captured as device graphs, as they will run, and the choice is stored as those of tiles are (`kernels.tuning`).
Code that launches a third less kernels than the nodes is certain to be faster there, and is taken untried. On a CPU
both are called in turns; what is measured while other programs hold the cores is doubtful, and has to show far more,
also in the time that threads of this process had a core.
With `mode="max-autotune"` a region is compiled twice, with kernels that Inductor has tried and as usual, and the tried
ones have to be faster: what Inductor measured one by one may be slower in a row.
On a CPU Inductor runs all convolutions in channels last. Those of a graph are timed in both layouts before, and keep
eager's if they are faster so.
GRAPHEX_TUNING=off takes the compiled code untried, as does `flex_attention`: as a single kernel it needs memory for all
pairs. Inputs are made up: normal numbers, zeros for integers, which are in the range of every index.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from shutil import which
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node, map_arg

from graphex import env
from graphex.analysis.effects import is_body, is_formula, is_kernel
from graphex.config import CompilerConfig
from graphex.device.base import Boxed as Boxed
from graphex.kernels.tuning import LAUNCHES, Candidate, choice_of, choose
from graphex.ops.definition import has_triton
from graphex.regions.decompositions import decompositions_of, is_odd_product, misleading_patterns
from graphex.regions.members import inlined_ops, rounds_quotients
from graphex.torch_private.graphs import around_python_dispatcher
from graphex.torch_private.inductor import (
    OutputCode,
    flags_of_cpp,
    inductor_compile,
    known_settings,
    runner_of,
    try_instruction_set,
    without_inductor,
)
from graphex.torch_private.memory import extent
from graphex.torch_private.symbolic import hint_of, mode_of, unset_fake_temporarily

BYTES_ALIGNED = 16  # Inductor's code may rely on it, and copies an input that is not
EAGER_LAYOUTS = {"layout_optimization": False}
_CALLS = re.compile(r"\b(extern_kernels\.\w+|torch\.ops(\.\w+){3})\(")  # of kernels that are there, in Inductor's code
AUTOTUNING = {"max_autotune": True, "coordinate_descent_tuning": True}  # Inductor's settings that try kernels


@dataclass(frozen=True)
class RegionCode:
    """Inductor's code for a region: a function that takes a list and empties it, its source, and the time it took.

    `inlined`          fused ops that Inductor compiled from their formula
    `stored`           Inductor's own object for the code, which can be stored; None if `run` does more than call it
    `is_awaited`       there is no code yet, and the nodes run one by one
    `autotuned`        Inductor has tried several kernels for each product and convolution, and kept the fastest
    `split_products`   products of odd width that are computed in two parts
    `eager_layouts`    convolutions run in the layouts that they have in eager, not in channels last
    `tuned`, `untuned` seconds of a call with autotuning and of one without; 0 where they were not compared
    """

    run: Boxed
    source: str
    kernels: tuple[str, ...]
    seconds: float
    inlined: tuple[torch._ops.OpOverload, ...] = ()
    stored: OutputCode | None = None
    is_awaited: bool = False
    autotuned: bool = False
    split_products: int = 0
    eager_layouts: bool = False
    tuned: float = 0.0
    untuned: float = 0.0

    @property
    def launches(self) -> int:
        """How often a call launches kernels: those that Inductor wrote, and those of libraries and ops that it calls.

        Counted in the text of the code, kernels as `name.run(` and `name(`, at least once each: Inductor says how many
        kernels it made, and not how often it calls them.
        """
        counts = ((self.source.count(f"{name}.run("), self.source.count(f"{name}(")) for name in self.kernels)
        return sum(max(1, *each) for each in counts) + len(_CALLS.findall(self.source))


def awaited_code() -> RegionCode:
    """The code of regions that are alike, before it is compiled."""
    return RegionCode(lambda args: None, "", (), 0.0, is_awaited=True)


def why_no_compiler(device: torch.device) -> str:
    """Why regions on a device cannot be compiled; empty if they can."""
    return why_no_kernels(device) or without_inductor()


def why_no_kernels(device: torch.device) -> str:
    """Why the code that Inductor writes for a device cannot be compiled. Does not import Inductor."""
    if device.type == "cuda":
        return "" if has_triton() else "Triton is not installed"
    if device.type == "cpu":
        return "" if has_cpp_compiler() else f"there is no C++ compiler '{_cpp_compiler()}': install it, or set CXX"
    return f"Inductor has no compiler for the device '{device.type}'"


def has_cpp_compiler() -> bool:
    """Whether the compiler that Inductor calls is there, or Inductor is told to install one."""
    command = shlex.split(_cpp_compiler())
    return bool(command and which(command[0])) or bool(os.environ.get("TORCH_INDUCTOR_INSTALL_GXX"))


def _cpp_compiler() -> str:
    return os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")


def settings(config: CompilerConfig) -> dict[str, Any]:
    """Inductor's configuration for the regions of a compilation."""
    exact = config.region_numerics == "eager"
    patches: dict[str, Any] = {
        "triton.cudagraphs": False,
        "triton.autotune_at_compile_time": False,
        "emulate_precision_casts": exact,
        "eager_numerics.division_rounding": exact,
        "eager_numerics.disable_ftz": exact,
        **flags_of_cpp(),
    }
    if config.mode.startswith("max-autotune"):
        patches |= AUTOTUNING
    return known_settings(patches)


def as_usual(patches: dict[str, Any]) -> dict[str, Any]:
    """The configuration without the settings that make Inductor try several kernels."""
    return {name: value for name, value in patches.items() if name not in AUTOTUNING}


def compile_region(body: GraphModule, patches: dict[str, Any]) -> RegionCode:
    """Compile the graph of a region. Raises whatever Inductor raises."""
    patches = dict(patches)
    inputs = [node.meta.get("val") for node in body.graph.find_nodes(op="placeholder")]
    started = time.perf_counter()
    if rounds_quotients(body.graph):
        patches |= known_settings({"eager_numerics.division_rounding": True})
    if any(map(is_formula, body.graph.nodes)) and not _is_on_gpu(inputs):
        patches |= known_settings({"epilogue_fusion": False})  # C++ code for `flex_attention` raises where it has one
    formulas = inlined_ops(body.graph)
    decompositions = formulas | decompositions_of(body)
    mode = mode_of(node.meta.get("val") for node in body.graph.nodes)
    assert mode is not None
    if not _is_on_gpu(inputs):
        try_instruction_set()
    whole, made = inductor_compile(body, inputs, mode, patches, decompositions, misleading_patterns(body.graph))
    seconds = time.perf_counter() - started
    returned = body.graph.output_node().args[0]
    assert isinstance(returned, (list, tuple))
    run: Boxed = lambda args: whole(*args)  # noqa: E731
    stored = None
    if len(made) == 1 and _takes_and_returns(made[0][0], len(inputs), len(returned)):
        stored = made[0][1]
        run = runner_of(stored)  # AOTAutograd's wrappers have nothing to do for a functional graph
    sources = [str(getattr(code, "source_code", "") or "") for _, code in made]
    source = "\n\n".join(sources)
    split = sum(map(is_odd_product, body.graph.nodes))
    about: dict[str, Any] = {"autotuned": bool(patches.get("max_autotune")), "split_products": split}
    about["eager_layouts"] = EAGER_LAYOUTS.items() <= patches.items() and any(map(_is_convolution, body.graph.nodes))
    return RegionCode(run, source, _kernel_names(source), seconds, tuple(formulas), stored, **about)


def _is_on_gpu(inputs: Sequence[Any]) -> bool:
    return any(isinstance(value, Tensor) and value.device.type == "cuda" for value in inputs)


def launches(body: GraphModule, code: RegionCode) -> int:
    """How many kernels a region launches; of one that waits for its code, its nodes do."""
    return sum(map(is_kernel, body.graph.nodes)) if code.is_awaited else code.launches


def _takes_and_returns(graph: GraphModule, inputs: int, outputs: int) -> bool:
    """Whether Inductor was given a graph with the region's own inputs and outputs, one for one."""
    taken, ends = (graph.graph.find_nodes(op=op) for op in ("placeholder", "output"))
    returned = ends[0].args[0] if ends else ()
    return len(taken) == inputs and isinstance(returned, (list, tuple)) and len(returned) == outputs


def _kernel_names(source: str) -> tuple[str, ...]:
    """The kernels that generated code defines, as it names them in assignments such as `name = async_compile.cpp(`."""
    lines = (line.split(" = async_compile.", 1) for line in source.splitlines() if " = async_compile." in line)
    return tuple(dict.fromkeys(name for name, rest in lines if name.isidentifier() and not rest.startswith("wait")))


def region_key(body: GraphModule, patches: dict[str, Any]) -> Hashable:
    """A key that is equal for two graphs that Inductor compiles to the same code."""
    return _rows(body), tuple(sorted((name, repr(value)) for name, value in patches.items()))


def _rows(body: GraphModule) -> Hashable:
    number = {node: index for index, node in enumerate(body.graph.nodes)}
    return tuple(_row(body, node, number) for node in body.graph.nodes)


def _row(body: GraphModule, node: Node, number: dict[Node, int]) -> Hashable:
    if is_body(node):
        return _rows(body.get_submodule(str(node.target)))  # type: ignore[arg-type]
    target = "" if node.op in ("placeholder", "output") else str(node.target)
    args = map_arg((node.args, dict(sorted(node.kwargs.items()))), lambda value: f"node {number[value]}")
    value = node.meta.get("val")
    return node.op, target, repr(args), _given_key(value) if node.op == "placeholder" else layout_key(value)


def _given_key(value: Any) -> Hashable:
    """The layout of an input. Code begins where the input does, wherever that is in its memory: `x[:, 0]` and `x[:, 1]`
    are alike if they are aligned alike. No member of a region names a place in the memory of an input.
    """
    if not isinstance(value, Tensor) or not isinstance(value.storage_offset(), int):
        return layout_key(value)
    return *_sizes_key(value), value.storage_offset() * value.element_size() % BYTES_ALIGNED


def layout_key(value: Any) -> Hashable:
    """Sizes, strides, offset, type and device of a value, as text: symbolic ones by their expressions."""
    if isinstance(value, (list, tuple)):
        return tuple(map(layout_key, value))
    if isinstance(value, Tensor):
        return *_sizes_key(value), str(value.storage_offset())
    return str(value)


def _sizes_key(value: Tensor) -> tuple[Hashable, ...]:
    return tuple(map(str, value.shape)), tuple(map(str, value.stride())), str(value.dtype), str(value.device)


# -- layouts of convolutions -------------------------------------------------------------------------------------------


FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
CLEARLY = 1.1  # what stands between convolutions, and is not timed here, is often faster in channels last
A_FEW, MOST_CALLS = 3, 50  # calls of a convolution
SETTLED, LONG = 0.002, 0.1  # seconds of calls that are enough, and after which no other is made
_convolution_seconds: dict[Hashable, tuple[float, float]] = {}


def in_layouts(patches: dict[str, Any], graph: Graph) -> dict[str, Any]:
    """The configuration for regions of a graph, with the layouts of eager where its convolutions are faster so."""
    eager, by_channels = seconds_of_convolutions(graph)
    return {**patches, **known_settings(EAGER_LAYOUTS)} if by_channels > CLEARLY * eager else patches


def seconds_of_convolutions(graph: Graph) -> tuple[float, float]:
    """What the convolutions of a graph take on a CPU in the layouts of eager and in channels last; zeros elsewhere.

    Each kind is called in both, on made-up values. Depthwise ones gain from channels last, dilated and small ones lose.
    """
    nodes = [node for node in graph.nodes if _is_convolution(node)]
    values = [value for node in nodes for each in node.all_input_nodes if isinstance(value := each.meta["val"], Tensor)]
    if env.tuning() == "off" or not values or any(value.device.type != "cpu" for value in values):
        return 0.0, 0.0
    with torch.no_grad(), around_python_dispatcher(), unset_fake_temporarily():
        timed = list(map(_in_both_layouts, nodes))
    return sum(eager for eager, _ in timed), sum(by_channels for _, by_channels in timed)


def _is_convolution(node: Node) -> bool:
    return node.target in (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)


def _in_both_layouts(node: Node) -> tuple[float, float]:
    """The seconds of a convolution in the layouts of eager and in channels last; zeros where it cannot be called."""
    given = map_arg(node.args, lambda each: each.meta["val"])
    values = [value for value in given if isinstance(value, Tensor)]
    key = node.target, repr([layout_key(value) for value in given]), torch.get_num_threads()
    if key in _convolution_seconds:
        return _convolution_seconds[key]
    _convolution_seconds[key] = 0.0, 0.0
    if all(value.dim() in FORMATS for value in values[:2]) and _bytes(values) <= ROOM_OF_HOST:
        with suppress(RuntimeError):  # made-up sizes may not fit
            _convolution_seconds[key] = _timed_in_both_layouts(node, [_made_up(value) for value in given])
    return _convolution_seconds[key]


def _timed_in_both_layouts(node: Node, args: list[Any]) -> tuple[float, float]:
    """A forward copies its weight into channels last in each call; what a backward reads is in its layout already."""
    call: Any = node.target
    other = [_by_channels(value) for value in args]
    if node.target is torch.ops.aten.convolution.default:
        weight = args[1]
        return _shortest(lambda: call(*args)), _shortest(lambda: call(other[0], _by_channels(weight), *args[2:]))
    return _shortest(lambda: call(*args)), _shortest(lambda: call(*other))


def _by_channels(value: Any) -> Any:
    has_channels = isinstance(value, Tensor) and value.dim() in FORMATS
    return value.contiguous(memory_format=FORMATS[value.dim()]) if has_channels else value


def _shortest(run: Callable[[], object]) -> float:
    timed, began = Timed(run), time.perf_counter()
    for number in range(MOST_CALLS):
        timed.call()
        passed = time.perf_counter() - began
        if passed > LONG or (number >= A_FEW and passed > SETTLED):
            break
    return min(timed.seconds)


# -- trials ------------------------------------------------------------------------------------------------------------


COMPILED, SINGLE, USUAL = "compiled", "single kernels", "compiled as usual"
ROOM = 3  # the inputs of a trial may take this part of the free memory
ROOM_OF_HOST = 2**30  # bytes of the inputs of a trial on a CPU
ROUNDS, MOST_ROUNDS = 3, 50  # of calls on a CPU
SHORT, IN_A_ROW = 0.001, 5  # seconds of a call that is made so often in a row: it is slower behind other code
LONGEST, PATIENT = 1.0, 10.0  # seconds, after which no round is begun, and if code seems to be slower
CLOSE = 1.2  # times that differ by less may be the other way round in the next round
SMALLEST, WIDE = 1.02, 2.0  # how much faster single kernels have to be, and in a doubtful measurement
FAR = 10.0  # no code is slower by so much, unless something is wrong with the measurement or with the code
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
    if not may_try(body):
        return Outcome()
    with torch.no_grad(), around_python_dispatcher():
        if device.type == "cpu":
            return _on_cpu(body, code)
        return _on_gpu(body, code, key, device)


def may_try(body: GraphModule) -> bool:
    """Whether code for a region is timed. Of made-up offsets, which are zeros, one bag would hold everything."""
    return env.tuning() != "off" and not any(is_formula(node) or node.target in BAGS for node in body.graph.nodes)


def _on_gpu(body: GraphModule, code: RegionCode, key: Hashable, device: torch.device) -> Outcome:
    single = sum(map(is_kernel, body.graph.nodes))
    args = None if launches(body, code) <= CERTAIN * single else _on_this_gpu(body, device)
    if args is None:
        return Outcome()
    runs = {COMPILED: lambda: code.run(list(args)), SINGLE: lambda: body(*args)}
    chosen, seconds = _chosen(runs, _signature(key), single)
    return Outcome(chosen == COMPILED, seconds.get(COMPILED, 0.0), seconds.get(SINGLE, 0.0))


def faster(body: GraphModule, usual: RegionCode, tuned: RegionCode, key: Hashable, device: torch.device) -> RegionCode:
    """The faster of two codes for a region. The tuned one must win the measurement; where nothing can be measured it is
    taken.
    """
    with torch.no_grad(), around_python_dispatcher():
        compare = _compared_on_cpu if device.type == "cpu" else _compared_on_gpu
        untuned, seconds = compare(body, usual, tuned, key, device)
    chosen = tuned if seconds * SMALLEST <= untuned else usual
    return replace(chosen, tuned=seconds, untuned=untuned, seconds=tuned.seconds + usual.seconds)


def _compared_on_cpu(body: GraphModule, usual: RegionCode, tuned: RegionCode, *_: object) -> tuple[float, float]:
    """The seconds of both; zeros where they are doubtful, or there is no room for the inputs."""
    args = made_up(body, ROOM_OF_HOST)
    if args is None:
        return 0.0, 0.0
    first, second = Timed(lambda: usual.run(list(args))), Timed(lambda: tuned.run(list(args)))
    return (0.0, 0.0) if _time(first, second) else (min(first.seconds), min(second.seconds))


def _compared_on_gpu(
    body: GraphModule, usual: RegionCode, tuned: RegionCode, key: Hashable, device: torch.device
) -> tuple[float, float]:
    args = _on_this_gpu(body, device)
    if args is None:
        return 0.0, 0.0
    runs = {USUAL: lambda: usual.run(list(args)), COMPILED: lambda: tuned.run(list(args))}
    _, seconds = _chosen(runs, f"{_signature(key)} {USUAL}", sum(map(is_kernel, body.graph.nodes)))
    return seconds.get(USUAL, 0.0), seconds.get(COMPILED, 0.0)


def _signature(key: Hashable) -> str:
    return hashlib.sha256(repr(key).encode()).hexdigest()[:24]


def _on_this_gpu(body: GraphModule, device: torch.device) -> list[Any] | None:
    """Inputs to time a region with; None where nothing can be timed now."""
    if torch.cuda.current_device() != (device.index or 0) or torch.cuda.is_current_stream_capturing():
        return None
    return made_up(body, torch.cuda.mem_get_info(device)[0] // ROOM)


def _chosen(runs: dict[str, Callable[[], object]], signature: str, kernels: int) -> tuple[str, dict[str, float]]:
    """The faster of two runs as device graphs, of which the first stays in doubt, and the seconds of both."""
    times = max(2, min(LAUNCHES, KERNELS // kernels))
    for run in runs.values():
        run()  # what is chosen inside of them is chosen first
    candidates = [Candidate(name, run, launches=times) for name, run in runs.items()]
    chosen = choose("region", signature, candidates, candidates[0])
    found = choice_of("region", signature)
    return chosen.name, {} if found is None else found.seconds


def _on_cpu(body: GraphModule, code: RegionCode) -> Outcome:
    args = made_up(body, ROOM_OF_HOST)
    if args is None:
        return Outcome()
    compiled, single = Timed(lambda: code.run(list(args))), Timed(lambda: body(*args))
    is_doubtful = _time(compiled, single)
    seconds = min(compiled.seconds), min(single.seconds)
    return Outcome(not _is_slower(compiled, single, is_doubtful), *seconds, is_doubtful)


@dataclass
class Timed:
    """A function, and for each call the seconds that passed and those in which threads of this process had a core."""

    run: Callable[[], object]
    seconds: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)

    def call(self) -> None:
        began, had = time.perf_counter(), time.process_time()
        self.run()
        self.seconds.append(time.perf_counter() - began)
        self.busy.append(time.process_time() - had)

    @property
    def is_spread(self) -> bool:
        return median(self.seconds) > SPREAD * min(self.seconds)


def _time(compiled: Timed, single: Timed) -> bool:
    """Call both in rounds, short ones a few times in a row, and say whether what is measured is doubtful.

    Rounds go on for as long as the calls are close or doubtful. A few are made in any case before code is found slower:
    threads that wait for a core make a call take a hundred times as long, and the next one may be as it should.
    """
    for each in (compiled, single):
        each.run()  # warms up
    began, held = time.perf_counter(), time.thread_time()
    times = 1
    for number in range(1, MOST_ROUNDS + 1):
        for each in (compiled, single):
            for _ in range(times):
                each.call()
        times = IN_A_ROW if max(compiled.seconds[-1], single.seconds[-1]) < SHORT else 1
        passed, shortest = time.perf_counter() - began, [min(compiled.seconds), min(single.seconds)]
        is_doubtful = (
            time.thread_time() - held < HELD * passed
            or compiled.is_spread
            or single.is_spread
            or shortest[0] > FAR * shortest[1]
        )
        is_enough = number >= ROUNDS or shortest[0] <= SMALLEST * shortest[1] or passed > PATIENT
        is_clear = number >= ROUNDS and max(shortest) > CLOSE * min(shortest)
        if (is_clear and not is_doubtful) or (is_enough and passed > LONGEST):
            break
    return is_doubtful


def _is_slower(compiled: Timed, single: Timed, is_doubtful: bool) -> bool:
    """Whether compiled code was shown to be slower. In doubt it has to take far longer in every round, and keep the
    cores busy for far longer: what waits for other programs, or for threads without a core, is not slow by itself.
    """
    if len(compiled.seconds) < ROUNDS:
        return False
    if not is_doubtful:
        return min(compiled.seconds) > SMALLEST * min(single.seconds)
    rounds = zip(compiled.seconds, single.seconds, strict=True)
    is_always = min(compiled.seconds) > WIDE * min(single.seconds) and all(one > other for one, other in rounds)
    return is_always and min(compiled.busy) > WIDE * min(single.busy)


def made_up(body: GraphModule, room: int) -> list[Any] | None:
    """Inputs like those the graph was traced with; None if they need more memory than there is room for."""
    values = [node.meta.get("val") for node in body.graph.find_nodes(op="placeholder")]
    return None if _bytes(values) > room else list(map(_made_up, values))


def _bytes(values: Sequence[Any]) -> int:
    return sum(_extent(value) * value.element_size() for value in values if isinstance(value, Tensor))


def _made_up(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return list(map(_made_up, value))
    if isinstance(value, Tensor):
        return _like(value)
    return hint_of(value, 1) if isinstance(value, torch.SymInt) else value


def _extent(value: Tensor) -> int:
    """How many elements of memory a tensor reaches over."""
    return extent(*([hint_of(each, 1) for each in sizes] for sizes in (value.shape, value.stride())))


def _like(value: Tensor) -> Tensor:
    flat = torch.zeros(_extent(value), dtype=value.dtype, device=value.device)
    if value.dtype.is_floating_point and value.dtype.itemsize > 1:
        flat.normal_(generator=torch.Generator(value.device).manual_seed(0))
    size, stride = ([hint_of(each, 1) for each in each_of] for each_of in (value.shape, value.stride()))
    return flat.as_strided(size, stride)
