"""The names of torch_npu, torchair and npugraph_ex: served where they are missing, replaced nowhere."""

from __future__ import annotations

import sys
from importlib import import_module
from pkgutil import resolve_name

import pytest
import torch

import graphex
from graphex.ascend.catalogue import NAMES, SCHEMAS, SWITCHES, modules
from graphex.ascend.config import NPUGRAPH_EX, TORCHAIR
from graphex.ascend.install import TRANSFER, with_device_mapped
from graphex.ops import SPECS
from tests.harness.processes import in_folder

HERE = [name for name in NAMES if name.home and name.name != TRANSFER]


@pytest.mark.parametrize("name", HERE, ids=lambda name: name.name)
def test_a_name_that_the_catalogue_has_is_there(name):
    module = torch.npu if name.module == "torch.npu" else import_module(name.module)
    assert getattr(module, name.name.rpartition(".")[2]) is not None


@pytest.mark.parametrize("name", [name for name in NAMES if not name.home], ids=lambda name: name.name)
def test_a_name_that_is_not_offered_can_be_imported_and_says_why_when_it_is_used(name):
    module = torch.npu if name.module == "torch.npu" else import_module(name.module)
    with pytest.raises(graphex.GraphexError, match="not offered here"):
        getattr(module, name.name.rpartition(".")[2])()


def test_no_name_is_listed_twice():
    names = [name.name for name in NAMES]
    assert len(names) == len(set(names))


def test_every_option_leads_to_one_of_ours_or_says_why_it_does_not():
    ours = vars(graphex.CompilerConfig)
    for option in (*NPUGRAPH_EX, *TORCHAIR):
        assert (option.to in ours) != bool(option.ignored), option.path
        option.kind.check(option.path, option.default)


def test_an_unknown_name_says_where_to_look():
    import torchair

    with pytest.raises(AttributeError, match=r"docs/ascend\.md"):
        torchair.no_such_thing
    assert not hasattr(torchair, "no_such_thing")


def test_every_module_can_be_imported_by_its_whole_name():
    for name in modules():
        if name != "torch.npu":
            assert sys.modules.get(name) or import_module(name)


def test_packages_that_are_installed_are_not_replaced(tmp_path):
    (tmp_path / "torchair.py").write_text("mine = True\n")
    code = (
        "import graphex.ascend; graphex.ascend.serve(); import torchair, npugraph_ex\n"
        "print(torchair.mine, bool(npugraph_ex.CompilerConfig))"
    )
    assert in_folder(code, tmp_path) == "True True"


def test_with_a_real_torch_npu_nothing_is_served(tmp_path):
    (tmp_path / "torch_npu.py").write_text("mine = True\n")
    code = (
        "import graphex.ascend; graphex.ascend.serve(); import torch, importlib.util, torch_npu\n"
        "print(torch_npu.mine, hasattr(torch, 'npu'), importlib.util.find_spec('torchair'))"
    )
    assert in_folder(code, tmp_path) == "True False None"


# A package that makes the device itself, as torch_npu does; graphex has nothing to serve.
REAL = """
import types
from graphex.ascend import npu_module
from graphex.torch_private.npu import claim

module = types.ModuleType("torch.npu")
vars(module).update({name: value for name, value in vars(npu_module).items() if not name.startswith("__")})
claim("npu", module, accelerator=True)
"""


def test_dynamo_knows_the_streams_of_a_real_torch_npu(tmp_path):
    (tmp_path / "torch_npu.py").write_text(REAL)
    code = """
import graphex, graphex.ascend, torch
graphex.ascend.serve()

def f(x):
    side, done = torch.npu.Stream(), torch.npu.Event()
    with torch.npu.stream(side):
        y = x.sin()
        done.record(side)
    done.wait()
    return y + 1

compiled = torch.compile(f, backend="graphex", fullgraph=True)
assert torch.equal(compiled(torch.ones(2)), torch.ones(2).sin() + 1)
print(len(graphex.journal(compiled).streams[0].streams))
"""
    assert in_folder(code, tmp_path, CUDA_VISIBLE_DEVICES="") == "2"


def test_importing_serves_nothing_and_neither_do_logs_of_torch_that_import_every_package(tmp_path):
    code = "import torch, graphex.ascend, importlib.util as u\nprint(hasattr(torch, 'npu'), u.find_spec('torch_npu'))"
    assert in_folder(code, tmp_path, TORCH_LOGS="graphex") == "False None"


