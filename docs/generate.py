"""The parts of the documentation that are generated from declarations, so that they cannot grow stale.

`make docs` writes `docs/options.md` from `CompilerConfig`, the names that the command line knows without torch, and the
marked parts of the other pages: what stands between these two lines is replaced.

    <!-- generated: NAME -->
    <!-- end -->
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import click

from graphex import cli, records
from graphex.cli.catalogue import NAMES, names_text
from graphex.config import CustomPass, Option, options_of
from graphex.fusion.rules import FUSIONS, LIFTS, Family
from graphex.ops import SPECS, decompositions
from graphex.passes.clean import NOOPS
from graphex.passes.pipeline import LAST, OURS
from graphex.torch_private.lookup import TRIED

_INTRODUCTION = """# Options

<!-- Written by `make docs` from graphex/config.py. Change the declaration there, not this page. -->

Which options are there, what do they do, and what is their default?

Give options to `torch.compile` as a dictionary, or set them on a `graphex.CompilerConfig` and build a backend from it:

```python
import torch
import graphex

model, x = torch.nn.Linear(8, 8), torch.randn(2, 8)

compiled = torch.compile(model, backend="graphex", options={"verify": True, "mode": "eager"})
compiled(x)

config = graphex.CompilerConfig(verify=True)
config.mode = "eager"
compiled = torch.compile(model, backend=graphex.get_backend(config))
compiled(x)
```

Names, types and values are checked. A `CompilerConfig` checks on assignment, `graphex.get_backend(options)` where it
is called. `torch.compile` hands its options over at the first call, so that is where a bad one raises
`graphex.OptionError`:

```python
try:
    torch.compile(model, backend="graphex", options={"verfy": True})(x)
except graphex.OptionError as error:
    assert "did you mean 'verify'?" in str(error)
```

A flag takes `True` or `False`; `0` and `1` are refused. torch does not accept `mode=` and `options=` in one call, so
`mode` is an option too. The configuration is read-only once compilation has started.

"""

_MARKED = re.compile(r"(<!-- generated: (?P<name>[a-z -]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def options_page() -> str:
    """The whole of docs/options.md."""
    options = list(options_of())
    summary = table(("option", "default"), ((f"[`{o.name}`](#{o.name})", f"`{_default(o)}`") for o in options))
    details = "\n".join(
        f"## {o.name}\n\n{_linked(o.doc)}\n\nAllowed: {_allowed(o)}. Default: `{_default(o)}`.\n" for o in options
    )
    return f"{_INTRODUCTION}{summary}\n{details}"


def passes_section() -> str:
    """Every pass of graphex in the order it runs."""
    rows = []
    for stage, graph_pass in (*OURS, *LAST):
        said = type(graph_pass).__doc__ or inspect.getmodule(graph_pass).__doc__ or ""  # a module may hold several
        summary = said.splitlines()[0]
        switch = f"`{graph_pass.option}`" if graph_pass.option else ""
        rules = ", ".join(f"`{rule}`" for rule in dict.fromkeys(graph_pass.rules()))
        rows.append((stage, f"`{graph_pass.name}`", summary, rules, switch))
    return table(("stage", "pass", "what it does", "rules", "option"), rows)


def noops_section() -> str:
    """Every rule of the no-op pass, with the ops it looks at."""
    by_rule: dict[str, list[str]] = {}
    for op, noop in NOOPS.items():
        by_rule.setdefault(noop.rule, []).append(f"`{op}`")
    reasons = {noop.rule: noop.reason for noop in NOOPS.values()}
    return table(("rule", "ops", "because"), ((f"`{r}`", ", ".join(ops), reasons[r]) for r, ops in by_rule.items()))


def records_section() -> str:
    """Every record type of the journal with its fields."""
    rows = []
    for record in records.Record.__subclasses__():
        fields = ", ".join(f"`{field.name}`" for field in dataclasses.fields(record))
        meaning = " ".join((record.__doc__ or "").split())
        rows.append((f"`{record.kind}`", f"`{record.__name__}`", meaning, fields))
    return table(("kind", "class", "meaning", "fields"), rows)


def decompositions_section() -> str:
    """The ops that the table `canonical` takes apart, as its module documents them."""
    lines = (decompositions.__doc__ or "").splitlines()
    first, last = (number for number, line in enumerate(lines) if line.startswith("==="))
    rows = [tuple(cell.strip() for cell in re.split(r"\s{2,}", line, maxsplit=1)) for line in lines[first + 1 : last]]
    return table(("op", "becomes"), rows)


def ops_section() -> str:
    """Every op with its schema and formula."""
    parts = []
    for spec in sorted(SPECS.values(), key=lambda spec: spec.name):
        has = [word for word, there in (("derivative", spec.gradient), ("CUDA kernel", spec.kernel)) if there]
        beside = f"With a {' and a '.join(has)}.\n" if has else ""
        schema = spec.schema.partition("::")[2]
        parts.append(f"### {spec.name}\n\n```text\n{schema}\n\n{spec.doc}\n```\n{beside}")
    return "\n".join(parts)


def families_section(families: Iterable[Family], above: Iterable[Family] = ()) -> str:
    """Families of fusion rules: what they are called, and what their modules say about them, once."""
    parts, told = [], {family.module: family for family in above}
    for family in families:
        other = told.get(family.module)
        doc = f"```text\n{family.doc}\n```" if other is None else f"Drawn above, with {_names(other)}."
        parts.append(f"{_names(family)}\n\n{doc}\n")
    return "\n".join(parts)


def _names(family: Family) -> str:
    return ", ".join(f"`{name}`" for name in family.names)


def commands_section() -> str:
    """Every command of the command line with what it says about itself, its arguments and options."""
    parts = []
    context = click.Context(cli.main, info_name="graphex")
    for path, command in _commands(cli.main, context, "graphex"):
        usage = command.collect_usage_pieces(click.Context(command, info_name=path))
        options = [each.get_help_record(context) for each in command.params if isinstance(each, click.Option)]
        rows = [(f"`{record[0]}`", record[1]) for record in options if record]
        listed = f"\n{table(('option', 'what it does'), rows)}" if rows else ""
        said = inspect.cleandoc(command.help or "").partition("\n\n\b")[0]
        parts.append(f"### {path}\n\n```text\n{path} {' '.join(usage)}\n```\n\n{said}\n{listed}")
    return "\n".join(parts)


def _commands(group: click.Group, context: click.Context, path: str) -> Iterator[tuple[str, click.Command]]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from _commands(command, context, f"{path} {name}")
        elif command is not None:
            yield f"{path} {name}", command


def ascend_section(name: str) -> Callable[[], str]:
    """One table about Ascend's names, options and scenarios."""

    def section() -> str:
        head, *rows = _ascend_tables()[name]
        return table(head, rows)

    return section


