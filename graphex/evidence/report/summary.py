"""A report in a few sentences that a person can act on.

    312 device ops -> 97, counted from the final graph.
    64 of 64 RMSNorm sites fused.
    2 of 18 input updates still copied, 128 MiB a call, because the old value is read later by 'sum_1'.

Each sentence has a tone: good, bad (there is something to do) or plain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from graphex.evidence.tables import size_text
from graphex.fusion.rules import FUSIONS, names_of
from graphex.ops.definition import title_of as op_title

_TITLES = {
    "lift_capped_attention": "soft-capped attention",
    "grouped_attention": "repeated keys and values",
}
_WRITES_INPUTS = "restore_input_writes"
_REGION = "region"  # the rule that puts compiled regions in place, and the kind of their records
_MOST = 5  # sentences about one thing

Sentence = dict[str, str]


def summarise(data: dict[str, Any]) -> list[Sentence]:
    graphs = data["graphs"]
    if not graphs:
        rest = (*_given_up(data), *_fallbacks(data), *_comparison(data))
        return [_sentence("bad", "Nothing was compiled with graphex."), *rest]
    now = as_they_run(graphs)
    parts = [
        (_origins, [graph for graph in graphs if not graph["version_of"]]),
        *((part, now) for part in (_ops, _regions, _fusions, _remarks, _input_updates, _memory)),
    ]
    parts += [(_running, graphs), (_verdicts, graphs)]
    first = [sentence for part, about in parts for sentence in part(about)]
    return [*first, *_given_up(data), *_fallbacks(data), *_comparison(data)]


def as_they_run(graphs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One version of each graph: without those that verification replaced or `auto_streams` tried beside it.

    What verification undid in a graph is left out too.
    """
    verdicts = [verdict for graph in graphs for verdict in graph["verifications"] if verdict["runs"]]
    replaced, runs = ({verdict[name] for verdict in verdicts} for name in ("graph", "runs"))
    kept = [graph for graph in graphs if graph["name"] not in replaced]
    return [_without_the_undone(graph) for graph in kept if not graph["version_of"] or graph["name"] in runs]


def _without_the_undone(graph: dict[str, Any]) -> dict[str, Any]:
    undone = graph["undone_from"]
    if undone is None:
        return graph
    lists = ("rewrites", "refusals", "rules", "near_misses")
    return graph | {name: [each for each in graph[name] if each["pass"] < undone] for name in lists}


def title_of(rule: str) -> str:
    """The usual name of the pattern that a rule fuses."""
    return _TITLES.get(rule) or op_title(rule.removeprefix("lift_")) or rule


def device_ops(graphs: Iterable[dict[str, Any]], count: str = "computes") -> int:
    """The ops this device runs for one call of each graph as it runs; 0 for a graph without snapshots.

    `count` is ``given`` for the graphs as given, which no option changes, or ``elsewhere`` for a device with kernels
    for the ops of graphex.
    """
    taken = [
        (graph, graph["pictures"][0 if count == "given" else graph["runs"]]) for graph in graphs if graph["pictures"]
    ]
    nodes = [graph["nodes"][place] for graph, snapshot in taken for place in snapshot]
    return sum(node.get(count, node["computes"]) for node in nodes)


