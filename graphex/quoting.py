"""Quoting: text and values of a user's program in the code, scripts, comments and file names that graphex writes.

    literal(text)           'a\\nb', an expression for exactly this text
    remark(text)            a\\nb, for a comment
    identifier("max")       max_
    file_name("../a")       .._a
    attribute("x", "a-b")   getattr(x, 'a-b')
    value_text([1, inf])    [1, float('inf')]
    object_text(f)          importlib.import_module('module').f

`literal` is the one place that quotes. Values are written by their exact type: a subclass may print anything as itself,
so no `repr` but that of a built-in type is ever code.
"""

from __future__ import annotations

import builtins
import keyword
import math
import re
import sys
from collections.abc import Callable
from types import EllipsisType, NoneType
from typing import Any

import torch
from torch.fx.immutable_collections import immutable_dict, immutable_list

LONGEST_FILE_NAME = 100  # of the 255 bytes that a system allows, in ASCII
LONGEST_REMARK = 200
_LONGEST_NAME = 200
_DECIMAL_BITS = 2048  # Python refuses to read and write longer numbers in decimals
_IMPORTED = ("torch", "operator", "math")  # what every script imports

Other = Callable[[Any], str]


def literal(text: str) -> str:
    """An expression for this text, in ASCII and on one line, whatever is in it."""
    return ascii(str.__str__(text))


def remark(text: str) -> str:
    """Text for a comment: on one line, and not without end."""
    shown = literal(text)[1:-1]
    return shown if len(shown) <= LONGEST_REMARK else f"{shown[:LONGEST_REMARK]}..."


def identifier(text: str) -> str:
    """A name of Python's that is neither a keyword nor a builtin."""
    name = re.sub(r"[^0-9A-Za-z_]", "_", text)[:_LONGEST_NAME]
    if not name or name[0].isdigit():
        name = f"_{name}"
    return f"{name}_" if keyword.iskeyword(name) or hasattr(builtins, name) else name


def is_identifier(text: object) -> bool:
    """Whether a text can stand in code as a name and means itself there; Python folds letters beyond ASCII."""
    return type(text) is str and text.isascii() and text.isidentifier() and not keyword.iskeyword(text)


def file_name(text: str) -> str:
    """A part of a file's name: it leads to no other folder, and is not without end."""
    return re.sub(r"[^0-9A-Za-z_.-]", "_", text)[:LONGEST_FILE_NAME]


def attribute(owner: str, *path: str) -> str:
    """`owner.a.b`, for attributes of any name."""
    for name in path:
        owner = f"{owner}.{name}" if is_identifier(name) else f"getattr({owner}, {literal(name)})"
    return owner


# -- values -----------------------------------------------------------------------------------------------------------


def value_text(value: Any, other: Other | None = None) -> str:
    """An expression for numbers, texts and plain containers of them; `other` writes whatever else is met.

    Raises TypeError where there is no `other`.
    """
    writer = _WRITERS.get(type(value))
    if writer is not None:
        return writer(value, other)
    if other is None:
        raise TypeError(f"{kind_of(value)} cannot be written as text")
    return other(value)


def kind_of(value: object) -> str:
    """`numpy.float64`"""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _integer(value: int, _: Other | None) -> str:
    return repr(value) if value.bit_length() < _DECIMAL_BITS else hex(value)


def _float(value: float, _: Other | None) -> str:
    return repr(value) if math.isfinite(value) else f"float('{value}')"


def _complex(value: complex, _: Other | None) -> str:
    return f"complex({_float(value.real, _)}, {_float(value.imag, _)})"


def _tuple(value: tuple[Any, ...], other: Other | None) -> str:
    return f"({''.join(f'{value_text(item, other)}, ' for item in value)})"


def _list(value: list[Any], other: Other | None) -> str:
    return f"[{', '.join(value_text(item, other) for item in value)}]"


def _dict(value: dict[Any, Any], other: Other | None) -> str:
    return f"{{{', '.join(f'{value_text(k, other)}: {value_text(v, other)}' for k, v in value.items())}}}"


def _slice(value: slice, other: Other | None) -> str:
    return f"slice({', '.join(value_text(edge, other) for edge in (value.start, value.stop, value.step))})"


_WRITERS: dict[type, Callable[[Any, Other | None], str]] = {
    NoneType: lambda value, _: "None",
    EllipsisType: lambda value, _: "...",
    bool: lambda value, _: repr(value),
    int: _integer,
    float: _float,
    complex: _complex,
    str: lambda value, _: literal(value),
    bytes: lambda value, _: repr(value),
    tuple: _tuple,
    list: _list,
    immutable_list: _list,
    dict: _dict,
    immutable_dict: _dict,
    slice: _slice,
}


# -- objects ----------------------------------------------------------------------------------------------------------


def object_text(value: Any) -> str:
    """An expression for an object that has one: a type of torch's, a device, an op, a function of a module.

    Empty for everything else, and where the expression would not give this very object.
    """
    if type(value) in (torch.dtype, torch.layout, torch.memory_format, torch.qscheme):
        return str(value)
    if type(value) is torch.device:
        return f"torch.device({literal(str(value))})"
    if isinstance(value, torch._ops.OpOverload):
        return op_text(value)
    if isinstance(value, torch._ops.HigherOrderOperator):
        return attribute("torch.ops.higher_order", value.name())
    return _global_text(value)


def op_text(op: torch._ops.OpOverload) -> str:
    """`torch.ops.aten.add.Tensor`"""
    return attribute("torch.ops", op.namespace, op._schema.name.split("::", 1)[1], op._overloadname)


def module_text(name: str) -> str:
    return name if name in _IMPORTED else f"importlib.import_module({literal(name)})"


def _global_text(value: Any) -> str:
    """A function or class under the name that it says it has, if it is found there."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if type(module) is not str or type(name) is not str or module == "__main__":
        return ""
    module, path = "operator" if module == "_operator" else module, name.split(".")
    found: Any = sys.modules.get(module)
    for part in path:
        found = getattr(found, part, None)
    return attribute(module_text(module), *path) if found is value else ""
