"""A training step as one replay computes what the same step does in eager, and says why where it cannot be one."""

from __future__ import annotations

import copy
import itertools
import math
import operator
import os
import random
import sys
import weakref
from array import array
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial, partialmethod, singledispatch
from inspect import CO_GENERATOR
from pathlib import Path
from threading import local
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._prims.rng_prims import run_and_save_rng_state
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, CosineAnnealingLR, ExponentialLR, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import graphex

STEPS = 9


class Tied(nn.Module):
    """A token model whose head is its embedding, with a frozen layer, a norm with statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.drop(torch.tanh(self.norm(self.frozen(self.embedding(tokens))))))


def model_on(where: str, kind: Callable[[], nn.Module] = Tied) -> nn.Module:
    torch.manual_seed(0)
    return kind().to(where)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def tokens(where: str, count: int = STEPS, rows: int = 6) -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(7)
    draw = lambda: torch.randint(0, 12, (rows,), generator=made).to(where)  # noqa: E731
    return [(draw(), draw()) for _ in range(count)]


def points(where: str, count: int = STEPS, rows: int = 6) -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(7)
    draw = lambda: torch.randn(rows, 4, generator=made).to(where)  # noqa: E731
    return [(draw(), torch.randint(0, 3, (rows,), generator=made).to(where)) for _ in range(count)]


def adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True, **options)


def trained(step: Callable[..., Any], batches: list[Any], seed: int = 3) -> list[float]:
    torch.manual_seed(seed)
    return [float(step(*batch)) for batch in batches]


def written_out(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Tensor]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def count(step: Any, what: str) -> int:
    """Of the step itself, and not of graphs inside of it."""
    return sum(counter[what] for name, counter in step.journal.counts.items() if name.endswith(" step"))


def reasons(step: Any) -> list[str]:
    return [record.reason for record in step.journal.fallbacks]


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def same_state(found: nn.Module, wanted: nn.Module) -> None:
    close(dict(found.state_dict()), dict(wanted.state_dict()))


def test_steps_equal_eager_with_dropout_statistics_tied_and_frozen_weights(where):
    mine, theirs = model_on(where), model_on(where)
    step = graphex.train_step(mine, functional.cross_entropy, adam(mine))
    found = trained(step, tokens(where))
    wanted = trained(written_out(theirs, adam(theirs)), tokens(where))
    close(found, wanted)
    same_state(mine, theirs)
    assert (count(step, "captured"), count(step, "replays"), reasons(step)) == (1, STEPS - 3, [])
    assert all(parameter.grad is None for parameter in mine.parameters())


def test_a_loss_from_before_that_is_kept_does_not_disturb_the_step(where):
    """Its graph holds autograd's accumulators, which were made on the stream of that time."""
    mine, theirs = model_on(where), model_on(where)
    x, y = tokens(where, 1)[0]
    kept = [functional.cross_entropy(torch.compile(each, backend="graphex")(x), y) for each in (mine, theirs)]
    step = graphex.train_step(mine, functional.cross_entropy, adam(mine))
    found = trained(step, tokens(where))
    close(found, trained(written_out(theirs, adam(theirs)), tokens(where)))
    same_state(mine, theirs)
    assert (count(step, "captured"), reasons(step)) == (1, [])
    assert all(each.grad_fn is not None for each in kept)


def test_nothing_inside_of_a_step_is_captured_on_its_own(where):
    model = model_on(where)
    step = graphex.train_step(model, functional.cross_entropy, adam(model))
    trained(step, tokens(where))
    assert {record.phase for record in step.journal.graphs} == {"forward", "backward"}
    assert [record.graph for record in step.journal.captures] == ["Tied step"]


