"""Turn a user's pass, in any of its forms, into a `GraphPass`.

Understood are the signature ``fn(gm, example_inputs, config) -> None`` and every form of PyTorch's guide to ATen
transformations:

==========================================  ================================================================
``fn(gm, example_inputs, config)``          edits `gm` in place; what it returns is ignored
``fn(gm)``                                  edits in place, or returns the new module (or a `PassResult`)
a `torch.fx.Transformer` subclass           is instantiated on the module and run
a `PassBase` or `PassManager` instance      is called; its own checks run and may raise
``(pattern, replacement[, filters])``       goes through the subgraph rewriter (see also `Rewrite`)
an `OperatorSupportBase` instance           what it supports is fused into submodules by the linear partitioner
a `graphex.GraphPass` instance              is used as it is
==========================================  ================================================================

A pass may carry the attributes `name`, `stage` ("joint" asks for the joint forward-backward graph of training) and
`preserves_results`; the decorator `graph_pass` sets them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch.fx import Graph, GraphModule, Transformer

from graphex.config import CompilerConfig
from graphex.errors import OptionError
from graphex.rewrite.base import GraphPass, Work

F = TypeVar("F")

_OF_INSTANCES = ("call", "is_node_supported")  # what a PassBase and an OperatorSupportBase is run by
_STAGES = (
    "a pass can ask for stage 'joint', the graph of a whole training step, or for none (then it runs before or after "
    "ours, by the option it is given in)"
)


def graph_pass(
    *given: object, name: str | None = None, stage: str | None = None, preserves_results: bool = True
) -> Callable[[F], F]:
    """Declare how a custom pass wants to be run.

    >>> @graph_pass(stage="joint", preserves_results=False)
    ... def double_gradients(gm): ...
    """
    if given:
        raise OptionError("graph_pass takes name, stage and preserves_results by name: @graph_pass(stage='joint').")
    if stage is not None:
        _check_stage(stage)
    if name is not None and (not isinstance(name, str) or not name):
        raise OptionError(f"the name of a pass is a word, not {name!r}.")
    if not isinstance(preserves_results, bool):
        raise OptionError(f"preserves_results is True or False, not {preserves_results!r}.")
    said = {"name": name, "stage": stage, "preserves_results": preserves_results}

    def declare(custom: F) -> F:
        try:
            for attribute, value in said.items():
                if value is not None:
                    setattr(custom, attribute, value)
        except AttributeError as error:
            raise OptionError(
                f"nothing can be declared of {type(custom).__name__} objects; graph_pass takes a function, a class or "
                "an instance that is a pass (for a pair of functions, a graphex.Rewrite)."
            ) from error
        if inspect.isfunction(custom):
            as_graph_pass(custom)
        return custom

    return declare


def _check_stage(stage: object, who: str = "this one") -> None:
    if stage not in ("", "joint"):
        raise OptionError(f"{_STAGES}; {who} asks for {stage!r}.")


class Rewrite:
    """A (pattern, replacement) pair for the subgraph rewriter that keeps what was replaced.

    `replaced` holds the `ReplacedPatterns` of the last graph it ran on: anchor, nodes_map and replacements.
    """

    def __init__(
        self,
        pattern: Callable[..., Any] | GraphModule,
        replacement: Callable[..., Any] | GraphModule,
        filters: Sequence[Callable[..., bool]] | None = None,
        *,
        name: str | None = None,
    ) -> None:
        if not all(callable(each) for each in (pattern, replacement)):
            raise OptionError(
                f"a rewrite takes two functions or modules, pattern and replacement, got {type(pattern).__name__} and "
                f"{type(replacement).__name__}."
            )
        if not isinstance(filters or (), Sequence) or not all(map(callable, filters or ())):
            raise OptionError(f"the filters of a rewrite are a list of functions, got {filters!r}.")
        self.pattern, self.replacement, self.filters = pattern, replacement, list(filters or ())
        self.name = name or getattr(pattern, "__name__", type(pattern).__name__)
        self.replaced: list[Any] = []

    def __call__(self, gm: GraphModule) -> None:
        from torch.fx.subgraph_rewriter import replace_pattern_with_filters

        self.replaced = replace_pattern_with_filters(gm, self.pattern, self.replacement, self.filters)


class CustomGraphPass(GraphPass):
    """A user's pass behind the one interface that the runner knows."""

    foreign = True

    def __init__(self, custom: Any, run: Callable[[Work], GraphModule | None]) -> None:
        self.custom = custom
        self.name = name_of(custom)
        self.stage = getattr(custom, "stage", "") or ""
        _check_stage(self.stage, f"'{self.name}'")
        self.preserves_results = bool(getattr(custom, "preserves_results", True))
        self._run = run

    def apply(self, work: Work) -> None:
        result = self._run(work)
        if result is not None and result is not work.gm:
            work.gm = result


