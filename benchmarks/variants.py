"""The variants of a model that the benchmarks compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.decoding import Setting


@dataclass(frozen=True)
class Variant:
    """`backend`, `mode` and `options` are torch.compile's; without a backend the model runs eagerly.

    `marked` are rows whose caches were marked with `mark_static_address`. Without `shipped`, graphex ignores the
    choices that come with it and measures its own. `seconds` is a generous estimate of the time of a row of eight
    layers: a row is not started if less time is left.
    """

    name: str
    backend: str | None = None
    mode: str | None = None
    marked: bool = False
    seconds: float = 15.0
    shipped: bool = True
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def stock(self) -> bool:
        return self.backend != "graphex"

    @property
    def autotunes(self) -> bool:
        """Whether Inductor times kernels on the device while it compiles: nothing may run beside it."""
        return self.mode == "max-autotune"

    def compiled(self, model: nn.Module, *, fullgraph: bool = True) -> Callable[..., Any]:
        if self.backend is None:
            return model
        if self.backend == "graphex":
            import graphex  # noqa: F401  (a source tree that is not installed has no entry point)
        if not self.shipped:
            from graphex.kernels import tuning

            tuning.shipped = lambda device: {}
        options = dict(self.options) or None
        return torch.compile(model, backend=self.backend, mode=self.mode, options=options, fullgraph=fullgraph)


EAGER = Variant("eager")
CUDAGRAPHS = Variant("cudagraphs", "cudagraphs", seconds=20)
DEFAULT = Variant("inductor default", "inductor", seconds=35)
REDUCE = Variant("inductor reduce-overhead", "inductor", "reduce-overhead", seconds=35)
REDUCE_MARKED = Variant("inductor reduce-overhead, marked", "inductor", "reduce-overhead", marked=True, seconds=35)
AUTOTUNE = Variant("inductor max-autotune", "inductor", "max-autotune", seconds=110)
AUTOTUNE_MARKED = Variant("inductor max-autotune, marked", "inductor", "max-autotune", marked=True, seconds=110)
GRAPHEX = Variant("graphex", "graphex", seconds=25)
GRAPHEX_UNTUNED = Variant("graphex, tuning from nothing", "graphex", shipped=False, seconds=45)
GRAPHEX_AUTOTUNE = Variant("graphex max-autotune", "graphex", "max-autotune", seconds=110)
GRAPHEX_NO_REGIONS = Variant("graphex, no regions", "graphex", options=(("regions", False),), seconds=25)
GRAPHEX_NO_CLONE = Variant("graphex, clone_output=False", "graphex", options=(("clone_output", False),), seconds=25)
TRAIN_STEP = Variant("train_step", "graphex", seconds=30)  # a whole training step, made by `graphex.train_step`

STOCK = (EAGER, CUDAGRAPHS, DEFAULT, REDUCE, REDUCE_MARKED, AUTOTUNE, AUTOTUNE_MARKED)
OURS = (GRAPHEX, GRAPHEX_UNTUNED)
NAMED = {variant.name: variant for variant in (*STOCK, *OURS)}
MODEL_VARIANTS = {  # those of the models benchmark
    variant.name: variant
    for variant in (
        *(EAGER, DEFAULT, REDUCE, GRAPHEX),
        *(GRAPHEX_NO_REGIONS, GRAPHEX_NO_CLONE, AUTOTUNE, GRAPHEX_AUTOTUNE),
    )
}
TRAINING_VARIANTS = {variant.name: variant for variant in (EAGER, DEFAULT, REDUCE, GRAPHEX, TRAIN_STEP)}


def fits(variant: Variant, setting: Setting) -> bool:
    """Whether such a row exists: the caches of transformers mark themselves."""
    return not setting.of_transformers or variant.marked or variant not in (REDUCE, AUTOTUNE)
