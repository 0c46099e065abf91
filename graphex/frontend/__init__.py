"""The front end: from Dynamo's graph to compiled programs. How a graph moves through this room:

    Dynamo's graph
      | dynamo_graph  calls that tracing would lose become ops: methods of streams, attention and its known masks
      | aot           AOTAutograd: one ATen graph for inference, or a joint graph; input mutations stay in it
      | partition     a joint graph is cut into a forward and a backward
      v
    ATen graphs
      | origin        why there is a graph: the function it is of, the graph break before it, the guard that failed
      | compiler      each graph: look it up in the cache, or passes, program, kernels
      v
    programs, which `aot` hands to AOTAutograd; one of `compiler` is kept for a process that has neither (`Portable`)

`exported` is the entrance for ATen graphs that did not come through Dynamo (`compile_fx`); it checks the inputs of
their calls. Read `aot`, then `compiler`.
"""
