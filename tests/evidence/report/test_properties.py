"""Whatever a program does, its report is consistent: every graph of it is a graph, and every record finds its nodes."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphex.backend import watching
from graphex.evidence.report.compare import compare, has_losses
from graphex.evidence.report.data import report_data
from graphex.evidence.report.page import page
from tests.fuzz.check import session
from tests.fuzz.instructions import random_program

PROGRAMS = 8


def assert_consistent(graph: dict[str, Any]) -> None:
    assert graph["pictures"]
    pictures = [[graph["nodes"][place] for place in picture] for picture in graph["pictures"]]
    given = {node["name"] for node in pictures[0]}
    for picture in pictures:
        seen: set[str] = set()
        for node in picture:
            assert set(node["inputs"]) <= seen, node
            assert node["name"] not in seen
            assert set(node["origins"] or ()) <= given, node
            seen.add(node["name"])
        assert all(set(node["memory"] or ()) <= seen for node in picture)
    names = {node["name"] for node in graph["nodes"]}
    for number, ran in enumerate(graph["passes"]):
        made = [rewrite for rewrite in graph["rewrites"] if rewrite["pass"] == number]
        before, after = pictures[ran["before"]], pictures[ran["picture"]]
        assert (len(before), len(after)) == (ran["nodes_before"], ran["nodes_after"])
        assert not made or ran["status"] == "changed"
        for rewrite in made:
            assert rewrite["pass_name"] == ran["name"]
            assert set(rewrite["into"]) <= names
    assert graph["passes"][-1]["picture"] == len(pictures) - 1


def test_the_report_of_any_program_is_consistent() -> None:
    with session() as checks:

        @settings(
            max_examples=PROGRAMS,
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(rng=st.randoms(use_true_random=False))
        def consistent(rng: Any) -> None:
            with watching() as watch:
                checks.check(random_program(rng))
            data = report_data("a program", watch.journals)
            for graph in data["graphs"]:
                assert_consistent(graph)
            page(data)  # all of it is plain data
            assert not has_losses(compare(data, data))

        consistent()
