"""`torchair.logger` and `npugraph_ex.core.utils.logger`: loggers that write to stdout.

At DEBUG they show every graph that a pass has changed, because their level is also the level of graphex's own logger.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, TextIO

EVENT = 35
ours = logging.getLogger("graphex")


class StdoutHandler(logging.StreamHandler[TextIO]):
    """Writes to what is sys.stdout when it writes."""

    def __init__(self, name: str) -> None:
        logging.Handler.__init__(self)
        text = f"[%(levelname)s] {name.upper()}({os.getpid()},python):%(asctime)s [%(filename)s:%(lineno)d] %(message)s"
        self.setFormatter(logging.Formatter(text))

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stdout


class AscendLogger(logging.Logger):
    """A logger with the level EVENT and `warning_once`. Its default level is ERROR."""

    def __init__(self, name: str) -> None:
        super().__init__(name, logging.ERROR)
        self.propagate = False
        self._said: set[str] = set()
        self._graphs = StdoutHandler(name)
        self.addHandler(StdoutHandler(name))

    def setLevel(self, level: int | str) -> None:  # noqa: N802  (logging's name)
        super().setLevel(level)
        if hasattr(self, "_graphs"):
            ours.removeHandler(self._graphs)
            ours.addHandler(self._graphs)
            ours.setLevel(level)

    def event(self, message: str, *args: Any) -> None:
        self.log(EVENT, message, *args)

    def warning_once(self, message: str, *args: Any) -> None:
        if message not in self._said:
            self._said.add(message)
            self.warning(message, *args)


torchair = AscendLogger("torchair")
npugraph_ex = AscendLogger("npugraph_ex")
