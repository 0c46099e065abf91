"""From an optimised graph to something that runs: generated code, device-graph capture, inputs and outputs.

`spelling` finds the cheapest way to call each op, `codegen` writes the straight-line program, `executable` decides how
a graph runs (eagerly, captured, observed), `capture` replays it as one device graph.
"""
