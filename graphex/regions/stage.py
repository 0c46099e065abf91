"""Compile what no rule has fused: regions of the graph become one node each, run by code that Inductor makes.

    before:  a = mm(x, w); b = add(a, bias); c = gelu(b); copy_(state, c)
    after:   region_0 = region_0(x, w, bias); c = region_0[0]; copy_(state, c)

Regions are grown around writes in place, so this pass runs after these are restored. A region that does not compile
stays as it is, with the reason on record. With `regions="background"` the regions are put in place at once, run their
nodes, and get their code later, from another process.

The random numbers of dropout in a training forward come from seeds, which one op draws for all of them:

    before:  h = native_dropout(x, 0.1, True)             a kernel of its own, between two regions
    after:   s = dropout_seeds(1); h = dropout(x, s[0], 0.1)      h is a part of the region around it

Masks are as random as eager's, differ from step to step and follow the seed of the generator, but are others. The
backward reads the mask, which is saved: nothing is drawn twice.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import count
from math import isfinite, prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node, map_arg

from graphex.analysis import is_effectful, node_line, placement
from graphex.analysis.dependencies import can_raise
from graphex.analysis.effects import (
    bodies_of,
    declare_region,
    is_formula,
    is_kernel,
    is_ours,
    moves_between_devices,
    operator_of,
    synchronisation,
)
from graphex.analysis.graphs import attribute_of, devices_of
from graphex.analysis.memory import tail_of
from graphex.analysis.shapes import known_contiguous
from graphex.config import CompilerConfig
from graphex.device import several_accelerators
from graphex.env import regions_enabled, shown_on_terminal
from graphex.errors import one_line
from graphex.ops.definition import compiles_kernels
from graphex.ops.tokens import has_odd_products, tile_height
from graphex.records import FellBack, RegionBorder, RegionCompiled
from graphex.regions.compiler import (
    Outcome,
    RegionCode,
    as_usual,
    awaited_code,
    compile_region,
    faster,
    in_layouts,
    may_try,
    region_key,
    settings,
    tried,
    why_no_compiler,
    why_no_kernels,
)
from graphex.regions.decompositions import is_odd_product
from graphex.regions.grow import Growth, RegionPlan, grow, put_in_place
from graphex.regions.members import computed_indices, is_generated
from graphex.regions.region import Region
from graphex.rewrite.base import GraphPass, Work
from graphex.rewrite.metadata import evaluate, fake_mode_of, inherit
from graphex.rewrite.partition import bring_together
from graphex.torch_private.dynamo import TensorifyScalarRestartAnalysis
from graphex.torch_private.inductor import kernels_awaited_later
from graphex.torch_private.symbolic import pytree

Waits = Sequence[Callable[[], None]]  # for kernels of a region

aten = torch.ops.aten
ARITHMETIC = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
NOTHING = "nothing is compiled in regions"
ODD = "odd_product"
LARGEST = 2**16  # elements of a constant that is kept on the device
# Ops that make the same tensor of the same numbers in every call.
FACTORIES = frozenset(
    getattr(torch.ops.aten, name) for name in ("arange", "full", "ones", "zeros", "linspace", "eye", "scalar_tensor")
)


class CompileRegions(GraphPass):
    """Grow regions, compile each kind once, and put the compiled ones in place of their nodes."""

    name = "compile_regions"
    option = "regions"
    rule = "region"
    channels_last = "channels_last"  # made on the joint graph of a training step, before it is cut

    def rules(self) -> tuple[str, ...]:
        return self.rule, SEEDED, self.channels_last, ODD

    def enabled(self, config: CompilerConfig) -> bool:
        # Dumps of tensor data want the value of every node.
        return super().enabled(config) and regions_enabled() and not config.dump_tensor_data

    def apply(self, work: Work) -> None:
        if not work.allows(self.rule) or not any(map(is_generated, work.graph.nodes)):
            return
        if several := several_accelerators(devices_of(work.graph)):
            self._say(work, NOTHING, f"its tensors are on {several}, and a region is compiled for one device")
        if (device := region_device(work.graph)) is None:
            return
        if reason := _why_not_grown(work.graph) or _why_not_rounded(work, device):
            self._say(work, NOTHING, reason)
            return
        move_constants(work, device)
        wrap_indices(work.graph, device)
        seed_dropouts(work, device)
        growth = grow(work.gm, device, work.config.regions_keep_out, _tail(work, device))
        _note_borders(work, growth)
        if not growth.plans:
            work.remark = growth.reason
            return
        later = self._is_compiled_later(work, growth.plans)
        # asked last: it imports Inductor, which takes seconds
        if reason := why_no_kernels(device) if later else why_no_compiler(device):
            self._say(work, NOTHING, reason, warn=device.type in ("cpu", "cuda"))
            return
        patches = settings(work.config)
        if later:
            compiled = _awaited(growth.plans, patches)
        else:
            compiled = self._compiled(work, growth.plans, in_layouts(patches, work.graph), device)
        bring_together(work.gm, [plan.nodes for plan, _ in compiled])
        for (plan, code), name in zip(compiled, _names(work.gm), strict=False):
            _put(work, plan, code, name)

    def _is_compiled_later(self, work: Work, plans: list[RegionPlan]) -> bool:
        """Whether the first calls do without compiled code, as the user asks for; a reason against it is on record."""
        if work.config.regions != "background":
            return False
        reason = "the option 'verify' compares what they compute" if work.config.verify else ""
        if any(_has_symbols(plan.body.graph) for plan in plans):
            reason = "sizes vary, and what compiling asks of them has to be known before the first call"
        if reason:
            work.note(lambda graph, _: FellBack(graph, "regions are compiled before the first call", reason))
        return not reason

    def _compiled(
        self, work: Work, plans: list[RegionPlan], patches: dict[str, Any], device: torch.device
    ) -> list[tuple[RegionPlan, RegionCode]]:
        """The plans to put in place, with their code. Regions that are alike share code and trial."""
        keys = [region_key(plan.body, patches) for plan in plans]
        kinds: dict[Hashable, RegionPlan] = {}
        for key, plan in zip(keys, plans, strict=True):
            kinds.setdefault(key, plan)
        made = self._each_made(work, kinds, patches, device)
        kept: list[tuple[RegionPlan, RegionCode]] = []
        names = _names(work.gm)
        for key, plan in zip(keys, plans, strict=True):
            if (found := made[key]) is None:
                continue
            code, outcome = found
            name = next(names) if outcome.is_kept else ""
            _note(work, name, plan, code, outcome, is_new=plan is kinds[key])
            if outcome.is_kept:
                kept.append((plan, code))
        return kept

    def _each_made(
        self, work: Work, kinds: dict[Hashable, RegionPlan], patches: dict[str, Any], device: torch.device
    ) -> dict[Hashable, tuple[RegionCode, Outcome] | None]:
        """The code of each kind of regions, and the outcome of its trial; None, with a record, for one that does not
        compile or run.

        Inductor writes one after the other: its configuration, and what tracing changes, are the whole process's. The
        kernels of a region compile side by side, in Inductor's processes, or on a CPU in its threads, beside the region
        that is written next; those of graphex beside them, in threads.
        """
        written: dict[Hashable, tuple[list[RegionCode], Waits]] = {}
        codes: dict[Hashable, list[RegionCode]] = {}
        made: dict[Hashable, tuple[RegionCode, Outcome] | None] = dict.fromkeys(kinds)
        with shown_on_terminal() as say:
            with _kernels_meanwhile(work.graph):
                for number, (key, plan) in enumerate(kinds.items(), 1):
                    say(f"compiling region {number} of {len(kinds)} ({len(plan.nodes)} nodes)")
                    with self._or_as_it_is(work, plan), _awaited_later(device, patches) as waits:
                        written[key] = _codes(plan.body, patches), waits
                for key, each in written.items():
                    with self._or_as_it_is(work, kinds[key]):
                        codes[key] = _with_kernels(*each)
            for key in codes:
                with self._or_as_it_is(work, kinds[key]):
                    made[key] = _tried(kinds[key].body, codes[key], key, device)
        return made

    @contextmanager
    def _or_as_it_is(self, work: Work, plan: RegionPlan) -> Iterator[None]:
        """Inductor may raise anything: the nodes of the region run one by one then, with a record."""
        try:
            yield
        except TensorifyScalarRestartAnalysis:  # it asks Dynamo to trace again
            raise
        except Exception as error:
            self._say(work, f"a region of {len(plan.nodes)} nodes is not compiled", one_line(error), warn=True)

    def _say(self, work: Work, what: str, reason: str, *, warn: bool = False) -> None:
        """Record that something is done without, and why; a user who could expect it is warned too."""
        work.remark = reason
        if warn:
            work.fall_back_later(what, reason, "")
        else:
            work.note(lambda graph, _: FellBack(graph, what, reason))


@contextmanager
def _kernels_meanwhile(graph: Graph) -> Iterator[None]:
    """The kernels of graphex's ops compile while the block runs."""
    if not compiles_kernels():
        yield
        return
    from graphex.kernels.launch import compiling_kernels

    with compiling_kernels(filter(is_ours, graph.nodes)):
        yield


