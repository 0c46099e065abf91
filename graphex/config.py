"""CompilerConfig: every option once, with its name, type, default, documentation and validation.

An option is one descriptor on the class. `docs/options.md` is generated from these declarations, and the
declaration is the only place that knows what a legal value is:

    config = CompilerConfig(verify=True)
    config.mode = "eager"            # checked on assignment
    config.frozen()                  # the read-only copy that passes receive
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, overload

from graphex.errors import OptionError, did_you_mean

# What an option is, and what kinds of values options hold: a check for each, and the words for what it allows


T = TypeVar("T")

CustomPass = Any  # anything `graphex.rewrite.adapter` understands: callables, Transformer classes, pattern pairs ...


class Option(Generic[T]):
    """One option: what it is called, what it may hold, what it means."""

    def __init__(self, kind: Kind[T], default: T, doc: str) -> None:
        self.kind = kind
        self.default = default
        self.doc = doc
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, config: None, owner: type) -> Option[T]: ...
    @overload
    def __get__(self, config: CompilerConfig, owner: type) -> T: ...
    def __get__(self, config: CompilerConfig | None, owner: type) -> Option[T] | T:
        if config is None:
            return self
        value: T = config._values.get(self.name, self.default)
        return value

    def __set__(self, config: CompilerConfig, value: Any) -> None:
        if config._is_frozen:
            raise OptionError(
                f"option '{self.name}' cannot be changed to {value!r}: the configuration is read-only once compilation "
                "has started. Set it before the first call."
            )
        config._values[self.name] = self.kind.check(self.name, value)


class Kind(ABC, Generic[T]):
    """The values that an option may hold: a check, and a text that lists them."""

    allowed: str

    @abstractmethod
    def check(self, name: str, value: Any) -> T:
        """The value as it is stored; OptionError if it is not allowed."""

    def refuse(self, name: str, value: Any, hint: str = "") -> OptionError:
        given = f"{value!r} ({type(value).__name__})"
        allowed = f"{self.allowed} ({hint})" if hint else self.allowed
        return OptionError(f"option '{name}' was given {given}; allowed: {allowed}. See docs/options.md.")


class Flag(Kind[bool]):
    """True or False and nothing that merely behaves like them: 0 is a mistake, not a False."""

    allowed = "True or False"

    def check(self, name: str, value: Any) -> bool:
        if type(value) is not bool:
            raise self.refuse(name, value)
        return value


class Choice(Kind[str]):
    def __init__(self, *values: str) -> None:
        self.values = values
        self.allowed = ", ".join(repr(value) for value in values)

    def check(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in self.values:
            raise self.refuse(name, value, did_you_mean(value, self.values))
        return value


class Whole(Kind[int]):
    """A whole number of at least `least`; True is not 1."""

    def __init__(self, least: int) -> None:
        self.least = least
        self.allowed = f"a whole number of at least {least}"

    def check(self, name: str, value: Any) -> int:
        if type(value) is not int or value < self.least:
            raise self.refuse(name, value)
        return value


class Share(Kind[float]):
    """A number from 0 to 1."""

    allowed = "a number from 0 to 1"

    def check(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise self.refuse(name, value)
        return float(value)


class FlagOr(Kind["bool | str"]):
    """True, False or one word."""

    def __init__(self, word: str) -> None:
        self.word = word
        self.allowed = f"True, False or '{word}'"

    def check(self, name: str, value: Any) -> bool | str:
        if type(value) is not bool and not (isinstance(value, str) and value == self.word):
            raise self.refuse(name, value)
        return value


class PoolHandle(Kind["tuple[int, int] | None"]):
    allowed = "None or a pool handle: two whole numbers, as torch.cuda.graph_pool_handle() gives them"

    def check(self, name: str, value: Any) -> tuple[int, int] | None:
        if value is None:
            return None
        if not isinstance(value, (tuple, list)) or len(value) != 2 or not all(type(part) is int for part in value):
            raise self.refuse(name, value)
        return (value[0], value[1])


class Sizes(Kind[tuple[int, ...]]):
    """Sizes to capture for, in any order; kept sorted, each once."""

    allowed = "a list of whole numbers of at least 1"

    def check(self, name: str, value: Any) -> tuple[int, ...]:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise self.refuse(name, value)
        if not all(type(size) is int and size >= 1 for size in value):
            raise self.refuse(name, value)
        return tuple(sorted(set(value)))


class ExistingDirectory(Kind[str]):
    allowed = "the path of a directory that exists"

    def check(self, name: str, value: Any) -> str:
        if not isinstance(value, (str, Path)) or not Path(value).is_dir():
            raise self.refuse(name, value)
        return str(value)


class Optional(Kind[Any]):
    """None, or a value that another kind allows."""

    def __init__(self, kind: Kind[Any]) -> None:
        self.kind = copy(kind)
        self.kind.allowed = self.allowed = f"None, {kind.allowed}"
        self.values = (None, *getattr(kind, "values", ()))

    def check(self, name: str, value: Any) -> Any:
        return None if value is None else self.kind.check(name, value)


class Folder(Kind[str]):
    allowed = "the path of a folder, which is made if it does not exist"

    def check(self, name: str, value: Any) -> str:
        if not isinstance(value, (str, Path)) or (Path(value).exists() and not Path(value).is_dir()):
            raise self.refuse(name, value)
        return str(value)


class Names(Kind[tuple[str, ...]]):
    """A list of names. Which names exist is known to the pipeline, which checks them when compilation starts."""

    allowed = "a list of names"
    renamed: ClassVar[dict[str, str]] = {"call_inplace_twin": "call_inplace_variant"}

    def check(self, name: str, value: Any) -> tuple[str, ...]:
        if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(v, str) for v in value):
            raise self.refuse(name, value)
        names: list[str] = list(value)
        for old in self.renamed.keys() & set(names):
            warnings.warn(f"option '{name}': '{old}' is now '{self.renamed[old]}'.", DeprecationWarning, stacklevel=2)
        return tuple(self.renamed.get(each, each) for each in names)


class Passes(Kind[tuple[CustomPass, ...]]):
    """None, one custom pass or a list of them. A tuple is one pass: (pattern, replacement[, filters])."""

    allowed = "None, a pass, or a list of passes (docs/passes.md lists the forms a pass can take)"
    methods = ("apply", "is_node_supported")  # of a GraphPass, of an OperatorSupportBase
    check_form: ClassVar[Callable[[Passes, CustomPass], None]]  # raises OptionError; `graphex/__init__.py` provides it

    def check(self, name: str, value: Any) -> tuple[CustomPass, ...]:
        if value is None or (isinstance(value, tuple) and not value):
            return ()
        passes = list(value) if isinstance(value, list) else [value]
        for each in passes:
            if not (callable(each) or isinstance(each, tuple) or any(hasattr(each, name) for name in self.methods)):
                raise self.refuse(name, each)
            self.check_form(each)
        return tuple(passes)


class AnyRule(ABC):
    """A fusion rule, as far as a configuration and the registry know it. `graphex.fusion.rule` has the real one."""

    name: str
    origin: str
    ranks: Sequence[AnyRule]  # the same rule for arguments of other ranks than its example has

    @property
    @abstractmethod
    def joint(self) -> bool:
        """Whether the rule is about the joint graph of training."""


class Rules(Kind[tuple[AnyRule, ...]]):
    """A list of fusion rules that `graphex.replacement` made."""

    allowed = "a list of rules made with graphex.replacement(...)"

    def check(self, name: str, value: Any) -> tuple[AnyRule, ...]:
        rules = list(value) if isinstance(value, (list, tuple)) else [value]
        for rule in rules:
            if not isinstance(rule, AnyRule):
                raise self.refuse(name, rule)
        return tuple(rules)


class CompilerConfig:
    """The options of one compilation. Assign attributes or pass keywords; both are checked at once."""

    mode = Option(
        Choice("reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "eager"),
        "reduce-overhead",
        "`reduce-overhead`: all passes, then device-graph replay where the device has it. `max-autotune`: the same, "
        "and Inductor tries several kernels for each product and convolution of a region, which are taken where the "
        "region is faster with them. `max-autotune-no-cudagraphs`: that without capture. `eager`: all passes, no "
        "capture.",
    )
    force_eager = Option(Flag(), False, "Run the passes but never capture a device graph.")
    capture_limit = Option(
        Whole(1), 64, "How many device graphs are kept for each compiled graph; the least recently used goes first."
    )
    capture_sizes = Option[tuple[int, ...]](
        Sizes(),
        (),
        "Sizes to capture for, such as `[1, 2, 4, 8]`: a call with fewer rows is padded to the next of them, and its "
        "results are cut. Refused, with a reason, where rows are not proven to be independent of each other.",
    )
    capture_error_mode = Option(
        Choice("global", "thread_local", "relaxed"),
        "thread_local",
        "Which calls of the CUDA runtime make a capture fail: unsafe ones of any thread (which then fail themselves), "
        "of the capturing thread, or none.",
    )
    capture_first_call = Option(
        Flag(),
        False,
        "Capture in the first call of each combination of sizes, without a call that warms up. A kernel that is "
        "compiled or tuned in its first run makes such a capture fail; the call then runs eagerly.",
    )
    force_recapture = Option(Flag(), False, "Capture again in every call: for finding out whether a capture is stale.")
    frozen_parameter = Option(
        Flag(),
        False,
        "Parameters, buffers and inputs marked static are not checked after a capture: you must keep their "
        "memory where it is.",
    )
    clone_input = Option[bool | str](
        FlagOr("auto"),
        "auto",
        "What happens to inputs that are neither static nor written. `True`: each call copies them into private "
        "buffers. `False`: the tensors of the captured call become the buffers, and a call with others copies into "
        "them. `'auto'`: a tensor that comes again is read where it is, all others are copied.",
    )
    clone_output = Option[bool | str](
        FlagOr("auto"),
        "auto",
        "`'auto'`: results are copied out of the device graph, so a kept one stays right; those that share memory "
        "still do. `True`: the same, and no two share memory. `False`: results are the graph's own memory, which the "
        "next call writes again.",
    )
    use_graph_pool = Option[tuple[int, int] | None](
        PoolHandle(), None, "A memory pool for the device graphs of everything that is compiled with this handle."
    )
    reuse_graph_pool_in_same_fx = Option(
        Flag(), True, "All device graphs of one compiled graph share a memory pool. False: each has its own."
    )
    remove_noop_ops = Option(
        Flag(), True, "Drop operations that return their input unchanged (full slices, same-dtype casts, clones ...)."
    )
    remove_cat_ops = Option(
        Flag(), True, "Compute the parts of a concatenation directly into its result instead of copying them there."
    )
    inplace_pass = Option(Flag(), True, "Compute into the memory of intermediate values that are not read any more.")
    input_inplace_pass = Option(
        Flag(), True, "Write updated inputs (caches, buffers) in place instead of computing a copy and copying it back."
    )
    pattern_fusion_pass = Option(
        Flag(), True, "Apply fusion rules: those registered with `register_replacement`, graphex's own, and the lifts."
    )
    lift_idioms = Option(
        Choice("auto", "always", "never"),
        "auto",
        "Turn idioms of plain PyTorch (RMSNorm, rotary embedding, silu * up ...) and linear layers of few rows into "
        "named ops: where the device has a faster kernel for them, everywhere, or nowhere.",
    )
    fusion_rules = Option[tuple[AnyRule, ...]](
        Rules(), (), "Fusion rules, made with `graphex.replacement`, for this configuration alone. See docs/fusion.md."
    )
    regions = Option[bool | str](
        FlagOr("background"),
        True,
        "Compile what no rule fuses with Inductor, in regions of the graph, where a compiler for the device is there. "
        "False: every op runs as its own kernel, as in eager. `background`: the first calls do, while another process "
        "compiles; the graph is captured again once it has. See docs/performance.md.",
    )
    region_numerics = Option(
        Choice("fast", "eager"),
        "fast",
        "`fast`: intermediate values of compiled regions keep the precision they are computed in, as with Inductor by "
        "default. `eager`: they are rounded to the type of the value where eager rounds, which takes more kernels.",
    )
    region_dropout = Option(
        Choice("auto", "seeded", "eager"),
        "auto",
        "`seeded`: regions of a training forward hold its dropout. Masks follow the seed of the generator, but are not "
        "those that eager draws. `eager`: they are eager's, and each dropout is a kernel between two regions. `auto`: "
        '`seeded` on a GPU, `eager` on a CPU, with `region_numerics="eager"` and with `verify`.',
    )
    regions_keep_out = Option[tuple[str, ...]](
        Names(), (), "Ops that stay outside of compiled regions, such as `aten._softmax` or `aten.add.Tensor`."
    )
    activation_memory_budget = Option(
        Share(),
        1.0,
        "The share of a forward's values that may be saved for its backward: 1 is what is fastest, 0 saves inputs. "
        "The less is saved, the more is computed again. See docs/training.md.",
    )
    cache = Option(
        Flag(),
        True,
        "Keep compiled graphs on disk, and take them from there in the next process instead of compiling again. See "
        "docs/cache.md.",
    )
    post_grad_custom_pre_pass = Option[tuple[CustomPass, ...]](
        Passes(), (), "A custom pass, or a list of them, that runs before graphex's own. See docs/passes.md."
    )
    post_grad_custom_post_pass = Option[tuple[CustomPass, ...]](
        Passes(), (), "A custom pass, or a list of them, that runs after graphex's own. See docs/passes.md."
    )
    stream_safety = Option(
        Choice("auto", "strict", "shuffle"),
        "auto",
        "What happens where one stream uses what another makes and no event of yours orders the two. `auto`: the event "
        "is added. `strict`: it is an error. `shuffle`: as `auto`, and every call also runs in several random orders "
        "that the events allow, whose results must be equal (for tests; no capture). See docs/streams.md.",
    )
    auto_streams = Option(
        Flag(),
        False,
        "Put independent branches on a second stream where that is measured to be faster. See docs/streams.md.",
    )
    deadlock_check = Option(
        Flag(),
        False,
        "Report kernels that may run at one time and together need more cores than there are. See docs/streams.md.",
    )
    dump_tensor_data = Option(Flag(), False, "Save the tensors that every node computes (runs without capture).")
    data_dump_stage = Option(
        Choice("original", "optimized"),
        "optimized",
        "Which graph `dump_tensor_data` saves: the one before any pass, or the final one.",
    )
    data_dump_dir = Option(ExistingDirectory(), "./", "Where `dump_tensor_data` writes.")
    graph_dump_type = Option[str | None](
        Optional(Choice("txt", "py", "pbtxt")),
        None,
        "Write every graph, before and after optimisation: as text, as Python code, or as a GraphDef that Netron and "
        "TensorBoard open.",
    )
    graph_dump_path = Option(Folder(), "./", "Where `graph_dump_type` writes.")
    verify = Option(
        Flag(),
        False,
        "On the first call of each graph, compare the optimised graph with the original one in float64; on a mismatch "
        "name the rule or pass that broke it, go on without it and write a repro script.",
    )
    strict = Option(
        Flag(),
        True,
        "A custom pass that raises stops compilation. False: it is rolled back, with a record and a warning.",
    )
    disable_passes = Option[tuple[str, ...]](Names(), (), "Passes to leave out, by the name the journal gives them.")
    disable_rules = Option[tuple[str, ...]](
        Names(), (), "Rewrite rules to leave out, by the name the journal gives them."
    )

    def __init__(self, **options: Any) -> None:
        self._values: dict[str, Any] = {}
        self._is_frozen = False
        self.update(options)

    def update(self, options: Mapping[str, Any]) -> None:
        """Set several options at once; the first bad one raises."""
        for name, value in options.items():
            _check_name(name)
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("_values", "_is_frozen"):
            _check_name(name)
        super().__setattr__(name, value)

    def frozen(self) -> CompilerConfig:
        """A read-only copy: what passes receive, so that no pass changes the options under another."""
        copy = CompilerConfig()
        copy._values = dict(self._values)
        copy._is_frozen = True
        return copy

    def given(self) -> dict[str, Any]:
        """The options that were set, as they could be set again: a tuple of passes would read as one pass."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in self._values.items()}

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in option_names()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CompilerConfig) and self.as_dict() == other.as_dict()

    __hash__ = None  # type: ignore[assignment]  # it is mutable until frozen

    def __repr__(self) -> str:
        return f"CompilerConfig({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"


