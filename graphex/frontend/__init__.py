"""From Dynamo's graph to compiled programs.

    streams       stream and event calls that Dynamo leaves as method calls become ops that survive tracing
    attention     calls of scaled_dot_product_attention stay one op where that is faster
    aot           AOTAutograd: one ATen graph for inference, or a forward and a backward; input mutations stay in it
    compiler      each of these graphs: passes, program, kernels
    origin        why there is a graph: the function it is of, the graph break before it, the guard that failed
    exported      ATen graphs that did not come through Dynamo (`compile_fx`), and checks of a call's inputs

Read `aot`, then `compiler`.
"""
