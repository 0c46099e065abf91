"""Report kernels that may run at one time and together need more cores than the device has.

Changes nothing. What it found is in the journal, as data and as text.
"""

from __future__ import annotations

import warnings

from torch import Tensor

from graphex.analysis.deadlock import deadlock_risks, needing
from graphex.device import device_of
from graphex.errors import GraphexWarning
from graphex.passes.base import GraphPass, Work
from graphex.records import DeadlockChecked


class CheckDeadlocks(GraphPass):
    name = "check_deadlocks"
    option = "deadlock_check"

    def apply(self, work: Work) -> None:
        values = (node.meta.get("val") for node in work.graph.nodes)
        device = device_of({value.device for value in values if isinstance(value, Tensor)})
        cores, checked = device.cores(), len(needing(work.graph))
        if cores is None:
            reason = f"nothing is known about the cores of the device '{device.name}'"
            work.note(lambda graph, _: DeadlockChecked(graph, "not checked", checked, reason=reason))
            return
        risks = tuple(deadlock_risks(work.graph, cores))
        status = "risk" if risks else "clean"

        def verdict(graph: str, _: str) -> DeadlockChecked:
            record = DeadlockChecked(graph, status, checked, (cores.aicore, cores.vectorcore), risks)
            if risks:
                warnings.warn(f"graphex: {record}", GraphexWarning, stacklevel=2)
            return record

        work.note(verdict)
