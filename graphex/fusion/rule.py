"""A rule: what to look for, what to put in its place, and when.

    Rule("add_rms_norm", search, replace, examples)

`search` and `replace` are functions of the same arguments, traced to graphs; `examples` are arguments to trace them
with first. A number among them is a variable: it matches any number in its place and reaches `replace`.

A pattern and a graph look alike only if both were traced in the same way, with the same decompositions. A trace depends
on shapes, strides, dtypes, devices and scalars (`key_of`): a model with 32 equal layers traces a rule once. A
`Replacement` is the trace of a replacement function, with the facts about its memory that hold wherever it is put.

Patterns are made from traced functions, and from patterns that users write in torch's own classes:

    def search(x1, x2, gamma):                    OpPattern(getitem, OpPattern(npu_rms_norm,
        s = x1 + x2                        ->         self=OpPattern(add, self=x1, other=x2), gamma=gamma,
        y, _ = npu_rms_norm(s, gamma)                 epsilon=1e-6), 0)
        return y, s                               and the add, which is an output too

A *loose* pattern ignores constants, because a size may be burnt into them, and lets casts and reshapes be absent; it
finds the arguments. The function is then traced again on these arguments, and that *exact* pattern has the last word.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graphex.analysis import Aliases, written_arguments
from graphex.analysis.effects import is_number
from graphex.analysis.graphs import parameters_of, raised_in
from graphex.config import AnyRule
from graphex.errors import Refusal, RuleError, one_line
from graphex.fusion.calls import SOFT, call_of, is_nothing, one_name, op_of, value_of
from graphex.fusion.patterns import Check, OpPattern, Pattern
from graphex.ops.decompositions import Table, decompositions
from graphex.torch_private.aot import joint_trace, symbolic_trace
from graphex.torch_private.memory import storage_key
from graphex.torch_private.patterns import (
    CallFunction,
    Ignored,
    KeywordArg,
    MultiOutputPattern,
    PatternExpr,
    fwd_only,
    joint_fwd_bwd,
)
from graphex.torch_private.symbolic import (
    NEEDS_A_VALUE,
    FakeTensor,
    FakeTensorMode,
    ShapeEnv,
    fake_like,
    no_new_guards,
    pytree,
    quiet_fakes,
    unset_fake_temporarily,
)

# -- traces of a rule's functions --------------------------------------------------------------------------------------


TraceFn = Callable[..., GraphModule]


def trace_forward(fn: Callable[..., Any], args: Sequence[Any], table: Table | None) -> GraphModule:
    """The graph of `fn` on these (fake) arguments, functional, as AOTAutograd would hand it over."""
    return _tidied(symbolic_trace(fn, args, decompositions(table)))


def trace_joint(fn: Callable[..., Any], args: Sequence[Any], table: Table | None) -> GraphModule:
    """The joint forward and backward graph of `fn`; the gradients come in as further arguments."""
    return _tidied(joint_trace(fn, args, decompositions(table)))


def _tidied(gm: GraphModule) -> GraphModule:
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def without_guards(trace: Callable[[], GraphModule], mode: FakeTensorMode | None) -> GraphModule:
    """Trace in the graph's own fake mode. `NewGuardError` if that asks what is not known about a symbolic size."""
    env: ShapeEnv | None = mode.shape_env if mode is not None else None
    with no_new_guards(env):
        return trace()


def key_of(args: Sequence[Any]) -> tuple[Any, ...]:
    """The key of a trace: everything in its arguments that it depends on."""
    return tuple(map(_key, args))


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        sizes = tuple(map(_expression, (*value.shape, *value.stride())))
        return (sizes, value.dtype, value.device, value.requires_grad)
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    return (type(value).__name__, _expression(value))


def _expression(value: Any) -> Any:
    return value.node.expr if isinstance(value, (torch.SymInt, torch.SymFloat)) else value


def fresh(value: Any, *, requires_grad: bool = False) -> Any:
    """A (fake) tensor like this one that shares memory with nothing."""
    if not isinstance(value, FakeTensor):
        return value
    made = fake_like(value)
    return made.requires_grad_() if requires_grad and value.dtype.is_floating_point else made


