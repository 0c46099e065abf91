"""The kernels of a graph are compiled before its first call: each once, for the tensors it will be launched on."""

from __future__ import annotations

import gc
import os
import shutil
import threading
from collections import Counter
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.fx import Graph

from graphex.config import CompilerConfig
from graphex.errors import GraphexWarning
from graphex.evidence.tables import KernelRow, kernel_rows
from graphex.frontend.compiler import compile_kernels
from graphex.records import Journal
from graphex.rewrite.compilation import Compilation
from graphex.torch_private.symbolic import FakeTensorMode, ShapeEnv

triton = pytest.importorskip("triton", reason="needs triton (Linux)")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("kernels compiled here could not be launched", allow_module_level=True)

import triton.language as tl  # noqa: E402
from triton.runtime.jit import MockTensor  # noqa: E402

from graphex.kernels import attention, tuning  # noqa: E402
from graphex.kernels import compiled as hashes  # noqa: E402
from graphex.kernels.launch import compiling_kernels, distinct_calls, launch, precompile_kernels  # noqa: E402

OPS = torch.ops.graphex
INDICES = count(1)


@triton.jit
def scaled_kernel(x, N: tl.constexpr):
    place = x + tl.arange(0, N)
    tl.store(place, tl.load(place) * 2)


class Hopper:
    """A GPU as far as compiling for it goes."""

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget

        self.index = next(INDICES)  # Triton keeps the kernels of each device
        self.target = GPUTarget("cuda", 90, 32)
        self.loads: list[str] = []
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 232448}, load_binary=self.load
        )
        self.launcher_cls = lambda source, metadata: metadata

    def load(self, name: str, *rest: object) -> tuple[None, None, int, int, int]:
        self.loads.append(name)  # from several threads, in which += would lose some
        return None, None, 32, 0, 1024

    @property
    def loaded(self) -> Counter[str]:
        return Counter(self.loads)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.index

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    """No choices are known but those that a test ships."""
    from triton.runtime.driver import driver

    device = Hopper()
    # torch 2.11 begins to use a GPU that is there when the first fake tensor on it is made; this one is not there.
    monkeypatch.setattr("torch._subclasses.fake_tensor.init_gpu_context", lambda device: None, raising=False)
    monkeypatch.setenv("GRAPHEX_TUNING", "on")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("GRAPHEX_CACHE_DIR", str(tmp_path / "graphex"))
    monkeypatch.setenv("GRAPHEX_CACHE", "on")
    for name, value in {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "set_device": lambda index: None,
        "is_current_stream_capturing": lambda: False,
        "get_device_name": lambda index=None: "a GPU",
        "get_device_capability": lambda index=None: (9, 0),
        "get_device_properties": lambda index=None: SimpleNamespace(multi_processor_count=132, L2_cache_size=2**25),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    forget()
    driver.set_active(device)
    yield device
    forget()
    driver.set_active(None)


def forget() -> None:
    """Know what a new process does."""
    tuning.forget()
    hashes.forget()


@pytest.fixture
def compiled():
    """Which kernels were compiled, and how often."""
    found: Counter[str] = Counter()

    def note(fn: Any, is_manual_warmup: bool, **rest: object) -> None:
        assert is_manual_warmup
        found[fn.name] += 1

    triton.knobs.runtime.jit_post_compile_hook = note
    yield found
    triton.knobs.runtime.jit_post_compile_hook = None


class Drawing:
    """A graph whose nodes have values on a GPU."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.graph, self.mode = Graph(), mode

    def given(self, *sizes: int | torch.SymInt, dtype: torch.dtype = torch.bfloat16) -> Any:
        node = self.graph.placeholder("x")
        with self.mode:
            node.meta["val"] = torch.empty(sizes, dtype=dtype, device="cuda:0")
        return node

    def call(self, target: Any, *args: Any) -> Any:
        node = self.graph.call_function(target, args)
        values = torch.fx.node.map_arg(args, lambda each: each.meta["val"])
        with self.mode:
            node.meta["val"] = target(*values)
        return node


def layers(drawing: Drawing, rows: int | torch.SymInt, times: int = 2) -> Drawing:
    """Norm and projection, rotated into a cache, attention, and a projection back, several times."""
    x = drawing.given(rows, 1, 1024)
    cos, position = drawing.given(1, 1, 128), drawing.given(1, dtype=torch.int64)
    for _ in range(times):
        gain, weight, back = drawing.given(1024), drawing.given(1024, 1024), drawing.given(1024, 1024)
        keys, values = drawing.given(rows, 8, 2048, 128), drawing.given(rows, 8, 2048, 128)
        q, k, v = drawing.given(rows, 8, 1, 128), drawing.given(rows, 8, 1, 128), drawing.given(rows, 8, 1, 128)
        drawing.call(OPS.rms_norm_linears.default, x, gain, 1e-5, 0.0, True, [weight], [None])
        drawing.call(OPS.rotary_qkv_write_.default, q, k, v, cos, cos, keys, values, position, -2)
        drawing.call(OPS.attention.default, q, keys, values, None, 0.1)
        drawing.call(OPS.linears.default, x, [back], [None], x)
    return drawing


def test_each_call_of_a_kind_is_compiled_once(hopper, compiled, monkeypatch):
    monkeypatch.setenv("GRAPHEX_TUNING", "off")
    drawing = layers(Drawing(FakeTensorMode()), 1)
    made = precompile_kernels(drawing.graph.nodes)
    assert (made.errors, made.not_compiled) == ([], [])
    assert [(each.call.op.removeprefix("graphex::"), each.times, each.declined) for each in made.planned] == [
        ("rms_norm_linears", 2, ""),
        ("rotary_qkv_write_", 2, ""),
        ("attention", 2, ""),
        ("linears", 2, ""),
    ]
    assert compiled == {"gemv_kernel": 2, "rotary_kernel": 1, "attention_kernel": 1, "combine_kernel": 1}
    assert hopper.loaded == compiled
    precompile_kernels(drawing.graph.nodes)
    assert hopper.loaded == compiled  # nothing is compiled again


def test_kernels_are_compiled_while_something_else_is(hopper, compiled, monkeypatch):
    monkeypatch.setenv("GRAPHEX_TUNING", "off")
    compile, goes_on, threads = triton.compiler.compile, threading.Event(), set()

    def compile_meanwhile(source, **options):
        threads.add(threading.current_thread())
        assert goes_on.wait(60)
        return compile(source, **options)

    monkeypatch.setattr(triton.compiler, "compile", compile_meanwhile)
    nodes = layers(Drawing(FakeTensorMode()), 1).graph.nodes
    with compiling_kernels(nodes):
        assert not compiled
        goes_on.set()
    assert compiled == {"gemv_kernel": 2, "rotary_kernel": 1, "attention_kernel": 1, "combine_kernel": 1}
    assert threading.current_thread() not in threads
    made = precompile_kernels(nodes)
    assert (made.errors, made.not_compiled) == ([], [])
    assert hopper.loaded == compiled  # nothing is compiled again


def test_an_error_of_the_block_is_raised_once_the_kernels_are_compiled(hopper, compiled, monkeypatch):
    monkeypatch.setenv("GRAPHEX_TUNING", "off")
    with (
        pytest.raises(ValueError, match="of the block"),
        compiling_kernels(layers(Drawing(FakeTensorMode()), 1).graph.nodes),
    ):
        raise ValueError("of the block")
    assert sum(compiled.values()) == 5


@pytest.fixture
def searches(monkeypatch):
    """The kernels that Triton itself looks for, or compiles."""
    monkeypatch.setenv("GRAPHEX_TUNING", "off")
    compile, found = triton.compiler.compile, []

    def noting(source, **options):
        found.append(source.name)
        return compile(source, **options)

    monkeypatch.setattr(triton.compiler, "compile", noting)
    return found


def in_a_new_process(hopper: Hopper) -> list[Exception]:
    """Compile the kernels of a graph with nothing but the files of before."""
    forget()
    hopper.index = next(INDICES)
    drawing = Drawing(FakeTensorMode())
    table = drawing.given(1024, 256)
    for dtype in (torch.int64, torch.int32):
        drawing.call(OPS.embedding.default, table, drawing.given(4, 1, dtype=dtype))
    made = precompile_kernels(drawing.graph.nodes)
    return made.errors + made.not_compiled


def test_the_next_process_finds_its_kernels_without_triton(hopper, compiled, searches):
    assert in_a_new_process(hopper) == []
    before = compiled.copy()
    assert Counter(searches) == compiled
    searches.clear()
    compiled.clear()
    assert in_a_new_process(hopper) == []
    assert compiled == before
    assert searches == []


@pytest.mark.parametrize("change", ["source", "environment", "a setting of Triton's", "no cache"])
def test_kernels_are_looked_for_by_triton_where_something_changed(hopper, searches, monkeypatch, change):
    in_a_new_process(hopper)
    first = Counter(searches)
    searches.clear()
    if change == "source":
        monkeypatch.setattr(hashes, "sources_of_kernels", lambda: "others")
    elif change == "environment":
        monkeypatch.setenv("DISABLE_LLVM_OPT", "1")
    elif change == "no cache":
        monkeypatch.setenv("GRAPHEX_CACHE", "off")
    else:
        monkeypatch.setattr(triton.knobs.compilation, "always_compile", True)
    assert in_a_new_process(hopper) == []
    assert Counter(searches) == first


def test_the_next_process_finds_a_kernel_that_was_launched_before_any_was_compiled_ahead(hopper, searches):
    """A trial of a region may be the first to launch it."""
    hopper.launcher_cls = lambda source, metadata: lambda *given: None

    def first_launch() -> None:
        forget()
        hopper.index = next(INDICES)
        launch(scaled_kernel, (1,), (MockTensor(torch.bfloat16),), {"N": 16})

    first_launch()
    assert searches == ["scaled_kernel"]
    first_launch()
    assert searches == ["scaled_kernel"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("spoil", ["hashes", "Triton's cache"])
def test_kernels_whose_files_are_damaged_are_compiled(hopper, searches, tmp_path, spoil):
    in_a_new_process(hopper)
    first = Counter(searches)
    searches.clear()
    if spoil == "hashes":
        (file,) = (tmp_path / "graphex" / "kernels").glob("*.json")
        file.write_text(file.read_text()[:-20])
    else:
        shutil.rmtree(tmp_path / "triton")
    assert in_a_new_process(hopper) == []
    assert Counter(searches) == first


def test_what_does_not_compile_beside_others_is_tried_again(hopper, compiled, monkeypatch):
    monkeypatch.setenv("GRAPHEX_TUNING", "off")
    compile, tries = triton.compiler.compile, count()

    def fails_once(source, **options):
        if next(tries) == 0:
            raise RuntimeError("two threads were in each other's way")
        return compile(source, **options)

    monkeypatch.setattr(triton.compiler, "compile", fails_once)
    compilation = Compilation(CompilerConfig().frozen(), Journal(), "0/0")
    with pytest.warns(GraphexWarning, match="in each other's way"):
        compile_kernels(compilation, "a graph", layers(Drawing(FakeTensorMode()), 1, times=1).graph)
    (fallback,) = compilation.journal.fallbacks
    assert (fallback.what, fallback.reason) == (
        "kernels are compiled again, one by one",
        "RuntimeError: two threads were in each other's way",
    )
    assert compiled == {"gemv_kernel": 2, "rotary_kernel": 1, "attention_kernel": 1, "combine_kernel": 1}


def test_launchers_are_compiled_while_their_kernels_are(hopper, compiled, monkeypatch):
    monkeypatch.setenv("GRAPHEX_TUNING", "off")
    compile, begun, waited_for = triton.compiler.compile, {}, []

    def has_begun(source):
        return begun.setdefault(str(source.signature), threading.Event())

    def launcher(source, metadata):
        has_begun(source).set()
        return metadata

    def compile_late(source, **options):
        assert has_begun(source).wait(60)
        waited_for.append(source.name)
        return compile(source, **options)

    hopper.launcher_cls = launcher
    monkeypatch.setattr(triton.compiler, "compile", compile_late)
    made = precompile_kernels(layers(Drawing(FakeTensorMode()), 1, times=1).graph.nodes)
    assert (made.errors, made.not_compiled) == ([], [])
    assert hopper.loaded == compiled == Counter(waited_for)


def test_nothing_is_collected_while_threads_read_the_source_of_kernels(hopper, monkeypatch):
    monkeypatch.setenv("GRAPHEX_TUNING", "off")
    compile, collecting = triton.compiler.compile, []

    def noting(source, **options):
        collecting.append(gc.isenabled())
        return compile(source, **options)

    monkeypatch.setattr(triton.compiler, "compile", noting)
    precompile_kernels(layers(Drawing(FakeTensorMode()), 1, times=1).graph.nodes)
    assert set(collecting) == {False}
    assert gc.isenabled()


def test_a_launcher_that_cannot_be_made_early_is_made_later(hopper, compiled, monkeypatch):
    monkeypatch.setenv("GRAPHEX_TUNING", "off")

    def only_for_a_compiled_kernel(source, metadata):
        assert metadata.name
        return metadata

    hopper.launcher_cls = only_for_a_compiled_kernel
    made = precompile_kernels(layers(Drawing(FakeTensorMode()), 1, times=1).graph.nodes)
    assert (made.errors, made.not_compiled) == ([], [])
    assert hopper.loaded == compiled != {}


def test_the_kernels_inside_of_an_op_are_compiled_too(hopper, compiled, monkeypatch):
    monkeypatch.setenv("GRAPHEX_TUNING", "off")
    drawing = Drawing(FakeTensorMode())
    x, gain, weight = drawing.given(16, 1024), drawing.given(1024), drawing.given(1024, 1024)
    drawing.call(OPS.rms_norm_linears.default, x, gain, 1e-5, 0.0, True, [weight], [None])
    precompile_kernels(drawing.graph.nodes)
    assert compiled == {"norm_kernel": 1, "skinny_kernel": 1}


@pytest.mark.parametrize(("width", "wanted"), [(1024, {"two_norms_kernel": 1}), (20000, {"norm_kernel": 2})])
def test_two_norms_of_rows_wider_than_a_tile_are_a_kernel_each(hopper, compiled, width, wanted):
    drawing = Drawing(FakeTensorMode())
    x, residual, weight = drawing.given(16, width), drawing.given(16, width), drawing.given(width)
    norm = weight, 1e-6, 1.0, False
    drawing.call(OPS.rms_norm_add_rms_norm.default, x, residual, *norm, *norm)
    precompile_kernels(drawing.graph.nodes)
    assert compiled == wanted


def test_what_will_be_measured_is_compiled_and_nothing_is_chosen(hopper, compiled):
    drawing = Drawing(FakeTensorMode())
    x, weight = drawing.given(1, 1024), drawing.given(1024, 1024)
    drawing.call(OPS.linears.default, x, [weight], [None], None)
    precompile_kernels(drawing.graph.nodes)
    assert compiled["gemv_kernel"] > 3
    assert tuning.choices() == []
    assert tuning.measured() == 0


def test_what_is_shipped_is_all_that_is_compiled(hopper, compiled, monkeypatch):
    entry = {"name": "gemv 2x2048 4w", "us": {}}
    monkeypatch.setattr(tuning, "shipped", lambda device: {"linears": {"none bfloat16 1x1024 -> 1024": entry}})
    drawing = Drawing(FakeTensorMode())
    x, weight = drawing.given(1, 1024), drawing.given(1024, 1024)
    drawing.call(OPS.linears.default, x, [weight], [None], None)
    precompile_kernels(drawing.graph.nodes)
    assert compiled == {"gemv_kernel": 1}
    assert [choice.source for choice in tuning.choices()] == ["shipped"]


def decode_step(drawing: Drawing, length: int = 2048, dtype: torch.dtype = torch.bfloat16, tokens: int = 1) -> Drawing:
    """A token rotated into its caches, and attention to them, in one op."""
    q, k, v = (drawing.given(1, heads, tokens, 128, dtype=dtype) for heads in (8, 2, 2))
    cos, places = drawing.given(1, tokens, 128, dtype=dtype), drawing.given(tokens, dtype=torch.int64)
    keys, values = (drawing.given(1, 2, length, 128, dtype=dtype) for _ in range(2))
    drawing.call(OPS.rotary_attention_.default, q, k, v, cos, cos, keys, values, places, 2, False, None, 0.1)
    return drawing


DECODED = "bfloat16 1x8/2x1x128 to 2048"


def test_attention_that_adds_a_token_is_compiled_as_attention_alone_was_measured(hopper, compiled, monkeypatch):
    name = "splits=16 block=32 warps=4 stages=3"
    us = {name: 5.0, "library": 9.0}
    monkeypatch.setattr(tuning, "shipped", lambda device: {"attention": {DECODED: {"name": name, "us": us}}})
    (row,) = described(decode_step(Drawing(FakeTensorMode())))
    assert compiled == {"attention_kernel": 1, "combine_kernel": 1}
    assert (row.op, row.runs, row.chosen) == ("graphex::rotary_attention_", name, "shipped")
    assert row.against == "library 9.0 us"


def test_attention_that_adds_a_token_is_compiled_for_each_tile_that_is_measured(hopper, compiled):
    """What is measured is attention alone; nothing is chosen yet."""
    (row,) = described(decode_step(Drawing(FakeTensorMode())))
    assert compiled["attention_kernel"] > 3
    assert row.chosen == "not chosen yet"


def test_where_torchs_attention_is_faster_only_the_rotary_kernel_is_compiled(hopper, compiled, monkeypatch):
    monkeypatch.setattr(tuning, "shipped", lambda device: {"attention": {DECODED: {"name": "library", "us": {}}}})
    monkeypatch.setattr(attention, "by_library", lambda query, *rest: query)  # it asks a device that is not there
    (row,) = described(decode_step(Drawing(FakeTensorMode())))
    assert compiled == {"rotary_kernel": 1}
    assert (row.runs, row.chosen) == ("library", "shipped")


def test_what_runs_instead_of_attention_that_adds_a_token_is_compiled_too(hopper, compiled, monkeypatch):
    monkeypatch.setenv("GRAPHEX_TUNING", "off")
    (row,) = described(decode_step(Drawing(FakeTensorMode()), tokens=3))
    assert compiled == {"rotary_kernel": 1, "attention_kernel": 1, "combine_kernel": 1}
    assert row.runs == "the reference: there is more than one token"


def test_symbolic_sizes_are_those_of_the_trace_and_get_no_guards(hopper):
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    rows = mode.from_tensor(torch.empty(16, 8)).shape[0]
    assert isinstance(rows, torch.SymInt)
    drawing = layers(Drawing(mode), rows)
    before = len(environment.guards)
    calls = distinct_calls(drawing.graph.nodes)
    assert len(calls) == 4
    assert all("16" in repr(call) for call in calls)
    assert len(environment.guards) == before


def test_other_devices_and_other_ops_have_nothing_to_compile():
    drawing = Drawing(FakeTensorMode())
    x, weight = drawing.given(16, 1024), drawing.given(1024, 1024)
    drawing.call(torch.ops.aten.mm.default, x, weight)
    assert not distinct_calls(drawing.graph.nodes)
    with drawing.mode:
        x.meta["val"], weight.meta["val"] = x.meta["val"].cpu(), weight.meta["val"].cpu()
    drawing.call(OPS.linears.default, x, [weight], [None], None)
    assert not distinct_calls(drawing.graph.nodes)


# -- what explain says of it -------------------------------------------------------------------------------------------


def described(drawing: Drawing) -> list[KernelRow]:
    """The rows for a graph that was compiled with its kernels."""
    compilation = Compilation(CompilerConfig().frozen(), Journal(), "0/0")
    compile_kernels(compilation, "a graph", drawing.graph)
    return kernel_rows(compilation.journal)


def test_every_op_says_what_runs_and_what_it_was_measured_against(hopper, monkeypatch):
    shape = "none bfloat16 1x1024 -> 1024 residual"
    us = {"library": 30.8, "gemv 2x2048 4w": 16.0, "gemv 4x1024 4w": 16.2, "gemv 8x512 4w 4s": 17.0}
    monkeypatch.setattr(tuning, "shipped", lambda device: {"linears": {shape: {"name": "gemv 2x2048 4w", "us": us}}})
    rows = {row.op: row for row in described(layers(Drawing(FakeTensorMode()), 1))}
    linear, rotary, attention = (rows[f"graphex::{op}"] for op in ("linears", "rotary_qkv_write_", "attention"))
    assert (linear.times, linear.on, linear.runs) == (2, "1x1x1024, 1024x1024, 1x1x1024", "gemv 2x2048 4w")
    assert (linear.chosen, linear.own_time) == ("shipped", pytest.approx(16e-6))
    assert linear.against == "library 30.8 us, 2 others from 16.2 us"
    assert (rotary.runs, rotary.chosen, rotary.against) == ("rotary_kernel", "", "")
    assert attention.chosen == "not chosen yet"  # it will be measured in the first call


def test_an_op_whose_kernel_does_not_take_its_arguments_says_why(hopper):
    drawing = Drawing(FakeTensorMode())
    x, weight = drawing.given(2, 1024, dtype=torch.float32), drawing.given(1024, 1024, dtype=torch.float32)
    drawing.call(OPS.linears.default, x, [weight], [None], None)
    (row,) = described(drawing)
    assert row.runs.startswith("the reference: x is torch.float32")


def test_a_lookup_of_a_few_rows_names_its_kernel_and_one_of_many_says_why_not(hopper, compiled):
    drawing = Drawing(FakeTensorMode())
    table = drawing.given(32000, 4096)
    for shape in ((16, 1), (1, 500)):
        drawing.call(OPS.embedding.default, table, drawing.given(*shape, dtype=torch.int64))
    few, many = described(drawing)
    assert (few.op, few.on, few.runs) == ("graphex::embedding", "32000x4096, 16x1", "embedding_kernel")
    assert many.runs == "the reference: more than 64 indices"
    assert compiled == {"embedding_kernel": 1}
