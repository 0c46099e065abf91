"""The tests of capture on a GPU: the same as on the recording device, with nothing in between."""

from __future__ import annotations

import pytest
from torch import Tensor


@pytest.fixture
def where() -> str:
    return "cuda"


@pytest.fixture
def host():
    return Tensor.cpu


@pytest.fixture
def fetched():
    return Tensor.cuda
