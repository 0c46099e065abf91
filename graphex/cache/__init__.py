"""The cache: what one process compiled is what the next one loads.

    keys        everything that a compiled graph depends on, part by part; the first part in which two keys differ
    sources     a user's functions (passes, rules, decompositions) as text that changes when they do; names in code
    graphs      FX graphs as plain data, with the fake tensors, sizes and notes on their nodes
    artefacts   a compiled graph as plain data: the graph after all passes, its regions' code, its records, its guards;
                regions that another process compiles while this one runs without them
    store       files: written as a whole, owned by this user, the least recently used removed first; archives
    warm        one graph of a compilation: look it up, or keep what was made of it; a graph of Dynamo's that leads to
                one of these, without AOTAutograd

A graph is looked up when Dynamo hands it over, and again when AOTAutograd does. On a hit no pass, no rule, no compiler
and no measurement runs. A graph that no key can tell from others is not stored, and a record says why.
"""
