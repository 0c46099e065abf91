"""Random graphs around every idiom: never another result, never a broken graph.

A program is a chain of idioms over a growing list of tensors, in which values inside of an idiom are disturbed: used
elsewhere, cast, viewed, copied, broadcast. Most disturbances make it something else than the idiom, some do not; what
graphex makes of it must compute the same bits either way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

import graphex
from tests.harness.compiling import trace
from tests.harness.properties import effort

ROWS, WIDTH = 4, 8
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Disturb = Callable[[Tensor], Tensor]
"""What happens to a value inside of an idiom on its way to its next user."""

DISTURBANCES: dict[str, Disturb] = {
    "nothing": lambda v: v,
    "viewed and back": lambda v: v.reshape(-1).view(v.shape),
    "twice transposed": lambda v: v.transpose(0, -1).transpose(0, -1),
    "unsqueezed and back": lambda v: v.unsqueeze(0).squeeze(0),
    "to bfloat16": lambda v: v.to(torch.bfloat16),
    "to float32": lambda v: v.to(torch.float32),
    "to float64": lambda v: v.to(torch.float64),
    "through float16": lambda v: v.to(torch.float16).to(v.dtype),
    "cloned": lambda v: v.clone(),
    "times one": lambda v: v * 1,
    "negated": lambda v: -v,
    "first row for all": lambda v: v[:1].expand(v.shape),
    "turned": lambda v: v.flip(-1),
}


def norm(x: Tensor, y: Tensor, at: Disturb) -> Tensor:
    wide = at(x.float())
    n = at(wide * at(torch.rsqrt(at(at(wide.pow(2)).mean(-1, keepdim=True)) + 1e-6)))
    return at(y[0]) * at(n.to(x.dtype))


def gemma_norm(x: Tensor, y: Tensor, at: Disturb) -> Tensor:
    n = at(x.float() * at(torch.rsqrt(at(at(x.float()) * x.float()).mean(-1, keepdim=True) + 1e-5)))
    return at(n * at(1.0 + y[1].float())).to(x.dtype)


def torch_norm(x: Tensor, y: Tensor, at: Disturb) -> Tensor:
    return functional.rms_norm(at(x), (WIDTH,), at(y[0]).to(x.dtype), 1e-6)


def add_norm(x: Tensor, y: Tensor, at: Disturb) -> Tensor:
    total = at(x + at(y))
    return norm(total, y, lambda v: v) + total


def norm_add_norm(x: Tensor, y: Tensor, at: Disturb) -> Tensor:
    total = at(x + at(norm(x, y, lambda v: v)))
    return at(norm(total, y, lambda v: v)) + total


def gate(x: Tensor, y: Tensor, at: Disturb) -> Tensor:
    return at(functional.silu(at(x))) * at(y)


def rotary(x: Tensor, y: Tensor, at: Disturb) -> Tensor:
    half = at(torch.cat((at(-x[..., WIDTH // 2 :]), at(x[..., : WIDTH // 2])), -1))
    return at(x * at(y.cos())) + at(half * at(y.sin()))


def interleaved_rotary(x: Tensor, y: Tensor, at: Disturb) -> Tensor:
    a, b, cos, sin = at(x[..., 0::2]), at(x[..., 1::2]), y[..., :4].cos(), y[..., :4].sin()
    return torch.cat((at(at(a * cos) - at(b * sin)), at(at(b * cos) + at(a * sin))), -1)


def dynamic_quant(x: Tensor, y: Tensor, at: Disturb) -> Tensor:
    scale = at(at(at(x.abs()).amax(-1, keepdim=True).float()).clamp(min=1e-4) / 127)
    return at(at(at(x / scale).round()).clamp(-128, 127).to(torch.int8)).to(x.dtype) * scale


def static_quant(x: Tensor, y: Tensor, at: Disturb) -> Tensor:
    scale = at(y[0].abs() + 0.5)
    return at(at(at(x / scale).round()).clamp(-100, 100).to(torch.int8)).to(x.dtype) * scale


def plain(x: Tensor, y: Tensor, at: Disturb) -> Tensor:
    return at(x) + y


IDIOMS = {
    fn.__name__: fn
    for fn in (
        norm,
        gemma_norm,
        torch_norm,
        add_norm,
        norm_add_norm,
        gate,
        rotary,
        interleaved_rotary,
        dynamic_quant,
        static_quant,
        plain,
    )
}


@dataclass(frozen=True)
class Step:
    """An idiom on two values; the value at `where` inside of it is disturbed, or also returned."""

    idiom: str
    left: int
    right: int
    where: int
    disturbance: str

    def __call__(self, values: list[Tensor], kept: list[Tensor]) -> Tensor:
        met = 0

        def at(value: Tensor) -> Tensor:
            nonlocal met
            met += 1
            if met != self.where:
                return value
            if self.disturbance == "used elsewhere":
                kept.append(value)
                return value
            return DISTURBANCES[self.disturbance](value)

        return IDIOMS[self.idiom](values[self.left % len(values)], values[self.right % len(values)], at)


@dataclass(frozen=True)
class Program:
    dtypes: tuple[torch.dtype, ...]
    steps: tuple[Step, ...]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        values, kept = list(tensors), list[Tensor]()
        for step in self.steps:
            values.append(torch.tanh(step(values, kept)) if step.idiom != "plain" else step(values, kept))
        return (*values[len(tensors) :], *kept)

    def inputs(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(len(self.steps))
        return [torch.randn((ROWS, WIDTH), generator=generator).to(dtype) for dtype in self.dtypes]


index = st.integers(0, 5)
steps = st.builds(
    Step,
    st.sampled_from(sorted(IDIOMS)),
    index,
    index,
    st.integers(0, 9),  # 0, and what an idiom does not reach: undisturbed
    st.sampled_from([*DISTURBANCES, "used elsewhere"]),
)
programs = st.builds(
    Program,
    st.lists(st.sampled_from(DTYPES), min_size=2, max_size=3).map(tuple),
    st.lists(steps, min_size=1, max_size=4).map(tuple),
)


def check(program: Program, *, dynamic: bool) -> set[str]:
    """Compile with lifts forced, compare, and say which rules applied."""
    gm = trace(program, *program.inputs(), dynamic=dynamic)
    run = graphex.compile_fx(gm, options={"lift_idioms": "always"})
    found, expected = run(*program.inputs()), gm(*program.inputs())
    torch.testing.assert_close(list(found), list(expected), rtol=0, atol=0, equal_nan=True)
    journal = graphex.journal(run)
    assert journal.fallbacks == []
    assert [ran for ran in journal.passes if ran.status not in ("changed", "unchanged")] == []
    return {tried.rule for tried in journal.rules if tried.matches}


@given(program=programs)
@effort(60)
def test_a_disturbed_idiom_computes_what_it_computed(program: Program) -> None:
    check(program, dynamic=False)


@given(program=programs)
@effort(8)
def test_a_disturbed_idiom_with_symbolic_sizes_computes_what_it_computed(program: Program) -> None:
    check(program, dynamic=True)


def test_undisturbed_idioms_are_lifted() -> None:
    """Otherwise the tests above would show nothing."""
    fused: set[str] = set()
    for idiom in IDIOMS:
        fused |= check(Program((torch.bfloat16, torch.bfloat16), (Step(idiom, 0, 1, 0, "nothing"),)), dynamic=False)
    lifts = {"lift_rms_norm", "lift_silu_mul", "lift_rotary", "lift_dynamic_quant", "lift_static_quant"}
    assert fused >= lifts | {"add_rms_norm"}
