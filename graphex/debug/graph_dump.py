"""`graph_dump_type`: a graph before and after optimisation, as a file.

    <graph_dump_path>/graph_0_0_inference_original.pbtxt
    <graph_dump_path>/graph_0_0_inference_optimized.pbtxt

txt is the graph with types, strides and devices; py is a script that runs the graph by itself; pbtxt is a TensorFlow
GraphDef in text form, which Netron and TensorBoard draw:

    node {
      name: "mm"
      op: "aten.mm.default"
      input: "arg0_1"
      input: "arg0_1"
      device: "npu:0"
      attr { key: "T" value { type: DT_FLOAT } }
    }
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graphex.analysis import node_line
from graphex.env import rank_and_size, write_text
from graphex.quoting import kind_of, literal, value_text
from graphex.rewrite.compilation import Compilation, readable
from graphex.runtime.codegen import Code, generate
from graphex.torch_private.symbolic import hint_of

# -- output_code -------------------------------------------------------------------------------------------------------
# A generated program as a script that runs by itself: imports, bindings, the function, inputs of the right shape.


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
    parts = [
        _HEADER,
        NOT_WRITTEN,
        bindings_text(code),
        code.source,
        f"def example_inputs():\n    return [{', '.join(_example(node) for node in placeholders(gm))}]\n",
        _MAIN,
    ]
    return "\n\n".join(parts)


def placeholders(gm: GraphModule) -> list[Node]:
    return gm.graph.find_nodes(op="placeholder")


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
        place = literal(str(value.device))
        extent = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=False))
        if 0 in size:
            extent = 0
        source = f"torch.rand({extent}, device={place}).to({value.dtype})"
        if "float4" in str(value.dtype):
            source = f"torch.zeros({extent}, dtype=torch.uint8, device={place}).view({value.dtype})"
        elif not (value.is_floating_point() or value.is_complex()):
            source = f"torch.zeros({extent}, dtype={value.dtype}, device={place})"
        return f"torch.as_strided({source}, {size}, {stride})"
    if isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool):
        return value_text(int(hint_of(value, 8)))
    if isinstance(value, torch.SymFloat):
        return "1.0"
    return value_text(value, not_written)


# -- graph_dump --------------------------------------------------------------------------------------------------------


_DTYPES = {
    torch.float32: "DT_FLOAT",
    torch.float64: "DT_DOUBLE",
    torch.float16: "DT_HALF",
    torch.bfloat16: "DT_BFLOAT16",
    torch.int8: "DT_INT8",
    torch.int16: "DT_INT16",
    torch.int32: "DT_INT32",
    torch.int64: "DT_INT64",
    torch.uint8: "DT_UINT8",
    torch.bool: "DT_BOOL",
    torch.complex64: "DT_COMPLEX64",
    torch.complex128: "DT_COMPLEX128",
    torch.float8_e4m3fn: "DT_FLOAT8_E4M3FN",
    torch.float8_e5m2: "DT_FLOAT8_E5M2",
}


def dump_graph(compilation: Compilation, gm: GraphModule, graph_name: str, moment: str) -> None:
    """Write one graph, if it was asked for. What cannot be written is on record, and the model runs."""
    kind = compilation.config.graph_dump_type
    if kind is None:
        return
    try:
        text = _WRITERS[kind](gm)
        folder = Path(compilation.config.graph_dump_path)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / f"{_file_name(graph_name, moment)}.{kind}", text)
    except Exception as error:
        compilation.fall_back(graph_name, f"the graph is not dumped as {kind}", error)


def _file_name(graph_name: str, moment: str) -> str:
    rank, _ = rank_and_size()
    name = f"graph_{re.sub(r'[^0-9A-Za-z]+', '_', graph_name).strip('_')}_{moment}"
    return f"{name}_rank_{rank}" if rank else name


def as_python(gm: GraphModule) -> str:
    pass
    from graphex.runtime.codegen import generate

    return write_output_code(generate(gm), gm)


def as_graph_def(gm: GraphModule) -> str:
    """The graph in the text form of a GraphDef."""
    return (
        "".join(f"node {{\n{_indented(_fields(node))}}}\n" for node in gm.graph.nodes)
        + "versions {\n  producer: 1\n}\n"
    )


def _fields(node: Node) -> Iterator[str]:
    yield f"name: {_quoted(node.name)}"
    yield f"op: {_quoted(_op(node))}"
    for source in _inputs(node):
        yield f"input: {_quoted(source.name)}"
    value = node.meta.get("val")
    tensors = [each for each in (value if isinstance(value, (list, tuple)) else [value]) if torch.is_tensor(each)]
    if tensors:
        yield f"device: {_quoted(str(tensors[0].device))}"
        yield _attribute("T", f"type: {_DTYPES.get(tensors[0].dtype, 'DT_INVALID')}")
        shapes = " ".join(f"shape {{ {_shape(tensor)} }}" for tensor in tensors)
        yield _attribute("_output_shapes", f"list {{ {shapes} }}")
    for place, constant in _constants(node):
        yield _attribute(place, f"s: {_quoted(repr(constant))}")
    if stream := (node.meta.get("custom") or {}).get("stream"):
        yield _attribute("stream", f"s: {_quoted(str(stream))}")
    if line := node_line(node):
        yield _attribute("source", f"s: {_quoted(line)}")


def _op(node: Node) -> str:
    if node.op == "call_function":
        return (
            str(getattr(node.target, "__name__", node.target))
            if not hasattr(node.target, "_schema")
            else str(node.target)
        )
    return {"placeholder": "Placeholder", "get_attr": "Const", "output": "Output"}.get(node.op, str(node.target))


def _inputs(node: Node) -> list[Node]:
    """Arguments in their order, each as often as it is used."""
    found: list[Node] = []
    torch.fx.map_arg((node.args, node.kwargs), lambda value: found.append(value))
    return found


def _constants(node: Node) -> Iterator[tuple[str, Any]]:
    if node.op in ("placeholder", "output"):
        return
    if node.op == "get_attr":
        yield "target", node.target
    named = [(f"arg{place}", value) for place, value in enumerate(node.args)] + list(node.kwargs.items())
    for name, value in named:
        if not isinstance(value, Node):
            yield name, value


def _shape(tensor: torch.Tensor) -> str:
    """A size that is a symbol is unknown to a GraphDef: -1."""
    return " ".join(f"dim {{ size: {size if isinstance(size, int) else -1} }}" for size in tensor.shape)


def _attribute(key: str, value: str) -> str:
    return f"attr {{ key: {_quoted(key)} value {{ {value} }} }}"


def _quoted(text: str) -> str:
    return json.dumps(text)  # the escapes of protobuf's text form are among JSON's, for ASCII


def _indented(lines: Iterator[str]) -> str:
    return "".join(f"  {line}\n" for line in lines)


_WRITERS = {"txt": readable, "py": as_python, "pbtxt": as_graph_def}