@cache
def _ascend_tables() -> dict[str, list[list[str]]]:
    """From a process of its own: `serve` gives this one a device "npu" for good."""
    code = "import json; from graphex.ascend import catalogue, serve; serve(); print(json.dumps(catalogue.tables()))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GRAPHEX_NPU": "simulated"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    found: dict[str, list[list[str]]] = json.loads(done.stdout)
    return found


def versions_section() -> str:
    """Every version of torch that graphex was tried with."""
    return table(("torch", "what is different"), ((each.version, each.differs) for each in TRIED))


SECTIONS: dict[str, Callable[[], str]] = {
    "passes": passes_section,
    "no-op rules": noops_section,
    "records": records_section,
    "decompositions": decompositions_section,
    "ops": ops_section,
    "commands": commands_section,
    "torch versions": versions_section,
    "fusions": lambda: families_section(sorted(FUSIONS, key=lambda family: family.module == "npu"), LIFTS),
    "lifts": lambda: families_section(LIFTS),
    "ascend names": ascend_section("names"),
    "torchair options": ascend_section("torchair_options"),
    "npugraph ex options": ascend_section("npugraph_ex_options"),
    "op schemas": ascend_section("op_schemas"),
    "scenarios not offered": ascend_section("scenarios_not_offered"),
    "scenarios that are better": ascend_section("better_scenarios"),
}


def filled(page: str) -> str:
    """The page with its marked parts written anew."""
    return _MARKED.sub(lambda found: f"{found[1]}\n{SECTIONS[found['name']]()}\n{found[3]}", page)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *map(list, rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _allowed(option: Option[CustomPass]) -> str:
    return _linked(", ".join(f"`{value!r}`" for value in getattr(option.kind, "values", ())) or option.kind.allowed)


def _default(option: Option[CustomPass]) -> str:
    return "[]" if option.default == () else repr(option.default)


def _linked(text: str) -> str:
    return re.sub(r"docs/(\w+\.md)", r"[\1](\1)", text)


def main() -> None:
    NAMES.write_text(names_text())
    pages = Path(__file__).parent
    (pages / "options.md").write_text(options_page())
    for page in sorted(pages.glob("*.md")):
        if page.name != "options.md":
            page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main()
