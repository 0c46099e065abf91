"""Kernels compiled for a Hopper GPU where there is none.

code = compiled("graphex::silu_mul", cases()["graphex::silu_mul"], monkeypatch)
assert "ld.global.v4.b32" in code
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from graphex.errors import Refusal
from graphex.ops.definition import SPECS
from tests.harness.kernels.compare import launcher
from tests.harness.kernels.samples import EPS, Maker, Sample

POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.bool: "*i1",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv",
}


KERNELS = {
    "norm": ("norm_kernel", "two_norms_kernel"),
    "activations": ("silu_mul_kernel", "dynamic_quant_kernel", "static_quant_kernel", "dropout_kernel"),
    "tokens": ("embedding_kernel", "odd_mm_kernel"),
    "experts": ("few_kernel", "many_kernel", "combine_kernel", "route_kernel", "routed_kernel"),
    "grouped": ("grouped_kernel", "finalize_kernel"),
    "rotary": ("rotary_kernel",),
}


class Compiler:
    """Stands in for a kernel: compiles it for the arguments of a launch instead of launching it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.arg_names = [name for name in kernel.arg_names if name != "PDL"]  # that is for the device to say
        self.code: list[str] = []
        self.shared = 0  # bytes of shared memory that the largest of them needs

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self._launched

    def _launched(
        self, *args: object, num_warps: int, num_stages: int = 3, enable_fp_fusion: bool = True, **constants: object
    ) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.tools.tensor_descriptor import TensorDescriptor

        if "PDL" in self.kernel.arg_names:
            constants["PDL"] = True  # as on a Hopper GPU
        given = dict(zip(self.kernel.arg_names, args, strict=False)) | constants
        types: dict[str, object] = {}
        fixed: dict[tuple[int, ...], object] = {}
        aligned: dict[tuple[int, ...], object] = {}

        def type_of(value: object, path: tuple[int, ...], specialised: bool) -> object:
            if isinstance(value, TensorDescriptor):
                return f"tensordesc<{POINTERS[value.base.dtype][1:]}{list(value.block_shape)}>"
            if isinstance(value, tuple):
                return tuple(type_of(each, (*path, at), specialised) for at, each in enumerate(value))
            if value is None or (specialised and isinstance(value, int) and value == 1):
                fixed[path] = value  # as Triton does with 1
                return "constexpr"
            if isinstance(value, float):
                return "fp32"
            if isinstance(value, torch.Tensor) or (specialised and value % 16 == 0):
                aligned[path] = [["tt.divisibility", 16]]
            return POINTERS[value.dtype] if isinstance(value, torch.Tensor) else "i32"

        for at, name in enumerate(self.kernel.arg_names):
            if name in constants:
                types[name], fixed[at,] = "constexpr", given[name]
            else:
                types[name] = type_of(given[name], (at,), not self.kernel.params[at].do_not_specialize)
        source = ASTSource(self.kernel, types, fixed, aligned)
        options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": enable_fp_fusion}
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        self.code.append(compiled.asm["ptx"])
        self.shared = max(self.shared, compiled.metadata.shared)


def cases(dtype: torch.dtype = torch.bfloat16) -> dict[str, Sample]:
    make = Maker(dtype)
    x, up, weight, scale = make(2048, 1024), make(2048, 1024), make(1024), make.positive(1024)
    q, k, cos = make(1, 4, 2, 128), make(1, 2, 2, 128), make(1, 1, 2, 128)
    cache = make(1, 2, 16, 128)
    float8 = {"dtype": torch.float8_e4m3fn, "divisor": 448.0, "quant_min": -448.0, "quant_max": 448.0}
    return {
        "graphex::add_rms_norm": Sample((x, up, weight, EPS)),
        "graphex::rms_norm_add_rms_norm": Sample((x, up, weight, EPS, 1.0, False, weight, EPS, 1.0, False)),
        "graphex::add_rms_norm_dynamic_quant": Sample((x, up, weight, None, EPS), float8),
        "graphex::rms_norm_static_quant": Sample((x, weight, scale, None, EPS)),
        "graphex::dynamic_quant": Sample((make(2, 10240), make(10240))),
        "graphex::silu_mul_static_quant": Sample((x, up, scale)),
        "graphex::silu_mul": Sample((x, up)),
        "graphex::embedding": Sample((x, make.index(3, 2047, 0))),
        "graphex::dropout": Sample((x, make.index(7), 0.1)),
        "graphex::rotary_qk": Sample((q, k, cos, cos), {"interleaved": True}),
        "npu::npu_rotary_mul": Sample((q, cos, cos, "interleave")),
        "graphex::rotary_qkv_write_": Sample((q, k, k, cos, cos, cache, cache.clone(), make.index(3, 4))),
    }


def compiled(name: str, sample: Sample, monkeypatch: pytest.MonkeyPatch) -> str:
    """The code of the kernel that an op would launch."""
    (code,) = all_compiled(name, sample, monkeypatch)
    return code


def all_compiled(name: str, sample: Sample, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The code of each launch of an op."""
    kernel = SPECS[name].kernel
    assert kernel is not None
    module = kernel.partition(".")[0]
    home = importlib.import_module(f"graphex.kernels.{module}")
    compilers = {kernel: Compiler(getattr(home, kernel)) for kernel in KERNELS[module]}
    for kernel_name, compiler in compilers.items():
        monkeypatch.setattr(home, kernel_name, compiler)
    assert not isinstance(launcher(name)(*sample.args, **sample.options), Refusal)
    return [text for compiler in compilers.values() for text in compiler.code]


MOST_SHARED = 232_448  # bytes a program may have on an H100 or H200
