"""Numbers near zero, large ones and infinite ones, and ops that compiled code may get wrong there.

`INSIDE` are compiled on every device, `INSIDE_ON_GPU` not on a CPU, `OUTSIDE_ON_GPU` not on a GPU, `OUTSIDE` nowhere.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor, nn

EXTREME = (0.0, 1e-45, 1e-38, 1e-20, 1e-8, 1e-4, 0.3, 0.7, 0.999, 1.001, 3.457, 88.0, 104.0, 65504.0, 1e10, 3e38, inf)
UNARY = (
    *("abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "digamma", "erfc", "exp", "exp2", "floor", "frac"),
    *("lgamma", "log", "log10", "log1p", "log2", "reciprocal", "round", "rsqrt", "sigmoid", "sign", "sin", "sinh"),
    *("sqrt", "square", "tan", "tanh", "trunc"),
)
ACTIVATIONS = ("hardshrink", "hardsigmoid", "hardswish", "leaky_relu", "logsigmoid", "mish", "relu", "silu", "softplus")
INSIDE = (
    {name: getattr(torch, name) for name in UNARY}
    | {name: getattr(nn.functional, name) for name in ACTIVATIONS}
    | {
        "celu": nn.functional.celu,
        "divide": lambda x: x / 0.7,
        "elu": nn.functional.elu,
        "expm1": torch.expm1,
        "power": lambda x: x.abs() ** 0.3,
        "selu": nn.functional.selu,
        "truncated": lambda x: torch.div(x, 0.7, rounding_mode="trunc"),
    }
)
INSIDE_ON_GPU = {
    "fmod": lambda x: torch.fmod(x, 1.7),
    "acosh": torch.acosh,
    "asinh": torch.asinh,
    "atanh": torch.atanh,
    "erf": torch.erf,
    "erfinv": lambda x: torch.erfinv(1 - x.double().exp2() * 2**-53),
    "ndtr": torch.special.ndtr,
}
OUTSIDE_ON_GPU = {
    "i0": torch.i0,
    "i1": torch.special.i1,
    "j0": torch.special.bessel_j0,
    "j1": torch.special.bessel_j1,
    "y0": torch.special.bessel_y0,
    "y1": torch.special.bessel_y1,
    "next": lambda x: torch.nextafter(x, x.new_tensor(inf)),
    "hard sigmoid of doubles": lambda x: nn.functional.hardsigmoid(x.double()),
    "hard swish of doubles": lambda x: nn.functional.hardswish(x.double()),
    "signs of doubles": lambda x: torch.signbit(x.double()).float(),
}
OUTSIDE = {
    "floored": lambda x: torch.div(x, 0.7, rounding_mode="floor"),
    "floor divide": lambda x: x // 3.0,
    "remainder": lambda x: x % 1.7,
    "softshrink": nn.functional.softshrink,
    "zero": lambda x: x * 0 + 1,
}


def extremes(smallest: float = 0.0) -> Tensor:
    values = [value for value in EXTREME if value >= smallest or not value]
    return torch.tensor([*values, *(-value for value in values), torch.nan])


def far_off(found: Tensor, wanted: Tensor, nothing: float = 1e-37) -> bool:
    """Whether a result differs by more than rounding: a nan is lost or made, or its first digits are others."""
    return not torch.allclose(found, wanted, rtol=1e-5, atol=nothing, equal_nan=True)
