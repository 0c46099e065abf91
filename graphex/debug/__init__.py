"""Debugging aids that options switch on for one compilation, and the snapshots of graphs that reports show.

    history     a graph as data before and after each pass, with the ops that a device runs for each node
    verify      the optimised graph against the original, on its first call, and what to leave out after a mismatch;
                `tensors` compares values
    files       graphs as scripts that run by themselves, among them the one that shows a mismatch; dumps
    orders      a graph with streams, run in random orders that its events allow

A graph comes here from two sides: the runner gives its snapshots to `history`, and the runtime asks `verify`, `files`
and `orders` for what they put around a program (`runtime.program.Callbacks`). This room adds records to the journal;
`evidence` shows them. Read `history` and `verify` first.
"""
