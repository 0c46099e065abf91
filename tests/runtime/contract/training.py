"""Forward and backward are both captured, and a training loop computes what eager does."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphex
from tests.harness.capture import compile_it, count, in_threads, reasons, replays

Run = Callable[..., Tensor]
IN_USE = "2 calls were made while those of an earlier one were in use"
OF_ANOTHER_IN_USE = "2 calls were made while results of another graph (such as gradients) were in use"


def trained(where: str, *, compiled: bool, steps: int = 20) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4)).to(where)
    step = compile_it(model) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        loss = step(torch.randn(6, 8).to(where)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if compiled:
        journal = graphex.journal(step)
        assert {record.graph.split()[-1] for record in journal.captures} == {"forward", "backward"}
        assert replays(step) == 2 * (steps - 1)
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_twenty_training_steps_equal_eager(where):
    for mine, theirs in zip(trained(where, compiled=True), trained(where, compiled=False), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_verified_step_is_replayed_as_any_other(where):
    straight = []
    for verify in (False, True):
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).to(where)
        compiled = compile_it(model, verify=verify)
        for _ in range(6):
            model.zero_grad()
            compiled(torch.randn(4, 8, device=where)).square().mean().backward()
        of_graphs = graphex.journal(compiled).counts.items()
        straight.append({graph.split()[-1]: counts["straight"] for graph, counts in of_graphs})
    assert straight[0] == straight[1]
    assert straight[1]["backward"] > 0


def test_a_second_backward_before_the_first_sees_its_own_values(where):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).to(where)
    compiled = compile_it(model)
    inputs = [torch.randn(3, 4, device=where) for _ in range(4)]
    for _ in range(3):
        model.zero_grad()
        losses = [compiled(x).sum() for x in inputs]
        for loss in reversed(losses):
            loss.backward()
        found = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        for x in inputs:
            model(x).sum().backward()
        torch.testing.assert_close(found, [parameter.grad for parameter in model.parameters()])


def test_dropout_trains_with_the_seed(where):
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 1)).to(where)
    compiled = compile_it(model)
    x = torch.randn(3, 4, device=where)
    gradients = []
    for seed in (1, 2, 1, 2, 1):
        torch.manual_seed(seed)
        model.zero_grad()
        compiled(x).sum().backward()
        gradients.append(model[0].weight.grad.clone())
    torch.testing.assert_close(gradients[2], gradients[4])
    torch.testing.assert_close(gradients[1], gradients[3])
    assert not torch.equal(gradients[1], gradients[2])


@pytest.mark.parametrize("options", [{"clone_output": False}, {"clone_input": False}], ids=str)
def test_gradients_are_added_up_whatever_is_not_copied(options, where):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).to(where)
    compiled = compile_it(model, **options)
    for _ in range(4):
        inputs = [torch.randn(3, 4, device=where) for _ in range(3)]
        model.zero_grad()
        for x in inputs:
            model(x).square().sum().backward()
        wanted = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        for x in inputs:
            compiled(x).square().sum().backward()
        torch.testing.assert_close([parameter.grad for parameter in model.parameters()], wanted)
    assert reasons(compiled) == [IN_USE]
    assert replays(compiled) > 12  # of the forward and of the backward


def test_a_usual_loop_copies_neither_what_is_saved_nor_gradients(where):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to(where)
    compiled = compile_it(model)
    places = []
    for _ in range(6):
        loss = compiled(torch.randn(6, 8, device=where)).square().mean()
        model.zero_grad()
        loss.backward()
        places.append([parameter.grad.data_ptr() for parameter in model.parameters()])
    assert places[2] == places[3] == places[5]
    backward = next(record for record in graphex.journal(compiled).captures if record.graph.endswith("backward"))
    assert backward.inputs_copied == 2  # the user's input, and the gradient of the result
    assert reasons(compiled) == []


def test_what_is_saved_without_elements_is_never_in_use(where):
    run = compile_it(lambda x, index: x.gather(0, index.long()))
    index, held = torch.empty(0, dtype=torch.uint8, device=where), []
    for _ in range(5):
        x = torch.randn(5, device=where, requires_grad=True)
        held.append(run(x, index))
        assert not torch.autograd.grad(held[-1].sum(), x)[0].any()
    assert reasons(run) == []
    assert replays(run) > 0


def test_gradients_that_are_held_stay_right(where):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).to(where)
    compiled = compile_it(model)
    held, wanted = [], []
    for _ in range(8):
        x = torch.randn(3, 4, device=where)
        wanted.append(torch.autograd.grad(model(x).sum(), list(model.parameters())))
        model.zero_grad()
        compiled(x).sum().backward()
        held.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(held, [list(each) for each in wanted])
    assert reasons(compiled) == [OF_ANOTHER_IN_USE, IN_USE]


def test_a_graph_is_kept_for_a_second_backward_and_for_gradients_of_gradients(where):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 1)).to(where)
    compiled = compile_it(model)
    for _ in range(5):
        x = torch.randn(3, 4, device=where)
        theirs, mine = model(x).sum(), compiled(x).sum()
        for _ in range(2):
            wanted = torch.autograd.grad(theirs, list(model.parameters()), retain_graph=True)
            found = torch.autograd.grad(mine, list(model.parameters()), retain_graph=True)
            torch.testing.assert_close(found, wanted)


# -- replays past AOTAutograd's wrappers -----------------------------------------------------------------------------


def replayed_step(where: str) -> tuple[Run, nn.Module]:
    """A compiled model, and the model, after steps until forward and backward are replayed."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Sigmoid(), nn.Linear(4, 1)).to(where)
    compiled = compile_it(model)
    for _ in range(4):
        torch.autograd.grad(compiled(torch.randn(3, 4, device=where)).sum(), list(model.parameters()))
    return compiled, model


