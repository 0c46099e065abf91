"""The first use of graphex in a process may come from several threads at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.harness.processes import ROOT, python

PROGRAM = """
import sys, threading, traceback
import torch
{before}

def first_use(number):
    def function(x):
        return (x * 2).relu() + number

    x = torch.randn(3, 4 + number)
    together.wait()
    try:
        {use}
        import graphex
        if torch.__version__ >= "2.12":  # before, torch itself crashes: with aot_eager too, and under a lock
            assert torch.equal(compiled(x), function(x))
            assert len(graphex.journal(compiled).graphs) == 1
    except BaseException:
        traceback.print_exc()
        failed.append(number)

failed, together = [], threading.Barrier(6)
threads = [threading.Thread(target=first_use, args=(number,)) for number in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sys.exit(len(failed))
"""
BY_NAME = "compiled = torch.compile(function, backend='graphex')"
BOTH = """import graphex
        compiled = torch.compile(function, backend="graphex" if number % 2 else graphex.get_backend())"""


@pytest.mark.parametrize(
    ("before", "use"),
    [
        pytest.param("", BY_NAME, id="by name"),
        pytest.param("import graphex", BY_NAME, id="by name, imported before"),
        pytest.param("", BOTH, id="by name and as an object"),
    ],
)
def test_threads_that_compile_first_together_all_can(before, use, tmp_path):
    entry_point(tmp_path)
    program = PROGRAM.format(before=before, use=use)
    python("-c", program, cwd=tmp_path, PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}", OMP_NUM_THREADS="1")


def entry_point(folder: Path) -> None:
    """What an installed graphex has, for a source tree too."""
    about = folder / "by_name-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: by-name\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[torch_dynamo_backends]\ngraphex = graphex.backend:graphex_backend\n")
