"""Calls of ops and kernels: samples, jobs, the comparison with references, and compilation for a GPU."""