def gradients_agree(compiled: Run, model: nn.Module, x: Tensor) -> None:
    parameters = list(model.parameters())
    found = torch.autograd.grad(compiled(x).sum(), parameters)
    torch.testing.assert_close(found, torch.autograd.grad(model(x).sum(), parameters))


def test_replays_of_forward_and_backward_go_past_the_wrappers(where):
    compiled, model = replayed_step(where)
    before, replayed = count(compiled, "straight"), replays(compiled)
    for _ in range(3):
        gradients_agree(compiled, model, torch.randn(3, 4, device=where))
    assert count(compiled, "straight") - before == replays(compiled) - replayed == 6


def test_layers_that_share_their_code_go_past_the_wrappers(where):
    layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Sigmoid()) for _ in range(2)).to(where)
    run = torch.compile(lambda layer, x: layer(x), backend="graphex", dynamic=False)
    for _ in range(8):
        for layer in layers:
            gradients_agree(partial(run, layer), layer, torch.randn(3, 4, device=where))
    assert count(run, "straight") > 2 * 8
    assert reasons(run) == []


def test_hooks_on_saved_tensors_see_what_a_replay_saves(where):
    compiled, model = replayed_step(where)
    seen: list[Tensor] = []
    for _ in range(3):
        with torch.autograd.graph.saved_tensors_hooks(
            lambda each: seen.append(each) or each.clone(), lambda each: each
        ):
            gradients_agree(compiled, model, torch.randn(3, 4, device=where))
        found = len(seen)
        gradients_agree(compiled, model, torch.randn(3, 4, device=where))
        assert len(seen) == found > 0


def test_a_weight_that_is_written_to_before_the_backward_is_an_error(where):
    compiled, model = replayed_step(where)
    loss = compiled(torch.randn(3, 4, device=where)).sum()
    with torch.no_grad():
        model[3].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    gradients_agree(compiled, model, torch.randn(3, 4, device=where))


def test_a_result_that_is_saved_and_written_to_is_an_error(where):
    run = compile_it(lambda x: (x.exp(), x.argmax()))
    for number in range(6):
        x = torch.randn(4, device=where, requires_grad=True)
        result, place = run(x)
        assert not place.requires_grad
        assert place == x.argmax()
        if number % 2:
            result.detach().mul_(2)
            with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
                result.sum().backward()
        else:
            result.sum().backward()
            torch.testing.assert_close(x.grad, x.detach().exp())
    assert replays(run) >= 5


def test_a_backward_is_run_again_only_if_its_graph_is_retained(where):
    compiled, model = replayed_step(where)
    for _ in range(2):
        x, parameters = torch.randn(3, 4, device=where), list(model.parameters())
        loss = compiled(x).sum()
        wanted = torch.autograd.grad(model(x).sum(), parameters)
        torch.testing.assert_close(torch.autograd.grad(loss, parameters, retain_graph=True), wanted)
        torch.testing.assert_close(torch.autograd.grad(loss, parameters), wanted)
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(loss, parameters)


@pytest.mark.parametrize("retained", [None, False], ids=["retained", "released"])
def test_gradients_of_gradients_are_an_error(where, retained):
    run = compile_it(lambda x: (x * 2).sigmoid().square().sum())  # nothing that is saved needs a gradient
    for _ in range(4):
        x = torch.randn(3, device=where, requires_grad=True)
        (found,) = torch.autograd.grad(run(x), x, create_graph=count(run, "straight") > 0, retain_graph=retained)
    assert found.requires_grad
    with pytest.raises(RuntimeError, match="double backward"):
        (found.sum() + x.sum()).backward()


