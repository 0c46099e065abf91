"""Drop what nobody uses and what does nothing else.

    before:  a = mul(x, 2); b = add(x, 1); return b
    after:                  b = add(x, 1); return b

Writes, random ops (the next one would draw other numbers), asserts, collectives, scopes, events and every op that is
not known to be pure are effects and stay.
"""

from __future__ import annotations

from graphex.analysis import is_effectful
from graphex.passes.base import GraphPass, Work


class RemoveDeadCode(GraphPass):
    name = "remove_dead_code"
    rule = "unused"

    def apply(self, work: Work) -> None:
        if not work.allows(self.rule):
            return
        for node in reversed(list(work.graph.nodes)):
            if not node.users and not is_effectful(node):
                work.erase(node, rule=self.rule, because="nobody uses the value")
