"""The documentation is true: its code runs, prints what it says, and its links lead somewhere.

The Python blocks of a page are one program. Two comments in a page carry meaning:

    <!-- file: examples/NAME.py -->     the block below is that file, word for word
    <!-- output -->                     the block below is what the block above it prints"""

from __future__ import annotations

import dataclasses
import os
import re
import runpy
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from graphex import records
from graphex.evidence.report.page import read_data
from tests.harness.documents import Block, blocks, run_block
from tests.harness.processes import ROOT, python

GENERATE = runpy.run_path(str(ROOT / "docs/generate.py"))
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(ROOT.glob("docs/*.md"))
WITH_CODE = [page for page in PAGES if "```python" in page.read_text()]
EXAMPLES = [
    ROOT / "examples" / f"{name}.py"
    for name in (
        "custom_pass",
        "explain_model",
        "fusion_rule",
        "huggingface",
        "one_norm",
        "stream_pass",
        "train",
        "verify_a_pass",
    )
]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture
def folders_of_the_run(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page and an example write to temporary folders, as a user would: among the files of the run."""
    monkeypatch.setattr(tempfile, "mkdtemp", lambda *_, **__: str(tmp_path_factory.mktemp("folder")))


@pytest.mark.usefixtures("folders_of_the_run")
@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_every_python_block_runs_and_prints_what_the_page_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / f"{page.stem.lower()}.py"  # on disk, so that source lines can be shown
    module = ModuleType(f"page_{page.stem.lower()}")  # Dynamo looks functions up in the module that they name
    monkeypatch.setitem(sys.modules, module.__name__, module)
    namespace = vars(module)
    program, printed = "", ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in blocks(page):
            if block.language == "python" and "import graphex.ascend" in block.text:
                code, printed = run_block(block, tmp_path)  # it gives its process a device that cannot be taken back
                assert code == 0, printed
            elif block.language == "python":
                program += "\n" * bool(program)
                script.write_text(program + block.text)
                run(block, "\n" * program.count("\n") + block.text, script, namespace, page)
                program += block.text
                printed = capsys.readouterr().out
            elif block.marker == "output":
                check_output(page, block, printed)


def run(block: Block, code: str, script: Path, namespace: dict[str, object], page: Path) -> None:
    try:
        exec(compile(code, str(script), "exec"), namespace)
    except BaseException as error:
        error.add_note(f"in the block at {name_of(page)}:{block.line}")
        raise


def check_output(page: Path, block: Block, printed: str) -> None:
    if words(printed) == words(block.text):
        return
    complaint = f"{name_of(page)}:{block.line} shows other output than\n{printed}"
    assert os.environ.get("GRAPHEX_UPDATE_DOCS") == "1", complaint
    shown = "".join(f"{line.rstrip()}\n" for line in printed.splitlines())
    page.write_text(page.read_text().replace(f"```text\n{block.text}```", f"```text\n{shown}```"))


def words(printed: str) -> Counter[str]:
    """What was printed without its layout: times differ from run to run, and with them the width of columns."""
    return Counter(re.sub(r"\d+\.\d+(e[-+]\d+)?", "0.0", re.sub("─+", "", printed)).split())


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_a_block_taken_from_a_file_is_that_file(page: Path) -> None:
    for block in blocks(page):
        if block.marker.startswith("file: "):
            assert block.text == (ROOT / block.marker.removeprefix("file: ")).read_text(), f"{page.name}:{block.line}"


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
@pytest.mark.usefixtures("folders_of_the_run")
def test_every_example_runs_and_is_shown_in_the_docs(example: Path) -> None:
    assert any(block.marker == f"file: {name_of(example)}" for page in WITH_CODE for block in blocks(page))
    if example.stem != "huggingface":  # below it runs, and what it finds is looked at
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runpy.run_path(str(example), run_name="__main__")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", text):
        path, _, heading = (target[0] or target[1]).partition("#")
        if path.startswith(("http:", "https:", "mailto:")):
            continue
        there = (page.parent / path) if path else page
        assert there.exists(), f"{page.name} links to {path}, which does not exist"
        if heading:
            assert heading in headings(there), f"{page.name} links to #{heading}, which {there.name} does not have"


def headings(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_make_targets_named_in_the_docs_exist(page: Path) -> None:
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shell = "\n".join(block.text for block in blocks(page) if block.language in ("sh", "bash", "shell", "console"))
    named = re.findall(r"^(?:\$ )?make ([a-z-]+)", shell, re.MULTILINE) + re.findall(
        r"`make ([a-z-]+)`", page.read_text()
    )
    assert set(named) <= known


def test_the_options_page_is_what_the_declarations_say() -> None:
    assert (ROOT / "docs/options.md").read_text() == GENERATE["options_page"](), "run `make docs`"


@pytest.mark.parametrize("page", [page for page in PAGES if "<!-- generated:" in page.read_text()], ids=name_of)
def test_generated_parts_are_up_to_date(page: Path) -> None:
    assert page.read_text() == GENERATE["filled"](page.read_text()), "run `make docs`"


def test_every_generated_part_has_a_place() -> None:
    everything = "".join(page.read_text() for page in PAGES)
    assert all(f"<!-- generated: {name} -->" in everything for name in GENERATE["SECTIONS"])


@pytest.mark.parametrize("name", GENERATE["SECTIONS"])
def test_every_place_is_filled(name: str) -> None:
    assert GENERATE["SECTIONS"][name]() in GENERATE["filled"](f"<!-- generated: {name} -->\n<!-- end -->")


def test_every_field_of_every_record_is_explained() -> None:
    page = (ROOT / "docs/debugging.md").read_text()
    explained = page.split("## What the fields mean")[1].split("\n## ")[0]
    fields = {field.name for record in records.Record.__subclasses__() for field in dataclasses.fields(record)}
    assert not {name for name in fields if f"`{name}`" not in explained}


def test_every_switch_of_the_environment_is_in_the_guide_and_nothing_else_is() -> None:
    written = "".join(path.read_text() for path in ROOT.glob("graphex/**/*.py"))
    table = (ROOT / "docs/guide.md").read_text().split("## Environment switches")[1]
    assert set(re.findall(r"GRAPHEX_[A-Z_]+", table)) == set(re.findall(r"\bGRAPHEX_[A-Z_]+", written))


def test_every_room_of_the_package_is_in_the_page_on_internals() -> None:
    page = (ROOT / "docs/internals.md").read_text()
    rooms = [path for path in (ROOT / "graphex").iterdir() if not path.name.startswith(("_", "py.typed"))]
    named = (f"{path.name}/" if path.is_dir() else path.name for path in rooms)
    assert [name for name in named if f"`{name}`" not in page] == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("regions", "rounding"), [("off", 0.0), pytest.param("on", 1e-4, marks=pytest.mark.full)])
def test_what_explain_says_of_a_hugging_face_model(
    regions: str, rounding: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHEX_REGIONS", regions)
    example = runpy.run_path(str(ROOT / "examples/huggingface.py"), run_name="__main__")
    journal, reports = example["journal"], example["reports"]
    assert [verdict.status for verdict in journal.verifications] == ["equal"]
    (decoding,) = journal.graphs  # one for all tokens
    assert journal.counts[decoding.graph]["calls"] == 11
    written = [each for each in reports["decode_step"].journal.rewrites if each.rule == "write_input_in_place"]
    assert len(written) >= 4
    phases = {name: [graph.phase for graph in report.journal.graphs] for name, report in reports.items()}
    assert phases == {"forward": ["inference"], "decode_step": ["inference"], "training": ["forward", "backward"]}
    for name, report in reports.items():
        own = difference_of_aot_eager(example) if name == "decode_step" else 0.0
        assert report.worst_difference <= max(rounding, own)
        assert "device ops" in report.summary()


def difference_of_aot_eager(example: dict[str, Any]) -> float:
    """What a decode step owes to transformers: 5.23 computes a compiled one in another way than an eager one."""
    model, prompt, found = example["model"].eval(), example["prompt"], []
    for step in (model, torch.compile(model, backend="aot_eager")):
        cache = example["StaticCache"](config=example["shape"], max_cache_len=32)
        with torch.no_grad():
            model(prompt, past_key_values=cache)
            logits = step(prompt[:, -1:], past_key_values=cache).logits
        found.append([logits, *(each for layer in cache.layers for each in (layer.keys, layer.values))])
    return max((one - other).abs().max().item() for one, other in zip(*found, strict=True))


def test_the_demo_ends_with_what_to_do_and_where_its_report_is(tmp_path: Path) -> None:
    shown = python("examples/demo.py", TMPDIR=str(tmp_path), COLUMNS="400").stdout
    *_, figure, line, last = filter(None, shown.splitlines())
    told = (
        r"(A step takes (\d+ % (less|more) time than|as long as in) eager\.|Too noisy to tell: .*) .*Now put this line "
    )
    assert re.match(told, figure)
    assert line.strip() == 'model = torch.compile(model, backend="graphex")'
    report = Path(last.rpartition(": ")[2])
    assert report.parent.parent == tmp_path
    assert read_data(report)["title"] == "TinyLlama"


def test_the_demo_advises_what_its_figure_asks_for() -> None:
    from examples.demo import Times, gain, meaning

    advice = {meaning(Times(1.0, ratio), device) for ratio in (0.8, 1.2) for device in ("cpu", "cuda")}
    advice |= {meaning(Times(1.0, ratio, is_clear=False), "cpu") for ratio in (0.8, 1.2)}
    assert len(advice) == 5
    assert all("open the report" in each and each[0].isupper() for each in advice)
    assert gain(Times(1.0, 0.89)) == "A step takes 11 % less time than eager."
    assert gain(Times(1.0, 1.2)) == "A step takes 20 % more time than eager."
    assert gain(Times(1.0, 1.001)) == "A step takes as long as in eager."


def test_the_demo_tells_no_gain_that_is_smaller_than_the_noise() -> None:
    from examples.demo import Times, gain

    quiet = Times.of({"eager": [1.0, 1.01, 1.02], "graphex": [0.8, 0.81, 0.82]})
    noisy = Times.of({"eager": [1.0, 1.4, 1.5], "graphex": [0.8, 1.1, 1.2]})
    assert gain(quiet) == "A step takes 20 % less time than eager."
    assert gain(noisy).startswith("Too noisy to tell")
    assert gain(Times.of({"eager": [1.0, 2.0, 3.0], "graphex": [0.5, 0.9, 1.1]})).startswith("A step takes 50 % less")


FOLDER = ROOT / "examples" / "aten_ir"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("example", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_the_example_runs(example, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    runpy.run_path(str(example), run_name="__main__")