def test_many_gradients_at_once_are_those_of_eager(where):
    compiled, model = replayed_step(where)
    for _ in range(2):
        x, at_once = torch.randn(3, 4, device=where), torch.randn(5, 3, 1, device=where)
        wanted = torch.autograd.grad(model(x), list(model.parameters()), at_once, is_grads_batched=True)
        found = torch.autograd.grad(compiled(x), list(model.parameters()), at_once, is_grads_batched=True)
        torch.testing.assert_close(found, wanted)


def test_autograd_sees_the_same_node_in_a_replay_and_in_other_calls(where):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)).to(where)
    compiled, seen, given = compile_it(model), [], []
    for _ in range(5):
        result = compiled(torch.full((3, 4), math.nan, device=where))
        result.grad_fn.register_prehook(lambda gradients: given.append(len(gradients)))
        into = [None if node is None else node.name() for node, _ in result.grad_fn.next_functions]
        loss = result.sum()
        with pytest.warns(UserWarning, match="Error detected"), pytest.raises(RuntimeError) as raised:
            with torch.autograd.set_detect_anomaly(True):
                loss.backward()
        seen.append((result.grad_fn.name(), into, str(raised.value)))
        del result, loss, raised
    assert count(compiled, "straight") > 0
    assert seen == seen[:1] * 5
    assert given == [1] * 5


