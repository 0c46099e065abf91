"""Everything that a compiled graph depends on makes a miss when it changes, and the record names it."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import types
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import graphex
from graphex.cache.keys import CacheKey, difference
from graphex.cache.sources import NoFingerprintError, fingerprint
from graphex.cache.store import CacheStore
from tests.harness.cached import asked, missed


def function(x: Tensor) -> Tensor:
    return (x * 2).relu()


def with_constant(value: float):
    def function(x):
        return x * value

    return function


def test_nothing_is_stored_for_a_new_function(run):
    assert missed(run(function, torch.ones(2))) == "nothing is stored for 'function' (inference)"


def test_a_size_that_changed_is_named(run):
    run(function, torch.ones(2))
    assert missed(run(function, torch.ones(3))) == "the input 'arg0_1' differs: its sizes changed from (2,) to (3,)"


def test_a_type_that_changed_is_named(run):
    run(function, torch.ones(2))
    reason = missed(run(function, torch.ones(2, dtype=torch.double)))
    assert reason == "the input 'arg0_1' differs: its dtype changed from torch.float32 to torch.float64"


def test_a_line_that_changed_is_named(run):
    run(with_constant(2.0), torch.ones(2))
    reason = missed(run(with_constant(3.0), torch.ones(2)))
    assert "test_keys.py:" in reason
    assert "return x * value" in reason
    assert reason.endswith("it was aten.mul.Tensor(arg0_1, 2.0) and is aten.mul.Tensor(arg0_1, 3.0)")


def test_an_option_that_changed_is_named(run):
    run(function, torch.ones(2))
    assert missed(run(function, torch.ones(2), inplace_pass=False)) == (
        "the option 'inplace_pass' was True and is False"
    )


def test_of_several_that_are_stored_the_nearest_is_compared(run):
    others = ("remove_noop_ops", "remove_cat_ops", "pattern_fusion_pass", "strict")
    for other in (*others[:2], "", *others[2:]):  # in whichever order they are looked at
        further = {other: False, "inplace_pass": False} if other else {}
        run(function, torch.ones(2), input_inplace_pass=False, **further)
    assert missed(run(function, torch.ones(2))) == "the option 'input_inplace_pass' was False and is True"


def test_a_switch_of_the_process_that_changed_is_named(run):
    run(function, torch.ones(2))
    torch.use_deterministic_algorithms(True)
    try:
        assert missed(run(function, torch.ones(2))).startswith("the setting 'numerics' was ")
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("part", ["torch", "Triton", "Python", "CPU", "graphex"])
def test_a_version_that_changed_is_named(run, monkeypatch, part):
    from graphex.cache import keys

    machine = keys._machine()
    run(function, torch.ones(2))
    monkeypatch.setattr(keys, "_machine", lambda: {**machine, part: "another"})
    assert missed(run(function, torch.ones(2))) == f"{part} was {machine[part]} and is another"


def with_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(torch.get_num_threads() + 1)


def with_other_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHEX_TUNING", "on")


def with_other_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "another")


def with_other_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphex.cache.keys._device", lambda name: "another device")


def with_declaration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphex.cache.keys.variant_declarations", lambda: ["aten.relu.default"])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (with_threads, "the setting 'threads' was "),
        (with_other_tuning, "the environment's 'tuning' was off and is on"),
        (with_other_compiler, "the environment's 'C++ compiler' was "),
        (with_other_driver, "the device 'cpu' was cpu and is another device"),
        (with_declaration, "the declaration of 'aten.relu.default' is new"),
    ],
)
def test_a_part_of_the_surroundings_that_changed_is_named(run, monkeypatch, change, named):
    run(function, torch.ones(2))
    change(monkeypatch)
    assert missed(run(function, torch.ones(2))).startswith(named)


def test_the_default_type_is_part_of_the_key(run):
    run(function, torch.ones(2))
    x = torch.ones(2)
    torch.set_default_dtype(torch.double)
    try:
        reason = missed(run(function, x))
    finally:
        torch.set_default_dtype(torch.float)
    assert reason == "the setting 'default dtype' was torch.float32 and is torch.float64"


def each_changed(key: CacheKey) -> Iterator[tuple[str, CacheKey]]:
    """A key with one component after the other changed, and the name of that component."""
    for part, value in key.parts.items():
        if not isinstance(value, dict):
            another = [*value, ["mine", "made of this"]] if isinstance(value, list) else "another"
            yield "mine" if isinstance(value, list) else part, replace(key, parts={**key.parts, part: another})
            continue
        for name, inner in value.items():
            another = [*inner, ["mine", "made of this"]] if isinstance(inner, list) else "another"
            yield (
                "mine" if isinstance(inner, list) else name,
                replace(key, parts={**key.parts, part: {**value, name: another}}),
            )
    for place, row in enumerate(key.rows):
        for of in row:
            other = {**row, of: f"{row[of]} another"}
            yield other.get("name", of), replace(key, rows=[*key.rows[:place], other, *key.rows[place + 1 :]])


def test_every_component_of_a_key_makes_another_one_and_is_named(run, monkeypatch):
    """With the settings of Inductor's, which are a part of it where there are regions."""
    monkeypatch.setenv("GRAPHEX_REGIONS", "on")
    run(function, torch.ones(2), regions_keep_out=["aten.relu", "aten.mul"])
    (entry,) = CacheStore().entries()
    key = CacheStore().key(entry.id)
    assert key is not None
    assert set(key.parts) == {
        *("graphex", "torch", "Triton", "Python", "CPU", "devices"),
        *("settings", "environment", "Inductor's settings", "options"),
        *("passes", "rules", "decompositions", "declarations", "phase", "about"),
    }
    changed = list(each_changed(key))
    assert len(changed) > 100
    for name, other in changed:
        assert other.digest != key.digest
        assert name in difference(other, key)


