"""verify=True: on a graph's first call, run it as AOTAutograd gave it and as it is now, and compare.

Both are measured against a float64 run where the ops allow it. On a mismatch the passes are replayed one by one to
find the first that broke the graph; the graph before it is what runs from then on, and a script that shows the
difference is written. A pass with `preserves_results = False` becomes part of the reference: the graphs before and
after it are verified separately.
"""

from __future__ import annotations

import base64
import io
import random
import secrets
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter

from graphex.analysis import Aliases, is_collective, is_random
from graphex.analysis.aliasing import REGENERATED
from graphex.analysis.effects import UNINITIALISED, operator_of
from graphex.debug.graph_dump import NOT_WRITTEN, bindings_text, not_written
from graphex.debug.tensors import clone_together, difference, sharing
from graphex.env import write_text
from graphex.errors import one_line
from graphex.quoting import file_name, literal, value_text
from graphex.records import Verified
from graphex.rewrite.compilation import DebugFiles
from graphex.rewrite.runner import Runner
from graphex.runtime.codegen import Boxed, generate
from graphex.runtime.executable import build_executable, interpreted, written_constants
from graphex.runtime.program import Eager, ExecutableGraph, Program
from graphex.torch_private.dynamo import is_transformed
from graphex.torch_private.symbolic import pytree

# -- float64 -----------------------------------------------------------------------------------------------------------
# Run a graph in float64: the reference that both the original and the optimised graph are measured against.


_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
_BITS = frozenset({torch.ops.aten.view.dtype})  # the bytes of a float64 mean something else


class NotInFloat64Error(Exception):
    """The graph has something that cannot, or must not, be run in float64."""


class _Wide(Interpreter):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in _BITS:
            raise NotInFloat64Error(f"{target} looks at bits")
        args, kwargs = pytree.tree_map(
            lambda value: _WIDE.get(value, value) if _is_dtype(value) else value, (args, kwargs)
        )
        return super().call_function(target, args, kwargs)

    def fetch_attr(self, target: str) -> Any:
        return _widen(super().fetch_attr(target))


def run_in_float64(gm: GraphModule, args: list[Any]) -> tuple[list[Any] | None, list[Any], str]:
    """(outputs, inputs as the graph left them, why not): outputs are None if the graph cannot be run in float64."""
    if any(is_random(node) for node in gm.graph.nodes):
        return None, [], "random numbers differ between types"
    wide = [_widen(value) for value in args]
    try:
        with torch.no_grad():
            result = _Wide(gm).run(*wide)
    except Exception as error:  # any op may lack a float64 kernel
        return None, [], f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return pytree.tree_leaves(result), wide, ""


def _is_dtype(value: Any) -> bool:
    return isinstance(value, torch.dtype)


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in _WIDE:
        return value.detach().to(_WIDE[value.dtype])
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


# -- random_state ------------------------------------------------------------------------------------------------------
# The state of every random number generator that a call may draw from: two runs that start from it draw the same.


class RandomState:
    """A snapshot of torch's generators (CPU and devices), Python's, NumPy's and those of the user."""

    def __init__(self, generators: Iterable[torch.Generator] = ()) -> None:
        self._restorers: list[Callable[[], Any]] = [_restorer(torch.get_rng_state(), torch.set_rng_state)]
        for module in _device_modules():
            self._restorers.append(_restorer(module.get_rng_state_all(), module.set_rng_state_all))
        for generator in generators:
            self._restorers.append(_restorer(generator.get_state(), generator.set_state))
        self._restorers.append(_restorer(random.getstate(), random.setstate))
        if numpy := sys.modules.get("numpy.random"):
            self._restorers.append(_restorer(numpy.get_state(), numpy.set_state))

    def restore(self) -> None:
        for restore in self._restorers:
            restore()


