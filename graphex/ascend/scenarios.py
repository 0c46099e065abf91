"""The 64 scenarios npugraph_ex is tested with: where graphex does otherwise on purpose, and which it does not offer.

All others hold as they are: tests/ascend/test_conformance_*.py has a test with the number of each.
"""

from __future__ import annotations

BETTER: dict[int, tuple[str, str]] = {
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

_CACHE = "graphex does not keep compiled graphs between processes yet"

NOT_OFFERED: dict[int, str] = {
    13: "the simulated npu is one device; on GPUs tests/cuda has a second one",
    17: "tasks of a captured graph are not updated: another length is another key",
    18: "tasks of a captured graph are not updated: another length is another key",
    **dict.fromkeys(range(47, 59), _CACHE),
    59: "static kernels are binaries for the NPU",
}