def test_strides_that_changed_are_named(run):
    run(function, torch.ones(2, 3))
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="graphex")
    compiled(torch.ones(3, 2).t())
    reason = missed(graphex.journal(compiled))
    assert reason == "the input 'arg0_1' differs: its strides changed from (3, 1) to (1, 2)"


@pytest.mark.parametrize("made", [torch.clamp_min, torch.clamp], ids=["changed", "as it was"])
def test_a_decomposition_is_part_of_the_key(folder, made):
    def through(decompose):
        torch._dynamo.reset()
        table = {torch.ops.aten.relu.default: lambda x: decompose(x, 0)}
        compiled = torch.compile(function, backend=graphex.get_backend({}, custom_decompositions=table))
        compiled(torch.ones(2))
        return graphex.journal(compiled)

    through(torch.clamp)
    if made is torch.clamp:
        assert asked(through(made)) == ["hit"]
    else:
        assert "the decomposition of 'aten.relu.default' was changed" in missed(through(made))


# -- passes and rules --------------------------------------------------------------------------------------------------


LIMIT = 1


def helper() -> int:
    return LIMIT


def my_pass(gm: object, inputs: object, config: object) -> None:
    helper()


def test_a_pass_is_known_by_what_it_does(run, monkeypatch):
    options = {"post_grad_custom_post_pass": my_pass}
    run(function, torch.ones(2), **options)
    assert asked(run(function, torch.ones(2), **options)) == ["hit"]
    monkeypatch.setitem(globals(), "LIMIT", 2)
    assert missed(run(function, torch.ones(2), **options)) == "the pass 'my_pass' was changed"


def test_a_pass_that_cannot_be_told_apart_makes_no_entry_and_the_record_says_what_to_do(run):
    class Odd:
        def __init__(self) -> None:
            self.generator = torch.Generator()

        def __call__(self, gm, inputs, config):
            return None

    odd = Odd()
    (record,) = run(function, torch.ones(2), post_grad_custom_post_pass=odd).cache
    assert record.status == "uncacheable"
    assert "torch._C.Generator" in record.reason
    assert 'cache_version = "1"' in record.reason
    odd.cache_version = "1"
    assert asked(run(function, torch.ones(2), post_grad_custom_post_pass=odd)) == ["miss"]
    assert asked(run(function, torch.ones(2), post_grad_custom_post_pass=odd)) == ["hit"]


