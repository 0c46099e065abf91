"""Two reports of one model, before and after a change: which rewrites were lost, which were won.

A place is identified by its rule and its module, or else by the text of its line: line numbers and node names move with
every edit, these do not. Reuse of dead memory is not counted: a fusion removes it together with the intermediates.
Places that differ only in numbers (layers.0.norm, layers.1.norm) are told as one: layers.*.norm.

Reports of different models are not compared, only named: `_likeness` says whether two are of one model. Of a model
that was changed (its class, the number of its layers, its modules) the changes are named first. Only places in modules
that both reports have are lost or won then, and no count is better or worse. What was different about the two
compilations (options, versions, machine) is named, an option as the likely cause of a loss.

Two things look like losses and are none. Previews run nowhere here, so they count only where both reports were asked
for them. A region that one of the two measured as slower than single ops is told apart: measurements vary.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from graphex.errors import count_of
from graphex.evidence.report.page import FORMAT, misfit
from graphex.evidence.report.summary import Sentence, device_ops, rule_counts, sentence

Site = tuple[str, str]  # the rule; the module, or else the line of code
_FOLLOWS = "reuse_dead_memory"
_REGION = "region"
_NAMED = 6  # kinds of modules that a sentence names
_ONE_MODEL = 0.5  # the share of modules that two versions of one model have in common, at least
_NUMBER = re.compile(r"(?<![^.\[])\d+(?![^.\]])")


def compare(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """The data of the page that shows a difference. Of different models no rewrite counts as lost or won."""
    before, after = (data | {"graphs": [each for each in data["graphs"] if _runs(each)]} for data in (before, after))
    other = _why_different_models(before, after)
    found = _of_two_models(before, after, other) if other else _of_one_model(before, after)
    return {
        "format": FORMAT,
        "kind": "difference",
        "title": f"{before['title']} -> {after['title']}" if before["title"] != after["title"] else before["title"],
        "made_with": {"before": before["made_with"], "after": after["made_with"]},
        "different_models": other,
        **found,
    }


def _of_one_model(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    changed = _changed(before, after)
    edits = model_changes(before, after)
    previews = _compares_previews(before, after)
    lost, won, slower = _lost_and_won(before, after, previews)
    titles = before["titles"] | after["titles"]
    for place in (*lost, *won, *slower):
        place["title"] = titles.get(place["rule"], place["rule"])
    return {
        "changed": changed,
        "model_changes": edits,
        "summary": _summary(before, after, lost, won, slower),
        "numbers": _numbers(before["graphs"], after["graphs"], previews),
        "rules": [each | {"title": titles.get(each["rule"], each["rule"])} for each in _rules(before, after, previews)],
        "lost": lost,
        "won": won,
        "slower": slower,
        "reasons": {"gone": _reasons(before, after), "new": _reasons(after, before)},
    }


def _of_two_models(before: dict[str, Any], after: dict[str, Any], why: str) -> dict[str, Any]:
    told = [f"These are reports of different models: {why}. Compare two reports of one model."]
    told += [_about_model(which, data) for which, data in (("first", before), ("second", after))]
    nothing = {"numbers": [], "rules": [], "lost": [], "won": [], "slower": [], "reasons": {"gone": [], "new": []}}
    summary = [sentence("bad" if place == 0 else "plain", text) for place, text in enumerate(told)]
    return {"changed": [], "model_changes": [], "summary": summary, **nothing}


def _about_model(which: str, data: dict[str, Any]) -> str:
    """The subject of a report: its title, the size of its graphs and the kinds of its modules, or else of its ops."""
    kinds = list(dict.fromkeys(kind or path for path, kind in sorted(_parts(data))))
    ops = count_of(device_ops(data["graphs"], "given"), "device op")
    return f"The {which} is of {data['title']}: {ops} as given, with {_some(kinds)}."


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def _runs(graph: dict[str, Any]) -> bool:
    """Whether no other version runs in the place of a graph, since verification found it wrong."""
    return not graph.get("instead")


def has_losses(difference: dict[str, Any]) -> bool:
    """Whether the second report has lost something that the first has, or is of another model."""
    return bool(difference["lost"] or difference["different_models"])


# -- are they of one model, made in one way? ---------------------------------------------------------------------------


def _why_different_models(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Why the reports are not of one model; empty if they are. A report without graphs is of any."""
    old, new = _parts(before), _parts(after)
    if not old or not new or _likeness(old, new) >= _ONE_MODEL:
        return ""
    common, sizes = len(old & new) or "none", f"{len(old)} in the first, {len(new)} in the second"
    if any(kind for _, kind in old | new):
        return f"{common} of their modules ({sizes}; equal layers count once) have the same place and class in both"
    return f"{common} of their ops ({sizes}) are in both"


