"""Nested containers, and tensors that are made of others, taken apart the way torch does it."""

from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["is_traceable_wrapper_subclass", "pytree"]