def test_a_rule_is_part_of_the_key(run):
    def rule(scale):
        return graphex.replacement(
            lambda x: torch.relu(x * 2.0), lambda x: torch.relu(x * scale), [torch.randn(2)], name="mine"
        )

    run(function, torch.ones(2))
    assert missed(run(function, torch.ones(2), fusion_rules=[rule(2.0)])) == "the rule 'mine' is new"
    assert asked(run(function, torch.ones(2), fusion_rules=[rule(2.0)])) == ["hit"]


# -- graphs that cannot be stored --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value"),
    [("verify", True), ("auto_streams", True), ("graph_dump_type", "txt"), ("deadlock_check", True)],
)
def test_an_option_about_the_passes_lets_them_run(run, tmp_path, option, value):
    (record,) = run(function, torch.ones(2), graph_dump_path=tmp_path, **{option: value}).cache
    assert record.status == "uncacheable"
    assert option in record.reason


def test_a_handler_of_somebody_elses_for_torchs_trace_asks_for_no_passes(run):
    """pytest puts its handlers on every logger that does not propagate; only torch's own writes artifacts."""
    logger, handler = logging.getLogger("torch.__trace"), logging.NullHandler()
    logger.addHandler(handler)
    try:
        run(function, torch.ones(2))
        assert asked(run(function, torch.ones(2))) == ["hit"]
    finally:
        logger.removeHandler(handler)


def test_explain_shows_passes_whatever_is_stored(run):
    run(function, torch.ones(2))
    assert graphex.explain(function, (torch.ones(2),)).journal.passes


def test_a_higher_order_op_makes_no_entry(run):
    def function(x):
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    (record,) = run(function, torch.ones(2)).cache
    assert record.status == "uncacheable"


# -- fingerprints ------------------------------------------------------------------------------------------------------


def copy_of(made: types.FunctionType, **names: object) -> types.FunctionType:
    return types.FunctionType(made.__code__, {**made.__globals__, **names}, made.__name__, None, made.__closure__)


def test_equal_functions_have_equal_fingerprints():
    assert fingerprint(my_pass) == fingerprint(copy_of(my_pass))
    assert fingerprint(with_constant(1.0)) == fingerprint(with_constant(1.0))
    assert fingerprint(functools.partial(my_pass, 1)) == fingerprint(functools.partial(my_pass, 1))
    assert fingerprint({1, 2, 3}) == fingerprint({3, 2, 1})


def test_what_a_function_uses_is_part_of_it():
    assert fingerprint(with_constant(1.0)) != fingerprint(with_constant(2.0))
    assert fingerprint(my_pass) != fingerprint(copy_of(my_pass, helper=lambda: 3))
    assert fingerprint(functools.partial(my_pass, 1)) != fingerprint(functools.partial(my_pass, 2))
    assert fingerprint(torch.ones(2)) != fingerprint(torch.zeros(2))
    assert fingerprint(1) != fingerprint(1.0) != fingerprint(True)


@pytest.mark.parametrize("value", [torch.Generator(), open(__file__), iter([1]), torch.empty(2**20)])  # noqa: SIM115
def test_what_cannot_be_told_apart_has_none(value):
    with pytest.raises(NoFingerprintError):
        fingerprint([value])


# -- what a pass may hold; $ is 5, or 7 --------------------------------------------------------------------------------


def made_by(source: str, k: int) -> object:
    """`p`, of a program that holds a number."""
    scope = {"__name__": __name__, "K": k, "torch": torch}
    exec(source.replace("$", str(k)), scope)
    return scope["p"]