def _codes(body: GraphModule, patches: dict[str, Any]) -> list[RegionCode]:
    """The code of a region; for max-autotune also the usual one, which it has to beat."""
    code = compile_region(body, patches)
    return [code, compile_region(body, as_usual(patches))] if code.autotuned and may_try(body) else [code]


def _awaited_later(device: torch.device, patches: Mapping[str, Any]) -> AbstractContextManager[Waits]:
    return kernels_awaited_later(patches) if device.type == "cpu" else nullcontext(())


def _with_kernels(codes: list[RegionCode], waits: Waits) -> list[RegionCode]:
    """The codes of a region when their kernels are compiled."""
    began = time.perf_counter()
    for wait in waits:
        wait()
    return [replace(code, seconds=code.seconds + time.perf_counter() - began) for code in codes]


def _tried(
    body: GraphModule, codes: Sequence[RegionCode], key: Hashable, device: torch.device
) -> tuple[RegionCode, Outcome]:
    code = codes[0] if len(codes) == 1 else faster(body, codes[1], codes[0], key, device)
    return code, tried(body, code, key, device)


def region_device(graph: Graph) -> torch.device | None:
    """The one device that regions of a graph are compiled for: an accelerator before the CPU; None without tensors."""
    devices = devices_of(graph)
    accelerators = sorted(map(str, (device for device in devices if device.type not in ("cpu", "meta"))))
    if len(accelerators) > 1:
        return None
    return torch.device(accelerators[0]) if accelerators else next(iter(devices), None)


