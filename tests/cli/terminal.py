"""Running the command line as people do: in a terminal, and through a pipe."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COLOUR = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str = ""


def _environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLUMNS": "120", **variables}


def piped(*arguments: str, cwd: Path, **variables: str) -> Ended:
    """`graphex ... | cat`: neither output is a terminal."""
    command = [sys.executable, "-m", "graphex", *arguments]
    done = subprocess.run(
        command,
        cwd=cwd,
        env=_environment(**variables),
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def in_terminal(*arguments: str, cwd: Path) -> Ended:
    """`graphex ...` in a terminal of its own; both outputs as they come, with colours and cursor movements."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "graphex", *arguments]
    process = subprocess.Popen(command, cwd=cwd, env=_environment(), stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    chunks = []
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # how Linux says that the other end is closed
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(ours)
    return Ended(process.wait(), b"".join(chunks).decode())


def plain(text: str) -> str:
    return COLOUR.sub("", text)
