"""Nested containers, flattened the way torch flattens them."""

from torch.utils import _pytree as pytree

__all__ = ["pytree"]
