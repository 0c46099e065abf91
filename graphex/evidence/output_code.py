"""A generated program as a script that runs by itself: imports, bindings, the function, inputs of the right shape."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from graphex.runtime.codegen import Code, generate
from graphex.torch_private.symbolic import hint_of

SMALL = 4096  # elements of a constant that are still written out

_HEADER = '''"""{title}

Written by graphex. Run it with: python {name}
"""

import math
import operator

import torch
from torch import device, inf, nan  # noqa: F401  (constants may be written with these)
'''

_MAIN = """if __name__ == "__main__":
    with torch.no_grad():
        results = forward(example_inputs())
    print("ran:", [tuple(result.shape) if isinstance(result, torch.Tensor) else result for result in results])
"""


def write_output_code(code: Code, gm: GraphModule) -> str:
    """The whole text of output_code.py."""
    parts = [
        _HEADER.format(title="The program of one graph, as graphex runs it.", name="output_code.py"),
        bindings_text(code),
        code.source,
        f"def example_inputs():\n    return [{', '.join(_example(node) for node in placeholders(gm))}]\n",
        _MAIN,
    ]
    return "\n\n".join(parts)


def placeholders(gm: GraphModule) -> list[Node]:
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


def bindings_text(code: Code) -> str:
    """An assignment for each free name of the program. Subgraphs become functions of their own."""
    lines = []
    for name, value in code.bindings.items():
        if isinstance(value, GraphModule):
            lines.append(_subgraph(name, value))
        elif isinstance(value, torch.Tensor):
            lines.append(f"{name} = {_tensor(value)}")
        elif code.texts[name]:
            text = code.texts[name]
            module = text.rsplit(".", 1)[0]
            if not text.startswith(("torch.", "operator.", "math.")) and module != text:
                lines.append(f"import {module}")
            lines.append(f"{name} = {text}")
        else:
            lines.append(f"{name} = None  # {type(value).__name__}: cannot be written as text")
    return "\n".join(lines)


def _subgraph(name: str, gm: GraphModule) -> str:
    inner = generate(gm)
    body = "\n".join(f"    {line}" for line in f"{bindings_text(inner)}\n{inner.source}".splitlines())
    return f"def _make_{name}():\n{body}\n    return lambda *args: forward(list(args))\n\n\n{name} = _make_{name}()"


def _tensor(value: torch.Tensor) -> str:
    where = f"dtype={value.dtype}, device={str(value.device)!r}"
    if "float4" in str(value.dtype):  # two numbers in a byte, which no list of numbers becomes
        return f"{_tensor(value.view(torch.uint8))}.view({value.dtype})"
    if value.numel() <= SMALL and value.dtype not in (torch.complex32,):
        return f"torch.tensor({value.detach().cpu().tolist()!r}, {where})"
    return f"torch.zeros({tuple(value.shape)}, {where})  # too large to write out; the values are not the real ones"


def _example(node: Node) -> str:
    """An expression for an input of the right shape, strides and type; symbols take the size they were traced with."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        size = tuple(hint_of(s, 8) for s in value.shape)
        stride = tuple(hint_of(s, 1) for s in value.stride()) if value.layout == torch.strided else ()
        where = f"dtype={value.dtype}, device={str(value.device)!r}"
        extent = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=False))
        if 0 in size:
            extent = 0
        source = f"torch.rand({extent}, device={str(value.device)!r}).to({value.dtype})"
        if "float4" in str(value.dtype):
            source = f"torch.zeros({extent}, dtype=torch.uint8, device={str(value.device)!r}).view({value.dtype})"
        elif not (value.is_floating_point() or value.is_complex()):
            source = f"torch.zeros({extent}, {where})"
        return f"torch.as_strided({source}, {size}, {stride})"
    if isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool):
        return repr(hint_of(value, 8))
    if isinstance(value, torch.SymFloat):
        return "1.0"
    return repr(value) if isinstance(value, (bool, float, type(None))) else "None"