def test_a_function_as_people_write_it_is_a_step(where):
    mine, theirs = model_on(where), model_on(where)
    optimizer = adam(mine)
    scheduler = StepLR(optimizer, 2, 0.5)

    @graphex.train_step
    def step(x, y):
        optimizer.zero_grad()
        loss = functional.cross_entropy(mine(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(mine.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        return {"loss": loss}

    found = [step(*batch)["loss"] for batch in seeded(tokens(where))]
    other = adam(theirs)
    rates = StepLR(other, 2, 0.5)
    wanted = []
    for x, y in seeded(tokens(where)):
        other.zero_grad()
        loss = functional.cross_entropy(theirs(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        other.step()
        rates.step()
        wanted.append(loss.detach())
    close(found, wanted)
    same_state(mine, theirs)
    assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"]
    assert [count(step, "captured"), *reasons(step)] == [1]
    close([each.grad for each in mine.parameters()], [each.grad for each in theirs.parameters()])
    assert mine._compiled_call_impl is None


def test_a_module_of_torch_itself_is_compiled_in_a_function_too(where):
    model = model_on(where, mlp)
    step = graphex.train_step(written_out(model, adam(model)))
    trained(step, points(where, 2))
    assert {record.phase for record in step.journal.graphs} == {"forward", "backward"}


def test_a_name_may_stand_for_another_model_later(where):
    trained_here: dict[str, Any] = {}

    @graphex.train_step
    def step(x, y):
        loss = functional.cross_entropy(trained_here["model"](x), y)
        loss.backward()
        trained_here["optimizer"].step()
        trained_here["optimizer"].zero_grad()
        return loss

    for _ in range(2):
        mine, theirs = model_on(where, mlp), model_on(where, mlp)
        trained_here |= {"model": mine, "optimizer": adam(mine)}
        close(trained(step, points(where)), trained(written_out(theirs, adam(theirs)), points(where)))
    assert [count(step, "captured"), *reasons(step)] == [2]


def seeded(batches: list[Any]) -> list[Any]:
    torch.manual_seed(3)
    return batches


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD, torch.optim.AdamW])
def test_the_learning_rate_is_an_input_of_the_graph(make, where):
    mine, theirs = model_on(where, mlp), model_on(where, mlp)
    groups = [[{"params": m[0].parameters(), "lr": 0.05}, {"params": m[2].parameters()}] for m in (mine, theirs)]
    optimizers = [make(each, lr=0.01) for each in groups]
    schedulers = [CosineAnnealingLR(each, 20) for each in optimizers]
    step = graphex.train_step(mine, functional.cross_entropy, optimizers[0])
    plain = written_out(theirs, optimizers[1])
    for number, (x, y) in enumerate(points(where, 12)):
        close(step(x, y), plain(x, y).detach())
        for each in schedulers:
            each.step()
        if number == 8:
            for each in optimizers:
                each.param_groups[1]["lr"] = 0.2
    assert [count(step, "captured"), *reasons(step)] == [1]
    assert all(isinstance(group["lr"], float) for group in optimizers[0].param_groups)
    assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"]
    same_state(mine, theirs)


OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "SGD with Nesterov's momentum": lambda given: torch.optim.SGD(given, 0.05, momentum=0.9, nesterov=True),
    "Adam with amsgrad": lambda given: torch.optim.Adam(given, 0.01, amsgrad=True),
    "Adam with amsgrad, foreach": lambda given: torch.optim.Adam(given, 0.01, amsgrad=True, foreach=True),
    "Adagrad": lambda given: torch.optim.Adagrad(given, 0.05, lr_decay=0.1),
    "RMSprop": lambda given: torch.optim.RMSprop(given, 0.01, momentum=0.5, centered=True),
    "NAdam": lambda given: torch.optim.NAdam(given, 0.01),
    "RAdam": lambda given: torch.optim.RAdam(given, 0.01),
    "Adamax": lambda given: torch.optim.Adamax(given, 0.01),
    "Adadelta": lambda given: torch.optim.Adadelta(given, 0.5),
    "ASGD": lambda given: torch.optim.ASGD(given, 0.05),
    "Rprop": lambda given: torch.optim.Rprop(given, 0.01),
    "Adafactor": lambda given: torch.optim.Adafactor(given, 0.05),
    "Muon": lambda given: torch.optim.Muon([each for each in given if each.dim() == 2], 0.05),
    "LBFGS": lambda given: torch.optim.LBFGS(given, 0.1, max_iter=3),
}


@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_optimizer_steps_as_in_eager_or_says_why_it_is_not_captured(make, where):
    def training(decorate: Callable[..., Any]) -> tuple[list[float], nn.Module, Any]:
        model = model_on(where, mlp)
        optimizer = make(list(model.parameters()))
        scheduler = StepLR(optimizer, 6, 0.5)

        @decorate
        def step(x, y):
            def closure() -> Tensor:
                model.zero_grad()
                loss = functional.cross_entropy(model(x), y)
                loss.backward()
                return loss

            return optimizer.step(closure)

        losses = []
        for batch in points(where, 12):
            losses.append(float(step(*batch)))
            scheduler.step()
        return losses, model, step

    found, mine, step = training(lambda step: graphex.train_step(step, compile=False))
    wanted, theirs, _ = training(lambda step: step)
    close(found, wanted)
    same_state(mine, theirs)
    assert (count(step, "replays") > 0) != (reasons(step) != [])


def test_two_models_and_two_optimizers_train_against_each_other_in_one_replay(where):
    def training(decorate: Callable[..., Any]) -> tuple[list[Any], list[nn.Module], Any]:
        makes, judges = model_on(where, lambda: nn.Linear(4, 4)), model_on(where, lambda: nn.Linear(4, 1))
        of_maker, of_judge = adam(makes), torch.optim.SGD(judges.parameters(), 0.1, momentum=0.9)

        @decorate
        def step(x, y):
            made = makes(torch.randn_like(x)).tanh()
            of_judge.zero_grad()
            right = functional.softplus(-judges(x)).mean() + functional.softplus(judges(made.detach())).mean()
            right.backward()
            nn.utils.clip_grad_value_(judges.parameters(), 0.05)
            of_judge.step()
            of_maker.zero_grad()
            wrong = functional.softplus(-judges(made)).mean()
            wrong.backward()
            of_maker.step()
            return right.detach(), wrong.detach()

        torch.manual_seed(3)
        return [tuple(map(float, step(*batch))) for batch in points(where)], [makes, judges], step

    found, mine, step = training(lambda step: graphex.train_step(step, compile=False))
    wanted, theirs, _ = training(lambda step: step)
    close(found, wanted)
    for some, others in zip(mine, theirs, strict=True):
        same_state(some, others)
    assert [count(step, "captured"), *reasons(step)] == [1]


@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
def test_an_optimizer_that_takes_no_tensor_as_its_rate_is_captured_for_a_rate(where):
    class Plain(torch.optim.Optimizer):
        def __init__(self, parameters, lr):
            super().__init__(parameters, {"lr": lr})

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for each in group["params"]:
                    each.add_(each.grad, alpha=-group["lr"])

    mine, theirs = model_on(where, mlp), model_on(where, mlp)
    optimizers = [Plain(model.parameters(), 0.1) for model in (mine, theirs)]
    step, plain = (
        graphex.train_step(mine, functional.cross_entropy, optimizers[0]),
        written_out(theirs, optimizers[1]),
    )
    for number, (x, y) in enumerate(points(where, 12)):
        if number == 6:
            for each in optimizers:
                each.param_groups[0]["lr"] = 0.3
        close(step(x, y), plain(x, y).detach())
    assert [count(step, "captured"), *reasons(step)] == [2]


def test_another_hyperparameter_is_another_capture(where):
    mine, theirs = model_on(where, mlp), model_on(where, mlp)
    optimizers = [adam(mine), adam(theirs)]
    step = graphex.train_step(mine, functional.cross_entropy, optimizers[0])
    plain = written_out(theirs, optimizers[1])
    for number, (x, y) in enumerate(points(where, 12)):
        if number == 6:
            for each in optimizers:
                each.param_groups[0]["weight_decay"] = 0.5
        close(step(x, y), plain(x, y).detach())
    assert count(step, "captured") == 2
    same_state(mine, theirs)


def test_a_batch_of_another_size_has_a_graph_of_its_own(where):
    mine, theirs = model_on(where, mlp), model_on(where, mlp)
    step = graphex.train_step(mine, functional.cross_entropy, adam(mine))
    plain = written_out(theirs, adam(theirs))
    for _ in range(3):
        for x, y in [*points(where, 4), *points(where, 1, rows=3)]:
            close(step(x, y), plain(x, y).detach())
    assert count(step, "captured") == 2
    same_state(mine, theirs)


def test_microbatches_are_accumulated_in_one_replay(where):
    mine, theirs = model_on(where, mlp), model_on(where, mlp)
    step = graphex.train_step(mine, functional.cross_entropy, adam(mine), accumulate=3)
    plain = written_out(theirs, adam(theirs))
    for x, y in points(where):
        close(step(x, y), plain(x, y).detach())
    same_state(mine, theirs)
    assert count(step, "captured") == 1
    with pytest.raises(graphex.InputError, match="4 rows cannot be divided into 3 microbatches"):
        step(*points(where, 1, rows=4)[0])


def test_gradients_that_stay_between_calls_are_accumulated(where):
    mine, theirs = model_on(where, mlp), model_on(where, mlp)

    def accumulating(model, optimizer):
        def step(x, y, update):
            loss = functional.cross_entropy(model(x), y) / 3
            loss.backward()
            if update:
                optimizer.step()
                optimizer.zero_grad()
            return loss

        return step

    step = graphex.train_step(accumulating(mine, adam(mine)))
    plain = accumulating(theirs, adam(theirs))
    for number, (x, y) in enumerate(points(where, 36)):
        close(step(x, y, number % 3 == 2), plain(x, y, number % 3 == 2).detach())
    same_state(mine, theirs)
    assert reasons(step) == []
    assert count(step, "captured") >= 2


def test_gradients_zeroed_in_place_stay_where_they_are(where):
    mine, theirs = model_on(where, mlp), model_on(where, mlp)

    def zeroing(model, optimizer):
        def step(x, y):
            optimizer.zero_grad(set_to_none=False)
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        return step

    step, plain = graphex.train_step(zeroing(mine, adam(mine))), zeroing(theirs, adam(theirs))
    for x, y in points(where, 12):
        close(step(x, y), plain(x, y).detach())
    close([each.grad for each in mine.parameters()], [each.grad for each in theirs.parameters()])
    assert [count(step, "captured"), *reasons(step)] == [1]


def test_evaluation_between_steps_sees_the_new_weights_and_disturbs_nothing(where):
    mine, theirs = model_on(where), model_on(where)
    step = graphex.train_step(mine, functional.cross_entropy, adam(mine))
    plain = written_out(theirs, adam(theirs))
    for x, y in seeded(tokens(where)):
        state = torch.get_rng_state(), torch.cuda.get_rng_state() if where == "cuda" else None
        found = step(x, y)
        torch.set_rng_state(state[0])
        if where == "cuda":
            torch.cuda.set_rng_state(state[1])
        close(found, plain(x, y).detach())
        with torch.no_grad():
            close(mine.eval()(x), theirs.eval()(x))
        mine.train(), theirs.train()
    assert count(step, "captured") == 1


def test_dropout_masks_differ_from_step_to_step_and_repeat_with_the_seed(where):
    model = nn.Sequential(nn.Dropout(0.5)).to(where)
    weight = nn.Parameter(torch.ones(64, device=where))
    optimizer = torch.optim.SGD([weight], lr=0.0, fused=True)

    @graphex.train_step
    def step(x):
        kept = model(x * weight)
        kept.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return kept

    x = torch.ones(64, device=where)
    for _ in range(5):
        step(x)
    torch.manual_seed(11)
    first, second = step(x), step(x)
    torch.manual_seed(11)
    assert torch.equal(step(x), first)
    assert not torch.equal(first, second)
    assert count(step, "captured") == 1


def test_a_checkpoint_is_saved_and_loaded_between_steps(where):
    whole, broken = model_on(where, mlp), model_on(where, mlp)
    batches = points(where, 14)
    wanted = trained(written_out(whole, adam(whole)), batches)
    optimizer = adam(broken)
    step = graphex.train_step(broken, functional.cross_entropy, optimizer)
    found = trained(step, batches[:7])
    saved = copy.deepcopy((broken.state_dict(), optimizer.state_dict()))
    trained(step, batches[:4])  # what is undone
    broken.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    found += trained(step, batches[7:])
    close(found, wanted)
    same_state(broken, whole)
    assert [record.status for record in step.journal.captures] == ["captured", "recaptured"]


def test_an_exponential_average_follows_the_parameters(where):
    mine, theirs = model_on(where), model_on(where)
    step = graphex.train_step(mine, functional.cross_entropy, adam(mine), ema=0.9)
    plain, average = written_out(theirs, adam(theirs)), copy.deepcopy(theirs)
    wanted = []
    for batch in seeded(tokens(where)):
        wanted.append(plain(*batch).detach())
        with torch.no_grad():
            for kept, new in zip(average.parameters(), theirs.parameters(), strict=True):
                kept.lerp_(new, 0.1)
    close(trained(step, tokens(where)), [float(each) for each in wanted])
    close(list(step.average.parameters()), list(average.parameters()))
    assert [count(step, "captured"), *reasons(step)] == [1]


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "closed": lambda optimizer: CosineAnnealingLR(optimizer, 7),
    "chained": lambda optimizer: ChainedScheduler([ConstantLR(optimizer, 0.1, 3), ExponentialLR(optimizer, 0.9)]),
    "rarely": lambda optimizer: StepLR(optimizer, 4, 0.5),
}


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("kind", [adam, partial(torch.optim.SGD, lr=0.1)], ids=["adam", "sgd"])
def test_a_scheduler_is_stepped_by_a_method_that_was_taken_from_it(make, kind, where):
    ended = []
    for wrap in (graphex.train_step, lambda step: step):
        model = model_on(where, mlp)
        optimizer = kind(model) if kind is adam else kind(model.parameters())
        scheduler = make(optimizer)
        plain, after = written_out(model, optimizer), scheduler.step

        def step(x, y, plain=plain, after=after):
            loss = plain(x, y)
            after()
            return loss

        losses = trained(wrap(step), points(where))
        rates = [group["lr"] for group in optimizer.param_groups]
        assert all(isinstance(rate, float) for rate in rates)
        ended.append((losses, rates, dict(model.state_dict())))
    close(*ended)


@pytest.mark.parametrize(
    "change",
    [
        lambda group: group.update(lr=float(group["lr"]) * 0.7),
        lambda group: group.update(lr=group["lr"] * 0.7),
        lambda group: group.update(lr=operator.imul(group["lr"], 0.7)),  # group["lr"] *= 0.7
    ],
    ids=["number", "product", "in place"],
)
def test_a_rate_that_the_step_sets_is_set_in_every_step(change, where):
    ended = []
    for wrap in (graphex.train_step, lambda step: step):
        model = model_on(where, mlp)
        optimizer = adam(model)
        plain = written_out(model, optimizer)

        def step(x, y, plain=plain, group=optimizer.param_groups[0]):
            loss = plain(x, y)
            change(group)
            return loss

        losses = trained(wrap(step), points(where))
        assert isinstance(optimizer.param_groups[0]["lr"], float)
        ended.append((losses, optimizer.param_groups[0]["lr"], dict(model.state_dict())))
    close(*ended)


class Sparse(nn.Module):
    """A table whose gradient is sparse, by a layer or by a function, or a sparse matrix among its buffers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.table = nn.Embedding(12, 8, sparse=kind == "layer")
        self.head = nn.Linear(8, 12)
        self.register_buffer("mixing", torch.eye(6).to_sparse() if kind == "buffer" else torch.eye(6))

    def forward(self, tokens: Tensor) -> Tensor:
        rows = functional.embedding(tokens, self.table.weight, sparse=self.kind != "buffer")
        return self.head(self.mixing @ rows)


SPARSE_REASON = "a gradient is sparse, and its size depends on data"


@pytest.mark.parametrize(
    ("kind", "optimizer", "reason"),
    [
        ("layer", partial(torch.optim.SGD, lr=0.1, momentum=0.9), SPARSE_REASON),
        ("function", partial(torch.optim.SGD, lr=0.1, momentum=0.9), SPARSE_REASON),
        ("function", partial(torch.optim.SparseAdam, lr=0.1), SPARSE_REASON),
        ("buffer", partial(torch.optim.AdamW, lr=0.1), "a parameter or a buffer is sparse"),
    ],
    ids=["layer", "function", "sparse adam", "buffer"],
)
@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
def test_a_step_with_sparse_tensors_runs_as_it_is(kind, optimizer, reason, where):
    ended = []
    for wrap in (partial(graphex.train_step, compile=False), lambda step: step):
        model = model_on(where, partial(Sparse, kind))
        mine, others = optimizer(model.table.parameters()), torch.optim.AdamW(model.head.parameters(), lr=0.1)

        def step(x, y, model=model, mine=mine, others=others):
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            for each in (mine, others):
                each.step()
                each.zero_grad()
            return loss

        stepped = wrap(step)
        losses = trained(stepped, tokens(where))
        ended.append((losses, {name: value.to_dense() for name, value in model.state_dict().items()}))
        assert stepped is step or reasons(stepped) == [reason]
        assert isinstance(mine.param_groups[0]["lr"], float)
    close(*ended)


def test_an_averaged_model_is_updated_by_the_host(where):
    mine = model_on(where, mlp)
    average = AveragedModel(mine, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    step = graphex.train_step(mine, functional.cross_entropy, adam(mine), ema=average)
    kept = [torch.zeros_like(each) for each in mine.parameters()]
    for number, batch in enumerate(points(where)):
        step(*batch)
        kept = [
            each.detach().clone() if not number else old.lerp(each.detach(), 0.5)
            for old, each in zip(kept, mine.parameters(), strict=True)
        ]
    close([each.detach() for each in average.parameters()], kept)
    assert int(average.n_averaged) == STEPS
    assert count(step, "captured") == 1


def test_an_exception_before_the_optimizer_leaves_parameters_as_they_were(where):
    model = model_on(where, mlp)
    step = graphex.train_step(model, functional.cross_entropy, adam(model), accumulate=2)
    for batch in points(where, 6):
        step(*batch)
    before = copy.deepcopy(model.state_dict())
    x, y = points(where, 1)[0]
    with pytest.raises((RuntimeError, ValueError, torch._dynamo.exc.TorchRuntimeError)):
        step(x[:, :3], y)
    same_state(model, _with(model, before))
    assert all(each.grad is None for each in model.parameters())
    step(x, y)
    assert count(step, "captured") == 1


@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
@pytest.mark.parametrize("broken", [0, 1, 2, 3, 6], ids="the {0.real}th call".format)
@pytest.mark.parametrize("place", ["forward", "backward", "optimizer"])
def test_an_exception_in_the_middle_of_a_step_leaves_what_eager_leaves(place, broken, where):
    """Whether the call would have compiled, been watched, been captured or been a replay."""

    def training(decorate: Callable[..., Any]) -> tuple[list[float], Any, nn.Module, Any]:
        model, switch = model_on(where), {"place": ""}
        optimizer = adam(model)

        def reached(place: str) -> None:
            if switch["place"] == place:
                raise ArithmeticError(place)

        @decorate
        def step(x, y):
            loss = functional.cross_entropy(model(x), y)
            reached("forward")
            loss.backward()
            reached("backward")
            optimizer.step()
            reached("optimizer")
            optimizer.zero_grad()
            return loss

        torch.manual_seed(3)
        losses = []
        for number, batch in enumerate(tokens(where)):
            if number == broken:
                switch["place"] = place
                with pytest.raises(ArithmeticError, match=place):
                    step(*batch)
                switch["place"] = ""
                left = copy.deepcopy([(each.detach(), each.grad) for each in model.parameters()])
                model.zero_grad()
            losses.append(float(step(*batch)))
        assert optimizer.param_groups[0]["lr"] == 0.01
        return losses, left, model, step

    found, left, mine, step = training(graphex.train_step)
    wanted, left_by_eager, theirs, _ = training(lambda step: step)
    close((found, left), (wanted, left_by_eager))
    same_state(mine, theirs)
    assert (count(step, "captured"), count(step, "replays") > 1) == (1, True)


def test_a_scheduler_that_raises_finds_the_step_done(where):
    """What the host does after a replay comes after the whole of it: no parameter is half updated."""
    mine, theirs = model_on(where, mlp), model_on(where, mlp)
    optimizers = [adam(mine), adam(theirs)]

    class Ending(StepLR):
        def step(self, epoch: int | None = None) -> None:
            if self.last_epoch == 6:
                raise StopIteration
            super().step()

    step = graphex.train_step(mine, functional.cross_entropy, optimizers[0], scheduler=Ending(optimizers[0], 100))
    plain = written_out(theirs, optimizers[1])
    for x, y in points(where)[:6]:
        close(step(x, y), plain(x, y).detach())
    x, y = points(where)[6]
    with pytest.raises(StopIteration):
        step(x, y)
    plain(x, y)
    same_state(mine, theirs)
    assert all(each.grad is None for each in mine.parameters())


def test_a_replay_walks_through_no_modules(where):
    """They are many, and a cost of the host in every step: what was found once is only compared."""
    ours = str(Path(graphex.__file__).parent)

    def entered(layers: int) -> list[str]:
        model = model_on(where, lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers))))
        step = graphex.train_step(model, functional.cross_entropy, adam(model))
        trained(step, points(where)[:6])
        found: list[str] = []

        def note(frame: Any, event: str, _: Any) -> None:
            code = frame.f_code
            assert code.co_filename != nn.modules.module.__file__
            is_compared = code.co_flags & CO_GENERATOR or code.co_name == "<lambda>"
            if event == "call" and code.co_filename.startswith(ours) and not is_compared:
                found.append(code.co_name)

        before, batch = count(step, "replays"), points(where)[6]
        sys.setprofile(note)
        try:
            step(*batch)
        finally:
            sys.setprofile(None)
        assert count(step, "replays") == before + 1
        return found

    assert entered(12) == entered(2)


def _with(model: nn.Module, state: Any) -> nn.Module:
    other = copy.deepcopy(model)
    other.load_state_dict(state)
    return other


class Options:
    """What a step reads besides its model."""

    decay = 1.0

    def __init__(self, where: str = "cpu") -> None:
        self.weights, self.scale = {"loss": [1.0]}, torch.ones((), device=where)


class Read(nn.Module):
    """A model that reads plain attributes and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.factor, self.gain = nn.Linear(4, 4), 1.0, nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.factor * self.gain + self.shift


def _another_weight(model: Any, optimizer: Any, options: Any) -> None:
    model.inner.weight = nn.Parameter(torch.ones_like(model.inner.weight))


def _another_layer(model: Any, optimizer: Any, options: Any) -> None:
    model.inner = nn.Linear(4, 4, bias=False, device=model.shift.device)
    nn.init.ones_(model.inner.weight)


def _another_forward(model: Any, optimizer: Any, options: Any) -> None:
    model.forward = lambda x: model.inner(x).relu()


def _another_layout(model: Any, optimizer: Any, options: Any) -> None:
    weight = model.inner.weight
    for tensor in (weight, *(each for each in optimizer.state[weight].values() if each.dim() == 2)):
        tensor.data = tensor.data.t()


def _another_memory_of_state(model: Any, optimizer: Any, options: Any) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].data = state["exp_avg"] * 0.5  # as a program does that moves it to the host and back


