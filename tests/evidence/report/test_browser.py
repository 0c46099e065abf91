"""Reports in a real browser: what a person sees, clicks and types."""

from __future__ import annotations

import copy
import runpy
import struct
from pathlib import Path

import pytest
import torch

import graphex
from graphex.evidence.report.compare import compare
from graphex.evidence.report.page import read_data, write_page
from tests.harness.browser import Browser
from tests.harness.processes import ROOT
from tests.harness.reports import (
    VERSIONS,
    explain_gate,
    explain_llama,
    explain_training,
    explain_without_a_rule,
)

TABS = ("overview", "graph", "rules", "memory", "streams", "captures", "source", "code")


def test_the_first_view_says_what_happened(chrome: Browser, llama_page: Path) -> None:
    chrome.open(llama_page)
    sentences = chrome.texts(".summary li")
    assert sentences[0].endswith("counted from the final graph.")
    assert any(text.startswith("5 of 5 RMSNorm sites fused") for text in sentences)
    assert any(text.startswith("All 4 input updates are written in place") for text in sentences)
    assert len(chrome.texts(".timeline .pass")) == 14


def test_every_sentence_of_the_overview_leads_to_what_it_names(chrome: Browser, missed_page: Path) -> None:
    chrome.open(missed_page)
    chrome.click(".summary .link", "residual add + RMSNorm")
    assert chrome.run("return document.querySelector('[role=tabpanel]:not([hidden])').id") == "panel-rules"
    assert chrome.run("return document.querySelector('.rule[data-rule=\"add_rms_norm\"]').open")
    chrome.press("1")
    chrome.click(".summary .link", "tiny_llama.py:55")
    (line,) = chrome.texts(".source-code .line.chosen")
    assert line.split()[0] == "55"
    chrome.press("1")
    chrome.click(".summary .link", "input updates")
    assert chrome.run("return document.querySelector('[role=tabpanel]:not([hidden])').id") == "panel-memory"


def test_the_overview_says_how_long_compiling_took_and_with_what(chrome: Browser, llama_page: Path) -> None:
    chrome.open(llama_page)
    stages = chrome.texts("#compile-time tbody td:first-child")
    assert stages[:4] == ["Dynamo", "AOTAutograd", "passes", "program"]
    made = chrome.text("#made-with")
    assert "lift_idioms" in made
    assert torch.__version__ in made
    chrome.click("#made-with .chip", "Generated code")
    assert "def forward(" in chrome.text(".generated")


def test_a_training_step_is_drawn_from_forward_to_backward(chrome: Browser, tmp_path: Path) -> None:
    chrome.open(explain_training().save(tmp_path / "report.html"))
    assert [text.split()[0] for text in chrome.texts(".memory-curve text")] == ["forward", "backward"]
    assert chrome.texts(".training-step tbody td:first-child") == ["forward", "backward"]
    chrome.click(".training-step .chip", "Sequential backward")
    assert chrome.texts("select[aria-label=Graph] option:checked") == ["Sequential backward"]


# -- several graphs ------------------------------------------------------------------------------------------------


def test_the_table_of_graphs_says_why_each_exists(chrome: Browser, broken_page: Path) -> None:
    chrome.open(broken_page)
    graphs = read_data(broken_page)["graphs"]
    (place,) = {each["line"].partition(": ")[0] for graph in graphs for each in graph["breaks"]}
    assert place.startswith("reports.py:")
    assert chrome.texts("#graphs .because") == [
        f"the first graph of broken; ends at the graph break at {place} (`print`)",
        f"goes on after the graph break at {place}",
        f"recompiled because size 0 of x changed from 2 to 3; ends at the graph break at {place} (`print`)",
        "recompiled because size 0 of y changed from 2 to 3",
    ]
    chrome.click("#graphs .because .link", place)
    (line,) = chrome.texts(".source-code .line.chosen")
    assert 'print(end="")' in line


def test_the_source_marks_the_lines_where_the_graph_breaks(chrome: Browser, broken_page: Path) -> None:
    for graph in range(4):  # a break is not about one of the graphs
        chrome.open(broken_page, f"tab=source&graph={graph}")
        (line,) = chrome.texts(".source-code .line.broken")
        assert 'print(end="")' in line
    assert "the graph breaks here" in chrome.text(".line-panel")
    chrome.click(".source-code .line.broken")
    assert "The graph breaks here: `print`" in chrome.text(".line-panel")
    assert "What would help" in chrome.text(".line-panel")


