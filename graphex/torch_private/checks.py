"""Conditions on the arguments of an op, which torch can also hold against symbolic sizes."""

from __future__ import annotations

from collections.abc import Callable

from graphex.torch_private.lookup import private

__all__ = ["require", "require_implemented"]

Check = Callable[..., None]


def _raising(kind: type[Exception]) -> Check:
    def check(condition: bool, message: Callable[[], str]) -> None:
        if not condition:
            raise kind(message())

    return check


require: Check = private("torch._check", _raising(RuntimeError))
require_implemented: Check = private("torch._check_not_implemented", _raising(NotImplementedError))
