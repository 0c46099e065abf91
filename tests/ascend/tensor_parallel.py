"""A tensor-parallel script as it is written for Ascend; `test_collectives.py` runs it in two processes."""

import sys

import torch
import torch.distributed as dist
import torch_npu
import torchair

import graphex

torch.npu.set_device(0)
dist.init_process_group(sys.argv[1])
rank, size = dist.get_rank(), dist.get_world_size()


def npu(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).npu()


def check(found: torch.Tensor, *wanted: float) -> None:
    assert found.device.type == "npu"
    assert found.cpu().tolist() == list(wanted), found.cpu()


total = npu(rank + 1.0, rank)
dist.all_reduce(total)
check(total, 3, 1)

parts = [torch.empty(1).npu() for _ in range(size)]
dist.all_gather(parts, npu(rank))
check(torch.cat(parts), 0, 1)

whole = torch.empty(4).npu()
dist.all_gather_into_tensor(whole, npu(rank, rank + 10))
check(whole, 0, 10, 1, 11)

same = npu(rank)
dist.broadcast(same, 1)
check(same, 1)

part = torch.empty(2).npu()
dist.reduce_scatter_tensor(part, npu(0, 1, 2, 3))
check(part, 4 * rank, 4 * rank + 2)

turned = torch.empty(2).npu()
dist.all_to_all_single(turned, npu(rank, rank + 10))
check(turned, 10 * rank, 10 * rank + 1)

if rank == 0:
    dist.send(npu(7), 1)
else:
    received = npu(0)
    dist.recv(received, 0)
    check(received, 7)
dist.barrier()

torch.manual_seed(0)
up, down, gamma, x = torch.randn(8, 16).npu(), torch.randn(16, 8).npu(), torch.randn(8).npu(), torch.randn(3, 8).npu()
mine = slice(rank * 8, (rank + 1) * 8)
my_up, my_down = up[:, mine].contiguous(), down[mine].contiguous()


class Layer(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(x @ my_up) @ my_down
        dist.all_reduce(hidden)
        return torch_npu.npu_rms_norm(hidden, gamma)[0]


model = torch.compile(Layer(), backend=torchair.get_npu_backend(), fullgraph=True)
with torch.no_grad():
    for _ in range(3):
        found = model(x)
wanted = torch_npu.npu_rms_norm(torch.relu(x @ up) @ down, gamma)[0]
torch.testing.assert_close(found.cpu(), wanted.cpu(), rtol=1e-4, atol=1e-4)
print(f"rank {rank}: {len(graphex.journal(model).graphs)} graph")
dist.destroy_process_group()