def test_the_list_of_graphs_shows_the_graph_of_the_address(chrome: Browser, broken_page: Path) -> None:
    for number, graph in enumerate(read_data(broken_page)["graphs"]):
        chrome.open(broken_page, f"tab=captures&graph={number}")
        assert chrome.texts("select[aria-label=Graph] option:checked") == [graph["name"]]
        assert chrome.texts("#panel-captures tbody tr:first-child td:first-child")[0] == graph["name"]


def test_after_a_rule_is_left_out_the_report_opens_on_what_runs_and_names_the_rule(
    chrome: Browser, tmp_path: Path
) -> None:
    page = explain_without_a_rule().save(tmp_path / "report.html")
    chrome.open(page)
    name = "<lambda> inference without rule 'doubled'"
    assert chrome.texts("select[aria-label=Graph] option:checked") == [name]
    assert "by rule 'doubled' of 'fuse_patterns', which was left out" in chrome.texts(".summary li")[0]
    ran, attempt = chrome.texts("#graphs .because")
    assert ran.endswith("runs since verification left out rule 'doubled' of 'fuse_patterns'")
    assert attempt == f"does not run: verification found it wrong, and '{name}' runs instead"
    chrome.press("6")
    running = chrome.texts("#panel-captures tbody tr:first-child td")
    assert running[:2] == [name, "3"]
    assert "rule 'doubled' of 'fuse_patterns'" in chrome.texts("#panel-captures tbody td")
    chrome.press("8")
    assert "cos" in chrome.text(".generated")
    chrome.open(page, "tab=captures&graph=1")
    assert f"The graph does not run: '{name}' runs instead." in chrome.text("#panel-captures")


