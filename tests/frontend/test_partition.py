"""What a forward saves for its backward, and the record of it."""

from __future__ import annotations

from copy import deepcopy
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import graphex
from tests.harness.capture import compile_it


def saved(compiled: object) -> dict[str, int]:
    """Bytes by op."""
    found: dict[str, int] = {}
    for record in graphex.journal(compiled).activations:
        if record.status == "saved":
            found[record.op] = found.get(record.op, 0) + record.bytes
    return found


def deep() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1))]
    return nn.Sequential(*layers)


def test_what_is_saved_is_on_record_with_its_bytes_and_the_reason():
    model = deep()
    compiled = compile_it(model)
    compiled(torch.randn(64, 8)).sum().backward()
    records = {(each.status, each.op): each for each in graphex.journal(compiled).activations}
    masks = records["saved", "aten.native_dropout.default"]
    assert masks.reason == "random numbers are not drawn twice"
    assert masks.bytes >= 6 * 64 * 8
    assert {each.graph for each in records.values()} == {"Sequential forward"}
    assert records["an input", "input"].reason == "an input of the model, which is there anyway"


def test_a_smaller_budget_saves_less_and_computes_the_same():
    x, bytes_saved, gradients = torch.randn(512, 8), [], []
    for budget in (1.0, 0.0):
        torch._dynamo.reset()
        model = deep().eval()
        compiled = compile_it(model, activation_memory_budget=budget)
        compiled(x).square().sum().backward()
        bytes_saved.append(sum(saved(compiled).values()))
        gradients.append([each.grad for each in model.parameters()])
    assert bytes_saved[1] < bytes_saved[0]
    torch.testing.assert_close(*gradients)


class Normalized(nn.Module):
    """Layers with batch norms, whose running statistics the forward writes."""

    def __init__(self, in_checkpoints: bool) -> None:
        super().__init__()
        self.in_checkpoints = in_checkpoints
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.in_checkpoints else layer(x)
        return x


def test_checkpoints_of_batch_norms_save_less_and_compute_the_same():
    x, bytes_saved, found = torch.randn(512, 8), [], []
    for in_checkpoints in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Normalized(in_checkpoints)
        compiled = compile_it(model)
        for _ in range(2):
            compiled(x).square().sum().backward()
        assert not graphex.journal(compiled).fallbacks
        bytes_saved.append(sum(saved(compiled).values()))
        found.append([each.grad for each in model.parameters()] + list(model.buffers()))
    assert bytes_saved[1] < bytes_saved[0] / 2
    torch.testing.assert_close(*found)


class Counting(nn.Module):
    """A checkpoint that writes to a buffer that it has read. `within` makes another view of the buffer of it."""

    def __init__(self, in_checkpoint: bool, buffer: Tensor, within: bool = False) -> None:
        super().__init__()
        self.in_checkpoint, self.within = in_checkpoint, within
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("buffer", buffer)

    def scale(self, x: Tensor) -> Tensor:
        seen = self.buffer.view(2, 4).flatten() if self.within else self.buffer
        result = torch.sin(self.first(x) * seen.exp())
        with torch.no_grad():
            self.buffer.add_(1)
        return result

    def forward(self, x: Tensor) -> Tensor:
        scaled = checkpoint(self.scale, x, use_reentrant=False) if self.in_checkpoint else self.scale(x)
        return torch.tanh(self.last(scaled))


