"""`graphex run script.py [args]`: run a script written for Ascend where the Ascend packages are not installed."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import click

DEVICES = ("simulated", "cuda", "cpu")


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--device",
    type=click.Choice(DEVICES),
    default=None,
    help='What "npu" is: a simulated device (the default), the GPU or the CPU.',
)
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(device: str | None, script: str, arguments: tuple[str, ...]) -> None:
    """Run SCRIPT as python would, with torch_npu, torchair, npugraph_ex and the device "npu" served by graphex.

    Packages that are installed are not replaced.
    """
    if device is not None:
        os.environ["GRAPHEX_NPU"] = device  # processes that the script starts get it too
    from graphex.cli.output import print_trace
    from graphex.errors import InputError

    try:
        import graphex.ascend  # noqa: F401
    except InputError as error:
        raise click.ClickException(str(error)) from error
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception as error:  # the script's own, and not about how this command was used
        print_trace(error, Path(script))
        raise SystemExit(1) from error


if __name__ == "__main__":
    run()
