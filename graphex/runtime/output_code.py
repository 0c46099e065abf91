"""A generated program as a script that runs by itself: imports, bindings, the function, inputs of the right shape.

`write_output_code` is the text of output_code.py. The scripts that verification writes are made of its parts.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from graphex.quoting import kind_of, literal, value_text
from graphex.runtime.codegen import Code, generate
from graphex.torch_private.symbolic import hint_of

SMALL = 4096  # elements of a constant that are still written out

_HEADER = '''"""The program of one graph, as graphex runs it.

Written by graphex. Run it with: python output_code.py
"""

import importlib
import math
import operator

import torch
'''

NOT_WRITTEN = """def not_written(what):
    raise SystemExit(f"{what} cannot be written as text: put it where this script calls not_written, and run it again.")
"""

_MAIN = """if __name__ == "__main__":
    with torch.no_grad():
        results = forward(example_inputs())
    print("ran:", [tuple(result.shape) if isinstance(result, torch.Tensor) else result for result in results])
"""


def write_output_code(code: Code, gm: GraphModule) -> str:
    """The whole text of output_code.py."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    parts = [
        _HEADER,
        NOT_WRITTEN,
        bindings_text(code),
        code.source,
        f"def example_inputs():\n    return [{', '.join(_example(node) for node in placeholders)}]\n",
        _MAIN,
    ]
    return "\n\n".join(parts)


def bindings_text(code: Code) -> str:
    """An assignment for each free name of the program. Subgraphs become functions of their own."""
    lines = []
    for name, value in code.bindings.items():
        if isinstance(value, GraphModule):
            lines.append(_subgraph(name, value))
        elif type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_quantized:
            lines.append(f"{name} = {_tensor(value)}")
        else:
            lines.append(f"{name} = {code.texts[name] or not_written(value)}")
    return "\n".join(lines)


def not_written(value: object) -> str:
    """A call that ends the script with one sentence, in place of an object that has no text."""
    return f"not_written({literal(f'the {kind_of(value)} of this graph')})"


def _subgraph(name: str, gm: GraphModule) -> str:
    inner = generate(gm)
    body = "\n".join(f"    {line}" for line in f"{bindings_text(inner)}\n{inner.source}".splitlines())
    return f"def {name}():\n{body}\n    return lambda *args: forward(list(args))\n\n\n{name} = {name}()"


def _tensor(value: torch.Tensor) -> str:
    where = f"dtype={value.dtype}, device={literal(str(value.device))}"
    if "float4" in str(value.dtype):  # two numbers in a byte, which no list of numbers becomes
        return f"{_tensor(value.view(torch.uint8))}.view({value.dtype})"
    if value.numel() <= SMALL and value.dtype not in (torch.complex32,):
        return f"torch.tensor({value_text(value.detach().cpu().tolist())}, {where})"
    return f"torch.zeros({tuple(value.shape)}, {where})  # too large to write out; the values are not the real ones"


def _example(node: Node) -> str:
    """An expression for an input of the right shape, strides and type; symbols take the size they were traced with."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        size = tuple(hint_of(s, 8) for s in value.shape)
        stride = tuple(hint_of(s, 1) for s in value.stride()) if value.layout == torch.strided else ()
        return strided_text(value, size, stride)
    if isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool):
        return value_text(int(hint_of(value, 8)))
    if isinstance(value, torch.SymFloat):
        return "1.0"
    return value_text(value, not_written)


def strided_text(like: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], fill: str = "rand") -> str:
    """An expression for a tensor of the type and device of `like`: random numbers, or zeros for integers."""
    place = f"device={literal(str(like.device))}"
    extent = 0 if 0 in size else 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=False))
    filled = f"torch.{fill}({extent}, {place}).to({like.dtype})"
    if "float4" in str(like.dtype):  # nothing is converted to two numbers in a byte
        filled = f"torch.randint(256, ({extent},), dtype=torch.uint8, {place}).view({like.dtype})"
    elif not (like.is_floating_point() or like.is_complex()):
        filled = f"torch.zeros({extent}, {place}, dtype={like.dtype})"
    return f"{filled}.as_strided({size}, {stride})"
