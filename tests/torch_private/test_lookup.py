"""No private name of torch breaks an import: what is lost without it is a record."""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import graphex
from graphex.torch_private import lookup
from graphex.torch_private.lookup import MissingNameError, missing_names, private
from tests.harness.processes import python

GRAPHEX = Path(graphex.__file__).parent
PRIVATE = sorted((GRAPHEX / "torch_private").glob("*.py"))
TYPES_OF_OPS = "torch._ops"  # what `torch.ops` is made of, which is public
WITHOUT_PASSES = "the model runs without graphex's passes"


def looked_up(source: Path) -> dict[str, bool]:
    """The names that a module looks up, each written out there, and whether it does without."""
    calls = [node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Call)]
    return {
        ast.literal_eval(call.args[0]): len(call.args) + len(call.keywords) > 1
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id in ("private", "later")
    }


NAMES = {name: optional for source in PRIVATE for name, optional in looked_up(source).items()}


def compiled_without(*lists: Sequence[str]) -> list[dict[str, Any]]:
    """What happened without each of these lists of names."""
    path = os.pathsep.join([str(GRAPHEX.parent), *sys.path])
    done = python("-m", "tests.torch_private.without", json.dumps(lists), PYTHONPATH=path)
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(said) == len(lists), done.stderr
    return said


def assert_survived(said: dict[str, Any]) -> None:
    assert "error" not in said, (said["without"], said["error"])
    assert said["equal"], said["without"]
    assert [loss for loss in said["missing"] if loss not in said["records"]] == [], said


@pytest.fixture(scope="module")
def worst_cases() -> list[dict[str, Any]]:
    return compiled_without([*NAMES], [name for name, optional in NAMES.items() if optional])


def test_graphex_runs_in_a_torch_with_none_of_them(worst_cases):
    said = worst_cases[0]
    assert_survived(said)
    assert said["graphs"] == 0
    assert said["npu"].endswith("there is no 'npu'.")
    reason = f"torch {torch.__version__} has no torch._functorch.aot_autograd.aot_module_simplified"
    assert [WITHOUT_PASSES, reason] in said["records"]


def test_graphex_compiles_in_a_torch_with_only_what_it_requires(worst_cases):
    said = worst_cases[1]
    assert_survived(said)
    assert said["graphs"] == 2
    assert WITHOUT_PASSES not in {what for what, _ in said["records"]}


@pytest.mark.full
def test_graphex_runs_in_a_torch_without_any_one_of_them():
    for said in compiled_without(*([name] for name in NAMES)):
        assert_survived(said)


def test_every_one_is_found_in_this_torch_or_has_a_substitute_as_good():
    assert missing_names() == []


def test_dynamo_can_be_imported_after_all_of_graphex():
    """Some modules of torch break its import if they come first."""
    python("-c", "import graphex.loops.saved, graphex.frontend.aot, torch._dynamo; torch._dynamo.reset()")


def test_names_behind_a_circle_of_imports_are_found_in_a_process_that_has_imported_nothing_of_it():
    """AOTAutograd's wrappers come first here; what is printed is what was not found."""
    names = "torch._functorch._aot_autograd.runtime_wrappers", "torch._inductor.compile_fx"
    asked = f"[lookup.private(name) for name in {names}]; print(lookup.missing_names())"
    assert python("-c", f"from graphex.torch_private import lookup; {asked}").stdout == "[]\n"


def test_a_name_that_is_gone_can_be_named_and_not_used(monkeypatch):
    monkeypatch.setattr(lookup, "losses", {})
    gone = private("torch._no_such_module.Gone", lost="nothing")
    kind: Any = type("Kind", (gone,), {})
    assert not isinstance(torch.ones(1), gone)
    for use in (gone, kind, lambda: gone.attribute):
        with pytest.raises(MissingNameError, match=r"has no torch\._no_such_module\.Gone"):
            use()
    try:
        raise ValueError
    except (gone, ValueError):
        pass


