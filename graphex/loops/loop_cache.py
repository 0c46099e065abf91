"""The cache of a generation: its length is one number on the device, shared by all layers.

A static cache of transformers keeps its length as one tensor a layer, and a sliding window as a Python number, which
makes every token another capture key. Here the length is one tensor for all layers, and a window is a ring:

    window 4, after 6 tokens:    slots   0 1 2 3       position p is in slot p % 4
                                 holds   4 5 2 3

A decode step writes slot `length % window` and attends to all slots. The mask that transformers makes for slots
`length - window + 1 ...` in order is also right for the ring: with one query, all of them are visible or none is there
yet. Padding is looked up by position, so a batch with padding gets layers that keep everything, and transformers' mask.

`read` fills a cache from one of transformers, `write` the other way round.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin

from graphex.errors import InputError
from graphex.torch_private.dynamo import mark_static_address

_KNOWN = ("StaticLayer", "StaticSlidingWindowLayer", "DynamicLayer", "DynamicSlidingWindowLayer")


class Place:
    """The position of the next token, while `decoding`. During a prefill each layer counts for itself, on the host."""

    def __init__(self, device: torch.device) -> None:
        self.length = torch.zeros((), dtype=torch.long, device=device)
        self.decoding = False
        mark_static_address(self.length)


class LoopLayer(CacheLayerMixin):
    """Keys and values of all positions, [B, H, L, D]."""

    is_croppable = False

    def __init__(self, place: Place, size: int, *, is_sliding: bool) -> None:
        super().__init__()
        self.place, self.size, self.is_sliding = place, size, is_sliding
        self.start = 0

    @property
    def is_compileable(self) -> bool:
        """Whether what `update` returns has the size of the cache; a prefill gets what is there, no more."""
        return self.place.decoding

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = _zeros(key_states, self.size)
        self.values = _zeros(value_states, self.size)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.place.decoding:
            return self._decode(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        found = self._prefill(key_states, value_states)
        self.start += key_states.shape[-2]
        return found

    def _decode(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        at = self._slot()
        self.keys.index_copy_(2, at, key_states)
        self.values.index_copy_(2, at, value_states)
        return self.keys, self.values

    def _slot(self) -> Tensor:
        return self.place.length.view(1)

    def _prefill(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        start, end = self.start, self.start + key_states.shape[-2]
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        if start == 0:
            return key_states, value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, Any]:
        return (self.size if self.place.decoding else self.start + query_length), 0

    def get_seq_length(self) -> Any:
        return self.place.length if self.place.decoding else self.start

    def get_max_length(self) -> int:
        return self.size

    def ordered(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of positions `first` to `end`, in order."""
        return self.keys[:, :, first:end], self.values[:, :, first:end]

    def kept(self, end: int) -> int:
        """The first position that is still there when `end` positions were written."""
        return 0


