"""Two reports of one model, before and after a change: which rewrites were lost, which were won.

A place is identified by its rule and its module, or else by the text of its line: line numbers and node names move with
every edit, these do not. Reuse of dead memory is not counted: a fusion removes it together with the intermediates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from graphex.evidence.report.model import FORMAT
from graphex.evidence.report.summary import device_ops, rule_counts, title_of

Site = tuple[str, str]  # the rule; the module, or else the line of code
_FOLLOWS = "reuse_dead_memory"


def compare(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """The data of the page that shows a difference."""
    lost, won = _lost_and_won(before, after)
    return {
        "format": FORMAT,
        "kind": "difference",
        "title": f"{before['title']} -> {after['title']}" if before["title"] != after["title"] else before["title"],
        "made_with": {"before": before["made_with"], "after": after["made_with"]},
        "summary": _summary(before, after, lost, won),
        "numbers": _numbers(before, after),
        "rules": _rules(before, after),
        "lost": lost,
        "won": won,
        "reasons": {"gone": _reasons(before, after), "new": _reasons(after, before)},
    }


def has_losses(difference: dict[str, Any]) -> bool:
    return bool(difference["lost"])


def _lost_and_won(before: dict[str, Any], after: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    old, new = _sites(before), _sites(after)
    lost = Counter({site: len(lines) for site, lines in old.items()})
    won = Counter({site: len(lines) for site, lines in new.items()})
    return _told(lost - won, old, after), _told(won - lost, new, before)


def _sites(data: dict[str, Any]) -> dict[Site, list[str]]:
    """Every place where a fusion or a write in place was made, with the lines of its rewrites."""
    found: dict[Site, list[str]] = {}
    for graph in data["graphs"]:
        modules = _modules(graph)
        for rewrite in graph["rewrites"]:
            if rewrite["effect"] in ("fused", "in place", "moved") and rewrite["pass_name"] != _FOLLOWS:
                names = (*rewrite["into"], *rewrite["nodes"])
                site = _site(rewrite, names, modules)
                found.setdefault(site, []).append(_code(rewrite["line"]))
    return found


def _site(record: dict[str, Any], names: Sequence[str], modules: dict[str, str]) -> Site:
    module = next((modules[name] for name in names if name in modules), "")
    return record["rule"], module or _code(record["line"])


def _modules(graph: dict[str, Any]) -> dict[str, str]:
    """The module of each node, by its name in any snapshot of the graph."""
    paths = [path for path, _ in graph["modules"]]
    return {node["name"]: paths[node["module"]] for node in graph["nodes"] if node["module"] >= 0}


def _code(line: str) -> str:
    """``model.py: return x + y``, without the number of the line."""
    place, _, code = line.partition(": ")
    return f"{place.partition(':')[0]}: {code}" if code else place


def _told(sites: Counter[Site], lines: dict[Site, list[str]], other: dict[str, Any]) -> list[dict[str, Any]]:
    """Places with the reason that the other report gives for not having them, where it gives one."""
    reasons: dict[Site, str] = {}
    for graph in other["graphs"]:
        modules = _modules(graph)
        for missed in (*graph["refusals"], *graph["near_misses"]):
            reasons.setdefault(_site(missed, [missed["node"]], modules), missed["reason"])
    return [
        {"rule": site[0], "where": site[1], "line": lines[site][0], "times": times, "reason": reasons.get(site, "")}
        for site, times in sorted(sites.items())
    ]


def _reasons(data: dict[str, Any], other: dict[str, Any]) -> list[dict[str, str]]:
    """Refusals and near misses that only `data` has."""

    def told(of: dict[str, Any]) -> dict[tuple[str, str, str], None]:
        return {
            (each["rule"], each["reason"], _code(each["line"])): None
            for graph in of["graphs"]
            for each in (*graph["refusals"], *graph["near_misses"])
        }

    known = told(other)
    return [
        {"rule": rule, "reason": why, "line": line} for rule, why, line in told(data) if (rule, why, line) not in known
    ]


def _rules(before: dict[str, Any], after: dict[str, Any]) -> list[dict[str, Any]]:
    old, new = rule_counts(before["graphs"]), rule_counts(after["graphs"])
    return [
        {"rule": rule, "title": title_of(rule), "before": old.get(rule, (0, 0)), "after": new.get(rule, (0, 0))}
        for rule in dict.fromkeys([*old, *new])
    ]


def _numbers(before: dict[str, Any], after: dict[str, Any]) -> list[dict[str, Any]]:
    """The counts before and after; less is better in all of them."""
    return [
        {"name": name, "unit": unit, "before": count(before["graphs"]), "after": count(after["graphs"])}
        for name, unit, count in _COUNTED
    ]


def _device_ops(graphs: list[dict[str, Any]]) -> int:
    """A fused op is one, with a kernel here or not: a comparison is about what rewrites make of a model."""
    return device_ops(graphs, preview=True)


def _moved(graphs: list[dict[str, Any]]) -> int:
    return sum(refusal["bytes_moved"] for graph in graphs for refusal in graph["refusals"])


_COUNTED = (
    ("graphs", "", len),
    ("device ops", "", _device_ops),
    ("bytes moved in every call", "bytes", _moved),
    ("peak of intermediate memory", "bytes", lambda graphs: sum(m["peak_after"] for g in graphs for m in g["memory"])),
    ("ops outside of device graphs", "", lambda graphs: sum(cut["ops"] for graph in graphs for cut in graph["cuts"])),
    ("fallbacks", "", lambda graphs: sum(len(graph["fallbacks"]) for graph in graphs)),
    ("time in passes", "seconds", lambda graphs: sum(ran["seconds"] for graph in graphs for ran in graph["passes"])),
)


def _summary(
    before: dict[str, Any], after: dict[str, Any], lost: list[dict[str, Any]], won: list[dict[str, Any]]
) -> list[dict[str, str]]:
    gone, gained = (sum(site["times"] for site in sites) for sites in (lost, won))
    sentences = [
        {
            "tone": "bad" if gone else "good",
            "text": f"{gone} {'rewrite' if gone == 1 else 'rewrites'} lost, {gained} won.",
        }
    ]
    for site in lost:
        because = f", because {site['reason']}" if site["reason"] else ""
        times = "" if site["times"] == 1 else f" ({site['times']} times)"
        text = f"Lost: {title_of(site['rule'])} in {site['where']}{times}{because}."
        sentences.append({"tone": "bad", "text": text})
    ops = [_device_ops(data["graphs"]) for data in (before, after)]
    sentences.append({"tone": "bad" if ops[1] > ops[0] else "good", "text": f"{ops[0]} device ops -> {ops[1]}."})
    return sentences
