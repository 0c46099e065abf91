"""A function of torch that is replaced for a while is replaced in one thread alone."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from graphex.torch_private.lookup import replaced_in_this_thread


def test_other_threads_call_the_original_and_it_comes_back():
    def double(x):
        return 2 * x

    module, seen = SimpleNamespace(double=double), []
    with replaced_in_this_thread(module, "double", lambda original, x: original(x) + 1):
        thread = threading.Thread(target=lambda: seen.append(module.double(3)))
        thread.start()
        thread.join()
        assert (module.double(3), seen) == (7, [6])
        with replaced_in_this_thread(module, "double", lambda original, x: -x):
            assert module.double(3) == -3
        assert module.double(3) == 7
    assert module.double is double
