"""Names that scripts call in passing: what they do here, and what the journal says of those that do nothing."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch_npu
import torchair

import graphex
from tests.harness.ascend import Compiled, on_npu
from tests.harness.processes import in_folder


def refusals(compiled):
    return [record.reason for record in compiled.journal.refusals if record.rule == "scope"]


@pytest.mark.parametrize("name", ["super_kernel", "op_never_timeout", "data_dump"])
def test_a_scope_about_the_npu_is_accepted_with_a_reason(name):
    def fn(x):
        with getattr(torchair.scope, name)():
            y = x.sin()
            z = y.cos()
        return z + 1

    torch._dynamo.reset()
    compiled = Compiled(fn)
    compiled(torch.randn(4).npu())
    (reason,) = refusals(compiled)
    assert reason.startswith(f"torchair.scope.{name}")


def test_what_does_nothing_is_in_the_journals_of_what_follows():
    torchair.patch_for_hcom()
    compiled = Compiled(lambda x: x + 3)
    compiled(torch.randn(4).npu())
    assert any("patch_for_hcom" in record.what for record in compiled.journal.fallbacks)


def test_gears_make_dimensions_dynamic():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x * 2 + 1, backend="npugraph_ex")
    for rows in (2, 4, 8):
        x = torch.randn(rows, 3).npu()
        torchair.inference.set_dim_gears(x, {0: [2, 4, 8]})
        compiled(x)
    assert len({graph.compile_id for graph in graphex.journal(compiled).graphs}) == 1
    with pytest.raises(graphex.InputError, match="2 to 100 sizes"):
        torchair.inference.set_dim_gears(x, {0: [2]})


def test_tagged_events_order_streams():
    def fn(x):
        event = torchair.ops.npu_create_tagged_event("made")
        with torchair.scope.npu_stream_switch("side"):
            y = x.sin()
            torchair.ops.npu_record_tagged_stream(y, "side")
            torchair.ops.npu_tagged_event_record(event)
        torchair.ops.npu_tagged_event_wait(event)
        return y + 1

    torch._dynamo.reset()
    compiled = Compiled(fn)
    compiled(torch.randn(4).npu())
    (record,) = compiled.journal.streams
    assert record.users_events >= 1


def test_values_are_printed_where_the_graph_has_come_to_them(capsys):
    def fn(x):
        y = x * 2
        torchair.ops.npu_print(y)
        return y + 1

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="npugraph_ex", fullgraph=True)
    x = torch.tensor([1.5, 2.5]).npu()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", graphex.GraphexWarning)
        for _ in range(3):
            compiled(x)
    assert capsys.readouterr().out.count("tensor([3., 5.])") == 3


def test_a_tensor_is_saved_in_every_call(tmp_path):
    path = str(tmp_path / "twice.pt")

    def fn(x):
        y = x * 2
        torch_npu.save_npugraph_tensor(y, save_path=path)
        return y + 1

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="npugraph_ex", fullgraph=True)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", graphex.GraphexWarning)
        for number in range(3):
            compiled(torch.tensor([float(number)]).npu())
    saved = [torch.load(tmp_path / f"twice_device_0_{number}.pt") for number in range(3)]
    assert [float(each) for each in saved] == [0, 2, 4]


def test_a_dump_has_the_inputs_of_the_graph(tmp_path):
    compiled = Compiled(lambda x, y: x.sin() + y, dump_tensor_data=True, data_dump_dir=str(tmp_path))
    x, y = torch.randn(3), torch.randn(3)
    compiled(*on_npu(x, y))
    found = {path.name: torch.load(path) for path in tmp_path.rglob("*.pt")}
    assert torch.equal(found["arg0_1_device_0_0.pt"], x)
    assert torch.equal(found["arg1_1_device_0_0.pt"], y)


def test_the_deadlock_check_says_that_nothing_was_found(capsys):
    compiled = Compiled(lambda x: x.sin() + 1, deadlock_check=True)
    compiled(torch.randn(3).npu())
    assert "[RESULT]" in capsys.readouterr().out


def test_limits_and_memory_of_the_device():
    torch.npu.set_device_limit(0, 12, 24)
    assert torch.npu.get_device_limit(0) == {"cube_core_num": 12, "vector_core_num": 24}
    assert torch.npu.get_stream_limit(torch.npu.Stream()) == torch.npu.get_device_limit(0)
    torch.npu.set_device_limit(0)
    free, total = torch.npu.mem_get_info()
    assert 0 < free <= total
    assert bool(torch.npu.memory_stats()) == torch.ones(1).npu().is_cuda  # the simulated npu counts nothing


def test_names_that_scripts_look_at():
    assert torch_npu.__version__ == torch.__version__.split("+")[0]
    assert torch_npu.npu is torch.npu
    from torch_npu.npu.amp import GradScaler, autocast

    one = torch.ones(1).npu()
    with autocast(enabled=False):
        assert GradScaler().scale(one).item() == (2**16 if one.is_cuda else 1)  # the simulated npu needs no scale
    from torch_npu.npu.memory import memory_reserved
    from torch_npu.op_plugin.atb._atb_ops import _register_atb_extensions

    _register_atb_extensions()
    assert memory_reserved() == torch.npu.memory_reserved()
    assert torch_npu.npu_prefetch(one, None, 1024) is None
    assert torch_npu.npu_format_cast_(one, torch_npu.Format.FRACTAL_NZ) is one
    assert torch_npu.get_npu_format(one) == torch_npu.Format.ND == 2
    assert torch_npu.npu.get_soc_version() == 220
    torch.npu.matmul.allow_hf32 = torch.npu.conv.allow_hf32 = False
    from npugraph_ex.configs.compiler_config import CompilerConfig

    assert CompilerConfig().capture_limit == 64


def test_the_backend_npu():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x * 3 + 1, backend="npu")
    x = torch.randn(4).npu()
    with torch.no_grad():
        for _ in range(2):
            result = compiled(x)
    torch.testing.assert_close(result.cpu(), x.cpu() * 3 + 1)
    assert [record.status for record in graphex.journal(compiled).captures] == ["captured"]


def test_a_script_for_cuda_runs_on_the_npu_by_one_import(tmp_path):
    code = """
