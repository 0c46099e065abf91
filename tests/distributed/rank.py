"""One of two processes: `python -m tests.distributed.rank RANK FOLDER` runs every scenario and writes what went wrong.

FOLDER/rank_R.json maps each scenario that ran to a list of sentences; it is written anew after each. A process that
meets an exception stops, and so does the other one, which finds nobody at its next collective.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.distributed.scenarios import SCENARIOS, problems

LONGEST = timedelta(seconds=120)  # for a collective: the other process may still be compiling


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=LONGEST)
    found: dict[str, list[str]] = {}
    for name, scenario in SCENARIOS.items():
        has_stopped = False
        try:
            found[name] = list(problems(scenario))
        except Exception:
            found[name], has_stopped = [traceback.format_exc()], True
        (folder / f"rank_{rank}.json").write_text(json.dumps(found))
        if has_stopped:
            break
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without waiting for the other one


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
