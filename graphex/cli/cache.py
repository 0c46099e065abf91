"""`graphex cache`: the graphs that are stored for the next process, and why one was not found."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphex.cli.output import Group, json_option, print_json, print_table
from graphex.errors import did_you_mean

if TYPE_CHECKING:
    from graphex.cache.keys import Key
    from graphex.cache.store import Entry, Store

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (0, "s"))


@click.group(cls=Group)
def cache() -> None:
    """List, compare, check, move and remove the graphs that are stored for the next process."""


@cache.command(name="list")
@json_option
def list_entries(as_json: bool) -> None:
    """List the stored graphs, the latest use first: what each is of, its size, its age, how often it was loaded."""
    store, now = _store(), time.time()
    rows = [_about(store, entry, now) for entry in store.entries()]
    if as_json:
        print_json({"folder": str(store.path), "graphs": rows})
        return
    if rows:
        columns = ("id", "graph", "KiB", "age", "hits")
        print_table(
            columns,
            ((row["id"], row["graph"], str(row["bytes"] // 1024), _age(row["age"]), str(row["hits"])) for row in rows),
        )
    click.echo(f"{_counted(len(rows), sum(row['bytes'] for row in rows))} in {store.path}")


@cache.command()
@click.argument("wanted", metavar="MODEL|ID")
@json_option
def why(wanted: str, as_json: bool) -> None:
    """Say why the stored graph with an ID, or the latest of a MODEL, was compiled although others were stored before.

    MODEL is the name of the module or function. It is compared with the stored graph that is nearest to it.
    """
    from graphex.cache.keys import difference, nearest

    store = _store()
    entry, key = _found(store, wanted)
    others = {
        other.id: found
        for other in store.entries()
        if other.id != entry.id and other.made <= entry.made and (found := store.key(other.id)) is not None
    }
    found = nearest(key, list(others.values()))
    reason = "it was the first" if found is None else difference(key, found)
    compared = next((id for id, other in others.items() if other is found), "")
    if as_json:
        print_json({"id": entry.id, "graph": _graph(key), "compared_with": compared, "reason": reason})
        return
    beside = f", compared with {compared}" if compared else ""
    click.echo(f"{entry.id} ({_graph(key)}{beside}): {reason}")


@cache.command()
@click.argument("wanted", metavar="[MODEL|ID]", required=False)
def clear(wanted: str | None) -> None:
    """Remove all stored graphs, those of a MODEL, or the one with an ID."""
    store = _store()
    ids = [entry.id for entry in store.entries()] if wanted is None else _ids(store, wanted)
    for id in ids:
        store.discard(id)
    click.echo(f"removed {len(ids)} graphs from {store.path}")


@cache.command()
@json_option
def verify(as_json: bool) -> None:
    """Check the hash, the owner and the mode of every stored graph; ends with 1 if something is wrong.

    A graph that is found to be wrong is never loaded: it is compiled again, and replaced.
    """
    store = _store()
    problems = {entry.id: problem for entry in store.entries() if (problem := store.problem(entry.id))}
    count = len(store.entries())
    if as_json:
        print_json({"graphs": count, "problems": problems})
    else:
        for problem in problems.values():
            click.echo(problem)
        click.echo(f"{count - len(problems)} of {count} graphs are as they were written")
    sys.exit(1 if problems else 0)


@cache.command()
@click.argument("path", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("wanted", metavar="[MODEL|ID]", required=False)
def export(path: Path, wanted: str | None) -> None:
    """Write the stored graphs, or some of them, to one archive for another machine of the same kind."""
    from graphex.cache.store import write_archive

    if not path.parent.is_dir():
        raise click.UsageError(f"'{path.parent}' is no directory. Make it first.")
    store = _store()
    ids = [entry.id for entry in store.entries()] if wanted is None else _ids(store, wanted)
    try:
        size = write_archive(path, store, ids)
    except OSError as error:
        raise click.ClickException(f"'{path}' cannot be written: {error.strerror}.") from error
    click.echo(f"wrote {_counted(len(ids), size)}, to {path}")


@cache.command(name="import")
@click.argument("path", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--yes", is_flag=True, help="Do not ask.")
def import_archive(path: Path, yes: bool) -> None:
    """Say what an archive holds, and store it. Loading a stored graph runs code from it: import what you trust."""
    from graphex.cache.store import keys_of, read_archive, store_archive

    files = read_archive(path)
    for id, key in keys_of(files).items():
        devices = ", ".join(key.parts.get("devices", {}).values())
        click.echo(f"{id}   {_graph(key)}   {devices}   torch {key.parts.get('torch', '').split(' ')[0]}")
    if not yes:
        click.confirm(f"Store these in {_store().path}? A graph that is loaded runs code from the archive", abort=True)
    store_archive(files, _store())
    click.echo(f"stored {sum(name.endswith('.graph') for name in files)} graphs")


def _counted(graphs: int, size: int) -> str:
    """``1 graph, 12 KiB``"""
    from graphex.evidence.tables import size_text

    return f"{graphs} graph{'' if graphs == 1 else 's'}, {size_text(size)}"


# -- entries -----------------------------------------------------------------------------------------------------------


def _store() -> Store:
    from graphex.cache.store import Store

    store = Store()
    try:
        store.entries()
    except OSError as error:
        raise click.ClickException(f"the cache cannot be used: {error}.") from error
    return store


def _about(store: Store, entry: Entry, now: float) -> dict[str, Any]:
    key = store.key(entry.id)
    graph = "cannot be read" if key is None else _graph(key)
    return {"id": entry.id, "graph": graph, "bytes": entry.bytes, "age": now - entry.made, "hits": entry.hits}


def _graph(key: Key) -> str:
    """`Decoder inference`"""
    return f"{key.name} {key.phase}"


def _age(seconds: float) -> str:
    size, unit = next((size, unit) for size, unit in _UNITS if seconds >= size)
    return f"{int(seconds // (size or 1))} {unit}"


def _ids(store: Store, wanted: str) -> list[str]:
    """The graph with an id, or a beginning of one; else those of a function."""
    by_id = [entry.id for entry in store.entries() if wanted in (entry.id, entry.id.partition("-")[2])]
    by_id = by_id or [entry.id for entry in store.entries() if len(wanted) >= 4 and entry.id.startswith(wanted)]
    names = {entry.id: key.name for entry in store.entries() if (key := store.key(entry.id)) is not None}
    found = by_id or [id for id, name in names.items() if name == wanted]
    if not found:
        known = sorted(set(names.values()))
        hint = did_you_mean(wanted, known, f"there are {', '.join(known) or 'none'}", most=3)
        raise click.UsageError(f"no graph is stored for '{wanted}' ({hint}).")
    return found


def _found(store: Store, wanted: str) -> tuple[Entry, Key]:
    """The latest entry that an id or a name leads to, and its key."""
    ids = _ids(store, wanted)
    entry = max((entry for entry in store.entries() if entry.id in ids), key=lambda entry: entry.made)
    key = store.key(entry.id)
    if key is None:
        raise click.ClickException(f"the key of {entry.id} cannot be read.")
    return entry, key
