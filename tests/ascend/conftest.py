"""Tests with the Ascend names and the simulated npu. A process cannot give them back, so they have one of their own:
`pytest tests/ascend`. A run of all tests passes them over (`norecursedirs`).
"""

from __future__ import annotations

import pytest
from torch import Tensor

from graphex.ascend import serve

serve()


@pytest.fixture
def where() -> str:
    return "npu"


@pytest.fixture
def host():
    return Tensor.cpu


@pytest.fixture
def fetched():
    def npu(tensor: Tensor) -> Tensor:
        return tensor.npu()

    return npu
