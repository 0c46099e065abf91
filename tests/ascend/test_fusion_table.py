"""The table of default fusions, row by row, with equal views, equal norms and extra readers around each row.

Merging equal calls must not cost a fusion: a row fuses beside its equals as it does alone.
"""

from __future__ import annotations

import pytest
import torch
from torch_npu import npu_add_rms_norm, npu_dynamic_quant, npu_quantize

from tests.harness.ascend import Compiled, on_npu


def arguments():
    half = {"dtype": torch.float16}
    x1, x2 = torch.randn(2, 3, 32, **half), torch.randn(2, 3, 32, **half)
    return on_npu(x1, x2, torch.randn(32, **half), torch.rand(32, **half) + 0.5)


# A row: norm -> what follows it. `y` is the norm's result, `s` the smooth scales or the known ones.


def dynamic_quant(y, s):
    return npu_dynamic_quant(y, smooth_scales=s)


def flattened_dynamic_quant(y, s):
    q, scale = npu_dynamic_quant(y.flatten(0, 1))
    return q, scale.view(-1, 1)


def flattened_cast(y, s):
    return (y.view(-1, y.shape[-1]).to(torch.float32),)


def quantised(y, s):
    return (npu_quantize(y, s, None, torch.qint8, -1),)


ROWS = {
    dynamic_quant: "add_rms_norm_smooth_dynamic_quant",
    flattened_dynamic_quant: "add_rms_norm_flatten_dynamic_quant",
    flattened_cast: "add_rms_norm_flatten_cast",
    quantised: "add_rms_norm_quant_qint8_symmetric",
}
KEEPS_NORM = {flattened_cast}
each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.__name__)


def fusions(model):
    torch._dynamo.reset()
    compiled = Compiled(model, exact=False)
    compiled(*arguments())
    return sorted(compiled.fusions())


@each_row
def test_alone(row):
    def model(x1, x2, g, s):
        y, _, x = npu_add_rms_norm(x1, x2, g)
        return *row(y, s), x

    assert fusions(model) == [ROWS[row]]


@each_row
def test_beside_an_equal_norm_that_is_read_otherwise(row):
    def model(x1, x2, g, s):
        y, _, x = npu_add_rms_norm(x1, x2, g)
        again, _, _ = npu_add_rms_norm(x1, x2, g)
        return *row(y, s), x, again * 2

    assert fusions(model) == [ROWS[row]]


@each_row
def test_beside_an_equal_norm_and_an_equal_view(row):
    def model(x1, x2, g, s):
        y, _, x = npu_add_rms_norm(x1, x2, g)
        again, _, _ = npu_add_rms_norm(x1, x2, g)
        return *row(y, s), x, again.view(-1, again.shape[-1]) * 2

    assert fusions(model) == [ROWS[row]]


@each_row
def test_with_an_equal_view_of_its_norm(row):
    def model(x1, x2, g, s):
        y, _, x = npu_add_rms_norm(x1, x2, g)
        other = y.view(-1, y.shape[-1]) * 2
        return *row(y, s), x, other

    assert fusions(model) == ([ROWS[row]] if row in KEEPS_NORM else [])


@each_row
def test_with_an_extra_reader_of_its_norm(row):
    def model(x1, x2, g, s):
        y, _, x = npu_add_rms_norm(x1, x2, g)
        return *row(y, s), x, y + 1

    assert fusions(model) == ([ROWS[row]] if row in KEEPS_NORM else [])


@each_row
def test_with_an_extra_reader_of_the_sum(row):
    def model(x1, x2, g, s):
        y, _, x = npu_add_rms_norm(x1, x2, g)
        return *row(y, s), x, x + 1, (x + x2).sum(-1)

    assert fusions(model) == [ROWS[row]]


@each_row
def test_the_whole_row_twice_is_fused_and_computed_once(row):
    def model(x1, x2, g, s):
        y, _, x = npu_add_rms_norm(x1, x2, g)
        again, _, _ = npu_add_rms_norm(x1, x2, g)
        return *(part * 1 for part in row(y, s)), *(part * 2 for part in row(again, s)), x

    torch._dynamo.reset()
    compiled = Compiled(model, exact=False)
    compiled(*arguments())
    assert compiled.fusions() == [ROWS[row]]
    assert sum("npu_add_rms_norm" in op for op in compiled.ops()) == 1


def test_a_cast_beside_an_equal_view_of_the_same_norm():
    """Row 3, as models write it: the router reads the rows in float32, the experts read the same rows."""

    def model(x1, x2, g, s):
        y, _, x = npu_add_rms_norm(x1, x2, g)
        h = y.shape[-1]
        return y.view(-1, h).to(torch.float32), y.view(-1, h) * 2, y, x

    assert fusions(model) == ["add_rms_norm_flatten_cast"]


@pytest.mark.parametrize("dims", [(0, 1), (1, 0)], ids=str)
@pytest.mark.parametrize("around", ["alone", "equal matmul", "equal transpose", "extra reader"])
def test_a_transposed_matmul(dims, around):
    def model(a, b):
        product = torch.bmm(a, b)
        result = product.transpose(*dims) * 1
        if around == "equal matmul":
            return result, torch.bmm(a, b) + 1
        if around == "equal transpose":
            return result, product.transpose(*dims) + 1
        return (result, product + 1) if around == "extra reader" else (result,)

    torch._dynamo.reset()
    compiled = Compiled(model, exact=False)
    compiled(*on_npu(torch.randn(2, 8, 128), torch.randn(2, 128, 128)))
    assert compiled.fusions() == ([] if around == "extra reader" else ["batchmatmul_transpose"])
