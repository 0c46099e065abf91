"""What capture promises on every device, on the simulated npu: the tests of tests/runtime that name no device."""

from __future__ import annotations

from tests.runtime.test_ahead import *  # noqa: F403
from tests.runtime.test_buckets import *  # noqa: F403
from tests.runtime.test_inputs import *  # noqa: F403
from tests.runtime.test_keys import *  # noqa: F403
from tests.runtime.test_outputs import *  # noqa: F403
from tests.runtime.test_pieces import *  # noqa: F403

del test_a_sparse_input_runs_and_says_why  # noqa: F821  (the simulated npu has no sparse tensors)