def gradients_of(run: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    found = []
    for _ in range(2):
        model.zero_grad()
        run(x).sum().backward()
        found += [each.grad.clone() for each in model.parameters()] + [each.clone() for each in model.buffers()]
    return found


@pytest.mark.parametrize("budget", [1.0, 0.0])
@pytest.mark.parametrize("within", [False, True])
def test_a_checkpoint_computes_again_from_what_a_buffer_held_before_it_was_written(within, budget):
    model = Counting(True, torch.ones(8), within)
    plain = Counting(False, torch.ones(8), within)
    plain.load_state_dict(model.state_dict())
    compiled, x = compile_it(model, activation_memory_budget=budget), torch.randn(16, 8)
    torch.testing.assert_close(gradients_of(compiled, model, x), gradients_of(plain, plain, x))
    journal = graphex.journal(compiled)
    assert "an input as it was before the forward wrote to it" in {each.reason for each in journal.activations}
    assert not journal.fallbacks


def test_a_checkpoint_of_a_buffer_that_cannot_be_copied_alike_saves_all_and_says_so():
    model, plain = (Counting(each, torch.ones(8, 2)[:, 0]) for each in (True, False))
    plain.load_state_dict(model.state_dict())
    compiled, x = compile_it(model), torch.randn(16, 8)
    with pytest.warns(graphex.GraphexWarning, match="which the forward has overwritten by then"):
        found = gradients_of(compiled, model, x)
    torch.testing.assert_close(found, gradients_of(plain, plain, x))


@pytest.mark.parametrize("budget", [0.5, 0.0])
@pytest.mark.parametrize("draw", ["dropout", "rand", "normal", "branch"])
def test_a_smaller_budget_draws_no_number_twice(draw, budget):
    drawn = {
        "dropout": lambda x: functional.dropout(x, 0.5),
        "rand": lambda x: x * torch.rand(8, 8),
        "normal": lambda x: x * torch.normal(x.detach().abs()),
        "branch": lambda x: torch.cond(
            x.sum() > -inf, lambda x: functional.dropout(x.exp(), 0.5) * x, lambda x: x.sin(), (x,)
        ),
    }[draw]

    def model(x, w):
        return drawn(torch.sin(x @ w)).tanh() @ w

    compiled, found = compile_it(model, activation_memory_budget=budget), []
    for run in (model, compiled):
        torch.manual_seed(1)
        x, w = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
        y = run(x, w)
        found.append((y, *torch.autograd.grad(y.sum(), (x, w)), torch.rand(1)))
    torch.testing.assert_close(*found)


def test_a_checkpoint_with_dropout_draws_the_same_numbers_again():
    def model(x, w):
        return checkpoint(lambda x: ((x @ w).sin() * functional.dropout(x, 0.5)).tanh(), x, use_reentrant=False).sum()

    compiled, gradients = compile_it(model), []
    for run in (model, compiled):
        torch.manual_seed(1)
        x, w = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
        gradients.append(torch.autograd.grad(run(x, w), (x, w)))
    torch.testing.assert_close(*gradients)
    assert not graphex.journal(compiled).fallbacks
    assert saved(compiled).keys() <= {"run_and_save_rng_state"}


def test_what_a_checkpoint_drops_is_computed_again():
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)

    def model(x, *, within):
        part = lambda x: second(first(x).sigmoid()).sigmoid()  # noqa: E731
        return (checkpoint(part, x, use_reentrant=False) if within else part(x)).sum()

    x = torch.randn(64, 8, requires_grad=True)
    plain, within = (compile_it(lambda x, w=w: model(x, within=w)) for w in (False, True))
    plain(x).backward()
    wanted, x.grad = x.grad, None
    within(x).backward()
    torch.testing.assert_close(x.grad, wanted)
    assert sum(saved(within).values()) < sum(saved(plain).values())
    reasons = {each.reason for each in graphex.journal(within).activations if each.status == "computed again"}
    assert "it is in a checkpoint" in reasons


def test_a_log_softmax_of_cast_logits_is_computed_again_where_regions_compile_it(monkeypatch):
    monkeypatch.setenv("GRAPHEX_REGIONS", "on")
    target = torch.randint(0, 96, (32,))

    def loss(logits):
        return functional.cross_entropy(logits.float(), target)

    logits = torch.randn(32, 96, dtype=torch.bfloat16, requires_grad=True)
    compiled = compile_it(loss)
    compiled(logits).backward()
    found, logits.grad = logits.grad, None
    loss(logits).backward()
    torch.testing.assert_close(found, logits.grad)
    assert "aten._log_softmax.default" not in saved(compiled)


def test_a_log_softmax_of_cast_logits_is_computed_again_from_two_numbers_a_row(monkeypatch):
    """As on a GPU: the statistics are saved, so that a backward reads each row once. Of empty rows there are none."""
    monkeypatch.setenv("GRAPHEX_REGIONS", "on")
    monkeypatch.setattr("graphex.frontend.partition._STATISTICS_ON", ("cpu",))
    target = torch.randint(0, 96, (32,))

    def loss(logits):
        return functional.cross_entropy(logits.float(), target)

    def transposed(logits):
        return torch.log_softmax(logits.t().float(), 0).square().mean()

    for function, is_apart in ((loss, True), (transposed, False)):
        torch._dynamo.reset()
        logits = (10 * torch.randn(32, 96)).bfloat16().requires_grad_()
        compiled = compile_it(function)
        value = compiled(logits)
        value.backward()
        found, logits.grad = logits.grad, None
        expected = function(logits)
        expected.backward()
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(found, logits.grad)
        records = graphex.journal(compiled).activations
        again = {each.op: each.reason for each in records if each.status == "computed again"}
        assert ("aten.amax.default" in saved(compiled)) == is_apart
        assert not again.keys() & {"aten.amax.default", "aten.sum.dim_IntList", "aten.exp.default"}
        if is_apart:
            assert again["aten.sub.Tensor"] == "a region computes it where it is read"
            assert sum(saved(compiled).values()) < 32 * 96


