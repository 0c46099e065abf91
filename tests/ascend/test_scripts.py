"""Scripts for Ascend, run as they are: `graphex run`, the loggers, the profiler, dumps and fusion rules."""

from __future__ import annotations

import json
import logging
import textwrap
from pathlib import Path

import click.testing
import pytest
import torch

import graphex
from graphex.cli.scripts import run
from tests.harness.documents import Block, blocks, is_python, program, run_block
from tests.harness.graph_def import graph_def, ops

PROFILED = """
import sys
import torch, torch_npu, torchair

class Square(torch.nn.Module):
    def forward(self, x):
        return (x @ x).abs() + 1

config = torchair.CompilerConfig()
config.debug.graph_dump.type = "pbtxt"
config.debug.graph_dump.path = "./dump"
config.ge_config.optimization_switch = "AutomaticUbFusion:off"
compiled = torch.compile(Square().npu(), backend=torchair.get_npu_backend(compiler_config=config))
x = torch.randn(3, 3).npu()
compiled(x)
with torch_npu.profiler.profile(
    activities=[torch_npu.profiler.ProfilerActivity.NPU, torch_npu.profiler.ProfilerActivity.CPU],
    with_stack=True,
    schedule=torch_npu.profiler.schedule(wait=0, warmup=0, active=1, repeat=1, skip_first=0),
    experimental_config=torch_npu.profiler._ExperimentalConfig(
        profiler_level=torch_npu.profiler.ProfilerLevel.Level2),
    on_trace_ready=torch_npu.profiler.tensorboard_trace_handler("./prof"),
) as prof:
    compiled(x)
prof.step()  # after the block: it must do nothing
print("arguments", sys.argv[1:], __name__)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (b"def f(:\n", "SyntaxError"),
        (b"\xff\xfe\x00\x01", "SyntaxError"),
        (b"x = 1\x00\n", ""),
        (b"import no_such_module_at_all\n", "ModuleNotFoundError"),
    ],
    ids=["a syntax error", "bytes that are no text", "a NUL", "an import that is not there"],
)
def test_a_script_that_cannot_run_is_said_without_our_own_frames(text, error, folder):
    (folder / "script.py").write_bytes(text)
    ended = click.testing.CliRunner().invoke(run, ["script.py"])
    assert ended.exit_code == 1
    assert error in ended.stderr
    assert "graphex" not in ended.stderr
    assert "runpy" not in ended.stderr


@pytest.mark.filterwarnings("ignore")
def test_a_script_runs_with_its_arguments_and_leaves_a_dump_and_a_profile(folder):
    (folder / "script.py").write_text(PROFILED)
    result = click.testing.CliRunner().invoke(run, ["script.py", "--device", "x", "y"])
    assert result.exit_code == 0, result.output
    assert "arguments ['--device', 'x', 'y'] __main__" in result.output
    before, after = (
        graph_def(folder / f"dump/graph_0_0_Square_inference_{moment}.pbtxt") for moment in ("original", "optimized")
    )
    assert "aten.mm.default" in ops(before)
    assert "aten.abs_.default" in ops(after), "dead memory is reused"
    (trace,) = (folder / "prof").glob("*.pt.trace.json")
    assert_is_a_trace(trace)


def assert_is_a_trace(path: Path) -> None:
    """What Perfetto and TensorBoard read: trace events with their times, among them the call of the graph."""
    trace = json.loads(path.read_text())
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert any(event["name"].startswith("graphex: Square inference") for event in complete)
    assert any(event["name"] == "aten::mm" for event in complete)
    assert all({"ts", "dur", "pid", "tid"} <= event.keys() for event in complete)


def test_a_script_that_does_not_exist_is_named(folder):
    result = click.testing.CliRunner().invoke(run, ["nowhere.py"])
    assert result.exit_code == 2
    assert "nowhere.py" in result.output


def test_the_exit_code_is_the_scripts(folder):
    (folder / "script.py").write_text("import sys; sys.exit(3)\n")
    assert click.testing.CliRunner().invoke(run, ["script.py"]).exit_code == 3


def test_a_gpu_that_is_not_there_is_one_sentence(folder, monkeypatch):
    (folder / "script.py").write_text("import torch_npu\n")
    block = Block("python", "", 1, "import torch_npu\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, printed = run_block(block, folder, ascend=True, device="cuda")
    assert code == 1
    assert (
        printed.strip() == "Error: the npu cannot be mapped to cuda: torch finds no CUDA device. Use simulated or cpu."
    )


@pytest.mark.parametrize("package", ["torchair", "npugraph_ex"])
def test_at_debug_the_loggers_show_the_changed_graph(package, capsys):
    import npugraph_ex
    import torchair

    logger = {"torchair": torchair.core.utils.logger, "npugraph_ex": npugraph_ex.core.utils.logger}[package]
    ours = logging.getLogger("graphex")
    level, handlers = ours.level, list(ours.handlers)
    try:
        assert logger.level == logging.ERROR
        logger.setLevel(logging.DEBUG)
        torch.compile(lambda x: x.clone() + 1, backend="npugraph_ex")(torch.ones(2))
        printed = capsys.readouterr().out
        assert f"[DEBUG] {package.upper()}(" in printed
        assert "torch.ops.aten.clone.default" in printed
        assert "after_remove_noops" in printed
        logger.warning_once("said %s", "once")
        logger.warning_once("said %s", "once")
        assert capsys.readouterr().out.count("said once") == 1
    finally:
        logger.setLevel(logging.ERROR)
        ours.handlers[:] = handlers
        ours.setLevel(level)


REGISTERED = """
import functools, torch, torch_npu, {package}
from torch._subclasses.fake_tensor import FakeTensorMode
from {package}.core.utils import logger

