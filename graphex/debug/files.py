"""Graphs and tensors as files: scripts that run by themselves, and the dumps that options ask for.

`write_output_code` is the text of output_code.py: imports, bindings, the generated function, inputs of the right shape.
`write_repro` writes a script that shows that two versions of a graph disagree; `verify` calls it on a mismatch.

`graph_dump_type` asks for graphs:

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

import base64
import io
import itertools
import json
import re
import secrets
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from graphex.analysis import node_line
from graphex.config import CompilerConfig
from graphex.debug.tensors import numbers, parts_of
from graphex.env import numbered, rank_and_size, write_text
from graphex.errors import GraphexError
from graphex.quoting import file_name, kind_of, literal, value_text
from graphex.records import Verified
from graphex.rewrite.compilation import Compilation, DebugFiles, readable
from graphex.runtime.codegen import Boxed, Code, generate
from graphex.torch_private.symbolic import hint_of

# -- scripts -----------------------------------------------------------------------------------------------------------


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
    directory = files.directory or fresh_directory()
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
        inputs=_inputs_text(args),
    )
    write_text(path, text)
    return path


def fresh_directory() -> Path:
    return Path(tempfile.mkdtemp(prefix="graphex_repro_"))


def _body(gm: GraphModule) -> str:
    """The program of a graph inside of a function: what it binds, and `forward`."""
    code = generate(gm)
    return "\n".join(f"    {line}" for line in f"{bindings_text(code)}\n\n{code.source}".splitlines())


def _inputs_text(args: list[Any]) -> str:
    """The inputs themselves if they are small enough, random ones of the same layout if not."""
    tensors = [value.detach().cpu() for value in args if isinstance(value, torch.Tensor)]
    if sum(tensor.untyped_storage().nbytes() for tensor in tensors) <= LARGEST_INPUTS:
        stream = io.BytesIO()
        torch.save(tensors, stream)
        data = literal(base64.b64encode(zlib.compress(stream.getvalue())).decode())
        load = f"saved = iter(torch.load(io.BytesIO(zlib.decompress(base64.b64decode({data})))))"
        values = ", ".join(_argument_text(value, _saved) for value in args)
        return f"def example_inputs():\n    {load}\n    return [{values}]"
    shapes = ", ".join(_argument_text(value, _random) for value in args)
    remark = "# random: the real inputs are too large to keep here"
    return f"def example_inputs():  {remark}\n    torch.manual_seed(0)\n    return [{shapes}]"


def _argument_text(value: Any, tensor: Callable[[torch.Tensor], str]) -> str:
    return tensor(value) if isinstance(value, torch.Tensor) else value_text(value, not_written)


def _saved(value: torch.Tensor) -> str:
    return f"next(saved).to({literal(str(value.device))})"


def _random(value: torch.Tensor) -> str:
    return strided_text(value, tuple(value.shape), tuple(value.stride()), "randn")


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
    for source in _read_by(node):
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


def _read_by(node: Node) -> list[Node]:
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
    """The sizes of a tensor as a GraphDef has them: -1 for a symbol, which it does not know."""
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
        """An input of the graph: it is saved as an input of the nodes that read it."""

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