HELD = {
    "a bound method of a dict": "look = {'k': $}.get\ndef p(): return look('k')",
    "a bound method of a list": "look = [$].__getitem__\ndef p(): return look(0)",
    "a bound method of a number": "look = ($).__add__\ndef p(): return look(0)",
    "a bound method of a pattern": "import re\nlook = re.compile('x' * 300 + '$').match\ndef p(): return look('5')",
    "an attribute of a list": "class L(list): pass\nheld = L([1]); held.k = $\ndef p(): return held.k",
    "a method of a dict": "class D(dict):\n  def k(self): return $\nheld = D()\ndef p(): return held.k()",
    "a method of a number": "class I(int):\n  def k(self): return $\nheld = I(3)\ndef p(): return held.k()",
    "a factory of defaults": (
        "import collections\nheld = collections.defaultdict(lambda: $)\ndef p(): return held['x']"
    ),
    "a method of a named tuple": (
        "import typing\nclass N(typing.NamedTuple):\n  a: int = 1\n  def k(self): return $\n"
        "held = N()\ndef p(): return held.k()"
    ),
    "a member of an enumeration": (
        "import enum\nclass E(enum.Enum):\n  A = $\n  def __repr__(self): return 'A'\ndef p(): return E.A.value"
    ),
    "a method of an enumeration": (
        "import enum\nclass E(enum.Enum):\n  A = 1\n  def k(self): return $\nheld = E.A\ndef p(): return held.k()"
    ),
    "a queue of a class of its own": (
        "import collections\nclass Q(collections.deque): pass\nheld = Q([$])\ndef p(): return held[0]"
    ),
    "a generator of a class of its own": (
        "import random\nclass R(random.Random): pass\nheld = R($)\ndef p(): return held.random()"
    ),
    "slots": "class S:\n  __slots__ = ('k',)\nheld = S(); held.k = $\ndef p(): return held.k",
    "slots of a base": (
        "class S:\n  __slots__ = ('k',)\nclass T(S): pass\nheld = T(); held.k = $\ndef p(): return held.k"
    ),
    "an attribute of a metaclass": "class M(type):\n  K = $\nclass A(metaclass=M): pass\ndef p(): return A.K",
    "metadata of a field": (
        "import dataclasses\n@dataclasses.dataclass\nclass C:\n"
        "  k: int = dataclasses.field(default=1, metadata={'k': $})\ndef p(): return dataclasses.fields(C)[0]"
    ),
    "an attribute of a function": "def helper(): pass\nhelper.k = $\ndef p(): return helper.k",
    "a function under another's name": (
        "import functools\n@functools.wraps(torch.nn.functional.relu)\ndef g(*a): return $\ndef p(): return g()"
    ),
    "a closure under another's name": (
        "import functools\ndef mk(k):\n  @functools.wraps(torch.relu)\n  def g(*a): return k\n  return g\n"
        "g = mk($)\ndef p(): return g()"
    ),
    "a function in a decorator of torch's": "@torch.no_grad()\ndef p(): return $",
    "a function without a module": "scope = {}\nexec('def g(): return $', scope)\ng = scope['g']\ndef p(): return g()",
    "a cached property": (
        "import functools\nclass A:\n  @functools.cached_property\n  def k(self): return $\n"
        "held = A()\ndef p(): return held.k"
    ),
    "a function for each type": (
        "import functools\n@functools.singledispatch\ndef g(x): return 0\n@g.register\ndef _(x: int): return $\n"
        "def p(): return g(1)"
    ),
    "a line in a try": (
        "def g(): raise ValueError\nif $ == 5:\n  def p():\n    try:\n      g()\n      g()\n"
        "    except ValueError: return 1\nelse:\n  def p():\n    try:\n      g()\n"
        "    except ValueError: return 1\n    else: g()"
    ),
    "stars of an argument": "if $ == 5:\n  def p(a, *b): return b\nelse:\n  def p(a, **b): return b",
    "the sign of nan": "held = float('nan') if $ == 5 else -float('nan')\ndef p(): return held",
    "an attribute of a tensor": "held = torch.zeros(2); held.k = $\ndef p(): return held.k",
    "strides of a tensor": "held = torch.empty_strided((2, 2), ($, 1)).fill_(0)\ndef p(): return held",
    "a tensor without content": "held = torch.empty($, device='meta')\ndef p(): return held",
    "a conjugated tensor": "held = torch.tensor([1 + $j]).conj()\ndef p(): return held",
    "a version that a base has": (
        "class B:\n  cache_version = '1'\nclass A(B):\n  def __call__(self): return $\np = A()"
    ),
    "an environment variable": "import os\ndef p(): return os.environ['GRAPHEX_TESTED']",
    "its globals": "def p(): return globals()['K']",
    "its globals, by an attribute": "def p(): return p.__globals__['K']",
    "a file": "def p(): return open('$').read()",
    "an object nested deeply": "held = []\nfor _ in range(5000): held = [held]\nheld.append($)\ndef p(): return held",
}


