"""compile_fx: a user's own AOTAutograd call, traced graphs, and exported programs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_module_simplified
from torch.fx.experimental.proxy_tensor import make_fx

import graphex


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, scale: dict[str, Tensor]) -> dict[str, Tensor]:
        self.seen.add_(1)
        return {"y": self.linear(x).relu() * scale["s"], "n": self.seen + 0}


def test_as_the_compiler_of_a_users_own_aot_backend():
    journals = []

    def backend(gm, inputs):
        def compiler(graph, examples):
            compiled = graphex.compile_fx(graph, examples, options={"verify": True})
            journals.append(compiled.journal)
            return compiled

        return aot_module_simplified(gm, inputs, fw_compiler=compiler, keep_inference_input_mutations=True)

    def f(x: Tensor) -> Tensor:
        return (x.clone() + 1)[:, 0:].sum(0)

    compiled = torch.compile(f, backend=backend)
    x = torch.randn(3, 4)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), f(x), rtol=0, atol=0)
    assert [verdict.status for verdict in journals[0].verifications] == ["equal"]
    assert journals[0].rewrites


def test_a_traced_graph_without_example_inputs_uses_its_own_values():
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x @ y, (x + y).t()

    args = (torch.randn(3, 3), torch.randn(3, 3))
    gm = make_fx(f, tracing_mode="fake")(*args)
    compiled = graphex.compile_fx(gm)
    for found, wanted in zip(compiled(*args), f(*args), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_a_graph_without_values_takes_them_from_the_examples():
    gm = torch.fx.symbolic_trace(lambda x: torch.ops.aten.mul.Tensor(torch.ops.aten.add.Tensor(x, x), 3))
    compiled = graphex.compile_fx(gm, [torch.ones(2)])
    assert compiled(torch.ones(2)).tolist() == [6.0, 6.0]


def test_the_callers_graph_is_not_touched():
    gm = make_fx(lambda x: x.clone() + 1, tracing_mode="fake")(torch.ones(2))
    before = str(gm.graph)
    graphex.compile_fx(gm)
    assert str(gm.graph) == before


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_exported_program(dynamic):
    model, x, scale = Model(), torch.randn(3, 4), {"s": torch.tensor(2.0)}
    shapes = {"x": {0: torch.export.Dim("rows", min=2, max=16)}, "scale": {"s": {}}} if dynamic else None
    program = torch.export.export(model, (x, scale), dynamic_shapes=shapes).run_decompositions({})
    module = program.module()
    compiled = graphex.compile_fx(module, options={"verify": True})
    for rows in (3, 7) if dynamic else (3,):
        x = torch.randn(rows, 4)
        with torch.no_grad():
            found = compiled(x, scale)
            wanted = model.linear(x).relu() * 2
        assert set(found) == {"y", "n"}
        torch.testing.assert_close(found["y"], wanted, rtol=0, atol=0)
    assert found["n"].item() == (2 if dynamic else 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: graphex.compile_fx(nn.Linear(2, 2), []), "GraphModule"),
        (lambda: graphex.compile_fx(torch.export.export(nn.ReLU(), (torch.ones(2),))), r"write program\.module\(\)"),
        (lambda: graphex.compile_fx(torch.fx.symbolic_trace(lambda x: x + 1)), "example_inputs"),
        (lambda: graphex.compile_fx(torch.fx.symbolic_trace(lambda x: x + 1), [1, 2]), "1 inputs, 2 example"),
        (lambda: graphex.compile_fx(torch.fx.symbolic_trace(lambda x: x + 1), 3), "example_inputs must be a list"),
    ],
)
def test_bad_input_is_one_sentence(call, message):
    with pytest.raises(graphex.InputError, match=message):
        call()


def first_rows(x):
    return x[:2].to(torch.float32) * 2


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ((torch.ones(3, 4),), r"float32\[3, 4\]"),
        ((torch.ones(2, 4, dtype=torch.float64),), r"float64\[2, 4\]"),
        ((torch.ones(2),), r"float32\[2\]"),
        ((None,), "NoneType"),
        ((), "got 0"),
        ((torch.ones(2, 4),) * 2, "got 2"),
    ],
)
def test_a_call_that_the_graph_was_not_traced_for_is_refused(given, found):
    """What did nothing in the trace, such as a slice of all rows, is gone."""
    compiled = graphex.compile_fx(make_fx(first_rows)(torch.ones(2, 4)), (torch.ones(2, 4),))
    torch.testing.assert_close(compiled(torch.ones(2, 4)), torch.full((2, 4), 2.0))
    with pytest.raises(graphex.InputError, match=found):
        compiled(*given)


def test_another_number_than_the_graph_was_traced_with_is_refused():
    """It is in the graph as a constant, or sizes follow from it."""
    x = torch.randn(1, 4)
    aten = torch.ops.aten
    baked_in = make_fx(lambda x, n: x * n)(x, 2)
    read = torch.fx.symbolic_trace(lambda x, n: aten.expand.default(x, [n, 4]) + 0)
    for graph in (baked_in, read):
        compiled = graphex.compile_fx(graph, (x, 2))
        torch.testing.assert_close(compiled(x, 2), graph(x, 2))
        for other in (3, 2.0, None):
            with pytest.raises(graphex.InputError, match=r"traced with 2 for 'n.*', got"):
                compiled(x, other)


def test_examples_that_the_graph_was_not_traced_with_are_refused():
    graph = make_fx(first_rows)(torch.ones(3, 4))
    with pytest.raises(graphex.InputError, match=r"traced with float32\[3, 4\] for 'x_1', got float32\[2, 4\]"):
        graphex.compile_fx(graph, (torch.ones(2, 4),))


def test_sizes_that_vary_fit_every_call():
    compiled = graphex.compile_fx(make_fx(first_rows, tracing_mode="symbolic")(torch.ones(3, 4)))
    for rows in (2, 5):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(compiled(x), first_rows(x))
    with pytest.raises(graphex.InputError, match=r"float32\[\*, \*\] for 'x_1', got float32\[4\]"):
        compiled(torch.ones(4))


@pytest.mark.parametrize(
    ("function", "traced", "fits", "given", "found"),
    [
        (lambda x, y: y[: x.shape[0]] + 0, [3, 3], [5, 5], [2, 5], r"size 0 of 'y_1' = s\d+, here 2, got 5"),
        (lambda x: x * 2 if x.shape[0] > 2 else x * 3, [4], [3], [2], r"s\d+ >= 3, got s\d+ = 2 \(size 0 of 'x_1'\)"),
        (lambda x: x * 2 if x.shape[0] == 4 else x * 3, [4], [4], [5], r"size 0 of 'x_1' = 4, here 4, got 5"),
        (lambda x, y: torch.cat([x, y]) if x.shape[0] > y.shape[0] else x, [4, 3], [9, 2], [3, 5], r"s\d+ = 5"),
        (lambda x: x.squeeze(0) + 1, [3], [2], [1], r"s\d+ >= 2, got s\d+ = 1"),
    ],
)
def test_sizes_that_the_trace_does_not_hold_for_are_refused(function, traced, fits, given, found):
    """Two sizes that were one symbol there, a branch that was taken: the graph says nothing of that."""
    compiled = graphex.compile_fx(make_fx(function, tracing_mode="symbolic")(*map(torch.randn, traced)))
    args = [torch.randn(size) for size in fits]
    torch.testing.assert_close(compiled(*args), function(*args))
    with pytest.raises(graphex.InputError, match=found):
        compiled(*map(torch.randn, given))


def test_a_number_that_was_a_size_in_the_trace_has_to_be_one_in_the_call():
    compiled = graphex.compile_fx(make_fx(lambda x, n: x[:n] + 0, tracing_mode="symbolic")(torch.ones(3), 3))
    torch.testing.assert_close(compiled(torch.ones(4), 4), torch.ones(4))
    with pytest.raises(graphex.InputError, match=r"n_1 = s\d+, here 5, got 2"):
        compiled(torch.ones(5), 2)


def test_nested_arguments_of_a_traced_graph():
    def f(pair: dict[str, list[Tensor]], scale: Tensor) -> Tensor:
        return (pair["a"][0] - pair["b"][0]) * scale

    a, b, scale = torch.randn(3, 2)
    pair = {"a": [a], "b": [b]}
    compiled = graphex.compile_fx(make_fx(f)(pair, scale), (pair, scale))
    torch.testing.assert_close(compiled(pair, scale), (a - b) * scale)
    torch.testing.assert_close(compiled({"b": [b], "a": [a]}, scale), (a - b) * scale)
    with pytest.raises(graphex.InputError, match="positional"):
        compiled(pair, scale=scale)
    with pytest.raises(graphex.InputError, match="the graph was traced for"):
        compiled({"a": [a]}, scale)


def test_a_tuple_and_a_dictionary_are_two_arguments_of_a_traced_graph():
    """Together they look like the `((*args,), {**kwargs})` of an exported one."""

    def model(pair, more):
        return pair[0] + pair[1] * more["scale"]

    given = (torch.randn(3), torch.randn(3)), {"scale": torch.randn(3)}
    compiled = graphex.compile_fx(make_fx(model)(*given), given)
    assert torch.equal(compiled(*given), model(*given))
    with pytest.raises(graphex.InputError, match="the graph was traced for"):
        compiled(*given[0])


def test_keywords_and_keys_come_in_any_order():
    class Difference(nn.Module):
        def forward(self, pair: dict[str, Tensor], *, left: Tensor, right: Tensor) -> Tensor:
            return (pair["a"] - pair["b"]) * (left - 2 * right)

    a, b, left, right = torch.randn(4, 3)
    program = torch.export.export(Difference(), ({"a": a, "b": b},), {"left": left, "right": right})
    compiled = graphex.compile_fx(program.module())
    found = compiled({"b": b, "a": a}, right=right, left=left)
    torch.testing.assert_close(found, Difference()({"a": a, "b": b}, left=left, right=right))


def test_a_graph_that_is_no_aten_graph_is_refused():
    modules = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(graphex.InputError, match="compile_fx takes ATen graphs"):
        graphex.compile_fx(modules, (torch.ones(2, 4),))


def flattened(x):
    return x.view(-1)[1:] * 2


@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_another_layout_than_the_graph_was_traced_with_is_refused(mode):
    x = torch.randn(3, 4)
    compiled = graphex.compile_fx(make_fx(flattened, tracing_mode=mode)(x), (x,) if mode == "real" else None)
    torch.testing.assert_close(compiled(x), flattened(x))
    for other in (torch.randn(4, 3).t(), torch.randn(3, 8)[:, :4]):
        with pytest.raises(graphex.InputError, match=r"stride.*'x_1'.*contiguous\(\)"):
            compiled(other)
        torch.testing.assert_close(compiled(other.contiguous()), flattened(other.contiguous()))


def test_memory_that_is_read_by_its_strides_is_never_read_in_another_order():
    def diagonal(x):
        return torch.as_strided(x, (3,), (x.shape[1] + 1,)) * 2

    x = torch.randn(3, 3)
    compiled = graphex.compile_fx(make_fx(diagonal)(x), (x,))
    torch.testing.assert_close(compiled(x), diagonal(x))
    with pytest.raises(graphex.InputError, match=r"strides \[3, 1\] for 'x_1', got \[6, 1\]"):
        compiled(torch.randn(3, 6)[:, :3])


def test_strides_that_follow_from_sizes_follow_from_those_of_the_call():
    def f(x):
        return x.flatten(1) * 2

    compiled = graphex.compile_fx(make_fx(f, tracing_mode="symbolic")(torch.randn(3, 4, 5)))
    for shape in ((3, 4, 5), (7, 2, 3), (2, 6, 6)):
        x = torch.randn(shape)
        torch.testing.assert_close(compiled(x), f(x))
    with pytest.raises(graphex.InputError, match=r"stride 0 of 'x_1' = .*, here 20, got 5"):
        compiled(torch.randn(4, 3, 5).transpose(0, 1))


def test_an_exported_program_of_varying_sizes_is_laid_out_as_it_was_traced():
    class Flat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(x.shape[0], -1) * 2

    shapes = {"x": {dim: torch.export.Dim(f"size_{dim}", min=2) for dim in range(3)}}
    program = torch.export.export(Flat(), (torch.randn(3, 4, 5),), dynamic_shapes=shapes).run_decompositions({})
    compiled = graphex.compile_fx(program.module())
    x = torch.randn(6, 7, 5)
    torch.testing.assert_close(compiled(x), Flat()(x))
    with pytest.raises(graphex.InputError, match="stride 0 of 'x'"):
        compiled(torch.randn(7, 6, 5).transpose(0, 1))


@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_strides_of_dimensions_with_one_element_or_none_do_not_matter(mode):
    def f(x, y):
        return x * 2, y + 1

    x, y = torch.randn(1, 4), torch.empty(0, 4)
    compiled = graphex.compile_fx(make_fx(f, tracing_mode=mode)(x, y), (x, y) if mode == "real" else None)
    wide = torch.as_strided(x, (1, 4), (99, 1))
    found = compiled(wide, torch.as_strided(y, (0, 4), (1, 7)))
    torch.testing.assert_close(found[0], x * 2)


def test_a_layout_of_ones_own_is_kept():
    x = torch.randn(4, 3).t()
    compiled = graphex.compile_fx(make_fx(lambda x: x.t().view(-1) + 1)(x), (x,))
    torch.testing.assert_close(compiled(x), x.t().reshape(-1) + 1)
    with pytest.raises(graphex.InputError, match=r"strides \[1, 3\] for 'x_1', got \[4, 1\]"):
        compiled(x.contiguous())


def test_a_tensor_on_another_device_is_refused():
    x = torch.randn(3, 4)
    compiled = graphex.compile_fx(make_fx(lambda x, y: x + y)(x, x), (x, x))
    with pytest.raises(graphex.InputError, match=r"a tensor on cpu for 'y_1', got one on meta\. Move it there"):
        compiled(x, x.to("meta"))


def test_a_sparse_tensor_in_the_place_of_a_dense_one_is_refused():
    x = torch.randn(3, 4)
    compiled = graphex.compile_fx(make_fx(lambda x: x * 2)(x), (x,))
    with pytest.raises(graphex.InputError, match=r"the layout torch.strided for 'x_1', got torch.sparse_coo"):
        compiled(x.to_sparse())
