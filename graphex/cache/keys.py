"""Keys: everything that a compiled graph depends on, part by part, and the first part in which two keys differ.

    graphex, torch, Triton, Python, CPU, GPU     what compiles and what it compiles for
    settings, Inductor's settings, environment   switches of the process
    options, passes, rules, declarations         what the user asked for; functions by what they do (`sources`)
    inputs, graph                                the graph as AOTAutograd gave it: ops, arguments, sizes, strides, notes

A part is plain data, so that a stored key can be read without the graph. Source lines stand beside the rows of the
graph and are not compared: they say where a graph differs.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

import graphex
from graphex import env
from graphex.analysis.asynchronous import declarations as asynchronous_declarations
from graphex.analysis.dependencies import writes_to
from graphex.analysis.graphs import attribute_of, devices_of
from graphex.analysis.inplace_variants import declarations as variant_declarations
from graphex.cache.graphs import Row, graph_rows
from graphex.cache.sources import NoFingerprintError, fingerprint
from graphex.config import AnyRule, CompilerConfig
from graphex.fusion.rules import users_rules
from graphex.regions.compiler import has_cpp_compiler
from graphex.torch_private.cuda import driver_version, states, switches_for
from graphex.torch_private.inductor import inductor_settings
from graphex.torch_private.symbolic import pytree

_PASSES = ("post_grad_custom_pre_pass", "post_grad_custom_post_pass")
_LIBRARIES = ("cublas", "cudnn", "attention", "linalg")
_NO_PART_OF_KEY = ("cache", "fusion_rules", *_PASSES)  # rules and passes are parts of their own

Parts = dict[str, Any]


@dataclass(frozen=True)
class CacheKey:
    """`name` is the function the graph is of; `rows` are the nodes of the graph, and `lines` where they come from."""

    name: str
    parts: Parts
    rows: list[Row]
    lines: list[str] = field(default_factory=list)

    @cached_property
    def digest(self) -> str:
        text = json.dumps([self.parts, self.rows], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def group(self) -> str:
        """A hash of the function's name: keys of one function share it."""
        return hashlib.sha256(self.name.encode(errors="backslashreplace")).hexdigest()[:8]

    @property
    def phase(self) -> str:
        return str(self.parts.get("phase", ""))

    def to_json(self) -> str:
        return json.dumps({"name": self.name, "parts": self.parts, "rows": self.rows, "lines": self.lines})

    @classmethod
    def from_json(cls, text: str) -> CacheKey:
        """The key that `to_json` has written. Raises ValueError for any other text."""
        found = json.loads(text)
        if not isinstance(found, dict) or set(found) != {"name", "parts", "rows", "lines"}:
            raise ValueError("it is not a key")
        return cls(**found)


def key_of(
    name: str,
    gm: GraphModule,
    config: CompilerConfig,
    decompositions: Mapping[Any, Any],
    phase: str,
    about: Mapping[str, object],
    conditions: list[str],
    lines: list[str],
) -> CacheKey:
    """The key of a graph. Raises NoFingerprintError or CannotStoreError, saying why there is none.

    `about` says what else decides how the graph is compiled, such as its static inputs; `conditions` are those on its
    symbolic sizes, and `lines` its nodes' own.
    """
    parts = key_parts(device_names(gm), config, decompositions, phase)
    parts["about"] = {what: repr(value) for what, value in about.items()}
    rows = [*graph_rows(gm.graph, lambda node: _noted(gm, node)), {"conditions": repr(conditions)}]
    return CacheKey(name, parts, rows, lines)


def key_parts(devices: Sequence[str], config: CompilerConfig, decompositions: Mapping[Any, Any], phase: str) -> Parts:
    """The parts of a key besides the graph itself."""
    parts: Parts = {**machine_of(devices), **_process(config)}
    parts["options"] = {
        option: repr(value) for option, value in config.as_dict().items() if option not in _NO_PART_OF_KEY
    }
    parts["passes"] = {option: [_named(each, each) for each in getattr(config, option)] for option in _PASSES}
    parts["rules"] = [_named(rule, _made_of(rule)) for rule in users_rules(config)]
    parts["decompositions"] = sorted([str(op), fingerprint(function)] for op, function in decompositions.items())
    parts["declarations"] = sorted((*asynchronous_declarations(), *variant_declarations()))
    parts["phase"] = phase
    return parts