class Replacement:
    """The trace of a replacement function for arguments of one kind."""

    def __init__(self, module: GraphModule) -> None:
        self.module = module
        self.nodes = list(module.graph.nodes)
        self.results = results_of(module)
        self._owners: dict[int, Node] = {}
        for node in self.nodes:
            for part in _tensors(node.meta.get("val")):
                self._owners.setdefault(storage_key(part), node)
        self._own = {node for node in self.nodes if self._is_in_own_memory(node)}

    @cached_property
    def shared_with_inputs(self) -> list[tuple[int, int]]:
        """Results, by number, and the arguments in whose memory they may lie."""
        aliases, inputs = Aliases(self.module.graph), self.module.graph.find_nodes(op="placeholder")
        pairs = ((index, place) for index in range(len(self.results)) for place in range(len(inputs)))
        return [(index, place) for index, place in pairs if aliases.may_alias(self.results[index], inputs[place])]

    @cached_property
    def shared_results(self) -> list[tuple[int, int]]:
        """Results, by number, that may lie in one memory."""
        aliases, pairs = Aliases(self.module.graph), combinations(range(len(self.results)), 2)
        return [(one, other) for one, other in pairs if aliases.may_alias(self.results[one], self.results[other])]

    @cached_property
    def write_to_argument(self) -> Node | None:
        """A node that may write to the memory of an argument."""
        writers = {node: written for node in self.nodes if (written := written_arguments(node))}
        aliases = Aliases(self.module.graph) if writers else None
        found = (node for node, written in writers.items() if aliases and any(map(aliases.lives_in_input, written)))
        return next(found, None)

    def value_for(self, traced: Node, node: Node) -> Any:
        """The value of a node that was made like the traced one: alike, in memory of its own.

        Cheaper than evaluating the op again. None where the trace shares memory between nodes: there that has to be
        done.
        """
        if traced.target is operator.getitem:
            whole, index = node.args
            return whole.meta["val"][index] if isinstance(whole, Node) else None
        if traced not in self._own:
            return None
        value = traced.meta.get("val")
        if isinstance(value, (list, tuple)):
            return type(value)(fresh(part) for part in value)
        return fresh(value) if isinstance(value, torch.Tensor) else None

    def _is_in_own_memory(self, node: Node) -> bool:
        return all(self._owners[storage_key(part)] is node for part in _tensors(node.meta.get("val")))


def results_of(gm: GraphModule) -> list[Any]:
    """The tensors that a traced function returns, flat."""
    output = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
    return [leaf for leaf in pytree.tree_leaves(output.args[0]) if isinstance(leaf, Node)]


def _tensors(value: Any) -> list[torch.Tensor]:
    parts = value if isinstance(value, (list, tuple)) else [value]
    return [part for part in parts if isinstance(part, torch.Tensor)]


# -- rules -------------------------------------------------------------------------------------------------------------


_FLOAT_MARK, _INT_MARK = 0.113377, 7919


