"""Triton kernels behind the ops of `graphex/ops`, one family a file, loaded when an op first runs on CUDA.

A launcher takes a call of its op (`ops.definition.Arguments`) and returns the result, or `Declined(reason)` where the
kernel was not written for such arguments; then the op's reference runs. Launches wait for nothing, so that they can be
captured in a CUDA graph.

How a call moves through this room: the op binds its arguments; the launcher looks a `Plan` up by their shapes and
strides, or makes one (`layout.py`: which strided tensors are rows to a kernel, and how rows are cut into tiles); the
plan allocates the results and launches the kernel (`launch.py`), which does its arithmetic in `arithmetic.py`.

Read these three first, then a family: `gated`, `quant` with `quant_options`, `norm`, `embedding`, `rotary`, `tokens`.
`linears`, `attention` and `experts` have several configurations for a job: `tuning.py` times them in the first call of
a kind, never while a graph is captured, and `tuning_store.py` keeps the choice; `tuned/` has those that come with
graphex. `precompile.py` compiles the kernels of a whole graph before its first call.
"""