def test_a_module_that_is_there_and_cannot_be_imported_is_not_said_to_be_gone(monkeypatch, tmp_path):
    monkeypatch.setattr(lookup, "losses", {})
    monkeypatch.setattr(torch, "__path__", [*torch.__path__, str(tmp_path)])
    (tmp_path / "_half.py").write_text("from torch import _no_such_name")
    private("torch._half.Name", lost="nothing")
    ((lost, reason),) = missing_names()
    assert lost == "nothing"
    assert "fails to import torch._half.Name" in reason
    assert "_no_such_name" in reason


def imported_names(source: Path) -> Iterator[tuple[int, str]]:
    """Names of torch that a module needs to be imported or run, but for what only a type checker sees."""
    for node in _seen_by_python(ast.parse(source.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield node.lineno, _dotted(node)


def _dotted(node: ast.expr) -> str:
    """`torch.fx.Graph`; empty for an attribute of anything but a name."""
    if isinstance(node, ast.Name):
        return node.id
    before = _dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{before}.{node.attr}" if before and isinstance(node, ast.Attribute) else ""


def _seen_by_python(tree: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            yield from (node for statement in child.orelse for node in [statement, *_seen_by_python(statement)])
        else:
            yield child
            yield from _seen_by_python(child)


def _is_private(name: str) -> bool:
    of_torch = name.startswith("torch.") and not name.startswith(("torch.ops.", TYPES_OF_OPS))
    return of_torch and any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def test_private_names_are_looked_up_not_imported():
    found = [
        f"{source.relative_to(GRAPHEX)}:{line}: {name}"
        for source in sorted(GRAPHEX.rglob("*.py"))
        for line, name in imported_names(source)
        if _is_private(name)
    ]
    assert found == []


ELSEWHERE = {
    "_schema": TYPES_OF_OPS,
    "_overloadname": TYPES_OF_OPS,
    "_qualified_op_name": TYPES_OF_OPS,
    "_materialize_non_diff_grads": "set in every call that is captured: a function around it would cost the host time",
    "_call_impl": "Dynamo traces the function that names it",
    "_artifacts": "of a function that graphex has saved",
    "_is_view": "documented",
    "_parameters": "documented, as the dictionary that `state_dict` fills",
    "_backward_hooks": "of a parameter, as its `register_hook` fills it",
    "_step_supports_amp_scaling": "what an optimizer tells GradScaler",
    "_timeout": "of the options that NCCL is made with",
    **dict.fromkeys(("_asdict", "_getframe", "_name_", "_value_"), "Python's"),
    **dict.fromkeys(("_pad_token_tensor", "_prepare_bias_variables"), "transformers'"),
}
"""Private attributes that graphex does not define, and that stand outside of `torch_private`."""


def private_attributes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Private attributes of anything but the ops of torch, which are public under whatever name."""
    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    for node in attributes:
        is_op = _dotted(node).startswith(("torch.ops.", "aten."))
        if node.attr.startswith("_") and not node.attr.startswith("__") and not is_op:
            yield node.lineno, node.attr


def own_names(tree: ast.AST) -> Iterator[str]:
    """Names that a module defines, as functions, classes, variables or attributes of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _dotted(node).startswith("self."):
            yield node.attr


def test_private_attributes_are_read_in_their_room():
    trees = {path: ast.parse(path.read_text()) for path in sorted(GRAPHEX.rglob("*.py"))}
    own = {name for tree in trees.values() for name in own_names(tree)}
    used = [
        (f"{path.relative_to(GRAPHEX)}:{line}", name)
        for path, tree in trees.items()
        if path not in PRIVATE
        for line, name in private_attributes(tree)
        if name not in own
    ]
    assert [f"{where}: {name}" for where, name in used if name not in ELSEWHERE] == []
    assert {name for _, name in used} == set(ELSEWHERE)  # no exception outlives its reason
