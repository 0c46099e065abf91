"""float8 and float4 in everything that is written down: dumps of data, scripts that show a difference."""

from __future__ import annotations

import numpy
import pytest
import torch

import graphex
from graphex.debug import files
from tests.harness.processes import python

NAMES = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2")
SMALL = [getattr(torch, name) for name in NAMES if hasattr(torch, name)]
BYTES = torch.tensor([0x38, 0x40, 0x44, 0x30], dtype=torch.uint8)


def dump(path, *, force_eager):
    options = {"dump_tensor_data": True, "force_eager": force_eager, "data_dump_dir": str(path)}
    torch.compile(lambda x: [x.view(dtype) for dtype in SMALL], backend="graphex", options=options)(BYTES.clone())


@torch.no_grad()
def test_every_small_float_is_dumped_as_a_tensor(tmp_path):
    dump(tmp_path, force_eager=False)
    found = {tensor.dtype: tensor.view(torch.uint8) for tensor in map(torch.load, tmp_path.rglob("*.pt"))}
    assert set(found) >= set(SMALL)
    assert all(torch.equal(found[dtype], BYTES) for dtype in SMALL)


@torch.no_grad()
def test_every_small_float_is_dumped_for_numpy_in_a_type_that_holds_its_values(tmp_path):
    dump(tmp_path, force_eager=True)
    found = [numpy.load(path).tolist() for path in tmp_path.rglob("*OUTPUT*.npy")]
    for dtype in SMALL:
        wanted = BYTES if "float4" in str(dtype) else BYTES.view(dtype).float()
        assert wanted.tolist() in found


@torch.no_grad()
def test_dumps_of_other_types_hold_their_values(tmp_path):
    x = torch.tensor([1.0, 2.0])
    kinds = (torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.bool, torch.int16)
    options = {"dump_tensor_data": True, "force_eager": True, "data_dump_dir": str(tmp_path)}
    torch.compile(lambda x: [x.to(kind) for kind in kinds], backend="graphex", options=options)(x)
    found = [numpy.load(path) for path in tmp_path.rglob("*OUTPUT*.npy")]
    assert sorted(str(array.dtype) for array in found) == [
        "bool",
        "complex64",
        "float16",
        "float32",
        "float64",
        "int16",
    ]
    assert all(array.tolist() in ([1, 2], [True, True]) for array in found)


@pytest.mark.parametrize("largest", [files.LARGEST_INPUTS, 0], ids=["with the inputs", "with random inputs"])
@torch.no_grad()
def test_a_script_that_shows_a_difference_runs_with_small_floats(largest, monkeypatch):
    monkeypatch.setattr(files, "LARGEST_INPUTS", largest)

    def forget(gm):
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.bitwise_not.default):
            node.replace_all_uses_with(node.args[0])

    def model(x, small):
        return [x.bitwise_not().view(dtype) for dtype in SMALL] + [each.view(torch.uint8).clone() for each in small]

    options = {"verify": True, "post_grad_custom_pre_pass": [forget]}
    compiled = torch.compile(model, backend="graphex", options=options)
    with pytest.warns(graphex.GraphexWarning, match="verification (left out|rolled back)"):
        compiled(BYTES.clone(), [BYTES.view(dtype) for dtype in SMALL])
    (verdict,) = graphex.journal(compiled).verifications
    assert python(verdict.repro).stdout.count("largest difference") == 2 * len(SMALL)