def test_serving_twice_is_serving_once(tmp_path):
    code = (
        "import sys, graphex.ascend\ngraphex.ascend.serve()\n"
        "before = len(sys.meta_path)\ngraphex.ascend.serve()\nprint(len(sys.meta_path) - before)"
    )
    assert in_folder(code, tmp_path) == "0"


def test_a_device_that_does_not_exist_is_refused_in_one_sentence(tmp_path):
    code = "import graphex.ascend\ntry:\n    graphex.ascend.serve()\nexcept TypeError as error:\n    print(error)"
    wanted = "GRAPHEX_NPU is 'tpu'; it can be simulated, cuda, cpu."
    assert in_folder(code, tmp_path, GRAPHEX_NPU="tpu") == wanted


MAPPED = """
import graphex.ascend
graphex.ascend.serve()
import torch, torch_npu, io
from torch._subclasses.fake_tensor import FakeTensorMode

torch.npu.set_device("npu:0")
torch.npu.synchronize(torch.device("npu"))
with torch.npu.device("npu:0"):
    assert torch.npu.current_device() == 0
model = torch.nn.Linear(4, 4).npu()
x = torch.randn(2, 4, device="npu")
assert x.device == model.weight.device == torch.device(TARGET), x.device
assert x.npu() is x and x.is_npu and torch.npu.is_available()
accelerator = torch.accelerator.current_accelerator()
assert accelerator is None or accelerator.type != "npu", "the machine's accelerator stays what it is"

def f(x):
    y = model(x) + torch.zeros(4, device="npu") + torch.ones(2, 1).to("npu")
    return torch_npu.npu_rms_norm(y, torch.ones(4, device="npu"))[0]

with FakeTensorMode():
    assert torch.empty(2, device="npu").device.type == torch.device(TARGET).type
compiled = torch.compile(f, backend="npugraph_ex", fullgraph=True)
with torch.no_grad():
    for _ in range(3):
        torch.testing.assert_close(compiled(x), f(x))
file = io.BytesIO()
torch.save(x, file)
file.seek(0)
assert torch.equal(torch.load(file), x)
def cast(x):
    with torch.autocast("npu", dtype=torch.bfloat16):
        return model(x)

with torch.no_grad():
    assert cast(x).dtype == torch.compile(cast, backend="npugraph_ex")(x).dtype == torch.bfloat16

def gradients(model):
    for run in (f, torch.compile(f, backend="npugraph_ex")):
        model.zero_grad()
        run(x).square().sum().backward()
        yield model.weight.grad.clone()

GRADIENTS
print("equal")
"""
EQUAL_GRADIENTS = "torch.testing.assert_close(*gradients(model))"
# torch's engine knows one accelerator, and a device that was given a name is it: graphex says so, in one sentence.
NO_GRADIENTS = """
try:
    torch.testing.assert_close(*gradients(model))
except graphex.InputError as error:
    assert "computes no gradients on the GPU while 'npu' is a name for it" in str(error), error
"""


def test_the_page_says_where_the_schema_of_every_op_comes_from():
    assert sorted(SCHEMAS) == sorted(name.removeprefix("npu::") for name in SPECS if name.startswith("npu::"))


def test_every_op_is_a_name_of_torch_npu():
    ops = {name.removeprefix("npu::") for name in SPECS if name.startswith("npu::")}
    assert ops <= {name.home.rpartition(":")[2] for name in NAMES if name.home.startswith("torch.ops.npu:")}


def test_what_the_page_says_about_other_calls_is_so():
    for what, home, how in SWITCHES:
        assert bool(home) != how.startswith("not offered"), what
        assert not home or resolve_name(home)
    if not torch.ones(1).npu().is_cuda:
        assert torch.empty(3).pin_memory().is_pinned()
        if not torch.cuda.is_available():  # which has an allocator
            with pytest.raises(NotImplementedError):
                torch.empty(3, pin_memory=True)


def test_functions_of_the_other_device_take_the_npus_names():
    seen = with_device_mapped(lambda *args, **kwargs: (args, kwargs), torch.device("cuda"))
    args, kwargs = seen("npu:1", torch.device("npu"), 0, device="npu", name="npu_0")
    assert args == (torch.device("cuda", 1), torch.device("cuda"), 0)
    assert kwargs == {"device": torch.device("cuda"), "name": "npu_0"}


