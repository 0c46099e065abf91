"""The command line, through a pipe, in a terminal, and for programs that read JSON."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

import graphex
from graphex.cli import COMMANDS, machine, main
from graphex.cli.catalogue import NAMES, names_text
from graphex.evidence.report.page import read_data
from graphex.runtime import guards
from graphex.torch_private import lookup
from graphex.torch_private.lookup import TRIED
from tests.harness.processes import ROOT, in_terminal, piped, plain, run
from tests.harness.reports import VERSIONS, explain_gate, explain_llama

SCRIPT = """
import sys, torch
print("hello", *sys.argv[1:])
torch.compile(lambda x: x.clone()[:, :] + 1, backend="graphex")(torch.ones(2, 2))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def read(*arguments: str) -> object:
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


# -- explain -------------------------------------------------------------------------------------------------------


def test_explain_through_a_pipe_is_text_without_colours_or_progress(script: Path) -> None:
    ended = piped("explain", "script.py", "--flag", "word", cwd=script.parent)
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    assert lines[0] == "hello --flag word"
    assert any(line.endswith("counted from the final graph.") for line in lines)
    assert lines[-1] == "report: report.html"
    assert "\x1b" not in ended.out + ended.err
    (graph,) = read_data(script.parent / "report.html")["graphs"]
    assert graph["pictures"]


