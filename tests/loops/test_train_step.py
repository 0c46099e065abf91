"""Training steps on the recording device, and on a CPU, where they run as they are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread, current_thread
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.optim.swa_utils import AveragedModel

import graphex
from graphex.torch_private.dynamo import global_hooks
from tests.harness.capture import compile_it, interrupted
from tests.loops.step_contract import *  # noqa: F403
from tests.loops.step_contract import (
    STEPS,
    adam,
    close,
    count,
    mlp,
    model_on,
    points,
    reasons,
    same_state,
    tokens,
    trained,
    written_out,
)


def test_on_a_cpu_a_step_runs_as_it_is_and_equals_eager_bit_for_bit():
    mine, theirs = model_on("cpu"), model_on("cpu")
    make = lambda model: torch.optim.AdamW(model.parameters(), lr=0.01)  # noqa: E731
    step = graphex.train_step(mine, functional.cross_entropy, make(mine), options={"regions": False})
    found = trained(step, tokens("cpu", 20))
    assert found == trained(written_out(theirs, make(theirs)), tokens("cpu", 20))
    assert reasons(step) == ["the device 'cpu' has no graphs"]


def test_what_is_no_step_is_refused_with_a_sentence():
    model = nn.Linear(2, 2)
    with pytest.raises(graphex.InputError, match="needs the optimizer"):
        graphex.train_step(model, functional.mse_loss)
    with pytest.raises(graphex.InputError, match="takes a module, or a function"):
        graphex.train_step(3)
    with pytest.raises(graphex.InputError, match="a function is a whole step"):
        graphex.train_step(lambda x: x, clip_norm=1.0)
    with pytest.raises(graphex.InputError, match="at least 1"):
        graphex.train_step(model, functional.mse_loss, torch.optim.SGD(model.parameters()), accumulate=0)
    with pytest.raises(graphex.InputError, match=r"LBFGS .* calls `optimizer\.step\(closure\)`"):
        graphex.train_step(model, functional.mse_loss, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(graphex.InputError, match="autocast is a type"):
        graphex.train_step(model, functional.mse_loss, torch.optim.SGD(model.parameters()), autocast="bf16")
    for ema in ("a", 1.0):
        with pytest.raises(graphex.InputError, match="ema is the decay of an average"):
            graphex.train_step(model, functional.mse_loss, torch.optim.SGD(model.parameters()), ema=ema)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"clip_norm": -1.0}, r"clip_norm is the largest norm, above 0; got -1\.0\."),
        ({"clip_norm": 0}, r"clip_norm is the largest norm, above 0; got 0\."),
        ({"clip_norm": "1"}, r"clip_norm is the largest norm, above 0; got '1'\."),
        ({"clip_value": -1}, r"clip_value is the largest absolute value of a gradient, above 0; got -1\."),
        ({"scaler": 2}, r"scaler is a torch\.amp\.GradScaler; got 2\."),
        ({"scheduler": 3}, r"scheduler is a scheduler of torch\.optim\.lr_scheduler; got 3\."),
        ({"scheduler": ReduceLROnPlateau}, "ReduceLROnPlateau steps with arguments, such as a metric"),
        ({"optimizer": torch.optim.SGD([torch.ones(2)])}, "the optimizer holds none of the model's parameters"),
        ({"clipnorm": 1.0}, r"unexpected keyword argument 'clipnorm' \(did you mean 'clip_norm'\?\)"),
        ({"model": None}, "train_step needs the module of these parts"),
    ],
)
def test_a_wrong_part_is_refused_before_the_first_step(wrong, told):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    made = {name: value(optimizer) if isinstance(value, type) else value for name, value in wrong.items()}
    with pytest.raises(graphex.InputError, match=told):
        graphex.train_step(**{"model": model, "loss_fn": functional.mse_loss, "optimizer": optimizer, **made})


def test_an_optimizer_may_hold_some_of_the_parameters_or_those_of_the_loss():
    model, head = nn.Linear(2, 2), nn.BCELoss(weight=torch.ones(2))
    graphex.train_step(model, functional.mse_loss, torch.optim.SGD([model.bias]))
    head.register_parameter("scale", nn.Parameter(torch.ones(2)))
    graphex.train_step(model, head, torch.optim.SGD([head.scale]))


@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
def test_records_and_errors_name_the_users_line_where_only_torchs_modules_are_called():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters())
    made = graphex.train_step(model, nn.MSELoss(), optimizer)  # made here

    @graphex.train_step
    def written(x, y):
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for step, line in ((made, "# made here"), (written, "# called here")):
        step(torch.ones(3, 2), torch.ones(3, 2))  # called here
        lines = {each.line for each in step.journal.rewrites}
        assert lines
        assert all(each.startswith("test_train_step.py:") and each.endswith(line) for each in lines)
        with pytest.raises(RuntimeError, match=r'from user code:\s+File ".*test_train_step\.py"'):
            step(torch.ones(3, 5), torch.ones(3, 2))


def test_a_step_shows_what_it_is():
    model = nn.Linear(2, 2)
    step = graphex.train_step(model, functional.mse_loss, torch.optim.SGD(model.parameters()))
    assert repr(step) == str(step) == "<training step of Linear, captured graphs: 0>"


@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
def test_a_call_that_is_no_step_is_refused_with_a_sentence():
    model, x = nn.Linear(2, 2), torch.ones(3, 2)
    make = lambda loss: graphex.train_step(model, loss, torch.optim.SGD(model.parameters()), compile=False)  # noqa: E731
    with pytest.raises(graphex.InputError, match=r"inputs and a target, the target last: step\(x, y\)"):
        make(functional.mse_loss)(x)
    with pytest.raises(graphex.InputError, match=r"of shape \(3, 2\): take its mean"):
        make(None)(x)
    assert model.weight.grad is None


@pytest.fixture
def alone() -> Iterator[None]:
    """A distributed program of one process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
