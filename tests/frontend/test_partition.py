"""What a forward saves for its backward, and the record of it."""

from __future__ import annotations

import torch
from torch import nn
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
