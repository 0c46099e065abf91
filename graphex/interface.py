"""What a pass has to leave as it was: a well-formed graph that takes and returns what it took and returned before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from graphex.analysis import known_true, node_line
from graphex.analysis.notation import text_of
from graphex.errors import PassError, one_line
from graphex.torch_private.trees import pytree

MAY_NOT = "A pass may not change what the graph takes and returns."


@dataclass(frozen=True)
class Interface:
    """What a graph takes and returns: its inputs, how many values come out, their nesting, what is known of each."""

    inputs: tuple[str, ...]
    outputs: int
    form: Any
    values: tuple[Any, ...] = ()


def interface_of(graph: Graph) -> Interface:
    inputs = tuple(str(node.target) for node in graph.nodes if node.op == "placeholder")
    outputs = [node.args for node in graph.nodes if node.op == "output"]
    if len(outputs) != 1:
        return Interface(inputs, -len(outputs), None)
    leaves = pytree.tree_leaves(outputs[0])
    values = tuple(leaf.meta.get("val") if isinstance(leaf, Node) else leaf for leaf in leaves)
    return Interface(inputs, len(leaves), _form(outputs[0]), values)


def check_graph(graph: Graph, interface: Interface, who: str) -> None:
    """Refuse a graph that is not well formed, or takes or returns something else, naming the node and what to do."""
    seen: set[Node] = set()
    everything = set(graph.nodes)
    for node in graph.nodes:
        for value in node.all_input_nodes:
            if value in seen:
                continue
            where = f" ({line})" if (line := node_line(node)) else ""
            if value in everything:
                problem, advice = "before it is defined", f"Insert it after '{value.name}'"
            else:
                problem, advice = "which is not in the graph any more", "Replace its uses before erasing it"
            verb = "using" if value in everything else "that uses"
            raise PassError(f"{who} left node '{node.name}' {verb} '{value.name}' {problem}{where}. {advice}.")
        seen.add(node)
    _check_interface(interface_of(graph), interface, who)
    try:
        graph.lint()
    except Exception as error:
        raise PassError(f"{who} left a broken graph: {one_line(error)}.") from error


def check_numbers(graph: Graph, who: str) -> None:
    """Refuse symbolic sizes as arguments: they are known while compiling, and nothing computes them in a call."""
    for node in graph.nodes:
        for value in pytree.tree_leaves((node.args, node.kwargs)):
            if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                raise PassError(
                    f"{who} left node '{node.name}' with the symbolic value {value} as an argument. Pass the node that "
                    "computes it, such as one of aten.sym_size.int."
                )


def check_results(graph: Graph, interface: Interface, who: str) -> None:
    """Refuse results of another type or shape: what comes behind the graph was compiled for those before."""
    for at, (found, before) in enumerate(zip(interface_of(graph).values, interface.values, strict=True)):
        if isinstance(before, torch.Tensor) and isinstance(found, torch.Tensor) and _certainly_differ(found, before):
            raise PassError(f"{who} left output {at} as {_about(found)}; it was {_about(before)}. {MAY_NOT}")


def _certainly_differ(left: torch.Tensor, right: torch.Tensor) -> bool:
    if (left.dtype, left.device, left.dim()) != (right.dtype, right.device, right.dim()):
        return True
    return any(known_true(a != b) for a, b in zip(left.shape, right.shape, strict=True))


def _about(value: torch.Tensor) -> str:
    return f"{text_of(value)} on {value.device}"


def _check_interface(found: Interface, wanted: Interface, who: str) -> None:
    if found.outputs < 0:
        raise PassError(f"{who} left a graph with {-found.outputs} output nodes. A graph has exactly one.")
    if (len(found.inputs), found.outputs) != (len(wanted.inputs), wanted.outputs):
        raise PassError(
            f"{who} left a graph with {len(found.inputs)} inputs and {found.outputs} outputs instead of "
            f"{len(wanted.inputs)} and {wanted.outputs}. {MAY_NOT}"
        )
    if found.form != wanted.form:
        how = "nested in another way, or None where there was a value or the reverse"
        raise PassError(f"{who} left a graph whose outputs are {how}. {MAY_NOT}")
    if found.inputs != wanted.inputs and set(found.inputs) == set(wanted.inputs):
        raise PassError(f"{who} left the inputs in another order ({', '.join(found.inputs)}). {MAY_NOT}")


def _form(value: Any) -> Any:
    """How values are nested, and which are None; a list and a tuple are one to whoever takes them apart."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_form, value))
    return {key: _form(item) for key, item in value.items()} if isinstance(value, dict) else value is None