def _another_member(model: Any, optimizer: Any, options: Any) -> None:
    optimizer.param_groups[0]["params"].pop()
    optimizer.add_param_group({"params": [model.inner.bias], "lr": 0.5})


def _another_order(model: Any, optimizer: Any, options: Any) -> None:
    optimizer.param_groups.reverse()


def _another_state(model: Any, optimizer: Any, options: Any) -> None:
    for parameter, state in list(optimizer.state.items()):
        optimizer.state[parameter] = {name: torch.zeros_like(value) for name, value in state.items()}


CHANGES: dict[str, Callable[[Any, Any, Any], object]] = {
    "an attribute of a module": lambda model, optimizer, options: setattr(model, "factor", 0.25),
    "a buffer": lambda model, optimizer, options: setattr(model, "shift", model.shift + 2),
    "a parameter": _another_weight,
    "a layer": _another_layer,
    "a method": _another_forward,
    "an element of a container": lambda model, optimizer, options: options.weights["loss"].insert(0, 0.25),
    "an attribute of a class": lambda model, optimizer, options: setattr(type(options), "decay", 0.25),
    "strides": _another_layout,
    "the state of a parameter": _another_state,
    "the memory of a state": _another_memory_of_state,
    "the memory of a tensor": lambda model, optimizer, options: setattr(options.scale, "data", options.scale * 0.25),
    "a parameter's group": _another_member,
    "the order of groups": _another_order,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_between_two_calls_is_seen(change, where):
    def trained_with_a_change(decorate: Callable[..., Any]) -> tuple[list[float], nn.Module, Any]:
        model, options = model_on(where, Read), type("Fresh", (Options,), {})(where)
        groups = [{"params": list(model.inner.parameters())}, {"params": [model.gain], "lr": 0.2}]
        optimizer = torch.optim.AdamW(groups, lr=0.01, fused=True)

        @decorate
        def step(x, y):
            loss = functional.cross_entropy(model(x), y) * options.weights["loss"][0] * options.decay * options.scale
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        batches = points(where, 12)
        losses = trained(step, batches[:5])
        change(model, optimizer, options)
        return losses + trained(step, batches[5:]), model, step

    found, mine, step = trained_with_a_change(graphex.train_step(compile=False))
    wanted, theirs, _ = trained_with_a_change(lambda function: function)
    close(found, wanted)
    same_state(mine, theirs)
    assert count(step, "captured") + count(step, "recaptured") == 2
    assert not reasons(step)


class Slotted:
    __slots__ = ("by",)


class Base:
    by = 1.0


class Derived(Base):
    pass


class Named(dict[str, float]):
    by = 1.0


SETTINGS = ModuleType("settings_of_a_test")
SETTINGS.inner, SETTINGS.by = ModuleType("settings_of_a_test.inner"), 1.0  # type: ignore[attr-defined]
LISTED = [1.0]


def by_default(by: float = 1.0) -> float:
    return by


def by_attribute() -> float:
    return by_attribute.by  # type: ignore[attr-defined, no-any-return]


@singledispatch
def by_dispatch(x: Any) -> float:
    return LISTED[0]


def by_import() -> float:
    from settings_of_a_test import by  # type: ignore[import-not-found]

    return by  # type: ignore[no-any-return]


def _places() -> dict[str, tuple[Callable[[], float], Callable[[float], object]]]:
    """Where Python may keep a number that a step reads: how it is read there, and how another one is put there."""
    slotted, proxied, named, user = Slotted(), {"by": 1.0}, Named(), UserDict(by=1.0)
    numbers, packed, own, variable = np.ones(1), array("d", [1.0]), local(), ContextVar("by", default=1.0)
    proxy, held, kept = MappingProxyType(proxied), Base(), SETTINGS
    reference = weakref.ref(held)
    return {
        "slot": (lambda: slotted.by, partial(setattr, slotted, "by")),
        "base of a class": (lambda: Derived.by, partial(setattr, Base, "by")),
        "view of a dict": (lambda: proxy["by"], partial(operator.setitem, proxied, "by")),
        "attribute of a dict": (lambda: named.by, partial(setattr, named, "by")),
        "dict of a user": (lambda: user["by"], partial(operator.setitem, user, "by")),
        "array of numpy": (lambda: float(numbers[0]), partial(operator.setitem, numbers, 0)),
        "array of Python": (lambda: packed[0], partial(operator.setitem, packed, 0)),
        "thread": (lambda: own.by, partial(setattr, own, "by")),
        "context": (variable.get, variable.set),
        "weak reference": (lambda: reference().by, partial(setattr, held, "by")),  # type: ignore[union-attr]
        "default": (by_default, lambda by: setattr(by_default, "__defaults__", (by,))),
        "attribute of a function": (by_attribute, partial(setattr, by_attribute, "by")),
        "generic function": (lambda: by_dispatch(1), partial(operator.setitem, LISTED, 0)),
        "module in a module": (lambda: kept.inner.by, partial(setattr, SETTINGS.inner, "by")),  # type: ignore[attr-defined]
        "import": (by_import, partial(setattr, SETTINGS, "by")),
        "module by its name": (lambda: sys.modules["settings_of_a_test"].by, partial(setattr, SETTINGS, "by")),
        "name that is put together": (lambda: getattr(kept, "".join(["b", "y"])), partial(setattr, SETTINGS, "by")),
        "global by its name": (lambda: globals()["BY"], partial(operator.setitem, globals(), "BY")),
        "environment": (lambda: float(os.environ["BY"]), lambda by: os.environ.update(BY=str(by))),
        "library": (lambda: functional.by, partial(setattr, functional, "by")),  # type: ignore[attr-defined]
        "default type": (
            lambda: float(torch.finfo(torch.get_default_dtype()).bits == 64) * 3 + 1,
            lambda by: torch.set_default_dtype(torch.float64 if by == 4 else torch.float32),
        ),
    }


PLACES = _places()


@pytest.mark.parametrize("place", PLACES)
def test_a_number_is_seen_wherever_python_keeps_it(place, where, monkeypatch):
    monkeypatch.setitem(sys.modules, SETTINGS.__name__, SETTINGS)
    read, write = PLACES[place]
    model = model_on(where, mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    @graphex.train_step(compile=False)
    def step(x, y):
        loss = functional.cross_entropy(model(x), y) * read()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    found, batch = [], points(where)[0]
    for by in (1, 1, 1, 1, 1, 4, 1):
        write(float(by))
        found.append(float(step(*batch)))
    write(1.0)
    close([each / found[0] for each in found], [1.0, 1.0, 1.0, 1.0, 1.0, 4.0, 1.0])
    assert [count(step, "replays") > 0, *reasons(step)] == [True]


class Scaling(torch.optim.Optimizer):
    """An optimizer of a user's, with numbers and tensors of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.by, self.tensor = 1.0, torch.ones((), device=self.param_groups[0]["params"][0].device)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                each.sub_(each.grad * group["lr"] * self.by * self.tensor * LISTED[0])


@pytest.mark.parametrize(
    "change",
    [
        lambda optimizer: setattr(optimizer, "by", 0.5),
        lambda optimizer: setattr(optimizer, "tensor", optimizer.tensor * 0.5),
        lambda optimizer: setattr(optimizer.tensor, "data", optimizer.tensor * 0.5),
        lambda optimizer: LISTED.__setitem__(0, 0.5),
    ],
    ids=["number", "tensor", "memory", "global"],
)
def test_what_an_optimizer_of_a_user_reads_is_seen(change, where):
    def trained_with_a_change(decorate: Callable[..., Any]) -> tuple[nn.Module, Any]:
        LISTED[0] = 1.0
        model = model_on(where, mlp)
        optimizer = Scaling(model.parameters())
        step = decorate(written_out(model, optimizer))
        trained(step, points(where)[:6])
        change(optimizer)
        trained(step, points(where)[6:])
        return model, step

    mine, step = trained_with_a_change(graphex.train_step(compile=False))
    theirs, _ = trained_with_a_change(lambda function: function)
    LISTED[0] = 1.0
    same_state(mine, theirs)
    assert [count(step, "replays") > 0, *reasons(step)] == [True]


@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
@pytest.mark.parametrize("scaled", [False, True])
def test_state_that_is_laid_out_otherwise_than_its_parameter_is_used(scaled, where):
    """As after a checkpoint from before `model.to(memory_format=torch.channels_last)`: no fused kernel takes it."""

    def trained_again(decorate: Callable[..., Any]) -> tuple[nn.Module, Any]:
        model = model_on(where, mlp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler(where, init_scale=4.0, enabled=scaled)

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return loss

        step = decorate(step)
        trained(step, points(where)[:5])
        weight = model[0].weight
        weight.data = weight.t().contiguous().t()
        trained(step, points(where)[5:])
        return model, step

    mine, _ = trained_again(graphex.train_step(compile=False))
    theirs, _ = trained_again(lambda function: function)
    same_state(mine, theirs)


def test_parameters_that_come_later_are_clipped_too(where):
    model, later = model_on(where, mlp), model_on(where, mlp)
    both = nn.ModuleList([model, later])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss_of = lambda x, y: functional.cross_entropy(model(x) + later(x), y)  # noqa: E731
    both.forward = loss_of
    step = graphex.train_step(both, None, optimizer, clip_value=1e-30, compile=False)
    before = copy.deepcopy(later.state_dict())
    optimizer.add_param_group({"params": later.parameters()})
    trained(step, points(where, 5))
    same_state(later, _with(later, before))


def test_an_argument_that_is_an_object_is_told_from_itself_with_other_values(where):
    def losses_of(decorate: Callable[..., Any]) -> list[float]:
        model, options = model_on(where, mlp), Options()
        optimizer = adam(model)

        @decorate
        def step(x, y, options):
            loss = functional.cross_entropy(model(x), y) * options.weights["loss"][0]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        found = [float(step(*batch, options)) for batch in points(where, 5)]
        options.weights["loss"][0] = 0.25
        return found + [float(step(*batch, options)) for batch in points(where, 5)]

    close(losses_of(graphex.train_step(compile=False)), losses_of(lambda function: function))


def test_a_rate_that_was_a_tensor_is_a_number_again(where):
    def losses_of(decorate: Callable[..., Any]) -> list[float]:
        model = model_on(where, mlp)
        optimizer = adam(model)
        step = decorate(written_out(model, optimizer))
        found = trained(step, points(where, 5))
        for rate in (torch.tensor(0.1, device=where), 0.01):
            optimizer.param_groups[0]["lr"] = rate
            found += trained(step, points(where, 3))
        return found

    close(losses_of(graphex.train_step(compile=False)), losses_of(lambda function: function))


# -- what cannot be captured -------------------------------------------------------------------------------------------


def refused(step: Any, batches: list[Any]) -> str:
    """The one reason why a step was not captured, after it was."""
    for batch in batches:
        step(*batch)
    assert count(step, "captured") == 0
    (reason,) = {each.reason for each in step.journal.fallbacks if "training step" in each.what}
    return reason


@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
def test_a_number_read_from_the_device_is_the_reason(where):
    model = model_on(where, mlp)
    optimizer = adam(model)

    @graphex.train_step
    def step(x, y):
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    assert refused(step, points(where)).startswith("the step reads a number from a tensor")
    (record,) = [each for each in step.journal.fallbacks if "training step" in each.what]
    assert record.line.endswith("return loss.item()")


@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
def test_a_number_that_python_changes_in_every_step_is_the_reason(where):
    model = model_on(where, mlp)
    optimizer = adam(model)

    class Hidden:
        def __init__(self) -> None:
            self.inner = [1.0]

    hidden = {"deep": {"deeper": Hidden()}}

    @graphex.train_step
    def step(x, y):
        holder = hidden["deep"]["deeper"]
        holder.inner[0] *= 0.9
        loss = functional.cross_entropy(model(x), y) * holder.inner[0]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    assert "a number changes from step to step" in refused(step, points(where))


@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
def test_a_tensor_that_the_step_puts_elsewhere_is_the_reason(where):
    model = model_on(where, mlp)
    optimizer = adam(model)
    kept = {"deep": {"mean": torch.zeros((), device=where)}}

    @graphex.train_step
    def step(x, y):
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        kept["deep"]["mean"] = kept["deep"]["mean"] * 0.9 + loss.detach()
        return kept["deep"]["mean"]

    assert "a tensor that the step before made and kept" in refused(step, points(where))


@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
def test_a_list_that_grows_is_named(where):
    model = model_on(where, mlp)
    optimizer, losses = adam(model), []

    @graphex.train_step
    def step(x, y):
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        return loss

    assert "the length of losses changes in every call" in refused(step, points(where))


def _python_draws(counter: Any, scheduler: Any) -> float:
    return 1.0 if random.random() < 2 else 0.0


def _an_attribute_counts(counter: Any, scheduler: Any) -> float:
    counter.weights["loss"][0] += 1
    return 1.0


def _a_scheduler_is_asked(counter: Any, scheduler: Any) -> float:
    return 1.0 if scheduler.get_last_lr()[0] else 0.0


REFUSED: dict[str, Callable[[Any, Any], float]] = {
    "the step draws random numbers in Python": _python_draws,
    "weights['loss'][0] changes in every call, and a replay would not change it": _an_attribute_counts,
    "the step asks a scheduler for the learning rate; ask it outside of the step": _a_scheduler_is_asked,
}


@pytest.mark.parametrize("reason", REFUSED)
@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
def test_what_a_replay_would_not_repeat_is_the_reason(reason, where):
    model, options, work = model_on(where, mlp), Options(), REFUSED[reason]
    optimizer = adam(model)
    scheduler = StepLR(optimizer, 2, 0.5)

    @graphex.train_step(compile=False)
    def step(x, y):
        loss = functional.cross_entropy(model(x), y) * work(options, scheduler)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    assert refused(step, points(where)).endswith(reason)


@contextmanager
def _seeded_with_another() -> Iterator[None]:
    torch.manual_seed(5)
    yield


@contextmanager
def _seeded_with_the_same() -> Iterator[None]:
    torch.manual_seed(3)
    yield


@contextmanager
def _put_back() -> Iterator[None]:
    with torch.random.fork_rng():
        yield


@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
@pytest.mark.parametrize("seeds", [_seeded_with_another, _seeded_with_the_same, _put_back])
@pytest.mark.parametrize("drawn_between", [False, True])
def test_a_step_that_seeds_a_generator_runs_as_it_is(seeds, drawn_between, where):
    losses = {}
    for is_captured in (False, True):
        model = model_on(where, lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x, y, model=model, optimizer=optimizer):
            with seeds():
                loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run = graphex.train_step(step, compile=False) if is_captured else step
        torch.manual_seed(3)
        losses[is_captured] = []
        for batch in points(where):
            losses[is_captured].append(float(run(*batch)))
            if drawn_between:
                torch.rand(1, device=where)
    close(losses[True], losses[False])
    assert reasons(run) == ["the step seeds a random generator, or puts its state back"]


@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
@pytest.mark.parametrize("generator", ["MT19937", "PCG64"])
def test_numbers_that_numpy_draws_are_the_reason(generator, where):
    numpy = pytest.importorskip("numpy")
    model, before = model_on(where, mlp), numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(getattr(numpy.random, generator)(3))

    @graphex.train_step(compile=False)
    def step(x, y):
        loss = functional.cross_entropy(model(x), y) * (1.0 if numpy.random.rand() < 2 else 0.0)
        loss.backward()
        return loss

    try:
        assert refused(step, points(where)).endswith("the step draws random numbers in Python")
    finally:
        numpy.random.set_bit_generator(before)


@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
def test_rates_and_numbers_that_a_step_returns_are_those_of_eager(where):
    def returned(decorate: Callable[..., Any]) -> list[Any]:
        model, numbers = model_on(where, mlp), itertools.count()
        optimizer = adam(model)
        scheduler = StepLR(optimizer, 1, 0.5)

        @decorate
        def step(x, y, *, asks):
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            return scheduler.get_last_lr()[0] if asks else next(numbers)

        return [step(*batch, asks=asks) for asks in (False, True) for batch in points(where)]

    assert returned(graphex.train_step(compile=False)) == returned(lambda function: function)


@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
def test_tensors_in_an_object_of_another_kind_are_the_reason(where):
    model = model_on(where, mlp)
    optimizer = adam(model)

    class Batch:
        def __init__(self, x: Tensor, y: Tensor) -> None:
            self.x, self.y = x, y

        def __repr__(self) -> str:
            return "Batch(...)"

    @graphex.train_step(compile=False)
    def step(batch):
        loss = functional.cross_entropy(model(batch.x), batch.y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    assert "an argument is a Batch" in refused(step, [(Batch(*points(where)[0]),)] * STEPS)


@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
def test_a_gradient_hook_is_called_in_every_step(where):
    model, called = model_on(where, mlp), []
    model[0].weight.register_hook(lambda gradient: called.append(1))
    step = graphex.train_step(model, functional.cross_entropy, adam(model))
    assert refused(step, points(where)) == "a parameter has a gradient hook, which Python runs"
    assert len(called) == STEPS


@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
@pytest.mark.parametrize("kind", ["register_hook", "register_prehook"])
def test_a_hook_on_an_accumulator_is_called_in_every_step(kind, where):
    model, called = model_on(where, mlp), []
    accumulator = model[0].weight.view_as(model[0].weight).grad_fn.next_functions[0][0]
    getattr(accumulator, kind)(lambda *gradients: called.append(1))
    step = graphex.train_step(model, functional.cross_entropy, adam(model))
    assert "accumulator" in refused(step, points(where))
    assert len(called) == STEPS


class Checkpointed(nn.Module):
    """Weights and dropout that a checkpoint computes again."""

    def __init__(self, *, use_reentrant: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4) + 0.5)
        self._how = {"use_reentrant": use_reentrant}

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: functional.dropout(x * self.weight, 0.5), x, **self._how)


@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_gradient_is_that_of_the_mask_its_checkpoint_drew(is_compiled, where):
    model = model_on(where, lambda: nn.Sequential(nn.Linear(1, 64, bias=False), nn.Dropout(0.5)))
    run = torch.compile(lambda x: checkpoint(model, x, use_reentrant=False), backend="graphex")
    if not is_compiled:
        run = partial(checkpoint, model, use_reentrant=False)
    nn.init.ones_(model[0].weight)

    def step(x):
        out = run(x)
        out.sum().backward()
        gradient = model[0].weight.grad.clone()
        model[0].weight.grad = None
        return out.detach(), gradient

    replayed = graphex.train_step(step, compile=False)
    found = [replayed(torch.ones(1, 1, device=where)) for _ in range(STEPS)]
    assert all(torch.equal(out[0], gradient[:, 0]) for out, gradient in found)
    assert len({tuple(out.flatten().tolist()) for out, _ in found}) == STEPS


def test_a_step_with_an_operator_of_higher_order_runs_as_it_is(where):
    def step(x):
        return run_and_save_rng_state(torch.ops.aten.add.Tensor, x, x)[1]

    run, x = graphex.train_step(step, compile=False), torch.ones(3, device=where)
    assert all(torch.equal(run(x), x + x) for _ in range(STEPS))
    assert reasons(run) == ["the step seeds a random generator, or puts its state back"]


@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_with_dropout_runs_as_it_is(use_reentrant, where):
    """Its backward puts the generator back, to draw the numbers of the forward again; a replay draws others."""
    mine, theirs = (model_on(where, lambda: Checkpointed(use_reentrant=use_reentrant)) for _ in range(2))
    step = graphex.train_step(mine, functional.cross_entropy, adam(mine), compile=False)
    batches = [(x.requires_grad_(), y) for x, y in points(where)]
    close(trained(step, batches), trained(written_out(theirs, adam(theirs)), batches))
    same_state(mine, theirs)
    assert reasons(step) == ["the step seeds a random generator, or puts its state back"]


@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_compiled_checkpoint_with_dropout_draws_the_same_numbers_again(use_reentrant, where):
    """On a GPU torch draws them from generators of its own, so that they are not eager's."""
    model = model_on(where, lambda: Checkpointed(use_reentrant=use_reentrant))
    optimizer, masks = torch.optim.SGD(model.parameters(), 0.0), []

    @graphex.train_step
    def step(x, y):
        result = model(x)
        result.sum().backward()
        gradient = model.weight.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
        return result.detach(), gradient

    for x, y in points(where):
        result, gradient = step((x.abs() + 0.1).requires_grad_(), y)
        close(gradient, result.sum(0) / model.weight.detach())
        masks.append(result > 0)
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == STEPS
    assert count(step, "captured") == 0
    assert reasons(step) != []


@pytest.mark.parametrize("compile", [False, True])
def test_a_hook_that_comes_after_the_capture_is_called(compile, where):
    model, called = model_on(where, mlp), []
    step = graphex.train_step(model, functional.cross_entropy, adam(model), compile=compile)
    batches = points(where)
    for number, batch in enumerate(batches):
        if number == 6:
            model[1].register_forward_hook(lambda *given: called.append(1))
        step(*batch)
    assert len(called) == len(batches) - 6
    assert reasons(step) == ["Tanh has a forward hook, which Python runs"]


@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
@pytest.mark.parametrize(
    ("register", "reason"),
    [
        (lambda step, hook: step.register_step_pre_hook(hook), "SGD has a step pre-hook, which Python runs"),
        (lambda step, hook: step.register_step_post_hook(hook), "SGD has a step post-hook, which Python runs"),
        (lambda step, hook: register_module_forward_hook(hook), "a hook for all modules, or for all optimizers,"),
        (lambda step, hook: register_optimizer_step_post_hook(hook), "a hook for all modules, or for all optimizers,"),
    ],
    ids=["pre", "post", "all modules", "all optimizers"],
)
def test_a_hook_of_an_optimizer_or_of_all_modules_is_called(register, reason, where):
    model, called = model_on(where, mlp), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = graphex.train_step(model, functional.cross_entropy, optimizer, compile=False)
    for batch in points(where)[:6]:
        step(*batch)
    assert count(step, "replays") > 0
    handle = register(optimizer, lambda *given: called.append(1))
    try:
        for batch in points(where)[:2]:
            step(*batch)
    finally:
        handle.remove()
    assert called == [1] * len(called) != []
    assert len(called) % 2 == 0
    assert [each.startswith(reason) for each in reasons(step)] == [True]


@pytest.mark.filterwarnings("ignore:Error detected")
def test_anomalies_are_looked_for_in_a_step_that_is_captured(where):
    model = model_on(where, mlp)
    step = graphex.train_step(model, lambda y, _: (y - y).sum().sqrt(), torch.optim.SGD(model.parameters(), 0.0))
    x, y = points(where)[0]
    for _ in range(6):
        step(x, y)
    with pytest.raises(RuntimeError, match="nan values"), torch.autograd.set_detect_anomaly(True):
        step(x, y)


def test_a_dispatch_mode_sees_the_ops_of_a_step(where):
    model = model_on(where, mlp)
    step = graphex.train_step(model, functional.cross_entropy, adam(model), compile=False)
    seen: list[str] = []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    for number, batch in enumerate(points(where)):
        with Seeing() if number == 6 else nullcontext():
            step(*batch)
    assert "aten.addmm.default" in seen
    assert count(step, "replays") == STEPS - 4


def test_autocast_around_the_loop_does_not_freeze_the_weights(where):
    mine, theirs = model_on(where, mlp), model_on(where, mlp)
    step = graphex.train_step(mine, functional.cross_entropy, adam(mine), compile=False)
    plain, found, wanted = written_out(theirs, adam(theirs)), [], []
    with torch.autocast(where, torch.bfloat16):
        for batch in points(where):
            found.append(float(step(*batch)))
    for batch in points(where):
        with torch.autocast(where, torch.bfloat16):
            wanted.append(float(plain(*batch).detach()))
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)
    assert [count(step, "captured"), *reasons(step)] == [1]


@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
def test_an_argument_that_is_written_is_the_reason(where):
    model = model_on(where, mlp)
    optimizer = adam(model)

    @graphex.train_step
    def step(x, y, total):
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total.add_(loss.detach())
        return loss

    total = torch.zeros((), device=where)
    losses = [step(x, y, total) for x, y in points(where)]
    close(total, sum(losses))
    assert "writes to an argument" in reasons(step)[0]


class Scaled(nn.Module):
    """A layer that a method is a part of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def scaled(self, x: Tensor) -> Tensor:
        return x * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.linear(x))


@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
@pytest.mark.parametrize("form", ["parts", "function"])
@pytest.mark.parametrize(
    "other",
    [
        lambda self, x: x.sin() * 5,
        pytest.param(
            partialmethod(lambda self, by, x: x.sin() * by, 5),
            marks=pytest.mark.skipif(torch.__version__.startswith("2.14."), reason="Dynamo raises, with every backend"),
        ),
    ],
)
def test_a_method_that_is_replaced_on_a_class_is_called(where, form, other, monkeypatch):
    mine, theirs = model_on(where, Scaled), model_on(where, Scaled)
    plain = written_out(theirs, adam(theirs))
    step = graphex.train_step(mine, functional.cross_entropy, adam(mine))
    if form == "function":
        step = graphex.train_step(written_out(mine, adam(mine)))
    batches = points(where, 12)
    assert trained(step, batches[:6]) == pytest.approx(trained(plain, batches[:6]))
    monkeypatch.setattr(Scaled, "scaled", other)
    assert trained(step, batches[6:]) == pytest.approx(trained(plain, batches[6:]))
    assert "'Scaled.scaled' was replaced, and compiled code does not see that" in reasons(step)


def penalised(model, optimizer):
    def step(x, y):
        loss = functional.cross_entropy(model(x), y)
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + sum(each.square().sum() for each in gradients)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


class Sloped(nn.Module):
    """A model whose result is a gradient of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        options = {"create_graph": self.training}
        return torch.autograd.grad(self.energy(x).sum(), x, **options)[0]


def steep(model, optimizer):
    def step(x, y):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def test_a_step_that_differentiates_twice_is_not_compiled_and_says_where_it_does(where):
    x, y = points(where)[0]
    cases: list[tuple[Any, Any, Callable[..., Any] | None, str]] = [
        (mlp, penalised, None, "torch.autograd.grad(loss, list(model.parameters()), create_graph=True)"),
        (Sloped, steep, None, 'options = {"create_graph": self.training}'),
        (Sloped, steep, lambda result, y: result.square().mean(), 'options = {"create_graph": self.training}'),
    ]
    for kind, written, loss, line in cases:
        mine, theirs = model_on(where, kind), model_on(where, kind)
        plain = written(theirs, adam(theirs))
        with pytest.warns(graphex.GraphexWarning, match="not compiled.*step_contract.py") as warned:
            step = graphex.train_step(mine, loss, adam(mine)) if loss else graphex.train_step(written(mine, adam(mine)))
            found = [step(x, y) for _ in range(STEPS)]
        close(found, [plain(x, y).detach() for _ in range(STEPS)])
        same_state(mine, theirs)
        assert (count(step, "captured"), len(warned)) == (1, 1)
        (record,) = step.journal.fallbacks
        assert record.line.endswith(line)


def test_create_graph_that_is_not_seen_before_says_what_to_write(where):
    model = model_on(where, mlp)
    optimizer = adam(model)

    @graphex.train_step
    def step(x, y):
        loss = functional.cross_entropy(model(x), y)
        gradients = torch.autograd.grad(loss, list(model.parameters()), None, True, True)
        sum(each.square().sum() for each in gradients).backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    with pytest.raises(graphex.GraphexError, match=r"train_step\(\.\.\., compile=False\)"):
        step(*points(where)[0])


def test_create_graph_is_captured_as_it_is_written(where):
    mine, theirs = model_on(where, mlp), model_on(where, mlp)
    step, plain = graphex.train_step(penalised(mine, adam(mine)), compile=False), penalised(theirs, adam(theirs))
    for x, y in points(where):
        close(step(x, y), plain(x, y).detach())
    assert [count(step, "captured"), *reasons(step)] == [1]


def test_a_nan_loss_with_a_scaler_skips_the_update_and_lowers_the_scale(where):
    mine, theirs = model_on(where, mlp), model_on(where, mlp)
    scalers = [torch.amp.GradScaler(where, init_scale=64.0, growth_interval=4) for _ in range(2)]
    optimizers = [adam(mine), adam(theirs)]
    step = graphex.train_step(mine, functional.cross_entropy, optimizers[0], scaler=scalers[0], clip_norm=1.0)

    def plain(x, y):
        loss = functional.cross_entropy(theirs(x), y)
        scalers[1].scale(loss).backward()
        scalers[1].unscale_(optimizers[1])
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        scalers[1].step(optimizers[1])
        scalers[1].update()
        optimizers[1].zero_grad()
        return loss

    for number, (x, y) in enumerate(points(where, 14)):
        x = x * math.nan if number in (7, 10) else x
        found, wanted = step(x, y), plain(x, y).detach()
        torch.testing.assert_close(found, wanted, equal_nan=True, rtol=1e-4, atol=1e-5)
    same_state(mine, theirs)
    assert scalers[0].get_scale() == scalers[1].get_scale()
    assert [count(step, "captured"), *reasons(step)] == [1]


@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
@pytest.mark.parametrize("reads", [False, True])
def test_a_group_that_comes_later_is_scaled_as_the_others(reads, where):
    """By fused kernels, which were chosen for the others: also if the step is not captured by then."""

    def trained_with_one_more(decorate: Callable[..., Any]) -> nn.Module:
        model = model_on(where, mlp)
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(where, init_scale=4.0)

        @decorate
        def step(x, y):
            loss = functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            model.zero_grad()
            return float(loss) if reads else loss

        trained(step, points(where)[:6])
        optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.3})
        trained(step, points(where)[6:])
        return model

    same_state(trained_with_one_more(graphex.train_step(compile=False)), trained_with_one_more(lambda step: step))


