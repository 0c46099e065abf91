"""Run every Python block of a document: Markdown (fences), reStructuredText (`code` directives) or plain text.

    python -m tests.harness.documents [--ascend] [--device cuda] README.md guide.rst ...

Each block is a program of its own in a folder of its own. A block that is no Python is passed over. Names that a block
uses and does not define are supplied, where `SUPPLIED` has them. With --ascend the blocks run under `graphex run`.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.harness.processes import run

SUPPLIED = {
    "torch": "import torch",
    "torchair": "import torchair",
    "torch_npu": "import torch_npu",
    "graphex": "import graphex",
    "model": "import torch; model = torch.nn.Linear(8, 8)",
    "register_replacement": "from torchair import register_replacement",
    "search_fn": "def search_fn(x):\n    return (x * 3).relu()",
    "replace_fn": "def replace_fn(x):\n    return x.relu() * 3",
    "example_inputs": "import torch; example_inputs = (torch.ones(2, 2),)",
    "fwd_only": "from torch._inductor.pattern_matcher import fwd_only",
    "_return_true": "def _return_true(match):\n    return True",
}

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_DIRECTIVE = re.compile(r"^( *)\.\. code(?:-block)?:: *(\w*)\n((?:\n|\1 +.*\n?)+)", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    language: str
    marker: str  # the text of an HTML comment on the line before
    line: int
    text: str


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a document, in their order. A text without any is searched for one listing."""
    text = page.read_text()
    found = False
    for match in (_DIRECTIVE if ".. code" in text else _FENCE).finditer(text):
        found = True
        before = text[: match.start()].rstrip().rsplit("\n", 1)[-1]
        marker = re.fullmatch(r"<!-- (.*) -->", before)
        line = text.count("\n", 0, match.start()) + 1
        yield Block(match[2], marker[1] if marker else "", line, textwrap.dedent(match[3]).lstrip("\n"))
    if not found and (listing := _listing(text)) is not None:
        yield listing


def _listing(text: str) -> Block | None:
    """The longest stretch of a text without fences that is Python and begins with an import."""
    lines = text.splitlines()
    for start, line in enumerate(lines):
        if re.match(r"(import|from) \w", line):
            for end in range(len(lines), start, -1):
                code = "\n".join(lines[start:end]) + "\n"
                if is_python(code):
                    return Block("python", "", start + 1, code)
    return None


def is_python(code: str) -> bool:
    try:
        compile(code, "<block>", "exec")
    except SyntaxError:
        return False
    return True


def undefined(code: str) -> set[str]:
    """Names that a program reads and binds nowhere."""
    read: set[str] = set()
    bound = set(dir(builtins))
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).split(".")[0])
    return read - bound


def program(block: Block) -> str:
    """The block with what it does not define before it."""
    names = sorted(undefined(block.text) & SUPPLIED.keys())
    return "".join(f"{SUPPLIED[name]}\n" for name in names) + block.text


def run_block(block: Block, folder: Path, *, ascend: bool = False, device: str = "simulated") -> tuple[int, str]:
    """The exit code of a block run as a script in `folder`, and what it printed."""
    script = folder / "block.py"
    script.write_text(program(block))
    runner = ["-m", "graphex", "run", "--device", device] if ascend else []
    done = run(*runner, script, cwd=folder, PYTHONWARNINGS="ignore")
    return done.returncode, done.stdout + done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("documents", nargs="+", type=Path)
    parser.add_argument("--ascend", action="store_true", help="run the blocks under `graphex run`")
    parser.add_argument("--device", default="simulated", help="what `graphex run` takes the npu for")
    options = parser.parse_args()
    failed = 0
    for document in options.documents:
        for block in blocks(document):
            name = f"{document.name}:{block.line}"
            if block.language not in ("python", "") or not is_python(block.text):
                print(f"{name}: passed over ({block.language or 'no language'})")
                continue
            with tempfile.TemporaryDirectory() as folder:
                code, printed = run_block(block, Path(folder), ascend=options.ascend, device=options.device)
                files = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())
            failed += code != 0
            print(f"{name}: exit {code}, wrote {[file for file in files if file != 'block.py']}")
            if code:
                print(textwrap.indent(printed, "    "))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