def options_of() -> Iterator[Option[Any]]:
    """The declarations, in the order they are written."""
    return (value for value in vars(CompilerConfig).values() if isinstance(value, Option))


def option_names() -> tuple[str, ...]:
    return tuple(option.name for option in options_of())


def config_from(options: object = None, mode: object = None) -> CompilerConfig:
    """The configuration of `torch.compile(..., mode=..., options=...)`.

    torch refuses `mode` and `options` together, so `mode` is also an option.
    """
    if isinstance(options, CompilerConfig):
        config = CompilerConfig(**options.given())
    else:
        config = CompilerConfig()
        if not isinstance(options, (Mapping, type(None))):
            raise OptionError(f"options must be a dictionary or a CompilerConfig, got {type(options).__name__}.")
        for name in options or ():
            if not isinstance(name, str):
                raise OptionError(f"option names are strings, got {name!r} ({type(name).__name__}).")
        config.update(options or {})
    if mode is not None:
        config.update({"mode": mode})
    return config


_INDUCTORS = {  # options that torch.compile documents for its default backend, and what to write here
    "triton.cudagraphs": "mode='eager' turns device graphs off, which are the default on CUDA",
    "freezing": "compiled regions read weights in every call, so that these may change",
    "max_autotune": "write mode='max-autotune'",
    "max_autotune_gemm": "write mode='max-autotune'",
    "trace.enabled": "TORCH_COMPILE_DEBUG=1 writes the same files",
    "trace.graph_diagram": "graphex.explain(...).save('report.html') draws graphs",
    **dict.fromkeys(
        ("coordinate_descent_tuning", "epilogue_fusion", "fallback_random", "shape_padding"),
        "set it in torch._inductor.config, which compiled regions obey",
    ),
}


def _check_name(name: str) -> None:
    if name in _INDUCTORS:
        raise OptionError(f"'{name}' is an option of Inductor: {_INDUCTORS[name]}. See docs/options.md.")
    if name not in option_names():
        hint = did_you_mean(name, option_names(), "`graphex options` lists them")
        raise OptionError(f"unknown option '{name}' ({hint}). See docs/options.md.")
