"""A random model as data: a few lines of Python, how its inputs are made, and a trial of both in eager.

    def inputs(n):                      each input is a line of its own: fresh numbers, or a view of an earlier input
        a = numbers(n, 3)
        b = a[1:]
        return [a, b]

    def model(a, b):                    each step is a line
        v0 = torch.sin(b)
        a[0].copy_(v0[1])
        return v0, a

The printed form is the program: `Program.source()` is run as it is printed, so a failure can be pasted into a test.
"""

from __future__ import annotations

import itertools
import linecache
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tests.fuzz import ops

SIZES = (4, 6)  # what `n` is in the first call and, for dynamic programs, in the second
_LARGEST = 200
_SERIAL = itertools.count()


@dataclass(frozen=True)
class Step:
    """One line. `makes` are the names it defines; `writes` and `reads` are expressions for what a write touches."""

    text: str
    makes: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()

    def renamed(self, old: str, new: str) -> Step:
        """The same step with another value in the place of `old`, where it is read."""
        swap: Callable[[str], str] = lambda text: re.sub(rf"(?<![\w.]){old}\b", new, text)  # noqa: E731
        head, equals, body = self.text.partition(" = ") if self.makes else ("", "", self.text)
        return Step(head + equals + swap(body), self.makes, tuple(map(swap, self.writes)), tuple(map(swap, self.reads)))


@dataclass(frozen=True)
class Program:
    inputs: tuple[Step, ...]
    steps: tuple[Step, ...]
    returns: tuple[str, ...]
    dynamic: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(step.makes[0] for step in self.inputs)

    @property
    def sizes(self) -> tuple[int, ...]:
        return SIZES if self.dynamic else SIZES[:1]

    def source(self) -> str:
        """The program as text. It needs `torch`, `numbers` and `ops` in scope, and nothing else."""
        made = "".join(f"    {step.text}\n" for step in self.inputs)
        done = "".join(f"    {step.text}\n" for step in self.steps)
        return (
            f"def inputs(n):\n{made}    return [{', '.join(self.names)}]\n\n\n"
            f"def model({', '.join(self.names)}):\n{done}    return [{', '.join(self.returns)}]\n\n\n"
            f"DYNAMIC = {self.dynamic}\n"
        )

    def script(self) -> str:
        """A whole Python file that runs the program and says what is wrong."""
        return (
            "import torch\n\nfrom tests.fuzz import ops\nfrom tests.fuzz.check import check_functions\n"
            f"from tests.fuzz.programs import numbers\n\n\n{self.source()}\n"
            "print(check_functions(inputs, model, DYNAMIC))\n"
        )


@dataclass(frozen=True)
class Loaded:
    """A program that can be called."""

    inputs: Callable[[int], list[Tensor]]
    model: Callable[..., list[Tensor]]
    dynamic: bool