def _restorer(state: Any, put_back: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: put_back(state)


def _device_modules() -> list[Any]:
    """`torch.cuda` and its like, once they are in use: asking them for their generators would start them."""
    modules = (getattr(torch, name, None) for name in ("cuda", "xpu", "npu"))
    return [
        module
        for module in modules
        if module is not None and hasattr(module, "get_rng_state_all") and getattr(module, "is_initialized", bool)()
    ]


# -- repro -------------------------------------------------------------------------------------------------------------
# A script that shows, by itself, that two versions of a graph disagree.


LARGEST_INPUTS = 16 * 2**20  # bytes of inputs that are still put into the script

_SCRIPT = '''"""Two versions of a graph, before and after a pass, that disagree. Written by graphex.

The script needs torch and whatever defines the custom ops in it (if any), not graphex.
"""

import base64
import importlib
import io
import math
import operator
import zlib

import torch

PASS = {name}
PROBLEM = {problem}


{not_written}

def before_pass():
{before}
    return forward


def after_pass():
{after}
    return forward


{inputs}


def values(tensor):
    is_packed = "float4" in str(tensor.dtype)
    return (tensor.view(torch.uint8) if is_packed else tensor).to(torch.complex128)


if __name__ == "__main__":
    print("the graphs before and after pass", ascii(PASS), "disagree:", ascii(PROBLEM)[1:-1])
    with torch.no_grad():
        given, given_again = example_inputs(), example_inputs()
        torch.manual_seed(0)
        wanted = before_pass()(list(given))
        torch.manual_seed(0)
        found = after_pass()(list(given_again))
    for kind, one, other in (("output", wanted, found), ("input", given, given_again)):
        for index, (a, b) in enumerate(zip(one, other)):
            if isinstance(a, torch.Tensor) and a.numel() and a.shape == b.shape:
                gap = (values(a) - values(b)).abs().max().item()
                print(kind, index, "largest difference:", gap)
            elif isinstance(a, torch.Tensor):
                print(kind, index, "shapes:", tuple(a.shape), tuple(b.shape))
            else:
                print(kind, index, a, b)
'''


def write_repro(
    name: str, problem: str, before: GraphModule, after: GraphModule, args: list[Any], files: DebugFiles
) -> Path:
    """Write the script beside the debug files, or into a fresh temporary directory, and say where it is."""
    directory = files.directory or Path(tempfile.mkdtemp(prefix="graphex_repro_"))
    base = f"repro_{file_name(name)}"
    path = directory / f"{base}.py"
    while path.exists():  # about another graph, or a pass whose name looks like this one's
        path = directory / f"{base}_{secrets.token_hex(4)}.py"
    text = _SCRIPT.format(
        name=literal(name),
        problem=literal(problem),
        not_written=NOT_WRITTEN,
        before=_function(before),
        after=_function(after),
        inputs=_inputs(args),
    )
    write_text(path, text)
    return path


def _function(gm: GraphModule) -> str:
    code = generate(gm)
    return "\n".join(f"    {line}" for line in f"{bindings_text(code)}\n\n{code.source}".splitlines())


def _inputs(args: list[Any]) -> str:
    """The inputs themselves if they are small enough, random ones of the same layout if not."""
    tensors = [value.detach().cpu() for value in args if isinstance(value, torch.Tensor)]
    if sum(tensor.untyped_storage().nbytes() for tensor in tensors) <= LARGEST_INPUTS:
        stream = io.BytesIO()
        torch.save(tensors, stream)
        data = literal(base64.b64encode(zlib.compress(stream.getvalue())).decode())
        load = f"saved = iter(torch.load(io.BytesIO(zlib.decompress(base64.b64decode({data})))))"
        return f"def example_inputs():\n    {load}\n    return [{', '.join(map(_saved, args))}]"
    shapes = ", ".join(_random(value) for value in args)
    remark = "# random: the real inputs are too large to keep here"
    return f"def example_inputs():  {remark}\n    torch.manual_seed(0)\n    return [{shapes}]"


def _saved(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return value_text(value, not_written)
    return f"next(saved).to({literal(str(value.device))})"


def _random(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return value_text(value, not_written)
    size, stride = tuple(value.shape), tuple(value.stride())
    extent = 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    place = f"device={literal(str(value.device))}"
    filled = f"torch.randn({extent}, {place}).to({value.dtype})"
    if "float4" in str(value.dtype):  # nothing is converted to two numbers in a byte
        filled = f"torch.randint(256, ({extent},), dtype=torch.uint8, {place}).view({value.dtype})"
    elif not (value.is_floating_point() or value.is_complex()):
        filled = f"torch.zeros({extent}, {place}, dtype={value.dtype})"
    return f"{filled}.as_strided({size}, {stride})"


# -- verify ------------------------------------------------------------------------------------------------------------


CODE_GENERATION = "code generation"


@dataclass(frozen=True)
class Version:
    """The graph after one pass (or before all of them)."""

    gm: GraphModule
    pass_name: str
    preserves_results: bool = True


@dataclass(frozen=True)
class Outcome:
    outputs: list[Any]
    inputs: list[Any]
    sharing: list[str]


@dataclass(frozen=True)
class Verdict:
    """`problem` is empty if the graphs agree; `reference` says what they were measured against."""

    problem: str
    error: float
    reference: str
    not_compared: tuple[str, ...] = ()


class Verifying(Program):
    """Verifies its first call and then is `program`, or what verification left of it."""

    def __init__(self, original: GraphModule, runner: Runner, graph: ExecutableGraph, program: Program) -> None:
        super().__init__(program.written)
        self.may_replay = program.may_replay
        self._original, self._runner, self._graph, self._program = original, runner, graph, program
        self._settled: Program | None = None

    def __call__(self, args: list[Any]) -> Any:
        if self._settled is None:
            if is_transformed():
                return self._program(args)  # the next call that has tensors to compare is verified
            self._settled = _Verification(self._original, self._runner, args).settle(self._program, self._roll_back)
        return self._settled(args)

    def replayed(self, args: tuple[Any, ...]) -> Any:
        return None if self._settled is None else self._settled.replayed(args)

    def free(self) -> None:
        (self._settled or self._program).free()

    def _roll_back(self, gm: GraphModule) -> Program:
        if self._graph.functional is not None:
            self._graph.functional.use(gm, gm.graph)
        return build_executable(replace(self._graph, gm=gm, lanes=None))


class _Verification:
    def __init__(self, original: GraphModule, runner: Runner, args: list[Any]) -> None:
        self.runner = runner
        self.args = args
        self.versions = _versions(original, runner)
        self.state = RandomState(value for value in args if isinstance(value, torch.Generator))
        self.constants = written_constants(original)
        self.made_again = original.graph.output_node().meta.get(REGENERATED, {})  # whose memory nobody sees

    def settle(self, executable: Program, roll_back: Callable[[GraphModule], Program]) -> Program:
        """The executable to use from now on. Random numbers go on from where they were before."""
        if reason := why_not_verified(self.versions[0].gm):
            self._record("refused", reason)
            return executable
        try:
            return self._settle(executable, roll_back)
        finally:
            self.state.restore()

    def _settle(self, executable: Program, roll_back: Callable[[GraphModule], Program]) -> Program:
        worst, references, unknown = 0.0, set(), dict[str, None]()
        for segment in _segments(self.versions):
            is_last = segment[-1] is self.versions[-1]
            verdict, culprit = self._check(segment, compiled=is_last)
            references.add(verdict.reference)
            unknown.update(dict.fromkeys(verdict.not_compared))
            worst = max(worst, verdict.error)
            if culprit is not None:
                return self._blame(segment, culprit, verdict, roll_back)
        said = f"not compared: {'; '.join(unknown)}" if unknown else ""
        self._record("equal", said, reference=", ".join(sorted(references)), worst_error=worst)
        return executable

    def _check(self, segment: list[Version], *, compiled: bool) -> tuple[Verdict, int | None]:
        """Compare the ends of a segment; on a mismatch find the first version that is wrong.

        The number returned is its place in the segment; one past the end blames the generated code.
        """
        reference = self._run(interpreted(segment[0].gm))
        exact, exact_inputs, why = run_in_float64(segment[0].gm, clone_together(self.args))
        said = "float64" if exact is not None else f"the original graph ({why})"

        def verdict(run: Boxed) -> Verdict:
            try:
                found = self._run(run)
            except Exception as error:  # a broken graph may fail in any way
                return Verdict(f"it fails with {one_line(error)}", float("inf"), said)
            return _compare(found, reference, exact, exact_inputs, said)

        last = generate(segment[-1].gm).function() if compiled else interpreted(segment[-1].gm)
        final = verdict(last)
        if not final.problem:
            return final, None
        for place, version in enumerate(segment[1:], start=1):
            found = verdict(interpreted(version.gm))
            if found.problem:
                return found, place
        return final, len(segment)

    def _run(self, run: Boxed) -> Outcome:
        """Run on copies of the inputs, from the same random state each time."""
        inputs = clone_together(self.args)
        saved = [constant.clone() for constant in self.constants]
        self.state.restore()
        with torch.no_grad():
            try:
                outputs = pytree.tree_leaves(run(list(inputs)))
                left = [constant.clone() for constant in self.constants]
            finally:
                for constant, value in zip(self.constants, saved, strict=True):
                    constant.copy_(value)
        seen = [None if place in self.made_again else value for place, value in enumerate(outputs)]
        return Outcome(outputs, inputs + left, sharing(seen, inputs + self.constants))

    def _blame(
        self, segment: list[Version], place: int, verdict: Verdict, roll_back: Callable[[GraphModule], Program]
    ) -> Program:
        before = segment[place - 1].gm
        name = segment[place].pass_name if place < len(segment) else CODE_GENERATION
        after = segment[min(place, len(segment) - 1)].gm
        self.state.restore()
        try:
            script = str(write_repro(name, verdict.problem, before, after, self.args, self.runner.compilation.files))
            way = f"Run {script} to see it"
        except Exception as error:  # no place to write to, for one: what matters is what runs from now on
            script, way = "", f"No script shows it: {one_line(error)}"
        self._record("mismatch", verdict.problem, name, verdict.reference, verdict.error, script)
        self.runner.compilation.fall_back(
            self.runner.graph_name,
            f"verification rolled back to the graph before '{name}'",
            f"{verdict.problem}. {way}",
        )
        return Eager(interpreted(before)) if name == CODE_GENERATION else roll_back(before)

    def _record(
        self,
        status: str,
        reason: str = "",
        pass_name: str = "",
        reference: str = "",
        worst_error: float = 0.0,
        repro: str = "",
    ) -> None:
        record = Verified(self.runner.graph_name, status, reason, pass_name, reference, worst_error, repro)
        self.runner.compilation.journal.add(record)


def why_not_verified(gm: GraphModule) -> str:
    """Why a graph cannot be run a second time; empty if it can."""
    for node in gm.graph.nodes:
        if is_collective(node):
            return f"'{node.name}' communicates with other processes"
        if isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() == "with_effects":
            return f"'{node.name}' has an effect that must happen once"
    return _why_not_comparable(gm)


def _why_not_comparable(gm: GraphModule) -> str:
    """Memory that nobody has written has other contents every time."""
    aliases = Aliases(gm.graph)
    for node in gm.graph.nodes:
        op = operator_of(node)
        if op is None or op._schema.name not in UNINITIALISED:
            continue
        if aliases.reaches_output(node) and not aliases.is_written(node):
            return f"'{node.name}' returns memory that nobody has written"
    return ""


def _versions(original: GraphModule, runner: Runner) -> list[Version]:
    """The graph before the first pass that changed it, and after each of them."""
    versions = [Version(original, "")]
    after = [step.before for step in runner.steps[1:]] + [runner.gm]
    for step, gm in zip(runner.steps, after, strict=False):
        versions.append(Version(gm, step.graph_pass.name, step.graph_pass.preserves_results))
    return versions


def _segments(versions: list[Version]) -> list[list[Version]]:
    """Cut where a pass changes results on purpose: each piece must compute the same from end to end."""
    segments: list[list[Version]] = [[]]
    for version in versions:
        if not version.preserves_results:
            segments.append([])
        segments[-1].append(version)
    return [segment for segment in segments if segment]


def _compare(
    found: Outcome, reference: Outcome, exact: list[Any] | None, exact_inputs: list[Any], said: str
) -> Verdict:
    if len(found.outputs) != len(reference.outputs):
        return Verdict(f"{len(found.outputs)} outputs instead of {len(reference.outputs)}", 0.0, said)
    worst, unknown = 0.0, []
    groups = (
        ("output", found.outputs, reference.outputs, exact),
        ("input", found.inputs, reference.inputs, exact_inputs if exact is not None else None),
    )
    for what, ours, theirs, truth in groups:
        for index, (mine, original) in enumerate(zip(ours, theirs, strict=True)):
            true = truth[index] if truth is not None and index < len(truth) else None
            problem, error = difference(mine, original, true)
            state = "" if what == "output" else ", as the graph leaves it"
            if error != error:
                unknown.append(f"{what} {index} ({problem})")
                continue
            worst = max(worst, error)
            if problem:
                return Verdict(f"{what} {index}{state}: {problem}", error, said)
    if found.sharing != reference.sharing:
        return Verdict(f"outputs share memory as {found.sharing} instead of {reference.sharing}", worst, said)
    return Verdict("", worst, said, tuple(unknown))
