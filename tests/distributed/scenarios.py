"""Training in two processes: the same three steps with aot_eager and with graphex, one scenario for each way to do it.

A scenario trains with a backend (aot_eager or graphex) and returns what has to be equal bit for bit: losses, and
parameters and buffers at the end. With graphex, the journal of what it compiled comes along.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import graphex
from graphex.loops import step_program
from tests.harness.tape import TapeDevice

STEPS = 3


@dataclass
class Run:
    """What one scenario did with one backend."""

    losses: list[Tensor]
    parameters: list[Tensor]
    journal: graphex.Journal | None = None
    notes: dict[str, Any] = field(default_factory=dict)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


class Model(nn.Module):
    """Two blocks and a batch norm, whose buffers DDP broadcasts."""

    def __init__(self, width: int = 8, unused: bool = False) -> None:
        super().__init__()
        self.first, self.second = Block(width), Block(width)
        self.spare = nn.Linear(width, width) if unused else None
        self.batch_norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.batch_norm(self.second(self.first(x)))


class Stack(nn.Module):
    """Blocks without buffers, over sequences."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = Block(width), Block(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def batch(step: int, *shape: int) -> Tensor:
    """Each rank sees data of its own."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def train(
    compiled: Callable[[Tensor], Tensor], model: nn.Module, shape: tuple[int, ...] = (4, 8), *, same_data: bool = False
) -> Run:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    losses = []
    for step in range(STEPS):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(step)) if same_data else batch(step, *shape)
        loss = compiled(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return run(losses, model, compiled)


def run(losses: list[Tensor], model: nn.Module, compiled: object) -> Run:
    tensors = [*model.parameters(), *model.buffers()]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    try:
        journal = graphex.journal(compiled)
    except graphex.InputError:  # compiled with aot_eager, or not compiled
        journal = None
    return Run(losses, [tensor.detach().clone() for tensor in local], journal)


# -- DistributedDataParallel --------------------------------------------------------------------------------------


def ddp_outside(backend: str) -> Run:
    ddp = DistributedDataParallel(seeded(Model))
    return train(torch.compile(ddp, backend=backend), ddp)


def ddp_around_a_compiled_module(backend: str) -> Run:
    ddp = DistributedDataParallel(torch.compile(seeded(Model), backend=backend))
    return train(ddp, ddp)


def ddp_around_a_module_compiled_in_place(backend: str) -> Run:
    model = seeded(Model)
    model.compile(backend=backend)
    ddp = DistributedDataParallel(model)
    return train(ddp, ddp)


def ddp_compiled_in_place(backend: str) -> Run:
    ddp = DistributedDataParallel(seeded(Model))
    ddp.compile(backend=backend)
    return train(ddp, ddp)


def ddp_with_a_backend_object(backend: str) -> Run:
    ddp = DistributedDataParallel(seeded(Model))
    given = graphex.get_backend({"verify": True}) if backend == "graphex" else backend
    done = train(torch.compile(ddp, backend=given), ddp)
    done.notes["same journal"] = backend != "graphex" or done.journal is given.journal
    return done


def ddp_with_several_buckets(backend: str) -> Run:
    ddp = DistributedDataParallel(seeded(lambda: Model(384)), bucket_cap_mb=1)  # two linears of 1.1 MB in each block
    done = train(torch.compile(ddp, backend=backend), ddp, (4, 384))
    if done.journal is not None:
        done.notes["several graphs"] = [graph.phase for graph in done.journal.graphs].count("backward") > 1
    return done


def ddp_with_several_buckets_inside(backend: str) -> Run:
    ddp = DistributedDataParallel(torch.compile(seeded(lambda: Model(384)), backend=backend), bucket_cap_mb=1)
    done = train(ddp, ddp, (4, 384))
    if done.journal is not None:
        done.notes["several graphs"] = [graph.phase for graph in done.journal.graphs].count("backward") > 1
    return done


def ddp_with_a_static_graph(backend: str) -> Run:
    ddp = DistributedDataParallel(seeded(Model), static_graph=True)
    return train(torch.compile(ddp, backend=backend), ddp)


def ddp_with_unused_parameters(backend: str) -> Run:
    ddp = DistributedDataParallel(seeded(lambda: Model(unused=True)), find_unused_parameters=True)
    return train(torch.compile(ddp, backend=backend), ddp)


def ddp_that_accumulates_gradients(backend: str) -> Run:
    ddp = DistributedDataParallel(seeded(Model))
    compiled = torch.compile(ddp, backend=backend)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, foreach=False)
    losses = []
    for step in range(STEPS):
        for part in range(2):
            with ddp.no_sync() if part == 0 else nullcontext():
                loss = compiled(batch(10 * step + part, 4, 8)).pow(2).mean()
                loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return run(losses, ddp, compiled)


def ddp_explained(backend: str) -> Run:
    """`explain` is none of the iterations: not even the first, in which a static graph is looked at."""
    ddp = DistributedDataParallel(seeded(Model), static_graph=True)
    compiled = torch.compile(ddp, backend=backend)
    report = graphex.explain(ddp, (batch(0, 4, 8),)) if backend == "graphex" else None
    done = train(compiled, ddp)
    if report is not None:
        done.notes["equal to eager"] = report.worst_difference == 0
        done.notes["both graphs"] = {graph.phase for graph in report.journal.graphs} >= {"forward", "backward"}
    return done


# -- sharded parameters -------------------------------------------------------------------------------------------


def fsdp(backend: str) -> Run:
    model = seeded(Stack)
    for block in (model.first, model.second):
        fully_shard(block)
    fully_shard(model)
    return train(torch.compile(model, backend=backend), model)


def fsdp_of_compiled_blocks(backend: str) -> Run:
    model = seeded(Stack)
    for block in (model.first, model.second):
        block.compile(backend=backend)
        fully_shard(block)
    fully_shard(model)
    done = train(model, model)
    done.journal = graphex.journal(model.first) if backend == "graphex" else None
    return done


def fsdp_of_checkpoints(backend: str) -> Run:
    model = seeded(Stack)
    model.first, model.second = map(checkpoint_wrapper, (model.first, model.second))
    for block in (model.first, model.second):
        fully_shard(block)
    done = train(torch.compile(fully_shard(model), backend=backend), model)
    if done.journal is not None:
        done.notes["computes again"] = any(each.status == "computed again" for each in done.journal.activations)
    return done


class Checkpoints(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.second, checkpoint(self.first, x, use_reentrant=False), use_reentrant=False).sin()


def checkpoints_of_fsdp(backend: str) -> Run:
    """FSDP's hooks inside of a checkpoint: Dynamo leaves all of it to Python, and the journal says where."""
    model = seeded(Checkpoints)
    for block in (model.first, model.second):
        fully_shard(block)
    done = train(torch.compile(fully_shard(model), backend=backend), model)
    if done.journal is not None:
        done.notes["says where"] = any("return checkpoint(self.second" in each.line for each in done.journal.breaks)
    return done


