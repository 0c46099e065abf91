"""dump_tensor_data: run a graph node by node and save what every node computes.

    <data_dump_dir>/worldsizeW_global_rankR/<node>_device_<d>_<count>.pt

and with `force_eager` every input and output of every node, for comparison with other tools:

    <data_dump_dir>/worldsizeW_global_rankR/graph_<n>/<step>/<node>-<target>.{INPUT|OUTPUT}.<i>[.<j>].<time>.npy

Types that NumPy has not are saved as wider ones there: bfloat16 and float8 as float32, complex32 as complex64; two
float4 in a byte stay the byte. A tensor that is no plain one is saved part by part (`...indices.<time>.npy`).
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from graphex.config import CompilerConfig
from graphex.debug.tensors import numbers, parts_of
from graphex.env import rank_and_size, written_whole
from graphex.errors import GraphexError
from graphex.quoting import file_name
from graphex.runtime.codegen import Boxed

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
        if n.op in ("placeholder", "output", "get_attr"):
            return super().run_node(n)
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

    def outputs(self, node: Node, result: Any) -> None:
        if not isinstance(result, torch.Tensor):
            return  # the parts of a tuple are saved by their getitem nodes
        where = result.device.index if result.device.index is not None else result.device.type
        for count in itertools.count():
            path = self._root / f"{file_name(node.name)}_device_{where}_{count}.pt"
            try:
                path.touch(exist_ok=False)  # another process may be counting too
            except FileExistsError:
                continue
            with written_whole(path) as file:
                torch.save(result.detach().cpu(), file)
            return


class _NumpySaver:
    """Every input and output of every node of every call, as .npy."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._steps = itertools.count()
        self._directory = root

    def begin(self) -> None:
        self._directory = self._root / str(next(self._steps))
        self._directory.mkdir(parents=True, exist_ok=True)

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
    """The values for NumPy, which has float16, and the wide types."""
    known = plain.dtype == torch.float16
    return (plain.resolve_neg() if known else numbers(plain)).numpy()
