"""What capture promises on every device, on a real GPU: the tests of tests/runtime that name no device.

Beside what only CUDA has (test_capture_cuda.py) they cover the scenarios that `npugraph_ex` is tested with: two calls,
new sizes, a limit of one, moved and written inputs, swapped and frozen parameters, counters, outputs in place and
cloned, shared pools, forced recapture, error modes, a second device, blocking launches, switches that change kernels
(there: core limits), inputs without elements, and a recapture at the limit, which must not end in eager for ever.
"""

from __future__ import annotations

import pytest

from tests.loops.contract import *  # noqa: F403
from tests.runtime.contract.handover import *  # noqa: F403
from tests.runtime.contract.inputs import *  # noqa: F403
from tests.runtime.contract.keys import *  # noqa: F403
from tests.runtime.contract.outputs import *  # noqa: F403
from tests.runtime.contract.padding import *  # noqa: F403
from tests.runtime.contract.pieces import *  # noqa: F403
from tests.runtime.contract.training import *  # noqa: F403

pytestmark = pytest.mark.cuda