class Several(nn.Module):
    """Two results with gradients, and two without."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = self.first(x).sigmoid()
        return hidden * 2, self.second(hidden).tanh(), hidden.argmax(-1), hidden.detach() + 1


def test_some_gradients_of_some_results_in_any_layout(where):
    model = Several().to(where)
    compiled = compile_it(model)
    layouts = (torch.randn(4, 3).to(where).t(), torch.randn(1, 4).to(where).expand(3, 4), torch.randn(3, 4).to(where))
    for number in range(9):
        x, place, given = torch.randn(3, 4, device=where), number % 2, layouts[number % 3]
        mine, theirs = compiled(x), model(x)
        torch.testing.assert_close(mine, theirs)
        assert [each.requires_grad for each in mine] == [True, True, False, False]
        wanted = torch.autograd.grad(theirs[place], [model.first.weight], given)
        del theirs, x
        mine = mine[place]
        torch.testing.assert_close(torch.autograd.grad(mine, [model.first.weight], given), wanted)
        del mine
    assert count(compiled, "straight") >= 8
    assert reasons(compiled) == []


def test_a_backward_lets_go_of_what_it_has_read(where):
    compiled, model = replayed_step(where)
    x = torch.randn(3, 4, device=where)
    read = weakref.ref(x)
    loss = compiled(x).sum()
    del x
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    assert read() is not None
    torch.autograd.grad(loss, list(model.parameters()))
    assert read() is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_a_compiled_model_computes_it_again(where, reentrant):
    compiled, model = replayed_step(where)
    for _ in range(3):
        x = torch.randn(3, 4, device=where, requires_grad=True)
        wanted = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
        checkpoint(compiled, x, use_reentrant=reentrant).sum().backward()
        torch.testing.assert_close((x.grad, *(each.grad for each in model.parameters())), wanted)
        model.zero_grad()


def test_threads_train_models_of_their_own_and_one_backward_runs_beside_the_next_forward(where):
    models = [nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1)).to(where) for _ in range(3)]
    block, batches = torch.compile(lambda model, x: model(x), backend="graphex", dynamic=False), torch.randn(20, 3, 4)
    wanted = [torch.autograd.grad(model(batches.to(where)).sum(), list(model.parameters())) for model in models]
    for model in models:  # torch 2.11 does not compile in one thread while another calls what is compiled
        torch.autograd.grad(block(model, batches[0].to(where)).sum(), list(model.parameters()))

    @torch.enable_grad()
    def train(model: nn.Module) -> None:
        with ThreadPoolExecutor(1) as beside:
            running = [beside.submit(block(model, x).sum().backward) for x in batches.to(where)]
        for each in running:
            each.result()

    in_threads(train, models)
    found = [tuple(parameter.grad for parameter in model.parameters()) for model in models]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert count(block, "straight") > 0


def test_a_forward_that_is_dropped_without_a_backward_is_in_nobodys_way(where):
    compiled, model = replayed_step(where)
    before = count(compiled, "straight")
    for _ in range(3):
        compiled(torch.randn(3, 4, device=where))
    held = compiled(torch.randn(3, 4, device=where))
    gradients_agree(compiled, model, x := torch.randn(3, 4, device=where))
    del held
    gradients_agree(compiled, model, x)
    assert count(compiled, "straight") - before == 4 + 2  # not the call while the results of another were held
    assert reasons(compiled) == []


def test_compiled_autograd_takes_the_backward_of_a_replay(where):
    compiled, model = replayed_step(where)
    x = torch.randn(3, 4, device=where)
    loss, wanted = compiled(x).sum(), torch.autograd.grad(model(x).sum(), list(model.parameters()))
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], list(wanted))
    model.zero_grad()
    gradients_agree(compiled, model, x)
    assert reasons(compiled) == []


def test_autocast_around_the_backward_changes_nothing(where):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 1)).to(where)
    compiled, x, kind = compile_it(model), torch.randn(3, 4, device=where), torch.device(where).type
    for held in (False, False, False, True, False):
        with torch.autocast(kind, dtype=torch.bfloat16):
            theirs, mine = model(x).sum(), compiled(x).sum()
            wanted = torch.autograd.grad(theirs, list(model.parameters()))
            found = torch.autograd.grad(mine, list(model.parameters()), retain_graph=held)
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)


def test_a_forward_without_a_backward_is_replayed(where):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).to(where)
    compiled = compile_it(model)
    for number in range(8):
        x = torch.randn(3, 4, device=where)
        torch.testing.assert_close(compiled(x), model(x))
        if number % 2:
            wanted = torch.autograd.grad(model(x).sum(), list(model.parameters()))
            torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), list(model.parameters())), wanted)
    assert reasons(compiled) == []


def test_layers_that_share_their_code_keep_what_each_has_saved(where):
    layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)).to(where)
    block = torch.compile(lambda layer, x: layer(x) * 2 + x, backend="graphex", dynamic=False)
    for _ in range(5):
        x = torch.randn(3, 4, device=where)
        theirs = mine = x
        for layer in layers:
            theirs, mine = layer(theirs) * 2 + theirs, block(layer, mine)
        wanted = torch.autograd.grad(theirs.sum(), list(layers.parameters()))
        torch.testing.assert_close(torch.autograd.grad(mine.sum(), list(layers.parameters())), wanted)


def test_many_sizes_are_copied_out(where):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).to(where)
    compiled = compile_it(model, dynamic=True)
    for rows in (3, 3, 5, 5, 3, 5, 7, 7, 3, 5, 7, 9, 9, 3, 3):
        x = torch.randn(rows, 4, device=where)
        wanted = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), list(model.parameters())), wanted)
    assert set(reasons(compiled)) == {"calls have more than 2 combinations of sizes"}


def test_steps_in_flight_for_two_sizes_see_their_own_values(where):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).to(where)
    compiled = compile_it(model, dynamic=True)
    for _ in range(6):
        inputs = [torch.randn(rows, 4, device=where) for rows in (3, 5, 3)]
        wanted = [torch.autograd.grad(model(x).sum(), list(model.parameters())) for x in inputs]
        losses = [compiled(x).sum() for x in inputs]
        found = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
        torch.testing.assert_close(found, wanted)


def test_without_clone_output_what_is_saved_for_a_backward_stays_right(where):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 1)).to(where)
    compiled = compile_it(model, clone_output=False)
    for _ in range(4):
        x, y = torch.randn(3, 4, device=where), torch.randn(3, 4, device=where)
        wanted = torch.autograd.grad(model(x).sum() + model(y).sum(), list(model.parameters()))
        found = torch.autograd.grad(compiled(x).sum() + compiled(y).sum(), list(model.parameters()))
        torch.testing.assert_close(found, wanted)


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_without_clone_output_what_is_saved_as_a_part_of_what_another_piece_made_stays_right(where):
    weight = torch.randn(4, 4, device=where, requires_grad=True)

    def model(x, count):
        made, rows = (x @ weight).sigmoid() * 2 + 1, int(count.item())
        torch._check(rows >= 1)
        torch._check(rows <= 3)
        part = made[:rows]
        return (part.sin() * part).sum()

    compiled = compile_it(model, clone_output=False)
    count = torch.tensor([2], device=where)
    for _ in range(4):
        x, y = torch.randn(3, 4, device=where), torch.randn(3, 4, device=where)
        wanted = torch.autograd.grad(model(x, count) + model(y, count), weight)
        torch.testing.assert_close(torch.autograd.grad(compiled(x, count) + compiled(y, count), weight), wanted)
    assert replays(compiled) > 0
    assert reasons(compiled) == []


def test_without_clone_input_a_backward_writes_to_no_result_that_was_saved(where):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(where)
    compiled = compile_it(model, clone_input=False)
    kept = []
    for _ in range(5):
        x, gradient = torch.randn(3, 4, device=where), torch.randn(3, 4, device=where)
        wanted = model(x).detach(), gradient.clone()
        result = compiled(x)
        result.backward(gradient)
        kept.append(((result.detach(), gradient), wanted))
    for found, wanted in kept:
        torch.testing.assert_close(found, wanted)


class Tied(nn.Module):
    """A head that is the embedding, a frozen layer, a norm with statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.frozen, self.norm = nn.Linear(8, 8).requires_grad_(False), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.frozen(self.embedding(tokens)))))


