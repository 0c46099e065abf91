"""Compiling with rules imports torch's pattern matcher and not all of Inductor, which is whole when it is needed."""

from __future__ import annotations

from textwrap import dedent

import pytest
import torch

from tests.harness.processes import forked, python

COMPILE = """
    import sys, torch, graphex

    def f(x, weight):
        n = (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return weight * n

    given = torch.randn(4, 16, dtype=torch.bfloat16), torch.randn(16, dtype=torch.bfloat16)
    compiled = torch.compile(f, backend="graphex", options={"lift_idioms": "always"})
    assert torch.equal(compiled(*given), f(*given))
    assert [each.matches for each in graphex.journal(compiled).rules if each.rule == "lift_rms_norm"] == [1]
"""
WHOLE = """
    import torch._inductor, torch._inductor.lowering, torch._inductor.decomposition
    from torch._inductor.pattern_matcher import fallback_node_due_to_unsupported_type, select_decomp_table

    assert torch._inductor.lowering.lowerings
    assert select_decomp_table() == torch._inductor.decomposition.select_decomp_table()
    traced = torch.fx.symbolic_trace(lambda x: x + 1)
    value = torch.ones(2, dtype=torch.complex64)
    for node in traced.graph.nodes:
        node.meta["val"] = value
    wanted = torch._inductor.lowering.fallback_node_due_to_unsupported_type
    nodes = list(traced.graph.nodes)
    assert [*map(fallback_node_due_to_unsupported_type, nodes)] == [*map(wanted, nodes)]
"""


def run(*parts: str) -> None:
    python("-c", "\n".join(map(dedent, parts)))


def test_code_generators_are_not_imported_and_are_there_when_asked_for():
    not_there = """
    assert "torch._inductor.pattern_matcher" in sys.modules
    assert not {"torch._inductor.lowering", "torch._inductor.decomposition"} & set(sys.modules)
    """
    run(COMPILE, not_there, WHOLE)


@pytest.mark.parametrize("first", ["torch._inductor.lowering", "torch._inductor.pattern_matcher"])
def test_what_was_imported_before_stays(first):
    before = f"import {first} as before"
    run(before, COMPILE, f"assert before is sys.modules['{first}']", WHOLE)


def test_a_matcher_that_wants_more_gets_all_of_it():
    """As another version of torch might. A tree that is not installed imports the matcher with graphex: here later."""
    other = """
    from importlib import metadata

    found, ours = metadata.entry_points, {"group": "torch_dynamo_backends", "name": "graphex"}
    metadata.entry_points = lambda **what: [what] if what == ours else found(**what)
    from graphex.torch_private import inductor
    inductor.LATER = dict.fromkeys(inductor.LATER, "something_else")
    metadata.entry_points = found
    if not found(**ours):
        from graphex.backend import register
        register()
    """
    run(other, COMPILE, "assert 'torch._inductor.lowering' in sys.modules", WHOLE)


def test_a_switch_imports_all_of_inductor(monkeypatch):
    monkeypatch.setenv("GRAPHEX_LEAN_IMPORTS", "off")
    run(COMPILE, "assert 'torch._inductor.lowering' in sys.modules", WHOLE)


def test_a_module_that_holds_on_to_a_stand_in_finds_the_real_thing():
    held = """
    import sys
    from graphex.torch_private import inductor
    with inductor.left_for_later():
        stand_in = sys.modules["torch._inductor.lowering"]
        assert not hasattr(stand_in, "lowerings")
    assert stand_in.lowerings is __import__("torch._inductor.lowering", fromlist=["x"]).lowerings
    """
    run("import torch", held)


def test_another_thread_that_imports_inductor_meanwhile_gets_all_of_it():
    threads = """
    import sys, threading, torch
    from graphex.torch_private import inductor
    found, has_begun = [], threading.Event()

    def other():
        import torch._inductor.lowering as lowering
        has_begun.set()
        from torch._inductor.decomposition import decompositions
        found.extend((lowering.lowerings, decompositions))

    with inductor.left_for_later():
        thread = threading.Thread(target=other)
        thread.start()
        has_begun.wait()
        inductor.import_module(inductor.MATCHER)
    thread.join()
    import torch._inductor.lowering, torch._inductor.decomposition
    assert found[0] is torch._inductor.lowering.lowerings
    assert found[1] is torch._inductor.decomposition.decompositions
    """
    run(threads, WHOLE)


def test_kernels_of_libraries_that_stand_in_are_inductors():
    from torch._inductor.kernel import conv, mm  # noqa: F401
    from torch._inductor.select_algorithm import extern_kernels

    from graphex.torch_private.inductor import KERNELS

    assert all(getattr(extern_kernels, name) is getattr(torch, name) for name in KERNELS)


@pytest.mark.parametrize("does_first_work", [True, False])
def test_older_instruction_sets_are_tried_only_where_the_newest_does_not_work(does_first_work):
    trials = f"""
    from torch._inductor import cpu_vec_isa
    from graphex.torch_private.inductor import try_instruction_set

    tried = []

    def check_build(each, code):
        tried.append(str(each))
        return {does_first_work} or str(each) != tried[0]

    cpu_vec_isa.VecISA.check_build = check_build
    try_instruction_set()
    found = [str(each) for each in cpu_vec_isa.valid_vec_isa_list()]
    assert (tried[0] in found) == {does_first_work}, found
    assert len(set(tried)) <= (1 if {does_first_work} else 2), tried
    assert not found or str(cpu_vec_isa.pick_vec_isa()) == found[0] == tried[-1]
    """
    forked(dedent(trials))
