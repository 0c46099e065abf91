"""From an optimised graph to a program that runs: generated code, captured and replayed as a device graph.

How a graph moves through this room:

    ExecutableGraph            the graph after all passes, its phase, its static inputs                 executable
      | generated              straight-line Python over kernels bound ahead                            codegen
      |                        below autograd; version counters as the user's program has them          program
      | divide                 around each node that a device graph cannot hold                         pieces
      v
    Program                    one protocol: call, written inputs, replayed, free                       program
        Eager                  nothing to capture: the generated code
        CapturedProgram        the whole graph, or one piece, as device graphs                          capture
        Piecewise              captured pieces and eager ones, in turn                                  pieces
        Padding                a CapturedProgram for a few sizes, calls padded to the next one          padding
      | LAYERS                 external streams, trial of a second stream, verification, and waiting for
      |                        regions that are compiled in the background                             streams
      v
    Bypass, StepBypass         replays go past AOTAutograd's runtime wrappers                           fast_replay

What a CapturedProgram does with a call:

    call 1 of a key      warm-up: run eagerly; allocator, autotuning and lazy initialisation settle
    call 2 of a key      capture: the device records the kernels of a run, on addresses that will stay
    call 3 ...           replay: fill the input buffers, launch the graph, take the results out

The key (`capture_plan`) holds the sizes and numbers of a call and the switches that choose kernels. It may have several
captured graphs, one for each set of parameters. `captured_graph` keeps them, least recently used first, and frees what
there is no room for. No key is made for a call that is like the one before: `guards` checks addresses and switches in
one call of C++ (`fits.cpp`), and `fast_replay` runs the replay body, which all replays share.

    inputs    parameters, marked and written inputs: captured by address; a new address captures again
              a tensor that comes a second time:     captured by address, until another one comes in its place
              every other input:                     copied into a private buffer by each call          buffers
    outputs   copied out of the graph's memory, unless clone_output=False hands that out itself
              what a forward saves, and gradients, stay in it until their holders let go

Captured graphs of one pool use the same memory for intermediates. So one call at a time fills, replays and takes, and a
replay on another stream waits for the last one (`captured_graph.Pool`). A piece hands a value to the next captured
piece at an address that is the same in every call. A value from an eager piece is copied to such an address, and back
if the captured piece writes to it and a later reader can see that.

A training step copies nothing in a usual loop. The backward is captured on the addresses where the forward's graph
keeps what it saves (`captured_graph.SavedMemory`). A graph is not replayed while such a value of its own, or of a graph
that was captured later in its pool, has another owner: the call runs eagerly, and after two of them (microbatches in
flight, gradients that add up) values are copied out, with a record.

A capture that fails, a call inside of another capture, of a dispatch mode or of a functorch transform, and a key whose
inputs move in every call run eagerly. The journal says why.

The modules stand on each other in this order: `codegen`, `guards`, `buffers`, `capture_plan`, `captured_graph`,
`program`, `fast_replay`, `capture`; `streams`, `pieces` and `padding` stand on these, and `executable` on all. Read
`program`, `executable`, `capture`, then `capture_plan`, `captured_graph` and `fast_replay`.
"""
