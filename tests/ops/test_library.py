"""Every op of the library is a well-formed torch op: schema, fake implementation, derivative, symbolic sizes."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_map_only

from graphex import ops
from graphex.analysis.effects import libraries_of
from graphex.torch_private.dynamo import DispatchMode
from tests.harness.kernels.samples import SAMPLES, Maker, overload

WITH_GRADIENT = [name for name in SAMPLES if ops.SPECS[name].gradient is not None]


def test_every_op_has_samples_and_a_formula():
    assert set(SAMPLES) == set(ops.SPECS)
    assert all(spec.doc for spec in ops.SPECS.values())


@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name):
    maker = Maker(torch.float32, grad=name in WITH_GRADIENT)
    sample = next(SAMPLES[name](maker))
    torch.library.opcheck(overload(name), sample.args, sample.options)


aten = torch.ops.aten
ATTENTIONS = {aten._scaled_dot_product_flash_attention_for_cpu.default, aten._scaled_dot_product_attention_math.default}
OWN_KERNELS = {  # those of ATen have no library behind them
    *(aten._foreach_copy_.default, aten._unsafe_view.default, aten.fill_.Scalar, aten.floor_divide.default),
    *(aten.isin.Tensor_Tensor, aten.logsumexp.default, aten.new_empty.default, aten.new_zeros.default),
    *(aten.promote_types.default, aten.randint.low, aten.scatter_.src, aten.scatter_.value, aten.searchsorted.Tensor),
    *(aten.squeeze_.dim, aten.stack.default, aten.triu.default, aten.zero_.default, aten.zeros_like.default),
}


class Reached(DispatchMode):
    """The libraries of the ops that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.libraries: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in ATTENTIONS:
            self.libraries.add("attention")
        elif func not in OWN_KERNELS:
            graph = Graph()
            graph.call_function(func)
            self.libraries |= libraries_of(graph)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", SAMPLES)
def test_the_libraries_of_a_reference_are_declared(name):
    """Their switches choose kernels, so they are a part of the capture key."""
    samples = [sample for dtype in (torch.float16, torch.float32) for sample in SAMPLES[name](Maker(dtype))]
    with Reached() as reached:
        for sample in samples:
            ops.SPECS[name].reference(*sample.args, **sample.options)
    assert reached.libraries <= ops.SPECS[name].libraries


@pytest.mark.parametrize("name", SAMPLES)
def test_results_are_described_before_they_are_computed(name):
    """Shape, type and layout, with the sizes of the leading dimension unknown."""
    for sample in SAMPLES[name](Maker(torch.float16)):
        args = [a.clone() if isinstance(a, torch.Tensor) and name.endswith("_") else a for a in sample.args]
        real = overload(name)(*args, **sample.options)
        with FakeTensorMode(shape_env=ShapeEnv()) as mode:
            fakes, options = tree_map_only(torch.Tensor, mode.from_tensor, (sample.args, sample.options))
            fake = overload(name)(*fakes, **options)
        as_tuple = lambda r: () if r is None else r if isinstance(r, (tuple, list)) else (r,)  # noqa: E731
        for mine, its in zip(as_tuple(real), as_tuple(fake), strict=True):
            assert (mine.dtype, list(mine.shape)) == (its.dtype, [int(s) for s in its.shape])
            if mine.numel():
                wanted = [s for s, n in zip(mine.stride(), mine.shape, strict=True) if n > 1]
                assert wanted == [int(s) for s, n in zip(its.stride(), its.shape, strict=True) if n > 1]


def test_an_unknown_number_of_rows_stays_unknown():
    from torch.fx.experimental.proxy_tensor import make_fx

    def model(x, weight):
        return torch.ops.graphex.rms_norm(x, weight, 1e-6)

    gm = make_fx(model, tracing_mode="symbolic")(torch.randn(6, 8), torch.randn(8))
    node = next(node for node in gm.graph.nodes if node.target is torch.ops.graphex.rms_norm.default)
    assert isinstance(node.meta["val"][0].shape[0], torch.SymInt)


@pytest.mark.parametrize("name", WITH_GRADIENT)
def test_derivative(name):
    """Against numerical differentiation, in float64."""
    for sample in SAMPLES[name](Maker(torch.float64, grad=True)):
        tensors = [a for a in sample.args if isinstance(a, torch.Tensor)]
        if any(t.numel() == 0 or (t.is_floating_point() and t.dtype != torch.float64) for t in tensors):
            continue

        def call(*args, options=sample.options):
            result = overload(name)(*args, **options)
            results = result if isinstance(result, tuple) else (result,)
            return tuple(r for r in results if r.dtype == torch.float64)

        assert torch.autograd.gradcheck(call, sample.args, check_undefined_grad=False, fast_mode=True)
