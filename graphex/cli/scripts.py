"""`graphex run SCRIPT`, `graphex explain SCRIPT` and `graphex report`: run a script, and look at what it wrote.

`run` serves the Ascend names to a script; `explain` says what became of everything it compiled, and writes the report.
Both run it as `python SCRIPT ARGUMENTS` would. `report` opens a report that was written before, or compares two.
"""

from __future__ import annotations

import ast
import contextlib
import os
import runpy
import sys
import traceback
import webbrowser
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import click

from graphex.cli import (
    Group,
    check_output,
    json_option,
    output_option,
    print_json,
    print_sentences,
    waiting,
    why_not_written,
)
from graphex.cli.catalogue import why_unknown
from graphex.config import config_from, options_of
from graphex.env import path_of_rank, why_off
from graphex.errors import InputError, OptionError, did_you_mean, one_line
from graphex.records import GraphBroke, Journal

DEVICES = ("simulated", "cuda", "cpu")
NOTHING = 3
_SCRIPTS = {"rules": "the script registers a rule of this name", "passes": "a pass of the script has this name"}
_LISTS = frozenset(option.name for option in options_of() if isinstance(option.default, tuple))


class _Script(click.Path):
    """The path of a script. A word that begins with a dash is reported as a mistyped option of the command, and a
    report with the command that opens it.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        word = str(value).partition("=")[0]
        if ctx is not None and word.startswith("-") and not Path(value).exists():
            options = [param for param in ctx.command.params if isinstance(param, click.Option)]
            known = [name for option in options for name in option.opts if name.startswith("--")]
            hint = did_you_mean(word, known, f"there are {', '.join(known)}")
            raise click.UsageError(f"No such option '{word}' ({hint}).", ctx)
        if Path(value).suffix == ".html" and Path(value).is_file():
            self.fail(f"'{value}' is no script. To see a report, write graphex report open {value}", param, ctx)
        return super().convert(value, param, ctx)


script_path = _Script(exists=True, dir_okay=False, path_type=Path)


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--device",
    type=click.Choice(DEVICES),
    default=None,
    help='What "npu" is: a simulated device (the default), the GPU or the CPU.',
)
@click.argument("script", type=script_path)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(device: str | None, script: Path, arguments: tuple[str, ...]) -> None:
    """Run SCRIPT as python would, with torch_npu, torchair, npugraph_ex and the device "npu" served by graphex.

    Packages that are installed are not replaced.
    """
    if misplaced := _own_option(arguments):
        click.echo(f"note: {misplaced} stands after {script.name}, so the script gets it.", err=True)
    if device is not None:
        os.environ["GRAPHEX_NPU"] = device  # processes that the script starts get it too
    import graphex

    graphex.define()  # first: once torch_npu is served, its ops are taken for those of the real one
    from graphex.ascend import serve

    try:
        serve()
    except InputError as error:
        raise click.ClickException(str(error)) from error
    try:
        _run_as_main(script, arguments)
    except Exception as error:  # the script's own, and not about how this command was used
        _print_trace(error, script)
        raise SystemExit(1) from error


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("script", type=script_path)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@output_option("report.html", "Where to write the report.")
@click.option("--set", "settings", metavar="NAME=VALUE", multiple=True, help="An option of graphex, over the script's.")
@click.option("--full", is_flag=True, help="Print every table, not the summary alone.")
@json_option
def explain(
    script: Path, arguments: tuple[str, ...], output: Path, settings: tuple[str, ...], full: bool, as_json: bool
) -> None:
    """Run SCRIPT and explain what it compiled with graphex.

    Prints a summary and writes a report for a browser (report.html). The script runs as it is, with its ARGUMENTS; the
    report covers everything in it that is compiled with backend="graphex".

    Options come before SCRIPT. Arguments of the script that look like one of them come after a --.

    \b
    graphex explain model.py
    graphex explain --set lift_idioms=always --set verify=true -o norms.html model.py
    graphex explain model.py -- --output weights.pt
    """
    if reason := why_off():
        raise click.UsageError(f"graphex is off: {reason}. Without it there is something to explain.")
    arguments = _for_the_script(script, arguments)
    options = config_from(dict(map(_setting, settings))).given()
    _note_unknown_names(options)
    page = output.absolute()  # the script may go to another directory
    check_output(page)

    import graphex  # and torch with it: what can be wrong with the command was said before
    from graphex.backend import watching
    from graphex.env import progress_to
    from graphex.evidence.report.data import report_data
    from graphex.evidence.report.page import write_page
    from graphex.frontend.origin import breaks_of_process

    graphex.define()
    before = breaks_of_process()
    watched = watching(options, lambda journal: say(_progress_text(journal)))
    with waiting(f"running {script.name}") as say, progress_to(say), watched as watch:
        problem = _run(script, arguments, out=sys.stderr if as_json else sys.stdout, has_settings=bool(settings))
    data = report_data(script.name, watch.journals)
    unwritten = why_not_written(lambda: write_page(data, path_of_rank(page))) if watch.journals else ""
    written = str(path_of_rank(output)) if watch.journals and not unwritten else None
    if as_json:
        told = {"script": str(script), "problem": problem, "report": written, "summary": data["summary"]}
        print_json(told | {"journals": [journal.to_dict() for journal in watch.journals]})
    else:
        _tell(script, watch.journals if full else [], problem, data["summary"])
        if written:
            click.echo(f"\nreport: {written}")
        elif not (problem or unwritten):
            click.echo(_why_nothing(before), err=True)
    if unwritten:
        click.echo(f"'{output}' cannot be written: {unwritten}. Give another --output.", err=True)
    sys.exit(1 if problem or unwritten else 0 if watch.journals else NOTHING)


def _why_nothing(before: Collection[GraphBroke]) -> str:
    """The advice for a script of which no graph has reached graphex. `before` are the graph breaks before it ran."""
    from graphex.frontend.origin import breaks_of_process
    from graphex.torch_private.frames import called_backends

    breaks = [f"  {each.line}\n    {each.reason}" for each in breaks_of_process() if each not in before]
    if others := [repr(name) for name in called_backends() if name != "graphex"]:
        return f'It was compiled with {" and ".join(others)}: write torch.compile(model, backend="graphex").'
    cannot = ["If it does, there are no ops beside what Dynamo cannot trace:", *breaks] if breaks else []
    return "\n".join(('Compile something in it: torch.compile(model, backend="graphex").', *cannot))


def _tell(script: Path, journals: Sequence[Journal], problem: str, summary: Iterable[dict[str, str]]) -> None:
    """Print the tables of journals, the error that ended the script, and the summary."""
    from graphex.evidence.tables import printed

    for journal in journals:
        click.echo(printed(script.name, journal))
    if problem:
        click.echo(f"{script.name} ended early: {problem}", err=True)
    print_sentences(summary)


def _own_option(arguments: tuple[str, ...]) -> str:
    """The first argument of a script that is spelled like an option of the command it was given to."""
    command = click.get_current_context().command
    names = {name for parameter in command.params if isinstance(parameter, click.Option) for name in parameter.opts}
    return next((word for word in arguments if word.partition("=")[0] in names), "")


def _for_the_script(script: Path, arguments: tuple[str, ...]) -> tuple[str, ...]:
    """The script's arguments. Raises for one that is spelled like an option of the command, unless `--` precedes it."""
    if arguments[:1] == ("--",):
        return arguments[1:]
    if misplaced := _own_option(arguments):
        raise click.UsageError(
            f"{misplaced} stands after {script.name}, where arguments of the script stand. Put it before the script; "
            f"or, if the script is to get it, write graphex explain {script.name} -- {' '.join(arguments)}"
        )
    return arguments


