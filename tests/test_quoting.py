"""Names, labels and paths that are not graphex's own are text in what it writes, and never code or places."""

from __future__ import annotations

import ast
import runpy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch._dynamo import config as dynamo
from torch._inductor import config as inductor
from torch.fx import GraphModule

import graphex
from graphex.quoting import attribute, file_name, identifier, literal, remark
from tests.harness.compiling import trace

aten = torch.ops.aten
X = torch.arange(6.0).reshape(2, 3)
RAN = "raise AssertionError('a name was run')"
ATTACKS = [
    f'"""\n{RAN}\n"""',
    f"'\n{RAN}\n#",
    f"x'); {RAN}; ('",
    f"x\n\n{RAN}",
    f"x\r{RAN}",
    f"x\u2028{RAN}\x0c{RAN}\x85{RAN}",
    "\\",
    "a\\'",
    "{0} {name} {{",
    "nul \0",
    "half a character \ud800",
    "../../../up",
    "/absolute",
    "long " * 1000,
    "print",
    "lambda",
    "",
]
PIECES = ["'", '"', '"""', "\n", "\r", "\\", "\0", "#", "{", "}", "\u2028", "\x0c", "\ud800", ";a(b)", "é", "/", "."]
HOSTILE = st.one_of(st.lists(st.sampled_from(PIECES), max_size=12).map("".join), st.sampled_from(ATTACKS))
quick = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class _Blank(ast.NodeTransformer):
    """A program without its names and texts: what it does."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name("name", node.ctx)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg("name")

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant("text") if isinstance(node.value, str) else node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.name = "name"
        return self.generic_visit(node)


def statements(script: Path) -> str:
    return ast.dump(_Blank().visit(ast.parse(script.read_bytes())))


def compiled(gm: GraphModule, **options: Any) -> Callable[..., Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", graphex.GraphexWarning)
        run = graphex.compile_fx(gm, options=options)
        run(X.clone())
    return run


def model(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2


def repro_of(name: str, **options: Any) -> Path:
    """The script about a pass of this name that breaks a graph."""

    def breaking(gm: GraphModule) -> None:
        (node,) = gm.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
        node.args = (node.args[0], 3)

    breaking.__name__ = name
    run = compiled(trace(model, X), verify=True, post_grad_custom_pre_pass=breaking, **options)
    (record,) = graphex.journal(run).verifications
    assert record.pass_name == (name or "function")
    return Path(record.repro)


@pytest.fixture(scope="module")
def harmless() -> str:
    return statements(repro_of("harmless"))


@quick
@given(name=HOSTILE)
@example(name=ATTACKS[0])
@example(name="nul \0")
def test_the_name_of_a_pass_is_text_in_a_repro_script(name, harmless):
    assert statements(repro_of(name)) == harmless


def test_a_repro_script_runs_and_says_which_pass_it_is_about(capsys):
    runpy.run_path(str(repro_of(ATTACKS[0])), run_name="__main__")
    shown = capsys.readouterr().out
    assert ascii(ATTACKS[0]) in shown
    assert "output 0 largest difference: 0.9" in shown


@pytest.mark.parametrize("name", ATTACKS)
def test_debug_files_of_a_pass_stay_in_their_folder(name, tmp_path):
    inside = tmp_path / "a" / "b" / "c" / "d"
    with inductor.patch({"trace.enabled": True}), dynamo.patch(debug_dir_root=str(inside)):
        repro_of(name)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    (folder,) = inside.rglob("model__0")
    assert all(path.parent.parent == folder or path.parent == folder for path in folder.rglob("*") if path.is_file())
    assert list(folder.rglob("*after_*"))


def test_a_mismatch_is_settled_where_no_script_can_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("graphex.debug.files.fresh_directory", lambda: tmp_path / "file")
    assert repro_of("harmless") == Path("")


class Silent:
    def __repr__(self) -> str:
        raise ValueError("no text")


def labelled(x: torch.Tensor, label: object) -> torch.Tensor:
    return x.clone()


@pytest.mark.parametrize("kind", ["txt", "py", "pbtxt"])
def test_debug_files_and_dumps_of_what_cannot_be_printed(kind, tmp_path):
    def label(gm: GraphModule) -> None:
        (node,) = gm.graph.find_nodes(op="call_function", target=aten.sin.default)
        with gm.graph.inserting_after(node):
            new = gm.graph.call_function(labelled, (node, Silent()))
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)

    with inductor.patch({"trace.enabled": True}), dynamo.patch(debug_dir_root=str(tmp_path)):
        run = compiled(
            trace(model, X), graph_dump_type=kind, graph_dump_path=tmp_path / "dump", post_grad_custom_pre_pass=label
        )
    assert torch.equal(run(X), model(X))
    written = [path.read_text() for path in tmp_path.rglob("*after_label*")]
    assert ["cannot be written as text: ValueError: no text" in text for text in written] == [True]


# -- dumped programs ---------------------------------------------------------------------------------------------------


def renaming(names: list[str]) -> Callable[[GraphModule], None]:
    def rename(gm: GraphModule) -> None:
        for node, name in zip(gm.graph.nodes, names, strict=False):
            node.name = name

    return rename


def dumped(gm: GraphModule, folder: Path, **options: Any) -> Path:
    compiled(gm, graph_dump_type="py", graph_dump_path=folder, **options)
    (script,) = folder.glob("*optimized*")
    return script


@quick
@given(names=st.lists(HOSTILE, min_size=4, max_size=4, unique=True))
@example(names=["a.b", "a_b", "a b", "a-b"])
@example(names=["max", "max_", "forward", "args"])
@example(names=["torch", "operator", "example_inputs", "not_written"])
def test_names_of_nodes_are_names_in_a_dumped_program(names, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dump")
    wanted = statements(dumped(trace(model, X), folder / "plain"))
    script = dumped(trace(model, X), folder, post_grad_custom_post_pass=renaming(names))
    assert statements(script) == wanted
    assert torch.equal(runpy.run_path(str(script))["forward"]([X]), model(X))


@pytest.mark.parametrize("options", [{}, {"force_eager": True}], ids=["pt", "npy"])
def test_dumped_tensors_stay_in_their_folder(options, tmp_path):
    names = ["../../../up", "/absolute", "nul \0", "long" * 100]
    inside = tmp_path / "a" / "b" / "c"
    inside.mkdir(parents=True)
    dumping = {"dump_tensor_data": True, "data_dump_dir": str(inside)}
    compiled(trace(model, X), post_grad_custom_post_pass=renaming(names), **dumping, **options)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 2
    assert all(path.is_relative_to(inside) for path in files)


@quick
@given(name=HOSTILE.filter(lambda name: name and "." not in name))
def test_names_of_constants_and_submodules_are_names_in_a_dumped_program(name, tmp_path_factory):
    def pass_with_parts(gm: GraphModule) -> None:
        gm.register_buffer(name, torch.ones(3))
        gm.add_module(f"{name} module", torch.nn.Identity())
        (node,) = gm.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
        with gm.graph.inserting_before(node):
            called = gm.graph.call_module(f"{name} module", (gm.graph.get_attr(name),))
        node.args = (node.args[0], called)

    folder = tmp_path_factory.mktemp("dump")
    script = dumped(trace(model, X), folder, post_grad_custom_post_pass=pass_with_parts)
    raising = [node for node in ast.walk(ast.parse(script.read_text())) if isinstance(node, ast.Raise)]
    assert len(raising) == 1  # of `not_written`
    with pytest.raises(
        SystemExit, match=r"the torch\.nn\.modules\.linear\.Identity of this graph cannot be written as text"
    ):
        runpy.run_path(str(script))


@quick
@given(text=HOSTILE)
def test_texts_and_labels_in_a_graph_are_text_in_a_dumped_program(text, tmp_path_factory):
    def said(x: torch.Tensor, **words: str) -> torch.Tensor:
        return x + len(words)

    def labelled(gm: GraphModule) -> None:
        (node,) = gm.graph.find_nodes(op="call_function", target=aten.sin.default)
        node.target, node.kwargs = said, {text: text, "plain": text}

    folder = tmp_path_factory.mktemp("dump")
    script = dumped(trace(model, X), folder, post_grad_custom_post_pass=labelled)
    found = [node.value for node in ast.walk(ast.parse(script.read_text())) if isinstance(node, ast.Constant)]
    assert found.count(text) >= 2
    with pytest.raises(SystemExit, match="function of this graph cannot be written"):
        runpy.run_path(str(script))


# -- the functions themselves ------------------------------------------------------------------------------------------


@given(text=st.text())
@example(text="\ud800\0")
def test_quoted_text_is_the_text(text):
    quoted = literal(text)
    assert ast.literal_eval(quoted) == text
    assert quoted.isascii()
    assert len(quoted.splitlines()) == 1
    assert not ast.parse(f"# {remark(text)}").body
    assert ast.parse(identifier(text), mode="eval").body.__class__ is ast.Name
    assert "/" not in file_name(text)
    assert len(file_name(text)) <= 100

    class Holder:
        pass

    holder = Holder()
    if text:
        setattr(holder, text, quoted)
        assert eval(attribute("holder", text), {"holder": holder}) is quoted
