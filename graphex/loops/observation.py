"""Observation of a training step: what it does that a device graph would not repeat.

A device graph repeats kernels with the numbers and addresses they were launched with. So one step is run while every op
is seen, then another one, and both are compared:

    an op that waits for the device, or copies between host and device      cannot be captured
    a number that differs from one step to the next, or is drawn by Python  would be burnt in
    a tensor that one step made and the next reads, or that is elsewhere    would be read where it was
    gradients from before the step                                          are read, or dropped unread

Kernels that no op launches (in compiled regions) get their numbers from the inputs of a compiled graph, which `note`
sees.
"""

from __future__ import annotations

import linecache
import pickle
import random
import sys
import weakref
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor

from graphex.errors import users_frame
from graphex.torch_private.dynamo import TorchDispatchMode
from graphex.torch_private.symbolic import pytree

aten = torch.ops.aten
_TO_DEVICE = (aten._to_copy.default, aten.copy_.default)
_FREE_ON_HOST = (aten.detach.default, aten.lift_fresh.default, aten.alias.default)
_READS = {aten._local_scalar_dense.default: "reads a number from a tensor (.item(), float(...), if ...)"}
# Ops that draw from the generator of their device whenever they have elements (attention and others may).
_DRAWS = frozenset(
    {
        *("aten::bernoulli", "aten::bernoulli_", "aten::exponential_", "aten::multinomial", "aten::native_dropout"),
        *("aten::normal", "aten::normal_", "aten::rand", "aten::rand_like", "aten::randint", "aten::randint_like"),
        *("aten::randn", "aten::randn_like", "aten::randperm", "aten::uniform", "aten::uniform_"),
        "graphex::dropout_seeds",
    }
)
Seeds = tuple[tuple[int, bytes], ...]
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


def _has_unknown_size(func: Any, args: Any) -> bool:
    """Whether the size of a result depends on data. That of a lookup does if it is by a mask, not by numbers."""
    if func is aten.index.Tensor:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return torch.Tag.dynamic_output_shape in func.tags


def may_see_compiled_code() -> bool:
    """Whether this torch runs compiled code below a mode that asks for it."""
    return hasattr(TorchDispatchMode, "ignore_compile_internals")