def test_a_tanh_in_a_chain_is_computed_again_where_regions_compile_it_and_one_of_a_product_is_saved(monkeypatch):
    """The first is GPT-2's activation, which saves what it is computed from in any case; the second saves one value."""
    layer = nn.Linear(16, 16)

    def gelu(x):
        h = layer(x)
        return (0.5 * h * (1.0 + torch.tanh(0.8 * (h + 0.04 * h.pow(3.0))))).sum()

    def plain(x):
        return layer(x).tanh().sum()

    for regions, function, is_again in (("on", gelu, True), ("on", plain, False), ("off", gelu, False)):
        torch._dynamo.reset()
        monkeypatch.setenv("GRAPHEX_REGIONS", regions)
        x = torch.randn(32, 16, requires_grad=True)
        compiled = compile_it(function)
        compiled(x).backward()
        found, x.grad = x.grad, None
        function(x).backward()
        torch.testing.assert_close(found, x.grad)
        assert not [each.reason for each in graphex.journal(compiled).fallbacks if "region" in each.what]
        again = {each.op: each.reason for each in graphex.journal(compiled).activations if "again" in each.status}
        assert again.get("aten.tanh.default", "-") == ("a region computes it where it is read" if is_again else "-")


def test_what_a_loss_reads_by_its_size_alone_is_not_saved_where_regions_compile_it(monkeypatch):
    """Cross entropy in autocast takes its logarithms in 16 bits, and casts them for the loss."""
    target = torch.randint(0, 96, (32,))

    def loss(logits):
        return functional.nll_loss(torch.log_softmax(logits, -1).float(), target)

    for regions, is_saved in (("on", False), ("off", True)):
        torch._dynamo.reset()
        monkeypatch.setenv("GRAPHEX_REGIONS", regions)
        logits = torch.randn(32, 96, dtype=torch.bfloat16, requires_grad=True)
        compiled = compile_it(loss)
        compiled(logits).backward()
        found, logits.grad = logits.grad, None
        loss(logits).backward()
        torch.testing.assert_close(found, logits.grad, rtol=0.02, atol=1e-4)  # of 16 bits, rounded at other places
        assert ("aten._to_copy.default" in saved(compiled)) == is_saved
        assert (sum(saved(compiled).values()) < 3 * 32 * 96) == (not is_saved)


def test_the_result_of_a_group_norm_is_computed_again_where_regions_compile_it(monkeypatch):
    """As in autocast; in less than float32 the statistics that are saved are not those that the op has used."""
    for regions, dtype, is_saved in (
        ("on", torch.float32, False),
        ("off", torch.float32, True),
        ("on", torch.bfloat16, True),
    ):
        torch._dynamo.reset()
        monkeypatch.setenv("GRAPHEX_REGIONS", regions)
        norm, x = nn.GroupNorm(4, 8, dtype=dtype), torch.randn(2, 8, 6, 6, dtype=torch.bfloat16, requires_grad=True)

        def model(x, norm=norm, dtype=dtype):
            return functional.silu(norm(x.to(dtype)))

        compiled = compile_it(model)
        found = torch.autograd.grad(compiled(x).sum(), [x, norm.weight, norm.bias])
        if dtype == torch.float32:  # in 16 bits regions round at other places
            torch.testing.assert_close(found, torch.autograd.grad(model(x).sum(), [x, norm.weight, norm.bias]))
        assert (sum(saved(compiled).values()) >= x.numel() * x.itemsize) == is_saved


# -- channels last -----------------------------------------------------------------------------------------------------

CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)
NODE_BY_NODE = {"disable_rules": ("region",)}  # without code of Inductor's, which takes seconds to compile


@pytest.fixture
def channels_last(monkeypatch):
    """As on a GPU."""
    monkeypatch.setenv("GRAPHEX_REGIONS", "on")
    monkeypatch.setattr("graphex.frontend.partition._CHANNELS_LAST_ON", ("cpu",))
    monkeypatch.setattr("graphex.frontend.partition._IN_REGIONS_ON", ())