def test_explain_of_a_script_that_goes_elsewhere_writes_the_report_here(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = script.parent / "elsewhere"
    elsewhere.mkdir()
    script.write_text(f"import os\nos.chdir({str(elsewhere)!r})\n{SCRIPT}")
    monkeypatch.chdir(script.parent)
    ended = call("explain", "script.py")
    assert ended.exit_code == 0, ended.output
    assert script.with_name("report.html").exists()
    assert not list(elsewhere.iterdir())


def test_explain_says_that_graphex_is_off(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHEX_DISABLE", "1")
    ended = call("explain", str(script))
    assert ended.exit_code == 2
    assert "GRAPHEX_DISABLE=1 is set" in ended.output


def test_explain_in_a_terminal_shows_progress_and_colours_and_leaves_nothing_behind(script: Path) -> None:
    ended = in_terminal("explain", "script.py", cwd=script.parent)
    assert ended.code == 0
    assert "\x1b[32m✓" in ended.out
    assert "compiling graph 1" in plain(ended.out)
    assert "\x1b[2K" in ended.out  # the progress line is wiped when it is done
    assert plain(ended.out).rstrip().endswith("report: report.html")


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")
def test_only_one_line_of_progress_is_live(script: Path) -> None:
    compiled = 'torch.compile(lambda x: (x.sin() + x.cos()).exp() * 2, backend="graphex")(torch.ones(64, 64))'
    script.write_text(f"import torch\n{compiled}\n")
    ended = in_terminal("explain", "script.py", cwd=script.parent, GRAPHEX_REGIONS="on", GRAPHEX_CACHE="off")
    assert ended.code == 0
    assert "compiling region 1 of 1" in plain(ended.out)
    assert "graphex: compiling" not in plain(ended.out)  # the line of a process without a command


def test_explain_json_keeps_the_scripts_own_words_out_of_it(script: Path) -> None:
    page = str(script.with_name("other.html"))
    ended = call("explain", "--json", "--set", "remove_noop_ops=false", "-o", page, str(script))
    assert ended.exit_code == 0, ended.output
    told = json.loads(ended.stdout)
    assert told["report"] == page
    assert "hello" in ended.stderr
    (journal,) = told["journals"]
    assert "remove_noops" not in {record.get("name") for record in journal["records"]}


def test_explain_of_a_script_that_raises_names_the_line_and_still_reports(script: Path) -> None:
    script.write_text(SCRIPT + "raise ValueError('too bad')\n")
    page = script.with_name("report.html")
    ended = call("explain", "-o", str(page), str(script))
    assert ended.exit_code == 1
    assert "script.py ended early: ValueError: too bad" in ended.stderr
    assert "line 5, in <module>" in ended.stderr
    assert "runpy" not in ended.stderr
    assert page.exists()


@pytest.mark.parametrize(
    ("setting", "option", "value"),
    [
        ("disable_rules=plain_copy", "disable_rules", ("plain_copy",)),
        ("disable_rules=plain_copy, full_slice", "disable_rules", ("plain_copy", "full_slice")),
        ('disable_rules=["plain_copy"]', "disable_rules", ("plain_copy",)),
        ("capture_sizes=4", "capture_sizes", (4,)),
        ("capture_sizes=2,4", "capture_sizes", (2, 4)),
    ],
)
def test_explain_takes_lists_as_they_are_typed(setting: str, option: str, value: object, script: Path) -> None:
    script.write_text(
        f"""
import torch
def show(gm, inputs, config): print("given", config.{option})
options = {{"post_grad_custom_pre_pass": show}}
torch.compile(lambda x: x + 1, backend="graphex", options=options)(torch.ones(2, 2))
"""
    )
    ended = call("explain", "--set", setting, "-o", str(script.with_name("r.html")), str(script))
    assert ended.exit_code == 0, ended.output
    assert f"given {value}" in ended.stdout


def test_explain_of_a_script_that_raises_before_it_compiles_gives_no_other_advice(script: Path) -> None:
    script.write_text("raise ValueError('too bad')\n" + SCRIPT)
    ended = call("explain", "-o", str(script.with_name("report.html")), str(script))
    assert ended.exit_code == 1
    assert "Compile something" not in ended.stderr


def test_explain_of_a_script_that_compiles_nothing_has_a_code_of_its_own(script: Path) -> None:
    script.write_text("print('nothing')\n")
    page = script.with_name("report.html")
    ended = call("explain", "-o", str(page), str(script))
    assert ended.exit_code == 3
    assert "Nothing was compiled with graphex." in ended.stdout
    assert not page.exists()


def test_explain_of_a_script_that_uses_another_backend_names_it(script: Path) -> None:
    script.write_text("import torch\ntorch.compile(torch.sin, backend='aot_eager')(torch.ones(2))\n")
    ended = CliRunner().invoke(main, ["explain", str(script)])
    assert ended.exit_code == 3
    assert "It was compiled with 'aot_eager': write torch.compile(model, backend=\"graphex\")." in ended.output


def test_explain_of_a_script_of_which_dynamo_compiles_nothing_says_where_and_why(script: Path) -> None:
    script.write_text(
        """
import torch
def show(x):
    torch._dynamo.graph_break()
    return x
torch.compile(show, backend="graphex")(torch.ones(2))
"""
    )
    ended = call("explain", "-o", str(script.with_name("report.html")), str(script))
    assert ended.exit_code == 3
    assert f"{script.name}:4: torch._dynamo.graph_break()" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("explain", "no_such.py"), "does not exist"),
        (("explain", "--set", "verfy=true", "SCRIPT"), "did you mean 'verify'?"),
        (("explain", "--set", "verify", "SCRIPT"), "NAME=VALUE"),
        (("explain", "-o", "nowhere/r.html", "SCRIPT"), "no directory"),
        (("report", "open", "SCRIPT"), "not a report of graphex"),
        (("rules", "lift_rms_nrm"), "did you mean 'lift_rms_norm'?"),
        (("rules", "rmsnorm"), "did you mean 'rms_norm_add' or 'add_rms_norm' or 'lift_rms_norm'"),
        (("ops", "rms_nrm"), "did you mean 'graphex::rms_norm' or"),
        (("bench", "speed"), "no benchmark 'speed'"),
        (("bench", "linear"), "did you mean 'linears'?"),
        (("frobnicate",), "No such command"),
        (("xplain", "SCRIPT"), "did you mean 'explain'?"),
        (("report", "dif"), "did you mean 'diff'?"),
        (("explain", "SCRIPT", "--set", "verify=true"), "graphex explain script.py -- --set verify=true"),
        (("explain", "SCRIPT", "--size", "8", "--output=x.html"), "--output=x.html stands after script.py"),
    ],
)
def test_wrong_use_is_one_sentence_and_code_2(arguments: tuple[str, ...], message: str, script: Path) -> None:
    result = call(*(str(script) if word == "SCRIPT" else word for word in arguments))
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_a_script_gets_what_stands_after_two_dashes(script: Path) -> None:
    ended = piped("explain", "script.py", "--", "--set", "verify=true", cwd=script.parent)
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[0] == "hello --set verify=true"


