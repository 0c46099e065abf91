"""What capture promises on every device: tests that take `where`, `host` and `fetched` and name no device.

A module `test_capture` imports them for each device, and the conftest.py beside it says where they run: on the
recording device in tests/runtime, on a GPU in tests/cuda, on the simulated npu in tests/ascend.
"""
