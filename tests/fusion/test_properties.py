"""Random programs around the default rules and a user's rule: never a wrong result, never an invalid graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

import graphex
from tests.harness.compiling import assert_close_or_one_apart

npu = torch.ops.npu
SHAPES = [(2, 3, 32), (6, 32), (2, 1, 3, 16), (1, 4, 16), (2, 3, 24)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@dataclass(frozen=True)
class Program:
    """What may vary around a norm and what follows it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    x2: str
    before: str
    eps: float
    between: str
    after: str
    scale_view: bool
    uses: frozenset[str]
    twice: bool
    dynamic: bool

    def model(self, x1, x2, gamma, smooth, zero):
        outputs = []
        for _ in range(1 + self.twice):
            carried = {"input": x2, "same": x1, "row": x2[:1], "view": x2.view(x2.shape), "sum": x2 + 1}[self.x2]
            if self.before == "norm":
                x = x1 + carried
                y, rstd = npu.npu_rms_norm(x, gamma, self.eps)
            elif carried.shape == x1.shape:
                y, rstd, x = npu.npu_add_rms_norm(x1, carried, gamma, self.eps)
            else:
                y, rstd, x = npu.npu_add_rms_norm(x1, x2, gamma, self.eps)
            outputs += self._follow(y, smooth, zero)
            outputs += [value * 2 for name, value in (("y", y), ("x", x), ("rstd", rstd)) if name in self.uses]
            x1 = x
        return tuple(outputs)

    def _follow(self, y, smooth, zero):
        width = y.shape[-1]
        if self.between == "flatten" and y.dim() > 2:
            y = y.flatten(0, 1)
        elif self.between == "rows":
            y = y.view(-1, width)
        elif self.between == "transpose":
            y = y.transpose(0, 1)
        elif self.between == "twice viewed":
            y = y.view(-1).view(-1, width)
        elif self.between == "scaled":
            y = y * 1.5
        if self.after == "dynamic":
            q, scale = npu.npu_dynamic_quant(y)
        elif self.after == "smooth":
            q, scale = npu.npu_dynamic_quant(y, smooth_scales=smooth)
        elif self.after == "static":
            return [npu.npu_quantize(y, smooth, zero, 1, -1)]
        elif self.after == "axis":
            return [npu.npu_quantize(y, smooth, None, 1, y.dim() - 1)]
        elif self.after == "float32":
            return [y.to(torch.float32)]
        elif self.after == "npu cast":
            return [npu._npu_dtype_cast(y, torch.float32)]
        else:
            return [y.to(torch.float64)]
        return [q, scale.view(-1, 1) if self.scale_view else scale]


programs = st.builds(
    Program,
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from(DTYPES),
    x2=st.sampled_from(["input", "same", "row", "view", "sum"]),
    before=st.sampled_from(["norm", "add norm"]),
    eps=st.sampled_from([1e-6, 1e-5]),
    between=st.sampled_from(["", "flatten", "rows", "transpose", "twice viewed", "scaled"]),
    after=st.sampled_from(["dynamic", "smooth", "static", "axis", "float32", "npu cast", "float64"]),
    scale_view=st.booleans(),
    uses=st.frozensets(st.sampled_from(["y", "x", "rstd"])),
    twice=st.booleans(),
    dynamic=st.booleans(),
)


def search(x1, x2, gamma, eps):
    x = x1 + x2
    return npu.npu_rms_norm(x, gamma, eps)[0], x


def replace(x1, x2, gamma, eps):
    y, _, x = npu.npu_add_rms_norm(x1, x2, gamma, eps)
    return y, x


RULE = graphex.replacement(search, replace, (torch.empty(2, 4), torch.empty(2, 4), torch.empty(4), 1e-6), name="mine")


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(programs)
def test_a_fused_program_computes_what_eager_does(program):
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    width = program.shape[-1]
    x1, x2 = (torch.randn(program.shape, generator=generator).to(program.dtype) for _ in range(2))
    gamma, smooth = (torch.rand(width, generator=generator).to(program.dtype) + 0.5 for _ in range(2))
    inputs = x1, x2, gamma, smooth, torch.ones(width, dtype=torch.int32)
    compiled = torch.compile(
        program.model, backend="graphex", dynamic=program.dynamic, options={"fusion_rules": [RULE]}
    )
    with torch.no_grad():
        wanted, found = program.model(*inputs), compiled(*inputs)
    journal = graphex.journal(compiled)
    assert not journal.fallbacks
    assert {ran.status for ran in journal.passes} <= {"changed", "unchanged"}
    for ours, theirs in zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert_close_or_one_apart(ours, theirs)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    sizes=st.tuples(
        st.integers(1, 3), st.integers(1, 4), st.sampled_from([1, 127, 128, 256]), st.sampled_from([64, 128])
    ),
    dims=st.tuples(st.integers(-3, 2), st.integers(-3, 2)),
    first=st.sampled_from([None, (0, 1), (1, 2), (-1, -2)]),
    spelled=st.sampled_from(["bmm", "matmul"]),
    used=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_transposed_matmul_computes_what_eager_does(sizes, dims, first, spelled, used, dtype):
    torch._dynamo.reset()
    batch, rows, inner, columns = sizes
    a = torch.randn(batch, rows, inner).to(dtype)
    a = a if first is None else a.transpose(*first).contiguous()
    b = torch.randn(batch, inner, columns).to(dtype)

    def model(a, b):
        left = a if first is None else a.transpose(*first)
        product = torch.bmm(left, b) if spelled == "bmm" else torch.matmul(left, b)
        result = product.transpose(*dims)
        return (result, product + 1) if used else (result,)

    compiled = torch.compile(model, backend="graphex")
    with torch.no_grad():
        wanted, found = model(a, b), compiled(a, b)
    assert not graphex.journal(compiled).fallbacks
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
