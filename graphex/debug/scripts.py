"""Graphs as scripts that run by themselves.

`write_output_code` is the text of output_code.py: imports, bindings, the generated function, inputs of the right shape.
`write_repro` writes a script that shows that two versions of a graph disagree; `verify` calls it on a mismatch.
"""

from __future__ import annotations

import base64
import io
import secrets
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graphex.env import write_text
from graphex.quoting import file_name, kind_of, literal, value_text
from graphex.records import Verified
from graphex.rewrite.compilation import DebugFiles
from graphex.runtime.codegen import Code, generate
from graphex.torch_private.symbolic import hint_of

SMALL = 4096  # elements of a constant that are still written out
LARGEST_INPUTS = 16 * 2**20  # bytes of inputs that are still put into the script

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
    return f"def {name}():\n{_body(gm)}\n    return lambda *args: forward(list(args))\n\n\n{name} = {name}()"


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


# -- two versions of a graph that disagree -----------------------------------------------------------------------------

_SCRIPT = '''"""Two versions of a graph that disagree: before and after a pass, or a rule of it. Written by graphex.

The script needs torch and whatever defines the custom ops in it (if any), not graphex.
"""

import base64
import importlib
import io
import math
import operator
import zlib

import torch

KIND = {kind}
NAME = {name}
PROBLEM = {problem}


{not_written}

def before_pass():
{before}
    return forward


def after_pass():
{after}
    return forward


{inputs}


def values(tensor):
    is_packed = "float4" in str(tensor.dtype)
    return (tensor.view(torch.uint8) if is_packed else tensor).to(torch.complex128)


if __name__ == "__main__":
    print("the graphs before and after", KIND, ascii(NAME), "disagree:", ascii(PROBLEM)[1:-1])
    with torch.no_grad():
        given, given_again = example_inputs(), example_inputs()
        torch.manual_seed(0)
        wanted = before_pass()(list(given))
        torch.manual_seed(0)
        found = after_pass()(list(given_again))
    for kind, one, other in (("output", wanted, found), ("input", given, given_again)):
        for index, (a, b) in enumerate(zip(one, other)):
            if isinstance(a, torch.Tensor) and a.numel() and a.shape == b.shape:
                gap = (values(a) - values(b)).abs().max().item()
                if gap or kind == "output":
                    print(kind, index, "largest difference:", gap)
            elif isinstance(a, torch.Tensor) and (kind == "output" or a.shape != b.shape):
                print(kind, index, "shapes:", tuple(a.shape), tuple(b.shape))
            elif not isinstance(a, torch.Tensor) and kind == "output":
                print(kind, index, a, b)
'''


def write_repro(found: Verified, before: GraphModule, after: GraphModule, args: list[Any], files: DebugFiles) -> Path:
    """Write the script beside the debug files, or into a fresh temporary directory, and say where it is.

    Its name is that of the rules to blame, or else of the pass.
    """
    directory = files.directory or Path(tempfile.mkdtemp(prefix="graphex_repro_"))
    base = f"repro_{file_name('_'.join(found.rules) or found.pass_name)}"
    path = directory / f"{base}.py"
    while path.exists():  # about another graph, or a pass whose name looks like this one's
        path = directory / f"{base}_{secrets.token_hex(4)}.py"
    text = _SCRIPT.format(
        kind=literal("rule" if found.rules else "pass"),
        name=literal(", ".join(found.rules) or found.pass_name),
        problem=literal(found.reason),
        not_written=NOT_WRITTEN,
        before=_body(before),
        after=_body(after),
        inputs=_inputs(args),
    )
    write_text(path, text)
    return path


def _body(gm: GraphModule) -> str:
    """The program of a graph inside of a function: what it binds, and `forward`."""
    code = generate(gm)
    return "\n".join(f"    {line}" for line in f"{bindings_text(code)}\n\n{code.source}".splitlines())


def _inputs(args: list[Any]) -> str:
    """The inputs themselves if they are small enough, random ones of the same layout if not."""
    tensors = [value.detach().cpu() for value in args if isinstance(value, torch.Tensor)]
    if sum(tensor.untyped_storage().nbytes() for tensor in tensors) <= LARGEST_INPUTS:
        stream = io.BytesIO()
        torch.save(tensors, stream)
        data = literal(base64.b64encode(zlib.compress(stream.getvalue())).decode())
        load = f"saved = iter(torch.load(io.BytesIO(zlib.decompress(base64.b64decode({data})))))"
        return f"def example_inputs():\n    {load}\n    return [{', '.join(_given(value, _saved) for value in args)}]"
    shapes = ", ".join(_given(value, _random) for value in args)
    remark = "# random: the real inputs are too large to keep here"
    return f"def example_inputs():  {remark}\n    torch.manual_seed(0)\n    return [{shapes}]"


def _given(value: Any, tensor: Callable[[torch.Tensor], str]) -> str:
    return tensor(value) if isinstance(value, torch.Tensor) else value_text(value, not_written)


def _saved(value: torch.Tensor) -> str:
    return f"next(saved).to({literal(str(value.device))})"


def _random(value: torch.Tensor) -> str:
    return strided_text(value, tuple(value.shape), tuple(value.stride()), "randn")