def _setting(text: str) -> tuple[str, Any]:
    """``verify=true`` as ("verify", True): a Python value, or else a word; for a list, words between commas too."""
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise click.UsageError(f"--set takes NAME=VALUE, such as verify=true, got '{text}'.")
    plain = {"true": "True", "false": "False", "none": "None"}.get(value.lower(), value)
    try:
        found: Any = ast.literal_eval(plain)
    except (ValueError, SyntaxError):
        found = value
    if name not in _LISTS or isinstance(found, (list, tuple)):
        return name, found
    return name, [word.strip() for word in found.split(",")] if isinstance(found, str) else [found]


def _note_unknown_names(options: dict[str, Any]) -> None:
    """Say at once which rules and passes graphex does not have. The script may register them: only it can tell."""
    for kind in ("rules", "passes"):
        for name in options.get(f"disable_{kind}", ()):
            if problem := why_unknown(name, kind):
                click.echo(f"note: {problem.rstrip('.')}, unless {_SCRIPTS[kind]}.", err=True)


def _progress_text(journal: Journal) -> str:
    return f"compiling graph {len(journal.graphs) + 1}"


def _run(script: Path, arguments: tuple[str, ...], out: Any, *, has_settings: bool) -> str:
    """Run the script with its output sent to `out`; returns what went wrong, or nothing.

    The traceback of an error is printed, but for an option of `--set` that does not fit: the script has no part in it.
    """
    try:
        with contextlib.redirect_stdout(out):
            _run_as_main(script, arguments)
    except SystemExit as end:
        return "" if end.code in (None, 0) else f"it exited with {end.code}"
    except Exception as error:
        if not (has_settings and isinstance(error, OptionError)):
            _print_trace(error, script)
        return one_line(error)
    return ""