def tensor_parallel(backend: str) -> Run:
    model = seeded(Stack)
    for block in (model.first, model.second):
        parallelize_module(block, mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return train(torch.compile(model, backend=backend), model, same_data=True)


def sequence_parallel(backend: str) -> Run:
    model = seeded(Stack)
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    for block in (model.first, model.second):
        parallelize_module(block, mesh(), plan)
    split = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=False)
    parallelize_module(model, mesh(), split)
    compiled = torch.compile(model, backend=backend)
    done = train(lambda x: compiled(x).full_tensor(), model, (2, 4, 8), same_data=True)
    done.journal = graphex.journal(compiled) if backend == "graphex" else None
    return done


# -- a whole step -------------------------------------------------------------------------------------------------


def train_step_of_ddp(backend: str) -> Run:
    return stepped(backend, DistributedDataParallel(seeded(Model)))


def train_step_of_fsdp(backend: str) -> Run:
    model = seeded(Stack)
    for block in (model.first, model.second):
        fully_shard(block)
    return stepped(backend, fully_shard(model))


def stepped(backend: str, model: nn.Module) -> Run:
    """The same training by `train_step`, on a device with graphs: the step is none of them, and says why."""
    if backend != "graphex":
        return train(torch.compile(model, backend=backend), model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    with patch.object(step_program, "device_of", lambda devices: TapeDevice()), warnings.catch_warnings():
        warnings.simplefilter("ignore", graphex.GraphexWarning)
        step = graphex.train_step(model, lambda y, _: y.pow(2).mean(), optimizer, options={"regions": False})
        done = run([step(batch(number, 4, 8), None) for number in range(STEPS)], model, None)
    (record,) = [each for each in step.journal.fallbacks if "training step" in each.what]
    done.notes["says why"] = record.reason.endswith("synchronises gradients in hooks of the host")
    done.journal = graphex.Journal()
    for each in (*step.journal.graphs, *(each for each in step.journal.fallbacks if each is not record)):
        done.journal.add(each)
    return done


SCENARIOS: dict[str, Callable[[str], Run]] = {
    scenario.__name__: scenario
    for scenario in (
        ddp_outside,
        ddp_around_a_compiled_module,
        ddp_around_a_module_compiled_in_place,
        ddp_compiled_in_place,
        ddp_with_a_backend_object,
        ddp_with_several_buckets,
        ddp_with_several_buckets_inside,
        ddp_with_a_static_graph,
        ddp_with_unused_parameters,
        ddp_that_accumulates_gradients,
        ddp_explained,
        fsdp,
        fsdp_of_compiled_blocks,
        fsdp_of_checkpoints,
        checkpoints_of_fsdp,
        tensor_parallel,
        sequence_parallel,
        train_step_of_ddp,
        train_step_of_fsdp,
    )
}


def problems(scenario: Callable[[str], Run]) -> Iterator[str]:
    """What a scenario with graphex does otherwise than with aot_eager."""
    torch._dynamo.reset()
    wanted = scenario("aot_eager")
    torch._dynamo.reset()
    found = scenario("graphex")
    for kind, ours, theirs in (
        ("loss", found.losses, wanted.losses),
        ("parameter", found.parameters, wanted.parameters),
    ):
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            if not torch.equal(one, other):
                yield f"{kind} {index} differs by {(one - other).abs().max().item()}"
    yield from (f"not so: {name}" for name, is_so in found.notes.items() if not is_so)
    if found.journal is None:
        yield "there is no journal"
        return
    phases = {graph.phase for graph in found.journal.graphs}
    if not phases >= {"forward", "backward"}:
        yield f"the journal has these graphs only: {sorted(phases)}"
    yield from (
        f"{record.what}: {record.reason}" for record in found.journal.fallbacks if "tensor subclass" not in record.what
    )
