"""Random programs: what is replayed is what the same program computes without capture, memory and all."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from graphex.debug.tensors import sharing
from tests.fuzz.programs import SIZES, load
from tests.fuzz.run import program_number
from tests.harness.capture import compile_it, replays

EACH = 6
CALLS = 4
OPTIONS: list[dict[str, Any]] = [
    {},
    {"clone_input": True},
    {"capture_limit": 1},
    {"force_recapture": True},
]


def seen(run: Callable[..., list[Tensor]], inputs: list[Tensor]) -> tuple[Any, ...]:
    """Results and what is left in the inputs; strides, and whose memory each result lives in, from where on."""
    torch.manual_seed(3)
    try:
        results = list(run(*inputs))
    except Exception as error:
        return [], (type(error).__name__,)
    owners = sharing(results, inputs)
    places = [value.storage_offset() for owner, value in zip(owners, results, strict=True) if owner.startswith("input")]
    return [each.clone() for each in (*results, *inputs)], ([each.stride() for each in results], owners, places)


@torch.no_grad()
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_replays_equal_the_program_without_capture(options, tape):
    replayed = 0
    for number in range(EACH):
        program = program_number(17, EACH * OPTIONS.index(options) + number)
        loaded = load(program.source())
        captured = compile_it(loaded.model, dynamic=loaded.dynamic, **options)
        plain = compile_it(loaded.model, dynamic=loaded.dynamic, force_eager=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for size in SIZES if loaded.dynamic else SIZES[:1]:
                for _ in range(CALLS):
                    found, wanted = (seen(run, loaded.inputs(size)) for run in (captured, plain))
                    assert found[1] == wanted[1], program.source()
                    torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=0, equal_nan=True)
        replayed += replays(captured)
        torch._dynamo.reset()
    assert replayed > 0
