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
from graphex.compilation import Compilation, readable
from graphex.records import current_rank

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
        (folder / f"{_file_name(graph_name, moment)}.{kind}").write_bytes(text.encode(errors="backslashreplace"))
    except Exception as error:
        compilation.fall_back(graph_name, f"the graph is not dumped as {kind}", error)


def _file_name(graph_name: str, moment: str) -> str:
    rank = f"_rank_{rank}" if (rank := current_rank()) else ""
    return f"graph_{re.sub(r'[^0-9A-Za-z]+', '_', graph_name).strip('_')}_{moment}{rank}"


def as_python(gm: GraphModule) -> str:
    from graphex.evidence.output_code import write_output_code
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
