"""`graphex ops`, `rules`, `passes` and `options`: a table of all, or one of them with its documentation.

A mistyped name is answered from `names.json`, which `make docs` writes: the declarations would import torch.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from graphex.cli import json_option, print_json, print_table
from graphex.errors import did_you_mean

NAMES = Path(__file__).with_name("names.json")


@dataclass(frozen=True)
class Entry:
    """Something that has a name, a line to be known by, and documentation."""

    name: str
    kind: str
    summary: str
    doc: str


def _command(name: str, what: str, kind: str, entries: Callable[[], list[Entry]]) -> click.Command:
    @click.command(name=name, help=f"List {what}, or show the one called NAME with its documentation.")
    @click.argument("wanted", metavar="[NAME]", required=False)
    @json_option
    def command(wanted: str | None, as_json: bool) -> None:
        if wanted is not None and (problem := why_unknown(wanted, name)):
            raise click.UsageError(problem)
        found = [entry for entry in entries() if wanted in (None, entry.name)]
        if as_json:
            print_json([asdict(entry) for entry in found])
        elif wanted is not None:
            click.echo(f"{found[0].name}   {found[0].kind}\n\n{found[0].doc}")
        else:
            print_table((name, kind, "what it does"), ((e.name, e.kind, e.summary) for e in found))

    return command


def why_unknown(wanted: str, kind: str) -> str:
    """One sentence with near names if graphex has none of this name among its ``ops``, ``rules`` ...; else nothing."""
    names = json.loads(NAMES.read_text())[kind]
    if wanted in names:
        return ""
    hint = did_you_mean(wanted, names, f"`graphex {kind}` lists them", most=3)
    return f"there is no '{wanted}' ({hint})."


def names_text() -> str:
    """The contents of `names.json`."""
    kinds: dict[str, Iterable[Entry]] = {"ops": _ops(), "rules": _rules(), "passes": _passes(), "options": _options()}
    names = {kind: list(dict.fromkeys(entry.name for entry in found)) for kind, found in kinds.items()}
    return json.dumps(names, indent=1) + "\n"


def _ops() -> list[Entry]:
    from graphex.ops import SPECS

    found = []
    for spec in sorted(SPECS.values(), key=lambda spec: spec.name):
        has = [word for word, there in (("derivative", spec.gradient), ("CUDA kernel", spec.kernel)) if there]
        formula = inspect.cleandoc(spec.doc)
        found.append(Entry(spec.name, ", ".join(has), formula.splitlines()[0], f"{spec.schema}\n\n{formula}"))
    return found


def _rules() -> list[Entry]:
    from graphex.fusion.rules import FUSIONS, LIFTS
    from graphex.passes.clean import NOOPS

    docs: dict[str, str] = {}
    for family in (*LIFTS, *FUSIONS):
        docs.update(dict.fromkeys(family.names, family.doc))
    dropped: dict[str, list[str]] = {}
    for op, noop in NOOPS.items():
        dropped.setdefault(noop.rule, []).append(str(op))
    for noop in NOOPS.values():
        docs[noop.rule] = _noop_doc(dropped[noop.rule], noop.reason, noop.keeps)
    found: dict[str, Entry] = {}
    for entry, rules in _passes_with_rules():
        for rule in rules:
            doc = docs.get(rule, entry.doc)
            found.setdefault(rule, Entry(rule, entry.name, doc.splitlines()[0], doc))
    return list(found.values())


def _noop_doc(ops: list[str], reason: str, keeps: int) -> str:
    name = ops[0].split(".")[1]
    given = ("x", "y")[: keeps + 1]
    return (
        f"Drop {', '.join(ops)} where {reason}.\n\n"
        f"    before:  a = {name}({', '.join(given)}, ...); b = add(a, 1)\n"
        f"    after:   b = add({given[keeps]}, 1)\n\n"
        "A call stays where an output would begin to share memory with an input or with another output."
    )


def _passes() -> list[Entry]:
    return [entry for entry, _ in _passes_with_rules()]


def _passes_with_rules() -> list[tuple[Entry, tuple[str, ...]]]:
    from graphex.passes.pipeline import LAST, OURS

    found = []
    for stage, graph_pass in (*OURS, *LAST):
        doc = inspect.cleandoc(getattr(inspect.getmodule(graph_pass), "__doc__", None) or "")
        doc = f"{own}\n\n{doc}" if (own := type(graph_pass).__doc__) else doc  # a module may hold several
        switch = f"\n\nSwitched by the option '{graph_pass.option}'." if graph_pass.option else ""
        rules = tuple(dict.fromkeys(graph_pass.rules()))
        named = f"\n\nRules: {', '.join(rules)}." if rules else ""
        found.append((Entry(graph_pass.name, stage, doc.splitlines()[0], f"{doc}{named}{switch}"), rules))
    return found


def _options() -> list[Entry]:
    from graphex.config import options_of

    found = []
    for option in options_of():
        default = "[]" if option.default == () else repr(option.default)
        doc = f"{option.doc}\n\nAllowed: {option.kind.allowed}.\nDefault: {default}."
        found.append(Entry(option.name, default, option.doc, doc))
    return found


ops = _command("ops", "the ops that graphex defines", "has", _ops)
rules = _command("rules", "the rewrite rules", "pass", _rules)
passes = _command("passes", "the passes, in the order they run", "stage", _passes)
options = _command("options", "the options of a compilation", "default", _options)
