"""The effects of a call that its caller can see: its result, its arguments, and everything that the model keeps.

    before = SavedState({"model": model})
    result = model(*args)
    seen = before.observe({"model": model, "args": args, "result": result})
    before.restore()                          # everything is as it was before the call
    compare(seen, eager)                      # Comparison(differences, not_compared)

`reach` says what belongs to it and puts it back. Changes are observed on copies; memory that no call wrote to is not
copied twice.
"""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from graphex.debug.tensors import (
    INFINITE,
    UNKNOWN,
    Parts,
    clone_together,
    gap,
    is_plain,
    mismatch,
    numbers,
    parts_of,
    same_facts,
    same_value,
    shared_address,
    traits,
)
from graphex.evidence.reach import (
    CODE,
    Again,
    Hidden,
    Memory,
    Rebound,
    Restorer,
    is_looked_into,
    is_users,
    is_value,
    reached,
    restorers,
    shown,
    tensor_restorer,
)
from graphex.torch_private.memory import storage_address

_NOT_SEEN = (*CODE, types.MethodType, types.CellType, Rebound)  # code, and holders whose contents have paths
_ABSENT = object()
GRADIENTS = "gradients"  # the root of what a backward computes


@dataclass(frozen=True)
class NotCompared:
    """Something that a caller can see and that could not be compared with eager's."""

    what: str
    reason: str

    def __str__(self) -> str:
        return f"{self.what}: {self.reason}"


@dataclass(frozen=True)
class Difference:
    """A value that is not eager's. The error is infinite for what is of another kind.

    `scale` is the largest number that eager has there, and `step` the distance from 1 to the next number of its type;
    both are 0 for a value that is no float. The scale of a gradient is that of all gradients of its module: one that
    cancels, as that of a bias in front of a softmax or a batch norm does, consists of rounding alone.
    """

    path: str
    problem: str
    error: float
    scale: float = 0.0
    step: float = 0.0

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"

    def is_rounding(self, step: float) -> bool:
        """Whether a computation with numbers of this step explains it.

        Errors add up over many operations; the finer a type, the more of its steps do not matter: 54 of float32, 6 of
        float16, 3 of bfloat16, at the scale of the value.
        """
        return bool(self.step) and self.error <= self.scale * max(self.step, step) ** 0.75


@dataclass(frozen=True)
class Comparison:
    """`worst` is the largest difference: infinite for what is of another kind, NaN if a value was not compared."""

    worst: float = 0.0
    differences: tuple[Difference, ...] = ()
    not_compared: tuple[NotCompared, ...] = ()


@dataclass(frozen=True)
class SeenTensor:
    """A tensor as a call left it, on copies, and the path of what it shares memory with (its own, if nothing)."""

    traits: dict[str, Any]
    parts: Parts
    owner: str


@dataclass(frozen=True)
class SeenObject:
    """An object known by its class and its size, or by where it was seen before; what it holds has paths of its own."""

    kind: type
    size: int = 0
    again: str = ""

    def __str__(self) -> str:
        return self.again or f"a {self.kind.__name__}" + (f" of {self.size}" if self.size else "")


@dataclass(frozen=True)
class SeenOpaque:
    """An object that cannot be looked into."""

    value: Any


Observation = dict[str, Any]


class SavedState:
    """Everything that can be reached from some roots, as it is now."""

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._restorers: list[Restorer] = []
        self._memory: dict[int, Memory] = {}
        self._held: set[int] = set()
        self.leaves: dict[str, Tensor] = {}  # those that take a gradient
        self.generators: list[torch.Generator] = []
        staying: set[int] = set()
        for path, value in reached(roots):
            staying |= _staying(value)
            if isinstance(value, torch.Generator):
                self.generators.append(value)
            elif isinstance(value, Tensor):
                self._hold(path, value)
            elif id(value) not in staying:
                self._restorers += restorers(value)

    def _hold(self, path: str, tensor: Tensor) -> None:
        if id(tensor) in self._held or is_lazy(tensor):
            return
        self._held.add(id(tensor))
        if tensor.is_leaf and tensor.requires_grad:
            self.leaves[shown(path)] = tensor
        self._restorers.append(tensor_restorer(tensor))
        for part in _memory_of(tensor):
            if (begin := storage_address(part)) and begin not in self._memory:
                self._memory[begin] = Memory(part)

    def holds(self, tensor: Tensor) -> bool:
        """Whether the memory of a tensor is among what `restore` puts back."""
        return shared_address(tensor) in self._memory

    def restore(self) -> None:
        """Put everything back: items, attributes, closures, globals, gradients, sizes and contents of tensors."""
        with torch.no_grad():
            for restore in self._restorers:
                restore()
            for memory in self._memory.values():
                memory.restore()

    def observe(self, roots: Mapping[str, Any]) -> Observation:
        """Everything that can be reached from the roots now, on copies."""
        copies = {begin: memory.copy for begin, memory in self._memory.items() if not memory.is_changed}
        owners: dict[int, str] = {}
        seen: Observation = {}
        for path, value in reached(roots):
            if isinstance(value, _NOT_SEEN):
                continue
            name = shown(path)
            while name in seen:
                name += "'"
            seen[name] = _seen(name, value, copies, owners)
        return seen