def test_a_distributed_model_says_why_its_step_is_not_one_replay(where):
    mine, theirs = model_on(where), model_on(where)
    step = graphex.train_step(nn.parallel.DistributedDataParallel(mine), functional.cross_entropy, adam(mine))
    assert trained(step, tokens(where)) == trained(written_out(theirs, adam(theirs)), tokens(where))
    assert reasons(step)[0] == "DistributedDataParallel synchronises gradients in hooks of the host"


@pytest.mark.usefixtures("alone")
def test_a_step_of_the_module_inside_leaves_the_hooks_of_a_distributed_model_alone(where):
    model, called = model_on(where, mlp), []

    def reduced(state, bucket):
        called.append(1)
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    distributed = nn.parallel.DistributedDataParallel(model)
    distributed.register_comm_hook(None, reduced)
    step = graphex.train_step(model, functional.cross_entropy, adam(model))
    batches = points(where)
    for batch in batches:
        step(*batch)
    before = len(called)
    distributed(batches[0][0]).sum().backward()
    assert len(called) == before + 1


def test_the_backward_of_a_step_in_autocast_is_compiled_as_that_of_a_compiled_model_in_autocast():
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.inner(x).view(2, 4, 3, 8).unbind(2)
            return functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1).sum()

    def products(gm, inputs, config) -> None:
        called = [node for node in gm.graph.nodes if str(node.target) == "aten.bmm.default"]
        found.append([node.meta["val"].dtype for node in called])

    x, options = torch.randn(2, 4, 8), {"post_grad_custom_post_pass": products, "regions": False}
    found: list[list[torch.dtype]] = []
    with torch.autocast("cpu", torch.bfloat16):
        loss = torch.compile(Attending(), backend="graphex", options=options)(x)
    loss.backward()
    wanted, found = found, []
    model = Attending()
    step = graphex.train_step(
        model, None, torch.optim.SGD(model.parameters()), autocast=torch.bfloat16, options=options
    )
    step(x)
    assert found == wanted
    assert all(found)


def test_what_another_thread_does_meanwhile_is_no_part_of_a_step(where, monkeypatch):
    """It evaluates a compiled model, more often from step to step, and steps an optimizer of its own."""
    mine, theirs, other = (model_on(where, mlp) for _ in range(3))
    evaluated, others = compile_it(other), torch.optim.Adam(other.parameters())
    batches, calls, loss = points(where), itertools.count(1), functional.cross_entropy

    def beside() -> None:
        for _ in range(next(calls)):
            evaluated(batches[0][0])
        others.step()

    def together(*args):
        if count(step, "calls") < 3:
            thread = Thread(target=beside)
            thread.start()
            thread.join()
        return loss(*args)

    step = graphex.train_step(written_out(mine, adam(mine)))
    with monkeypatch.context() as patch:
        patch.setattr(functional, "cross_entropy", together)
        found = trained(step, batches)
    close(found, trained(written_out(theirs, adam(theirs)), batches))
    assert (count(step, "captured"), count(step, "replays"), reasons(step)) == (1, len(batches) - 3, [])
    assert not others.param_groups[0]["capturable"]


def test_the_hooks_for_all_optimizers_are_the_same_in_and_between_steps(where):
    """torch walks through them in each step of any optimizer, in any thread."""
    model, seen = model_on(where, mlp), []
    plain = written_out(model, adam(model))

    def step(x, y):
        seen.append(global_hooks())
        return plain(x, y)

    run = graphex.train_step(step)
    for batch in points(where, 3):
        run(*batch)
        seen.append(global_hooks())
    assert all(hooks == seen[0] for hooks in seen)


