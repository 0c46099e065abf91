"""Regions: the parts of a graph that no rule fuses, compiled by Inductor, with graphex's fused ops inside.

    before:  h = mm(x, w); a = add(h, b); g = gelu(a); n = npu_rms_norm(g, gamma); index_put_(cache, ...)
    after:   g, n = region_0(x, w, b, gamma); index_put_(cache, ...)

How a graph moves through this room, after the passes that restore writes in place and before dead memory is reused:

    members         which nodes a region can hold, and why the others stay outside
    indices         what a region checks before it runs, so that it can hold nodes that go by indices
    grow            the largest convex sets of such nodes, cut between equal layers; what each takes and returns
    decompositions  what Inductor is given where its own code computes other numbers than eager
    compiler        Inductor, once for regions that are alike; its code is timed against the nodes one by one
    region          the module that runs in place of the nodes, checked in its first call
    stage           the pass: grow, compile, replace, record; dropout from seeds, so that a region can hold it

A region is functional but for writes to inputs on a CPU, so undoing one is running its nodes. Captured graphs, streams
and memory stay graphex's: a region is one node with a contract (`graphex.analysis.effects`).
"""
