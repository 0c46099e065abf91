"""`cache_compile` and `readable_cache` of torchair.inference and npugraph_ex.inference.

    self.step = torchair.inference.cache_compile(self._step, config=config, dynamic=False)

A method that is compiled so keeps its graphs in a folder of its own, named as Ascend's packages name theirs:

    <cache_dir>/<Class>_<dynamic|static>_aclgraphcache_<md5>/[world<W>global_rank<R>...]/<method>/compiled_module/

Everything else is as with `torch.compile(backend="graphex")`: the graph is found by its whole content, guards are
checked, another size is another entry, and a file that others may have written is not loaded. `docs/cache.md` has it.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from graphex.ascend.api import get_npu_backend, get_npugraph_ex_backend
from graphex.ascend.config import Group, flat_config
from graphex.cache.artefacts import Artefact
from graphex.cache.graphs import GraphData, Ref, TensorData
from graphex.cache.keys import CacheKey
from graphex.cache.store import GRAPH, CacheStore
from graphex.env import rank_and_size, write_text
from graphex.errors import InputError
from graphex.records import FellBack, Journal

HOME = "TORCHAIR_CACHE_HOME"
_FOLDER = ".torchair_cache"
_NAME = "compiled_module"
_RANKS = ("global_rank", "tp_rank", "pp_rank")
_NO_GE = "there is no GE graph engine here; compiled graphs are kept either way"


class Cached:
    """A method that is compiled when it is first called, or loaded. It runs without gradients, as Ascend's does."""

    def __init__(self, func: Callable[..., Any], backend: Any, dynamic: bool) -> None:
        self._compiled = torch.compile(func, fullgraph=True, dynamic=dynamic, backend=backend)
        self.journal: Journal = backend.journal
        self.path: Path = backend.store

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return self._compiled(*args, **kwargs)


def cache_compile(
    func: Callable[..., Any],
    *,
    config: Group | None = None,
    dynamic: bool = True,
    cache_dir: str | Path | None = None,
    custom_decompositions: Mapping[Any, Any] | None = None,
    ge_cache: bool = False,
    **ranks: int | None,
) -> Cached:
    """Compile a method of a module, and keep what was compiled for the next process.

    `ranks` are `global_rank`, `tp_rank` and `pp_rank`: processes that give other ones keep their graphs apart.
    """
    backend = get_npu_backend(compiler_config=config, custom_decompositions=custom_decompositions)
    if ge_cache:
        backend.journal.fall_back(FellBack("-", "the option 'ge_cache=True' is ignored", _NO_GE))
    return _cached(func, backend, dynamic, cache_dir, ranks)


def cache_compile_flat(
    func: Callable[..., Any],
    *,
    config: Group | None = None,
    options: Mapping[str, Any] | None = None,
    dynamic: bool = True,
    cache_dir: str | Path | None = None,
    custom_decompositions: Mapping[Any, Any] | None = None,
    **ranks: int | None,
) -> Cached:
    """`npugraph_ex.inference.cache_compile`: the same with a flat configuration, or its options as a dictionary."""
    if config is not None and options is not None:
        raise InputError("cache_compile takes a config or options, not both.")
    given = config if options is None else flat_config(options)
    backend = get_npugraph_ex_backend(compiler_config=given, custom_decompositions=custom_decompositions)
    return _cached(func, backend, dynamic, cache_dir, ranks)


def _cached(
    func: Callable[..., Any],
    backend: Any,
    dynamic: bool,
    cache_dir: str | Path | None,
    ranks: Mapping[str, int | None],
) -> Cached:
    owner = getattr(func, "__self__", None)
    if not isinstance(owner, torch.nn.Module):
        kind = type(func).__name__
        raise InputError(f"cache_compile takes a method of a torch.nn.Module, such as model.forward; got a {kind}.")
    if type(dynamic) is not bool:
        raise InputError(f"cache_compile takes dynamic=True or False, got {dynamic!r}.")
    above = Path(cache_dir or os.environ.get(HOME) or Path.cwd() / _FOLDER).absolute()
    text = f"{owner}{sorted(backend.config.as_dict().items(), key=str)}" if _is_plain(backend) else str(owner)
    digest = hashlib.md5(text.encode(errors="backslashreplace"), usedforsecurity=False).hexdigest()
    name = f"{type(owner).__name__}_{'dynamic' if dynamic else 'static'}_aclgraphcache_{digest}"
    backend.store = above.joinpath(name, *_rank_folder(ranks), func.__name__, _NAME)
    return Cached(func, backend, dynamic)