def test_a_module_of_two_steps_in_two_threads_is_as_it_was_after_both(where, monkeypatch):
    model, (x, y), loss = model_on(where, mlp), points(where)[0], functional.cross_entropy
    both_run, one_is_over = Event(), Event()

    def together(*args):
        if current_thread() is thread:
            both_run.set()
            one_is_over.wait()
        else:
            thread.start()
            both_run.wait()
        return loss(*args)

    one, other = (graphex.train_step(written_out(model, adam(model))) for _ in range(2))
    thread = Thread(target=other, args=(x, y))
    one(x, y), other(x, y)
    monkeypatch.setattr(functional, "cross_entropy", together)
    one(x, y)
    one_is_over.set()
    thread.join()
    assert model._compiled_call_impl is None


def test_a_step_in_the_middle_of_a_replay_is_made_before_it_or_behind_it_or_refused(where):
    """At any line, as a finalizer or a signal handler may call it."""
    mine, theirs = model_on(where, mlp), model_on(where, mlp)
    step, plain, batch = (
        graphex.train_step(written_out(mine, adam(mine))),
        written_out(theirs, adam(theirs)),
        points(where)[0],
    )
    trained(step, [batch] * 5)
    made, refused = [5], []

    def call() -> None:
        made.append(1)
        step(*batch)

    def other() -> None:
        try:
            step(*batch)
        except graphex.GraphexError as error:
            refused.append(str(error))
        else:
            made.append(1)

    assert interrupted(call, other) > 10
    trained(plain, [batch] * sum(made))
    same_state(mine, theirs)
    assert {each.partition(", by")[0] for each in refused} == {
        "a training step was called in the middle of its own replay or capture"
    }
    assert [count(step, "captured"), *reasons(step)] == [1]


def interrupted_step(
    where: str, decorate: Callable[..., Any], patch: pytest.MonkeyPatch, numbers: Sequence[int]
) -> Any:
    """The losses of a step in whose calls of these `numbers` it is called once more, its model, what is refused."""
    model, (x, y), loss, made = model_on(where, mlp), points(where)[0], functional.cross_entropy, itertools.count(1)
    optimizer, average = adam(model), AveragedModel(model)
    scheduler = StepLR(optimizer, 2, 0.5)
    refused: SimpleQueue[Exception] = SimpleQueue()  # a list would be a value of the step, which the step changes

    @decorate
    def step(x, y):
        found = functional.cross_entropy(model(x), y)
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        average.update_parameters(model)
        return found

    def interrupting(*args: torch.Tensor) -> torch.Tensor:
        if next(made) in numbers:
            try:
                step(x, y)
            except graphex.GraphexError as error:
                refused.put(error)
        return loss(*args)

    with patch.context() as context:
        context.setattr(functional, "cross_entropy", interrupting)
        found = trained(step, [(x, y)] * STEPS)
    return found, (model, average), optimizer.param_groups[0]["lr"], refused, step


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_step_in_the_middle_of_one_that_is_no_replay_is_as_in_eager(number, where, monkeypatch):
    """Schedulers and averages see both, in the order of eager."""
    about = monkeypatch, [number]
    *found, refused, step = interrupted_step(where, lambda step: graphex.train_step(step, compile=False), *about)
    *wanted, _, _ = interrupted_step(where, lambda step: step, *about)
    for mine, theirs in zip(found[1], wanted[1], strict=True):
        same_state(mine, theirs)
    close((found[0], found[2]), (wanted[0], wanted[2]))
    assert [count(step, "captured"), *reasons(step)] == [1]
    assert refused.empty()


def test_a_step_in_the_middle_of_a_capture_is_refused(where, monkeypatch):
    make = partial(graphex.train_step, compile=False)
    *found, refused, step = interrupted_step(where, make, monkeypatch, [4])
    *wanted, _, _ = interrupted_step(where, lambda step: step, monkeypatch, [])
    for mine, theirs in zip(found[1], wanted[1], strict=True):
        same_state(mine, theirs)
    close((found[0], found[2]), (wanted[0], wanted[2]))
    assert (count(step, "captured"), refused.qsize()) == (1, 1)


def test_a_step_that_calls_itself_runs_as_it_is(where):
    def training(decorate: Callable[..., Any]) -> tuple[Any, ...]:
        model = model_on(where, mlp)
        plain = written_out(model, adam(model))

        @decorate
        def step(x, y):
            return step(x[1:], y[1:]) if len(x) > 3 else plain(x, y)

        return trained(step, points(where)), model, step

    with pytest.warns(graphex.GraphexWarning, match="in the middle of itself"):
        found, mine, step = training(graphex.train_step)
    wanted, theirs, _ = training(lambda step: step)
    close(found, wanted)
    same_state(mine, theirs)
    assert reasons(step) == ["the step is called in the middle of itself"]
