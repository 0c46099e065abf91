"""What a journal says of rewrites after verification, and what it costs to ask."""

import pytest

from graphex.records import Journal, PassRan, Record, Rewrote, RuleTried, Verified


class Scanned(list[Record]):
    """Records that count how often something looks through all of them."""

    scans = 0

    def __iter__(self):
        self.scans += 1
        return super().__iter__()


def rewrote(graph: str, pass_name: str) -> tuple[Record, Record]:
    return (
        Rewrote(graph, pass_name, f"rule of {pass_name}", ("a",), ("b",), "it is the same"),
        RuleTried(graph, pass_name, f"rule of {pass_name}", 1, 1),
    )


def journal_of(graphs: int, passes: int) -> Journal:
    """Graphs with a rewrite in each of their passes; verification undid what every second graph did from pass 1 on."""
    journal = Journal()
    for graph in (f"graph {number}" for number in range(graphs)):
        for name in (f"pass {number}" for number in range(passes)):
            journal.records += [PassRan(graph, "clean", name, "changed", 0.0, 2, 1), *rewrote(graph, name)]
    journal.records += [Verified(f"graph {number}", "mismatch", "output 0", "pass 1") for number in range(0, graphs, 2)]
    return journal


@pytest.mark.parametrize("asked", ["rewrites", "rules"])
def test_asking_looks_through_the_records_as_often_however_many_there_are(asked):
    scans = []
    for size in (2, 30):
        journal = journal_of(graphs=size, passes=size)
        journal.records = records = Scanned(journal.records)
        getattr(journal, asked)
        scans.append(records.scans)
    assert scans[0] == scans[1]


def test_only_the_passes_before_the_one_to_blame_are_kept():
    journal = journal_of(graphs=2, passes=3)
    kept = [("graph 0", "pass 0"), *(("graph 1", f"pass {number}") for number in range(3))]
    assert [(each.graph, each.pass_name) for each in journal.rewrites] == kept
    assert [(each.graph, each.pass_name) for each in journal.rules] == kept


def test_nothing_of_a_graph_is_kept_that_another_version_replaced():
    journal = journal_of(graphs=2, passes=2)
    journal.add(Verified("graph 1", "mismatch", "output 0", "pass 1", runs="graph 1 without pass 'pass 1'"))
    journal.records += rewrote("graph 1 without pass 'pass 1'", "pass 0")
    assert [each.graph for each in journal.rewrites] == ["graph 0", "graph 1 without pass 'pass 1'"]


def test_everything_is_kept_where_code_generation_is_to_blame():
    journal = journal_of(graphs=1, passes=0)
    journal.records = [
        PassRan("graph", "clean", "pass 0", "changed", 0.0, 2, 1),
        *rewrote("graph", "pass 0"),
        Verified("graph", "mismatch", "output 0", "code generation"),
    ]
    assert len(journal.rewrites) == len(journal.rules) == 1
