"""The command line `graphex`. `COMMANDS` names the module of each command, which is loaded when it is asked for.

`scripts` runs and explains a user's script, and opens and compares the reports it wrote; `catalogue` lists ops, rules,
passes and options; `machine` checks the machine, has the stored graphs and runs the benchmarks of the source tree.
Here is what they share: tables and sentences for people, JSON for programs, a progress bar on a terminal.

Importing a command's module imports neither torch nor rich, so that `--help` answers at once; a command imports them
when it runs, or where something is printed.

Exit codes: 0 all is well; 1 what was asked for did not turn out well (the script raised, something is broken, a
rewrite was lost); 2 the command was used wrongly; 3 there was nothing to explain.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import click

from graphex.errors import GraphexError, did_you_mean
from graphex.records import json_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

# Command -> the module that defines it under its own name.
COMMANDS = {
    "doctor": "graphex.cli.machine",
    "run": "graphex.cli.scripts",
    "explain": "graphex.cli.scripts",
    "report": "graphex.cli.scripts",
    "cache": "graphex.cli.machine",
    "ops": "graphex.cli.catalogue",
    "rules": "graphex.cli.catalogue",
    "passes": "graphex.cli.catalogue",
    "options": "graphex.cli.catalogue",
    "bench": "graphex.cli.machine",
}


class Group(click.Group):
    """Commands. Help shows the whole first sentence of each; a mistyped one is told the near names, the best first.

    A file in the place of a command is told the command that takes it: `for_files` has one for each ending, and for any
    other ending the one of "".
    """

    for_files: ClassVar[dict[str, str]] = {}

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        named = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, _first_paragraph(command.help or "")) for name, command in named if command is not None]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-"):
            ending = Path(args[0]).suffix
            command = self.for_files.get(ending, self.for_files.get("", "")) if ending else ""
            hint = did_you_mean(args[0], known, f"there are {', '.join(known)}", most=2)
            hint = f"for a file, write {command} {args[0]}" if command else hint
            raise click.UsageError(f"No such command '{args[0]}' ({hint}).", ctx)
        return super().resolve_command(ctx, args)


def _first_paragraph(text: str) -> str:
    return " ".join(inspect.cleandoc(text).partition("\n\n")[0].split())


class Commands(Group):
    """The commands of the table above, as far as their modules are there."""

    for_files: ClassVar[dict[str, str]] = {".py": "graphex explain", ".html": "graphex report open"}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, module in COMMANDS.items() if find_spec(module) is not None]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.list_commands(ctx):
            return None
        command: click.Command = getattr(import_module(COMMANDS[name]), name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """An error of ours is one sentence, on the command line too."""
        try:
            return super().invoke(ctx)
        except GraphexError as error:
            raise click.UsageError(str(error)) from error


def _version() -> str:
    import graphex

    return graphex.__version__


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(_version(), prog_name="graphex")
def main() -> None:
    """Compile PyTorch models with graphex, and see what happened to them."""


# -- options -----------------------------------------------------------------------------------------------------------


Command = TypeVar("Command", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


def output_option(default: str, help: str) -> Callable[[Command], Command]:
    """The option `--output` of a command that writes a page."""
    path = click.Path(dir_okay=False, path_type=Path)
    return click.option("-o", "--output", type=path, default=Path(default), help=help)


def check_output(path: Path) -> None:
    """Refuse a path that cannot be written, before the work whose result it is for."""
    if not path.parent.is_dir():
        raise click.UsageError(f"'{path.parent}' is no directory. Make it first, or give another --output.")
    target = Path(os.path.realpath(path))
    try:
        if is_new := not target.exists():
            target.touch()
            target.unlink()
    except OSError as error:
        raise click.UsageError(f"'{path}' cannot be written: {error.strerror}. Give another --output.") from error
    if not is_new and not (os.access(target, os.W_OK) and os.access(target.parent, os.W_OK)):
        raise click.UsageError(f"'{path}' cannot be written: permission denied. Give another --output.")


def why_not_written(write: Callable[[], object]) -> str:
    """Call `write`; returns the system's reason if it fails, else nothing."""
    try:
        write()
    except OSError as error:
        return error.strerror or str(error)
    return ""


# -- output ------------------------------------------------------------------------------------------------------------


MARKS = {"good": ("✓", "green"), "bad": ("!", "yellow"), "plain": ("·", "dim")}


def console(*, stderr: bool = False) -> Console:
    """The console to print on: as wide as the terminal, or as a page where there is none."""
    from rich.console import Console

    from graphex.evidence.tables import WIDTH

    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else WIDTH, highlight=False, markup=False)


def print_json(data: object) -> None:
    click.echo(json_text(data, indent=2))


def print_table(head: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in head:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    console().print(table)


def print_sentences(sentences: Iterable[dict[str, str]]) -> None:
    """Sentences of a summary, each with its mark."""
    from rich.text import Text

    out = console()
    for sentence in sentences:
        mark, style = MARKS[sentence["tone"]]
        out.print(Text.assemble((f"{mark} ", style), sentence["text"]))


@contextmanager
def waiting(text: str, steps: int | None = None) -> Iterator[Callable[[str], None]]:
    """Show progress on the terminal while the block runs; silent where stderr is no terminal.

    The block gets a function that shows what it begins now and, with `steps`, moves the bar on by one.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = [SpinnerColumn(), TextColumn("{task.description}", markup=False)]
    columns += [BarColumn(), MofNCompleteColumn()] if steps else []
    both = sys.stdout.isatty()
    progress = Progress(
        *columns, TimeElapsedColumn(), console=console(stderr=True), transient=True, redirect_stdout=both
    )
    with progress:
        task = progress.add_task(text, total=steps)
        yield lambda now: progress.update(task, description=now, advance=1 if steps else 0)


def styled(status: str) -> Text:
    """A status in its colour."""
    from rich.text import Text

    colours: dict[str, Any] = {
        "ok": "green",
        "missing": "yellow",
        "untried": "yellow",
        "broken": "red",
        "fits": "green",
    }
    return Text(status, style=colours.get(status, "dim"))
