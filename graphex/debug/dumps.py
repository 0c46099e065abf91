"""The dumps that options ask for: graphs (`graph_dump_type`), and the tensors of every node (`dump_tensor_data`).

    <graph_dump_path>/graph_0_0_Net_inference_original.pbtxt
    <graph_dump_path>/graph_0_0_Net_inference_optimized.pbtxt

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

`dump_tensor_data` runs a graph node by node and saves its inputs and the tensors that nodes return:

    <data_dump_dir>/worldsizeW_global_rankR/<node>_device_<d>_<count>.pt

and with `force_eager` every input and output of every node, for comparison with other tools:

    <data_dump_dir>/worldsizeW_global_rankR/graph_<n>/<step>/<node>-<target>.{INPUT|OUTPUT}.<i>[.<j>].<time>.npy

Types that NumPy lacks are saved there as wider ones: bfloat16 and float8 as float32, complex32 as complex64; two
float4 in a byte stay the byte. A tensor that is not plain is saved part by part (`...indices.<time>.npy`).
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from graphex.analysis import node_line
from graphex.config import CompilerConfig
from graphex.debug.scripts import write_output_code
from graphex.debug.tensors import numbers, parts_of
from graphex.env import numbered, rank_and_size, write_text
from graphex.errors import GraphexError
from graphex.quoting import file_name
from graphex.rewrite.compilation import Compilation, readable
from graphex.runtime.codegen import Boxed, generate

# -- graphs ------------------------------------------------------------------------------------------------------------


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
    """Write one graph, if the options ask for it. A graph that cannot be written is recorded, and the model runs."""
    kind = compilation.config.graph_dump_type
    if kind is None:
        return
    try:
        text = _WRITERS[kind](gm)
        folder = Path(compilation.config.graph_dump_path)
        folder.mkdir(parents=True, exist_ok=True)
        name = _file_name(f"{compilation.compile_id} {graph_name}", moment)  # unique in the process by the id
        write_text(folder / f"{name}.{kind}", text)
    except Exception as error:
        compilation.fall_back(graph_name, f"the graph is not dumped as {kind}", error)


def _file_name(graph_name: str, moment: str) -> str:
    rank, _ = rank_and_size()
    name = f"graph_{re.sub(r'[^0-9A-Za-z]+', '_', graph_name).strip('_')}_{moment}"
    return f"{name}_rank_{rank}" if rank else name


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
        return str(node.target if hasattr(node.target, "_schema") else getattr(node.target, "__name__", node.target))
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


_WRITERS: dict[str, Callable[[GraphModule], str]] = {
    "txt": readable,
    "py": lambda gm: write_output_code(generate(gm), gm),
    "pbtxt": as_graph_def,
}


# -- tensors -----------------------------------------------------------------------------------------------------------


_graph_numbers = itertools.count(1)


def dumping_executable(gm: GraphModule, config: CompilerConfig, counter: Counter[str]) -> Boxed:
    """A boxed callable that runs `gm` and saves its tensors."""
    rank, size = rank_and_size()
    root = Path(config.data_dump_dir) / f"worldsize{size}_global_rank{rank}"
    root.mkdir(parents=True, exist_ok=True)
    saver = _NumpySaver(root / f"graph_{next(_graph_numbers)}") if config.force_eager else _TorchSaver(root)

    def run(args: list[Any]) -> Any:
        given = list(args)
        args.clear()
        counter["calls"] += 1
        saver.begin()
        return _Dumping(gm, saver).run(*given)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class _Dumping(Interpreter):
    def __init__(self, gm: GraphModule, saver: _TorchSaver | _NumpySaver) -> None:
        super().__init__(gm)
        self._saver = saver

    def run_node(self, n: Node) -> Any:
        if n.op in ("output", "get_attr"):
            return super().run_node(n)
        if n.op == "placeholder":
            given = super().run_node(n)
            self._saver.given(n, given)
            return given
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        self._saver.inputs(n, [*args, *kwargs.values()])
        result = super().run_node(n)
        self._saver.outputs(n, result)
        return result


class _TorchSaver:
    """One .pt file for each tensor a node returns; the count keeps calls apart."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def begin(self) -> None: ...

    def inputs(self, node: Node, values: list[Any]) -> None: ...

    def given(self, node: Node, value: Any) -> None:
        """An input of the graph."""
        self.outputs(node, value)

    def outputs(self, node: Node, result: Any) -> None:
        if not isinstance(result, torch.Tensor):
            return  # the parts of a tuple are saved by their getitem nodes
        where = result.device.index if result.device.index is not None else result.device.type
        with numbered(f"{self._root / file_name(node.name)}_device_{where}_", ".pt") as file:
            torch.save(result.detach().cpu(), file)


class _NumpySaver:
    """Every input and output of every node of every call, as .npy."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._steps = itertools.count()
        self._directory = root

    def begin(self) -> None:
        self._directory = self._root / str(next(self._steps))
        self._directory.mkdir(parents=True, exist_ok=True)

    def given(self, node: Node, value: Any) -> None:
        """Inputs of the graph are inputs of its nodes, which have them."""

    def inputs(self, node: Node, values: list[Any]) -> None:
        self._save(node, "INPUT", values)

    def outputs(self, node: Node, result: Any) -> None:
        self._save(node, "OUTPUT", [result])

    def _save(self, node: Node, direction: str, values: list[Any]) -> None:
        try:
            import numpy
        except ImportError as error:
            raise GraphexError(
                "dump_tensor_data with force_eager writes .npy files, which needs NumPy: pip install 'graphex[dump]'."
            ) from error
        call = f"{file_name(node.name)}-{file_name(str(node.target))}"
        for index, value in enumerate(values):
            parts = enumerate(value) if isinstance(value, (list, tuple)) else [(None, value)]
            for part, tensor in parts:
                if not isinstance(tensor, torch.Tensor):
                    continue
                place = str(index) if part is None else f"{index}.{part}"
                for name, plain in parts_of(tensor).tensors.items():
                    stem = ".".join(filter(None, (call, direction, place, name.strip("_[]"))))
                    numpy.save(self._directory / f"{stem}.{time.time_ns()}.npy", _array(plain.cpu()))


def _array(plain: torch.Tensor) -> Any:
    """The values in a type that NumPy has: float16 as it is, other small floats widened."""
    known = plain.dtype == torch.float16
    return (plain.resolve_neg() if known else numbers(plain)).numpy()