import graphex.ascend
graphex.ascend.serve()
import torch, torch_npu
from torch_npu.contrib import transfer_to_npu
assert torch.cuda.is_available() and torch.cuda.device_count() == 1
torch.cuda.set_device("cuda:0")
torch.cuda.synchronize()
with torch.cuda.stream(torch.cuda.Stream()):
    assert torch.cuda.current_stream() != torch.cuda.default_stream()

def side(x):
    s, ready = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(s):
        y = x.sin()
        ready.record(s)
    ready.wait(torch.cuda.current_stream())
    return y + 1

with torch.no_grad():
    assert torch.compile(side, backend="npugraph_ex", fullgraph=True)(torch.zeros(3, device="cuda")).sum() == 3
model = torch.nn.Linear(4, 2).cuda()
x = torch.randn(3, 4, device="cuda").to("cuda:0")
compiled = torch.compile(model, backend="npugraph_ex")
with torch.no_grad():
    print(compiled(x).device, torch.zeros(2).cuda().device, torch.equal(compiled(x).cpu(), model(x).cpu()))
"""
    assert in_folder(code, tmp_path).splitlines()[-1] == "npu:0 npu:0 True"


@pytest.mark.parametrize("by", ["name", "object"])
def test_debug_files_are_where_the_originals_documents_say(by, tmp_path):
    code = """
import graphex.ascend
graphex.ascend.serve()
import torch, npugraph_ex
from torch.fx.experimental.proxy_tensor import make_fx
x = torch.randn(3).npu()
torch.compile(lambda x: x.sin() + 1, backend=BACKEND)(x)
npugraph_ex.compile_fx(make_fx(lambda x: x.sin() + 1)(x), [x])(x)
"""
    made = {"name": "'npugraph_ex'", "object": "npugraph_ex.get_npu_backend()"}[by]
    in_folder(code.replace("BACKEND", made), tmp_path, TORCH_COMPILE_DEBUG="1")
    (folder,) = (tmp_path / "torch_compile_debug").glob("run_*/npugraph_ex")
    assert (folder / "debug.log").exists()
    assert (folder / "model__0" / "dynamo_out_graph.txt").exists()
    for place, phase in (("model__0", "forward"), ("compile__0", "compile_fx")):
        assert (folder / place / phase / f"000_aot_{phase}_graph.txt").exists()
        assert (folder / place / phase / "output_code.py").exists()
        assert not (folder / place / "inference").exists()
