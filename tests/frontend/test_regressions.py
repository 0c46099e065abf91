"""Things that were once wrong. Each test is the smallest program that showed it."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import Tensor, nn

import graphex


def compiled(f, **options):
    return torch.compile(f, backend="graphex", **options)


def test_bfloat16_gradients_are_eagers_bits():
    """`mul_.Scalar` rounds differently from `mul.Scalar`; the backward of log2 multiplies by a scalar."""

    def f(x: Tensor) -> Tensor:
        return torch.log2(x.abs() + 1).sum()

    values = (torch.randn(64, 8) * 5).bfloat16()
    grads = []
    for g in (compiled(f), f):
        x = values.clone().requires_grad_()
        g(x).backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: ((x * 2)[2:6] + 1).as_strided((2,), (1,), 0) * 1.0,
        lambda x: (lambda n: (n.as_strided((2,), (1,), 0).add_(100), n * 1)[1])((x * 2)[2:6] + 1),
    ],
    ids=["read", "written"],
)
@torch.no_grad()
def test_as_strided_counts_from_the_start_of_the_storage(f):
    x = torch.arange(8.0)
    torch.testing.assert_close(compiled(f)(x), f(x), rtol=0, atol=0)


@torch.no_grad()
def test_a_result_is_not_a_corner_of_a_larger_buffer():
    out = compiled(lambda x: (x * 2)[2:6] + 1)(torch.arange(1000.0))
    assert out.storage_offset() == 0
    assert out.untyped_storage().nbytes() == 16


@pytest.mark.parametrize("regions", [False, True])
@pytest.mark.parametrize(
    "part", [lambda y: y[2:6].clone(), lambda y: y.chunk(2)[1].clone(), lambda y: y.view(2, 8).unbind()[1].clone()]
)
def test_a_copy_of_a_part_does_not_keep_the_whole(part, regions, monkeypatch):
    monkeypatch.setenv("GRAPHEX_REGIONS", "on")
    run = torch.compile(lambda x: part((x.sin() * 2).exp()), backend="graphex", options={"regions": regions})
    out = run(torch.arange(16.0))
    assert bool(graphex.journal(run).regions) == regions
    assert (out.storage_offset(), out.untyped_storage().nbytes()) == (0, 4 * out.numel())


TABLE = torch.arange(4.0)


@torch.library.custom_op("graphex_tests::table", mutates_args=())
def table(n: int) -> Tensor:
    return TABLE


@table.register_fake
def _(n: int) -> Tensor:
    return torch.empty(4)


@torch.no_grad()
def test_memory_that_a_custom_op_keeps_is_not_written_to_or_handed_out():
    f = compiled(lambda x: (table(4) * 2 + x, table(4).clone()))
    for _ in range(3):
        doubled, copy = f(torch.zeros(4))
        assert doubled.tolist() == [0, 2, 4, 6]
        assert copy.data_ptr() != TABLE.data_ptr()
    assert TABLE.tolist() == [0, 1, 2, 3]


def test_the_backward_does_not_recompute_from_a_buffer_that_was_overwritten():
    def f(x: Tensor, b: Tensor) -> Tensor:
        y = x * torch.sin(b) * b.cos()
        b.add_(1)
        return y

    grads = []
    for g in (compiled(f), f):
        x, b = torch.ones(1, requires_grad=True), torch.tensor([0.5])
        g(x, b).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)


@torch.no_grad()
def test_strides_of_dimensions_with_one_element_are_eagers():
    def f(x: Tensor) -> Tensor:
        return x.mul(0.5).add(x)

    x = torch.arange(4.0).reshape(4, 1).t()
    assert compiled(f)(x).stride() == f(x).stride()


@torch.no_grad()
def test_outputs_that_look_the_same_are_still_tensors_of_their_own():
    def f(x: Tensor) -> tuple[Tensor, ...]:
        y = x + 1
        return y, y.view(y.shape), y[:], y.detach()

    outputs = compiled(f)(torch.randn(2, 3))
    outputs[0].t_()
    assert [tuple(out.shape) for out in outputs] == [(3, 2), (2, 3), (2, 3), (2, 3)]


@torch.no_grad()
def test_a_write_is_counted_as_often_as_by_eager():
    def f(x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2

    mine, theirs = torch.zeros(3), torch.zeros(3)
    g = compiled(f)
    for _ in range(3):
        g(mine)
        f(theirs)
        assert mine._version == theirs._version


@pytest.mark.parametrize(
    "f",
    [
        lambda x, i: x[0, 1:].copy_(x[0, :-1].clone()),
        lambda x, i: (x.mul_(2), x[1:].copy_(x[:-1].clone()))[1],
        lambda x, i: (i * 1).index_put((i * 1,), i),
        lambda x, i: i.copy_(i.index_put((i,), i * 2)),
    ],
    ids=["row onto itself", "shift after a write", "its own index", "its own index, in place"],
)
@torch.no_grad()
def test_an_update_that_reads_what_it_writes(f):
    mine, theirs = [(torch.arange(12.0).view(3, 4), torch.tensor([0, 1, 2])) for _ in range(2)]
    torch.testing.assert_close(compiled(f)(*mine), f(*theirs), rtol=0, atol=0)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_an_exported_argument_may_be_called_args():
    class Model(nn.Module):
        def forward(self, args: Tensor) -> Tensor:
            return args + 1

    program = torch.export.export(Model(), (torch.ones(2),)).run_decompositions({})
    assert graphex.compile_fx(program.module())(torch.ones(2)).tolist() == [2.0, 2.0]


def test_explain_puts_rebound_buffers_and_tensor_attributes_back():
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("n", torch.zeros(()))
            self.last = torch.zeros(2)

        def forward(self, x: Tensor) -> Tensor:
            self.n = self.n + 1
            self.last = x * 2
            return x + self.n

    model = Counter()
    report = graphex.explain(model, (torch.ones(2),), calls=1)
    assert report.worst_difference == 0
    assert model.n.item() == 0
    assert model.last.tolist() == [0, 0]


def test_equal_nans_are_no_difference_complex_ones_included():
    assert graphex.explain(lambda x: x * float("nan"), (torch.ones(2, dtype=torch.complex64),)).worst_difference == 0


@torch.no_grad()
def test_memory_that_nobody_wrote_is_not_compared():
    g = compiled(lambda x: torch.empty(1000), options={"verify": True})
    g(torch.ones(1))
    assert [verdict.status for verdict in graphex.journal(g).verifications] == ["refused"]


@torch.no_grad()
def test_a_pass_may_rename_nodes_and_move_arguments_to_keywords():
    def rename(gm: torch.fx.GraphModule) -> None:
        for node in gm.graph.nodes:
            if node.op == "call_function":
                node._rename(f"mine_{node.name}")

    def to_keywords(gm: torch.fx.GraphModule) -> None:
        for node in gm.graph.nodes:
            if node.op == "call_function":
                names = [argument.name for argument in node.target._schema.arguments]
                node.kwargs = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
                node.args = ()

    def f(x: Tensor) -> Tensor:
        x.add_(1)
        return torch.cat([x * 2, x[:]])

    for custom in (rename, to_keywords):
        torch._dynamo.reset()
        mine, theirs = torch.ones(3), torch.ones(3)
        g = compiled(f, options={"post_grad_custom_post_pass": custom})
        torch.testing.assert_close(g(mine), f(theirs), rtol=0, atol=0)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
        assert not [record for record in graphex.journal(g).passes if record.status == "rolled back"]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: graphex.CompilerConfig(_verfy=True), graphex.OptionError, "unknown option '_verfy'"),
        (lambda: graphex.CompilerConfig(_values={}), graphex.OptionError, "unknown option '_values'"),
        (lambda: graphex.get_backend(None, 5), graphex.InputError, "dictionary"),
        (lambda: graphex.get_backend(None, {torch.ops.aten.t: abs}), graphex.InputError, "aten.t.default"),
        (lambda: graphex.explain(torch.relu, (torch.ones(2),), [1]), graphex.InputError, "kwargs"),
        (lambda: graphex.journal(torch.compile(abs, backend="eager")), graphex.InputError, "another backend"),
    ],
    ids=["underscore", "internal name", "decompositions", "packet", "kwargs", "other backend"],
)
def test_bad_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_module_that_compiles_itself_has_a_journal():
    class Doubled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:] * 2

    first, second, plain = Doubled(), Doubled(), Doubled()
    for module in (first, second):
        module.compile(backend="graphex")
        module(torch.ones(3))
        assert len(graphex.journal(module).graphs) == 1
    assert graphex.warm_up(first, [(torch.ones(3),)]) == []
    with pytest.raises(graphex.InputError, match="Doubled was not made by"):
        graphex.journal(plain)


def test_the_inputs_of_a_first_training_call_are_let_go():
    """They were held for the backward, which is compiled later: the logits of a first step stayed for ever."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(3, 4)
    given = weakref.ref(x)
    compiled(model)(x).sum().backward()
    del x
    gc.collect()
    assert given() is None