def _parts(data: dict[str, Any]) -> set[tuple[str, str]]:
    """The modules of a model, (path without numbers, class) each; of a model without modules, its ops."""
    modules = {(pattern_of(path), kind) for graph in data["graphs"] for path, kind in graph["modules"]}
    given = [(graph, graph["pictures"][0]) for graph in data["graphs"] if graph["pictures"]]
    ops = {(graph["nodes"][place]["target"], "") for graph, places in given for place in places}
    return modules or {op for op in ops if "." in op[0]}


def _likeness(old: set[tuple[str, str]], new: set[tuple[str, str]]) -> float:
    """The common part, of the smaller: a model that was extended is still the same."""
    return len(old & new) / min(len(old), len(new))


def model_changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """In what two versions of a model differ: its class, how many layers it has, the modules that only one has."""
    (old, old_class), (new, new_class) = ((_module_counts(data), _class(data)) for data in (before, after))
    found = [f"class {old_class} -> {new_class}"] if old_class != new_class and (old or new) else []
    counts = {path: f"{old[path]} -> {new[path]} of {path}" for path in old if path in new and old[path] != new[path]}
    found += [counts[path] for path in _outermost(counts)]
    for which, one, other in (("first", old, new), ("second", new, old)):
        if alone := _outermost([path for path in one if path not in other]):
            found.append(f"modules only in the {which}: {_some(alone)}")
    return found


def _class(data: dict[str, Any]) -> str:
    """The class or function that a report is of; several are named by their first."""
    return str(next((graph.get("function") for graph in data["graphs"]), "") or data["title"])


def _module_counts(data: dict[str, Any]) -> Counter[str]:
    """How many modules there are of each kind: ``layers.* (Layer)`` 4 times."""
    modules = {(path, kind) for graph in data["graphs"] for path, kind in graph["modules"]}
    return Counter(f"{pattern_of(path)} ({kind})" if kind else pattern_of(path) for path, kind in sorted(modules))


def _outermost(paths: Iterable[str]) -> list[str]:
    """The paths that are not inside of another."""
    outer: dict[str, str] = {}
    for path in sorted(paths, key=lambda each: each.count(".")):
        place = path.partition(" (")[0]
        if not any(place == known or place.startswith(f"{known}.") for known in outer):
            outer[place] = path
    return list(outer.values())


def pattern_of(path: str) -> str:
    """``layers.3.mlp`` as ``layers.*.mlp``."""
    return _NUMBER.sub("*", path)


def _changed(before: dict[str, Any], after: dict[str, Any]) -> list[dict[str, str]]:
    """The differences between the two compilations: options first, then versions and the machine."""
    found = []
    for what, old, new in (
        ("option", before["options"], after["options"]),
        ("version", before["made_with"], after["made_with"]),
    ):
        for name in dict.fromkeys([*old, *new]):
            if old.get(name) != new.get(name):
                unset = "the default" if what == "option" else "not there"
                was, now = (str(each.get(name, unset)) for each in (old, new))
                found.append({"what": what, "name": name, "before": was, "after": now})
    return found


# -- lost and won ------------------------------------------------------------------------------------------------------


