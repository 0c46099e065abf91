"""Run by the tests in a process of its own: graphex in a torch that lacks some names.

    python -m tests.torch_private.without '[["torch._C._nn"], ["torch._guards.TracingContext.try_get"]]'

For each list of names a forked process imports graphex and compiles a model. A line of JSON says how that went.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._functorch.aot_autograd
import torch._inductor.config

ROOT = Path(__file__).parents[2]
LOOKUP = "graphex.torch_private.lookup"
NOT_IMPORTED = "graphex.__main__"  # it runs the command line


def hide(names: Sequence[str]) -> None:
    """Before graphex is imported: its lookups do not find these names."""
    path = ROOT / "graphex" / "torch_private" / "lookup.py"
    spec = importlib.util.spec_from_file_location(LOOKUP, path)
    assert spec is not None
    assert spec.loader is not None
    lookup = importlib.util.module_from_spec(spec)
    sys.modules[LOOKUP] = lookup
    spec.loader.exec_module(lookup)
    find = lookup.find

    def find_others(path: str) -> Any:
        if any(path == name or path.startswith(f"{name}.") for name in names):
            raise AttributeError(path)
        return find(path)

    lookup.find = find_others


def compile_without(names: Sequence[str], *, every_module: bool) -> dict[str, Any]:
    hide(names)
    import graphex
    from graphex.torch_private.lookup import missing_names

    if every_module:
        for module in map(_module_name, sorted((ROOT / "graphex").rglob("*.py"))):
            if not module.startswith(NOT_IMPORTED):
                import_module(module)
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.randn(2, 4)
    state = torch.zeros(2, 4)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state.add_(1)
        return model(x).sin() + state, x[1:]

    backend = graphex.get_backend()
    found = torch.compile(step, backend=backend)(x)
    state.zero_()
    wanted = step(x)
    found[0].sum().backward()
    missing = missing_names()
    try:
        import_module("graphex.ascend").serve()
        npu = ""
    except graphex.InputError as error:
        npu = str(error)
    records = [(record.what, record.reason) for record in backend.journal.fallbacks]
    return {
        "equal": all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True)),
        "missing": missing,
        "records": records,
        "npu": npu,
        "graphs": len(backend.journal.graphs),
    }


def _module_name(source: Path) -> str:
    parts = source.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def main(lists: Sequence[Sequence[str]]) -> None:
    for names in lists:
        if os.fork():
            os.wait()
            continue
        warnings.simplefilter("ignore")
        try:
            said = compile_without(names, every_module=names == lists[0])
        except BaseException:
            said = {"error": traceback.format_exc()}
        print(json.dumps({"without": names, **said}), flush=True)
        os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
