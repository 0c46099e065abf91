"""Every kind of program a user may compile: the result is eager's, and nothing falls back silently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import graphex


def assert_same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def copies(values: Any) -> Any:
    return pytree.tree_map(
        lambda v: v.detach().clone().requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v, values
    )


def check(
    f: Callable[..., Any], *args: Any, calls: int = 2, allowed: tuple[str, ...] = (), **compile_options: Any
) -> graphex.Journal:
    """Compile, call, and compare results and final inputs with eager. `allowed` names fallbacks that are right."""
    compiled = torch.compile(f, backend="graphex", **compile_options)
    for _ in range(calls):
        mine, theirs = copies(args), copies(args)
        torch.manual_seed(1)
        found = compiled(*mine)
        torch.manual_seed(1)
        wanted = f(*theirs)
        assert_same(found, wanted)
        assert_same(mine, theirs)
    journal = graphex.journal(compiled)
    assert journal.graphs, "nothing was compiled"
    assert not [record for record in journal.fallbacks if record.what not in allowed]
    assert not [record for record in journal.passes if record.status in ("rolled back", "failed")]
    return journal


# -- shapes --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_dynamic_shapes_compile_once(device):
    def f(x: Tensor) -> Tensor:
        return torch.cat([x, x * 2]).view(-1, 2, x.shape[1])[:, 0].sum(0)

    compiled = torch.compile(f, backend="graphex", dynamic=True)
    for rows in (2, 4, 6, 10):
        x = torch.randn(rows, 3, device=device)
        assert_same(compiled(x), f(x))
    assert len(graphex.journal(compiled).graphs) == 1


@torch.no_grad()
def test_mark_dynamic_is_respected_no_pass_adds_a_guard(device):
    def f(x: Tensor) -> Tensor:
        y = x[: x.shape[0]].repeat(1, 1).clone()
        return (y.expand(x.shape[0], 4) + y.view(x.shape[0], 4)).contiguous().pow(1)

    compiled = torch.compile(f, backend="graphex")
    x = torch.randn(5, 4, device=device)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=64)  # an error if a guard specialises the size
    assert_same(compiled(x), f(x))
    for rows in (3, 7, 32):
        x = torch.randn(rows, 4, device=device)
        assert_same(compiled(x), f(x))
    assert len(graphex.journal(compiled).graphs) == 1


@torch.no_grad()
def test_sizes_that_depend_on_data():
    def f(x: Tensor) -> Tensor:
        return x[x > 0] * 2

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check(f, torch.randn(10), fullgraph=True)


@torch.no_grad()
def test_sizes_read_from_a_tensor():
    def f(x: Tensor, n: Tensor) -> Tensor:
        length = n.item()
        torch._check(length >= 0)
        torch._check(length < x.shape[0])
        return x[:length] + torch.zeros(length)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        check(f, torch.randn(10), torch.tensor(4), fullgraph=True)


def test_an_empty_tensor(device):
    check(lambda x: (x * 2).sum(0), torch.empty(0, 3, device=device))


# -- control flow --------------------------------------------------------------------------------------------------


def test_graph_breaks(device):
    def f(x: Tensor) -> Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        if y.sum() > 0:
            return y + 1
        return y - 1

    journal = check(f, torch.ones(3, device=device))
    assert len({graph.compile_id for graph in journal.graphs}) >= 2


@torch.no_grad()
def test_cond_while_loop_and_map(device):
    def f(x: Tensor) -> tuple[Tensor, ...]:
        a = torch.cond(x.sum() > 0, lambda v: v.sin() + 1, lambda v: v.cos() - 1, (x,))
        b = torch._higher_order_ops.while_loop(
            lambda i, v: i < 3, lambda i, v: (i + 1, v * 2), (torch.tensor(0, device=x.device), x)
        )
        c = torch._higher_order_ops.map(lambda row: row.relu(), x)
        return a, *b, c

    check(f, torch.randn(3, 4, device=device), allowed=("the graph runs without capture",))


def test_checkpointing_recomputes(device):
    def f(x: Tensor, w: Tensor) -> Tensor:
        y = checkpoint(lambda a: torch.tanh(a @ w).relu(), x, use_reentrant=False)
        return y.sum()

    x, w = (torch.randn(4, 4, device=device, requires_grad=True) for _ in range(2))
    compiled = torch.compile(f, backend="graphex")
    assert_same(torch.autograd.grad(compiled(x, w), (x, w)), torch.autograd.grad(f(x, w), (x, w)))


def test_function_transforms(device):
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.func.vmap(lambda row: row.softmax(0))(x), torch.func.grad(lambda v: (v**3).sum())(x)

    check(f, torch.randn(3, 4, device=device))


# -- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "f",
    [
        lambda x, y: (x.add_(1), x * y)[1],
        lambda x, y: (x[0].mul_(2), y.t().copy_(x.t()), x + y)[2],
        lambda x, y: (x.copy_(y), y.zero_(), x.sum())[2],
        lambda x, y: (x, x.view(-1), y[1:]),
        lambda x, y: (x.clone(), x.detach(), x),
        lambda x, y: (lambda z: (z, z.t(), z[0]))(x * y),
        lambda x, y: x.index_put_((torch.tensor([0, 1]),), y[:2]).sum(),
        lambda x, y: {"a": [x + 1, (y, None)], "b": 3},
    ],
    ids=["add_", "views", "copies", "input views", "clones", "output views", "index_put_", "nested"],
)
@torch.no_grad()
def test_mutation_and_aliasing(f):
    check(f, torch.randn(3, 3), torch.randn(3, 3))


@torch.no_grad()
def test_inputs_that_share_memory():
    def f(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return x + y

    compiled = torch.compile(f, backend="graphex")
    for _ in range(2):
        base, other = torch.arange(6.0), torch.arange(6.0)
        assert_same(compiled(base[:4], base[2:]), f(other[:4], other[2:]))
        assert_same(base, other)


@torch.no_grad()
def test_the_same_tensor_given_twice():
    def f(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x * y

    compiled = torch.compile(f, backend="graphex")
    a, b = torch.ones(3), torch.ones(3)
    assert_same(compiled(a, a), f(b, b))
    assert_same(a, b)


def test_a_write_is_noticed_by_autograd():
    """A tensor saved for backward and then written to by a compiled graph: eager raises, and so do we."""
    compiled = torch.compile(lambda t: t.add_(1), backend="graphex")
    for _ in range(2):
        w = torch.ones(3, requires_grad=True)
        x = torch.ones(3)
        y = (w * x).sum()
        compiled(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


# -- training ------------------------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(6, 8), nn.Linear(8, 3), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.dropout(F.gelu(self.norm(self.a(x))), 0.2, self.training))


def test_training_steps_equal_eager(device):
    def train(compile_it: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Small().to(device)
        step = torch.compile(model, backend="graphex") if compile_it else model
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            loss = F.cross_entropy(step(torch.randn(5, 6, device=device)), torch.tensor([0, 1, 2, 0, 1], device=device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if compile_it:
            phases = {graph.phase for graph in graphex.journal(step).graphs}
            assert phases == {"forward", "backward"}
        return [value.detach().clone() for value in model.state_dict().values()]

    for mine, theirs in zip(train(True), train(False), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_compiled_optimizer(device):
    """Compared with Dynamo alone, for which torch 2.11 takes another implementation of the same step."""

    def run(backend: str) -> Tensor:
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(4, device=device))
        step = torch.compile(torch.optim.SGD([parameter], lr=0.1, momentum=0.9).step, backend=backend)
        for _ in range(3):
            parameter.grad = torch.ones_like(parameter)
            step()
        return parameter.detach()

    assert_same(run("graphex"), run("eager"))


def test_double_use_of_a_parameter_and_unused_outputs(device):
    w = torch.randn(4, 4, device=device, requires_grad=True)

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return (x @ w).relu() @ w.t(), x.detach() * 2

    compiled = torch.compile(f, backend="graphex")
    x = torch.randn(2, 4, device=device)
    grads = [torch.autograd.grad(g(x)[0].sum(), w)[0] for g in (compiled, f)]
    assert_same(grads[0], grads[1])


# -- modes ---------------------------------------------------------------------------------------------------------


def test_inference_mode_gives_inference_tensors():
    compiled = torch.compile(lambda x: x * 2 + 1, backend="graphex")
    with torch.inference_mode():
        for _ in range(2):
            x = torch.ones(3)
            out = compiled(x)
            assert out.is_inference()
            assert_same(out, x * 2 + 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def f(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return model(x).float().softmax(-1)

    with torch.no_grad():
        check(f, torch.randn(2, 8))


def test_a_default_device_and_a_function_mode_are_left_alone(device):
    class Counting(torch.overrides.TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            Counting.calls += 1
            return func(*args, **(kwargs or {}))

    f = lambda x: torch.zeros(3, device=x.device) + x  # noqa: E731
    with torch.device(device):
        check(f, torch.ones(3, device=device))
    compiled = torch.compile(f, backend="graphex")
    with Counting():
        assert_same(compiled(torch.ones(3)), f(torch.ones(3)))


def test_random_numbers_follow_the_seed(device):
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return torch.rand_like(x), F.dropout(x, 0.5), torch.randn(3, device=x.device), torch.bernoulli(x * 0 + 0.5)

    with torch.no_grad():
        check(f, torch.ones(64, device=device))


def test_compiled_autograd_hooks_and_grad_mode_changes(device):
    def f(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x * 2
        with torch.enable_grad():
            return (x * y).sum()

    x = torch.randn(3, device=device, requires_grad=True)
    compiled = torch.compile(f, backend="graphex")
    assert_same(torch.autograd.grad(compiled(x), x), torch.autograd.grad(f(x), x))


def test_compiled_autograd_passes_lists_of_tensors(device):
    backward = torch.compile(backend="graphex", options={"verify": True})
    weight = torch.randn(3, 3, device=device, requires_grad=True)
    for _ in range(3):
        x, weight.grad = torch.randn(3, 3, device=device), None
        with torch._dynamo.compiled_autograd._enable(backward):
            F.scaled_dot_product_attention(x[None], (x @ weight)[None], x[None]).relu().sum().backward()
        wanted = torch.autograd.grad(
            F.scaled_dot_product_attention(x[None], (x @ weight)[None], x[None]).relu().sum(), weight
        )
        assert_same((weight.grad,), wanted)


# -- custom ops and subclasses ---------------------------------------------------------------------------------------


@torch.library.custom_op("graphex_tests::scaled", mutates_args=())
def scaled(x: Tensor, factor: float) -> Tensor:
    return x * factor


@scaled.register_fake
def _(x: Tensor, factor: float) -> Tensor:
    return torch.empty_like(x)


scaled.register_autograd(
    lambda ctx, grad: (grad * ctx.factor, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
)


@torch.library.custom_op("graphex_tests::bump", mutates_args=("cache",))
def bump(cache: Tensor, by: Tensor) -> None:
    cache.add_(by)


def test_custom_ops_functional_mutating_and_with_gradients(device):
    def f(x: Tensor, cache: Tensor) -> Tensor:
        bump(cache, x.detach())
        return scaled(x, 3.0) + cache

    check(f, torch.randn(3, device=device, requires_grad=True), torch.zeros(3, device=device))
    x = torch.randn(3, device=device, requires_grad=True)
    compiled = torch.compile(lambda v: scaled(v, 3.0).sum(), backend="graphex")
    assert_same(torch.autograd.grad(compiled(x), x)[0], torch.full((3,), 3.0, device=device))


@torch.library.custom_op("graphex_tests::total", mutates_args=("seen",))
def total(x: Tensor, seen: Tensor | None) -> Tensor:
    if seen is not None:
        seen.add_(x)
    return x * 2


@total.register_fake
def _(x: Tensor, seen: Tensor | None) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_mutating_op_may_be_given_nothing_to_write(dynamic, device):
    def f(x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return total(x, None), total(x, seen), total(x + 1, None).relu()

    check(f, torch.randn(4, 3, device=device), torch.zeros(4, 3, device=device), dynamic=dynamic)


def test_tensor_subclasses_run_with_a_record():
    from torch.testing._internal.two_tensor import TwoTensor

    def f(x: Tensor) -> Tensor:
        return x * 2 + 1

    compiled = torch.compile(f, backend="graphex")
    with torch.no_grad():
        out = compiled(TwoTensor(torch.ones(3), torch.zeros(3)))
    assert type(out) is TwoTensor
    assert_same(out.a, torch.full((3,), 3.0))
    assert_same(out.b, torch.ones(3))
    assert [record.what for record in graphex.journal(compiled).fallbacks] == ["tensor subclass"]


def test_dtensor_runs_with_a_record(tmp_path):
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        x = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)])
        w = distribute_tensor(torch.randn(4, 4), mesh, [Replicate()])
        compiled = torch.compile(lambda a, b: (a @ b).relu(), backend="graphex")
        with torch.no_grad():
            out = compiled(x, w)
        assert isinstance(out, DTensor)
        assert_same(out.to_local(), (x.to_local() @ w.to_local()).relu())
        assert [record.what for record in graphex.journal(compiled).fallbacks] == ["tensor subclass"]
    finally:
        dist.destroy_process_group()


def test_complex_sparse_and_quantised_values():
    def f(x: Tensor) -> tuple[Tensor, ...]:
        z = torch.complex(x, x * 2)
        return z.conj() * z, torch.view_as_real(z), z.abs()

    with torch.no_grad():
        check(f, torch.randn(3, 4))


def test_what_the_user_got_wrong_is_raised_as_eager_does():
    compiled = torch.compile(lambda x, y: x @ y, backend="graphex")
    with pytest.raises(Exception, match=r"size|shape|dim"):
        compiled(torch.randn(2, 3), torch.randn(2, 3))
