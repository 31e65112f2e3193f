"""ParallelKernelBench's problem 52 with Gradwire: a reduce-scatter of gradients that were rounded to FP8.

The problem fixes the rounding: E4M3 with one FP32 scale per rank, from a history of largest magnitudes.
Gradwire's fp8 has a power-of-two scale per 128 values, so its codes differ from the problem's. solution()
therefore rounds as the problem says and sends the values in BF16, which represents them. solution(...,
spec="fp8") lets Gradwire round: one byte per element on the wire, and a smaller error than the problem's, but
not the problem's bits.
"""
import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.torch import communicator

_E4M3_MAX = 448.0
_comm = None


def _communicator(tensor: Tensor):
    global _comm
    if _comm is None:
        _comm = communicator(device=tensor.device.index if tensor.is_cuda else "host")
    return _comm


def _round_e4m3(x: Tensor) -> Tensor:
    """Rounds FP32 values to the nearest E4M3 number, ties to even."""
    if hasattr(torch, "float8_e4m3fn"):
        return x.to(torch.float8_e4m3fn).float()
    step = torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent.clamp(min=-5) - 4)
    return ((x / step).round() * step).clamp(-_E4M3_MAX, _E4M3_MAX)


@torch.no_grad()
def solution(flat_grads: Tensor, amax_history: Tensor, spec: str = "bf16") -> "tuple[Tensor, Tensor]":
    comm = _communicator(flat_grads)
    history = torch.roll(amax_history, shifts=-1, dims=0)
    history[-1] = flat_grads.abs().max().to(history.dtype)
    if spec == "fp8":
        sent = flat_grads.contiguous()
    else:
        scale = history.max().float().clamp(min=1e-12) / _E4M3_MAX
        sent = (_round_e4m3(flat_grads.float() / scale) * scale).to(flat_grads.dtype)
    shard = flat_grads.new_empty(flat_grads.numel() // dist.get_world_size())
    stream = torch.cuda.current_stream().cuda_stream if flat_grads.is_cuda else 0
    # Each value is rounded once; a ring, which auto may choose, rounds partial sums again.
    comm.reduce_scatter(shard, sent, f"{spec}:schedule=two_shot", stream=stream)
    return shard, history
