"""Inductor: the standalone entry point that compiles a region, and the code that it makes.

Without these names nothing is compiled in regions; graphs run as straight-line code.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from torch.fx import GraphModule

from graphex.torch_private.lookup import find
from graphex.torch_private.symbolic import FakeTensorMode

__all__ = [
    "OutputCode",
    "inductor_compile",
    "inductor_settings",
    "known_settings",
    "packed_code",
    "unpacked_code",
    "without_inductor",
]

OutputCode = Any  # Inductor's CompiledFxGraph: called with a list that it empties; has `source_code`, `output_strides`

_MODULE = "torch._inductor.standalone_compile"  # importing it hides the function of the same name in torch._inductor
_NAMES = (
    "torch._inductor.compile_fx.compile_fx_inner",
    "torch._functorch.config.patch",
    "torch._guards.tracing",
    "torch._guards.TracingContext",
)


def without_inductor() -> str:
    """Why this torch cannot compile a region; empty if it can. Importing Inductor takes a second, the first time."""
    try:
        _entry()
        for path in _NAMES:
            find(path)
    except (ImportError, AttributeError) as error:
        return f"this torch has no Inductor as graphex knows it ({error})"
    return ""


def known_settings(patches: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that this Inductor knows: names come and go between versions of torch."""
    known = find("torch._inductor.config").get_config_copy()
    return {name: value for name, value in patches.items() if name in known}


def inductor_settings() -> dict[str, Any]:
    """All of Inductor's configuration that decides what it compiles, functions included, less paths and the like."""
    config = find("torch._inductor.config")
    everything: dict[str, Any] = config.get_config_copy()
    portable: dict[str, Any] = getattr(config, "save_config_portable", config.get_config_copy)()
    return portable | {name: value for name, value in everything.items() if callable(value)}


def _entry() -> Callable[..., Any]:
    entry: Callable[..., Any] = import_module(_MODULE).standalone_compile
    return entry


def inductor_compile(
    gm: GraphModule,
    inputs: Sequence[Any],
    fake_mode: FakeTensorMode,
    patches: Mapping[str, Any],
    inlined: Mapping[Any, Callable[..., Any]],
) -> tuple[Callable[..., Any], list[tuple[GraphModule, OutputCode]]]:
    """Compile a functional graph for fake inputs: the callable, and the graphs that Inductor was given with their code.

    `inlined` are ops with functions that are traced in their place.

    Guards on symbolic sizes go to the shape environment of `fake_mode`. AOTAutograd's cache is off, because a hit would
    not hand out the code; Inductor's own cache is on. Outside of a compilation of Dynamo's, in the middle of a call for
    one, dispatch keys may be off in this thread that tracing needs: then another thread compiles.
    """
    if find("torch._guards.TracingContext").try_get() is not None:
        return _compile(gm, inputs, fake_mode, patches, inlined)
    with ThreadPoolExecutor(1) as other_thread:
        return other_thread.submit(_compile, gm, inputs, fake_mode, patches, inlined).result()


def _compile(
    gm: GraphModule,
    inputs: Sequence[Any],
    fake_mode: FakeTensorMode,
    patches: Mapping[str, Any],
    inlined: Mapping[Any, Callable[..., Any]],
) -> tuple[Callable[..., Any], list[tuple[GraphModule, OutputCode]]]:
    compile_inner = find("torch._inductor.compile_fx.compile_fx_inner")
    made: list[tuple[GraphModule, OutputCode]] = []

    def inner(graph: GraphModule, examples: Sequence[Any], **options: Any) -> OutputCode:
        code = compile_inner(graph, examples, **options)
        made.append((graph, code))
        return code

    without_cache = find("torch._functorch.config").patch(enable_autograd_cache=False)
    with _tracing(fake_mode), _floats_are_tensors(fake_mode), without_cache:
        options: dict[str, Any] = {"inner_compile": inner, "config_patches": dict(patches)}
        if inlined:
            options["decompositions"] = {**find("torch._inductor.decomposition.select_decomp_table")(), **inlined}
        artifact = _entry()(gm, list(inputs), dynamic_shapes="from_tracing_context", options=options)
    return artifact, made


@contextmanager
def _floats_are_tensors(fake_mode: FakeTensorMode) -> Iterator[None]:
    """Float arguments of the user's call are tensors in a region: AOTAutograd has made them so in the whole graph.

    In the region it finds the symbol of such a float and no op that reads it, and would have Dynamo trace again, with a
    constant in its place. Floats that Dynamo has been asked to make constants are none to ask for again.
    """
    asked = find("torch._dynamo.symbolic_convert.TensorifyState").force_specializations
    sizes: Any = fake_mode.shape_env
    values = sizes.backed_var_to_val if hasattr(sizes, "backed_var_to_val") else getattr(sizes, "var_to_val", {})
    added = {str(symbol) for symbol in values} - asked
    asked |= added
    try:
        yield
    finally:
        asked -= added


# -- code for another process ------------------------------------------------------------------------------------------


def packed_code(code: OutputCode) -> bytes:
    """Compiled code as bytes, with the binaries of its Triton kernels. Raises whatever stands in the way."""
    if not isinstance(code, find("torch._inductor.output_code.CompiledFxGraph")):
        raise TypeError(f"this Inductor returns {type(code).__name__}")
    portable = copy.copy(code)
    portable.prepare_for_serialization()
    return pickle.dumps(portable)


def unpacked_code(
    data: bytes, inputs: Sequence[Any], fake_mode: FakeTensorMode, patches: Mapping[str, Any]
) -> OutputCode:
    """The code that was packed, to be called here. `data` must come from a file that only this user can have written.

    The steps are those of Inductor's own cache after a hit.
    """
    cache, boxed = find("torch._inductor.codecache.FxGraphCache"), find("torch._inductor.utils.BoxedBool")
    constants = find("torch._inductor.output_code.CompiledFxGraphConstants")()
    with _tracing(fake_mode), find("torch._inductor.config").patch(dict(patches)):
        code, _ = cache.cache_hit_post_compile(pickle.loads(data), {}, constants)
        if code is None:
            raise OSError("Inductor cannot write the code to its folder")
        code.post_compile(list(inputs), constants, {"cudagraphs": boxed(False), "is_backward": False})
    return code


@contextmanager
def _tracing(fake_mode: FakeTensorMode) -> Iterator[None]:
    with find("torch._guards.tracing")(find("torch._guards.TracingContext")(fake_mode)):
        yield
