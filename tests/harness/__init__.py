"""What tests write with. No test module imports another: what two of them need is here, and pytest collects none of it.

compiling       compile a function, compare it with eager, ask its graph and its journal; first to read
comparing       compare two functions as a caller sees them
capture         compile for replays, and count captures and replays
streams         graphs on streams: place, compile, read the order and the events; random_streams makes them up
tape            a device that captures without a GPU; stream_tape adds streams, paper only writes them down
host_ops        custom ops that cannot be captured; pending_ops: ops in flight, and ops that keep what they are given
idioms          what models write; projections: linear layers; models: transformers; decoding: their decode steps;
                generating: their generation
opinfo          torch's samples of calls of every operator; extremes: numbers that compiled code may get wrong
kernels/        samples of calls, references in float64, kernels compiled for a GPU that is not there
reports         what reports are about; browser shows them
processes       Python and the command line in processes of their own
documents       programs in documentation; graph_def: a parser of dumped graphs
properties      settings of property tests
ascend          scenarios of npugraph_ex
cached          what the cache of compiled graphs said
"""