def _noted(gm: GraphModule, node: Node) -> object:
    """Facts that count at a node and are not on it as data: the content of a constant, the writes of the program."""
    if node.op == "get_attr":
        value = attribute_of(gm, str(node.target))
        return fingerprint(value.detach() if isinstance(value, Tensor) else value)
    writes = writes_to(node)
    if writes is None:
        return None
    text = repr((writes.times, sorted(writes.number.items()), sorted(writes.versions), sorted(writes.program.raising)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _made_of(rule: AnyRule) -> object:
    """The fields of a rule. Of tensors among its examples only the sizes and types count."""
    assert is_dataclass(rule)
    made = [getattr(rule, each.name) for each in fields(rule) if each.name != "ranks"]
    return pytree.tree_map_only(Tensor, lambda value: (tuple(value.shape), value.dtype, str(value.device)), made)


def _named(custom: Any, made_of: object) -> list[str]:
    """A pass or a rule: its name, and its fingerprint."""
    name = str(getattr(custom, "name", None) or getattr(custom, "__name__", None) or type(custom).__name__)
    try:
        return [name, fingerprint(made_of)]
    except NoFingerprintError as error:
        raise NoFingerprintError(
            f"'{name}' cannot be told from another version of itself ({error}). Give it `cache_version = \"1\"`, and "
            "another one whenever it changes."
        ) from error


# -- what does not change in a process ---------------------------------------------------------------------------------


@cache
def _machine() -> Parts:
    return {
        "graphex": f"{graphex.__version__} {_source()}",
        "torch": f"{torch.__version__} {getattr(torch.version, 'git_version', '')}",
        "Triton": _version("triton"),
        "Python": f"{platform.python_implementation()} {sys.version.split()[0]}",
        "CPU": f"{platform.system()} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
    }


@cache
def _source() -> str:
    """graphex itself: a version alone does not tell two working trees apart."""
    root, found = os.path.dirname(graphex.__file__), hashlib.sha256()
    for folder, below, names in os.walk(root):
        below.sort()
        for name in sorted(name for name in names if name.endswith(".py")):
            with open(os.path.join(folder, name), "rb") as file:
                found.update(f"{folder.removeprefix(root)}/{name}\n".encode() + file.read())
    return found.hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def machine_of(devices: Sequence[str]) -> Parts:
    """The versions of everything that compiles, and the devices that it compiles for."""
    return {**_machine(), "devices": {name: _device(name) for name in devices}}


def device_names(gm: GraphModule) -> list[str]:
    return sorted(map(str, devices_of(gm.graph)))


@cache
def _device(name: str) -> str:
    device = torch.device(name)
    if device.type != "cuda":
        return device.type
    about = torch.cuda.get_device_properties(device)
    driver = driver_version()
    capability = f"{about.major}.{about.minor}"
    runtime = torch.version.cuda or torch.version.hip
    return (
        f"{about.name}, capability {capability}, {about.multi_processor_count} cores, driver {driver}, CUDA {runtime}"
    )


# -- what may change between two graphs --------------------------------------------------------------------------------


def _process(config: CompilerConfig) -> Parts:
    uses_inductor = config.regions and env.regions_enabled()
    return {
        "settings": {
            "numerics": repr(states(switches_for(_LIBRARIES))),
            "default dtype": str(torch.get_default_dtype()),
            "threads": repr(torch.get_num_threads()),
        },
        "environment": {
            "regions": repr(env.regions_enabled()),
            "tuning": env.tuning(),
            "C++ compiler": f"{has_cpp_compiler()} {os.environ.get('CXX', '')}",
        },
        "Inductor's settings": {name: text_of(value) for name, value in inductor_settings().items()}
        if uses_inductor
        else {},
    }


def text_of(value: object) -> str:
    """A value that is told from another by its text. Raises NoFingerprintError where there is none."""
    plain = value is None or isinstance(value, (bool, int, float, str))
    return repr(value) if plain else fingerprint(value)


# -- two keys ----------------------------------------------------------------------------------------------------------


def nearest(key: CacheKey, others: Sequence[CacheKey]) -> CacheKey | None:
    """The graph of the same function and phase with the fewest parts that differ, and the fewest entries of these; the
    first of several.
    """
    same = [other for other in others if (other.name, other.phase) == (key.name, key.phase)]
    return min(same, key=lambda other: _distance(key, other), default=None)


def _distance(now: CacheKey, before: CacheKey) -> tuple[int, int]:
    """How many parts of two keys differ, and how many entries of these parts, where they have names."""
    differing = _differing(now, before)
    named = [(_entries(now.parts.get(part)), _entries(before.parts.get(part))) for part in differing]
    return len(differing), sum(len(here ^ there) for here, there in named)


def _entries(part: object) -> set[tuple[str, str]]:
    return {(name, str(value)) for name, value in part.items()} if isinstance(part, dict) else set()


def difference(now: CacheKey, before: CacheKey) -> str:
    """The first thing in which two keys differ, in a sentence; empty if they do not."""
    differing = _differing(now, before)
    if not differing:
        return ""
    part = differing[0]
    if part == "graph":
        return _of_rows(now, before)
    here, there = now.parts.get(part), before.parts.get(part)
    if isinstance(here, dict) and isinstance(there, dict):
        name = next(name for name in sorted({*here, *there}) if here.get(name) != there.get(name))
        if part == "passes":
            return _of_lists("the pass", here[name], there[name])
        return f"{_SUBJECTS.get(part, part)} '{name}' was {_said(there.get(name))} and is {_said(here.get(name))}"
    if isinstance(here, list) and isinstance(there, list):
        return _of_lists(_SUBJECTS.get(part, part), here, there)
    return f"{part} was {_said(there)} and is {_said(here)}"


_SUBJECTS = {
    "options": "the option",
    "settings": "the setting",
    "Inductor's settings": "Inductor's setting",
    "environment": "the environment's",
    "devices": "the device",
    "rules": "the rule",
    "decompositions": "the decomposition of",
    "declarations": "the declaration of",
    "about": "the graph's",
    "state": "AOTAutograd's setting",
}


def _said(value: object) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 200 else f"{text[:200]} ..."


def _differing(now: CacheKey, before: CacheKey) -> list[str]:
    parts = [part for part in {**now.parts, **before.parts} if now.parts.get(part) != before.parts.get(part)]
    return [*parts, *(["graph"] if now.rows != before.rows else [])]


def _of_lists(subject: str, here: list[Any], there: list[Any]) -> str:
    def name(item: Any) -> str:
        return str(item[0]) if isinstance(item, list) else str(item)

    names, before = list(map(name, here)), list(map(name, there))
    changed = next((name(item) for item in here if item not in there and name(item) in before), "")
    if changed:
        return f"{subject} '{changed}' was changed"
    added = next((each for each in names if each not in before), "")
    gone = next((each for each in before if each not in names), "")
    return (
        f"{subject} '{added or gone}' is {'new' if added else 'gone'}"
        if added or gone
        else f"{subject}s are in another order"
    )


def _of_rows(now: CacheKey, before: CacheKey) -> str:
    """Where two graphs differ: an input, or a node with its source line."""
    place = next(
        (at for at, (row, other) in enumerate(zip(now.rows, before.rows, strict=False)) if row != other),
        min(len(now.rows), len(before.rows)) - 1,
    )
    here, there = now.rows[place], before.rows[place]
    properties = sorted({**here, **there}, key=lambda of: of == "name")  # names follow from what is called
    changed = next(of for of in properties if here.get(of) != there.get(of))
    is_long = "name" not in here or changed in ("call", "value")
    old, new = there.get(changed, "absent"), here.get(changed, "absent")
    how = f"its {changed} changed from {old} to {new}"
    if is_long:
        how = _apart(_readable(old, before.rows), _readable(new, now.rows))
    if "name" not in here:
        return f"its {changed} differ: {how}"
    line = now.lines[place] if place < len(now.lines) else ""
    where = f" ({line})" if line else ""
    return f"the {'input' if here['op'] == 'placeholder' else 'node'} '{here['name']}' differs{where}: {how}"


_REF = re.compile(r"Ref\(place=(\d+)\)")
_CALL = re.compile(r"\('(?:\w+ )?(\S+)', \((.*?),?\), \{(.*)\}, \{\}, None\)")


def _readable(call: str, rows: list[Row]) -> str:
    """``aten.mul.Tensor(x, 2)`` in place of the call in a row, as far as it has that form."""
    named = _REF.sub(lambda ref: rows[int(ref[1])].get("name", ref[0]), call)
    found = _CALL.fullmatch(named)
    return f"{found[1]}({', '.join(filter(None, found.groups()[1:]))})" if found else named


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with that are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (here, there) in pairs if here != there), min(len(one), len(other)))


_AROUND, _WHOLE = 40, 120  # characters


def _apart(before: str, now: str) -> str:
    """Two texts; of long ones the part in which they differ, with some characters around it."""
    if max(len(before), len(now)) <= _WHOLE:
        return f"it was {before} and is {now}"
    start = _common(before, now)
    end = _common(before[start:][::-1], now[start:][::-1])
    begin = max(0, start - _AROUND)

    def cut(text: str) -> str:
        return text[begin : max(len(text) - end + _AROUND, start)][:200]

    return f"it was ...{cut(before)}... and is ...{cut(now)}..."
