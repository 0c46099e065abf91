"""npugraph_ex's scenarios 60 to 64 (debugging), and that every scenario has a test or a reason."""

from __future__ import annotations

import re
from pathlib import Path

import npugraph_ex
import pytest
import torch
from torch._functorch.aot_autograd import aot_function

import graphex
from graphex.ascend.catalogue import BETTER, NOT_OFFERED
from tests.harness.ascend import Compiled, on_npu
from tests.harness.processes import python

TRAINED = """
import graphex.ascend
graphex.ascend.serve()
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).npu()
compiled = torch.compile(model, backend="npugraph_ex")
compiled(torch.randn(2, 4).npu()).sum().backward()
"""


def debugged(folder: Path, **variables: str) -> Path:
    """The folder of debug files that a training step in a process of its own leaves."""
    python("-W", "ignore", "-c", TRAINED, cwd=folder, TORCH_COMPILE_DEBUG="1", **variables)
    (root,) = folder.glob("torch_compile_debug/run_*/graphex*")
    return root


def test_scenario_60_and_61_debug_files_of_a_training_step(tmp_path):
    """There: 18 files by fixed names. Here: one for each pass that ran, a journal, and programs that run."""
    root = debugged(tmp_path, RANK="0")
    (model,) = root.glob("model__*")
    files = {"dynamo_out_graph.txt", "journal.json", "report.html", "forward", "backward"}
    assert {path.name for path in model.iterdir()} == files
    for phase in ("forward", "backward"):
        names = sorted(path.name for path in (model / phase).iterdir())
        assert names[0] == f"000_aot_{phase}_graph.txt"
        assert all(name.startswith(f"{name[:3]}_aot_{phase}_graph_after_") for name in names[1:-1])
        assert "output_code.py" in names
        numbers = [int(name[:3]) for name in names if name.endswith(".txt")]
        assert numbers == list(range(len(numbers)))
    assert (root / "debug.log").exists()


def test_scenario_61_the_rank_is_in_the_name_of_dumps(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    compiled = Compiled(lambda x: x + 1, graph_dump_type="txt", graph_dump_path=tmp_path)
    compiled(*on_npu(torch.randn(3)))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "graph_0_0_lambda_inference_optimized_rank_3.txt",
        "graph_0_0_lambda_inference_original_rank_3.txt",
    ]
    assert compiled.journal.rank == 3


@pytest.mark.parametrize(("stage", "clones"), [("original", 1), ("optimized", 0)])
def test_scenario_62_tensors_of_every_node_are_dumped(tmp_path, stage, clones):
    options = {"dump_tensor_data": True, "data_dump_stage": stage, "data_dump_dir": str(tmp_path)}
    compiled = Compiled(lambda x: x.clone() + 1, **options)
    compiled(*on_npu(torch.ones(3)))
    files = [path.name for path in tmp_path.rglob("*.pt")]
    assert sum("clone" in name for name in files) == clones
    (added,) = (path for path in tmp_path.rglob("*.pt") if "add" in path.name)
    assert torch.load(added).tolist() == [2, 2, 2]


def test_scenario_63_a_bad_option_is_one_sentence_that_says_what_is_allowed():
    """There: an enumeration of values and types. Here: the option, what it was given, what it may be."""
    for options, sentence in (
        ({"force_eager": 0}, r"option 'force_eager' was given 0 \(int\); allowed: True or False"),
        ({"capture_limit": 0}, r"option 'capture_limit' was given 0 \(int\); allowed: a whole number of at least 1"),
        ({"inplace_passes": True}, r"no option 'inplace_passes' \(did you mean 'inplace_pass'\?\)"),
    ):
        with pytest.raises(graphex.OptionError, match=sentence):
            torch.compile(lambda x: x + 1, backend="npugraph_ex", options=options)(torch.ones(2))


def test_scenario_64_compile_fx_takes_all_options(tmp_path):
    seen = []
    options = {
        "post_grad_custom_pre_pass": lambda gm, inputs, config: seen.append(config),
        "graph_dump_type": "txt",
        "graph_dump_path": str(tmp_path),
        "remove_noop_ops": False,
        "static_kernel_compile": True,
    }
    journals = []

    def compiler(gm, example_inputs):
        with pytest.warns(graphex.GraphexWarning, match="static_kernel_compile"):
            made = npugraph_ex.compile_fx(gm, example_inputs, options)
        journals.append(graphex.journal(made))
        return made

    x = torch.randn(3).npu()
    fast = aot_function(lambda x: x.clone() + 1, compiler, keep_inference_input_mutations=True)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), x + 1)
    assert seen[0].remove_noop_ops.value is False
    assert seen[0].static_kernel_compile.value is True
    assert len(list(tmp_path.iterdir())) == 2
    assert journals[0].rewrites == [] or all(record.rule != "plain_copy" for record in journals[0].rewrites)


def test_every_scenario_has_a_test_or_a_reason_not_to():
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_conformance_*.py"))
    names = re.findall(r"def test_scenario_([\d_and]+?)_[a-z]", tests)
    tested = {int(number) for name in names for number in re.findall(r"\d+", name)}
    assert tested | NOT_OFFERED.keys() == set(range(1, 65))
    assert not tested & NOT_OFFERED.keys()
    assert BETTER.keys() <= tested
