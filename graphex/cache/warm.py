"""One graph of a compilation and the cache: it is looked up before the passes run, and kept after they have.

    search = look_up(compilation, name, gm, phase, static_inputs)
    if search.made is None:
        ...                                   passes
        search.keep(gm, functional)

Every graph gets one record: a hit, a miss with the first thing that differs from what is stored, or why it cannot be
stored. Whatever goes wrong with a file is a miss: the graph is compiled.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Graph, GraphModule

from graphex import env
from graphex.analysis.effects import synchronisation
from graphex.analysis.graphs import placement
from graphex.cache.artefacts import Artefact, Given, Made, artefact_of, made_from
from graphex.cache.graphs import CannotStoreError
from graphex.cache.keys import Key, devices_of, difference, key_of, nearest
from graphex.cache.sources import NoFingerprintError
from graphex.cache.store import Store, name_of
from graphex.errors import one_line
from graphex.records import CacheAsked, RegionCompiled
from graphex.regions.compiler import settings
from graphex.rewrite.compilation import Compilation
from graphex.torch_private.symbolic import FakeTensor, FakeTensorMode, add_guards, conditions, pytree, stated_since

_WANTS_PASSES = {  # options that are about the passes themselves, or about the graph between them
    "verify": lambda config: config.verify,
    "dump_tensor_data": lambda config: config.dump_tensor_data,
    "graph_dump_type": lambda config: config.graph_dump_type is not None,
    "auto_streams": lambda config: config.auto_streams,
    "deadlock_check": lambda config: config.deadlock_check,
    "stream_safety": lambda config: config.stream_safety == "shuffle",
}


_TRIED = ("cpu", "cuda")  # devices on which graphs were loaded and compared with what was compiled


@dataclass
class Search:
    """What the cache has for a graph. `made` is the graph that was stored; None where it is to be compiled.

    `artefact` is what was loaded, or kept; None, with a reason, if the graph cannot be stored.
    """

    compilation: Compilation
    name: str
    made: Made | None = None
    key: Key | None = None
    reason: str = ""
    given: Given | None = None
    mode: FakeTensorMode | None = None
    records: int = 0  # those of the journal before the passes
    guards: int = 0  # those of the shape environment
    bytes: int = 0
    artefact: Artefact | None = None
    entry: str = ""  # where the graph is stored

    def keep(self, gm: GraphModule, functional: Graph) -> None:
        """Store a graph after its passes, and record that it was missed."""
        if self.given is None or self.mode is None or (self.key is None and not self.compilation.is_ahead):
            return
        started = time.perf_counter()
        records = [each for each in self.compilation.journal.records[self.records :] if each.graph == self.name]
        try:
            guards = stated_since(self.mode.shape_env, self.guards)
            self.artefact = artefact_of(gm, functional, self.given, records, guards)
            if self.key is None:
                return
            if any(isinstance(each, RegionCompiled) and each.status == "slower" and each.doubtful for each in records):
                raise CannotStoreError("a region was slower on a busy machine: the next process tries it again")
            size = Store(self.compilation.store).save(self.key, self.artefact.to_bytes())
        except CannotStoreError as error:
            self.reason = str(error)
            if self.key is not None:
                self._note("uncacheable", self.reason)
        except OSError as error:
            self._note("miss", self.reason)
            self._warn(one_line(error))
        else:
            self.entry = name_of(self.key)
            self._note("miss", self.reason, time.perf_counter() - started, size)

    def _note(self, status: str, reason: str = "", seconds: float = 0.0, size: int = 0) -> None:
        key = "" if self.key is None else name_of(self.key)
        self.compilation.journal.add(CacheAsked(self.name, status, key, reason, seconds, size))

    def _warn(self, reason: str) -> None:
        self.compilation.fall_back(self.name, "compiled graphs are not kept for the next process", reason)


@env.collector_paused()
def look_up(compilation: Compilation, name: str, gm: GraphModule, phase: str, static_inputs: Sequence[int]) -> Search:
    """Find a graph, as AOTAutograd gave it, in the cache. What is found is made to run here, with its records."""
    started = time.perf_counter()
    search = Search(compilation, name)
    is_on = is_cache_on(compilation)
    if not is_on and not compilation.is_ahead:
        return search
    try:
        check_wanted(compilation, devices_of(gm))
        search.mode = _fake_mode(gm)
        _check_streams(gm)
        search.given = Given.of(gm)
        if is_on:
            about = {"static inputs": tuple(static_inputs), "is whole": compilation.is_whole}
            function, config = compilation.origin.function, compilation.config
            lines = search.given.lines
            known = conditions(search.mode.shape_env)
            search.key = key_of(function, gm, config, compilation.decompositions, phase, about, known, lines)
    except (CannotStoreError, NoFingerprintError) as error:
        search.reason = str(error)
        if is_on:
            search._note("uncacheable", search.reason)
        if search.mode is None or search.given is None:
            return search
    environment = search.mode.shape_env
    search.records = len(compilation.journal.records)
    search.guards = 0 if environment is None else len(environment.guards)
    if search.key is not None:
        _load(search)
    if search.made is not None:
        for record in search.made.records:
            compilation.journal.add(replace(record, graph=name))
        why = compilation.traced_because
        search._note(
            "hit", f"AOTAutograd has traced it: {why}" if why else "", time.perf_counter() - started, search.bytes
        )
    return search


def is_cache_on(compilation: Compilation) -> bool:
    return compilation.config.cache and (env.cache_enabled() or compilation.store is not None)


def check_wanted(compilation: Compilation, devices: list[str]) -> None:
    """Raise CannotStoreError where something asks for the passes, or the cache is not asked for."""
    if reason := _why_not_asked(compilation):
        raise CannotStoreError(reason)
    is_asked_for = compilation.is_ahead or compilation.store is not None or env.cache_asked_for()
    if untried := [device for device in devices if device.partition(":")[0] not in _TRIED and not is_asked_for]:
        raise CannotStoreError(f"graphs of '{untried[0]}' are kept only where GRAPHEX_CACHE=on asks for it")


def _why_not_asked(compilation: Compilation) -> str:
    for option, wants in _WANTS_PASSES.items():
        if wants(compilation.config):
            return f"the option '{option}' needs the passes to run"
    if compilation.journal.history is not None or compilation.files.wanted:
        return "a report or debug files were asked for, which show every pass"
    return "GRAPHEX_TUNING=again measures again" if env.tuning() == "again" else ""


def _check_streams(gm: GraphModule) -> None:
    for node in gm.graph.nodes:
        if placement(node) is not None or synchronisation(node) is not None:
            raise CannotStoreError(f"'{node.name}' is about a stream, and streams belong to a process")


def _fake_mode(gm: GraphModule) -> FakeTensorMode:
    values = pytree.tree_leaves([node.meta.get("val") for node in gm.graph.nodes])
    found = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    if found is None:
        raise CannotStoreError("the graph computes no tensor")
    return found


def _load(search: Search) -> None:
    """Load what is stored for a key, or say why nothing is."""
    assert search.key is not None
    assert search.given is not None
    assert search.mode is not None
    store = Store(search.compilation.store)
    try:
        data = store.load(search.key)
        if data is None:
            search.reason = why_missed(search.key, store.alike(search.key))
            return
        artefact = Artefact.from_bytes(data)
        if (broken := broken_guard(search.mode, artefact.guards)) is not None:
            search.reason = f"the stored graph is for sizes with {broken}"
            return
        search.made = made_here(artefact, search.given, search.mode, search.compilation, search.name)
        search.artefact, search.bytes, search.entry = artefact, len(data), name_of(search.key)
        store.note_hit(search.entry)
    except Exception as error:  # a file, and Inductor, may raise anything; the graph is compiled
        search.reason = f"what is stored cannot be used: {one_line(error)}"


def made_here(artefact: Artefact, given: Given, mode: FakeTensorMode, compilation: Compilation, name: str) -> Made:
    """The graph of an artefact, for a compilation of this process."""
    patches = settings(compilation.config) if artefact.regions else {}
    return made_from(artefact, given, mode, patches, _reporter(compilation, name))


def broken_guard(mode: FakeTensorMode, guards: list[Any]) -> object:
    """Ask of the sizes what compiling has asked of them; what they do not fulfil, if anything."""
    if not guards:
        return None
    return guards[0] if mode.shape_env is None else add_guards(mode.shape_env, guards)


def _reporter(compilation: Compilation, graph: str) -> Any:
    def report(what: str, reason: str, line: str) -> None:
        compilation.fall_back(graph, what, reason, line=line)

    return report


def why_missed(key: Key, others: list[Key]) -> str:
    """The first thing in which a key differs from the nearest that is stored."""
    found = nearest(key, others)
    return f"nothing is stored for '{key.name}' ({key.phase})" if found is None else difference(key, found)
