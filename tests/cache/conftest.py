"""These tests have a cache of their own, which is on."""

from __future__ import annotations

from tests.harness.cached import folder, run  # noqa: F401
