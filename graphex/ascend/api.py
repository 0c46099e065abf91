"""The functions of torchair and npugraph_ex. What graphex has under another name is used as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from graphex.ascend.config import CompilerConfig, FlatConfig, Group, flat_config, translated
from graphex.errors import InputError
from graphex.records import Journal


def get_npu_backend(
    *, compiler_config: Group | None = None, custom_decompositions: Mapping[Any, Any] | None = None
) -> Any:
    """A backend for `torch.compile`, configured by TorchAir's or npugraph_ex's options."""
    from graphex.backend import get_backend

    journal = Journal()
    config = translated(_checked(compiler_config), journal)
    backend = get_backend(config, dict(custom_decompositions or {}))
    backend.journal = journal
    return backend


def get_compiler(compiler_config: Group | None = None) -> Callable[[GraphModule, Sequence[Any]], Any]:
    """A compiler of ATen graphs, for people who call AOTAutograd themselves."""
    from graphex.backend import compile_aten_graph

    journal = Journal()
    config = translated(_checked(compiler_config), journal)

    def compiler(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        return compile_aten_graph(gm, example_inputs, config, journal)

    return compiler


def compile_fx(gm: GraphModule, example_inputs: Sequence[Any] | None = None, options: Any = None) -> Any:
    """`npugraph_ex.compile_fx`: all options, no stream and event calls to rewrite."""
    from graphex.backend import compile_aten_graph

    journal = Journal()
    given = options if isinstance(options, Group) else flat_config(options)
    return compile_aten_graph(gm, example_inputs, translated(given, journal), journal)


def npugraph_ex_backend(
    gm: GraphModule, example_inputs: Sequence[Any], *, mode: Any = None, options: Any = None
) -> Any:
    """What `torch.compile(model, backend="npugraph_ex", options=...)` calls for every graph it finds."""
    from graphex.backend import compile_by_name

    return compile_by_name(gm, example_inputs, lambda journal: translated(flat_config(options, mode), journal))


npugraph_ex_backend.is_graphex = True  # type: ignore[attr-defined]


def register_replacement(*args: Any, **kwargs: Any) -> Any:
    """graphex's, which takes what theirs takes and gives a handle back."""
    from graphex.fusion.register import register_replacement

    return register_replacement(*args, **kwargs)


def use_internal_format_weight(model: Any) -> None:
    """Private memory formats of the NPU are not here: weights stay as they are."""


def get_npugraph_ex_backend(
    *, compiler_config: Group | None = None, custom_decompositions: Mapping[Any, Any] | None = None
) -> Any:
    """`npugraph_ex.get_npu_backend`: the same with a flat configuration."""
    config = compiler_config if compiler_config is not None else FlatConfig()
    return get_npu_backend(compiler_config=config, custom_decompositions=custom_decompositions)


def _checked(config: object) -> Group:
    if config is None:
        return CompilerConfig()
    if not isinstance(config, Group):
        kind = f"{type(config).__module__}.{type(config).__qualname__}"
        raise InputError(f"compiler_config must be a torchair.CompilerConfig, got {kind}.")
    return config
