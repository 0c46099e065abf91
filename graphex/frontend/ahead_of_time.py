"""`torch.compile(...).aot_compile`: compiled without a call, and called without Dynamo.

torch asks a backend for a callable that says how it is saved, and turns AOTAutograd's cache on to get one made of
Inductor's code. graphex has none, so the cache is off while it compiles, and what it returns can be called only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch.fx import GraphModule

from graphex.errors import NotOfferedError
from graphex.records import Journal
from graphex.torch_private.aot import is_compiled_ahead, register_as_serializable, without_autograd_cache

_SAVING = (
    "what graphex compiled cannot be saved: it is made of this process's memory and device graphs. "
    "Call aot_compile in the process that runs it, or save the model and compile it again there."
)


class CompiledAhead:
    """A compiled graph that is called as Dynamo's generated code calls it, and keeps its journal."""

    def __init__(self, compiled: Callable[..., Any], journal: Journal) -> None:
        self._compiled, self.journal = compiled, journal

    def __call__(self, *args: Any) -> Any:
        return self._compiled(*args)

    @classmethod
    def serialize_compile_artifacts(cls, fn: CompiledAhead) -> NoReturn:
        raise NotOfferedError(_SAVING)

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> NoReturn:
        raise NotOfferedError(_SAVING)


def compiled_for_dynamo(
    compile_it: Callable[[GraphModule, Sequence[Any]], Callable[..., Any]],
    gm: GraphModule,
    example_inputs: Sequence[Any],
    journal: Journal,
) -> Callable[..., Any]:
    """What `compile_it` makes of a graph, in the form that is asked for at the moment."""
    wanted_ahead = is_compiled_ahead()
    with without_autograd_cache():
        compiled = compile_it(gm, example_inputs)
    if not wanted_ahead:
        return compiled
    register_as_serializable(CompiledAhead)
    return CompiledAhead(compiled, journal)