@pytest.mark.parametrize(
    "asked", ["os.path.exists('x')", "os.listdir()", "Path('x').is_file()", "list(Path('x').glob('*'))"]
)
def test_a_pass_that_asks_which_files_there_are_has_no_fingerprint(asked):
    with pytest.raises(NoFingerprintError, match="what that gives is not known"):
        fingerprint(made_by(f"import os\nfrom pathlib import Path\ndef p(): return {asked}", 5))


@pytest.mark.parametrize("held", HELD)
def test_what_a_pass_holds_is_part_of_it_or_it_has_no_fingerprint(held):
    try:
        first, again, other = (fingerprint(made_by(HELD[held], k)) for k in (5, 5, 7))
    except NoFingerprintError:
        return
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    "held",
    [
        *("a bound method of a dict", "a bound method of a pattern", "a method of a dict", "a method of a named tuple"),
        *("a member of an enumeration", "a factory of defaults", "a cached property", "an attribute of a function"),
        *("a function under another's name", "a closure under another's name", "a function in a decorator of torch's"),
    ],
)
def test_what_python_shows_has_a_fingerprint(held):
    assert fingerprint(made_by(HELD[held], 5))


USES = {
    "its value": "import mine\ndef p(): return mine.K",
    "what is in it": "import mine\ndef p(): return mine.HELD['k']",
    "its value by name": "import mine\ndef p(): return getattr(mine, 'K')",
    "its value by a name that is computed": "import mine\nname = 'K'\ndef p(): return getattr(mine, name)",
    "its value among its names": "import mine\ndef p(): return vars(mine)['k'.upper()]",
    "its function": "import mine\ndef p(): return mine.value()",
    "its value in an import": "def p():\n  import mine\n  return mine.K",
    "its value in another module": "import torch\ntorch.mine = torch.mine_of(K)\ndef p(): return torch.mine",
}


@pytest.mark.parametrize("use", USES)
def test_what_a_pass_uses_of_a_module_is_part_of_it(use, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("K = 0\nHELD = {}\ndef value(): return K\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch, "mine", None, raising=False)
    monkeypatch.setattr(torch, "mine_of", float, raising=False)
    found = []
    for k in (5, 5, 7):
        mine = importlib.import_module("mine")
        mine.K, mine.HELD["k"] = k, k
        found.append(fingerprint(made_by(USES[use], k)))
    monkeypatch.delitem(sys.modules, "mine")
    assert found[0] == found[1] != found[2]


def test_a_module_that_is_not_loaded_yet_has_none(tmp_path, monkeypatch):
    (tmp_path / "not_loaded.py").write_text("K = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(NoFingerprintError, match="imports 'not_loaded'"):
        fingerprint(made_by("def p():\n  import not_loaded\n  return not_loaded.K", 5))


def test_a_module_named_like_one_of_pythons_is_the_users(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "this", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for k in (5, 7):
        (tmp_path / "this.py").write_text(f"def value(): return {k}{' ' * k}\n")
        importlib.invalidate_caches()
        found.append(fingerprint(importlib.import_module("this").value))
        del sys.modules["this"]
    assert found[0] != found[1]


def test_a_pass_that_cannot_be_looked_through_runs(run):
    held: list[object] = []
    for _ in range(5000):
        held = [held]

    def double(gm, inputs, config, held=held):
        (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
        node.target = torch.ops.aten.abs.default

    journal = run(function, torch.ones(2), post_grad_custom_post_pass=double)
    assert asked(journal) == ["uncacheable"]
    assert [each.status for each in journal.passes if each.name == "double"] == ["changed"]
