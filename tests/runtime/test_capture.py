"""What capture promises on every device, on the recording one. tests/cuda and tests/ascend hold others to the same."""

from __future__ import annotations

from tests.runtime.contract.handover import *  # noqa: F403
from tests.runtime.contract.inputs import *  # noqa: F403
from tests.runtime.contract.keys import *  # noqa: F403
from tests.runtime.contract.outputs import *  # noqa: F403
from tests.runtime.contract.padding import *  # noqa: F403
from tests.runtime.contract.pieces import *  # noqa: F403
from tests.runtime.contract.training import *  # noqa: F403