def _staying(value: Any) -> set[int]:
    """The objects (by id) that stay as a call leaves them, because torch changes more about them than their attributes.

    A lazy module becomes one of another class in its first call. A module that is sharded over processes moves its
    parameters, and those of the modules in it, to and fro.
    """
    modules: list[Any] = [value] if isinstance(value, LazyModuleMixin) else []
    if isinstance(value, torch.nn.Module) and type(value).__module__.startswith("torch.distributed."):
        modules = list(value.modules())
    return {each for module in modules for each in (id(module), *map(id, vars(module).values()))}


def _memory_of(tensor: Tensor) -> list[Tensor]:
    plain = tensor.detach()
    if plain.is_quantized and type(plain) is Tensor:
        return [plain]
    parts = {} if plain.is_mkldnn else parts_of(plain).tensors
    return [part for part in parts.values() if is_plain(part)]


def _seen(path: str, value: Any, copies: dict[int, Tensor], owners: dict[int, str]) -> Any:
    if isinstance(value, Tensor):
        return _seen_tensor(path, value, copies, owners)
    if isinstance(value, Again):
        return SeenObject(Again, again=shown(value.path))
    if is_value(value) or isinstance(value, Hidden):
        return value
    if isinstance(value, (list, dict, tuple, deque)):
        return SeenObject(type(value), len(value))
    if is_looked_into(value):
        return SeenObject(type(value))
    if isinstance(value, (set, frozenset, bytearray)):
        return type(value)(value)
    if (numpy := sys.modules.get("numpy")) is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        return value.copy()
    return SeenOpaque(value)


def _seen_tensor(path: str, tensor: Tensor, copies: dict[int, Tensor], owners: dict[int, str]) -> Any:
    if is_lazy(tensor):
        return SeenOpaque(tensor)
    begin = shared_address(tensor)
    owner = owners.setdefault(begin, path) if begin else path
    found = parts_of(tensor)
    kept = dict(zip(found.tensors, clone_together(list(found.tensors.values()), copies), strict=True))
    return SeenTensor(traits(tensor) | {"requires_grad": tensor.requires_grad}, replace(found, tensors=kept), owner)


# -- comparing -------------------------------------------------------------------------------------------------------


def compare(found: Observation, original: Observation) -> Comparison:
    """How a call differs from eager's, over everything that either of them let a caller see."""
    worst, differences, unknown = 0.0, [], []
    compared = True
    beside = _scales_of_gradients(original)
    named: set[tuple[str, str, str, str]] = set()  # what was said about the values of a memory
    for path in [*original, *(path for path in found if path not in original)]:
        ours, theirs = found.get(path, _ABSENT), original.get(path, _ABSENT)
        problem, error = _difference(ours, theirs)
        if error != error:
            unknown.append(NotCompared(path, problem))
            compared &= isinstance(ours, Hidden) or _is_same_opaque(ours, theirs)
        elif problem:
            worst = max(worst, error)
            if isinstance(theirs, SeenTensor):
                about = _root(path), theirs.owner, str(theirs.traits), problem
                if about in named:  # the same tensor of a result under another name: as an item and as an attribute
                    continue
                named.add(about)
            precision = (beside.get(_module(path)) or _scale(theirs), _step(ours, theirs)) if error < INFINITE else ()
            differences.append(Difference(path, problem, error, *precision))
    if not compared and not worst:
        worst = UNKNOWN
    return Comparison(worst, tuple(differences), tuple(unknown))


def _root(path: str) -> str:
    return path.partition(".")[0].partition("[")[0]


