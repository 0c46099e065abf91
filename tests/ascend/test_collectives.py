"""Two processes of a tensor-parallel script on the simulated npu, with the backends of Ascend."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.harness.processes import python

SCRIPT = Path(__file__).parent / "tensor_parallel.py"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.parametrize("backend", ["hccl", "cpu:gloo,npu:npu"])
def test_two_processes_of_a_tensor_parallel_script(backend, tmp_path):
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}

    def run(rank: int) -> str:
        arguments = "-W", "ignore", "-m", "graphex", "run", SCRIPT, backend
        return python(*arguments, cwd=tmp_path, RANK=str(rank), **shared).stdout

    with ThreadPoolExecutor(2) as both:
        said = list(both.map(run, range(2)))
    assert [each.strip().splitlines()[-1] for each in said] == ["rank 0: 1 graph", "rank 1: 1 graph"]
