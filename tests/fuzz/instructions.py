"""The vocabulary of random programs: tables of lines with holes, and how the holes are filled.

A row is text. `{x}` and `{y}` are values, `{d}` a dimension of `x`, `{like}` a value of the shape of `x`. What does
not fit is rejected by the trial in eager, so a row says nothing about types and shapes but what helps to hit.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from tests.fuzz.programs import SIZES, Program, Step, Trial

INPUTS = (
    "numbers(n, 3)",
    "numbers(n, 3, seed=1)",
    "numbers(n, 3, seed=2)",
    "numbers(n, 3, seed=5).t()",
    "numbers(3, n, seed=3).t()",
    "numbers(3, seed=4)",
    "numbers(3, 3, seed=1)",
    "numbers(n, 3, dtype=torch.bfloat16)",
    "numbers(n, 3, dtype=torch.float64, seed=3)",
    "numbers(n, 3, dtype=torch.int64)",
    "numbers(n, 3, dtype=torch.bool)",
    "numbers(1, 3, seed=2)",
    "numbers(2, n, 3, seed=2)",
    "numbers(2, n, 3)[1]",
    "numbers(n, 5)[:, 1:4]",
    "numbers(n)",
    "numbers()",
    "numbers(0, 3)",
    "torch.tensor([1, 0])",
    "torch.complex(numbers(n, 3), numbers(n, 3, seed=1))",
)
SHARING_INPUTS = ("{x}", "{x}[1:]", "{x}[:2]", "{x}[:]", "{x}.t()", "{x}.view(-1)", "{x}[0]", "{x}[:, 1:]", "{x}[2:]")

VIEWS = (
    "{x}[1:]",
    "{x}[:2]",
    "{x}[0]",
    "{x}[:]",
    "{x}[::2]",
    "{x}[-1]",
    "{x}[:-1]",
    "{x}[:, 1:]",
    "{x}[..., 0]",
    "{x}[1:, :2]",
    "{x}[:, None]",
    "{x}.t()",
    "{x}.transpose(0, -1)",
    "{x}.permute(1, 0)",
    "{x}.view(-1)",
    "{x}.view({x}.shape)",
    "{x}.reshape(-1)",
    "{x}.view(-1, 3)",
    "{x}.view(3, -1)",
    "{x}.narrow({d}, 0, 2)",
    "{x}.select({d}, 1)",
    "{x}.diagonal()",
    "{x}.expand(2, *{x}.shape)",
    "{x}.expand(4, 3)",
    "{x}.unsqueeze({d})",
    "{x}.squeeze()",
    "{x}.squeeze(0)",
    "{x}.detach()",
    "{x}.as_strided((2, 2), (2, 1), 1)",
    "{x}.as_strided((3,), (1,))",
    "{x}.unfold({d}, 2, 1)",
    "{x}.unbind({d})[1]",
    "{x}.split(2, {d})[0]",
    "{x}.chunk(2, {d})[1]",
    "{x}.view(torch.int64)",
    "torch.view_as_real({x})",
    "torch.view_as_complex({x})",
    "{x}.real",
    "{x}.movedim(0, -1)",
)
PAIRS_OF_VIEWS = ("{x}.chunk(2, {d})", "{x}.split(2, {d})", "{x}[:2].unbind(0)", "torch.tensor_split({x}, 2, {d})")

# What is written to: a value, or a window of one.
WINDOWS = (
    "",
    "",
    "[1:]",
    "[:2]",
    "[0]",
    "[:]",
    "[::2]",
    "[:, 0]",
    "[:, 1:]",
    "[1, 1:]",
    "[1:][:1]",
    ".t()",
    ".view(-1)",
    ".diagonal()",
    ".select(-1, 1)",
    ".narrow(0, 1, 2)",
    ".unsqueeze(0)",
)
# {t} is the target, {s} a source of its shape
WRITES = (
    "{t}.add_({s})",
    "{t}.mul_({s})",
    "{t}.copy_({s})",
    "{t}.copy_({s})",
    "{t}.add_(1)",
    "{t}.mul_(2)",
    "{t}.fill_(3)",
    "{t}.zero_()",
    "{t}.relu_()",
    "{t}.neg_()",
    "{t}.clamp_(-1, 1)",
    "{t}.sub_({s}, alpha=2)",
    "{t}.add_({s}).mul_(2)",
    "{t}.lerp_({s}, 0.5)",
    "{t}.addcmul_({s}, {s})",
    "{t}.masked_fill_({t} > 0, 2)",
    "{t}.masked_fill_({s} > 0, 2)",
    "{t}.copy_({t} * 2)",
    "{t}.copy_(torch.where({t} > 0, {t}, {s}))",
    "{t}.copy_({t}.flip(0))",
    "{t}.copy_(ops.turn({t}))",
    "{t}.copy_(ops.mix({t}, {s}, {s})[1])",
    "{t}.copy_(ops.mix({s}, {t}, {s} * 2)[2])",
    "{t}.logical_not_()",
    "{t}.cumsum_(0)",
)
SELF_COPIES = ("{t}.copy_({t})", "{t}.copy_({t}.clone())")
ASSIGNMENTS = ("{t} = {s}", "{t} += {s}", "{t} = {t} * 2", "{t} = 1.5", "{t} *= 2")  # for windows in brackets
# {i} is an index of two rows, {r} two rows like those of the target
INDEXED = (
    "{t}[{i}] = {r}",
    "{t}.index_put_(({i},), {r})",
    "{t}.index_put_(({i},), {r}, accumulate=True)",
    "{t}.index_copy_(0, {i}, {r})",
    "{t}.index_add_(0, {i}, {r})",
    "{t}.index_fill_(0, {i}, 2)",
    "{t}.scatter_(0, {i}.view(2, 1).expand(2, 3), {r})",
    "{t}.scatter_add_(0, {i}.view(2, 1).expand(2, 3), {r})",
    "{t}.scatter_reduce_(0, {i}.view(2, 1).expand(2, 3), {r}, 'amax')",
    "{t}.copy_({t}.index_copy(0, {i}, {r}))",
)
INDICES = ("torch.tensor([1, 0])", "torch.tensor([0, 2])", "torch.arange(2)")

FUNCTIONAL = (
    "{x} + {y}",
    "{x} * {y}",
    "{x} - 1",
    "{x} * 2",
    "{x} ** 2",
    "{y} - {x}",
    "({x} * 2 + 1).relu()",
    "({x} + {y}).tanh()",
    "({x} + {like}).mul(0.5)",
    "torch.sin({x})",
    "torch.sigmoid({x})",
    "torch.relu({x})",
    "-{x}",
    "{x}.abs()",
    "{x} > {y}",
    "~({x} > 0)",
    "torch.where({x} > 0, {x}, {like})",
    "torch.where({x} > 0, {x}, 0)",
    "{x}.sum({d}, keepdim=True)",
    "{x}.mean({d})",
    "{x}.amax({d})",
    "{x}.sum()",
    "{x}.any()",
    "{x}.cumsum({d})",
    "{x}.softmax({d})",
    "{x} @ {x}.mT",
    "torch.matmul({x}, {y})",
    "torch.addmm({x}, {x}, {y})",
    "torch.addmm({x} * 2, {like}, torch.ones(3, 3))",
    "{x}.flip({d})",
    "{x}.masked_fill({x} > 0, 0)",
    "{x}.index_select(0, torch.tensor([1, 0]))",
    "{x}.index_copy(0, torch.tensor([1, 0]), {like}[:2])",
    "{x}.gather(0, {x}.argmax(0, keepdim=True))",
    "torch.slice_scatter({x}, {like}[:2], 0, 1, 3)",
    "torch.select_scatter({x}, {like}[0], 0, 1)",
    "torch.zeros_like({x})",
    "torch.full_like({x}, 2) + {x}",
    "torch.nn.functional.layer_norm({x}, (3,))",
    "{x}.roll(1, {d})",
    "ops.plain({x})",
    "ops.turn({x})",
    "ops.turn({x} * 2)",
    "ops.turn(ops.turn({x} + {like}) + 1)",
    "ops.mix({x} * 2, {like} + 1, {x})[1]",
)
PAIRS = (
    "torch.topk({x}, 2, {d})",
    "torch.sort({x}, {d}, stable=True)",
    "torch.var_mean({x}, {d})",
    "torch.max({x}, {d})",
    "torch.frexp({x})",
    "ops.mix({x} * 2, {like} + 1, {y})[:2]",
    "ops.mix({x}, {like}, {y})[1:]",
)
CATS = (
    "torch.cat([{x}, {like}])",
    "torch.cat([{x}, {like}], {d})",
    "torch.cat([{x}, {x}], {d})",
    "torch.cat([{x} * 2, {like} + 1], {d})",
    "torch.cat([{x} * 2, ({like} + 1).to(torch.float64)], {d})",
    "torch.cat([{x}, {like} @ torch.ones(3, 3)], {d})",
    "torch.cat([{x}[:1], {x}[1:]])",
    "torch.cat([{x}.sin(), {x}.sin(), {like}])",
    "torch.cat([{x}, {like}, {like} * 2], -1)[..., 1:]",
    "torch.stack([{x}, {like}])",
    "torch.stack([{x}, {x} + 1], {d})",
    "torch.cat({x}.split(2, {d}), {d})",
    "torch.cat([torch.sin({x}), torch.zeros(0)])",
    "torch.hstack([{x}, {like}])",
)
# Copies and casts that may be left out, and some that may not.
COPIES = (
    "{x}.clone()",
    "{x}.clone() + 1",
    "{x}.contiguous() + {x}",
    "(({x} + 1) * 2).clone()",
    "torch.clone({x}).detach()",
    "{x}.double().float()",
    "({x} + 1).double().float() * 2",
    "{x}.float().bfloat16()",
    "{x}.bfloat16().float().double()",
    "({x} * 2).bfloat16().float().double()",
    "{x}.bfloat16().double().float()",
    "{x}.to(torch.int64)",
    "{x}.to(torch.bfloat16)",
    "{x}.to(torch.bool)",
)
# Ops that return what they are given. {ones} is 1, 1 for a matrix.
NOOPS = (
    "{x}[:] * 2",
    "{x}[:{x}.shape[0]] + 1",
    "{x}.repeat({ones}) * 2",
    "({x} + {like}).repeat({ones})",
    "torch.nn.functional.pad({x} * 2, (0, 0))",
    "torch.nn.functional.pad({x}, (0, 0)) + {like}",
    "({x} + 1).to({x}.dtype, copy=True) * 2",
    "{x}.to({x}.dtype, copy=True) + {like}",
    "torch.round({x})",
    "torch.ceil({x}.to(torch.int64)) + 1",
    "torch.floor(({x} * 3).to(torch.int64)) + 1",
    "({x} * 2) ** 1",
    "{x} ** 1 + {like}",
    "torch.cat([{x} + 1]) * 2",
    "torch.cat([{x}]) + {like}",
    "({x} + 1).view({x}.shape) * 2",
    "{x}.expand({x}.shape) * 2",
    "torch.slice_scatter({x}, {like} * 2, 0, 0, {x}.shape[0]) + 1",
)
RANDOM = (
    "torch.rand_like({x})",
    "torch.nn.functional.dropout({x}, 0.5)",
    "torch.nn.functional.dropout({x} * 2, 0.5)",
    "torch.bernoulli(torch.sigmoid({x}))",
    "torch.rand_like({x}) - torch.rand_like({x})",
    "torch.randn(4, 3) + {x}",
)
RANDOM_WRITES = ("{t}.uniform_()", "{t}.bernoulli_(0.5)")
CUSTOM_WRITES = (
    "ops.bump({t}, 2.0)",
    "ops.swap({t}, {u})",
    "ops.bump_all([{t}, {u}], 1.0)",
    "ops.bump({t}.view(-1), 2.0)",
)
CUSTOM_RESULTS = ("ops.push({t}, {s}[0])", "ops.step({t}, {u}, {s})", "{t}.add_({s})", "{t}.mul_(2)")


@dataclass
class Writer:
    """Writes one program: picks rows, fills their holes, keeps what eager accepts."""

    rng: Random
    trial: Trial

    # -- picking -----------------------------------------------------------------------------------------------

    def pick(self, rows: tuple[str, ...]) -> str:
        return rows[self.rng.randrange(len(rows))]

    def names(self) -> list[str]:
        return [name for step in (*self.trial.inputs, *self.trial.steps) for name in step.makes]

    def value(self, *conditions: Callable[[Tensor], bool]) -> str | None:
        """A value that fits, a late one more often than an early one."""
        fit = [name for name in self.names() if all(holds(self.trial.example(name)) for holds in conditions)]
        if len(fit) > 4 and self.rng.randrange(2):
            fit = fit[-4:]
        return fit[self.rng.randrange(len(fit))] if fit else None

    def like(self, name: str) -> str:
        """A value of the same shape, more often than not another one of the same type; the value itself if none."""
        shape, dtype = self.trial.example(name).shape, self.trial.example(name).dtype
        fit = [other for other in self.names() if other != name and self.trial.example(other).shape == shape]
        same = [other for other in fit if self.trial.example(other).dtype == dtype]
        fit = same if same and self.rng.randrange(4) else fit
        return fit[self.rng.randrange(len(fit))] if fit else name

    def new(self, count: int = 1) -> tuple[str, ...]:
        made = sum(len(step.makes) for step in self.trial.steps)
        return tuple(f"v{made + index}" for index in range(count))

    # -- filling -----------------------------------------------------------------------------------------------

    def expression(self, rows: tuple[str, ...]) -> str | None:
        row, x = self.pick(rows), self.value()
        y = self.value()
        if x is None or y is None:
            return None
        rank = max(self.trial.example(x).dim(), 1)
        d = self.rng.randrange(rank) - (rank if self.rng.randrange(2) else 0)
        return row.format(x=x, y=y, d=d, like=self.like(x), ones=", ".join("1" * rank))

    def result(self, rows: tuple[str, ...], count: int = 1) -> Step | None:
        text, names = self.expression(rows), self.new(count)
        return Step(f"{', '.join(names)} = {text}", names) if text else None

    def target(self) -> tuple[str, str] | None:
        """(value, window): an input more often than an intermediate."""
        inputs = [step.makes[0] for step in self.trial.inputs]
        name = inputs[self.rng.randrange(len(inputs))] if self.rng.randrange(5) < 3 else self.value()
        return (name, self.pick(WINDOWS)) if name is not None else None

    def source(self, name: str, window: str) -> str:
        """Something of the shape of the target: the same window of another value, a copy of another window ..."""
        other = self.like(name)
        choice = self.rng.randrange(6)
        if other == name or choice == 0:
            return f"{name}{window}.clone()" if window != "[1:]" else f"{name}[:-1].clone()"
        if choice == 1:
            return f"({other}{window} * 2)"
        return f"{other}{window}"

    def write(self, rows: tuple[str, ...]) -> Step | None:
        found = self.target()
        if found is None:
            return None
        name, window = found
        row = self.pick(ASSIGNMENTS if window.endswith("]") and rows is WRITES and self.rng.randrange(2) else rows)
        target, source = f"{name}{window}", self.source(name, window)
        second = self.like(name)
        text = row.format(t=target, s=source, u=f"{second}{window}")
        writes = (target, f"{second}{window}") if "{u}" in row else (target,)
        reads = (source,) if "{s}" in row else ()
        return Step(text, (), writes, reads)

    def copy_to_itself(self) -> Step:
        name = self.pick(tuple(step.makes[0] for step in self.trial.inputs))
        return Step(self.pick(SELF_COPIES).format(t=name), (), (name,), ())

    def returning_write(self) -> Step | None:
        step = self.write(CUSTOM_RESULTS)
        if step is None:
            return None
        names = self.new()
        return Step(f"{names[0]} = {step.text}", names, step.writes, step.reads)

    def indexed(self) -> Step | None:
        found = self.target()
        if found is None:
            return None
        name, window = found[0], found[1] if self.rng.randrange(3) == 2 else ""
        index = self.value(lambda t: t.dtype is torch.int64 and t.shape == (2,)) if self.rng.randrange(3) == 2 else None
        index = index or self.pick(INDICES)
        target, rows = f"{name}{window}", f"{self.source(name, window)}[:2]"
        row = self.pick(INDEXED)
        reads = (index, rows) if "{r}" in row else (index,)
        return Step(row.format(t=target, i=index, r=rows), (), (target,), reads)

    def again(self) -> Step | None:
        """An earlier expression once more."""
        earlier = [step for step in self.trial.steps if step.makes and not step.writes]
        if not earlier:
            return None
        step = earlier[self.rng.randrange(len(earlier))]
        names = self.new(len(step.makes))
        return Step(f"{', '.join(names)} = {step.text.partition(' = ')[2]}", names)

    # -- the program -------------------------------------------------------------------------------------------

    def add_inputs(self) -> None:
        for name in "abcd"[: 2 + self.rng.randrange(3)]:
            earlier = [step.makes[0] for step in self.trial.inputs]
            rows = INPUTS
            if earlier and self.rng.randrange(4) == 3:
                rows = SHARING_INPUTS
            elif self.rng.randrange(2):
                rows = INPUTS[:3]
            text = self.pick(rows).format(x=earlier[self.rng.randrange(len(earlier))] if earlier else "")
            self.trial.accepts(Step(f"{name} = {text}", (name,)), is_input=True)

    def add_step(self) -> None:
        kind = KINDS[self.rng.randrange(len(KINDS))]
        step = kind(self)
        if step is not None:
            self.trial.accepts(step)

    def returned(self) -> tuple[str, ...]:
        """Most of what nobody else reads, and a few values more: inputs, intermediates, one of them twice."""
        names, lines = self.names(), [step.text.partition(" = ")[2] or step.text for step in self.trial.steps]
        read = set(re.findall(r"\w+", " ".join(lines)))
        chosen = [name for name in names if name not in read and name.startswith("v") and self.rng.randrange(4)]
        for _ in range(self.rng.randrange(3)):
            chosen.append(names[self.rng.randrange(len(names))])
        return tuple(chosen or names[-1:])


Kind = Callable[[Writer], Step | None]


def _times(count: int, kind: Kind) -> tuple[Kind, ...]:
    return (kind,) * count


KINDS: tuple[Kind, ...] = (
    *_times(7, lambda w: w.result(FUNCTIONAL)),
    *_times(6, lambda w: w.write(WRITES)),
    *_times(4, lambda w: w.result(VIEWS)),
    *_times(4, lambda w: w.result(COPIES)),
    *_times(5, lambda w: w.result(NOOPS)),
    *_times(3, lambda w: w.indexed()),
    *_times(2, lambda w: w.result(CATS)),
    *_times(2, lambda w: w.again()),
    lambda w: w.result(PAIRS, 2),
    lambda w: w.result(PAIRS_OF_VIEWS, 2),
    lambda w: w.result(RANDOM),
    *_times(2, lambda w: w.write(CUSTOM_WRITES)),
    lambda w: w.returning_write(),
    lambda w: w.copy_to_itself(),
    lambda w: w.write(RANDOM_WRITES) if w.rng.randrange(4) == 3 else w.write(WRITES),
)


def random_program(rng: Random, *, most: int = 11) -> Program:
    """A program that eager runs. The generator only calls `rng.randrange`, so Hypothesis can drive and shrink it."""
    dynamic = rng.randrange(14) == 13
    writer = Writer(rng, Trial(SIZES if dynamic else SIZES[:1]))
    while not writer.trial.inputs:
        writer.add_inputs()
    for _ in range(3 + rng.randrange(most - 2)):
        writer.add_step()
    trial = writer.trial
    return Program(tuple(trial.inputs), tuple(trial.steps), writer.returned(), dynamic)
