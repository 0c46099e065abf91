"""The graph passes, each a class with one `apply`. `pipeline` has their order; read it first.

    place                                    scopes, records, waits and torch's streams become metadata and events
    clean                                    no-ops, redundant copies, dead code, common subexpressions
    fuse                                     lift idioms to named ops, fuse named ops; `graphex.fusion` has the rules
    experts, routers                         mixtures of experts as one op, and the choice of experts as another
    projections, projection_plans            linear layers of few rows, with the norms and gates around them
    updates, input_reinplace                 inputs are written in place again
    reinplace                                dead values too, and the parts of a concatenation where they belong
    rotary_write, rotary_attention           late rules that need a proven write in place: rotary embedding and cache
    streams                                  events between streams, deadlocks, branches for a second stream

`graphex.rewrite` says what a pass is.
"""

import sys

from graphex.rewrite import partition

sys.modules[f"{__name__}.partition"] = partition  # its deprecated name, kept for this milestone