class UsersGraphPass(CustomGraphPass):
    """A `GraphPass` of a user's: it answers for itself, and errors in it are the user's."""

    custom: GraphPass

    def __init__(self, custom: GraphPass) -> None:
        super().__init__(custom, custom.apply)

    def enabled(self, config: CompilerConfig) -> bool:
        return super().enabled(config) and self.custom.enabled(config)

    def concerns(self, graph: Graph) -> bool:
        return self.custom.concerns(graph)

    def rules(self) -> tuple[str, ...]:
        return self.custom.rules()


def as_graph_pass(custom: Any) -> GraphPass:
    """The `GraphPass` for anything the table above lists; OptionError for anything else."""
    if isinstance(custom, GraphPass):
        _check_parameters(custom, custom.apply, 1, "apply of a GraphPass takes the Work")
        return UsersGraphPass(custom)
    if isinstance(custom, type) and issubclass(custom, Transformer):
        return CustomGraphPass(custom, lambda work: custom(work.gm).transform())
    if isinstance(custom, type) and (
        issubclass(custom, GraphPass) or any(hasattr(custom, name) for name in _OF_INSTANCES)
    ):
        raise OptionError(f"{custom.__name__} is a class; give an instance of it, {custom.__name__}().")
    if isinstance(custom, tuple):
        return as_graph_pass(_rewrite_of(custom))
    if hasattr(custom, "is_node_supported"):
        return CustomGraphPass(custom, lambda work: _partition(work.gm, custom))
    if not callable(custom):
        raise OptionError(f"{custom!r} is not a pass; docs/passes.md lists the forms a pass can take.")
    count = 1 if _positional_count(custom) == 1 else 3
    _check_parameters(custom, custom, count, "a pass takes (gm), or (gm, example_inputs, config)")
    if count == 1:
        return CustomGraphPass(custom, lambda work: _module_of(custom, custom(work.gm)))
    return CustomGraphPass(custom, lambda work: _ignored(custom(work.gm, list(work.example_inputs), work.config)))


def takes_config(custom: Any) -> bool:
    """Whether it has the form ``fn(gm, example_inputs, config)``."""
    other_forms = isinstance(custom, (GraphPass, type, tuple)) or hasattr(custom, "is_node_supported")
    return callable(custom) and not other_forms and _positional_count(custom) != 1


def _rewrite_of(pair: tuple[Any, ...]) -> Rewrite:
    if len(pair) not in (2, 3) or not all(callable(part) for part in pair[:2]):
        given = ", ".join(type(part).__name__ for part in pair)
        raise OptionError(
            f"a tuple is a pass of the form (pattern, replacement[, filters]), got ({given}). "
            "Put several passes in a list."
        )
    return Rewrite(*pair)


def _partition(gm: GraphModule, support: Any) -> GraphModule:
    from graphex.rewrite.partition import Partitioner

    return Partitioner(gm, support).partition_and_fuse()


def _module_of(custom: Any, result: Any) -> GraphModule | None:
    """The result of a `gm -> ...` pass: nothing, a module, or a PassResult holding one."""
    result = getattr(result, "graph_module", result)
    if result is None or isinstance(result, GraphModule):
        return result
    raise TypeError(
        f"'{name_of(custom)}' returned {type(result).__name__}; expected None, a GraphModule or a PassResult"
    )


def _ignored(result: object) -> None:
    """The three-argument form edits in place; a return value has no meaning."""


def _positional_count(custom: Any) -> int:
    """How many arguments a call must give. Classes of torch's pass infrastructure take the module alone."""
    try:
        parameters = _signature_of(custom).parameters.values()
    except (TypeError, ValueError):
        return 1
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return 3
    required = [p for p in positional if p.default is p.empty]
    return len(required) if required else len(positional)


def _signature_of(called: Callable[..., Any]) -> inspect.Signature:
    """The signature of a decorator's own function, unless that hands on whatever it is given (`*args`)."""
    own = inspect.signature(called, follow_wrapped=False)
    hands_on = any(each.kind is each.VAR_POSITIONAL for each in own.parameters.values())
    return inspect.signature(called) if hands_on else own


def _check_parameters(custom: Any, called: Callable[..., Any], count: int, wanted: str) -> None:
    try:
        signature = _signature_of(called)
    except (TypeError, ValueError):
        return  # nothing is known of it
    try:
        signature.bind(*[None] * count)
    except TypeError as error:
        raise OptionError(f"your pass '{name_of(custom)}' has the parameters {signature}; {wanted}.") from error


def name_of(custom: Any) -> str:
    for attribute in ("name", "__name__"):
        value = getattr(custom, attribute, None)
        if isinstance(value, str) and value:
            return value
    inner = getattr(custom, "func", None)  # functools.partial
    return name_of(inner) if inner is not None else type(custom).__name__
