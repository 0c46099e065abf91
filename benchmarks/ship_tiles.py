"""Writes what was measured on a device into the package, as a choice that comes with graphex.

    PYTHONPATH=. python benchmarks/ship_tiles.py [DEVICE ...] [--to FOLDER]

Without a name it is the current device. Only the names of the winners are kept: the times of another day and machine
are not what a user would measure.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from graphex.env import ChoiceFile, Choices, choices_in, name_in_files, write_text
from graphex.kernels.tuning import SHIPPED, conditions


@click.command(help=__doc__)
@click.argument("devices", nargs=-1)
@click.option(
    "--to", "folder", type=click.Path(file_okay=False, path_type=Path), default=SHIPPED, help="Where to write."
)
def main(devices: tuple[str, ...], folder: Path) -> None:
    if not devices and not torch.cuda.is_available():
        raise click.UsageError("there is no GPU here; name the device whose choices are meant")
    folder.mkdir(parents=True, exist_ok=True)
    for device in devices or (torch.cuda.get_device_name(),):
        store = ChoiceFile(conditions(device))
        path = folder / f"{name_in_files(device)}.json"
        choices: Choices = choices_in(path.read_text())[1] if path.exists() else {}
        found = store.read()
        for kind, entries in found.items():
            choices.setdefault(kind, {}).update({s: {"name": entry["name"]} for s, entry in entries.items()})
        with_versions = {**store.conditions, "choices": choices}
        write_text(path, json.dumps(with_versions, indent=1, sort_keys=True) + "\n")
        print(f"{path}: {sum(map(len, found.values()))} choices of {device}")


if __name__ == "__main__":
    main()