@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning", "ignore:.*deterministic")
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_momentum_begins_with_the_first_gradient_that_is_used(dampening, reads, where):
    """Gradients of the first step are infinite, and a layer is trained from the seventh step on."""

    def trained_from_late_on(decorate: Callable[..., Any]) -> nn.Module:
        model = model_on(where, mlp)
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=dampening)
        scaler = torch.amp.GradScaler(where, init_scale=4.0)

        @decorate
        def step(x, y):
            loss = functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return float(loss) if reads else loss

        for number, (x, y) in enumerate(points(where)):
            model[0].requires_grad_(number > 5)
            step(x if number else x * math.inf, y)
        return model

    torch.use_deterministic_algorithms(True, warn_only=True)  # memory that nothing is written to is nan
    try:
        mine, theirs = map(trained_from_late_on, (graphex.train_step(compile=False), lambda step: step))
    finally:
        torch.use_deterministic_algorithms(False)
    same_state(mine, theirs)


def test_a_scaler_that_is_switched_off_is_as_none(where):
    mine, theirs = model_on(where, mlp), model_on(where, mlp)
    scaler = torch.amp.GradScaler(where, enabled=False)
    step = graphex.train_step(mine, functional.cross_entropy, adam(mine), scaler=scaler, clip_norm=1e9)
    close(trained(step, points(where)), trained(written_out(theirs, adam(theirs)), points(where)))
    assert [count(step, "captured"), *reasons(step)] == [1]


def test_a_step_is_explained_with_its_parts_and_their_memory(where):
    model = model_on(where)
    step = graphex.train_step(model, functional.cross_entropy, torch.optim.AdamW(model.parameters()))
    for batch in tokens(where):
        step(*batch)
    parts = [line.split()[0] for line in step.explain().split("training step\n")[1].splitlines() if line.strip()]
    assert [each for each in parts if each in ("forward", "backward", "optimizer", "whole")] == [
        *("forward", "backward", "optimizer", "whole")
    ]


@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
@pytest.mark.parametrize("by_mask", [False, True])
def test_a_lookup_by_numbers_is_captured_and_one_by_a_mask_is_not(where, by_mask):
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            rows = torch.arange(x.shape[0], device=x.device)
            return self.table(x[rows >= 0 if by_mask else rows.flip(0)].flip(0 if not by_mask else ()))

    mine, theirs = model_on(where, Looking), model_on(where, Looking)
    step = graphex.train_step(mine, functional.cross_entropy, adam(mine), compile=False)
    assert trained(step, points(where)) == trained(written_out(theirs, adam(theirs)), points(where))
    assert reasons(step) == (["the step waits for the device (aten.index.Tensor)"] if by_mask else [])
