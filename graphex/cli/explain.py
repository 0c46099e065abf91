"""`graphex explain SCRIPT`: run a script, say what became of everything it compiled, write the report."""

from __future__ import annotations

import ast
import contextlib
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from graphex.cli.output import (
    check_output,
    json_option,
    output_path,
    print_json,
    print_sentences,
    print_trace,
    waiting,
    why_not_written,
)
from graphex.config import options_of
from graphex.env import path_of_rank, why_off
from graphex.records import Journal

NOTHING = 3
_LISTS = frozenset(option.name for option in options_of() if isinstance(option.default, tuple))


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "-o",
    "--output",
    type=output_path,
    default=Path("report.html"),
    help="Where to write the report.",
)
@click.option("--set", "settings", metavar="NAME=VALUE", multiple=True, help="An option of graphex, over the script's.")
@click.option("--full", is_flag=True, help="Print every table, not the summary alone.")
@json_option
def explain(
    script: Path, arguments: tuple[str, ...], output: Path, settings: tuple[str, ...], full: bool, as_json: bool
) -> None:
    """Run SCRIPT and explain what it compiled with graphex.

    Prints a summary and writes a report for a browser (report.html). The script runs as it is, with its ARGUMENTS;
    everything in it that is compiled with backend="graphex" is looked at.

    \b
    graphex explain model.py
    graphex explain --set lift_idioms=always --set verify=true -o norms.html model.py
    """
    from graphex.backend import watching
    from graphex.evidence.report.model import report_data
    from graphex.evidence.report.page import write_page
    from graphex.evidence.tables import printed

    if reason := why_off():
        raise click.UsageError(f"graphex is off: {reason}. Without it there is something to explain.")
    options = dict(map(_setting, settings))
    page = output.absolute()  # the script may go to another directory
    check_output(page)
    with waiting(f"running {script.name}") as say, watching(options, lambda journal: say(_told(journal))) as watch:
        problem = _run(script, arguments, out=sys.stderr if as_json else sys.stdout)
    data = report_data(script.name, watch.journals)
    unwritten = why_not_written(lambda: write_page(data, path_of_rank(page))) if watch.journals else ""
    written = str(path_of_rank(output)) if watch.journals and not unwritten else None
    if as_json:
        told = {"script": str(script), "problem": problem, "report": written, "summary": data["summary"]}
        print_json(told | {"journals": [journal.to_dict() for journal in watch.journals]})
    else:
        for journal in watch.journals if full else ():
            click.echo(printed(script.name, journal))
        if problem:
            click.echo(f"{script.name} ended early: {problem}", err=True)
        print_sentences(data["summary"])
        if written:
            click.echo(f"\nreport: {written}")
        elif not (problem or unwritten):
            click.echo('Compile something in it: torch.compile(model, backend="graphex").', err=True)
    if unwritten:
        click.echo(f"'{output}' cannot be written: {unwritten}. Give another --output.", err=True)
    sys.exit(1 if problem or unwritten else 0 if watch.journals else NOTHING)


def _setting(text: str) -> tuple[str, Any]:
    """``verify=true`` as ("verify", True): a Python value, or else a word; for a list, words between commas too."""
    name, sign, value = text.partition("=")
    if not sign:
        raise click.UsageError(f"--set takes NAME=VALUE, got '{text}'.")
    plain = {"true": "True", "false": "False", "none": "None"}.get(value.lower(), value)
    try:
        found: Any = ast.literal_eval(plain)
    except (ValueError, SyntaxError):
        found = value
    if name not in _LISTS or isinstance(found, (list, tuple)):
        return name, found
    return name, [word.strip() for word in found.split(",")] if isinstance(found, str) else [found]


def _told(journal: Journal) -> str:
    return f"compiling graph {len(journal.graphs) + 1}"


def _run(script: Path, arguments: tuple[str, ...], out: Any) -> str:
    """Run the script as `python SCRIPT ARGUMENTS` would; what went wrong, or nothing."""
    try:
        with _as_main(script, arguments), contextlib.redirect_stdout(out):
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        return "" if end.code in (None, 0) else f"it exited with {end.code}"
    except Exception as error:
        print_trace(error, script)
        from graphex.errors import one_line

        return one_line(error)
    return ""


@contextlib.contextmanager
def _as_main(script: Path, arguments: tuple[str, ...]) -> Iterator[None]:
    kept_arguments, kept_path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = kept_arguments, kept_path
