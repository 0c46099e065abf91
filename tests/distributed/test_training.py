"""Three training steps on two gloo processes, in every way to do it, are those of aot_eager bit for bit."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed.scenarios import SCENARIOS
from tests.harness.processes import ROOT

LONGEST = 600  # seconds for both processes: one that stops lets the other one know

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="there is no gloo")
Problems = dict[str, list[str]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Problems]:
    """What each of the two processes found, by scenario. All scenarios run in one pair: starting it takes longest."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # the tests of this file may be spread over workers: the first one runs the pair
    folder = shared / "ranks"
    with (shared / "ranks.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            folder.mkdir()
            run_two_processes(folder)
    logs = [(folder / f"rank_{rank}.log").read_text()[-4000:] for rank in range(2)]
    found = [folder / f"rank_{rank}.json" for rank in range(2)]
    assert all(path.exists() for path in found), "\n".join(logs)
    return [json.loads(path.read_text()) for path in found]


def run_two_processes(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # whatever the machine calls itself
    command = [sys.executable, "-m", "tests.distributed.rank"]
    processes = []
    for rank in range(2):
        with (folder / f"rank_{rank}.log").open("w") as file:
            arguments = [*command, str(rank), str(folder)]
            processes.append(subprocess.Popen(arguments, cwd=ROOT, env=environment, stdout=file, stderr=file))
    try:
        for process in processes:
            process.wait(LONGEST)
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_training_is_that_of_aot_eager_bit_for_bit(scenario, ranks):
    for rank, found in enumerate(ranks):
        assert scenario in found, f"rank {rank} stopped in '{list(found)[-1]}', before this one"
        assert not found[scenario], f"rank {rank}: " + "\n".join(found[scenario])