@dataclass(eq=False)
class Rule(AnyRule):
    """One rewrite rule. `origin` is user, default or lift; `requires` are ops without which it need not be traced.

    A rule with `why_not` replaces nothing: it is there to say why. `ranks` are variants for other ranks than the
    example has (`graphex.fusion.register`). `held` are arguments whose example values belong together, as the rule
    relies on (`graphex.fusion.self_test`).
    """

    name: str
    search: Callable[..., Any]
    replace: Callable[..., Any]
    examples: Sequence[Any] | Callable[[], Sequence[Any]]
    check: Check | None = None
    trace_fn: TraceFn | None = None
    given: PatternExpr | None = None
    scalar_workaround: Mapping[str, float] = field(default_factory=dict)
    origin: str = "user"
    requires: frozenset[str] = frozenset()
    why_not: Refusal | None = None
    ranks: Sequence[AnyRule] = ()
    held: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def joint(self) -> bool:
        """Whether the rule is about training: it looks at the joint graph."""
        return self.trace_fn is joint_fwd_bwd

    @cached_property
    def parameters(self) -> list[str]:
        return list(inspect.signature(self.search).parameters)

    @cached_property
    def given_values(self) -> list[Any]:
        """One value for each parameter, as it was given."""
        given = list(self.examples() if callable(self.examples) else self.examples)
        defaults = inspect.signature(self.search).parameters
        values: list[Any] = []
        for name in self.parameters:
            if name in self.scalar_workaround:
                values.append(self.scalar_workaround[name])
            elif given:
                values.append(given.pop(0))
            elif isinstance(default := defaults[name].default, (int, float)):
                values.append(default)
            else:
                raise RuleError(f"rule '{self.name}': there is no example input for the argument '{name}'.")
        if given:
            raise RuleError(
                f"rule '{self.name}' has {len(given)} more example inputs than its search function has arguments "
                f"({', '.join(self.parameters)})."
            )
        return values

    @cached_property
    def example_values(self) -> list[Any]:
        """One value for each parameter. Tensors are fake; numbers are the marks that stand for them in a trace."""
        return [
            value if name in self.scalar_workaround else self._marked(index, name, value)
            for index, (name, value) in enumerate(zip(self.parameters, self.given_values, strict=True))
        ]

    @cached_property
    def scalars(self) -> dict[str, float]:
        """The values that stand for the scalar arguments in a trace."""
        pairs = zip(self.parameters, self.example_values, strict=True)
        return {name: value for name, value in pairs if isinstance(value, (int, float))}

    @cached_property
    def mode(self) -> FakeTensorMode:
        found = [value.fake_mode for value in self.example_values if isinstance(value, FakeTensor)]
        return found[0] if found else FakeTensorMode()

    @cached_property
    def search_graph(self) -> GraphModule:
        """The search function, traced on the examples."""
        try:
            gm = self.trace(self.search, self.example_values, self.mode)
        except Exception as problem:
            if self.origin != "user" or isinstance(problem, RuleError):
                raise
            raise self.untraceable("search", problem) from problem
        self._check_scalars(gm)
        return gm

    @cached_property
    def pattern(self) -> Pattern:
        """The pattern to look for, constants left out."""
        if self.given is not None:
            return converted(self.given)
        return pattern_of(self.search_graph, self.parameters, self.scalars, exact=False)

    def trace(
        self, fn: Callable[..., Any], args: Sequence[Any], mode: FakeTensorMode, table: Any = None
    ) -> GraphModule:
        """A function of this rule as a graph, traced the way the rule asks for."""
        with unset_fake_temporarily(), quiet_fakes(), mode:
            if self.joint:
                return trace_joint(fn, args, table)
            if self.trace_fn is None or self.trace_fn is fwd_only:
                return trace_forward(fn, args, table)
            return self.trace_fn(fn, list(args))

    def untraceable(self, what: str, problem: Exception) -> RuleError:
        """The error that says which function of the rule fails, where, and with which marks."""
        frame = raised_in(problem)
        if isinstance(problem, NEEDS_A_VALUE) and frame is not None:
            name = getattr(self.search if what == "search" else self.replace, "__name__", frame.function)
            return RuleError(
                f"rule '{self.name}': the {what} function '{name}' needs the value of a tensor ({frame}), and "
                "a rule is about graphs, which have none. Write it with ops alone, or a rule for each case."
            )
        numbers = ", ".join(f"{value} for '{name}'" for name, value in self.scalars.items())
        hint = f" (numbers are variables: it was given {numbers})" if numbers else ""
        where = f" ({frame})" if frame is not None else ""
        return RuleError(
            f"rule '{self.name}': the {what} function cannot be traced with the example inputs{hint}: "
            f"{one_line(problem).rstrip('.')}{where}."
        )

    def _marked(self, index: int, name: str, value: Any) -> Any:
        if isinstance(value, bool):
            raise RuleError(
                f"rule '{self.name}': the example for '{name}' is {value}. A flag cannot be a variable of a pattern; "
                "write it into the function, once for each value."
            )
        if isinstance(value, (list, tuple, dict)):
            raise RuleError(
                f"rule '{self.name}': the example for '{name}' is a {type(value).__name__}. Give every tensor of it an "
                "argument of its own."
            )
        if isinstance(value, (str, torch.dtype, torch.device)):
            raise RuleError(
                f"rule '{self.name}': the example for '{name}' is {value!r}. Only tensors and numbers can be variables "
                "of a pattern; write it into the function, once for each value."
            )
        if isinstance(value, float):
            return _FLOAT_MARK + 1e-5 * index
        if isinstance(value, int):
            return _INT_MARK + index
        if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
            return self._fake_mode_for_real_examples.from_tensor(value, static_shapes=True)
        return value

    @cached_property
    def _fake_mode_for_real_examples(self) -> FakeTensorMode:
        return FakeTensorMode()

    def _check_scalars(self, gm: GraphModule) -> None:
        """A scalar that is no argument of any op would be burnt in without a word."""
        found: set[Any] = set()
        for node in gm.graph.nodes:
            torch.fx.node.map_aggregate((node.args, node.kwargs), lambda leaf: found.add(leaf) or leaf)  # type: ignore
        for name, mark in self.scalars.items():
            if mark not in {leaf for leaf in found if isinstance(leaf, (int, float))}:
                raise RuleError(
                    f"rule '{self.name}': the scalar argument '{name}' does not reach an op of the search function as "
                    "it is, so it cannot be recognised in a graph. Pass it to an op unchanged, or drop it."
                )


