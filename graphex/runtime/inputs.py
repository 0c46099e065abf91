"""A private buffer for an input of a captured graph, laid out as the input is."""

from __future__ import annotations

import torch

from graphex.errors import CaptureError
from graphex.torch_private.memory import is_dense, overlaps_itself


class InputBuffer:
    """`view` is what the graph reads; `target` is what a call's tensor, through `source`, is copied into.

    The strides of the input are kept, gaps included, because the graph was compiled for them. An expanded dimension
    (stride 0) holds one element that is copied once.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self._compact: torch.Size | None = None
        if is_dense(like):
            self.target = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
            self.view = self.target
            return
        sizes = torch.Size(1 if stride == 0 else size for size, stride in zip(like.shape, like.stride(), strict=True))
        extent = 1 + sum((size - 1) * stride for size, stride in zip(sizes, like.stride(), strict=True))
        flat = torch.empty(extent if like.numel() else 0, dtype=like.dtype, device=like.device)
        self.target = flat.as_strided(sizes, like.stride())
        self.view = flat.as_strided(like.shape, like.stride())
        self._compact = sizes
        if overlaps_itself(self.target):
            raise CaptureError(f"an input of shape {tuple(like.shape)} and strides {like.stride()} overlaps itself")

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._compact is None:
            return tensor
        return tensor.as_strided(self._compact, tensor.stride(), tensor.storage_offset())