def _is_plain(backend: Any) -> bool:
    """Whether the options are the same text in every process: passes and rules are told apart in the key."""
    config = backend.config
    return not (config.post_grad_custom_pre_pass or config.post_grad_custom_post_pass or config.fusion_rules)


def _rank_folder(ranks: Mapping[str, int | None]) -> list[str]:
    """``world8global_rank3_tp_rank1``; nothing where no rank is given: processes share what they compile."""
    for name in ranks.keys() - set(_RANKS):
        raise TypeError(f"cache_compile() got an unexpected keyword argument '{name}'")
    given = {name: rank for name in _RANKS if (rank := ranks.get(name)) is not None}
    for name, rank in given.items():
        if type(rank) is not int or rank < 0:
            raise InputError(f"cache_compile takes {name} as a whole number, got {rank!r}.")
    if not given:
        return []
    _, world = rank_and_size()
    first = f"world{world}" + (f"global_rank{given.pop('global_rank')}" if "global_rank" in given else "")
    return ["_".join([first, *(f"{name}{rank}" for name, rank in given.items())])]


# -- reading what is kept ----------------------------------------------------------------------------------------------


def readable_cache(cache_bin: str | Path, print_output: bool = True, file: str | Path | None = None) -> str:
    """The content of a folder `compiled_module`, or of one file in it, as text: keys, options, graphs, code."""
    path = Path(cache_bin)
    if path.is_symlink() or not path.exists():
        raise InputError(f"'{path}' is {'a link' if path.is_symlink() else 'not there'}.")
    folder = path if path.is_dir() else path.parent
    store = CacheStore(folder.absolute())
    try:
        wanted = [entry.id for entry in store.entries() if path.is_dir() or path.name.startswith(entry.id)]
        texts = [_entry_text(store, id) for id in wanted]
    except (OSError, ValueError) as error:
        raise InputError(f"'{path}' cannot be read: {error}.") from error
    if not texts:
        raise InputError(f"'{path}' holds no compiled graph.")
    text = "\n\n".join(texts)
    if print_output:
        sys.stdout.write(text + "\n")
    if file is not None:
        write_text(Path(file), text + "\n")
        Path(file).chmod(0o600)
    return text


def _entry_text(store: CacheStore, id: str) -> str:
    key, data = store.key(id), store.artefact(id)
    artefact = Artefact.from_bytes(data)
    lines = [f"# {id}{GRAPH}", *_key_lines(key), "", *_graph_lines("graph", artefact.graph)]
    for name, region in artefact.regions.items():
        lines += ["", *_graph_lines(name, region.body)]
    for number, code in enumerate(artefact.codes):
        lines += ["", f"# code {number}, by Inductor", *code.source.splitlines()]
    return "\n".join(lines)


def _key_lines(key: CacheKey | None) -> list[str]:
    if key is None:
        return ["# its key cannot be read"]
    parts = [(name, value) for name, value in key.parts.items() if isinstance(value, str)]
    return [
        f"# {key.name} {key.phase}",
        *(f"# {name}: {value}" for name, value in parts),
        *(f"# option {name} = {value}" for name, value in key.parts.get("options", {}).items()),
    ]


def _graph_lines(title: str, data: GraphData) -> list[str]:
    names = [node.name for node in data.nodes]

    def text(value: Any) -> str:
        if isinstance(value, Ref):
            return names[value.place]
        if isinstance(value, (list, tuple)):
            inner = ", ".join(map(text, value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner})"
        return repr(value)

    lines = [f"# {title}"]
    for node in data.nodes:
        arguments = [*map(text, node.args), *(f"{name}={text(value)}" for name, value in node.kwargs.items())]
        target = node.target.removeprefix("op ").removeprefix("function ")
        value = node.meta.get("val")
        about = f"  # {value.dtype}{list(value.sizes)}" if isinstance(value, TensorData) else ""
        lines.append(f"{node.name} = {node.op} {target}({', '.join(arguments)}){about}")
    return lines