class Layouts:
    """A pass that notes, of every convolution and derivative of one, whether all images and weights are laid out so."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def __call__(self, gm, example_inputs, config):
        for node in gm.graph.nodes:
            if node.target in CONVOLUTIONS:
                values = [each.meta["val"] for each in node.all_input_nodes]
                images = [value for value in values if value.dim() == 4]
                self.found.append(all(value.is_contiguous(memory_format=torch.channels_last) for value in images))


class Block(nn.Module):
    """A residual block, as in a ResNet, with a pool before and a linear layer behind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 72, 3, bias=False), nn.BatchNorm2d(72), nn.ReLU(), nn.MaxPool2d(2))
        self.body = nn.Sequential(
            *(nn.Conv2d(72, 72, 1, bias=False), nn.BatchNorm2d(72), nn.ReLU(), nn.Conv2d(72, 72, 3, padding=1)),
        )
        self.head = nn.Linear(72, 5)

    def forward(self, x):
        x = self.first(x)
        return self.head(functional.relu(self.body(x) + x).mean((2, 3)))


class Flattened(nn.Module):
    """Ops between convolutions and behind them that need their values row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 72, 3), nn.Conv2d(72, 6, 1)
        self.norm = nn.GroupNorm(4, 72)

    def forward(self, x):
        features = functional.silu(self.norm(self.first(x)))
        return self.second(features).flatten(1).cumsum(1), features


def trained(model, run, x):
    """The results of a step, the gradients and the statistics, and where they lie in memory."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    results = run(x)
    results = results if isinstance(results, tuple) else (results,)
    sum(each.float().square().mean() for each in results).backward()
    tensors = [*results, x.grad, *(each.grad for each in model.parameters()), *model.buffers()]
    return [each.detach().clone() for each in tensors], [each.stride() for each in tensors]


def laid_out(compiled) -> int:
    return [each.rule for each in graphex.journal(compiled).rewrites].count("channels_last")


@pytest.mark.parametrize("make", [Block, Flattened])
@pytest.mark.parametrize("options", [{}, NODE_BY_NODE], ids=["regions", "nodes"])
def test_convolutions_of_both_graphs_read_channels_last_and_nothing_else_changes(channels_last, make, options):
    torch.manual_seed(0)
    model, x, layouts = make(), torch.randn(2, 3, 10, 10), Layouts()
    reference = deepcopy(model)
    compiled = compile_it(model, post_grad_custom_post_pass=layouts, **options)
    for _ in range(2):
        found, strides = trained(model, compiled, x)
        wanted, as_eager = trained(reference, reference, x)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        assert strides == as_eager
    assert laid_out(compiled) == 1
    assert layouts.found == [True] * len(layouts.found)
    assert len(layouts.found) == 2 * sum(isinstance(each, nn.Conv2d) for each in model.modules())


def test_in_autocast_weights_are_cast_and_laid_out_at_once(channels_last):
    torch.manual_seed(0)
    model, x = Block(), torch.randn(2, 3, 10, 10)
    reference, kinds = deepcopy(model), []

    def copies(gm, example_inputs, config):
        kinds.extend(node.target for node in gm.graph.nodes if node.target is torch.ops.aten.clone.default)

    compiled = compile_it(model, post_grad_custom_post_pass=copies, **NODE_BY_NODE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, _ = trained(model, compiled, x)
        wanted, _ = trained(reference, reference, x)
    torch.testing.assert_close(found, wanted, rtol=0.1, atol=0.02)
    assert laid_out(compiled) == 1
    assert len(kinds) == 4  # gradients: of two weights of 3 by 3, of the image, and that of the mean on its way


@pytest.mark.parametrize(
    ("layers", "options"),
    [
        ([nn.Conv2d(3, 72, 3)], {"region_numerics": "eager"}),
        ([nn.Conv2d(3, 72, 3)], {"regions": False}),
        ([nn.Conv2d(3, 72, 3)], {"disable_rules": ("channels_last", "region")}),
        ([nn.Conv2d(3, 16, 3)], {}),
        ([nn.Conv2d(3, 72, 3), nn.Conv2d(72, 72, 3, groups=2)], {}),
        ([nn.Conv2d(3, 72, 3), nn.Conv2d(72, 16, 3)], {}),
    ],
    ids=["numerics", "no regions", "disabled", "few channels", "groups", "fewer channels"],
)
def test_convolutions_keep_their_layout_where_another_is_not_faster_or_not_wanted(channels_last, layers, options):
    layouts, model = Layouts(), nn.Sequential(*layers)
    options = {**options, "disable_rules": tuple({*options.get("disable_rules", ()), "region"})}
    compiled = compile_it(model, post_grad_custom_post_pass=layouts, **options)
    trained(model, compiled, torch.randn(2, 3, 9, 9))
    assert laid_out(compiled) == 0
    assert not any(layouts.found)


@pytest.mark.parametrize(
    ("has_library", "groups", "between", "times"),
    [
        (True, 1, nn.ReLU(), 1),
        (True, 2, nn.ReLU(), 0),
        (True, 1, nn.GroupNorm(2, 8), 0),
        (False, 1, nn.ReLU(), 0),
    ],
    ids=["plain", "groups", "group norm", "no library"],
)
def test_on_a_cpu_convolutions_of_a_step_have_the_layout_of_regions(monkeypatch, has_library, groups, between, times):
    monkeypatch.setenv("GRAPHEX_REGIONS", "on")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: has_library)
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), between, nn.Conv2d(8, 4, 3, groups=groups)), torch.randn(2, 3, 9, 9)
    compiled, reference = compile_it(model, **NODE_BY_NODE), deepcopy(model)
    found, strides = trained(model, compiled, x)
    wanted, as_eager = trained(reference, reference, x)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert strides == as_eager
    assert laid_out(compiled) == times


