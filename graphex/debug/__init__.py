"""Debugging aids that options switch on for one compilation, and the snapshots of graphs that reports show.

`history` keeps a graph as data before and after each pass. `verify` compares an optimised graph with the original on
its first call, and `blame` finds what to leave out after a mismatch; `tensors` compares values. `scripts`
writes graphs as scripts that run by themselves, among them the one that shows a mismatch. `dumps` writes graphs and
tensors to files. `orders` runs a graph with streams in random orders that its events allow.

Read `history` and `verify` first. This room adds records to the journal; `evidence` shows them.
"""
