"""Ascend scripts on other devices: importing this serves `torch_npu`, `torchair`, `npugraph_ex` and `torch.npu`.

Where the real packages are installed nothing is replaced. The environment variable GRAPHEX_NPU says what the device
"npu" is: `simulated` (its memory is the host's; the default), `cuda` or `cpu`. `graphex run script.py` does the same
for a script that does not import this.
"""

from graphex.ascend.install import install

install()