@pytest.mark.parametrize("trains", [True, False])
def test_a_batch_norm_of_what_is_transposed_can_be_viewed(trains):
    """The CPU's kernel returns another layout than its fake says."""

    class Norm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.out = torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4)

        def forward(self, x):
            return self.out(self.norm(x.transpose(1, 2)).transpose(1, 2))

    model, x = Norm().train(trains), torch.randn(3, 5, 8)
    torch.testing.assert_close(compiled(model)(x), model(x))


def test_the_derivative_of_a_batch_norm_can_be_viewed():
    norm, x, weight = nn.BatchNorm2d(3), torch.randn(2, 60, requires_grad=True), torch.randn(2, 3, 4, 5)

    def loss(x: Tensor) -> Tensor:
        return (norm(x.view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)) * weight).sum()

    (found,), (wanted,) = (torch.autograd.grad(run(x), x) for run in (compiled(loss), loss))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_unpooled_pixels_can_be_reshaped(layout):
    """The CPU's kernel keeps the layout of the values, which its fake does not say."""

    def program(x: Tensor) -> Tensor:
        values, places = nn.functional.max_pool2d(x.sin(), 2, return_indices=True)
        return nn.functional.max_unpool2d(values, places, 2).reshape(-1)

    x = torch.randn(2, 3, 4, 6).to(memory_format=layout).requires_grad_()
    weight = torch.randn(x.numel())
    found, wanted = compiled(program)(x), program(x)
    torch.testing.assert_close(found, wanted)
    (mine,), (theirs,) = (torch.autograd.grad((each * weight).sum(), x) for each in (found, wanted))
    torch.testing.assert_close(mine, theirs)