def with_a_hook(model: nn.Module, run: Run, batches: list[Tensor]) -> Iterator[Tensor]:
    called: list[Tensor] = []
    model.norm.weight.register_hook(called.append)
    yield from plainly(model, run, batches)
    assert len(called) == len(batches)
    yield torch.stack(called)


def with_an_evaluation(model: nn.Module, run: Run, batches: list[Tensor]) -> Iterator[Tensor]:
    for tokens in batches:
        yield from plainly(model, run, [tokens])
        model.eval()
        with torch.no_grad():
            yield run(tokens).clone()
        model.train()


def with_a_smaller_batch_at_the_end(model: nn.Module, run: Run, batches: list[Tensor]) -> Iterator[Tensor]:
    for _ in range(2):
        yield from plainly(model, run, [*batches[:4], batches[4][:3]])


def with_an_exception(model: nn.Module, run: Run, batches: list[Tensor]) -> Iterator[Tensor]:
    def broken(gradient: Tensor) -> None:
        raise ArithmeticError

    for number, tokens in enumerate(batches):
        if number == 4:
            result = run(tokens)
            result.register_hook(broken)
            with pytest.raises(ArithmeticError):
                result.sum().backward()
            assert all(each.grad is None for each in model.parameters())
        yield from plainly(model, run, [tokens])


def with_a_nan_and_a_scaler(model: nn.Module, run: Run, batches: list[Tensor]) -> Iterator[Tensor]:
    device = batches[0].device.type
    scaler = torch.amp.GradScaler(device, init_scale=16.0, growth_interval=3)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    for number, tokens in enumerate(batches):
        loss = run(tokens).square().mean() * (math.nan if number == 4 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        yield loss.detach().clone()
    yield torch.tensor(scaler.get_scale())


def plainly(model: nn.Module, run: Run, batches: list[Tensor]) -> Iterator[Tensor]:
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    for tokens in batches:
        loss = run(tokens).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach().clone()


TRAPS = (with_a_hook, with_an_evaluation, with_a_smaller_batch_at_the_end, with_an_exception, with_a_nan_and_a_scaler)


@pytest.mark.parametrize("loop", TRAPS, ids=lambda loop: loop.__name__)
def test_a_loop_of_ordinary_steps_equals_eager(loop, where):
    found = []
    for is_compiled in (True, False):
        torch.manual_seed(0)
        model = Tied().to(where)
        run = compile_it(model) if is_compiled else model
        losses = list(loop(model, run, [torch.randint(0, 12, (6,)).to(where) for _ in range(8)]))
        found.append((losses, dict(model.state_dict())))
        if is_compiled:
            assert replays(run) > len(losses) / 2
    torch.testing.assert_close(*found, equal_nan=True, rtol=1e-4, atol=1e-5)


def test_a_graph_that_is_evicted_while_its_backward_is_to_come_keeps_what_it_saved(where):
    models = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(where) for _ in range(3)]
    first, held, last = models
    block = compile_it(lambda model, x: model(x), dynamic=False, capture_limit=2)
    x = torch.randn(3, 4, device=where)

    def gradients(model: nn.Module, run: Run) -> list[Tensor]:
        return list(torch.autograd.grad(run(model, x).sum(), list(model.parameters())))

    for _ in range(3):
        torch.testing.assert_close(gradients(first, block), gradients(first, lambda model, x: model(x)))
    loss = block(held, x).sum()  # captured behind the graphs of the first model, which may compute in the same memory
    for model in (first, last, first):  # the last one is captured in the place of the one whose values are held
        torch.testing.assert_close(block(model, x), model(x))
    found = torch.autograd.grad(loss, list(held.parameters()))
    torch.testing.assert_close(list(found), gradients(held, lambda model, x: model(x)))
    assert count(block, "evicted") == 1
