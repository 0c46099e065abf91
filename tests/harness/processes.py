"""Programs in processes of their own: Python that finds graphex, and the command line as people call it.

assert python("-c", "import graphex; print(1)").stdout == "1\\n"
assert piped("doctor", cwd=tmp_path).code == 0
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import pty
import re
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
PATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
COLOUR = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def python(*arguments: str | Path, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """`python ...`, with variables of the environment; the test fails, and shows what it wrote, unless it ends well."""
    done = run(*arguments, cwd=cwd, **variables)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done


def in_folder(code: str, folder: Path, **environment: str) -> str:
    """What code prints in a process of its own, without warnings, that finds modules of a folder."""
    path = {"PYTHONPATH": f"{folder}:{ROOT}"}
    return python("-W", "ignore", "-c", code, cwd=folder, **(path | environment)).stdout.strip()


def run(*arguments: str | Path, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """The same, however it ends."""
    command = [sys.executable, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": PATH, **variables}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str = ""


TERMINAL = {"TERM": "xterm-256color", "COLUMNS": "120"}


def piped(*arguments: str, cwd: Path, **variables: str) -> Ended:
    """`graphex ... | cat`: neither output is a terminal."""
    done = run("-m", "graphex", *arguments, cwd=cwd, **TERMINAL, **variables)
    return Ended(done.returncode, done.stdout, done.stderr)


def in_terminal(*arguments: str, cwd: Path, **variables: str) -> Ended:
    """`graphex ...` in a terminal of its own; both outputs as they come, with colours and cursor movements."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "graphex", *arguments]
    environment = {**os.environ, "PYTHONPATH": PATH, **(TERMINAL | variables)}
    process = subprocess.Popen(command, cwd=cwd, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    out = b"".join(_written(ours, process)).decode()
    os.close(ours)
    return Ended(process.wait(), out)


def _written(terminal: int, process: subprocess.Popen[bytes]) -> Iterator[bytes]:
    """What a process writes until it ends: a worker that it leaves behind may hold the terminal open for longer."""
    while True:
        running = process.poll() is None
        if select.select([terminal], [], [], 0.1 if running else 0)[0]:
            try:
                yield os.read(terminal, 65536)
            except OSError:  # how Linux says that the other end is closed
                return
        elif not running:
            return


def clean() -> ForkServerContext:
    """Processes that are forked from one that has imported graphex and no more: without threads, without CUDA."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "graphex.backend"])
    return context


def forked(code: str, *arguments: str, cwd: Path = ROOT, **variables: str) -> str:
    """What code prints in a process of `clean`, which starts seconds sooner than one that imports torch."""
    context = clean()
    ours, theirs = context.Pipe(duplex=False)
    given = dict(os.environ) | variables, _print_to, theirs, code, arguments, str(cwd)
    process = context.Process(target=with_environment, args=given)
    process.start()
    theirs.close()
    try:
        found: str = ours.recv()
    except EOFError:  # it was killed
        found = ""
    process.join()
    assert process.exitcode == 0, found
    return found


def _print_to(printed: Connection, code: str, arguments: Sequence[str], folder: str) -> None:
    os.chdir(folder)
    sys.argv = ["-c", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        try:
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        finally:
            printed.send(shown.getvalue())


def with_environment(variables: dict[str, str], function: Callable[..., None], *arguments: object) -> None:
    """Call a function in a process whose environment is older than these variables."""
    os.environ.update(variables)
    torch.set_num_threads(1)
    function(*arguments)


def plain(text: str) -> str:
    return COLOUR.sub("", text)