def test_a_backward_is_compiled_while_no_other_thread_compiles():
    """It is compiled when autograd first runs. What it traces sets flags of the whole process: other threads raised."""
    order: list[str] = []

    def told(gm, example_inputs, config):  # the forward, then the backward
        order.append("begun")
        if len(order) == 2:
            thread.start()
            thread.join(1)
            order.append("ended")

    def other():
        compiled(torch.cos, options={"post_grad_custom_post_pass": lambda *_: order.append("other")})(torch.ones(3))

    thread = threading.Thread(target=other)
    run = compiled(lambda x: x.sin().sum(), options={"post_grad_custom_post_pass": told})
    run(torch.randn(5, requires_grad=True)).backward()
    thread.join()
    assert order == ["begun", "begun", "ended", "other"]


READ = {
    "one index": lambda x, i: x[i.t()],
    "columns": lambda x, i: x[:, i.t()],
    "places": lambda x, i: x[i.t(), i.t() % 2],
    "far apart": lambda x, i: x[i.t(), :, (i.t() + 1)[0]],
    "all of three": lambda x, i: x.permute(2, 0, 1)[i.view(1, 2, 3).permute(2, 0, 1).expand(3, 4, 2)],
    "in turn": lambda x, i: x[i.t(), i[:, 0]],
    "classes": lambda x, i: nn.functional.cross_entropy(x[None, :, :3, :2], i.t()[None], reduction="none"),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("read", READ.values(), ids=READ)
def test_what_is_read_by_transposed_indices_lies_in_memory_as_in_eager(read, dynamic):
    """The kernels return another layout than their fakes say."""
    x, i = torch.randn(3, 5, 3), torch.randint(3, (2, 3))
    programs = (
        read,
        lambda x, i: read(x, i).reshape(-1) + 1,
        lambda x, i: read(x * 2, i + 0).cos().sin(),
        lambda x, i: read((x * 2).sin(), i).neg().exp(),
    )
    for program in programs:
        torch._dynamo.reset()
        found, wanted = compiled(program, dynamic=dynamic)(x, i), program(x, i)
        torch.testing.assert_close(found, wanted)
        assert found.stride() == wanted.stride()


def products_of(f, *inputs, **options):
    """Results equal eager's, strides too where they say something; and the ops of the graph that multiply."""
    seen: list[str] = []

    def look(gm, example_inputs, config):
        seen.extend(
            str(node.target) for node in gm.graph.nodes if "bmm" in str(node.target) or "mul" in str(node.target)
        )

    torch._dynamo.reset()
    found = compiled(f, options={"post_grad_custom_post_pass": look}, **options)(*inputs)
    wanted = f(*inputs)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert found.is_contiguous() == wanted.is_contiguous()
    return seen


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_batch_matmul_that_sums_nothing_is_a_product_of_elements(batch, dtype):
    def angles(frequencies: Tensor, positions: Tensor) -> Tensor:
        return frequencies[None, :, None].expand(positions.shape[0], -1, 1) @ positions[:, None, :].to(dtype)

    positions = torch.arange(2 * batch).view(batch, 2)
    assert products_of(angles, torch.randn(8).to(dtype), positions) == ["aten.mul.Tensor"]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((2, 3, 2), (2, 2, 3)),
        ((2, 3, 0), (2, 0, 3)),
        pytest.param((3, 2, 1), (2, 3, 1), id="in another order of memory"),
    ],
)
@torch.no_grad()
def test_other_batch_matmuls_stay(a, b):
    left, right = torch.randn(a), torch.randn(b)
    if a[0] != b[0]:
        left, right = left.permute(1, 0, 2), right.permute(0, 2, 1).contiguous()
    assert products_of(torch.bmm, left, right) == ["aten.bmm.default"]


@torch.no_grad()
def test_the_size_that_a_batch_matmul_sums_is_no_guard():
    assert products_of(torch.bmm, torch.randn(2, 3, 4), torch.randn(2, 4, 3), dynamic=True) == ["aten.bmm.default"]
