"""A script that shows, by itself, that two versions of a graph disagree. `verify` writes it beside the debug files."""

from __future__ import annotations

import base64
import io
import secrets
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from graphex.env import write_text
from graphex.quoting import file_name, literal, value_text
from graphex.rewrite.compilation import DebugFiles
from graphex.runtime.codegen import generate
from graphex.runtime.output_code import NOT_WRITTEN, bindings_text, not_written, strided_text

LARGEST_INPUTS = 16 * 2**20  # bytes of inputs that are still put into the script

_SCRIPT = '''"""Two versions of a graph, before and after a pass, that disagree. Written by graphex.

The script needs torch and whatever defines the custom ops in it (if any), not graphex.
"""

import base64
import importlib
import io
import math
import operator
import zlib

import torch

PASS = {name}
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
    print("the graphs before and after pass", ascii(PASS), "disagree:", ascii(PROBLEM)[1:-1])
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
                print(kind, index, "largest difference:", gap)
            elif isinstance(a, torch.Tensor):
                print(kind, index, "shapes:", tuple(a.shape), tuple(b.shape))
            else:
                print(kind, index, a, b)
'''


def write_repro(
    name: str, problem: str, before: GraphModule, after: GraphModule, args: list[Any], files: DebugFiles
) -> Path:
    """Write the script beside the debug files, or into a fresh temporary directory, and say where it is."""
    directory = files.directory or Path(tempfile.mkdtemp(prefix="graphex_repro_"))
    base = f"repro_{file_name(name)}"
    path = directory / f"{base}.py"
    while path.exists():  # about another graph, or a pass whose name looks like this one's
        path = directory / f"{base}_{secrets.token_hex(4)}.py"
    text = _SCRIPT.format(
        name=literal(name),
        problem=literal(problem),
        not_written=NOT_WRITTEN,
        before=_function(before),
        after=_function(after),
        inputs=_inputs(args),
    )
    write_text(path, text)
    return path


def _function(gm: GraphModule) -> str:
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
        return f"def example_inputs():\n    {load}\n    return [{', '.join(map(_saved, args))}]"
    shapes = ", ".join(_random(value) for value in args)
    remark = "# random: the real inputs are too large to keep here"
    return f"def example_inputs():  {remark}\n    torch.manual_seed(0)\n    return [{shapes}]"


def _saved(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return value_text(value, not_written)
    return f"next(saved).to({literal(str(value.device))})"


def _random(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return value_text(value, not_written)
    return strided_text(value, tuple(value.shape), tuple(value.stride()), "randn")
