"""Triton kernels behind the ops of `graphex/ops`, one family a file, loaded when an op first runs on CUDA.

A launcher has the arguments of its op and returns its result, or `Declined(reason)` where the kernel was not written
for such arguments; then the op's reference runs. `layout.py` says which strided tensors are rows to a kernel.
Launches wait for nothing, so that they can be captured in a CUDA graph. Where several ways to compute the same compete,
`tuning.py` times them in the first call of a kind, never while a graph is captured. All kernels are started by
`starts.py`, which can also only compile them: `ahead.py` does so for a whole graph before its first call.
"""