def test_streams_of_the_other_device_take_the_npus_names():
    class Other(torch.Stream):
        def __new__(cls, *args, **kwargs):
            made = super().__new__(cls, stream_id=0, device_index=0, device_type=1)
            made.given = args, kwargs
            return made

    stream = with_device_mapped(Other, torch.device("cuda"))(device="npu:1", priority=-1)
    assert isinstance(stream, Other)
    assert stream.given == ((), {"device": torch.device("cuda", 1), "priority": -1})


def test_npu_can_be_another_name_for_a_device_that_exists(tmp_path):
    script = MAPPED.replace("TARGET", "'cpu'").replace("GRADIENTS", EQUAL_GRADIENTS)
    assert in_folder(script, tmp_path, GRAPHEX_NPU="cpu") == "equal"


KEPT = """
import torch
from graphex.ascend.install import keep_accelerator

keep_accelerator(torch.device("cuda", 0))
assert torch.accelerator.current_accelerator() == torch.device("cuda", 0)
compiled = torch.compile(lambda x: torch.mm(x, x) + 1, backend="eager", fullgraph=True)
assert torch.equal(compiled(torch.ones(2, 2)), torch.full((2, 2), 3.0))
print("compiled")
"""


def test_dynamo_still_compiles_where_the_accelerator_is_kept(tmp_path):
    assert in_folder(KEPT, tmp_path) == "compiled"


# torch.cuda without a GPU: streams are numbers, and nothing runs on them.
STREAMS_OF_CUDA = """
import itertools, torch

class Stream(torch.Stream):
    numbers = itertools.count(1)

    def __new__(cls, device=None, priority=0, *, stream_id=None, **_):
        number = next(cls.numbers) if stream_id is None else stream_id
        return super().__new__(cls, stream_id=number, device_index=0, device_type=1)

    def wait_stream(self, stream):
        pass

    wait_event = wait_stream

class Event(torch.Event):
    def record(self, stream=None):
        pass

def set_stream(stream):
    pass

torch.cuda.Stream, torch.cuda.Event, torch.cuda.set_stream = Stream, Event, set_stream
torch.cuda.current_stream = lambda device=None: Stream(stream_id=0)
there_is_none, torch.cuda.is_available = torch.cuda.is_available, lambda: True
import graphex, graphex.ascend
graphex.ascend.serve()
torch.cuda.is_available = there_is_none
side, event = torch.npu.Stream(), torch.npu.Event()

def kept(x):
    y = x + 1
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        z = y * 2
    torch.npu.current_stream().wait_stream(side)
    return z + 1

def made(x):
    other, current = torch.npu.Stream(), torch.npu.current_stream()
    other.wait_stream(torch.accelerator.current_stream())
    with torch.npu.stream(other):
        y = x.sin()
        event.record(other)
    current.wait_event(event)
    return y * 2

def set(x):
    current = torch.npu.current_stream()
    side.wait_stream(current)
    torch.npu.set_stream(side)
    y = x.cos()
    torch.npu.set_stream(current)
    current.wait_stream(side)
    return y * 2

x = torch.randn(3)
for f, wanted in ((kept, (x + 1) * 2 + 1), (made, x.sin() * 2), (set, x.cos() * 2)):
    for whole in (False, True):
        compiled = torch.compile(f, backend="npugraph_ex", fullgraph=whole)
        for _ in range(3):
            assert torch.equal(compiled(x), wanted)
        (record,) = graphex.journal(compiled).streams
        assert len(record.streams) == 2, record
print("compiled")
"""


def test_the_current_stream_of_the_other_device_is_known_in_compiled_functions(tmp_path):
    assert in_folder(STREAMS_OF_CUDA, tmp_path, GRAPHEX_NPU="cuda", CUDA_VISIBLE_DEVICES="") == "compiled"


@pytest.mark.cuda
def test_npu_can_be_the_gpu(tmp_path):
    script = MAPPED.replace("TARGET", "'cuda', 0").replace("GRADIENTS", NO_GRADIENTS)
    assert in_folder(script, tmp_path, GRAPHEX_NPU="cuda") == "equal"
