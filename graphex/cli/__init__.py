"""The command line `graphex`. `COMMANDS` names the module of each command, which is loaded when it is asked for.

`scripts` runs and explains a user's script, and opens and compares the reports it wrote; `catalogue` lists ops, rules,
passes and options; `machine` checks the machine, has the stored graphs and runs the benchmarks of the source tree.
`output` holds how they print. `docs` is no command: `make docs` runs it to write tables of the documentation
from declarations.

Importing a command's module imports neither torch nor rich, so that `--help` answers at once; a command imports them
when it runs.

Exit codes: 0 all is well; 1 what was asked for did not turn out well (the script raised, something is broken, a
rewrite was lost); 2 the command was used wrongly; 3 there was nothing to explain.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import click

from graphex.cli.output import Group
from graphex.errors import GraphexError

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


class Commands(Group):
    """The commands of the table above, as far as their modules are there."""

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
