"""Observation of a training step: what it does that a device graph would not repeat, and what it can reach.

A device graph repeats kernels with the numbers and addresses they were launched with. So one step is run while every op
is seen, then another one, and both are compared (`Observation`):

    an op that waits for the device, or copies between host and device      cannot be captured
    a number that differs from one step to the next, or is drawn by Python  would be burnt in
    a tensor that one step makes and the next reads, or that has moved      a replay would read the old address
    gradients from before the step                                          are read, or dropped unread

Kernels that no op launches (in compiled regions) get their numbers from the inputs of a compiled graph, which `note`
sees.

A step was captured for the values that its Python code can reach, such as `model.temperature` or `options["weight"]`
(`Reached`). Before every later step `look` says whether one of them is another by now: it compares identities first,
and walks only if one differs.

    function      its code, closure, defaults and attributes; globals and attributes of modules that it names,
                  variables of the environment
    nn.Module     attributes, parameters, buffers, submodules, and what its class holds
    object        attributes, slots, and what its class and the bases of that hold
    container     elements; of an array, its content
    reference     the object or value behind it
"""

from __future__ import annotations

import dis
import linecache
import os
import pickle
import random
import sys
import weakref
from argparse import Namespace
from array import array
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import cache, partial
from itertools import chain
from operator import is_
from pathlib import PurePath
from threading import local
from types import (
    BuiltinMethodType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from graphex.cache.sources import codes_in, imports_in, names_and_texts_in, reads_by_text
from graphex.errors import users_frame
from graphex.ops import SPECS
from graphex.torch_private.dynamo import DispatchMode
from graphex.torch_private.frames import COMPILED_CALL
from graphex.torch_private.graphs import written_in_call
from graphex.torch_private.memory import storage_key
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
        *(name for name, spec in SPECS.items() if spec.is_random),
    }
)
_SEEDS = "seeds a random generator, or puts its state back"
# What the backward of a compiled checkpoint draws the numbers of its forward again with.
_REPEATED = ("run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state")
Seeds = tuple[tuple[int, bytes], ...]
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


def _has_unknown_size(func: Any, args: Any) -> bool:
    """Whether the size of a result depends on data. That of a lookup does if it is by a mask, not by numbers."""
    if func is aten.index.Tensor:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return torch.Tag.dynamic_output_shape in func.tags


def may_see_compiled_code() -> bool:
    """Whether this torch runs compiled code below a mode that asks for it."""
    return hasattr(DispatchMode, "ignore_compile_internals")


