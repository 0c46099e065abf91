"""Conditions on the arguments of an op, which torch can also hold against symbolic sizes."""

from __future__ import annotations

import torch

__all__ = ["require", "require_implemented"]

require = torch._check
require_implemented = torch._check_not_implemented
