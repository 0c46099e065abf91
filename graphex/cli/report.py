"""`graphex report open` and `graphex report diff`: look at a report that was written before, compare two."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path

import click

from graphex.cli.output import (
    Group,
    check_output,
    json_option,
    output_option,
    print_json,
    print_sentences,
    why_not_written,
)

existing = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group(cls=Group)
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