def move_constants(work: Work, device: torch.device) -> None:
    """Give constants that the host holds, and ops on the device read, a copy on the device.

        before:  c = get_attr("c"); root = sqrt(c); y = div(x, root)           x is on the device, c on the host
        after:   y = div(x, 2.5)

        before:  i = arange(64); j = sub(unsqueeze(i, 1), i); y = index(x, [j])
        after:   j = get_attr("j_on_cuda"); y = index(x, [j])

    What the host computes from numbers and such constants alone, and copies of it to the device, are computed here,
    once. Arithmetic reads one element as a number, which is what eager makes of it; other ops read a copy on the
    device, where it means the same. A device graph cannot copy from the host's memory.
    """
    if device.type == "cpu":
        return
    known: dict[Node, Tensor] = {}
    for node in list(work.graph.nodes):
        constant = _constant(work, node, known, device)
        if constant is None:
            continue
        known[node] = constant
        readers = [user for user in node.users if _reads_scalar(user, device)]
        if readers := [user for user in readers if not _read_number(work, user, node, constant)]:
            _read_copy(work, node, constant.to(device), readers)
    for node in reversed(known):
        if not node.users:
            work.graph.erase_node(node)


def _constant(work: Work, node: Node, known: Mapping[Node, Tensor], device: torch.device) -> Tensor | None:
    """The value of a node that is small, from the memory of the host, and the same in every call."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not _is_small(value) or work.aliases.is_written(node):
        return None
    if value.device.type != "cpu" and (value.device != device or node.op == "get_attr"):
        return None
    if node.op == "get_attr":
        constant = attribute_of(work.gm, str(node.target))
        return constant if isinstance(constant, Tensor) and not value.dim() else None
    op, read = operator_of(node), node.all_input_nodes
    if op is None or is_effectful(node) or can_raise(node) or not all(each in known for each in read):
        return None
    if not read and (op.overloadpacket not in FACTORIES or value.device.type != "cpu"):
        return None
    args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda each: known[each])
    made: Tensor = op(*args, **kwargs)
    return made


def _read_number(work: Work, reader: Node, node: Node, constant: Tensor) -> bool:
    """Have arithmetic on floats read a constant as a number, if its result is of the same type then."""
    is_host = constant.device.type == "cpu"  # by a tensor on the device eager divides
    if not is_host or constant.dim() or reader.target not in ARITHMETIC or reader.kwargs or reader.args[1] is not node:
        return False
    number, dtype = constant.item(), reader.meta["val"].dtype
    other = reader.args[0].meta.get("val") if isinstance(reader.args[0], Node) else None
    if not dtype.is_floating_point or not isinstance(other, Tensor) or not isfinite(number):
        return False
    if torch.result_type(other, number) != dtype:
        return False
    reader.args = (reader.args[0], number)
    work.changes += 1
    return True


def _is_small(value: Tensor) -> bool:
    sizes = list(value.shape)
    return all(isinstance(size, int) for size in sizes) and prod(sizes) <= LARGEST


def _read_copy(work: Work, node: Node, constant: Tensor, readers: list[Node]) -> None:
    """Have ops on the device read a constant there instead of what the host computes."""
    name = f"{node.name}_on_{constant.device.type}"
    while hasattr(work.gm, name):
        name += "_"
    work.gm.register_buffer(name, constant, persistent=False)
    with work.graph.inserting_after(node):
        copy = work.graph.get_attr(name)
    copy.meta = dict(node.meta)
    value = node.meta["val"]
    with value.fake_mode:
        copy.meta["val"] = value.to(constant.device)
    for reader in readers:
        reader.replace_input_with(node, copy)
    work.changes += 1


def _reads_scalar(node: Node, device: torch.device) -> bool:
    """Whether an op on the device reads values that it is given, and neither copies nor returns them."""
    value = node.meta.get("val")
    is_there = isinstance(value, Tensor) and value.device == device
    return is_there and operator_of(node) is not None and is_kernel(node) and not moves_between_devices(node)


def wrap_indices(graph: Graph, device: torch.device) -> None:
    """Have the scores of `flex_attention` count negative indices from the end, which Inductor's kernel does not.

    before:  score + table[i - j]            after:  k = i - j; score + table[where(k < 0, k + 128, k)]
    """
    if device.type == "cpu":
        return
    bodies = {id(body): body for node in graph.nodes if is_formula(node) for body in bodies_of(node)}
    for body in bodies.values():
        for node, place, size in computed_indices(body.graph):
            if isinstance(size, int):
                indices = list(node.args[1])  # type: ignore[arg-type]
                indices[place] = _counted_from_the_end(body.graph, node, indices[place], size)
                node.args = (node.args[0], indices)
        body.recompile()


def _counted_from_the_end(graph: Graph, before: Node, index: Any, size: int) -> Node:
    with graph.inserting_before(before):
        is_negative = graph.call_function(aten.lt.Scalar, (index, 0))
        shifted = graph.call_function(aten.add.Tensor, (index, size))
        wrapped = graph.call_function(aten.where.self, (is_negative, shifted, index))
    for node in (is_negative, shifted, wrapped):
        node.meta = dict(index.meta)
    is_negative.meta["val"] = index.meta["val"] < 0
    return wrapped


def _tail(work: Work, device: torch.device) -> list[Node]:
    """The large product at the end of a graph, which runs after the replay. With max-autotune Inductor chooses its
    kernel; one of odd width that has no kernel of ours needs a region for its padded rows, and a copy in any case.
    """
    config = work.config
    is_captured = device.type == "cuda" and config.mode == "reduce-overhead" and not config.force_eager
    if work.phase != "inference" or not is_captured or config.clone_output is False or config.capture_sizes:
        return []
    nodes = tail_of(work.graph)
    return [] if nodes and is_odd_product(nodes[0]) and not _taken(work, nodes[0], device) else nodes


def _taken(work: Work, product: Node, device: torch.device) -> bool:
    """Whether a product of odd width becomes an op that writes its rows where they belong."""
    x, w = (node.meta["val"] for node in product.all_input_nodes)
    is_fit = tile_height(x.shape[0], *w.shape) and has_odd_products(device)
    if not work.allows(ODD) or not is_fit or not known_contiguous(x):
        return False
    product.target = torch.ops.graphex.odd_mm.default
    work.rewired(product, rule=ODD, because="its rows are not aligned, and a kernel writes them where they belong")
    return True


def _why_not_grown(graph: Graph) -> str:
    placed = next((node for node in graph.nodes if synchronisation(node) or placement(node) is not None), None)
    return "" if placed is None else f"the graph works on several streams ('{placed.name}')"


def _why_not_rounded(work: Work, device: torch.device) -> str:
    """Why regions would not round 16-bit values as the user asks for; empty if they do."""
    if work.config.region_numerics != "eager" or device.type != "cpu" or torch.__version__ >= "2.13":
        return ""
    values = pytree.tree_leaves([node.meta.get("val") for node in work.graph.nodes])
    if not any(isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16) for value in values):
        return ""
    return f"the C++ code of torch {torch.__version__} does not round 16-bit values as eager does"


def _put(work: Work, plan: RegionPlan, code: RegionCode, name: str) -> None:
    names = [node.name for node in plan.nodes]
    first = next((node for node in plan.nodes if node_line(node)), plan.nodes[0])
    line = node_line(first)
    old = list(plan.nodes)
    work.gm.add_submodule(name, Region(name, plan.body, code, line, work.fall_back_later))
    call = put_in_place(work.gm, plan, name)
    inherit(call, *old)
    declare_region(call, plan.contract)
    work.fused(
        names, [call], rule=CompileRegions.rule, because="Inductor compiles these nodes as one function", line=line
    )


def _names(gm: GraphModule) -> Iterator[str]:
    """Names for the regions of a graph: a module or a tensor that a pass has put there keeps its own."""
    return (name for number in count() if not hasattr(gm, name := f"region_{number}"))


def _awaited(plans: list[RegionPlan], patches: dict[str, Any]) -> list[tuple[RegionPlan, RegionCode]]:
    """The plans with code that is to come, one for those that are alike."""
    codes: dict[Hashable, RegionCode] = {}
    return [(plan, codes.setdefault(region_key(plan.body, patches), awaited_code())) for plan in plans]


def _has_symbols(graph: Graph) -> bool:
    """Whether a size in a graph is symbolic."""
    values = pytree.tree_leaves([node.meta.get("val") for node in graph.nodes])
    sizes = [size for value in values if isinstance(value, Tensor) for size in (*value.shape, *value.stride())]
    return any(isinstance(each, torch.SymInt) for each in (*values, *sizes))


def _note(work: Work, name: str, plan: RegionPlan, code: RegionCode, outcome: Outcome, *, is_new: bool) -> None:
    status = ("compiled" if is_new else "reused") if outcome.is_kept else "slower"
    seconds = code.seconds if is_new else 0.0
    work.note(lambda graph, _: region_record(graph, name, status, plan.nodes, code, seconds, outcome))


def region_record(
    graph: str,
    name: str,
    status: str,
    nodes: Sequence[Node],
    code: RegionCode,
    seconds: float,
    outcome: Outcome = Outcome(),  # noqa: B008  (frozen)
) -> RegionCompiled:
    """The record of a region of these nodes; `seconds` were spent to compile it."""
    return RegionCompiled(
        graph,
        name,
        status,
        nodes=len(nodes),
        calls=sum(map(is_kernel, nodes)),
        generated=sum(map(is_generated, nodes)),
        fused_ops=sum(map(_is_ours, nodes)),
        inlined=tuple(map(str, code.inlined)),
        kernels=code.kernels,
        seconds=seconds,
        seconds_compiled=outcome.compiled,
        seconds_single=outcome.single,
        doubtful=outcome.is_doubtful,
        lines=tuple(dict.fromkeys(filter(None, map(node_line, nodes)))),
        autotuned=code.autotuned,
        seconds_tuned=code.tuned,
        seconds_untuned=code.untuned,
        split_products=code.split_products,
        eager_layouts=code.eager_layouts,
    )


def _is_ours(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in ("graphex", "npu")


def _note_borders(work: Work, growth: Growth) -> None:
    for border in growth.borders:
        work.note(
            lambda graph, _, border=border: RegionBorder(  # type: ignore[misc]
                graph, border.node, border.op, border.reason, border.line, border.count
            )
        )
    for refusal in growth.refused:
        node = refusal.node
        assert node is not None
        work.refuse(node, refusal, rule=CompileRegions.rule)


# -- dropout by seeds --------------------------------------------------------------------------------------------------


SEEDED = "seeded_dropout"
ON = ("cuda",)  # devices where it is worth having masks that are not eager's
TYPES = (torch.float32, torch.float16, torch.bfloat16)
native_dropout = torch.ops.aten.native_dropout.default


def seed_dropouts(work: Work, device: torch.device) -> None:
    """Let every dropout on the device that a region can hold take its random numbers from a seed."""
    if work.phase != "forward" or not work.allows(SEEDED) or not _is_wanted(work.config, device):
        return
    nodes: list[Node] = []
    for node in work.graph.find_nodes(op="call_function", target=native_dropout):
        if reason := _why_not(node, device):
            work.refuse(node, reason, rule=SEEDED)
        else:
            nodes.append(node)
    if not nodes:
        return
    for node, seed in zip(nodes, _seeds(work, nodes, device), strict=True):
        node.target, node.args = torch.ops.graphex.dropout.default, (node.args[0], seed, node.args[1])
        work.rewired(node, rule=SEEDED, because="a region computes the mask from a seed")


def _is_wanted(config: CompilerConfig, device: torch.device) -> bool:
    if config.verify:  # what is drawn is compared with what the graph drew before
        return False
    is_gain = device.type in ON and config.region_numerics == "fast"
    return config.region_dropout == "seeded" or (config.region_dropout == "auto" and is_gain)


def _why_not(node: Node, device: torch.device) -> str:
    """Why a dropout stays as it is; empty if it need not."""
    x, p, trains = (*node.args, *[None] * 3)[:3]
    value = x.meta.get("val") if isinstance(x, Node) else None
    if not isinstance(value, Tensor) or value.device != device or value.dtype not in TYPES:
        return "its argument is on another device, or of an unusual type"
    if trains is not True or not isinstance(p, float) or not 0 < p < 1:
        return "it drops everything, nothing, or nothing that is known"
    if placement(node) is not None:
        return "it is placed on a stream"
    return "" if known_contiguous(value) else "its argument does not lie in memory row by row"


def _seeds(work: Work, nodes: list[Node], device: torch.device) -> list[Node]:
    """A seed for each of these dropouts, drawn by one node before the first."""
    with work.graph.inserting_before(nodes[0]):
        drawn = work.graph.call_function(torch.ops.graphex.dropout_seeds.default, (len(nodes), device))
        seeds = [work.graph.call_function(operator.getitem, (drawn, place)) for place in range(len(nodes))]
    mode = fake_mode_of(work.gm)
    assert mode is not None
    for node in (drawn, *seeds):
        node.meta["val"] = evaluate(work.gm, node, mode)
        inherit(node, *nodes)
    return seeds