@pytest.mark.parametrize(
    ("groups", "eager", "by_channels", "times"),
    [(1, 1.0, 1.05, 1), (1, 1.0, 1.5, 0), (2, 1.0, 0.9, 1), (2, 1.0, 1.05, 0)],
    ids=["about as fast", "slower", "groups, faster", "groups, about as fast"],
)
def test_on_a_cpu_convolutions_of_a_step_are_timed_in_both_layouts(monkeypatch, groups, eager, by_channels, times):
    """In channels last a small ResNet took a sixth longer than in eager, depthwise convolutions a fifth less."""
    monkeypatch.setenv("GRAPHEX_REGIONS", "on")
    monkeypatch.setattr("graphex.frontend.partition.seconds_of_convolutions", lambda graph: (eager, by_channels))
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3, groups=groups)), torch.randn(2, 3, 9, 9)
    compiled, reference = compile_it(model, **NODE_BY_NODE), deepcopy(model)
    found, strides = trained(model, compiled, x)
    wanted, as_eager = trained(reference, reference, x)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert strides == as_eager
    assert laid_out(compiled) == times


def test_convolutions_of_symbolic_sizes_keep_their_layout(channels_last):
    model = nn.Sequential(nn.Conv2d(3, 72, 3))
    compiled = compile_it(model, dynamic=True, **NODE_BY_NODE)
    reference = deepcopy(model)
    x = torch.randn(2, 3, 9, 11)
    torch.testing.assert_close(trained(model, compiled, x)[0], trained(reference, reference, x)[0])
    assert laid_out(compiled) == 0


def test_dropout_between_convolutions_draws_the_masks_of_eager(channels_last):
    """Numbers are drawn in the order of memory."""
    model = nn.Sequential(nn.Conv2d(3, 72, 3), nn.Dropout(0.5), nn.Conv2d(72, 72, 3))
    reference, x = deepcopy(model), torch.randn(2, 3, 9, 9)
    compiled, found = compile_it(model, **NODE_BY_NODE), []
    for each, run in ((model, compiled), (reference, reference)):
        torch.manual_seed(3)
        found.append(trained(each, run, x)[0])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert laid_out(compiled) == 1


def test_a_layout_that_cannot_be_followed_leaves_the_graph_as_it_was(channels_last, monkeypatch):
    def fails(*args):
        raise RuntimeError("no fake for this")

    monkeypatch.setattr("graphex.frontend.partition.evaluate", fails)
    model = nn.Sequential(nn.Conv2d(3, 72, 3), nn.ReLU())
    reference, x = deepcopy(model), torch.randn(2, 3, 9, 9)
    compiled = compile_it(model, **NODE_BY_NODE)
    with pytest.warns(graphex.GraphexWarning, match="keep their layout"):
        found, _ = trained(model, compiled, x)
    torch.testing.assert_close(found, trained(reference, reference, x)[0])
    assert laid_out(compiled) == 0


@pytest.mark.parametrize("trains", [True, False])
def test_running_statistics_are_saved_for_a_batch_norm_that_reads_them(trains):
    given = []

    def look(gm, example_inputs, config):
        target = torch.ops.aten.native_batch_norm_backward.default
        given.extend(node.args[3:5] for node in gm.graph.find_nodes(op="call_function", target=target))

    norm = nn.BatchNorm1d(6).train(trains)
    norm.running_mean.normal_()
    reference, x = deepcopy(norm), torch.randn(8, 6)
    compiled = compile_it(norm, post_grad_custom_post_pass=look)
    torch.testing.assert_close(trained(norm, compiled, x), trained(reference, reference, x))
    assert [all(each is None for each in statistics) for statistics in given] == [trains]
