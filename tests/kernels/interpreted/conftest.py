"""Run under Triton's interpreter only, which must be chosen before Triton is imported: see test_interpreter.py."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
