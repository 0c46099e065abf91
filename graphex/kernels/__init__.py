"""Triton kernels behind the ops of `graphex/ops`, one family a file, loaded when an op first runs on CUDA.

A launcher takes a call of its op (`ops.definition.Arguments`) and returns the result, or a `Refusal` where the
kernel was not written for such arguments; then the op's reference runs. Launches wait for nothing, so that they can be
captured in a CUDA graph.

How a call moves through this room: the op binds its arguments; the launcher looks a `LaunchPlan` up by their shapes and
strides, or makes one; the plan allocates the results and launches the kernel.

Read `layout.py` (tensors as rows, options as a kernel takes them), `arithmetic.py` and `launch.py` first, then a
family: `activations`, `norm`, `tokens`, `rotary`, `experts`, `grouped`. `linears` and `attention` try several
configurations of a job: `tuning.py` times them in the first call of a kind, never while a graph is captured, and keeps
the choice; `tuned/` has choices that come with graphex. `compiled.py` compiles kernels in threads, and finds those that
a process before has compiled.
"""