def rule_counts(graphs: list[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """For each fusion rule: how often it applied, of how many candidates, in all graphs."""
    matches: Counter[str] = Counter()
    candidates: Counter[str] = Counter()
    for graph in graphs:
        for tried in graph["rules"]:
            if tried["rule"]:
                matches[tried["rule"]] += tried["matches"]
                candidates[tried["rule"]] += tried["candidates"]
    return {rule: (matches[rule], candidates[rule]) for rule in candidates}


def _sentence(tone: str, text: str) -> Sentence:
    return {"tone": tone, "text": text}


def _origins(graphs: list[dict[str, Any]]) -> Iterator[Sentence]:
    """Why there is more than one graph: graph breaks and recompilations."""
    breaks = {each["line"]: each for graph in graphs for each in graph["breaks"]}
    recompilations = [each for graph in graphs for each in graph["recompilations"]]
    if not (breaks or recompilations):
        return
    counted = (len(graphs), "graph"), (len(breaks), "graph break"), (len(recompilations), "recompilation")
    compiled, broken, again = (f"{count} {word}{'' if count == 1 else 's'}" for count, word in counted)
    why = " and ".join(text for text, found in ((broken, breaks), (again, recompilations)) if found)
    yield _sentence("bad", f"{compiled}, because of {why}.")
    yield from _at_most(_broken(each) for each in breaks.values())
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for each in recompilations:  # one size that changed makes every graph of a function again
        change = (each["what"], each["before"], each["now"]) if each["now"] else (each["reason"],)
        groups.setdefault(change, []).append(each)
    yield from _at_most(_recompiled(group) for group in groups.values())


def _broken(each: dict[str, Any]) -> Sentence:
    place, _, code = each["line"].partition(": ")
    return _sentence("bad", f"Graph break at {place} ({each['cause']}){': ' if code else ''}{code}")


def _recompiled(group: list[dict[str, Any]]) -> Sentence:
    others = "" if len(group) == 1 else f", and {len(group) - 1} more for the same change"
    return _sentence("bad", f"Recompiled '{group[0]['earlier']}' because {group[0]['reason']}{others}.")


def _given_up(data: dict[str, Any]) -> Iterator[Sentence]:
    """Functions that Dynamo gives up on."""
    found = {(each["function"], each["line"]): each for each in data.get("breaks", ())}
    for each in found.values():
        place = each["line"].partition(": ")[0]
        where = f" at {place}" if place else ""
        yield _sentence("bad", f"'{each['function']}' runs in eager: graph break{where} ({each['cause']}).")


def _at_most(sentences: Iterable[Sentence]) -> Iterator[Sentence]:
    """The first sentences about one thing, and how many more there are."""
    every = list(sentences)
    yield from every[:_MOST]
    if len(every) > _MOST:
        yield _sentence(every[0]["tone"], f"... and {len(every) - _MOST} more like these in the report.")


def _ops(graphs: list[dict[str, Any]]) -> Iterator[Sentence]:
    shown = [graph for graph in graphs if graph["pictures"] and graph["phase"] != "joint"]
    if shown:
        before, after = device_ops(shown, "given"), device_ops(shown)
        where = "the final graph" if len(shown) == 1 else f"the {len(shown)} final graphs"
        yield _sentence("good" if after < before else "plain", f"{before} device ops -> {after}, counted from {where}.")
        if (elsewhere := device_ops(shown, "elsewhere")) < after:
            yield _sentence(
                "plain",
                f"A preview: {elsewhere} device ops on a device with kernels for the ops of graphex. "
                f"{_devices(shown)} has none and runs their references op by op.",
            )
        yield from _nothing_applied(shown)
    passes = [ran for graph in graphs for ran in graph["passes"]]
    for ran in passes:
        if ran["status"] in ("failed", "rolled back"):
            yield _sentence("bad", f"Pass '{ran['name']}' {_was(ran['status'])}: {ran['reason']}.")


def _devices(graphs: list[dict[str, Any]]) -> str:
    """``The CPU``, or the names of the devices."""
    found = sorted({device for graph in graphs for device in graph["devices"]})
    return "The CPU" if found == ["cpu"] else ", ".join(found) or "This device"


def _nothing_applied(graphs: list[dict[str, Any]]) -> Iterator[Sentence]:
    """Say plainly that a model runs as it would in eager: nothing fused, no region in use, no device graph."""
    made = [each for graph in graphs for each in graph["rewrites"] if each["effect"] == "fused"]
    fused = [each for each in made if each["rule"] != _REGION]
    captured = any(counts.get("captured") for graph in graphs for counts in graph["counts"].values())
    if captured or _devices(graphs) != "The CPU" or not all(each["preview"] for each in fused):
        return
    if fused:
        yield _sentence(
            "plain",
            "What is fused here is a preview, and no faster on the CPU: leave lift_idioms at 'auto' to run here.",
        )
    elif not made:
        yield _sentence(
            "plain",
            "On the CPU no fusion rule applied and no region is in use: this is straight-line code of eager's ops. "
            "Expect 0.85 to 1.0 times the speed of eager.",
        )


def _was(status: str) -> str:
    return "was rolled back" if status == "rolled back" else status


def _fusions(graphs: list[dict[str, Any]]) -> Iterator[Sentence]:
    for rule, (matches, candidates) in rule_counts(graphs).items():
        if not candidates:
            continue
        missed = "" if matches == candidates else _first_reason(graphs, rule)
        previews = _previews(graphs, rule)
        some = f", {previews} of them as a preview" if previews else ""
        preview = ", as a preview" if previews and previews == matches else some
        text = f"{matches} of {candidates} {title_of(rule)} sites fused{preview}{missed}."
        # A rule of ours is about pairs. A half that stands alone, as the first norm of a model does, is no fault.
        idle = "plain" if rule in names_of(FUSIONS) and not (matches and _can_be_helped(graphs, rule)) else "bad"
        yield _sentence(("plain" if previews else "good") if matches == candidates else idle, text)


def _previews(graphs: list[dict[str, Any]], rule: str) -> int:
    """How many sites of a rule became an op that has no kernel on its device."""
    return sum(each["preview"] for graph in graphs for each in graph["rewrites"] if each["rule"] == rule)


def _can_be_helped(graphs: list[dict[str, Any]], rule: str) -> bool:
    """Whether an edit is known that would let the rule apply, or a place fits it and was refused all the same."""
    edits = (miss["edit"] for graph in graphs for miss in graph["near_misses"] if miss["rule"] == rule)
    return any(edits) or bool(_refusals(graphs, rule))


def _refusals(graphs: list[dict[str, Any]], rule: str) -> list[dict[str, Any]]:
    """The refusals of a rule that cost something."""
    found = (refusal for graph in graphs for refusal in graph["refusals"] if refusal["rule"] == rule)
    return [refusal for refusal in found if not refusal["nothing_lost"]]


def _first_reason(graphs: list[dict[str, Any]], rule: str) -> str:
    """The reason why the closest candidate did not fuse."""
    misses = [miss for graph in graphs for miss in graph["near_misses"] if miss["rule"] == rule]
    refusals = _refusals(graphs, rule)
    found = [*refusals, *sorted(misses, key=lambda miss: -miss["matched"] / miss["ops"])]
    if not found:
        return ""
    place = found[0]["line"].split(": ")[0]
    where = f" ({place})" if place and place.split(":")[0] not in found[0]["reason"] else ""
    return f"; {'one' if len(found) > 1 else 'the other'} not because {found[0]['reason']}{where}"


def _remarks(graphs: list[dict[str, Any]]) -> Iterator[Sentence]:
    """The reasons that passes give for changing nothing, each once; the first graph where there are several."""
    said: dict[tuple[str, str], list[str]] = {}
    for graph in graphs:
        for ran in graph["passes"]:
            if ran["status"] == "unchanged" and ran["reason"]:
                said.setdefault((ran["name"], ran["reason"]), []).append(graph["name"])
    for (name, reason), where in sorted(said.items()):
        others = f" and {len(where) - 1} more" if len(where) > 1 else ""
        within = "" if len(where) == len(graphs) else f" in '{where[0]}'{others}"
        yield _sentence("plain", f"{name} changed nothing{within}: {reason}.")


def _input_updates(graphs: list[dict[str, Any]]) -> Iterator[Sentence]:
    made = [each for graph in graphs for each in graph["rewrites"] if each["pass_name"] == _WRITES_INPUTS]
    refused = [each for graph in graphs for each in graph["refusals"] if each["pass_name"] == _WRITES_INPUTS]
    total = len(made) + len(refused)
    if refused:
        moved = sum(each["bytes_moved"] for each in refused)
        worst = max(refused, key=lambda each: each["bytes_moved"])
        yield _sentence(
            "bad",
            f"{len(refused)} of {total} input updates still copied, {size_text(moved)} a call, "
            f"because {worst['reason']}.",
        )
    elif made:
        saved = sum(each["certificate"]["bytes_saved"] for each in made if each["certificate"])
        yield _sentence("good", f"All {total} input updates are written in place, {size_text(saved)} less a call.")


def _memory(graphs: list[dict[str, Any]]) -> Iterator[Sentence]:
    before = sum(each["peak_before"] for graph in graphs for each in graph["memory"])
    after = sum(each["peak_after"] for graph in graphs for each in graph["memory"])
    if before:
        tone = "good" if after < before else "plain"
        yield _sentence(tone, f"Predicted peak of intermediate memory: {size_text(before)} -> {size_text(after)}.")


def _running(graphs: list[dict[str, Any]]) -> Iterator[Sentence]:
    counts: Counter[str] = Counter()
    for graph in graphs:
        for each in graph["counts"].values():
            counts.update(each)
    captured = counts["captured"] + counts["recaptured"]
    if captured:
        again = f" ({counts['recaptured']} of them again)" if counts["recaptured"] else ""
        yield _sentence("good", f"{captured} device graphs captured{again}, replayed {counts['replays']} times.")
    cuts = [cut for graph in graphs for cut in graph["cuts"]]
    if cuts:
        ops = sum(cut["ops"] for cut in cuts)
        yield _sentence("bad", f"{ops} ops run outside of device graphs; the first because {cuts[0]['reason']}.")
    told = tuple(verdict["reason"] for graph in graphs for verdict in graph["verifications"] if verdict["reason"])
    for graph in graphs:
        for each in graph["fallbacks"]:
            if not each["reason"].startswith(told):  # the sentence about the verdict says it
                yield _sentence("bad", f"{graph['name']}: {each['what']}: {each['reason']}.")


def _verdicts(graphs: list[dict[str, Any]]) -> Iterator[Sentence]:
    verdicts = [verdict for graph in graphs for verdict in graph["verifications"]]
    for verdict in verdicts:
        if verdict["status"] != "equal":
            script = f" Run {verdict['repro']} to see it." if verdict["repro"] else ""
            text = f"Verification: {verdict['status']}{_blamed(verdict)}: {verdict['reason']}.{script}"
            yield _sentence("bad", text)
    if verdicts and all(verdict["status"] == "equal" for verdict in verdicts):
        yield _sentence("good", f"Verified: {len(verdicts)} of {len(verdicts)} graphs equal the original.")


def _blamed(verdict: dict[str, Any]) -> str:
    rules, ran = verdict["rules"], verdict["pass_name"]
    if rules:
        named = f"rule {rules[0]!r}" if len(rules) == 1 else f"rules {', '.join(map(repr, rules))}"
        return f" by {named} of '{ran}', which {'was' if len(rules) == 1 else 'were'} left out"
    return f" by pass '{ran}'{', which was left out' if verdict['runs'] else ''}" if ran else ""


def _fallbacks(data: dict[str, Any]) -> Iterator[Sentence]:
    for each in data["fallbacks"]:
        yield _sentence("bad", f"{each['what']}: {each['reason']}.")


def _regions(graphs: list[dict[str, Any]]) -> Iterator[Sentence]:
    """What runs in regions that Inductor compiled, what that cost and gains, and the ops that stay outside."""
    tried = _records(graphs, _REGION)
    used = [each for each in tried if each["region"]]
    seconds = sum(each["seconds"] for each in tried)
    if used:
        calls, made = sum(each["calls"] for each in used), sum(each["status"] == "compiled" for each in used)
        different = "" if made == len(used) else f", {made} of them different"
        where = "1 compiled region" if len(used) == 1 else f"{len(used)} compiled regions{different}"
        yield _sentence("good", f"{calls} ops run in {where}. {_gain(used, has_previews=_has_previews(graphs))}")
    if slower := len(tried) - len(used):
        what = "1 compiled region was" if slower == 1 else f"{slower} compiled regions were"
        yield _sentence("plain", f"{what} slower than single ops, which run instead.")
    if tried:
        yield _sentence(
            "plain", f"Compiling regions took {seconds:.1f} s; regions=False or GRAPHEX_REGIONS=off does without."
        )
    outside: dict[str, list[dict[str, Any]]] = {}
    for each in _records(graphs, "region border") if used else ():
        outside.setdefault(each["reason"], []).append(each)
    for reason, borders in outside.items():
        count = sum(each["count"] for each in borders)
        ops = f"{borders[0]['op']}" if count == 1 else f"{borders[0]['op']} and {count - 1} more"
        yield _sentence("plain", f"Outside of compiled regions: {ops}, because {reason}.")


def _has_previews(graphs: list[dict[str, Any]]) -> bool:
    return any(each["preview"] for graph in graphs for each in graph["rewrites"])


def _gain(used: list[dict[str, Any]], *, has_previews: bool) -> str:
    """The speed to expect of compiled regions, from their trials. What is lifted as a preview is slower than eager."""
    measured = [each for each in used if each["seconds_compiled"] and each["seconds_single"]]
    compiled, single = (sum(each[name] for each in measured) for name in ("seconds_compiled", "seconds_single"))
    if not measured:
        return "They were not measured: expect about the speed of Inductor."
    some = "" if len(measured) == len(used) else f" ({len(measured)} of {len(used)} measured)"
    expected = "" if has_previews else " Expect at least eager's speed."
    return (
        f"Measured here: {_factor(single / compiled)} times the speed of single ops, {_time(compiled)} instead of "
        f"{_time(single)} for all of them{some}.{expected}"
    )


def _factor(value: float) -> str:
    return f"{value:.2g}" if value < 100 else f"{value:.0f}"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _records(graphs: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for graph in graphs for each in graph["more"] if each["kind"] == kind]


def _comparison(data: dict[str, Any]) -> Iterator[Sentence]:
    """The differences from eager that `explain` found, and the values it could not compare."""
    facts = data.get("facts") or {}
    rounding = facts.get("rounding", ()) if (causes := _other_rounding(data["graphs"])) else ()
    differences = [each for each in facts.get("differences", ()) if each not in rounding]
    if rounding:
        more = f", and {len(rounding) - 1} more" if len(rounding) > 1 else ""
        yield _sentence(
            "plain",
            f"Rounded differently from eager: {rounding[0]}{more}. {' and '.join(causes)} add and multiply in another "
            f"order; {' with '.join(causes.values())} rounds as eager does.",
        )
    unknown = [f"{each['what']}: {each['reason']}" for each in facts.get("not_compared", ())]
    for title, found, tone in (
        ("Different from eager", differences, "bad"),
        ("Not compared with eager", unknown, "plain"),
    ):
        for said in found[:_MOST]:
            yield _sentence(tone, f"{title}: {said}.")
        if len(found) > _MOST:
            yield _sentence(tone, f"{title}: {len(found) - _MOST} more.")


def _other_rounding(graphs: list[dict[str, Any]]) -> dict[str, str]:
    """What runs that rounds differently from eager's ops, and the option that does without it."""
    causes = {}
    if any(each["region"] for each in _records(graphs, _REGION)):
        causes["Compiled regions"] = "regions=False"
    if any(not each["declined"] for each in _records(graphs, "kernels")):
        causes["kernels of graphex" if causes else "Kernels of graphex"] = "pattern_fusion_pass=False"
    return causes
