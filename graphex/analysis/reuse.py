"""Whether a value's memory may be written over: one question made of many facts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import Node

from graphex.analysis.aliasing import Aliases
from graphex.analysis.beginnings import beginning_of
from graphex.analysis.order import Order
from graphex.analysis.shapes import known_equal, known_true, same_layout, same_offset
from graphex.analysis.source import node_line


class Obstacle(NamedTuple):
    """What is in the way of a write, and the node that still needs the old value.

    `is_news`: no reader in the program says so, so that it is worth a record; `edit` is what the user can do about it.
    """

    reason: str
    reader: Node | None = None
    is_news: bool = False
    edit: str = ""

    def sentence(self) -> str:
        line = node_line(self.reader) if self.reader is not None else ""
        return f"{self.reason} ({line})" if line else self.reason


def why_not_reusable(
    aliases: Aliases, order: Order, writer: Node, dead: Any, after: Any, result: Node | None
) -> Obstacle | None:
    """What keeps `writer` from leaving its result, of layout `after`, in the memory of its argument `dead`.

    `result` is the node that stands for the result, if there is one.
    """
    value = dead.meta.get("val") if isinstance(dead, Node) else None
    if not isinstance(value, Tensor) or not same_layout(after, value) or value.is_complex():
        return Obstacle("the result has another layout than the argument")
    if not fills_its_storage(value):
        return Obstacle(f"'{dead.name}' is a part of a larger memory")
    if aliases.is_owned_elsewhere(dead) or aliases.is_absolute(dead):
        return Obstacle(f"'{dead.name}' may be memory that somebody outside the graph holds on to")
    if result is not None and aliases.reaches_output(result) and not all(known_true(size != 1) for size in value.shape):
        # fake and real strides may differ where a dimension has one element, and the user can see them
        return Obstacle("the strides of an output might change")
    if result is not None and aliases.strides.may_change(result, dead):
        return Obstacle("the strides of an output might change")
    if result is not None and aliases.shows_its_offset(result) and not same_offset(beginning_of(result), value):
        return Obstacle("an output would begin at another place of its memory")
    if aliases.shares_with_operands(writer, dead):
        return Obstacle(f"another argument may share memory with '{dead.name}'")
    readers = aliases.readers_after(dead, writer)
    use = aliases.in_use.why(dead, writer)
    if use is not None and not any(
        aliases.may_alias(value, dead) for each in readers for value in each.all_input_nodes
    ):
        return Obstacle(f"'{dead.name}' is not free: {use.reason}", use.until, is_news=True, edit=use.edit)
    if readers:
        return Obstacle(f"'{dead.name}' is read later by '{readers[0].name}'", readers[0])
    return unordered(order, aliases, writer, [dead] if result is None else [dead, result])


def unordered(order: Order, aliases: Aliases, writer: Node, values: Iterable[Node]) -> Obstacle | None:
    """Somebody who uses the memory of `values` on another stream, with nothing that puts it before or after a write."""
    if order.one_stream:
        return None
    tables = (uses for value in values for uses in aliases.work_on(value))
    user = next((found for uses in tables if (found := order.first_unordered(writer, uses)) is not None), None)
    if user is None:
        return None
    reason = f"'{user.name}' uses the same memory on another stream, and nothing orders the two"
    return Obstacle(reason, user, is_news=True)


def fills_its_storage(value: Tensor) -> bool:
    """A part of a larger storage would keep the whole alive, and its offset would show."""
    if any(stride == 0 for stride in value.stride()):
        return False
    size = value.numel() * value.element_size()
    return known_equal(value.storage_offset(), 0) and known_equal(value.untyped_storage().nbytes(), size)
