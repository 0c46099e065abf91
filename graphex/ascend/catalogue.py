"""The Ascend names and scenarios: what graphex serves and from where, what it does not and why.

`NAMES` is the table that `install.py` makes modules of; `BETTER` and `NOT_OFFERED` are about the 64 scenarios that
npugraph_ex is tested with. `tables` turns all of it into the tables of `docs/ascend.md`. A home is `module:attribute`;
a module that starts with a dot is in `graphex.ascend`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graphex.ascend.config import NPUGRAPH_EX, TORCHAIR, AscendOption, negated


@dataclass(frozen=True)
class Name:
    """A name of torch_npu, torchair, npugraph_ex or torch.npu. Without a home it is not offered; `note` says why."""

    name: str
    home: str = ""
    note: str = ""
    does_nothing: bool = False

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def state(self) -> str:
        if not self.home:
            return "not offered"
        return "ignored" if self.does_nothing else "works"


def served(module: str, home: str, names: str, note: str = "", *, does_nothing: bool = False) -> Iterator[Name]:
    """Several names of one module; `theirs=ours` for one that has another name at home."""
    for name in names.split():
        theirs, _, here = name.partition("=")
        yield Name(f"{module}.{theirs}", f"{home}:{here or theirs}", note, does_nothing)


def not_offered(module: str, names: str, why: str) -> Iterator[Name]:
    for name in names.split():
        yield Name(f"{module}.{name}", note=why)


PACKAGES = ("torch_npu", "torchair", "npugraph_ex")

_CACHE = "compiled graphs in a folder of their own; docs/cache.md"
_NOT_TRIED = "tests of its own are in tests/ascend/test_cached.py; a graph is found by its content, not by these names"
_STREAMS = "graphex.scope"
_AIR = "there is no .air file without CANN; torch.export and graphex.compile_fx take exported programs"
_GE = "there is no GE graph engine here"
_NO_REFERENCE = "graphex has no reference for it yet; define it with torch.library in the namespace `npu`"
_GEARS = "the option capture_sizes pads calls to sizes that were captured"
_MEMORY = (
    "empty_cache memory_allocated memory_reserved max_memory_allocated max_memory_reserved reset_peak_memory_stats"
    " memory_stats"
)
_UPDATE = "tasks of a captured graph cannot be changed here; another length is another key"

NAMES: tuple[Name, ...] = (
    # -- the device -----------------------------------------------------------------------------------------------
    *served(
        "torch.npu",
        ".npu_module",
        "is_available is_initialized init device_count current_device set_device device synchronize get_device_name"
        " get_device_properties manual_seed manual_seed_all seed seed_all get_rng_state set_rng_state"
        " get_amp_supported_dtype is_bf16_supported _is_in_bad_fork _lazy_init",
    ),
    *served(
        "torch.npu",
        ".npu_module",
        _MEMORY,
        "the simulated device does not count the host's memory",
    ),
    *served(
        "torch.npu",
        ".npu_module",
        "set_compile_mode set_option config matmul conv",
        "switches of CANN",
        does_nothing=True,
    ),
    *served("torch.npu", ".npu_module", "get_soc_version", "that of an Ascend 910B"),
    *served("torch.npu", ".npu_module", "Stream ExternalStream Event stream current_stream default_stream set_stream"),
    *served(
        "torch.npu",
        ".npu_module",
        "set_stream_limit get_stream_limit reset_stream_limit set_device_limit get_device_limit",
        "remembered; only an NPU has cores to limit",
        does_nothing=True,
    ),
    *served("torch.npu", ".npu_module", "mem_get_info", "the host's"),
    *served("torch.npu.memory", ".npu_module", f"{_MEMORY} mem_get_info", "those of torch.npu"),
    *not_offered(
        "torch.npu.memory",
        "NPUPluggableAllocator MemPool use_mem_pool",
        "memory comes from the host, or from torch's allocator of the GPU; the option use_graph_pool shares a pool",
    ),
    *served("torch.npu.amp", ".npu_module", "autocast GradScaler", "off on the simulated npu"),
    *served("torch.npu", ".simulated", "NPUGraph graph graph_pool_handle is_current_stream_capturing"),
    *not_offered("torch.npu", "make_graphed_callables", "torch.compile(backend='npugraph_ex') captures"),
    *not_offered(
        "torch.npu",
        "graph_task_group_begin graph_task_group_end graph_task_update_begin graph_task_update_end ExternalEvent",
        _UPDATE,
    ),
    *not_offered(
        "torch.npu", "super_kernel_scope_begin super_kernel_scope_end", "super kernels are binaries for the NPU"
    ),
    *served("torch_npu", ".api", "__version__", "that of torch"),
    Name("torch_npu.npu", "torch:npu", "torch.npu"),
    *served(
        "torch_npu.contrib",
        ".api",
        "transfer_to_npu",
        "`cuda` is `npu` in scripts from its import on, unless the npu is the GPU",
    ),
    # -- torch_npu ------------------------------------------------------------------------------------------------
    *served(
        "torch_npu",
        "torch.ops.npu",
        "npu_rms_norm npu_add_rms_norm npu_add_rms_norm_cast npu_add_rms_norm_quant npu_add_rms_norm_dynamic_quant"
        " npu_dynamic_quant npu_quantize npu_transpose_batchmatmul npu_swiglu npu_rotary_mul npu_scatter_nd_update"
        " npu_scatter_nd_update_ _npu_dtype_cast npu_dtype_cast=_npu_dtype_cast",
        "docs/ops.md",
    ),
    *served(
        "torch_npu",
        "torch.ops.npu",
        "npu_fused_infer_attention_score npu_fused_infer_attention_score_v2 npu_kv_rmsnorm_rope_cache"
        " npu_kv_rmsnorm_rope_cache_v2 npu_kv_rmsnorm_rope_cache_v2_functional npu_mla_prolog npu_mla_prolog_v2"
        " npu_mla_prolog_v3 npu_mla_prolog_v3_functional scatter_update scatter_update_ npu_add_rms_norm_v2"
        " npu_add_rms_norm_v2_functional npu_quant_matmul npu_weight_quant_batchmatmul npu_moe_gating_top_k_softmax"
        " npu_moe_gating_top_k npu_moe_init_routing npu_moe_init_routing_v2 npu_moe_compute_expert_tokens"
        " npu_moe_finalize_routing npu_moe_token_permute npu_moe_token_unpermute npu_grouped_matmul",
        "docs/ops.md; a reference in plain ATen, which says what it does not take",
    ),
    *served("torch_npu", "torch.ops.npu", "save_npugraph_tensor", "the graph is cut there"),
    *served(
        "torch_npu",
        ".api",
        "npu_format_cast npu_format_cast_=npu_format_cast get_npu_format Format",
        "private formats are the NPU's",
        does_nothing=True,
    ),
    *served("torch_npu", ".api", "npu_prefetch", "a hint for the NPU's caches", does_nothing=True),
    *served(
        "torch_npu.op_plugin.atb._atb_ops",
        ".api",
        "_register_atb_extensions",
        "there is no ATB library to load",
        does_nothing=True,
    ),
    *not_offered(
        "torch_npu",
        "npu_fusion_attention npu_prompt_flash_attention npu_incre_flash_attention _npu_flash_attention"
        " _npu_flash_attention_qlens _npu_paged_attention _npu_paged_attention_splitfuse _npu_paged_attention_mla"
        " npu_attention_update npu_lightning_indexer npu_sparse_flash_attention",
        "graphex has no reference for it; npu_fused_infer_attention_score has one, for pages too",
    ),
    *not_offered("torch_npu.atb", "npu_multi_head_latent_attention npu_ring_mla npu_paged_cache_load", _NO_REFERENCE),
    *not_offered(
        "torch_npu",
        "_npu_reshape_and_cache _npu_reshape_and_cache_siso npu_scatter_pa_kv_cache npu_quant_scatter"
        " _npu_rotary_embedding npu_apply_rotary_pos_emb npu_interleave_rope npu_dequant_swiglu_quant"
        " npu_grouped_matmul_swiglu_quant npu_grouped_matmul_finalize_routing _npu_matmul_add_fp32"
        " npu_moe_re_routing npu_top_k_top_p npu_sort_v2 print_npugraph_tensor",
        _NO_REFERENCE,
    ),
    *not_offered(
        "torch_npu",
        "npu_mm_all_reduce_base npu_mm_reduce_scatter_base npu_all_gather_base_mm npu_moe_distribute_dispatch"
        " npu_moe_distribute_dispatch_v2 npu_moe_distribute_combine npu_moe_distribute_combine_v2",
        "a product or a choice of rows in one kernel with a collective; call torch.distributed's beside it",
    ),
    *served(
        "torch_npu.profiler",
        ".api",
        "profile schedule tensorboard_trace_handler ProfilerActivity ProfilerLevel AiCMetrics ExportType"
        " supported_activities",
        "torch.profiler",
    ),
    *served(
        "torch_npu.profiler",
        ".api",
        "_ExperimentalConfig",
        "counters of the NPU's cores: a warning says that they are ignored",
        does_nothing=True,
    ),
    # -- torchair -------------------------------------------------------------------------------------------------
    *served("torchair", ".config", "CompilerConfig", "the options below"),
    *served("torchair", ".api", "get_npu_backend get_compiler"),
    *served("torchair", "graphex", "register_replacement"),
    *served("torchair", ".api", "logger=torchair", "at DEBUG, every changed graph on stdout"),
    *served("torchair.core.utils", ".api", "logger=torchair"),
    *served("torchair.configs.compiler_config", ".config", "CompilerConfig"),
    *served("torchair.scope", ".api", "npu_stream_switch limit_core_num npu_wait_tensor", _STREAMS),
    *served("torchair.ops", ".api", "record wait npu_wait_tensor", _STREAMS),
    *served("torchair", ".api", "use_internal_format_weight", "private formats are the NPU's", does_nothing=True),
    *served(
        "torchair.scope",
        ".api",
        "super_kernel op_never_timeout data_dump",
        "about binaries and tasks of the NPU; the journal says so",
        does_nothing=True,
    ),
    *served(
        "torchair.ops",
        ".api",
        "npu_create_tagged_event npu_tagged_event_record npu_tagged_event_wait npu_record_tagged_stream",
        "graphex.scope",
    ),
    *served("torchair.ops", ".api", "npu_print", "the graph is cut there"),
    *served("torchair.inference", ".cached", "cache_compile readable_cache", _CACHE),
    *served("torchair.inference", ".api", "set_dim_gears", f"the dimensions are dynamic; {_GEARS}"),
    *not_offered("torchair", "dynamo_export", _AIR),
    *not_offered("torchair", "register_fx_node_ge_converter", _GE),
    *served("torchair", ".api", "patch_for_hcom", "torch traces collectives by itself", does_nothing=True),
    # -- npugraph_ex ----------------------------------------------------------------------------------------------
    *served("npugraph_ex", ".config", "CompilerConfig=FlatConfig", "the options below"),
    *served("npugraph_ex", ".api", "get_npu_backend=get_npugraph_ex_backend get_compiler compile_fx"),
    *served("npugraph_ex", "graphex", "register_replacement"),
    *served("npugraph_ex", ".api", "logger=npugraph_ex", "at DEBUG, every changed graph on stdout"),
    *served("npugraph_ex.core.utils", ".api", "logger=npugraph_ex"),
    *served("npugraph_ex.configs.compiler_config", ".config", "CompilerConfig=FlatConfig"),
    *served("npugraph_ex.scope", ".api", "limit_core_num", _STREAMS),
    *served("npugraph_ex.inference", ".cached", "cache_compile=cache_compile_flat readable_cache", _CACHE),
)


def modules() -> dict[str, list[Name]]:
    """The modules to serve, each with its names. A package that has names in its submodules alone is listed too."""
    found: dict[str, list[Name]] = {}
    for name in NAMES:
        found.setdefault(name.module, []).append(name)
        parent = name.module.rpartition(".")[0]
        while parent and parent != "torch":
            found.setdefault(parent, [])
            parent = parent.rpartition(".")[0]
    return found


# Other things that torch is asked for by an Ascend name: what, where it is served, and how.
SWITCHES: tuple[tuple[str, str, str], ...] = (
    ('torch.compile(backend="npugraph_ex")', "graphex.ascend.api.npugraph_ex_backend", "works"),
    ('torch.compile(backend="npu")', "graphex.ascend.api.npu_backend", "works (TorchAir's defaults)"),
    (
        'torch.distributed.init_process_group("hccl")',
        "graphex.ascend.simulated",
        "works (gloo on host memory under the simulated npu, nccl on a GPU); also as `npu`",
    ),
    ("an op that you define in the namespace `npu`", "torch.ops.npu", "works (found in `torch_npu` too)"),
    (
        "torch.empty(..., pin_memory=True)",
        "",
        "not offered on the simulated npu (torch asks for an allocator in C++); write `torch.empty(...).pin_memory()`",
    ),
)


# -- scenarios ---------------------------------------------------------------------------------------------------------

# tests/ascend/test_conformance_*.py has a test with the number of each scenario that is not listed in NOT_OFFERED.
BETTER: dict[int, tuple[str, str]] = {
    1: (
        "the first call of a key is captured, without a call that warms up",
        "the first call runs eagerly and the second is captured, unless `capture_first_call` is set",
    ),
    3: ("at `capture_limit` all graphs are dropped and the model runs eagerly for ever", "the oldest graph is freed"),
    6: ("other weights are another key", "the same key is captured again, and the journal says what moved"),
    8: (
        "results are the graph's memory, which the next call writes",
        "kept results stay right, unless asked otherwise",
    ),
    21: ("a chain of updates keeps one copy of the whole", "it keeps none"),
    28: ("parts of a `cat` along dimension 0, of one type", "along any dimension, and types are respected"),
    30: ("what a pass did is in the text of a log", "it is in the journal, as records"),
    60: ("18 files with fixed names", "one for each pass that ran, a journal, and programs that run by themselves"),
    63: ("a list of values and types", "one sentence: the option, what it was given, what it may be"),
}

NOT_OFFERED: dict[int, str] = {
    13: "the simulated npu is one device; on GPUs tests/cuda has a second one",
    17: "tasks of a captured graph are not updated: another length is another key",
    18: "tasks of a captured graph are not updated: another length is another key",
    **dict.fromkeys(range(47, 59), _NOT_TRIED),
    59: "static kernels are binaries for the NPU",
}


# -- where the schemas of ops come from --------------------------------------------------------------------------------

_CONVERTERS = "TorchAir's converters"
_DOCUMENTS = "torch_npu's public documents"
_SOURCES = "op-plugin's sources and its users"

# Op -> what its schema was compared with, and what is different. No reference has been compared with an NPU.
SCHEMAS: dict[str, tuple[str, str]] = {
    "_npu_dtype_cast": (_CONVERTERS, ""),
    "npu_add_rms_norm": (_CONVERTERS, ""),
    "npu_add_rms_norm_cast": (_CONVERTERS, ""),
    "npu_add_rms_norm_dynamic_quant": (_CONVERTERS, ""),
    "npu_add_rms_norm_quant": (_SOURCES, ""),
    "npu_add_rms_norm_v2": (_CONVERTERS, ""),
    "npu_add_rms_norm_v2_functional": (_CONVERTERS, ""),
    "npu_dynamic_quant": (_CONVERTERS, ""),
    "npu_fused_infer_attention_score": (_DOCUMENTS, ""),
    "npu_fused_infer_attention_score_v2": (_CONVERTERS, "no `*_dtype` arguments; lengths are lists of numbers"),
    "npu_grouped_matmul": (_DOCUMENTS, ""),
    "npu_kv_rmsnorm_rope_cache": (_DOCUMENTS, "the caches are marked as written"),
    "npu_kv_rmsnorm_rope_cache_v2": (_SOURCES, "the caches are marked as written"),
    "npu_kv_rmsnorm_rope_cache_v2_functional": (_CONVERTERS, ""),
    "npu_mla_prolog": (_CONVERTERS, "the caches are marked as written"),
    "npu_mla_prolog_v2": (_DOCUMENTS, "the caches are marked as written"),
    "npu_mla_prolog_v3": (_DOCUMENTS, ""),
    "npu_mla_prolog_v3_functional": (_SOURCES, ""),
    "npu_moe_compute_expert_tokens": (_DOCUMENTS, ""),
    "npu_moe_finalize_routing": (_CONVERTERS, ""),
    "npu_moe_gating_top_k": (_DOCUMENTS, ""),
    "npu_moe_gating_top_k_softmax": (_DOCUMENTS, ""),
    "npu_moe_init_routing": (_DOCUMENTS, ""),
    "npu_moe_init_routing_v2": (_DOCUMENTS, ""),
    "npu_moe_token_permute": (_SOURCES, ""),
    "npu_moe_token_unpermute": (_SOURCES, ""),
    "npu_quant_matmul": (_CONVERTERS, "no `*_dtype` arguments"),
    "npu_quantize": (_CONVERTERS, ""),
    "npu_rms_norm": (_CONVERTERS, ""),
    "npu_rotary_mul": (_DOCUMENTS, "no argument `rotate`, which newer versions have"),
    "npu_scatter_nd_update": (_SOURCES, ""),
    "npu_scatter_nd_update_": (_CONVERTERS, "the first argument is called `input` there"),
    "npu_swiglu": (_DOCUMENTS, ""),
    "npu_transpose_batchmatmul": (_CONVERTERS, ""),
    "npu_weight_quant_batchmatmul": (_DOCUMENTS, ""),
    "scatter_update": (_CONVERTERS, ""),
    "scatter_update_": (_CONVERTERS, "the first argument is called `data` there"),
}


# -- the tables of docs/ascend.md --------------------------------------------------------------------------------------


Row = tuple[str, ...]


def tables() -> dict[str, list[Row]]:
    """The tables by their names, each a head and rows."""
    return {
        "names": [
            ("name", "here", "state"),
            *((f"`{each.name}`", _home(each), _state(each)) for each in NAMES),
            *((what if "`" in what else f"`{what}`", f"`{home}`" if home else "", how) for what, home, how in SWITCHES),
        ],
        "torchair_options": list(_options(TORCHAIR)),
        "npugraph_ex_options": list(_options(NPUGRAPH_EX)),
        "scenarios_not_offered": [("scenario", "why"), *((str(number), why) for number, why in NOT_OFFERED.items())],
        "op_schemas": [
            ("op", "compared with", "what is different, or open"),
            *((f"`{name}`", *both) for name, both in SCHEMAS.items()),
        ],
        "better_scenarios": [("scenario", "there", "here"), *((str(n), *both) for n, both in BETTER.items())],
    }


def _options(options: Sequence[AscendOption]) -> Iterator[Row]:
    yield ("option", "default", "here")
    for option in options:
        if option.ignored:
            here = f"ignored: {option.ignored}"
        else:
            opposite = "the opposite of " if option.convert is negated else ""
            here = f"{opposite}[`{option.to}`](options.md#{option.to})"
            here += f"; {option.note}" if option.note else ""
        yield f"`{option.path}`", f"`{[] if option.default == () else option.default!r}`", here


def _home(name: Name) -> str:
    if not name.home:
        return ""
    module, _, attribute = name.home.partition(":")
    return f"`{f'graphex.ascend{module}' if module.startswith('.') else module}.{attribute}`"


def _state(name: Name) -> str:
    if name.state == "works":
        return f"works ({name.note})" if name.note else "works"
    return f"{name.state}: {name.note}"