def test_a_view_that_several_modules_share_is_drawn_around_them(chrome: Browser, tmp_path: Path) -> None:
    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (torch.nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(self.q(x) @ self.k(x).mT, -1) @ self.v(x)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(x.exp()) + x

    with torch.no_grad():
        page = graphex.explain(Model(), (torch.randn(2, 4, 8),), calls=1).save(tmp_path / "report.html")
    chrome.open(page, "tab=graph")
    chrome.click("#close-all")
    chrome.click("#open-all")
    module = """
        const cy = document.querySelector(".canvas")._cyreg.cy;
        const within = (node) => node.isOrphan() ? "" : node.parent().id();
        return cy.edges().map((edge) => [within(edge.source()), within(edge.target())])"""
    edges = {(source.rpartition(".")[2], target.rpartition(".")[2]) for source, target in chrome.run(module)}
    assert not edges & {("q", "k"), ("q", "v"), ("k", "v")}


def test_the_memory_table_shows_its_lines_at_1230_pixels(chrome: Browser, llama_page: Path) -> None:
    chrome.resize(1230, 900)
    chrome.open(llama_page, "tab=memory")
    overflow = """
        const boxes = [...document.querySelectorAll("#panel-memory .scroll")];
        return boxes.map((box) => box.scrollWidth - box.clientWidth)"""
    assert max(chrome.run(overflow)) <= 0
    assert all("tiny_llama.py" in row for row in chrome.texts("#panel-memory tbody td:last-child"))


def test_regions_are_a_table_that_fits_with_times_that_can_be_read(
    chrome: Browser, llama: graphex.Report, tmp_path: Path
) -> None:
    data = read_data(llama.save(tmp_path / "plain.html"))
    names = tuple(f"cpp_fused_add_arange_mean_mul_pow_rsqrt_view_transpose_unsqueeze_{number}" for number in range(9))
    line = "modeling_llama.py:377: position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)"
    region = {"region": "", "status": "slower", "calls": 39, "kernels": names, "seconds": 6.963471660999858}
    times = {"seconds_compiled": 0.0021234567, "seconds_single": 0.0010234567, "lines": [line]}
    border = {"node": "embedding", "op": "aten.embedding.default", "reason": "it may raise", "line": line, "count": 5}
    data["graphs"][0]["more"] += [{"kind": "region", **region, **times}, {"kind": "region border", **border}]
    chrome.resize(1230, 900)
    chrome.open(write_page(data, tmp_path / "report.html"), "tab=captures")
    boxes = 'return [...document.querySelectorAll("#panel-captures .scroll")].map((b) => b.scrollWidth - b.clientWidth)'
    assert max(chrome.run(boxes)) <= 0
    shown = chrome.text("#panel-captures")
    assert "6.96 s" in shown
    assert "2.1 ms instead of 1.0 ms" in shown
    assert names[0] not in shown  # behind the count
    chrome.click("#panel-captures summary", "9")
    assert names[0] in chrome.text("#panel-captures")


def test_a_list_of_differences_starts_with_the_differences(chrome: Browser, large_page: Path) -> None:
    chrome.open(large_page, "tab=graph&step=1&mode=diff")
    chrome.press("l")
    seen = """
        const rows = [...document.querySelectorAll(".row")].filter((row) => row.checkVisibility());
        return rows.map((row) => row.className)"""
    rows = chrome.run(seen)
    assert rows
    assert all("removed" in row or "changed" in row or "added" in row for row in rows)
    chrome.click(".unchanged > summary")
    assert len(chrome.run(seen)) > 4000


def test_a_rule_names_the_modules_and_not_the_same_line_again(chrome: Browser, missed_page: Path) -> None:
    chrome.open(missed_page, "tab=rules")
    chrome.click('.rule[data-rule="lift_rotary"] summary')
    assert chrome.texts('.rule[data-rule="lift_rotary"] td .module') == [
        *("layers.0.attention", "layers.0.attention"),
        *("layers.1.attention", "layers.1.attention"),
    ]
    misses = chrome.texts('.rule[data-rule="linear_plus_one"] .miss')
    lines = chrome.texts('.rule[data-rule="linear_plus_one"] .miss .mono')
    assert len(misses) == len(lines) == len(set(lines)) < 15
    assert any("layers.0.attention.q" in text and "layers.1.attention.q" in text for text in misses)


def test_from_a_fused_node_to_its_origins_and_its_source(chrome: Browser, llama_page: Path) -> None:
    chrome.open(llama_page)
    chrome.press("/")
    chrome.press("layers.0 rms_norm")
    assert chrome.texts(".hits .hit") != []
    chrome.press("\ue007")  # Enter
    chosen = chrome.text(".side h3")
    assert "rms_norm" in chosen
    facts = chrome.text(".side .facts")
    assert "float32[1, 1, 64]" in facts
    assert "layers.0" in facts
    origins = chrome.texts(".side .chip.origin")
    assert "rsqrt" in origins
    chrome.click(".side .chip.origin", "rsqrt")
    assert chrome.run("return document.getElementById('steps').selectedOptions[0].text") == "As given"
    assert chrome.text(".side h3") == "rsqrt"
    assert chosen in chrome.texts(".side .chip.heir")
    chrome.click(".side .chip.source", "Open in source")
    (line,) = chrome.texts(".source-code .line.chosen")
    assert "torch.rsqrt" in line
    assert "replaced by a fusion" in chrome.text(".line-panel")


def test_a_click_on_the_drawing_chooses_the_node(chrome: Browser, llama_page: Path) -> None:
    chrome.open(llama_page, "tab=graph&node=rms_norm_default_4")
    chrome.press("\ue00c", "\ue00c")  # Escape: nothing is chosen
    assert chrome.texts(".side h3") == []
    chrome.click_drawn("rms_norm_default_4")
    assert chrome.text(".side h3") == "rms_norm_default_4"
    assert "6 nodes match it" in chrome.text(".side .events")


def test_hits_of_a_search_are_seen_in_the_drawing_also_in_closed_modules(chrome: Browser, llama_page: Path) -> None:
    chrome.open(llama_page, "tab=graph")
    chrome.click("#close-all")
    chrome.press("/")
    chrome.press("layers.1 silu_mul")
    marked = "return document.querySelector('.canvas')._cyreg.cy.nodes('.hit').map((node) => node.id())"
    assert chrome.run(marked) == ["g:layers.1"]
    chrome.run("const s = document.getElementById('search'); s.value = ''; s.dispatchEvent(new Event('input'))")
    assert chrome.run(marked) == []


def test_a_pass_is_shown_before_after_and_as_a_difference(chrome: Browser, llama_page: Path) -> None:
    chrome.open(llama_page)
    chrome.click('.pass[data-pass="4"]')
    assert chrome.run("return document.getElementById('steps').selectedOptions[0].text").startswith(
        "lift · lift_idioms"
    )
    chrome.press("l")
    removed, added = (
        chrome.run(f"return document.querySelectorAll('.row.{kind}').length") for kind in ("removed", "added")
    )
    assert removed > added > 0
    chrome.press("b")
    assert not chrome.texts(".row.added")
    assert chrome.texts(".row.removed")
    chrome.press("a")
    assert chrome.texts(".row.added")
    assert not chrome.texts(".row.removed")
    chrome.press("]")
    assert "merge_common_subexpressions" in chrome.run(
        "return document.getElementById('steps').selectedOptions[0].text"
    )
    chrome.press("[", "[")
    assert "lift_attention" in chrome.run("return document.getElementById('steps').selectedOptions[0].text")


def test_effects_have_colours_of_their_own(chrome: Browser, llama_page: Path) -> None:
    chrome.open(llama_page, "tab=graph&step=8&mode=diff&node=add_rms_norm_default")
    fused = chrome.drawn_colour("add_rms_norm_default")
    chrome.open(llama_page, "tab=graph&step=10&mode=diff&node=index_copy")
    in_place = chrome.drawn_colour("index_copy")
    chrome.open(llama_page, "tab=graph&step=6&mode=diff&node=le_1")
    assert len({fused, in_place, chrome.drawn_colour("le_1")}) == 3


def test_near_misses_lead_to_their_nodes(chrome: Browser, tmp_path: Path) -> None:
    def reshaped(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        z = (x + y).view(6, 8)
        return z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-6) * weight

    given = torch.randn(3, 16), torch.randn(3, 16), torch.randn(8)
    report = graphex.explain(reshaped, given, options={"lift_idioms": "always"})
    chrome.open(report.save(tmp_path / "report.html"), "tab=rules")
    assert "stands where the rule has add" in chrome.text('.rule[data-rule="add_rms_norm"] .miss')
    chrome.click('.rule[data-rule="add_rms_norm"] .miss .chip')
    assert chrome.text(".side h3") == "view"


def test_certificates_lead_to_their_nodes(chrome: Browser, llama_page: Path) -> None:
    chrome.open(llama_page, "tab=memory")
    assert any("caches[0][0]" in row for row in chrome.texts("table tr"))
    chrome.click("td .node-chip", "index_copy")
    assert "saves" in chrome.text(".side .events")


def test_places_that_are_as_good_as_they_are_are_no_misses(chrome: Browser, tmp_path: Path) -> None:
    given = torch.randn(70, 8).bfloat16(), torch.randn(8, 8).bfloat16()
    report = graphex.explain(torch.nn.functional.linear, given, options={"lift_idioms": "always"})
    chrome.open(report.save(tmp_path / "report.html"), "tab=rules")
    chrome.click('.rule[data-rule="linears"] summary')
    assert "70 rows are more than 64" in chrome.text('.rule[data-rule="linears"] .rule-body')
    assert chrome.texts('.rule[data-rule="linears"] .badge') == []
    assert chrome.texts(".miss") == []


def test_a_compiled_region_is_one_box_that_opens(
    chrome: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stacked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = (torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(2))
            self.layers = torch.nn.ModuleList(layers)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    monkeypatch.setenv("GRAPHEX_REGIONS", "on")
    with torch.no_grad():
        report = graphex.explain(Stacked(), (torch.randn(4, 8),), calls=1)
    (region,) = report.journal.regions
    page = report.save(tmp_path / "report.html")
    labels = "return document.querySelector('.canvas')._cyreg.cy.nodes().map((node) => node.data('label'))"
    chrome.open(page, "tab=graph")
    closed = chrome.run(labels)
    assert len(closed) == 2
    assert f"{region.region}  compiled\n{region.calls} ops, layers.0 to 1" in closed
    chrome.open(page, f"tab=graph&node={region.region}")
    assert chrome.text(".side h3") == region.region
    assert {"layers.0  Sequential", "layers.1  Sequential"} <= {
        label.partition("\n")[0] for label in chrome.run(labels)
    }


def test_modules_open_and_close(chrome: Browser, llama_page: Path) -> None:
    chrome.open(llama_page, "tab=graph")
    chrome.click("#open-all")
    assert " 0 closed modules" in chrome.text(".status")
    chrome.click("#close-all")
    closed = chrome.text(".status")
    assert " 0 closed modules" not in closed
    chrome.press("/")
    chrome.press("layers.1.attention.q", "\ue007")  # Enter
    assert chrome.text(".status") != closed
    assert "layers.1.attention.q" in chrome.text(".side .facts")


def test_five_thousand_nodes_stay_usable(chrome: Browser, large_page: Path) -> None:
    chrome.open(large_page, "tab=graph")
    assert "4752 nodes: " in chrome.text(".status")  # 250 views are gone
    assert chrome.run("return document.querySelector('.canvas')._cyreg.cy.nodes().length") < 300
    chrome.press("/")
    chrome.press("layers.200 sin")
    assert chrome.text(".hit-count") == "6 hits"
    chrome.press("\ue007", "\ue007")
    assert chrome.text(".hit-count") == "2 of 6"
    name = chrome.text(".side h3")
    chrome.press("\ue00c", "\ue00c")
    chrome.click_drawn(name)
    assert chrome.text(".side h3") == name
    chrome.click("#open-all")
    assert chrome.run("return document.querySelector('.canvas')._cyreg.cy.nodes('.node').length") > 500
    chrome.press("l")
    assert chrome.run("return document.querySelectorAll('.row').length") > 4700


def test_a_comparison_names_what_was_lost(chrome: Browser, tmp_path: Path) -> None:
    before, after = (
        read_data(explain_gate(tmp_path / f"{name}.html", **options)) for name, options in VERSIONS.items()
    )
    chrome.open(write_page(compare(before, after), tmp_path / "difference.html"))
    sentences = chrome.texts(".summary li")
    assert sentences[0] == "1 rewrite lost, 0 won."
    assert sentences[1] == "Likely cause: the option disable_rules was the default, is lift_silu_mul now."
    assert sentences[2].startswith("Lost: silu(gate) * up in mlp.")
    assert any("disable_rules" in row for row in chrome.texts("table tr"))
    assert chrome.texts("td .lost") == ["lift_silu_mul"]


def test_a_comparison_of_two_models_says_that_they_are_two(
    chrome: Browser, llama: graphex.Report, llama_page: Path, tmp_path: Path
) -> None:
    other = read_data(explain_gate(tmp_path / "gate.html"))
    chrome.open(write_page(compare(read_data(llama_page), other), tmp_path / "difference.html"))
    assert chrome.texts(".summary li")[0].startswith("These are reports of different models")
    assert chrome.texts("section h2") == ["Summary", "Made with"]


def test_numbers_of_models_that_differ_are_neither_good_nor_bad(
    chrome: Browser, llama: graphex.Report, llama_page: Path, tmp_path: Path
) -> None:
    shorter = explain_llama(layers=1).save(tmp_path / "shorter.html")
    chrome.open(write_page(compare(read_data(llama_page), read_data(shorter)), tmp_path / "difference.html"))
    assert chrome.texts(".summary li")[0] == "The models differ: 2 -> 1 of layers.* (Layer)."
    assert not chrome.texts("b.less, b.more, .summary li.good")


def test_code_keeps_clear_of_its_border_and_no_table_has_an_empty_head(chrome: Browser, llama_page: Path) -> None:
    chrome.open(llama_page, "tab=code")
    assert chrome.run("return getComputedStyle(document.querySelector('pre.generated')).paddingLeft") == "12px"
    chrome.open(llama_page)
    assert (
        chrome.run("return document.querySelector('#made-with section:nth-of-type(2) h2').textContent") == "Made with"
    )
    assert chrome.run("return document.querySelectorAll('#made-with section:nth-of-type(2) thead').length") == 0


def test_rules_break_names_between_words_only(chrome: Browser, llama_page: Path) -> None:
    chrome.open(llama_page, "tab=rules")
    broken = """
        document.querySelectorAll("details.rule").forEach((each) => (each.open = true));
        const lines = (node) => {
          const range = document.createRange();
          range.selectNodeContents(node);
          return new Set([...range.getClientRects()].map((each) => Math.round(each.top))).size;
        };
        const names = [...document.querySelectorAll(".rule-body td .module, .rule-body td .node-chip")];
        return [names.length, names.filter((name) => [...name.childNodes].some((each) => lines(each) > 1)).length];
    """
    shown, inside_of_words = chrome.run(broken)
    assert shown > 0
    assert inside_of_words == 0


def test_streams_are_lanes_and_events_arrows(chrome: Browser, llama_page: Path, tmp_path: Path) -> None:
    data = copy.deepcopy(read_data(llama_page))
    graph = data["graphs"][0]
    ops = [graph["nodes"][place] for place in graph["pictures"][-1]]
    ops = [node for node in ops if node["computes"]]
    for node in ops[6:12]:
        node["stream"] = "side <1>"
    ops[5]["event"], ops[6]["event"] = ("record", "ready"), ("wait", "ready")
    chrome.open(write_page(data, tmp_path / "streams.html"), "tab=streams")
    assert chrome.texts(".lane-name") == ["current", "side <1>"]
    assert chrome.run("return document.querySelectorAll('.crossing.event').length") == 1
    chrome.click(".cell.event")
    assert chrome.text(".side h3") == ops[5]["name"]


def test_everything_can_be_reached_with_the_keyboard(chrome: Browser, llama_page: Path) -> None:
    chrome.open(llama_page)
    for number, tab in enumerate(TABS, start=1):
        chrome.press(str(number))
        assert chrome.run("return document.querySelector('[role=tabpanel]:not([hidden])').id") == f"panel-{tab}"
    chrome.press("1")
    chrome.run("document.getElementById('tab-overview').focus()")
    chrome.press("\ue014")  # to the right
    assert chrome.run("return document.activeElement.id") == "tab-graph"
    chrome.run("document.querySelector('.canvas').focus()")
    chrome.press("\ue015")  # down: the first node, then what reads it
    first = chrome.text(".side h3")
    chrome.press("\ue015")
    assert chrome.text(".side h3") != first
    chrome.press("?")
    assert chrome.run("return document.getElementById('help').open")
    chrome.press("\ue00c")
    assert not chrome.run("return document.getElementById('help').open")


@pytest.mark.parametrize("width", [390, 1360])
@pytest.mark.parametrize("dark", [False, True])
def test_no_page_is_wider_than_its_window_in_light_and_dark(
    chrome: Browser, llama_page: Path, width: int, dark: bool
) -> None:
    chrome.resize(width, 844, dark=dark)
    chrome.open(llama_page)
    for number, tab in enumerate(TABS, start=1):
        chrome.press(str(number))
        assert chrome.run("return document.documentElement.scrollWidth") <= width, tab
    background = chrome.run("return getComputedStyle(document.body).backgroundColor")
    chrome.press("t")
    assert chrome.run("return getComputedStyle(document.body).backgroundColor") != background


def test_the_source_opens_where_something_happened(chrome: Browser, llama_page: Path) -> None:
    chrome.open(llama_page, "tab=source")
    first = (
        "const box = document.querySelector('.source-code .dot').getBoundingClientRect(); return [box.top, box.bottom]"
    )
    top, bottom = chrome.run(first)
    assert 0 < top < bottom < 900
    chrome.click(".line.marked")
    assert chrome.text(".line-panel h3").startswith("Line ")


def test_the_address_holds_the_place(chrome: Browser, llama_page: Path) -> None:
    chrome.open(llama_page, "tab=graph&node=rms_norm_default_4")
    where = chrome.run("return location.hash.slice(1)")
    chrome.open(llama_page, where)
    assert chrome.text(".side h3") == "rms_norm_default_4"
    chrome.open(llama_page, "tab=graph&graph=77&step=-3&node=nobody&mode=x")
    assert chrome.texts(".side h3") == []


FOLDER = ROOT / "docs/pictures"


def test_every_picture_of_the_documentation_can_be_taken_again(
    chrome: Browser, llama_page: Path, tmp_path: Path
) -> None:
    script = runpy.run_path(str(FOLDER / "make.py"))
    written = script["take"](chrome, script["write_reports"](tmp_path, llama_page), tmp_path)
    assert {path.name for path in written} == {path.name for path in FOLDER.glob("*.png")}
    for path in written:
        picture = script["PICTURES"][path.stem]
        assert struct.unpack(">II", path.read_bytes()[16:24]) == (picture.width, picture.height)
        assert path.stat().st_size > 20_000  # an empty page is a few kilobytes
