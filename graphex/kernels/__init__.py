"""Triton kernels behind the ops of `graphex/ops`, one family a file, loaded when an op first runs on CUDA.

A launcher has the arguments of its op and returns its result, or `Declined(reason)` where the kernel was not written
for such arguments; then the op's reference runs. `layout.py` says which strided tensors are rows to a kernel.
Nothing here waits for the device or times anything, so every launch can be captured in a CUDA graph.
"""