def test_run_says_that_an_option_of_its_own_goes_to_the_script(script: Path) -> None:
    ended = piped("run", "script.py", "--device", "cpu", cwd=script.parent)
    assert ended.code == 0, ended.err
    assert "hello --device cpu" in ended.out
    assert "--device stands after script.py" in ended.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--version",),
        ("--help",),
        ("explain", "--help"),
        ("report", "diff", "--help"),
        ("xplain",),
        ("options", "verfy"),
        ("rules", "lift_rms_nrm"),
        ("ops", "rms_nrm"),
        ("passes", "remove_noop"),
    ],
)
def test_what_needs_no_torch_does_not_import_it(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """Importing torch takes 2 s of the 0.2 s that an answer may take."""
    ended = run("-X", "importtime", "-m", "graphex", *arguments, cwd=tmp_path)
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert "graphex.cli" in imported
    assert not {"torch", "rich", "numpy"} & imported


def test_the_command_is_known_by_every_path_to_it(tmp_path: Path) -> None:
    folder = Path(sys.executable).parent
    command = folder / ".." / folder.name / "graphex"
    if not command.exists():
        pytest.skip("graphex is not installed")
    ended = run("-X", "importtime", str(command), "--version", cwd=tmp_path)
    assert graphex.__version__ in ended.stdout
    assert "torch" not in {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}


@pytest.mark.parametrize("command", ["open", "diff"])
def test_reading_reports_imports_no_torch(command: str, tmp_path: Path) -> None:
    before, after = (str(explain_gate(tmp_path / f"{name}.html", **options)) for name, options in VERSIONS.items())
    given = (before,) if command == "open" else (before, after)
    ended = run("-X", "importtime", "-m", "graphex", "report", command, *given, cwd=tmp_path, BROWSER="true")
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert "silu(gate) * up" in ended.stdout
    assert not {"torch", "numpy"} & imported


def test_a_mistyped_setting_is_told_before_torch_is_imported(script: Path) -> None:
    ended = run("-X", "importtime", "-m", "graphex", "explain", "--set", "verfy=true", script.name, cwd=script.parent)
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert "did you mean 'verify'?" in ended.stderr
    assert "torch" not in imported


def test_a_rule_that_graphex_does_not_have_is_told_before_the_script_runs(script: Path) -> None:
    page = str(script.with_name("report.html"))
    said = call("explain", "-o", page, "--set", "disable_rules=lift_rms_nrm,mine", str(script)).stderr.splitlines()
    assert said[0].startswith("note: there is no 'lift_rms_nrm' (did you mean 'lift_rms_norm'?), unless the script")
    assert said[1].startswith("note: there is no 'mine' (")
    right = call("explain", "-o", page, "--set", "disable_rules=lift_rms_norm", str(script))
    assert "note:" not in right.stderr
    assert right.exit_code == 0


def test_in_a_terminal_help_and_a_mistyped_command_answer_as_through_a_pipe(tmp_path: Path) -> None:
    shown = in_terminal("--help", cwd=tmp_path)
    assert shown.code == 0
    assert "Run SCRIPT and explain what it compiled with graphex." in plain(shown.out)
    mistyped = in_terminal("explian", "model.py", cwd=tmp_path)
    assert mistyped.code == 2
    assert "No such command 'explian' (did you mean 'explain'?)." in plain(mistyped.out)


@pytest.mark.parametrize("order", ["import graphex, torch", "import torch, graphex"])
def test_a_program_that_imports_graphex_has_its_ops_whatever_its_file_is_called(order: str, tmp_path: Path) -> None:
    program = tmp_path / "graphex"
    program.write_text(f"{order}\nprint(torch.ops.graphex.rms_norm, torch.ops.npu.npu_rms_norm)\n")
    assert "graphex.rms_norm" in run(program, cwd=tmp_path).stdout


def test_debug_files_are_found_where_torch_says_they_are(script: Path) -> None:
    ended = in_terminal("explain", "script.py", cwd=script.parent, TORCH_COMPILE_DEBUG="1", COLUMNS="400")
    assert ended.code == 0
    (folder,) = re.findall(r"writes debug files to (\S+)", plain(ended.out))
    assert sorted(path.name for path in Path(folder, "model__0").iterdir() if path.is_file()) == [
        "dynamo_out_graph.txt",
        "journal.json",
        "report.html",
    ]


# -- what there is ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "name"),
    [("ops", "graphex::rms_norm"), ("rules", "lift_rms_norm"), ("passes", "remove_noops"), ("options", "verify")],
)
def test_catalogues_list_everything_and_show_one_with_its_documentation(command: str, name: str) -> None:
    everything = read(command)
    assert isinstance(everything, list)
    assert name in {entry["name"] for entry in everything}
    assert all(entry["summary"] and entry["doc"] for entry in everything)
    (one,) = read(command, name)
    shown = call(command, name)
    assert one["doc"] in shown.stdout
    assert name in call(command).stdout


