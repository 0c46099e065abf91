"""Tests with the Ascend names and the simulated npu. A process cannot give them back, so they have one of their own:
`pytest tests/ascend`. A run of all tests passes them over (`norecursedirs`).

With GRAPHEX_NPU=cuda the npu of this process is the GPU. Processes that tests start have the simulated one.
"""

from __future__ import annotations

import os

import pytest
from torch import Tensor

from graphex.ascend import serve

serve()
IS_SIMULATED = os.environ.get("GRAPHEX_NPU", "simulated") == "simulated"
collect_ignore = [] if IS_SIMULATED else ["test_device.py", "test_contract.py"]  # about the simulated npu alone


@pytest.fixture(autouse=True)
def simulated_in_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHEX_NPU", "simulated")


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