class Observation(DispatchMode):
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
        if isinstance(func, torch._ops.HigherOrderOperator):
            self._judge_higher_order(func.name())
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
                self._outside.append((len(self._rows), weakref.ref(tensor), _address(tensor)))
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
        """The difference from another step of the same kind, and where it is; empty if both do the same."""
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
        """End the observation. A tensor that came from outside, is still alive and is no argument, result or gradient
        existed before the step.
        """
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
        """The tensors that this step made and that are still alive, gradients apart."""
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

    def _judge_higher_order(self, name: str) -> None:
        """The ops inside of a higher-order one are not seen."""
        if not self.reason:
            self.refuse(_SEEDS if name in _REPEATED else f"calls a {name}, which may decide on the host")

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
            self.refuse(_SEEDS)

    def _is_host(self, tensor: Tensor) -> bool:
        return tensor.device.type != self._kind

    def refuse(self, reason: str) -> None:
        """Say why the step cannot be captured. The first reason stays."""
        if not self.reason:
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
    return [leaf for leaf in pytree.tree_leaves(written_in_call(func, args, kwargs)) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> int:
    """A number for the memory of a tensor; for one that is sparse, of its own."""
    return storage_key(tensor) if tensor.layout == torch.strided else -id(tensor)


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr() if tensor.layout == torch.strided else -id(tensor)


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


# -- what Python code can reach ----------------------------------------------------------------------------------------


_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_MOST = 10_000  # objects that are looked through, modules apart
_LONG = 1_000  # elements; of a longer container only the length is looked at
_REMEMBERED = 64  # versions
_LENGTH = "the length of "
_END, _ABSENT = object(), object()
_PARTS = ("._parameters", "._buffers", "._modules")
_NOT_THE_USERS = (f".{COMPILED_CALL}",)  # set while a step runs

_ENVIRONMENT = frozenset({"environ", "getenv"})
_LOADED = frozenset({"modules", "import_module"})
_LOOKED_INTO = (  # of Python's own kinds
    *(BuiltinMethodType, MethodType, partial, property, staticmethod, classmethod, type(cache(int))),
    *(Namespace, SimpleNamespace, MappingProxyType, UserDict, UserList, ChainMap, ContextVar, local),
    *(weakref.ref, weakref.WeakKeyDictionary, weakref.WeakSet, weakref.WeakValueDictionary),
)
_OF_OPTIMIZERS = frozenset(  # state and groups are looked at for themselves, hooks are refused; the rest is torch's own
    {*vars(Optimizer([torch.empty(1)], {})), "step", "_opt_called", "_step_supports_amp_scaling"}
)

T = TypeVar("T")
Live = Callable[[], Iterable[Any]]
Named = tuple[int, str]  # the namespace of a module, and a name in it
Source = tuple[Sequence[str], Live]  # names, and the values that they stand for by now


class Reached:
    """The values that `roots` reach, by name. `things` are the objects of `kinds` that no module holds, `tensors` are
    all tensors, by name.
    """

    def __init__(self, roots: Sequence[Any], kinds: tuple[type, ...]) -> None:
        self._roots, self._kinds = list(roots), kinds
        self._tokens: dict[int, tuple[Callable[[], Any], int]] = {}
        self._next_token = 0
        self._codes: list[CodeType] = []
        self._own: frozenset[str] = frozenset()
        self._changed_before: frozenset[str] = frozenset()
        self._versions: dict[Hashable, int] = {}
        self._newest = 0
        self._version: int | None = None
        self._walk()

    def look(self) -> bool:
        """Whether anything is another object than in the last look."""
        live = chain(chain.from_iterable(read() for read in self._reads), (_END,))
        if self._held and all(map(is_, live, self._held)):
            return False
        self._walk()
        return True

    def let_go(self) -> None:
        """Hold nothing until the next look, which walks: what is replaced meanwhile can be freed."""
        self._reads: list[Live] = []
        self.things: list[Any] = []
        self.tensors: dict[str, Tensor] = {}
        self._held: tuple[Any, ...] = ()

    @property
    def version(self) -> int:
        """A number for the values of this moment: the same values have the same number. Values that the step itself
        changes in every run do not count.
        """
        if self._version is None:
            values = frozenset(self.others_values().items())
            if values not in self._versions:
                self._newest += 1
                self._versions[values] = self._newest
                if len(self._versions) > _REMEMBERED:
                    del self._versions[next(iter(self._versions))]
            self._version = self._versions[values]
        return self._version

    def others_values(self) -> dict[str, Hashable]:
        """The values by name, but for those that the step itself changes in every run."""
        return self._others(self.values)

    def others_tensors(self) -> list[Tensor]:
        """The tensors, but for those that the step itself replaces in every run."""
        return list(self._others(self.tensors).values())

    def _others(self, held: dict[str, T]) -> dict[str, T]:
        grows = tuple(f"{name.removeprefix(_LENGTH)}[" for name in self._own if name.startswith(_LENGTH))
        return {name: value for name, value in held.items() if name not in self._own and not name.startswith(grows)}

    def line_with(self, name: str) -> str:
        """The first line of a function that is reached in which an argument, a variable or a key has this name."""
        places = (place for code in self._codes for place in _places_of(name, code))
        return _text(next(places, None))

    def look_after_run(self) -> str:
        """The name of a value that this run of the step has changed; empty if there is none."""
        before = self.values
        changed = frozenset[str]() if not self.look() else _differing(before, self.values)
        own, self._changed_before = changed & self._changed_before, changed
        if own != self._own:
            self._own, self._version = own, None
        return next((name for name in chain(self.values, before) if name in changed), "")

    # -- walking -----------------------------------------------------------------------------------------------------

    def _walk(self) -> None:
        self.values: dict[str, Hashable] = {}
        self._named: dict[str, int] = {}
        self.things, self.tensors, self._reads, self._codes = [], {}, [], []
        self._version = None
        self._tokens = {place: known for place, known in self._tokens.items() if known[0]() is not None}
        held: list[Any] = []
        known = set[Named]()
        pending, seen, left = (
            deque[tuple[str, Any, bool]]((_title(each), each, False) for each in self._roots),
            set[int](),
            _MOST,
        )
        while pending and left:
            name, thing, in_module = pending.popleft()
            if id(thing) in seen:
                continue
            seen.add(id(thing))
            in_module = isinstance(thing, nn.Module) or (in_module and isinstance(thing, _CONTAINERS))
            left -= not in_module
            if isinstance(thing, _CONTAINERS):
                self.values[f"{_LENGTH}{name}"] = len(thing)
            if isinstance(thing, FunctionType):
                self._codes.append(thing.__code__)
            for names, read in _sources(name, thing, known):
                values = list(read())
                self._reads.append(read)
                held += values
                pending += self._noted(names, values, in_module)
        self._held = (*held, _END)

    def _noted(self, names: Sequence[str], values: Sequence[Any], in_module: bool) -> Iterator[tuple[str, Any, bool]]:
        """Keep a key of each value by its name, and yield the values that are looked into."""
        for name, value in zip(names, values, strict=True):
            if name.endswith(_NOT_THE_USERS) or (in_module and "_hooks" in name and not value):
                continue
            number = self._named[name] = self._named.get(name, 0) + 1
            name = name if number == 1 else f"{name}'{number}"
            if isinstance(value, _PLAIN):
                self.values[name] = type(value).__name__, repr(value)
            elif isinstance(value, _CONTAINERS):
                yield name, value, in_module
            else:
                self.values[name] = self._token(value)
                if isinstance(value, Tensor):
                    self.tensors[name] = value
                is_kept = isinstance(value, self._kinds)
                if is_kept and not in_module:
                    self.things.append(value)
                if isinstance(value, (nn.Module, Optimizer)) or (not is_kept and _is_looked_into(value, in_module)):
                    yield name, value, in_module

    def _token(self, value: Any) -> int:
        """A number for an object that no other one ever has, unlike its address."""
        known = self._tokens.get(id(value))
        if known is not None and known[0]() is value:
            return known[1]
        held: Callable[[], Any]
        try:
            held = weakref.ref(value)
        except TypeError:
            held = partial(_same, value)
        self._next_token += 1
        self._tokens[id(value)] = held, self._next_token
        return self._next_token


def comparable(leaf: Any) -> Hashable:
    """A key for an argument that is no tensor: its type, its text, and the plain values that it holds."""
    shown = type(leaf).__name__, repr(leaf)
    if isinstance(leaf, _PLAIN):
        return shown
    if hasattr(leaf, "tobytes"):  # an array's text leaves the middle out
        return *shown, leaf.tobytes()
    held = Reached((leaf,), ()).values
    return *shown, frozenset(item for item in held.items() if isinstance(item[1], tuple))


def holds_tensors(leaf: Any) -> bool:
    """Whether an argument that is no tensor leads to some."""
    if isinstance(leaf, (*_PLAIN, Tensor)):
        return False
    return bool(Reached((leaf,), (Tensor,)).things)


def _differing(before: dict[str, Hashable], now: dict[str, Hashable]) -> frozenset[str]:
    return frozenset(name for name in before.keys() | now.keys() if before.get(name, _ABSENT) != now.get(name, _ABSENT))


def _title(thing: Any) -> str:
    return "" if isinstance(thing, FunctionType) else type(thing).__name__


def _same(value: Any) -> Any:
    return value


# -- what a thing holds ------------------------------------------------------------------------------------------------


def _sources(name: str, thing: Any, known: set[Named]) -> Iterator[Source]:
    """What a thing holds, but for the names in modules that are `known`: several functions have these in common."""
    if isinstance(thing, FunctionType):
        yield from _of_function(thing, known)
    elif isinstance(thing, MethodType):
        yield ("self", "the method"), lambda: (thing.__self__, thing.__func__)
    elif isinstance(thing, BuiltinMethodType):
        yield (f"{name}.__self__",), lambda: (thing.__self__,)
    elif isinstance(thing, partial):
        yield (f"{name}.func", f"{name}.args", f"{name}.keywords"), lambda: (thing.func, thing.args, thing.keywords)
    elif isinstance(thing, (property, staticmethod, classmethod)):
        yield (name,), lambda: (getattr(thing, "fget", None) or getattr(thing, "__func__", None),)
    elif isinstance(thing, weakref.ref):
        yield (f"{name}()",), lambda: (thing(),)
    elif isinstance(thing, ContextVar):
        yield (f"{name}.get()",), lambda: (thing.get(_ABSENT),)
    elif _is_array(thing):
        copied = bytes if isinstance(thing, bytearray) else type(thing).tobytes
        yield (f"the content of {name}",), _Steady(lambda: (copied(thing),))
    else:
        yield from _of_container(name, thing)
        if hasattr(thing, "__dict__") or _slots_of(thing):
            yield from _of_object(name, thing)


class _Steady:
    """A reader of values that are made anew in every reading: while they are equal, it gives those of before."""

    def __init__(self, read: Live) -> None:
        self._read, self._before = read, list(read())

    def __call__(self) -> Iterable[Any]:
        values = list(self._read())
        if values != self._before:
            self._before = values
        return self._before


def _is_array(thing: Any) -> bool:
    """Whether a thing is an array of numbers that Python writes in place."""
    if isinstance(thing, (array, bytearray)):
        return len(thing) <= _LONG
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(thing, numpy.ndarray) and thing.size <= _LONG and not thing.dtype.hasobject


def _of_container(name: str, thing: Any) -> Iterator[Source]:
    if not isinstance(thing, (*_CONTAINERS, MappingProxyType)) or len(thing) > _LONG:
        return
    if isinstance(thing, (dict, MappingProxyType)):
        yield [_element(name, key) for key in thing], thing.values
    else:
        yield [f"{name}[{number}]" for number in range(len(thing))], thing.__iter__


def _of_function(function: FunctionType, known: set[Named]) -> Iterator[Source]:
    code, names = function.__code__, names_and_texts_in(function.__code__)
    defaults, attributes = len(function.__defaults__ or ()), vars(function)

    def own() -> Iterator[Any]:
        cells = map(_content, function.__closure__ or ())
        given = chain(function.__defaults__ or (), (function.__kwdefaults__ or {}).values())
        return chain((function.__code__,), cells, given, attributes.values())

    yield (
        [
            *(f"the code of {function.__qualname__}", *code.co_freevars),
            *(f"default {number}" for number in range(defaults)),
            *(function.__kwdefaults__ or ()),
            *(f"{function.__qualname__}.{each}" for each in attributes),
        ],
        own,
    )
    yield from _named("", function.__globals__, names, known)
    yield from _of_modules(function, names, known)
    if not _ENVIRONMENT.isdisjoint(names):
        variables = [text for text in _texts_in(code) if text.isidentifier()]
        yield [f"os.environ[{each!r}]" for each in variables], _Steady(lambda: map(os.environ.get, variables))


def _texts_in(code: CodeType) -> list[str]:
    return [text for each in codes_in(code) for text in each.co_consts if isinstance(text, str)]


def _of_modules(function: FunctionType, names: Sequence[str], known: set[Named]) -> Iterator[Source]:
    """The attributes of modules that the names of a function lead to, those of modules in modules too."""
    imported = imports_in(function)
    if not _LOADED.isdisjoint(names):
        imported += [each for each in _texts_in(function.__code__) if each in sys.modules]
    if imported:
        yield imported, lambda: [sys.modules.get(name) for name in imported]
    cells = zip(function.__code__.co_freevars, map(_content, function.__closure__ or ()), strict=False)
    waiting = [
        *((name, function.__globals__.get(name)) for name in names),
        *((name, sys.modules.get(name)) for name in imported),
        *cells,
    ]
    seen = set[int]()
    while waiting:
        name, module = waiting.pop(0)
        if not isinstance(module, ModuleType) or id(module) in seen:
            continue
        seen.add(id(module))
        held = vars(module)
        read = [each for each in names if each in held]
        if reads_by_text(names) and not _is_library(module.__name__):
            read = [each for each, value in held.items() if each in names or isinstance(value, _PLAIN)]
        yield from _named(f"{name}.", held, read, known)
        waiting += [(f"{name}.{each}", held[each]) for each in read]


def _named(prefix: str, held: dict[str, Any], names: Sequence[str], known: set[Named]) -> Iterator[Source]:
    """What these names stand for in a module, but for those that are known by now."""
    if fresh := [each for each in names if (id(held), each) not in known]:
        known.update((id(held), each) for each in fresh)
        yield [f"{prefix}{each}" for each in fresh], lambda: [held.get(each, _ABSENT) for each in fresh]


def _of_object(name: str, thing: Any) -> Iterator[Source]:
    if isinstance(thing, Optimizer):
        own = [each for each in vars(thing) if each not in _OF_OPTIMIZERS]
        yield [f"{name}.{each}" for each in own], lambda: [vars(thing).get(each, _ABSENT) for each in own]
    elif isinstance(thing, (nn.Module, type)):
        held = vars(thing)
        yield [f"{name}.{each}" for each in held], held.values
    elif hasattr(thing, "__dict__"):  # which may be replaced, and is another one in each thread for a `local`
        yield [f"{name}.{each}" for each in vars(thing)], lambda: vars(thing).values()
    if slots := _slots_of(thing):
        yield [f"{name}.{each}" for each, _ in slots], lambda: [_slot(thing, held) for _, held in slots]
    kinds = type(thing).__mro__
    if isinstance(thing, type):
        kinds = (*thing.__mro__[1:], *kinds)
    if classes := [each for each in kinds if not _is_library(each.__module__)]:
        yield [f"class {each.__name__}" for each in classes], lambda: classes


def _slots_of(thing: Any) -> list[tuple[str, Any]]:
    if isinstance(thing, (nn.Module, type)) or _is_library(type(thing).__module__):
        return []
    held = [item for each in type(thing).__mro__ for item in vars(each).items()]
    return [(name, slot) for name, slot in held if isinstance(slot, MemberDescriptorType)]


def _slot(thing: Any, slot: Any) -> Any:
    try:
        return slot.__get__(thing)
    except AttributeError:  # not set yet
        return _ABSENT


def _element(name: str, key: Any) -> str:
    part = next((each for each in _PARTS if name.endswith(each)), "")
    return f"{name.removesuffix(part)}.{key}" if part else f"{name}[{key!r}]"


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return _ABSENT


def _places_of(name: str, code: CodeType) -> Iterator[Place]:
    for inside in codes_in(code):
        for each in dis.get_instructions(inside):
            named = inside.co_consts[each.arg or 0] if each.opname == "KW_NAMES" else each.argval
            if named == name or (isinstance(named, tuple) and name in named):
                yield inside.co_filename, (each.positions and each.positions.lineno) or inside.co_firstlineno


def _is_looked_into(thing: Any, in_module: bool) -> bool:
    if isinstance(thing, _LOOKED_INTO) or _is_array(thing):
        return True
    if isinstance(thing, (ModuleType, Tensor)) or not (hasattr(thing, "__dict__") or _slots_of(thing)):
        return False
    if isinstance(thing, (type, FunctionType)):
        return not _is_library(thing.__module__)
    home = type(thing).__module__
    return not _is_library(home) or (in_module and home.startswith("transformers"))  # the configuration of a model


def _is_library(module: object) -> bool:
    """Whether this is the name of a module that is no user's. A type that C makes may have something else there."""
    home = module.partition(".")[0] if isinstance(module, str) else "builtins"
    return home in ("torch", "graphex", "builtins", "transformers", "numpy") or home in sys.stdlib_module_names