def _step(found: Any, original: Any) -> float:
    """The distance from 1 to the next number of the type; 0 where something differs that is no float."""
    if isinstance(original, float):
        return torch.finfo(torch.float64).eps
    if not isinstance(original, SeenTensor):
        return 0.0
    ours, theirs = found.parts.tensors, original.parts.tensors
    parts = [part for name, part in theirs.items() if gap(ours[name], part)]
    if not all(_is_float(numbers(part)) for part in parts):
        return 0.0
    return max((torch.finfo(part.dtype).eps for part in parts), default=0.0)


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _scale(seen: Any) -> float:
    """The largest finite number of a value."""
    if isinstance(seen, float):
        return abs(seen)
    parts = seen.parts.tensors.values() if isinstance(seen, SeenTensor) else ()
    found = [each.abs()[each.isfinite()] for each in map(numbers, parts) if _is_float(each)]
    return max((float(each.max()) for each in found if each.numel()), default=0.0)


def _scales_of_gradients(seen: Observation) -> dict[str, float]:
    """The largest number of all gradients of a module, by its path."""
    scales: dict[str, float] = {}
    for path, value in seen.items():
        if _root(path) == GRADIENTS:
            scales[_module(path)] = max(scales.get(_module(path), 0.0), _scale(value))
    return scales


def _module(path: str) -> str:
    """``gradients['model.layers.0.bias']`` -> ``gradients['model.layers.0``"""
    return path.rpartition(".")[0] if _root(path) == GRADIENTS else path


def _difference(found: Any, original: Any) -> tuple[str, float]:
    """(what is different, by how much); NaN if that could not be found out, with the reason."""
    if found is _ABSENT or original is _ABSENT:
        return ("missing", INFINITE) if found is _ABSENT else ("not there in eager", INFINITE)
    if type(found) is not type(original):
        return f"{_value_text(found)} instead of {_value_text(original)}", INFINITE
    if isinstance(original, SeenTensor):
        return _tensor_difference(found, original)
    if isinstance(original, Hidden):
        return original.reason, UNKNOWN
    if isinstance(original, SeenOpaque):
        return _opaque_difference(found.value, original.value)
    if isinstance(original, (int, float, complex)) and not isinstance(original, bool):
        return _number_difference(found, original)
    if hasattr(original, "tobytes"):
        same = found.shape == original.shape and found.tobytes() == original.tobytes()
    else:
        same = same_value(found, original)
    return ("", 0.0) if same else (f"{_value_text(found)} instead of {_value_text(original)}", INFINITE)


def _tensor_difference(found: SeenTensor, original: SeenTensor) -> tuple[str, float]:
    if wrong := mismatch(found.traits, original.traits):
        return wrong, INFINITE
    if found.owner != original.owner:
        return f"shares the memory of {found.owner}; in eager that of {original.owner}", INFINITE
    ours, theirs = found.parts, original.parts
    if why := theirs.why_not or ours.why_not:
        return why, UNKNOWN
    shapes = [{name: part.shape for name, part in each.tensors.items()} for each in (ours, theirs)]
    if shapes[0] != shapes[1] or not same_facts(ours, theirs):
        return f"a {found.traits['class']} that is made of other parts", INFINITE
    worst = max((gap(ours.tensors[name], part) for name, part in theirs.tensors.items()), default=0.0)
    return (f"values differ by up to {worst:.3g}" if worst else ""), worst


def _number_difference(found: Any, original: Any) -> tuple[str, float]:
    if same_value(found, original):
        return "", 0.0
    try:
        error = float(abs(found - original))
    except OverflowError:
        error = INFINITE
    return f"{found!r} instead of {original!r}", error if error == error and error else INFINITE


def _opaque_difference(found: Any, original: Any) -> tuple[str, float]:
    kind = type(original)
    if found is original:
        may_change = hasattr(original, "__next__") or is_users(kind.__module__)
        return (f"a {kind.__name__} cannot be looked into", UNKNOWN) if may_change else ("", 0.0)
    try:
        same = type(found) is kind and bool(found == original)
    except Exception:  # an object may answer in any way
        same = False
    return ("", 0.0) if same else (f"a {kind.__name__} cannot be looked into", UNKNOWN)


def _is_same_opaque(found: Any, original: Any) -> bool:
    return isinstance(found, SeenOpaque) and isinstance(original, SeenOpaque) and found.value is original.value


def _value_text(value: Any) -> str:
    if isinstance(value, SeenTensor):
        return "a tensor"
    if isinstance(value, SeenOpaque):
        return f"a {type(value.value).__name__}"
    return str(value) if isinstance(value, SeenObject) else f"{value!r}"
