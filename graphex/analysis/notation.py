"""Types and tensors as a user would write them: `float32`, `float32[2, s0]`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tensor_text(dtype: torch.dtype, sizes: Iterable[Any]) -> str:
    """A size of None is any size."""
    return f"{dtype_text(dtype)}[{', '.join('*' if size is None else str(size) for size in sizes)}]"


def text_of(tensor: torch.Tensor) -> str:
    return tensor_text(tensor.dtype, tensor.shape)
