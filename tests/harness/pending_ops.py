"""Ops that work on after they have returned, and ops that keep what they are given: on the CPU, and the same each time.

`begin` does nothing but take note; `finish` reads what `begin` was given, at that time, and writes the result. So the
memory of an op in flight that was written to in between shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

import graphex

kept: list[Tensor] = []
_pending: dict[int, list[tuple[list[Tensor], list[Tensor]]]] = {}  # by the address of a result

_library = torch.library.Library("graphex_pending", "FRAGMENT")
for schema in ("begin(Tensor x) -> Tensor", "begin_many(Tensor[] xs) -> Tensor[]", "finish(Tensor x) -> Tensor"):
    _library.define(schema)


def _note(given: list[Tensor], results: list[Tensor]) -> list[Tensor]:
    for result in results:
        _pending.setdefault(result.untyped_storage().data_ptr(), []).append((given, results))
    return results


def _finish(x: Tensor) -> Tensor:
    for given, results in _pending.pop(x.untyped_storage().data_ptr(), ()):
        for one, result in zip(given, results, strict=True):
            if one is not None and result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
                result.copy_(one * 3)
    return x.clone()


_library.impl("begin", lambda x: _note([x], [torch.full_like(x, -1)])[0], "CompositeExplicitAutograd")
_library.impl("begin_many", lambda xs: _note(xs, [torch.full_like(x, -1) for x in xs]), "CompositeExplicitAutograd")
_library.impl("finish", _finish, "CompositeExplicitAutograd")
torch.library.register_fake("graphex_pending::begin", torch.empty_like, lib=_library)
torch.library.register_fake("graphex_pending::begin_many", lambda xs: list(map(torch.empty_like, xs)), lib=_library)
torch.library.register_fake("graphex_pending::finish", torch.empty_like, lib=_library)


@torch.library.custom_op("graphex_pending::tap", mutates_args=())
def tap(x: Tensor) -> Tensor:
    kept.append(x)
    return x.sum()


@torch.library.custom_op("graphex_pending::tap_all", mutates_args=())
def tap_all(xs: list[Tensor], y: Tensor) -> tuple[Tensor, Tensor]:
    kept.extend([*xs, y])
    return y.sum(), y.mean()


@torch.library.custom_op("graphex_pending::tap_and_bump", mutates_args=("x",))
def tap_and_bump(x: Tensor, y: Tensor) -> None:
    x.add_(1)
    kept.extend([x, y])


@torch.library.custom_op("graphex_pending::seen", mutates_args=())
def seen(x: Tensor) -> Tensor:
    """The sum of everything that was kept, as it is now."""
    return x + sum(float(each.sum()) for each in kept)


@torch.library.custom_op("graphex_pending::forgetful", mutates_args=())
def forgetful(x: Tensor) -> Tensor:
    return x * 2


tap.register_fake(lambda x: x.new_empty(()))
tap_all.register_fake(lambda xs, y: (y.new_empty(()), y.new_empty(())))
seen.register_fake(torch.empty_like)
forgetful.register_fake(torch.empty_like)

ops = torch.ops.graphex_pending


@contextmanager
def declared() -> Iterator[None]:
    """`begin` and `begin_many` are known to work on until `finish`."""
    with ExitStack() as stack:
        for op in (ops.begin, ops.begin_many):
            stack.enter_context(graphex.register_asynchronous(op, waited_by=ops.finish))
        yield


def forget() -> None:
    kept.clear()
    _pending.clear()
