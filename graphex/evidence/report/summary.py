"""A report in a few sentences that a person can act on.

    312 device ops -> 97, counted from the final graph.
    64 of 64 RMSNorm sites fused.
    2 of 18 input updates still copied, 128 MiB a call, because the old value is read later by 'sum_1'.

Each sentence has a tone: good, bad (there is something to do) or plain.

Graphs of one compilation (forward and backward) run together. Those of several may be alternatives: a graph that was
compiled again runs in place of the earlier one. Ops, times and bytes are added up within a compilation only.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from graphex.errors import count_of
from graphex.evidence.tables import TRAINS_IN_EVAL, size_text, trains_in_eval
from graphex.records import NO_KERNELS

_TITLES = {
    "lift_capped_attention": "soft-capped attention",
    "grouped_attention": "repeated keys and values",
}
_WRITES_INPUTS = "restore_input_writes"
_GROWN = "compile_regions"
_REGION = "region"  # the rule that puts compiled regions in place, and the kind of their records
_QUOTED = re.compile(r"'\w+'")  # the name of a node in a reason
_MOST = 5  # sentences about one thing
_BUSY = " The machine was busy meanwhile: a quiet one may find otherwise."
_UNKNOWN = "the machine was too busy to tell whether that is faster."
_SHORT = 1e-4  # seconds: torch's guards and wrappers are a large part of such a call
_CLEAR = 2  # times the speed, which a busy machine finds by no accident

Sentence = dict[str, str]


def summarise(data: dict[str, Any]) -> list[Sentence]:
    found = _compiled(data) if data["graphs"] else [sentence("bad", "Nothing was compiled with graphex.")]
    return [*_different(data), *found, *_given_up(data), *_fallbacks(data), *_compared(data)]


def _compiled(data: dict[str, Any]) -> Iterator[Sentence]:
    graphs = data["graphs"]
    now, called = as_they_run(graphs), [graph for graph in graphs if not graph["instead"]]
    seconds = data["facts"].get("seconds", {})
    yield from _mismatches(called)
    if trains_in_eval([graph["phase"] for graph in graphs], is_eval=data["facts"].get("is_eval", False)):
        yield sentence("plain", TRAINS_IN_EVAL)
    yield from _origins([graph for graph in graphs if not graph["version_of"]])
    yield from _ops(now, is_timed=bool(seconds))
    yield from _regions(now, seconds)
    yield from _whole_call(now, seconds)
    for part in (_fusions, _remarks, _input_updates, _memory):
        yield from part(now)
    yield from _running(called)
    yield from _verified(called)


def as_they_run(graphs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One version of each graph: without those that verification replaced or `auto_streams` tried beside it.

    What verification undid in a graph is left out too.
    """
    runs = {graph["instead"] for graph in graphs}
    kept = [graph for graph in graphs if not graph["instead"]]
    out = {(found["runs"], rule) for graph in graphs for found in graph["verifications"] for rule in found["rules"]}
    return [_without_the_undone(graph, out) for graph in kept if not graph["version_of"] or graph["name"] in runs]