def _run_as_main(script: Path, arguments: tuple[str, ...]) -> None:
    kept_arguments, kept_path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = kept_arguments, kept_path


def _print_trace(error: BaseException, script: Path) -> None:
    """Print the traceback of a script from its own first line on, without the frames that started it."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != str(script):
        frames = frames.tb_next
    click.echo("".join(traceback.format_exception(error.with_traceback(frames))), err=True)


# -- reports -----------------------------------------------------------------------------------------------------------


class _Report(click.Path):
    """The path of a report. Where there is none, the command that writes one is told."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not Path(value).exists():
            self.fail(f"File '{value}' does not exist. Write a report with `graphex explain SCRIPT`.", param, ctx)
        return super().convert(value, param, ctx)


existing = _Report(exists=True, dir_okay=False, path_type=Path)


class _Reports(Group):
    for_files: ClassVar[dict[str, str]] = {"": "graphex report open"}


@click.group(cls=_Reports)
def report() -> None:
    """Open a report, or compare two."""


@report.command(name="open")
@click.argument("path", type=existing, default=Path("report.html"))
@json_option
def open_report(path: Path, as_json: bool) -> None:
    """Show a report (report.html if none is named) in the browser, and its summary here."""
    from graphex.evidence.report.page import read_data

    data = read_data(path)
    address = path.resolve().as_uri()
    if as_json:
        print_json({"title": data["title"], "kind": data["kind"], "address": address, "summary": data["summary"]})
        return
    print_sentences(data["summary"])
    if not webbrowser.open(address):
        click.echo(
            f"There is no browser here to open it with. Copy the file to a machine that has one: {path}", err=True
        )
        sys.exit(1)


@report.command()
@click.argument("before", type=existing)
@click.argument("after", type=existing)
@output_option("difference.html", "Where to write the page that shows the difference.")
@json_option
def diff(before: Path, after: Path, output: Path, as_json: bool) -> None:
    """Compare two reports of one model: which rewrites were lost, which were won.

    Ends with 1 if a rewrite was lost, so that a CI job can hold on to what it has, and if the models have little in
    common: then nothing is compared, and no page is written.
    """
    from graphex.errors import InputError
    from graphex.evidence.report.compare import compare, has_losses
    from graphex.evidence.report.page import read_data, write_page

    check_output(output)
    old, new = read_data(before), read_data(after)
    for path, data in ((before, old), (after, new)):
        if data["kind"] != "report":
            raise InputError(f"'{path}' is a comparison. Give the two reports it was made from.")
    difference = compare(old, new)
    is_compared = not difference["different_models"]
    if is_compared and (unwritten := why_not_written(lambda: write_page(difference, output))):
        raise click.ClickException(f"'{output}' cannot be written: {unwritten}. Give another --output.")
    if as_json:
        print_json({**difference, "page": str(output) if is_compared else None})
    else:
        print_sentences(difference["summary"])
        click.echo(f"\ncomparison: {output}" if is_compared else f"\nNothing was compared; '{output}' was not written.")
    sys.exit(1 if has_losses(difference) else 0)
