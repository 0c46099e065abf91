"""Debugging aids that options switch on for one compilation, and the graphs that reports show.

`history` keeps snapshots of a graph, as data, before and after each pass. `dumps` writes graphs and tensors to files,
`verify` compares an optimised graph with the original on its first call (`tensors` holds the comparison, `repro` the
script that shows a mismatch), and `orders` runs a graph with streams in every order that its events allow.

Read `history` and `verify` first. This room writes records into the journal; `evidence` reads them.
"""