# -- patterns from functions -------------------------------------------------------------------------------------------


def pattern_of(gm: GraphModule, names: list[str], scalars: Mapping[str, float], *, exact: bool) -> Pattern:
    """The pattern of a traced function. `scalars` are the values that stand for its scalar arguments."""
    made: dict[Node, Any] = {}
    arguments = iter(names)
    marks = {value: name for name, value in scalars.items()}
    outputs: list[PatternExpr] = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            made[node] = KeywordArg(next(arguments, node.name))
        elif node.op == "output":
            outputs = [made[leaf] for leaf in pytree.tree_leaves(node.args[0]) if isinstance(leaf, Node)]
        elif is_number(node) and op_of(node) is not operator.getitem:
            made[node] = value_of(node)
        elif exact and node.op == "call_function" and is_nothing(node):
            made[node] = made[node.all_input_nodes[0]]
        else:
            made[node] = _op_pattern(node, made, marks, exact=exact)
    return Pattern(outputs)


def _op_pattern(node: Node, made: Mapping[Node, Any], marks: Mapping[Any, str], *, exact: bool) -> OpPattern:
    call = call_of(node)

    def convert(value: Any) -> Any:
        if isinstance(value, Node):
            known = made[value]
            return known if isinstance(known, PatternExpr) or exact else Ignored()
        if isinstance(value, (list, tuple)):
            parts = [convert(part) for part in value]
            return Ignored() if parts and all(isinstance(part, Ignored) for part in parts) else tuple(parts)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value in marks:
            return KeywordArg(marks[value])
        keep = exact or value is None or isinstance(value, (bool, str)) or call.op is operator.getitem
        return value if keep else Ignored()

    arguments = {name: convert(value) for name, value in call.args.items()}
    return OpPattern(call.op, arguments, soft=not exact and call.op in SOFT)


def converted(pattern: PatternExpr) -> Pattern:
    """A pattern that a user wrote in torch's classes, in ours: normalised arguments, located failures."""
    made: dict[PatternExpr, Any] = {}

    def convert(part: Any) -> Any:
        if isinstance(part, (list, tuple)):
            return tuple(convert(one) for one in part)
        if not isinstance(part, CallFunction) or isinstance(part, OpPattern):
            return part
        if part not in made:
            op, arguments = _normalised(part)
            made[part] = OpPattern(op, {name: convert(value) for name, value in arguments.items()})
        return made[part]

    outputs = pattern.outputs if isinstance(pattern, MultiOutputPattern) else [pattern]
    return Pattern([convert(output) for output in outputs if output is not None])


def _normalised(part: CallFunction) -> tuple[Any, dict[str, Any]]:
    """An op and its arguments by name: a positional one left out has its default, a keyword is ignored."""
    target: Any = part.fns[0]
    op = one_name(target)
    parameters = parameters_of(target)
    if parameters is None:
        return op, {**{str(index): value for index, value in enumerate(part.args)}, **part.kwargs}
    names = [name for name, _ in parameters]
    arguments = dict(zip(names, part.args, strict=False)) | part.kwargs
    if op in SOFT:
        return op, {"self": next(iter(arguments.values()))}
    keywords = {a.name for a in target._schema.arguments if a.kwarg_only}
    return op, {**{n: d for n, d in parameters if n not in keywords and n not in arguments}, **arguments}
