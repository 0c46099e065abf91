"""Nested containers, and tensors that are made of others, taken apart the way torch does it."""

from typing import TYPE_CHECKING

from graphex.torch_private.lookup import private

__all__ = ["is_traceable_wrapper_subclass", "pytree"]

if TYPE_CHECKING:
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass
else:
    pytree = private("torch.utils._pytree")
    is_traceable_wrapper_subclass = private("torch.utils._python_dispatch.is_traceable_wrapper_subclass")
