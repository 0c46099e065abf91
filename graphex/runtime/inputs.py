"""Private buffers for the inputs of a captured graph, laid out as the inputs are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphex.errors import CaptureError
from graphex.torch_private.memory import UNMARKED, flipped, is_dense, marked, marks_of, overlaps_itself

_ALIGNMENT = 512  # what a device's allocator gives; kernels are chosen by it


class InputBuffer:
    """`view` is what the graph reads; `target` is what a call's tensor, through `source`, is copied into.

    The strides of the input are kept, gaps included, because the graph was compiled for them. An expanded dimension
    (stride 0) holds one element that is copied once. For an input that is read as the conjugate of its memory, the
    buffer's memory holds the conjugate too: what is traced depends on that.
    """

    def __init__(self, like: Tensor, memory: Tensor | None) -> None:
        """`memory` is bytes to lay it out in; None takes over the tensor itself as the buffer."""
        self._marks = marks_of(like)
        self._compact = None if is_dense(like) else _without_expansion(like)
        if memory is None:
            self.view = like.detach()  # the memory, whatever becomes of the caller's tensor
            self.target = self.source(self.view)
        else:
            flat = memory.view(like.dtype)
            self.view = marked(flat.as_strided(like.shape, like.stride(), flat.storage_offset()), self._marks)
            self.target = flat.as_strided(self._compact or like.shape, like.stride(), flat.storage_offset())
        if self._compact is not None and overlaps_itself(self.target):
            raise CaptureError(f"an input of shape {tuple(like.shape)} and strides {like.stride()} overlaps itself")

    @property
    def is_simple(self) -> bool:
        """Whether a call's tensor is copied as it is."""
        return self._compact is None and self._marks == UNMARKED

    def source(self, tensor: Tensor) -> Tensor:
        if self._compact is not None:
            tensor = tensor.as_strided(self._compact, tensor.stride(), tensor.storage_offset())
        return tensor if self._marks == UNMARKED else flipped(tensor, self._marks)


class Arena:
    """Memory for the buffers of all keys of a graph: every key lays its own out from the start.

    A key's buffers are filled right before it is replayed, so what another key left there does not matter.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def buffers(self, inputs: Sequence[Tensor], *, shared: bool = True) -> list[InputBuffer]:
        sizes = [_aligned(bytes_of(tensor)) for tensor in inputs]
        memory = self._room(sum(sizes), inputs[0].device, shared) if inputs else None
        buffers, start = [], 0
        for tensor, size in zip(inputs, sizes, strict=True):
            assert memory is not None
            buffers.append(InputBuffer(tensor, memory[start : start + bytes_of(tensor)]))
            start += size
        return buffers

    def _room(self, size: int, device: torch.device, shared: bool) -> Tensor:
        if not shared:
            with torch.inference_mode(False):
                return torch.zeros(size, dtype=torch.uint8, device=device)
        if self._memory is None or self._memory.numel() < size:
            with torch.inference_mode(False):  # calls in and outside of that mode write to it
                self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        return self._memory


def bytes_of(tensor: Tensor) -> int:
    """The bytes from a tensor's first element to its last, gaps included, expanded dimensions counted once."""
    if not tensor.numel():
        return 0
    steps = zip(_without_expansion(tensor), tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()


def _without_expansion(tensor: Tensor) -> torch.Size:
    return torch.Size(1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
