"""Writes of rows into a tensor, as models write a KV cache, in whichever way they are spelled.

index_copy_(cache, 2, positions, rows)
index_put_(cache, [None, None, positions], rows)                a negative position counts from the end
window = slice(cache, 2, a, b); copy_(window, rows)             all rows of a window, in order
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from graphex.analysis import known_equal
from graphex.analysis.shapes import canonical_dim

aten = torch.ops.aten

# ops that make a new tensor with rows replaced: the writes below, before they are proven to be in place
COPIES = frozenset({aten.index_copy.default, aten.index_put.default, aten.slice_scatter.default})


@dataclass(frozen=True)
class RowWrite:
    """`node` writes `rows` into `cache`, along `dim`, at `positions` (None: `cache` is a window that they fill).

    `given` is what it is given: the rows, or a view of them without leading dimensions of size 1, which torch drops
    where a tensor is assigned to an index. `one_for_each`: the op itself refuses to run unless there is one position
    for each row, so that two sizes that differ in symbols are the same number wherever it runs.
    """

    node: Node
    cache: Node
    given: Node
    dim: int
    positions: Node | None = None
    may_count_from_end: bool = False
    one_for_each: bool = False

    @property
    def rows(self) -> Node:
        source = self.given.args[0] if self.given.target is aten.view.default else None
        whole, part, room = _tensor(source), _tensor(self.given), _tensor(self.cache)
        if whole is None or part is None or room is None or not part.dim() < whole.dim() == room.dim():
            return self.given
        padded = (*[1] * (whole.dim() - part.dim()), *part.shape)
        return source if known_equal(tuple(whole.shape), padded) else self.given  # type: ignore[return-value]

    def is_beside(self, other: RowWrite) -> bool:
        """Whether two writes go to the same rows of two tensors."""
        same = self.positions is other.positions and self.may_count_from_end == other.may_count_from_end
        return same and self.dim == other.dim


def row_write(node: Node) -> RowWrite | None:
    """What a node writes, if it is a write of rows in place."""
    read = _SPELLINGS.get(node.target) if node.op == "call_function" and not node.kwargs else None
    found = read(node, *node.args) if read is not None else None
    if found is None or _tensor(found.cache) is None or _tensor(found.given) is None:
        return None
    return found


def _index_copy(node: Node, cache: Any, dim: Any, positions: Any, rows: Any) -> RowWrite | None:
    value = _tensor(cache)
    if value is None or not isinstance(positions, Node) or not isinstance(dim, int):
        return None
    return RowWrite(node, cache, rows, canonical_dim(dim, value.dim()), positions, one_for_each=True)


def _index_put(node: Node, cache: Any, indices: Any, rows: Any, accumulate: Any = False) -> RowWrite | None:
    given = [dim for dim, index in enumerate(indices) if index is not None]
    if accumulate or len(given) != 1 or not isinstance(indices[given[0]], Node):
        return None
    return RowWrite(node, cache, rows, given[0], indices[given[0]], may_count_from_end=True)


def _copy(node: Node, window: Any, rows: Any, non_blocking: Any = False) -> RowWrite | None:
    into = _tensor(window)
    if into is None or window.target is not aten.slice.Tensor:
        return None
    dim = window.args[1] if len(window.args) > 1 else 0
    return RowWrite(node, window, rows, canonical_dim(dim, into.dim()))


_SPELLINGS: dict[Any, Callable[..., RowWrite | None]] = {
    aten.index_copy_.default: _index_copy,
    aten.index_put_.default: _index_put,
    aten.copy_.default: _copy,
}


def _tensor(value: Any) -> Tensor | None:
    found = value.meta.get("val") if isinstance(value, Node) else None
    return found if isinstance(found, Tensor) else None