class Observation(TorchDispatchMode):
    """Sees every op of one step. `reason` says why the step cannot be captured, `line` where; empty if it can."""

    supports_higher_order_operators = True

    def __init__(
        self, kind: str, arguments: Iterable[Tensor], gradients: Iterable[Tensor], before: Observation | None = None
    ) -> None:
        """`kind` is the type of the device, such as "cuda": other memory is the host's. `before` is the step before."""
        super().__init__()
        self._held = [] if before is None else before.left_behind()  # held, so that no other tensor gets their memory
        self._left = {_memory(tensor) for tensor in self._held}
        self._results: list[weakref.ref[Tensor]] = []
        self._kind = kind
        self._arguments = {_memory(tensor) for tensor in arguments}
        gradients = list(gradients)
        self._left -= {_memory(tensor) for tensor in gradients}
        self._gradients = {id(tensor): weakref.ref(tensor) for tensor in gradients}
        self._made: set[int] = set()
        self._rows: list[tuple[object, ...]] = []
        self._lines: list[Place | None] = []
        self._places: list[tuple[int, int]] = []
        self._stable: set[int] = set()
        self._outside: list[tuple[int, weakref.ref[Tensor], int]] = []
        self.reads_gradients = False
        self._drawn, self._seeds = _drawn(), _seeds(kind)
        self._drawn_from: set[Seeds] = set()
        self._draws_again = False
        self._seeds_before = None if before is None else before._seeds
        self.reason = self.line = ""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Dynamo runs what it compiled, also below this mode. Without it torch would never run that again."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):  # such as a dropout that a checkpoint computes again
            self.refuse(f"calls {func.name()}, whose ops it does not see one by one")
            return func(*args, **kwargs)
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if func is aten.lift_fresh.default:  # a tensor that Python has just made of numbers
            self._made.update(map(_memory, tensors))
        if _draws(func, args):
            seeds = _seeds(self._kind)
            self._draws_again |= seeds in self._drawn_from  # a checkpoint in its backward
            self._drawn_from.add(seeds)
        if not self.reason:
            self._judge(func, tensors, leaves, args, kwargs)
        for tensor in tensors:
            memory = _memory(tensor)
            if (gradient := self._gradients.get(id(tensor))) is not None and gradient() is tensor:
                self.reads_gradients = True
            if memory not in self._made:
                self._outside.append((len(self._rows), weakref.ref(tensor), tensor.data_ptr()))
        self._add(str(func), leaves)
        results = func(*args, **kwargs)
        made = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor)]
        given = {_memory(tensor) for tensor in tensors}
        self._results += map(weakref.ref, made)
        self._made.update(memory for tensor in made if (memory := _memory(tensor)) not in given)
        if not self.reason and any(map(self._is_host, made)) and not all(map(self._is_host, tensors)):
            self.refuse(f"copies from the device to the host ({func})")
        return results

    def note(self, inputs: list[Any]) -> None:
        """The numbers among the inputs of a compiled graph."""
        hosts = [each for each in inputs if isinstance(each, Tensor) and not each.dim() and self._is_host(each)]
        self._add("the inputs of a compiled graph", [*inputs, *(repr(each.tolist()) for each in hosts)])

    def differs_from(self, other: Observation) -> tuple[str, str]:
        """What differs in another step of the same kind, and where; empty if both do the same."""
        for mine, theirs, place in zip(self._rows, other._rows, self._lines, strict=False):
            if mine != theirs:
                line = _text(place)
                if mine[0] != theirs[0]:
                    return f"one step calls {theirs[0]} where the next calls {mine[0]}", line
                number = next((pair for pair in zip(theirs[1:], mine[1:], strict=False) if pair[0] != pair[1]), None)
                what = "other arguments" if number is None else f"{number[1]} after {number[0]}"
                return f"a number changes from step to step: {mine[0]} has {what}", line
        if len(self._rows) != len(other._rows):
            return "one step has more ops than the next", ""
        for mine_at, theirs_at in zip(self._places, other._places, strict=False):
            if mine_at != theirs_at:
                op, line = self._rows[mine_at[0]][0], _text(self._lines[mine_at[0]])
                return f"a tensor from before the step is another one in the next step ({op})", line
        return "", ""

    def finish(self, results: Iterable[Any], gradients: Iterable[Tensor]) -> None:
        """The step is over: what is alive, and neither an argument, a result nor a gradient, was there before."""
        gradients, results = list(gradients), list(results)
        self._add("what it returns", results)
        if not self.reason and _drawn() != self._drawn:
            self.refuse("draws random numbers in Python")
        self._judge_seeds()
        moving = {
            _memory(leaf)
            for leaf in (*results, *gradients, *(each() for each in self._gradients.values()))
            if isinstance(leaf, Tensor)
        }
        moving |= self._arguments
        self._held = []
        alive = [(row, tensor(), address) for row, tensor, address in self._outside]
        self._places = [
            (row, address) for row, tensor, address in alive if tensor is not None and _memory(tensor) not in moving
        ]
        self._stable = {_memory(tensor) for _, tensor, _ in alive if tensor is not None}
        self._stable |= {_memory(tensor) for tensor in gradients}
        self._outside = []

    def left_behind(self) -> list[Tensor]:
        """What this step made and somebody still holds, but for gradients."""
        alive = [tensor for each in self._results if (tensor := each()) is not None]
        return [tensor for tensor in alive if _memory(tensor) not in self._stable]

    def _add(self, what: str, leaves: Sequence[Any]) -> None:
        self._rows.append((what, *(_plain(leaf) for leaf in leaves if not isinstance(leaf, Tensor))))
        self._lines.append(_place())

    def _judge(self, func: Any, tensors: list[Tensor], leaves: Sequence[Any], args: Any, kwargs: Any) -> None:
        if func.namespace in _COLLECTIVES:
            self.refuse(f"calls a collective ({func})")
        elif torch.Tag.data_dependent_output in func.tags or _has_unknown_size(func, args):
            self.refuse(_READS.get(func, f"waits for the device ({func})"))
        elif any(isinstance(leaf, torch.Generator) for leaf in leaves):
            self.refuse("draws from a generator of its own")
        elif any(tensor.layout != torch.strided for tensor in tensors):
            self.refuse("computes with sparse tensors")
        elif any((memory := _memory(each)) in self._left and memory not in self._arguments for each in tensors):
            self.refuse(f"reads a tensor that the step before made and kept ({func})")
        elif any(_memory(tensor) in self._arguments for tensor in written(func, args, kwargs)):
            self.refuse(f"writes to an argument ({func})")
        else:
            self._judge_hosts(func, list(filter(self._is_host, tensors)))

    def _judge_hosts(self, func: Any, hosts: list[Tensor]) -> None:
        """A device graph knows nothing of the host's memory: a tensor of one element is a number to it."""
        for tensor in hosts:
            memory = _memory(tensor)
            if memory in self._arguments:
                if func not in (*_TO_DEVICE, *_FREE_ON_HOST):
                    self.refuse(f"computes with an argument in the host's memory ({func})")
            elif memory not in self._made:
                self.refuse(f"reads or writes a tensor in the host's memory ({func})")
            elif (tensor.dim() and func not in _FREE_ON_HOST) or func in _TO_DEVICE:
                self.refuse(f"copies from the host's memory to the device ({func}); make it on the device")

    def _judge_seeds(self) -> None:
        """A replay draws numbers from where the generator stands: it neither seeds it nor puts it back."""
        begun, ended, before = self._seeds, _seeds(self._kind), self._seeds_before
        self._seeds = ended
        was_seeded = [each[0] for each in begun] != [each[0] for each in ended]
        is_back = self._draws_again or (self._drawn_from and begun == ended) or (begun != ended == before)
        if not self.reason and (was_seeded or is_back):
            self.refuse("seeds a random generator, or puts its state back")

    def _is_host(self, tensor: Tensor) -> bool:
        return tensor.device.type != self._kind

    def refuse(self, reason: str) -> None:
        """Say why the step cannot be captured."""
        self.reason, self.line = f"the step {reason}", _text(_place())


