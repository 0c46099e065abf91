"""Every operator PyTorch describes, called as PyTorch's own tests call it, computes what eager mode computes.

The short run takes a few samples of each operator, the long run (marked `full`) takes all of them. There is no list of
operators to leave out: what `aot_eager` cannot run either is found by running it, and only values that are undefined
(`UNDEFINED_VALUES`) are not compared.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphex
from tests.harness.opinfo import OPS, UNDEFINED_VALUES, Call, Sample, calling, complaint, samples

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecated operators and odd sizes say so

# In order of preference; an operator is sampled in the first type it has.
MAIN_TYPES = (torch.float32, torch.complex64, torch.int64, torch.float16, torch.float8_e4m3fn)
OTHER_TYPES = (torch.bfloat16, torch.int64, torch.complex64, torch.bool)

# The short run takes every operator in its main type, and of the rest a slice: one operator in so many.
EVERY_GRADIENT = 2
EVERY_OTHER_TYPE = 4
EVERY_DYNAMIC = 30

WITH_GRADIENTS = [name for name, op in OPS.items() if op.supports_autograd]
WITH_WRITES = [name for name, op in OPS.items() if op.inplace_variant is not None]


def check(name: str, function: Call, sampled: list[Sample], dynamic: bool | None = None) -> None:
    defined = name not in UNDEFINED_VALUES
    call = calling(function)
    found = {index: complaint(call, it, defined=defined, dynamic=dynamic) for index, it in enumerate(sampled)}
    assert {index: said for index, said in found.items() if said is not None} == {}


def few(device: str) -> int:
    return 3 if device == "cpu" else 1


def sliced(every: int) -> list[str]:
    return list(OPS)[::every]


def main_type(name: str, device: str, types: tuple[torch.dtype, ...] = MAIN_TYPES) -> torch.dtype:
    supported = OPS[name].supported_dtypes(device)
    for dtype in types:
        if dtype in supported:
            return dtype
    pytest.skip(f"{name} has none of these types on {device}")


def other_type(name: str, device: str) -> torch.dtype | None:
    """One of the other types, a different one to begin with for each operator."""
    supported = OPS[name].supported_dtypes(device) - {main_type(name, device)}
    first = list(OPS).index(name) // EVERY_OTHER_TYPE % len(OTHER_TYPES)
    return next((dtype for dtype in OTHER_TYPES[first:] + OTHER_TYPES[:first] if dtype in supported), None)


@pytest.mark.parametrize("name", OPS)
def test_operator_equals_eager(name: str, device: str) -> None:
    op = OPS[name]
    most = min(2, few(device)) if op.supports_autograd else few(device)  # the tests of gradients take one more
    check(name, op.op, samples(op, device, main_type(name, device), most))


@pytest.mark.parametrize("name", sliced(EVERY_OTHER_TYPE))
def test_operator_in_another_type_equals_eager(name: str, device: str) -> None:
    op, dtype = OPS[name], other_type(name, device)
    if dtype is not None:
        check(name, op.op, samples(op, device, dtype, 2 if dtype.is_complex else 1))  # a conjugated one comes last


@pytest.mark.parametrize("name", WITH_GRADIENTS[::EVERY_GRADIENT])
def test_gradients_equal_eager(name: str, device: str) -> None:
    op = OPS[name]
    dtype = main_type(name, device, (torch.float32, torch.complex64, torch.float16))
    check(name, op.op, samples(op, device, dtype, 1, requires_grad=True))


@pytest.mark.parametrize("name", WITH_WRITES)
def test_operator_that_writes_to_its_argument_equals_eager(name: str, device: str) -> None:
    op = OPS[name]
    check(name, op.inplace_variant, samples(op, device, main_type(name, device), 1))


@pytest.mark.parametrize("name", sliced(EVERY_DYNAMIC))
def test_operator_with_dynamic_sizes_equals_eager(name: str, device: str) -> None:
    op = OPS[name]
    check(name, op.op, samples(op, device, main_type(name, device), 1), dynamic=True)


@pytest.mark.full
@pytest.mark.parametrize("name", OPS)
def test_all_samples_equal_eager(name: str, device: str) -> None:
    op = OPS[name]
    check(name, op.op, samples(op, device, main_type(name, device), None))


@pytest.mark.full
@pytest.mark.parametrize("dtype", OTHER_TYPES, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_other_types_equal_eager(name: str, dtype: torch.dtype, device: str) -> None:
    op = OPS[name]
    if dtype in op.supported_dtypes(device):
        check(name, op.op, samples(op, device, dtype, few(device)))


@pytest.mark.full
@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_gradients_of_more_samples_equal_eager(name: str, device: str) -> None:
    op = OPS[name]
    dtype = main_type(name, device, (torch.float32, torch.complex64, torch.float16))
    check(name, op.op, samples(op, device, dtype, 10, requires_grad=True))


@pytest.mark.full
@pytest.mark.parametrize("name", WITH_WRITES)
def test_writes_of_all_samples_equal_eager(name: str, device: str) -> None:
    op = OPS[name]
    check(name, op.inplace_variant, samples(op, device, main_type(name, device), None))


@pytest.mark.full
@pytest.mark.parametrize("name", OPS)
def test_all_operators_with_dynamic_sizes_equal_eager(name: str, device: str) -> None:
    op = OPS[name]
    check(name, op.op, samples(op, device, main_type(name, device), few(device)), dynamic=True)


def test_a_wrong_rewrite_would_be_noticed() -> None:
    def subtract(gm: torch.fx.GraphModule, example_inputs: Any, config: Any) -> None:
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
            node.target = torch.ops.aten.sub.Tensor

    backend = graphex.get_backend({"post_grad_custom_post_pass": subtract})
    said = complaint(calling(torch.add), Sample((torch.ones(2), torch.ones(2)), {}), backend=backend)
    assert said is not None
    assert said.startswith("results: Tensor-likes are not equal")


def test_a_pass_that_was_given_up_would_be_noticed() -> None:
    def broken(gm: torch.fx.GraphModule, example_inputs: Any, config: Any) -> None:
        raise ValueError("no")

    backend = graphex.get_backend({"post_grad_custom_post_pass": broken, "strict": False})
    said = complaint(calling(torch.add), Sample((torch.ones(2), torch.ones(2)), {}), backend=backend)
    assert said == "pass broken was rolled back: ValueError: no"