class RingLayer(LoopLayer):
    """Keys and values of the last `size` positions; position p is in slot p % size."""

    def __init__(self, place: Place, size: int) -> None:
        super().__init__(place, size, is_sliding=True)

    def _slot(self) -> Tensor:
        return torch.remainder(self.place.length, self.size).view(1)

    def _prefill(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        start, count = self.start, key_states.shape[-2]
        if start:
            before = self.ordered(max(0, start - self.size + 1), start)
            full = torch.cat((before[0], key_states), -2), torch.cat((before[1], value_states), -2)
        else:
            full = key_states, value_states
        first = max(start, start + count - self.size)
        slots = torch.arange(first, start + count, device=key_states.device) % self.size
        self.keys[:, :, slots] = key_states[:, :, first - start :]
        self.values[:, :, slots] = value_states[:, :, first - start :]
        return full

    def get_mask_sizes(self, query_length: int) -> tuple[int, Any]:
        if self.place.decoding:
            return self.size, torch.clamp(self.place.length - (self.size - 1), min=0)
        first = max(0, self.start - self.size + 1)
        return self.start - first + query_length, first

    def ordered(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        slots = torch.arange(first, end, device=self.keys.device) % self.size
        return self.keys[:, :, slots], self.values[:, :, slots]

    def kept(self, end: int) -> int:
        return max(0, end - self.size)


class LoopCache(Cache):
    """The cache of a generation: a layer for each of the model's, all at one `place`."""

    def __init__(self, layers: list[LoopLayer], place: Place) -> None:
        super().__init__(layers=layers)
        self.place = place
        self.prefilled = 0  # positions that the prefill has left

    @classmethod
    def of(cls, config: Any, length: int, device: torch.device, *, padded: bool) -> LoopCache:
        """A cache for `length` positions. Raises InputError for a model whose layers keep something else."""
        text = config.get_text_config(decoder=True)
        place = Place(device)
        layers: list[LoopLayer] = []
        for each in cache_utils.StaticCache(config=text, max_cache_len=length).layers:
            kind = type(each).__name__
            if kind not in _KNOWN:
                raise InputError(f"a layer of the model keeps its state in a {kind}")
            sliding = bool(each.is_sliding)
            rings = sliding and not padded and each.max_cache_len < length and _slides(text)
            layers.append(
                RingLayer(place, each.max_cache_len) if rings else LoopLayer(place, length, is_sliding=sliding)
            )
        return cls(layers, place)

    def begin(self, length: int) -> None:
        """Prepare for a prefill behind `length` positions that are there already."""
        self.place.decoding = False
        for layer in self.layers:
            layer.start = length

    def clear(self) -> None:
        """Zero all values. Masks hide old ones, but not those that are not finite: 0 * nan."""
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys.zero_()
                layer.values.zero_()

    def takes(self, positions: int) -> bool:
        """Whether every layer has a slot for each position of a prompt of this length."""
        return all(layer.is_initialized and positions <= layer.size for layer in self.layers)

    def decode(self, length: int | None = None) -> None:
        """Prepare for calls with one token, behind the first `length` positions of the prefill, or behind all."""
        self.prefilled = max(layer.start for layer in self.layers) if length is None else length
        self.place.decoding = True
        self.place.length.fill_(self.prefilled)
        for layer in self.layers:
            layer.start = 0  # a number that changes with the prompt is another graph to Dynamo


def read(cache: Cache, into: LoopCache, length: int) -> None:
    """Fill a cache from one of transformers that holds `length` positions."""
    for given, layer in zip(cache.layers, into.layers, strict=True):
        if not given.is_initialized:
            continue
        keys, values = _in_order(given, length)
        first = max(length - keys.shape[-2], layer.kept(length))
        count = length - first
        if not layer.is_initialized:
            layer.lazy_initialization(keys, values)
        slots = torch.arange(first, length, device=keys.device) % layer.size
        layer.keys[:, :, slots] = keys[:, :, keys.shape[-2] - count :]
        layer.values[:, :, slots] = values[:, :, values.shape[-2] - count :]


def _in_order(layer: Any, length: int) -> tuple[Tensor, Tensor]:
    """The keys and values of the last positions that a layer of transformers holds, in order."""
    kind = type(layer).__name__
    if kind == "StaticLayer":
        return layer.keys[:, :, :length], layer.values[:, :, :length]
    if kind == "StaticSlidingWindowLayer":
        held = min(length, layer.max_cache_len)
        return layer.keys[:, :, :held], layer.values[:, :, :held]
    return layer.keys, layer.values


def write(cache: Cache, source: LoopCache, length: int) -> None:
    """Put the first `length` positions into a cache of transformers, as if it had been used from the beginning."""
    for layer, mine in zip(_layers(cache, len(source.layers)), source.layers, strict=True):
        if not mine.is_initialized:
            continue
        kind = type(layer).__name__
        if kind.startswith("Dynamic"):
            held = layer.sliding_window - 1 if layer.is_sliding else length
            keys, values = mine.ordered(max(0, length - held), length)
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys.clone(), values.clone()
            if layer.is_sliding:
                layer.cumulative_length = length
            continue
        keys, values = mine.ordered(max(0, length - layer.max_cache_len), length)
        if not layer.is_initialized:
            layer.lazy_initialization(keys, values)
        layer.keys[:, :, : keys.shape[-2]] = keys
        layer.values[:, :, : values.shape[-2]] = values
        layer.cumulative_length.fill_(min(length, layer.max_cache_len))
        if kind == "StaticSlidingWindowLayer":
            layer.cumulative_length_int = length


def why_not(cache: Any) -> str:
    """Why a cache that was given cannot be read and written; empty if it can."""
    if not isinstance(cache, Cache) or getattr(cache, "offloading", False):
        return f"the cache is a {type(cache).__name__}, not one that is wholly on the device"
    other = next((type(each).__name__ for each in cache.layers if type(each).__name__ not in _KNOWN), "")
    return f"a layer of the cache is a {other}" if other else ""


def _layers(cache: Cache, count: int) -> list[Any]:
    """The layers of a cache, which makes some kinds of them only when they are written."""
    while len(cache.layers) < count:
        cache.layers.append(cache.layer_class_to_replicate())
    return list(cache.layers)


def _slides(config: Any) -> bool:
    """Whether windows slide by one position; a chunked one jumps."""
    return "chunked_attention" not in (getattr(config, "layer_types", None) or ()) and not getattr(
        config, "attention_chunk_size", None
    )


def _zeros(states: Tensor, size: int) -> Tensor:
    """A buffer at an address that never changes, which Dynamo is told."""
    made = states.new_zeros((*states.shape[:2], size, states.shape[-1]))
    mark_static_address(made)
    return made
