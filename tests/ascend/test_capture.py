"""What capture promises on every device, on the simulated npu: the tests of tests/runtime that name no device."""

from __future__ import annotations

from tests.loops.contract import *  # noqa: F403
from tests.runtime.contract.inputs import *  # noqa: F403
from tests.runtime.contract.keys import *  # noqa: F403
from tests.runtime.contract.outputs import *  # noqa: F403
from tests.runtime.contract.padding import *  # noqa: F403
from tests.runtime.contract.pieces import *  # noqa: F403

del test_a_sparse_input_runs_and_says_why  # noqa: F821  (the simulated npu has no sparse tensors)