def test_every_option_and_every_rule_that_can_be_disabled_is_listed() -> None:
    assert {entry["name"] for entry in read("options")} == set(graphex.CompilerConfig().as_dict())
    for entry in read("rules"):
        graphex.explain(abs, (1,), options={"disable_rules": [entry["name"]]}, calls=1)


def test_names_that_are_known_without_torch_are_those_that_there_are() -> None:
    assert NAMES.read_text() == names_text(), "run `make docs`"


def test_help_names_every_command_that_is_there() -> None:
    listed = call("--help").stdout
    assert "..." not in listed.partition("Commands:")[2]  # a sentence is not cut off
    assert {name for name in COMMANDS if f"\n  {name} " in listed} >= set(COMMANDS) - {"run"}
    assert call("--version").stdout.strip().endswith(graphex.__version__)


# -- doctor, bench, report ---------------------------------------------------------------------------------------------


def test_doctor_compiles_something_and_says_how_it_went() -> None:
    findings = {finding["name"]: finding for finding in read("doctor")}
    assert findings["compilation"]["status"] == "ok"
    assert "equal to eager" in findings["compilation"]["found"]
    assert all(finding["advice"] for finding in findings.values() if finding["status"] != "ok")


@pytest.mark.parametrize("version", ["2.16.0", "2.16.0.dev20261101+cu132", "3.0.0"])
def test_doctor_says_that_torch_is_newer_than_what_was_tried(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(machine, "CHECKS", machine.CHECKS[:2])
    (found,) = (finding for finding in read("doctor") if finding["name"] == "torch")
    assert found["status"] == "untried"
    newest = TRIED[-1].version
    assert found["found"] == f"torch {version} is newer than {newest}, the newest that graphex was tried with"


@pytest.mark.parametrize("version", [*(each.version for each in TRIED), "2.15.1+cpu"])
def test_doctor_knows_the_versions_that_were_tried(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(machine, "CHECKS", machine.CHECKS[:2])
    (found,) = (finding for finding in read("doctor") if finding["name"] == "torch")
    assert (found["status"], found["found"]) == ("ok", version)


def test_doctor_says_which_private_names_of_torch_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "losses", {("torch._gone", "results are not shown"): None})
    monkeypatch.setattr(machine, "CHECKS", machine.CHECKS[:3])
    (found,) = (finding for finding in read("doctor") if finding["name"] == "torch's inside")
    assert found["status"] == "missing"
    assert found["found"] == f"torch {torch.__version__} has no torch._gone: results are not shown"


def test_doctor_says_how_a_replay_is_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(guards, "fits", None)
    monkeypatch.setenv("GRAPHEX_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    (found,) = (finding for finding in read("doctor") if finding["name"] == "replay check")
    assert found["status"] == "missing"
    assert "done in Python" in found["found"]
    assert "no-compiler" in found["found"]
    assert "install g++" in found["advice"]
    assert guards.fits is None


def test_doctor_says_that_a_cpu_compiles_nothing_without_the_compiler_that_inductor_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "CHECKS", machine.CHECKS[:8])
    monkeypatch.setenv("CXX", "no-such-compiler")
    (found,) = (finding for finding in read("doctor") if finding["name"] == "C++ compiler")
    assert (found["status"], found["found"]) == ("missing", "there is no C++ compiler 'no-such-compiler'")
    assert found["advice"].startswith("install it, or set CXX")


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")
def test_doctor_compiles_the_check_where_it_can(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(guards, "fits", None)
    monkeypatch.setenv("GRAPHEX_CACHE_DIR", str(tmp_path))
    (found,) = (finding for finding in read("doctor") if finding["name"] == "replay check")
    assert (found["status"], found["found"]) == ("ok", "done in C++, compiled and loaded")


def test_the_best_match_of_a_mistyped_name_comes_first() -> None:
    assert "did you mean 'graphex::rms_norm' or " in call("ops", "rms").output


@pytest.mark.parametrize("command", ["explain", "run"])
def test_a_mistyped_option_is_told_the_near_one(command: str, script: Path) -> None:
    near = {"explain": ("--ste", "--set"), "run": ("--devise", "--device")}[command]
    result = call(command, near[0], "cpu", str(script))
    assert result.exit_code == 2
    assert f"No such option '{near[0]}' (did you mean '{near[1]}'?)" in " ".join(result.output.split())


def test_a_pass_that_runs_twice_is_named_once_to_whoever_asks_for_another() -> None:
    assert call("passes", "remove_dead_cod").output.count("remove_dead_code") == 1


def test_bench_knows_which_benchmarks_fit() -> None:
    listed = {each["name"]: each for each in read("bench", "--list")}
    assert listed["memory"]["status"] == "fits"
    assert all(each["summary"].endswith(".") for each in listed.values())
    assert all((ROOT / "benchmarks" / f"{name}.py").is_file() for name in listed)


def test_diff_ends_with_1_where_a_rewrite_was_lost(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(script.parent)
    before, after = (str(explain_gate(Path(f"{name}.html"), **options)) for name, options in VERSIONS.items())
    worse, better = call("report", "diff", before, after), call("report", "diff", after, before)
    assert (worse.exit_code, better.exit_code) == (1, 0)
    assert "Lost: silu(gate) * up in mlp" in worse.stdout
    assert "0 rewrites lost, 1 won." in better.stdout
    again = call("report", "diff", "difference.html", before)
    assert again.exit_code == 2
    assert "is a comparison" in again.output


def test_open_shows_the_summary_and_opens_the_file(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = explain_gate(script.parent / "report.html")
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: not opened.append(address))
    result = call("report", "open", str(path))
    assert result.exit_code == 0
    assert "1 of 1 silu(gate) * up sites fused" in result.stdout
    assert opened == [path.resolve().as_uri()]
    monkeypatch.setattr("webbrowser.open", lambda address: False)
    assert call("report", "open", str(path)).exit_code == 1
    assert read("report", "open", str(path))["address"] == path.resolve().as_uri()


def test_report_diff_says_that_models_differ_and_what_else_does(tmp_path: Path) -> None:
    one = explain_gate(tmp_path / "one.html")
    other = explain_gate(tmp_path / "other.html", disable_rules=["lift_silu_mul"])
    llama = explain_llama().save(tmp_path / "llama.html")
    page = str(tmp_path / "difference.html")
    lost = in_terminal("report", "diff", str(one), str(other), "-o", page, cwd=tmp_path)
    assert lost.code == 1
    assert "Likely cause: the option disable_rules was the default, is lift_silu_mul now." in plain(lost.out)
    apart = in_terminal("report", "diff", str(llama), str(one), "-o", "apart.html", cwd=tmp_path)
    assert apart.code == 1
    assert "These are reports of different models" in plain(apart.out)
    assert "lost" not in plain(apart.out)
    assert "Nothing was compared; 'apart.html' was not written." in plain(apart.out)
    assert not (tmp_path / "apart.html").exists()


SECTION = (ROOT / "docs/debugging.md").read_text().split("## Why did my RMSNorm not fuse?")[1].split("\n## ")[0]


def test_the_steps_of_the_guide_lead_to_the_reason_and_to_the_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRAPHEX_REGIONS", "on")
    script = tmp_path / "one_norm.py"
    script.write_text((ROOT / "examples/one_norm.py").read_text())
    steps = re.findall(r"^```(console|diff)\n(.*?)^```$", SECTION, re.DOTALL | re.MULTILINE)
    assert [kind for kind, _ in steps] == ["console", "console", "diff", "console"]
    for kind, text in steps:
        if kind == "diff":
            mend(script, text)
        else:
            take(text)


def take(text: str) -> None:
    """Run each command and find what the page shows in what it prints, wrapped as it may be."""
    for command, *shown in (block.splitlines() for block in text.split("$ ")[1:]):
        program, *arguments = shlex.split(command)
        assert program == "graphex"
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, result.output
        printed = " ".join(result.stdout.split())
        for line in shown:
            assert " ".join(line.split()) in printed, f"{command}\n{result.stdout}"


def mend(script: Path, text: str) -> None:
    (old,) = re.findall(r"^-(.*)$", text, re.MULTILINE)
    assert script.read_text().count(old) == 1
    script.write_text(script.read_text().replace(old, ""))
