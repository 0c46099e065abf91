"""What capture promises on every device, on a real GPU: the tests of tests/runtime that name no device."""

from __future__ import annotations

import pytest

from tests.runtime.test_ahead import *  # noqa: F403
from tests.runtime.test_buckets import *  # noqa: F403
from tests.runtime.test_inputs import *  # noqa: F403
from tests.runtime.test_keys import *  # noqa: F403
from tests.runtime.test_outputs import *  # noqa: F403
from tests.runtime.test_pieces import *  # noqa: F403
from tests.runtime.test_training import *  # noqa: F403

pytestmark = pytest.mark.cuda
