"""What every test gets: a clean Dynamo, a seeded generator, and the device the suite runs on.

Property tests draw the same programs in every run; with `--hypothesis-profile=default` (`make test-full`) others.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

from graphex.torch_private.dynamo import forget_modes_of_others

# Helpers and shared tests assert as test modules do.
pytest.register_assert_rewrite(
    "tests.harness", "tests.runtime.contract", "tests.loops.contract", "tests.device.contract"
)
settings.register_profile("fixed", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fixed")
torch.set_num_threads(1)
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # in processes that tests start no thread spins
os.environ["GRAPHEX_TUNING"] = "off"  # tests that measure say so
os.environ.setdefault("GRAPHEX_REGIONS", "off")  # compiling takes seconds; tests that want it turn it on
os.environ["GRAPHEX_CACHE"] = "off"  # a test sees its passes run; those of the cache turn it on
os.environ["GRAPHEX_CACHE_DIR"] = tempfile.mkdtemp(prefix="graphex-tests-")  # a run finds nothing of another one
atexit.register(shutil.rmtree, os.environ["GRAPHEX_CACHE_DIR"], ignore_errors=True)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Compiled code of one test is not seen by the next, nor the threads that a program has asked for, nor modes that
    torch takes for on because threads have left them out of order.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
    torch.set_num_threads(1)
    forget_modes_of_others()


@pytest.fixture(scope="session", autouse=True)
def guards_are_not_timed() -> Iterator[None]:
    """Dynamo times the guards of every graph on flushed caches, for its log: 20 ms a graph."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._dynamo.guards, "profile_guard_manager", lambda *_: 0.0, raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def scripts_are_files_of_the_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The scripts that `verify` writes on a mismatch are beside the other files of a run, which pytest removes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("graphex.debug.files.fresh_directory", lambda: tmp_path_factory.mktemp("repro"))
        yield


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> Iterator[None]:
    """What a file of tests leaves for good (caches of torch, mostly) is not looked through for garbage ever after."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def same_accelerator(request: pytest.FixtureRequest) -> Iterator[None]:
    """A device that a test gives its process is there for every later test: only tests/ascend may make one."""
    before = torch.accelerator.current_accelerator()
    yield
    assert "ascend" in request.path.parts or torch.accelerator.current_accelerator() == before


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(skip)


@pytest.fixture
def pending() -> Iterator[None]:
    """The ops of `tests.harness.pending_ops` are declared, and have nothing in flight and nothing kept."""
    from tests.harness import pending_ops

    pending_ops.forget()
    with pending_ops.declared(), torch.no_grad():
        yield
    pending_ops.forget()


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Graphs run on the recording device, although its tensors are on the CPU."""
    from tests.harness.tape import TapeDevice, run_on

    device = TapeDevice()
    run_on(monkeypatch, device)
    return device


# A test that takes `where`, `host` and `fetched` names no device: tests/cuda and tests/ascend have others of them.


@pytest.fixture
def where(tape: Any) -> str:
    """The torch device of tensors that the capturing device holds."""
    return "cpu"


@pytest.fixture
def host(tape: Any) -> Callable[[Tensor], Tensor]:
    """A tensor in the memory of the host."""
    return Tensor.double


@pytest.fixture
def fetched(tape: Any) -> Callable[[Tensor], Tensor]:
    """A tensor in the memory of the device."""
    return Tensor.float