def _drawn() -> tuple[object, ...]:
    """Where the random generators of Python and numpy stand."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else pickle.dumps(numpy.random.get_state(legacy=False))


def _draws(func: Any, args: Any) -> bool:
    return func._schema.name in _DRAWS and (func is not aten.native_dropout.default or 0 < args[1] < 1)


def _seeds(kind: str) -> Seeds:
    """The seeds of torch's generators of the host and of a kind of device, and where the generators stand."""
    modules: list[Any] = [torch, getattr(torch, kind, None)]
    modules = [each for each in modules if hasattr(each, "get_rng_state") and hasattr(each, "initial_seed")]
    return tuple((each.initial_seed(), each.get_rng_state().numpy().tobytes()) for each in modules)


def written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that a call writes to, as its schema says."""
    given = [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _plain(leaf: Any) -> object:
    """A number as text, which tells 0.0 from -0.0; anything else as it is, if it can be compared."""
    return (
        repr(leaf) if isinstance(leaf, (int, float, complex, str, torch.dtype, torch.device)) else type(leaf).__name__
    )


Place = tuple[str, int]  # a file and a line


def _place() -> Place | None:
    """Where in the user's program this thread is; None in a thread of autograd's."""
    frame = users_frame()
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def _text(place: Place | None) -> str:
    if place is None:
        return ""
    code = linecache.getline(*place).strip()
    return f"{PurePath(place[0]).name}:{place[1]}" + (f": {code}" if code else "")
