"""The ground that every rewrite stands on; the passes themselves are in `graphex.passes`.

How a graph moves through this room: the runner keeps a copy of it, gives it to a pass as a `Work`, and afterwards
repairs the metadata of nodes that a user's pass has made, checks the graph, and records what was done; a pass of ours
that failed is undone by the copy. In the order to read:

base         a pass (`GraphPass`) and the object it works on (`Work`): the graph, its facts, the pen for the journal
runner       everything that happens around a pass: timing, checks, records, roll-back
metadata     values, source lines, streams and origins of nodes: handed on by passes, restored after a user's
adapter      every form in which a user may write a pass, turned into a `GraphPass`
partition    the proof that a node may move, asked by all passes that move nodes; a graph split into the largest parts
             that a compiler or a device supports
compilation  the options, the journal and the debug files that one compilation carries from room to room
"""