def compilations(graphs: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The graphs of each compilation: those of one call of the backend, which run together."""
    found: dict[str, list[dict[str, Any]]] = {}
    for graph in graphs:
        found.setdefault(graph["compile_id"], []).append(graph)
    return list(found.values())


def _bytes_a_call(graphs: list[dict[str, Any]], count: Callable[[dict[str, Any]], int]) -> str:
    """``128 MiB``, or ``up to 128 MiB`` where there are several compilations: the most that one of them has."""
    found = [sum(map(count, group)) for group in compilations(graphs)]
    return f"{'up to ' if len(found) > 1 else ''}{size_text(max(found, default=0))}"


def _without_the_undone(graph: dict[str, Any], out: set[tuple[str, str]]) -> dict[str, Any]:
    """`out` are graphs and the rules that verification left out of them, which have no sites but are counted."""
    marked = [each | {"left_out": (graph["name"], each["rule"]) in out} for each in graph["rules"]]
    graph = graph | {"rules": marked}
    undone = graph["undone_from"]
    if undone is None:
        return graph
    lists = ("rewrites", "refusals", "rules", "near_misses")
    return graph | {name: [each for each in graph[name] if each["pass"] < undone] for name in lists}


def title_of(rule: str) -> str:
    """The usual name of the pattern that a rule fuses."""
    from graphex.ops.definition import title_of as op_title  # imports torch, which reading a report does not need

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


def sentence(tone: str, text: str) -> Sentence:
    return {"tone": tone, "text": text}


def _origins(graphs: list[dict[str, Any]]) -> Iterator[Sentence]:
    """Why there is more than one graph: graph breaks and recompilations."""
    breaks = {each["line"]: each for graph in graphs for each in graph["breaks"]}
    recompilations = [each for graph in graphs for each in graph["recompilations"]]
    if not (breaks or recompilations):
        return
    compiled = count_of(len(graphs), "graph")
    broken, again = count_of(len(breaks), "graph break"), count_of(len(recompilations), "recompilation")
    why = " and ".join(text for text, found in ((broken, breaks), (again, recompilations)) if found)
    yield sentence("bad", f"{compiled}, because of {why}.")
    yield from _at_most(_broken(each) for each in breaks.values())
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for each in recompilations:  # one size that changed makes every graph of a function again
        change = (each["what"], each["before"], each["now"]) if each["now"] else (each["reason"],)
        groups.setdefault(change, []).append(each)
    yield from _at_most(_recompiled(group) for group in groups.values())


def _broken(each: dict[str, Any]) -> Sentence:
    place, _, code = each["line"].partition(": ")
    code = f": {code.rstrip(':')}" if code else ""
    return sentence("bad", f"Graph break at {place} ({each['cause']}){code}.{_hint(each)}")


def _hint(each: dict[str, Any]) -> str:
    return f" To avoid it: {each['edit'].rstrip('.')}." if each["edit"] else ""


def _recompiled(group: list[dict[str, Any]]) -> Sentence:
    others = "" if len(group) == 1 else f", and {len(group) - 1} more for the same change"
    return sentence("bad", f"Recompiled '{group[0]['earlier']}' because {group[0]['reason']}{others}.")


def _given_up(data: dict[str, Any]) -> Iterator[Sentence]:
    """Functions that Dynamo gives up on."""
    found = {(each["function"], each["line"]): each for each in data["breaks"]}
    for each in found.values():
        place = each["line"].partition(": ")[0]
        broke = f"graph break{f' at {place}' if place else ''} ({each['cause']}).{_hint(each)}"
        yield sentence("bad", f"'{each['function']}' runs in eager: {broke}")


def _at_most(sentences: Iterable[Sentence]) -> Iterator[Sentence]:
    """The first sentences about one thing, and how many more there are."""
    every = list(sentences)
    yield from every[:_MOST]
    if len(every) > _MOST:
        yield sentence(every[0]["tone"], f"... and {len(every) - _MOST} more like these in the report.")


def _ops(graphs: list[dict[str, Any]], *, is_timed: bool) -> Iterator[Sentence]:
    shown = [graph for graph in graphs if graph["pictures"] and graph["phase"] != "joint"]
    if shown:
        fewer = device_ops(shown) < device_ops(shown, "given")
        yield sentence("good" if fewer else "plain", _ops_text(compilations(shown)))
        if device_ops(shown, "elsewhere") < device_ops(shown):
            groups = compilations(shown)
            most = max(groups, key=device_ops)
            which = f"; the largest of {len(groups)} graphs" if len(groups) > 1 else ""
            yield sentence(
                "plain",
                f"A preview: {count_of(device_ops(most, 'elsewhere'), 'device op')} on a device with kernels for the "
                f"ops of graphex{which}. {_devices(shown)} has none and runs their references op by op.",
            )
        yield from _nothing_applied(shown, is_timed=is_timed)
    yield from _broken_passes(graphs)


def _ops_text(groups: list[list[dict[str, Any]]]) -> str:
    """``312 device ops -> 97, counted from the final graph.`` Of several compilations those that changed are told."""

    def text(group: list[dict[str, Any]]) -> str:
        return f"{count_of(device_ops(group, 'given'), 'device op')} -> {device_ops(group)}"

    if len(groups) == 1:
        where = "the final graph" if len(groups[0]) == 1 else f"the {len(groups[0])} final graphs"
        return f"{text(groups[0])}, counted from {where}."
    same = [group for group in groups if device_ops(group) == device_ops(group, "given")]
    if len(same) == len(groups):
        most = count_of(max(map(device_ops, groups)), "device op")
        return f"None of {len(groups)} graphs has fewer device ops than before: {most} at most."
    others = "The other has" if len(same) == 1 else f"The other {len(same)} have"
    rest = f" {others} as many as before." if same else ""
    return f"In {_by_graph([group for group in groups if group not in same], text, len(groups))}.{rest}"


def _by_graph(groups: list[list[dict[str, Any]]], text: Callable[[list[dict[str, Any]]], str], of: int) -> str:
    """``2 of 6 graphs: 2 device ops -> 1; in 'Net inference': 4 ...``: equal compilations together, of so many."""
    alike: dict[str, list[list[dict[str, Any]]]] = {}
    for group in sorted(groups, key=lambda group: -device_ops(group, "given")):
        alike.setdefault(text(group), []).append(group)
    said = [
        f"{f'{len(found)} of {of} graphs' if len(found) > 1 else repr(_name(found[0]))}: {told}"
        for told, found in alike.items()
    ]
    rest = [f"and {len(said) - _MOST} more in the table of graphs"] if len(said) > _MOST else []
    return "; ".join(["; in ".join(said[:_MOST]), *rest])


def _name(group: list[dict[str, Any]]) -> str:
    """``Net inference``, ``Net forward and backward``"""
    first = group[0]
    return f"{first['name'].removesuffix(first['phase'])}{' and '.join(graph['phase'] for graph in group)}"


def _others(names: Collection[object]) -> str:
    """How many more graphs there are: `` and 2 more graphs``."""
    more = len(names) - 1
    return f" and {more} more graph{'s' if more > 1 else ''}" if more else ""


def _broken_passes(graphs: list[dict[str, Any]]) -> Iterator[Sentence]:
    """Passes that failed or were rolled back, each once with the number of graphs."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for graph in graphs:
        for ran in graph["passes"]:
            if ran["status"] in ("failed", "rolled back"):
                found.setdefault((ran["name"], ran["status"], ran["reason"]), []).append(graph["name"])
    for (name, status, reason), where in found.items():
        what = "was rolled back" if status == "rolled back" else status
        times = f" in {len(where)} graphs" if len(where) > 1 else ""
        yield sentence("bad", f"Pass '{name}' {what}{times}: {reason.rstrip('.!')}.")


def _devices(graphs: list[dict[str, Any]]) -> str:
    """``The CPU``, or the names of the devices."""
    found = sorted({device for graph in graphs for device in graph["devices"]})
    return "The CPU" if found == ["cpu"] else ", ".join(found) or "This device"


def _nothing_applied(graphs: list[dict[str, Any]], *, is_timed: bool) -> Iterator[Sentence]:
    """Say plainly that a model runs as it would in eager: nothing fused, no region in use, no device graph."""
    made = [each for graph in graphs for each in graph["rewrites"] if each["effect"] == "fused"]
    fused = [each for each in made if each["rule"] != _REGION]
    captured = any(counts.get("captured") for graph in graphs for counts in graph["counts"].values())
    if captured or _devices(graphs) != "The CPU" or not all(each["preview"] for each in fused):
        return
    if fused:
        is_grown = any(ran["name"] == _GROWN for graph in graphs for ran in graph["passes"])
        is_lost = is_grown and not any(each["inlined"] for each in _regions_in_use(graphs))
        lost = ", and it keeps the ops out of compiled code" if is_lost else ""
        said = f"What is fused here is a preview, and no faster on the CPU{lost}"
        yield sentence("plain", f"{said}: leave lift_idioms at 'auto' to run here.")
    elif not made:
        expect = "" if is_timed else " Expect 0.85 to 1.0 times the speed of eager."
        said = "On the CPU no fusion rule applied and no region is in use: this is straight-line code of eager's ops."
        yield sentence("plain", f"{said}{expect}")


def _fusions(graphs: list[dict[str, Any]]) -> Iterator[Sentence]:
    from graphex.fusion.rules import FUSIONS, names_of

    ours = names_of(FUSIONS)
    for rule, (matches, candidates) in rule_counts(graphs).items():
        if not candidates or (not matches and rule in ours and _is_no_use(graphs, rule)):
            continue
        left_out = _left_out(graphs, rule)
        if left_out == candidates:
            yield sentence("bad", f"0 of {candidates} {title_of(rule)} sites: left out by verification.")
            continue
        others = candidates - matches - left_out
        missed = _why_not(graphs, rule, matches, others) if others else ""
        missed += f"; {left_out} left out by verification" if left_out else ""
        previews = _previews(graphs, rule)
        some = f", {previews} of them as a preview" if previews else ""
        preview = ", as a preview" if previews and previews == matches else some
        where = sum(any(tried["rule"] == rule for tried in graph["rules"]) for graph in graphs)
        within = f" in {where} graphs" if where > 1 else ""
        text = f"{matches} of {candidates} {title_of(rule)} sites{within} fused{preview}{missed}."
        # A rule of ours is about pairs. A half that stands alone, as the first norm of a model does, is no fault.
        idle = "plain" if rule in ours and not (matches and _can_be_helped(graphs, rule)) else "bad"
        yield sentence(("plain" if previews else "good") if matches == candidates else idle, text)


def _is_no_use(graphs: list[dict[str, Any]], rule: str) -> bool:
    """Whether a rule has nothing to tell on a CPU, which has no kernel for it: all that it saw was single ops of its
    pattern, such as any matrix product.
    """
    misses = (miss for graph in graphs for miss in graph["near_misses"] if miss["rule"] == rule)
    is_alone = all(miss["matched"] <= 1 for miss in misses) and not _refusals(graphs, rule)
    return is_alone and not _left_out(graphs, rule) and _devices(graphs) == "The CPU"


def _left_out(graphs: list[dict[str, Any]], rule: str) -> int:
    """How many sites a rule had in the graphs that verification left it out of."""
    tried = (each for graph in graphs for each in graph["rules"] if each["rule"] == rule and each["left_out"])
    return sum(each["candidates"] for each in tried)


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


def _why_not(graphs: list[dict[str, Any]], rule: str, matches: int, missed: int) -> str:
    """The reason why the closest candidate did not fuse, as the end of a sentence."""
    misses = [miss for graph in graphs for miss in graph["near_misses"] if miss["rule"] == rule]
    refusals = _refusals(graphs, rule)
    found = [*refusals, *sorted(misses, key=lambda miss: -miss["matched"] / miss["ops"])]
    if not found:
        return ""
    place = found[0]["line"].split(": ")[0]
    where = f" ({place})" if place and place.split(":")[0] not in found[0]["reason"] else ""
    who = "; 1 was not," if missed == 1 else f"; {missed} were not, the closest"
    others = ""
    if missed == 1 and not matches:
        who = ","
    elif not matches and len(found) >= missed and len({_QUOTED.sub("", each["reason"]) for each in found}) == 1:
        who = ": none,"
        others = ", and the others alike" if len({(each["reason"], each["line"]) for each in found}) > 1 else ""
    return f"{who} because {found[0]['reason']}{where}{others}"


def _remarks(graphs: list[dict[str, Any]]) -> Iterator[Sentence]:
    """The reasons that passes give for changing nothing, each once; the first graph where there are several."""
    said: dict[tuple[str, str], dict[str, None]] = {}
    is_told = any(_nothing_applied(graphs, is_timed=False))  # that no rule applies on this device
    for graph in graphs:
        for ran in graph["passes"]:
            if ran["status"] == "unchanged" and ran["reason"] and not (is_told and ran["reason"] == NO_KERNELS):
                said.setdefault((ran["name"], ran["reason"]), {})[graph["name"]] = None
    alike: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (name, reason), found in sorted(said.items()):
        alike.setdefault((reason, tuple(found)), []).append(name)
    for (reason, where), names in alike.items():
        within = "" if len(where) == len(graphs) else f" in '{where[0]}'{_others(where)}"
        if reason != NO_KERNELS:
            yield sentence("plain", f"{' and '.join(names)} changed nothing{within}: {reason}.")
    if idle := sorted(name for name, reason in said if reason == NO_KERNELS):
        text = f"graphex's own kernels need a CUDA GPU, so its fused ops are not used here ({', '.join(idle)})."
        yield sentence("plain", text)


def _input_updates(graphs: list[dict[str, Any]]) -> Iterator[Sentence]:
    made = [each for graph in graphs for each in _writes(graph["rewrites"])]
    refused = [each for graph in graphs for each in _writes(graph["refusals"])]
    total = len(made) + len(refused)
    if refused:
        moved = _bytes_a_call(graphs, lambda graph: sum(each["bytes_moved"] for each in _writes(graph["refusals"])))
        worst = max(refused, key=lambda each: each["bytes_moved"])
        count = f"{len(refused)} of {count_of(total, 'input update')} still copied"
        yield sentence("bad", f"{count}, {moved} a call, because {worst['reason']}.")
    elif made:
        saved = _bytes_a_call(graphs, lambda graph: sum(map(_bytes_saved, _writes(graph["rewrites"]))))
        all_ = "The input update is" if total == 1 else f"All {total} input updates are"
        yield sentence("good", f"{all_} written in place, which saves copying {saved} in every call.")


def _writes(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in records if each["pass_name"] == _WRITES_INPUTS]


def _bytes_saved(rewrite: dict[str, Any]) -> int:
    return rewrite["certificate"]["bytes_saved"] if rewrite["certificate"] else 0


def _memory(graphs: list[dict[str, Any]]) -> Iterator[Sentence]:
    """The predicted peak: of several graphs that of the largest, as no two of them reach theirs at one time."""
    found = [(each["peak_before"], each["peak_after"], graph["name"]) for graph in graphs for each in graph["memory"]]
    before, after, name = max(found, default=(0, 0, ""))
    if before:
        peaks = [*dict.fromkeys(map(size_text, (before, after)))]
        tone, as_given = ("good" if after < before else "plain", "") if len(peaks) > 1 else ("plain", " as before")
        of = f", in '{name}', the largest of {len(found)} graphs" if len(found) > 1 else ""
        yield sentence(tone, f"Predicted peak of intermediate memory: {' -> '.join(peaks)}{as_given}{of}.")


def _running(graphs: list[dict[str, Any]]) -> Iterator[Sentence]:
    counts: Counter[str] = Counter()
    for graph in graphs:
        for each in graph["counts"].values():
            counts.update(each)
    captured = counts["captured"] + counts["recaptured"]
    if captured:
        again = f" ({counts['recaptured']} of them again)" if counts["recaptured"] else ""
        replays = count_of(counts["replays"], "time")
        yield sentence("good", f"{count_of(captured, 'device graph')} captured{again}, replayed {replays}.")
    cuts = [cut for graph in graphs for cut in graph["cuts"]]
    if cuts:
        ops = sum(cut["ops"] for cut in cuts)
        run = f"{count_of(ops, 'op')} {'runs' if ops == 1 else 'run'} outside of device graphs"
        yield sentence("bad", f"{run}{'; the first' if ops > 1 else ','} because {cuts[0]['reason']}.")
    said: dict[tuple[str, str], list[str]] = {}
    for graph in graphs:
        told = tuple(each["reason"] for each in (*graph["verifications"], *graph["passes"]) if each["reason"])
        for each in graph["fallbacks"]:
            if not each["reason"].startswith(told):  # the sentence about the verdict, or the pass, says it
                said.setdefault((each["what"], each["reason"]), []).append(graph["name"])
    for (what, reason), names in said.items():
        yield sentence("bad", f"{names[0]}{_others(dict.fromkeys(names))}: {what}: {reason}.")


def _mismatches(graphs: list[dict[str, Any]]) -> Iterator[Sentence]:
    """Graphs that verification found wrong, which comes before everything else."""
    for verdict in (verdict for graph in graphs for verdict in graph["verifications"]):
        if verdict["status"] == "mismatch":
            script = f" Run {verdict['repro']} to see it." if verdict["repro"] else ""
            blamed = f" by {verdict['blamed']}" if verdict["blamed"] else ""
            out = f", which {'were' if len(verdict['rules']) > 1 else 'was'} left out" if verdict["runs"] else ""
            yield sentence("bad", f"Verification: mismatch{blamed}{out}: {verdict['reason']}.{script}")


def _verified(graphs: list[dict[str, Any]]) -> Iterator[Sentence]:
    """How many graphs equal the original, as they run: a graph that was wrong runs without what is to blame."""
    asked = [graph["verifications"] for graph in graphs if graph["verifications"]]
    refused = [[verdict for verdict in verdicts if verdict["status"] == "refused"] for verdicts in asked]
    for reason in dict.fromkeys(verdict["reason"] for verdicts in refused for verdict in verdicts):
        yield sentence("bad", f"Not verified: {reason}.")
    equal = sum(not verdicts for verdicts in refused)
    if equal:
        wrong = [each["blamed"] for verdicts in asked for each in verdicts if each["status"] == "mismatch"]
        without = f", without {' and '.join(dict.fromkeys(wrong))}" if wrong else ""
        yield sentence("good", f"Verified: {equal} of {len(asked)} graphs equal the original{without}.")


def _fallbacks(data: dict[str, Any]) -> Iterator[Sentence]:
    for each in data["fallbacks"]:
        yield sentence("bad", f"{each['what']}: {each['reason']}.")


def _regions(graphs: list[dict[str, Any]], seconds: dict[str, float]) -> Iterator[Sentence]:
    """Compiled regions, their cost and gain, and the ops outside. `seconds`: those of whole calls, if timed."""
    tried = _records(graphs, _REGION)
    used = _regions_in_use(graphs)
    if used:
        calls, made = sum(each["calls"] for each in used), sum(each["status"] == "compiled" for each in used)
        different = "" if made == len(used) else f", {made} of them different"
        where = "1 compiled region" if len(used) == 1 else f"{len(used)} compiled regions{different}"
        groups = [found for group in compilations(graphs) if (found := _regions_in_use(group))]
        within = f" of {len(groups)} graphs" if len(groups) > 1 else ""
        is_whole = not any(graph["phase"] == "forward" for graph in graphs)  # or the call that was timed is a part
        eager = seconds.get("eager", math.inf) if is_whole else math.inf
        gain = _gain(groups, "" if seconds else _not_eager(graphs), eager)
        yield sentence(
            "plain" if not gain or gain.endswith(_UNKNOWN) else "good",
            f"{count_of(calls, 'op')} {'runs' if calls == 1 else 'run'} in {where}{within}. {gain}".rstrip(),
        )
    if slower := len(tried) - len(used):
        what = f"{count_of(slower, 'compiled region')} {'was' if slower == 1 else 'were'} slower than single ops"
        busy = _busy(each for each in tried if not each["region"])
        yield sentence("plain", f"{what}, which run instead.{busy}")
    if tried:
        took = f"Compiling regions took {sum(each['seconds'] for each in tried):.1f} s"
        yield sentence("plain", f"{took}; regions=False or GRAPHEX_REGIONS=off does without.")
    outside: dict[str, list[dict[str, Any]]] = {}
    for each in _records(graphs, "region border") if used else ():
        outside.setdefault(each["reason"], []).append(each)
    for reason, borders in outside.items():
        count = sum(each["count"] for each in borders)
        op = borders[0]["op"]
        ops = f"{op}, because" if count == 1 else f"{count} ops such as {op}, each because"
        yield sentence("plain", f"Outside of compiled regions: {ops} {reason}.")


def _regions_in_use(graphs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in _records(graphs, _REGION) if each["region"]]


def _busy(measured: Iterable[dict[str, Any]]) -> str:
    return _BUSY if any(each["doubtful"] for each in measured) else ""


def _gain(groups: list[list[dict[str, Any]]], remark: str, eager: float) -> str:
    """The times of the compiled regions of each compilation, from their trials, and a remark about eager.

    A trial runs ops one by one, each with overheads that eager's call may not have: where it takes longer than a whole
    call in `eager`, its times say nothing of that call, and are left out.
    """
    used = [each for group in groups for each in group]
    measured = [each for each in used if each["seconds_compiled"] and each["seconds_single"]]
    if not measured:
        return "They were not measured: expect about the speed of Inductor."
    some = "" if len(measured) == len(used) else f" ({len(measured)} of {len(used)} measured)"
    times = [
        tuple(sum(each[name] for each in group if each in measured) for name in ("seconds_single", "seconds_compiled"))
        for group in groups
        if any(each in measured for each in group)
    ]
    found = sorted(single / compiled for single, compiled in times)
    ratios = [*dict.fromkeys(map(_factor, found))]
    factor = "" if ratios == ["1"] else f": {' to '.join(ratios[:: max(len(ratios) - 1, 1)])} times as fast"
    busy = _busy(measured) if found[0] < _CLEAR else ""
    if busy and found[0] < 1:
        return f"Compiled code is kept: {_UNKNOWN}"
    single, compiled = max(times)
    if single > eager:
        return ""
    of = "" if len(times) == 1 else " in the longest graph"
    they = "it takes" if len(used) == 1 else "they take"
    return f"Timed alone, {they} {_time(compiled)}, and {_time(single)} op by op{of}{some}{factor}.{busy or remark}"


def _not_eager(graphs: list[dict[str, Any]]) -> str:
    """The limits of the times of regions: eager runs other ops than those, and a call is more than its regions."""
    used = _regions_in_use(graphs)
    is_short = _devices(graphs) == "The CPU" and sum(each["seconds_compiled"] for each in used) < _SHORT
    also = ", and may be faster: torch's guards alone take some 0.01 ms of a call" if is_short else ""
    return f" Eager was not timed{also}."


def _whole_call(graphs: list[dict[str, Any]], seconds: dict[str, float]) -> Iterator[Sentence]:
    """How long a call takes, where `explain` has timed it, in eager and with graphex."""
    if not seconds:
        return
    ours, eager = seconds["graphex"], seconds["eager"]
    what = "A single forward" if any(graph["phase"] == "forward" for graph in graphs) else "A single call"
    why = ": torch's guards take longer than graphex can gain in so short a call" if eager < min(ours, _SHORT) else ""
    tone = "good" if ours < eager else "plain"
    yield sentence(tone, f"{what} takes {_time(ours)} with graphex and {_time(eager)} in eager{why}.")


def _factor(value: float) -> str:
    return f"{value:.2g}" if value < 100 else f"{value:.0f}"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _records(graphs: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for graph in graphs for each in graph["more"] if each["kind"] == kind]


def _different(data: dict[str, Any]) -> Iterator[Sentence]:
    """The differences from eager that are no rounding, which come before everything else, and how to find the cause."""
    rounding = _rounding(data)
    found = [each for each in data["facts"].get("differences", ()) if each not in rounding]
    yield from _told("Different from eager", found, "bad")
    if found and data["graphs"] and not any(graph["verifications"] for graph in data["graphs"]):
        yield sentence("bad", "Set verify=True to find the rule or the pass to blame.")


def _compared(data: dict[str, Any]) -> Iterator[Sentence]:
    """The differences from eager that are rounding, and the values that `explain` could not compare."""
    rounding, causes = _rounding(data), _other_rounding(data["graphs"])
    if rounding:
        value, found, error = rounding[0].partition(": values differ by up to ")
        largest = f"largest difference {error} ({value})" if found else rounding[0]
        more = f", and {len(rounding) - 1} more" if len(rounding) > 1 else ""
        yield sentence(
            "plain",
            f"Equal to eager within rounding, {largest}{more}. {' and '.join(causes)} add and multiply in another "
            f"order; {' with '.join(causes.values())} rounds as eager does.",
        )
    unknown = data["facts"].get("not_compared", ())
    yield from _told("Not compared with eager", [f"{each['what']}: {each['reason']}" for each in unknown], "plain")


def _rounding(data: dict[str, Any]) -> Sequence[str]:
    """The differences that rounding explains: none where everything that runs rounds as eager does."""
    return data["facts"].get("rounding", ()) if _other_rounding(data["graphs"]) else ()


def _told(title: str, found: list[str], tone: str) -> Iterator[Sentence]:
    for said in found[:_MOST]:
        yield sentence(tone, f"{title}: {said}.")
    if len(found) > _MOST:
        yield sentence(tone, f"{title}: {len(found) - _MOST} more.")


def _other_rounding(graphs: list[dict[str, Any]]) -> dict[str, str]:
    """The code that rounds differently from eager's ops, and the option that does without it."""
    causes = {}
    if any(each["region"] for each in _records(graphs, _REGION)):
        causes["Compiled regions"] = "regions=False"
    if any(not each["declined"] for each in _records(graphs, "kernels")):
        causes["kernels of graphex" if causes else "Kernels of graphex"] = "pattern_fusion_pass=False"
    return causes