def search_fn(a, b, gamma):
    total = torch.add(a, b)
    return torch_npu.npu_rms_norm(total, gamma)[0], total

def replace_fn(a, b, gamma):
    y, _, total = torch_npu.npu_add_rms_norm(a, b, gamma)
    return y, total

def extra_check(match):
    return match.kwargs["a"].meta["val"].shape[-1] == 7168

with FakeTensorMode():
    like = functools.partial(torch.empty, (1, 1, 2), device="npu", dtype=torch.float16)
    handle = {package}.register_replacement(
        search_fn=search_fn, replace_fn=replace_fn, extra_check=extra_check,
        example_inputs=(like(), like(), torch.empty(2, device="npu", dtype=torch.float16)))
"""


@pytest.mark.parametrize("package", ["torchair", "npugraph_ex"])
def test_a_registered_rule_is_applied_where_its_check_allows_it(package, folder):
    names: dict[str, object] = {}
    exec(REGISTERED.format(package=package), names)

    def f(a, b, gamma):
        y, _ = torch.ops.npu.npu_rms_norm(a + b, gamma)
        return y * 2

    def fusions(width: int, **options) -> int:
        torch._dynamo.reset()
        a, gamma = torch.randn(1, 2, width).half().npu(), torch.ones(width).half().npu()
        compiled = torch.compile(f, backend="npugraph_ex", options=options)
        with torch.no_grad():
            torch.testing.assert_close(compiled(a, a + 1, gamma), f(a, a + 1, gamma))
        return [record.rule for record in graphex.journal(compiled).rewrites].count("search_fn")

    with names["handle"]:
        assert fusions(7168) == 1
        assert fusions(512) == 0
        assert fusions(7168, pattern_fusion_pass=False) == 0


def test_a_profile_counts_steps_inside_the_block(folder):
    import torch_npu

    ready = []
    schedule = torch_npu.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)
    with torch_npu.profiler.profile(schedule=schedule, on_trace_ready=lambda p: ready.append(p.step_num)) as prof:
        for _ in range(4):
            torch.ones(2) + 1
            prof.step()
    prof.step()
    assert ready == [4]
    with pytest.raises(TypeError, match="no setting"):
        torch_npu.profiler._ExperimentalConfig(profiler_lvl=1)
    with pytest.raises(TypeError, match="ProfilerActivity"):
        torch_npu.profiler.profile(activities=["NPU"])


DOCUMENTS = {
    "page.md": "```python\nprint(model)\n```\n\n1. list\n\n    ```python\n    x = 1\n    ```\n\n```\nno code\n```\n",
    "page.rst": "Title\n=====\n\n.. code:: python\n\n   y = 2\n\n   print(y)\n\ntext after it\n",
    "page.txt": "Words first.\n\nimport math\n\nprint(math.pi)\n# a comment\n\nMore words, that are none.\n",
}


def test_the_tool_finds_the_blocks_of_every_kind_of_document(folder):
    found = {}
    for name, text in DOCUMENTS.items():
        (folder / name).write_text(text)
        found[name] = [block for block in blocks(folder / name) if is_python(block.text)]
    assert [block.text for block in found["page.md"]] == ["print(model)\n", "x = 1\n"]
    assert [block.text for block in found["page.rst"]] == ["y = 2\n\nprint(y)\n\n"]
    assert [block.text for block in found["page.txt"]] == ["import math\n\nprint(math.pi)\n# a comment\n\n"]
    assert program(found["page.md"][0]) == "import torch; model = torch.nn.Linear(8, 8)\nprint(model)\n"


def test_the_tool_tells_a_block_that_fails(folder):
    block = Block(
        "python",
        "",
        1,
        textwrap.dedent("""
        import torch_npu
        raise SystemExit(torch_npu.profiler.ProfilerLevel.Level1.value)
    """),
    )
    code, printed = run_block(block, folder, ascend=True)
    assert (code, printed.strip()) == (1, "Level1")
