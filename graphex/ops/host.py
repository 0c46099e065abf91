"""Ops by which the host looks at a value in the middle of a graph: it is printed, or saved to a file.

They are effects, so they stay where they are, and no device graph can hold them: a graph is cut around them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from graphex.env import numbered
from graphex.torch_private.schemas import print_options

_LIBRARIES: list[torch.library.Library] = []


def _print(x: Sequence[Tensor], summarize_size: int = 3) -> None:
    with print_options(edgeitems=max(summarize_size, 1), threshold=2 * max(summarize_size, 1)):
        for value in x:
            print(value.detach().cpu())


def _save(x: Tensor, *, save_path: str | None = None) -> None:
    where = x.device.index if x.device.index is not None else x.device.type
    stem = (save_path or "npugraph_tensor.pt").removesuffix(".pt")
    with numbered(f"{stem}_device_{where}_", ".pt") as file:
        torch.save(x.detach().cpu(), file)


_OPS: dict[str, tuple[str, Callable[..., None]]] = {
    "air::print": ("(Tensor[] x, int summarize_size=3) -> ()", _print),
    "npu::save_npugraph_tensor": ("(Tensor x, *, str? save_path=None) -> ()", _save),
}


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Nothing is printed and saved while a graph is traced."""


def _define() -> None:
    unsafe = getattr(torch.Tag, "cudagraph_unsafe", None)
    tags = tuple(tag for tag in (torch.Tag.pt2_compliant_tag, unsafe) if tag is not None)
    for name, (signature, run) in _OPS.items():
        namespace, _, short = name.partition("::")
        if hasattr(getattr(torch.ops, namespace), short):
            continue  # torch_npu's own
        library = torch.library.Library(namespace, "FRAGMENT")
        _LIBRARIES.append(library)
        library.define(short + signature, tags=tags)
        library.impl(short, run, "CompositeExplicitAutograd")
        torch.library.register_fake(name, _nothing, lib=library)
        torch.fx.has_side_effect(getattr(getattr(torch.ops, namespace), short).default)


_define()
