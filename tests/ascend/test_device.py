"""The simulated npu: tensors with a device of their own, and everything one does with tensors."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

NPU = torch.device("npu", 0)


def on_both(f, *tensors: torch.Tensor) -> None:
    """The same result on the npu as on the CPU."""
    found = f(*(tensor.npu() for tensor in tensors))
    assert found.device == NPU
    torch.testing.assert_close(found.cpu(), f(*tensors), rtol=0, atol=0)


@pytest.mark.parametrize("make", [
    lambda: torch.empty(2, 3, device="npu"),
    lambda: torch.zeros(2, 3, device="npu:0"),
    lambda: torch.randn(2, 3).npu(),
    lambda: torch.ones(2, 3).to("npu"),
    lambda: torch.tensor([[1, 2, 3], [4, 5, 6]], device="npu"),
    lambda: torch.arange(6, device="npu").view(2, 3),
])  # fmt: skip
def test_tensors_are_made_on_it(make):
    tensor = make()
    assert tensor.device == NPU
    assert tensor.is_npu
    assert tuple(tensor.shape) == (2, 3)


def test_factories_follow_the_default_device():
    with torch.device("npu"):
        assert torch.ones(2).device == NPU
        assert torch.nn.Linear(2, 2).weight.device == NPU


def test_there_is_one_device():
    with pytest.raises(RuntimeError, match="npu:1"):
        torch.zeros(2, device="npu:1")
    with pytest.raises(RuntimeError, match="npu:1"):
        torch.npu.set_device(1)
    assert (torch.npu.device_count(), torch.npu.current_device()) == (1, 0)


X, Y = torch.randn(4, 6), torch.randn(4, 6)


def attend_plainly(*qkv):
    """The way the npu takes. From torch 2.14 on the CPU has a flash kernel for these sizes, which rounds otherwise."""
    with sdpa_kernel(SDPBackend.MATH):
        return functional.scaled_dot_product_attention(*qkv)


@pytest.mark.parametrize("f", [
    torch.add,
    lambda x, y: x @ y.T,
    lambda x, y: torch.cat([x, y[:, ::2]], 1).sort(-1).values,
    lambda x, y: x[y > 0],
    lambda x, y: x[torch.tensor([2, 0])],
    lambda x, y: torch.where(x > y, x, 0.0).sum(0, keepdim=True).expand(3, 6),
    lambda x, y: attend_plainly(x[None], y[None], y[None]),
    lambda x, y: torch.stack(torch.topk(x, 2)[:1])[0] + y.view(6, 4).t()[:, :2],
    lambda x, y: torch.einsum("ij,kj->ik", x, y).softmax(-1),
    lambda x, y: torch.add(x, y, out=torch.empty(0, device=x.device)),
])  # fmt: skip
def test_ops_compute_what_the_cpu_computes(f):
    on_both(f, X, Y)


def test_views_and_writes_in_place_are_real():
    def f(x):
        view = x.t()[1:, 1:]
        view.add_(1)
        view[0].zero_()
        x[2] = 7
        return x.clone()

    on_both(f, X)
    npu = X.npu()
    view = npu.view(-1)
    view[0] = 5
    assert npu[0, 0].item() == 5


def test_memory_is_freed_with_the_last_tensor_and_not_before():
    kept = [torch.full((64,), float(number), device="npu")[1:3] for number in range(50)]
    torch.randn(10_000, device="npu")
    assert [part.sum().item() for part in kept] == [2.0 * number for number in range(50)]


def test_autograd_and_optimizers_work():
    def trained(device):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 1)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            functional.mse_loss(model(X.to(device)), Y[:, :1].to(device)).backward()
            optimizer.step()
        return model[2].weight.detach().cpu()

    torch.testing.assert_close(trained("npu"), trained("cpu"))


def test_modules_move_to_it_and_back():
    model = torch.nn.BatchNorm1d(3).npu()
    assert {value.device for value in (*model.parameters(), *model.buffers())} == {NPU}
    assert model.cpu().weight.device.type == "cpu"
    assert copy.deepcopy(model.npu()).weight.device == NPU


def test_tensors_and_modules_are_saved_and_loaded():
    model, file = torch.nn.Linear(3, 3).npu(), io.BytesIO()
    torch.save({"model": model.state_dict(), "view": X.npu()[1:]}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded["view"].device == NPU
    assert torch.equal(loaded["view"].cpu(), X[1:])
    model.load_state_dict(loaded["model"])
    file.seek(0)
    assert torch.load(file, map_location="cpu")["view"].device.type == "cpu"


def test_all_memory_of_the_host_is_pinned():
    pinned = X.pin_memory()
    assert pinned.is_pinned()
    assert pinned.data_ptr() != X.data_ptr()
    assert torch.equal(pinned.npu(non_blocking=True).cpu(), X)
    assert not X.npu().is_pinned()
    (rows,) = torch.utils.data.DataLoader(X, batch_size=4, pin_memory=True)
    assert torch.equal(rows, X)


def test_devices_are_not_mixed():
    with pytest.raises(RuntimeError, match="same device"):
        X.npu() + Y
    with pytest.raises(RuntimeError, match="same device"):
        torch.mm(X.npu(), Y.T)
    assert (X.npu() + torch.tensor(1.0)).device == NPU  # a number may come from the host


def test_fake_tensors_have_it():
    with FakeTensorMode():
        fake = torch.empty((1, 2), device="npu", dtype=torch.float16)
        assert (fake @ fake.T).device == NPU
        assert fake.npu().device == NPU


def test_streams_and_events():
    stream, other = torch.npu.Stream(), torch.npu.Stream()
    assert stream != other
    assert torch.npu.current_stream() == torch.npu.default_stream()
    with torch.npu.stream(stream):
        assert torch.npu.current_stream() == stream
        event = stream.record_event()
    assert torch.npu.current_stream() == torch.npu.default_stream()
    other.wait_event(event)
    other.wait_stream(stream)
    assert event.query()
    X.npu().record_stream(stream)
    start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    with pytest.raises(RuntimeError, match="recorded"):
        start.elapsed_time(end)
    start.record()
    end.record()
    assert start.elapsed_time(end) >= 0


def test_core_limits_of_streams_are_remembered():
    stream = torch.npu.Stream()
    torch.npu.set_stream_limit(stream, 8, 16)
    assert torch.npu.get_stream_limit(stream) == {"cube_core_num": 8, "vector_core_num": 16}
    torch.npu.reset_stream_limit(stream)
    assert torch.npu.get_stream_limit(stream) == torch.npu.get_stream_limit(torch.npu.default_stream())


def test_graphs_are_captured_and_replayed():
    x, total = torch.ones(3).npu(), torch.zeros(3).npu()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, pool=torch.npu.graph_pool_handle()):
        assert torch.npu.is_current_stream_capturing()
        y = (x * 2).relu()
        total += y
    assert not torch.npu.is_current_stream_capturing()
    assert total.sum().item() == 0, "a capture computes nothing"
    x.fill_(5)
    graph.replay()
    graph.replay()
    assert (y[0].item(), total[0].item()) == (10, 20)
    graph.reset()
    with pytest.raises(RuntimeError, match="reset"):
        graph.replay()


@pytest.mark.parametrize("forbidden", [lambda x: x.sum().item(), lambda x: x.cpu(), lambda x: x.copy_(torch.ones(3))])
def test_what_hardware_cannot_capture_fails(forbidden):
    x, graph = torch.ones(3).npu(), torch.npu.NPUGraph()
    with pytest.raises(RuntimeError, match="captured"):
        with torch.npu.graph(graph):
            forbidden(x)
    assert not torch.npu.is_current_stream_capturing()


def test_a_second_capture_and_a_wrong_error_mode_are_refused():
    graph = torch.npu.NPUGraph()
    with pytest.raises(RuntimeError, match="capture_error_mode"):
        graph.capture_begin(capture_error_mode="none")
    with torch.npu.graph(graph), pytest.raises(RuntimeError, match="under way"):
        torch.npu.NPUGraph().capture_begin()


def test_random_numbers_follow_the_seed_and_a_replay_draws_new_ones():
    torch.npu.manual_seed(1)
    first = torch.rand(4, device="npu")
    torch.manual_seed(1)
    assert torch.equal(torch.rand(4, device="npu"), first)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        drawn = torch.rand(4, device="npu")
    graph.replay()
    before = drawn.clone()
    graph.replay()
    assert not torch.equal(before, drawn)


def test_layouts_it_does_not_have_are_refused_in_one_sentence():
    with pytest.raises(NotImplementedError, match="simulated npu"):
        torch.eye(2).npu().to_sparse()


def test_autocast_can_be_switched_off_and_says_that_there_is_none():
    x = torch.randn(3, 3).npu()
    with torch.autocast("npu", enabled=False):
        assert (x @ x).dtype == torch.float32
    with pytest.raises(NotImplementedError, match="simulated npu"):
        torch.autocast("npu", dtype=torch.float16)


CONJUGATED = {
    "itself": lambda z: (z * 2).conj(),
    "computed with": lambda z: z.conj() + 1,
    "made plain": lambda z: z.conj().resolve_conj(),
    "in part": lambda z: z.conj()[1:, ::2] * 2,
    "its imaginary part": lambda z: z.conj().imag,
    "an inverse transform": lambda z: torch.fft.ihfft(z.real),
}


@pytest.mark.parametrize("how", CONJUGATED)
def test_conjugated_tensors(how):
    z = torch.randn(4, 6, dtype=torch.complex64)
    found, wanted = CONJUGATED[how](z.npu()), CONJUGATED[how](z)
    assert found.is_conj() == wanted.is_conj()
    assert torch.equal(found.cpu(), wanted)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x % 5,
        lambda x: x & 1,
        lambda x: x.fmod(3),
        lambda x: x.bitwise_left_shift(1),
        lambda x: (x / 2).xlogy(2.0),
        lambda x: (x.double() * 0.1) % 0.3,
        lambda x: x.half().copysign(-2.5),
        lambda x: x.clone().remainder_(3),
    ],
)
def test_numbers_stand_for_tensors(compute):
    x = torch.arange(-3, 5)
    wanted = compute(x)
    found = compute(x.npu())
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found.cpu(), wanted, equal_nan=True)
