"""Where the results of an op may live, by the alias annotations of its schema.

view(Tensor(a) self, ...) -> Tensor(a)      in the memory of `self`
add(Tensor self, ...) -> Tensor             in memory of its own
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from graphex.torch_private.schemas import holds_tensors, is_composite


class Result(NamedTuple):
    """Where a result of an op may live: in memory of these arguments (place and name), in memory of its own."""

    sources: tuple[tuple[int, str], ...] = ()
    fresh: bool = False


@cache
def lists_its_own(op: torch._ops.OpOverload) -> bool:
    """Whether an op returns a list of tensors, each in memory of its own. Ours do; no schema promises it
    (`aten::unsafe_split` returns views of one memory).
    """
    returns = op._schema.returns
    return op.namespace == "graphex" and len(returns) == 1 and str(returns[0].type) == "List[Tensor]"


@cache
def declared_results(op: torch._ops.OpOverload) -> tuple[Result, ...]:
    arguments = [
        (position, argument.name, argument.alias_info.before_set | argument.alias_info.after_set)
        for position, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None
    ]
    everything = tuple((position, argument.name) for position, argument in enumerate(op._schema.arguments))
    known = set().union(*(names for _, _, names in arguments))
    results = []
    for result in op._schema.returns:
        names = result.alias_info.before_set | result.alias_info.after_set if result.alias_info else set()
        if not holds_tensors(result.type):
            results.append(Result())  # a size
        elif is_composite(op):
            results.append(Result(everything, fresh=True))  # `reshape`: a view or a copy, as it happens
        elif result.alias_info is None:
            results.append(Result(fresh=True))
        elif not names or "*" in names or not names <= known:  # torch gives no names for a list of views
            results.append(Result(everything))
        else:
            results.append(Result(tuple((place, name) for place, name, its in arguments if not names.isdisjoint(its))))
    return tuple(results)