def _compares_previews(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether previews were asked for, or not, in both reports alike."""
    old, new = (data["options"].get("lift_idioms") for data in (before, after))
    return bool(old == new)


def _lost_and_won(before: dict[str, Any], after: dict[str, Any], previews: bool) -> tuple[list[dict[str, Any]], ...]:
    """The places that were lost, that were won, and whose region only one of the reports measured as slower."""
    old, new = _common(_sites(before, previews), after), _common(_sites(after, previews), before)
    had = Counter({site: len(lines) for site, lines in old.items()})
    has = Counter({site: len(lines) for site, lines in new.items()})
    lost, won = had - has, has - had
    left, taken = _slower(lost, old, after), _slower(won, new, before)
    slower = [place | {"in": "second"} for place in _with_reasons(left, old, after)]
    slower += [place | {"in": "first"} for place in _with_reasons(taken, new, before)]
    return _with_reasons(lost - left, old, after), _with_reasons(won - taken, new, before), slower


def _common(sites: dict[Site, list[str]], other: dict[str, Any]) -> dict[Site, list[str]]:
    """The places in modules that the other report has too, and those outside of modules."""
    there = {path for graph in other["graphs"] for path, _ in graph["modules"]}
    return {site: lines for site, lines in sites.items() if site[1] in there or site[1] in lines}


def _slower(sites: Counter[Site], lines: dict[Site, list[str]], other: dict[str, Any]) -> Counter[Site]:
    """The regions among some places that the other report has compiled too, and measured as slower than single ops."""
    records = (each for graph in other["graphs"] for each in graph["more"] if each["kind"] == _REGION)
    known = (each for each in records if not misfit(each, {"status": str, "lines": [str]}))
    tried = Counter(_code(each["lines"][0]) for each in known if each["status"] == "slower" and each["lines"])
    found: Counter[Site] = Counter()
    for site, times in sites.items():
        alike = min(times, sum(tried[line] for line in set(lines[site]))) if site[0] == _REGION else 0
        if alike:
            found[site] = alike
    return found


def _sites(data: dict[str, Any], previews: bool) -> dict[Site, list[str]]:
    """Every place where a fusion or a write in place was made, with the lines of its rewrites."""
    found: dict[Site, list[str]] = {}
    for graph in data["graphs"]:
        modules = _modules(graph)
        for rewrite in graph["rewrites"]:
            if rewrite.get("preview") and not previews:
                continue
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


def _with_reasons(sites: Counter[Site], lines: dict[Site, list[str]], other: dict[str, Any]) -> list[dict[str, Any]]:
    """Places with the reason that the other report gives for not having them, where it gives one."""
    reasons: dict[Site, str] = {}
    for graph in other["graphs"]:
        modules = _modules(graph)
        for missed in (*graph["refusals"], *graph["near_misses"]):
            reasons.setdefault(_site(missed, [missed["node"]], modules), missed["reason"])
    return list(map(_one_pattern, _by_pattern(sites, lines, reasons)))


def _by_pattern(
    sites: Counter[Site], lines: dict[Site, list[str]], reasons: dict[Site, str]
) -> Iterable[list[dict[str, Any]]]:
    """Places of one rule that differ only in numbers, and for the same reason, together."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for (rule, where), times in sorted(sites.items(), key=lambda each: (each[0][0], _in_order(each[0][1]))):
        reason = reasons.get((rule, where), "")
        place = {"rule": rule, "where": where, "line": lines[rule, where][0], "times": times, "reason": reason}
        groups.setdefault((rule, pattern_of(where), pattern_of(re.sub(r"_\d+\b", "_*", reason))), []).append(place)
    return groups.values()


def _in_order(where: str) -> list[tuple[int, str]]:
    """Layer 10 comes after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in where.split(".")]


def _one_pattern(places: list[dict[str, Any]]) -> dict[str, Any]:
    first, names = places[0], [place["where"] for place in places]
    where = first["where"] if len(places) == 1 else pattern_of(first["where"])
    return {**first, "where": where, "times": sum(place["times"] for place in places), "places": names}


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


def _rules(before: dict[str, Any], after: dict[str, Any], previews: bool) -> list[dict[str, Any]]:
    """Every rule; those that changed come first."""
    old, new = (_rule_counts(data["graphs"], previews) for data in (before, after))
    names = sorted(dict.fromkeys([*old, *new]), key=lambda rule: old.get(rule, (0, 0)) == new.get(rule, (0, 0)))
    return [{"rule": rule, "before": old.get(rule, (0, 0)), "after": new.get(rule, (0, 0))} for rule in names]


def _rule_counts(graphs: list[dict[str, Any]], previews: bool) -> dict[str, tuple[int, int]]:
    made = Counter(each["rule"] for each in _previewed(graphs)) if not previews else Counter()
    return {rule: (matches - made[rule], all_) for rule, (matches, all_) in rule_counts(graphs).items()}


def _previewed(graphs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for graph in graphs for each in graph["rewrites"] if each.get("preview")]


def _numbers(before: list[dict[str, Any]], after: list[dict[str, Any]], previews: bool) -> list[dict[str, Any]]:
    """The counts before and after, those that differ first; less is better in all of them."""
    counted = [
        {"name": name, "unit": unit, "before": count(before), "after": count(after)}
        for name, unit, count in _COUNTED
        if previews or name != _WITH_KERNELS
    ]
    return sorted(counted, key=lambda each: each["before"] == each["after"])


def _moved(graphs: list[dict[str, Any]]) -> int:
    return sum(refusal["bytes_moved"] for graph in graphs for refusal in graph["refusals"])


def _largest_peak(graphs: list[dict[str, Any]]) -> int:
    return max((each["peak_after"] for graph in graphs for each in graph["memory"]), default=0)


_WITH_KERNELS = "device ops of all graphs where graphex has kernels"
_COUNTED = (
    ("graphs", "", len),
    ("device ops of all graphs", "", device_ops),
    (_WITH_KERNELS, "", lambda graphs: device_ops(graphs, "elsewhere")),
    ("bytes moved by all graphs", "bytes", _moved),
    ("largest peak of intermediate memory", "bytes", _largest_peak),
    ("ops outside of device graphs", "", lambda graphs: sum(cut["ops"] for graph in graphs for cut in graph["cuts"])),
    ("fallbacks", "", lambda graphs: sum(len(graph["fallbacks"]) for graph in graphs)),
    ("time in passes", "seconds", lambda graphs: sum(ran["seconds"] for graph in graphs for ran in graph["passes"])),
)


def _summary(
    before: dict[str, Any],
    after: dict[str, Any],
    lost: list[dict[str, Any]],
    won: list[dict[str, Any]],
    slower: list[dict[str, Any]],
) -> list[Sentence]:
    gone, gained = (sum(site["times"] for site in sites) for sites in (lost, won))
    lost_text = f"{count_of(gone, 'rewrite')} lost, {gained} won"
    edits = model_changes(before, after)
    counts = list(_device_op_sentences(before, after, is_neutral=bool(slower or edits), is_lost=bool(gone)))
    is_worse = any(each["tone"] == "bad" for each in counts)
    sentences = [sentence("bad" if gone else "plain" if is_worse else "good", f"{lost_text}.")]
    if edits:
        told = f"The models differ: {'; '.join(edits)}."
        sentences = [sentence("bad", told)]
        sentences.append(sentence("bad" if gone else "plain", f"{lost_text}, of those in modules that both have."))
    sentences += _causes(_changed(before, after), lost)
    sentences += [sentence("bad", _lost_text(site)) for site in lost]
    sentences += [sentence("plain", _slower_text(site)) for site in slower]
    return [*sentences, *counts]


def _device_op_sentences(
    before: dict[str, Any], after: dict[str, Any], *, is_neutral: bool, is_lost: bool
) -> Iterator[Sentence]:
    """How many ops run here; and, where some rewrites are previews, on a device with kernels for them."""
    graphs = before["graphs"], after["graphs"]
    here, elsewhere = ([device_ops(each, count) for each in graphs] for count in ("computes", "elsewhere"))
    previews = [len(_previewed(each)) for each in graphs]
    compared = any(previews) and _compares_previews(before, after)
    where = " in all graphs together" if max(map(len, graphs)) > 1 else ""
    tone = "plain" if compared or is_neutral else "bad" if here[1] > here[0] else "good"
    of = ", which says little of models that differ" if model_changes(before, after) else ""
    also = "" if is_lost else ": more than before, although no rewrite was lost"
    yield sentence(tone, f"{count_of(here[0], 'device op')} -> {here[1]}{where}{of}{also if tone == 'bad' else ''}.")
    if compared and elsewhere != here:
        tone = "plain" if is_neutral else "bad" if elsewhere[1] > elsewhere[0] else "good"
        counts = (
            f"{count_of(elsewhere[0], 'device op')} -> {elsewhere[1]} on a device with kernels for the ops of graphex"
        )
        yield sentence(tone, f"A preview: {counts}{also if tone == 'bad' else ''}.")
    if compared:
        yield sentence("plain", "Both reports were asked for previews, so they count as rewrites. None runs here.")
        return
    for which, count in zip(("first", "second"), previews, strict=True):
        if count:
            what = "rewrite" if count == 1 else "rewrites"
            text = f"Previews in the {which} report: {count} {what} that this device has no kernels for. "
            yield sentence("plain", f"{text}They do not run here and are neither lost nor won.")


def _lost_text(site: dict[str, Any]) -> str:
    because = f", because {site['reason']}" if site["reason"] else ""
    return f"Lost: {site['title']} in {site['where']}{_times(site)}{because}."


def _slower_text(site: dict[str, Any]) -> str:
    return (
        f"Not used in the {site['in']} report: the region in {site['where']}{_times(site)}. It was compiled there too "
        "and measured slower than single ops. Measurements vary, so this is neither lost nor won."
    )


def _times(site: dict[str, Any]) -> str:
    """How often, as the table says it, and where: `` (6 times in 3 places, layers.0 to layers.2)``"""
    times, places = site["times"], site["places"]
    if len(places) == 1:
        return "" if times == 1 else f" ({times} times)"
    counted = f"{times} places" if times == len(places) else f"{times} times in {len(places)} places"
    return f" ({counted}, {places[0]} to {places[-1]})"


def _causes(changed: list[dict[str, str]], lost: list[dict[str, Any]]) -> list[Sentence]:
    """A differing option is the likely cause of a loss; else a differing version is; without a loss, neither."""
    options = [each for each in changed if each["what"] == "option"]
    versions = [each for each in changed if each["what"] == "version"]
    told = []
    for each in options:
        head = "Likely cause: the option" if lost else "The option"
        told.append(
            sentence("bad" if lost else "plain", f"{head} {each['name']} was {each['before']}, is {each['after']} now.")
        )
    if versions:
        head = "Likely cause: a change of" if lost and not options else "Also different:"
        said = ", ".join(f"{each['name']} ({each['before']} -> {each['after']})" for each in versions)
        told.append(sentence("bad" if lost and not options else "plain", f"{head} {said}."))
    return told