def load(source: str) -> Loaded:
    """Run the printed form. Its lines are known to tracebacks, and so to graphex's journal."""
    name = f"<program {next(_SERIAL)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    names: dict[str, Any] = dict(SCOPE)
    exec(compile(source, name, "exec"), names)
    return Loaded(names["inputs"], names["model"], names["DYNAMIC"])


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Small values, many of them different, the same ones every time."""
    count = torch.Size(shape).numel()
    plain = torch.arange(count).mul(7).add(3 * seed).remainder(13)
    if dtype is torch.bool:
        return plain.remainder(3).eq(seed % 3).reshape(shape)
    if dtype is torch.int64:
        return plain.sub(4).reshape(shape)
    return plain.sub(6).div(3).to(dtype).reshape(shape)


SCOPE = {"torch": torch, "numbers": numbers, "ops": ops}


class Rejected(Exception):
    """Eager does not accept a step, or does not define what it means."""


@dataclass
class Trial:
    """A program run in eager, step by step, for each size at once. A step that is rejected leaves no trace."""

    sizes: tuple[int, ...]
    inputs: list[Step] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    scopes: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scopes = [{**SCOPE, "n": size} for size in self.sizes]

    def accepts(self, step: Step, *, is_input: bool = False) -> bool:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for scope in self.scopes:
                    self._check_custom_op(step, scope)
                    _run(step, scope)
        except Exception:
            self._start_again()
            return False
        (self.inputs if is_input else self.steps).append(step)
        return True

    def example(self, expression: str) -> Tensor:
        found = self.scopes[0].get(expression)
        return found if isinstance(found, Tensor) else eval(expression, self.scopes[0])

    def _check_custom_op(self, step: Step, scope: dict[str, Any]) -> None:
        """torch takes the offset of an input into its memory for one of a view (`auto_functionalized_v2`), so that a
        custom op writes to a wrong place, or outside of the tensor. What comes out is nobody's to compare.
        """
        if "ops." not in step.text or not step.writes:
            return
        inputs = [scope[given.makes[0]] for given in self.inputs]
        late = {value.untyped_storage().data_ptr() for value in inputs if value.storage_offset()}
        if any(eval(target, scope).untyped_storage().data_ptr() in late for target in step.writes):
            raise Rejected("torch is wrong here")

    def _start_again(self) -> None:
        self.__post_init__()
        for scope in self.scopes:
            for step in (*self.inputs, *self.steps):
                exec(step.text, scope)


def is_valid(program: Program) -> bool:
    """Whether every step is accepted and something is returned."""
    if not program.returns or not program.inputs:
        return False
    trial = Trial(program.sizes)
    inputs = all(trial.accepts(step, is_input=True) for step in program.inputs)
    return inputs and all(map(trial.accepts, program.steps)) and all(r in trial.scopes[0] for r in program.returns)


def _run(step: Step, scope: dict[str, Any]) -> None:
    _check_overlap(step, scope)
    exec(step.text, scope)
    for name in step.makes:
        value = scope[name]
        if not isinstance(value, Tensor) or value.numel() > _LARGEST or value.dim() > 4:
            raise Rejected(name)
        if value.is_floating_point() and value.numel() and not bool((value.abs() < 1e4).any()):
            raise Rejected(name)


def _check_overlap(step: Step, scope: dict[str, Any]) -> None:
    """What eager leaves undefined: a place written twice, or read through another layout while it is written."""
    written = [eval(expression, scope) for expression in step.writes]
    read = [eval(expression, scope) for expression in step.reads]
    for index, target in enumerate(written):
        places = list(_places(target))
        if len(set(places)) != len(places):
            raise Rejected("a place is written twice")
        if any(_meet(target, other) for other in written[index + 1 :]):
            raise Rejected("two targets meet")
        if any(isinstance(value, Tensor) and not _alike(target, value) and _meet(target, value) for value in read):
            raise Rejected("the source moves under the write")


def _alike(left: Tensor, right: Tensor) -> bool:
    return left.data_ptr() == right.data_ptr() and (left.shape, left.stride()) == (right.shape, right.stride())


def _meet(left: Tensor, right: Tensor) -> bool:
    if left.untyped_storage().data_ptr() != right.untyped_storage().data_ptr():
        return False
    return left.dtype != right.dtype or not set(_places(left)).isdisjoint(_places(right))


def _places(tensor: Tensor) -> Iterator[int]:
    """The position of every element in the storage."""
    places = [tensor.storage_offset()]
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = [place + index * stride for place in places for index in range(size)]
    return iter(places)


def shrunk(program: Program, fails: Callable[[Program], bool]) -> Program:
    """A smaller program that fails too: no line, input or result can be left out, and no value replaced by another."""
    while (smaller := next((p for p in _smaller(program) if is_valid(p) and fails(p)), None)) is not None:
        program = smaller
    return program


def _smaller(program: Program) -> Iterator[Program]:
    if program.dynamic:
        yield replace(program, dynamic=False)
    for index in reversed(range(len(program.returns))):
        yield replace(program, returns=program.returns[:index] + program.returns[index + 1 :])
    for index in reversed(range(len(program.steps))):
        yield replace(program, steps=program.steps[:index] + program.steps[index + 1 :])
    for index in reversed(range(len(program.inputs))):
        yield replace(program, inputs=program.inputs[:index] + program.inputs[index + 1 :])
    yield from _with_less_names(program)


def _with_less_names(program: Program) -> Iterator[Program]:
    """Leave out a step and let an earlier value stand for what it made."""
    for index, step in enumerate(program.steps):
        known = [*program.names, *(name for before in program.steps[:index] for name in before.makes)]
        if len(step.makes) != 1:
            continue
        for stand_in in reversed(known):
            rest = tuple(later.renamed(step.makes[0], stand_in) for later in program.steps[index + 1 :])
            returns = tuple(stand_in if name == step.makes[0] else name for name in program.returns)
            yield replace(program, steps=program.steps[:index] + rest, returns=returns)
