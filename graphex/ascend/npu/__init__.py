"""The device "npu" where there is none: its memory is the host's, or "npu" is another name for a device that exists.

`kernels` and `graphs` simulate it, `mapped` gives the name to a GPU or to the CPU, `module` is `torch.npu`.
"""
