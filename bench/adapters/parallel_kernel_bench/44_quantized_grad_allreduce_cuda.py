"""ParallelKernelBench's problem 44 with Gradwire: an allreduce of a gradient in blocks of 8-bit integers.

Each rank's gradient is rounded to int8 with one FP32 unit per block; the result is the mean of the rounded
gradients. A reduce-scatter sends the codes, and an all-gather sends the means in the tensor's type. The means
are not rounded to int8 again, which the problem's tolerance does not allow. The two-shot schedule rounds each
gradient once. A rank adds its own part of the gradient unrounded, so the solution is within the tolerance
with 4 or more ranks.
"""
import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.torch import communicator

_comm = None


def _communicator(tensor: Tensor):
    global _comm
    if _comm is None:
        _comm = communicator(device=tensor.device.index if tensor.is_cuda else "host")
    return _comm


@torch.no_grad()
def solution(flat_grad: Tensor, block_size: int) -> Tensor:
    comm, count, world = _communicator(flat_grad), flat_grad.numel(), dist.get_world_size()
    # Shards begin at blocks, so that the blocks are those of the whole tensor.
    share = -(-count // (world * block_size)) * block_size
    counts = [min(share, max(0, count - rank * share)) for rank in range(world)]
    stream = torch.cuda.current_stream().cuda_stream if flat_grad.is_cuda else 0
    gradient = flat_grad.contiguous().reshape(-1)
    means, out = gradient.new_empty(counts[dist.get_rank()]), torch.empty_like(gradient)
    spec = f"int8:block={block_size},scale=fp32,schedule=two_shot"
    comm.reduce_scatter(means, gradient, spec, counts=counts, stream=stream)
    exact = "bf16" if flat_grad.dtype == torch.bfloat16 else "fp32"
    comm.all_gather(out, means, exact, counts=counts, stream=stream)
    return out.reshape(flat_grad.shape)
