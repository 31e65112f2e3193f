#!/usr/bin/env python3
"""Checks the solutions of this folder as ParallelKernelBench does: on its inputs, within its tolerance.

    check.py --ranks 4 [--device cpu]          starts the ranks itself
    torchrun --nproc-per-node 4 check.py       under a launcher, on GPUs

The inputs are those of ParallelKernelBench (github.com/togethercomputer/ParallelKernelBench) for
--rows x --cols in BF16. The expected results are computed here, from the problems' definitions. In
ParallelKernelBench the solutions run with

    python run_local.py --nproc-per-node 4 --mode eval --measure-perf --problem 44 --solution cuda \\
        --solutions-dir .../bench/adapters/parallel_kernel_bench
"""
import argparse
import importlib.util
import os
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "integrations/python")]
from harness import ranks  # noqa: E402

TOLERANCE = 1e-2  # absolute, and relative to the expected value
E4M3_MAX = 448.0
DEADLINE_S = 240


def load(stem):
    spec = importlib.util.spec_from_file_location(f"solution_{stem[:2]}", HERE / f"{stem}_cuda.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.solution


def seeded(problem, rank, trial):
    import torch
    torch.manual_seed(42 + problem * 1000 + rank + trial * 1_000_003)


def all_ranks(make):
    """Returns every rank's input, which is a function of the rank."""
    import torch.distributed as dist
    return [make(rank) for rank in range(dist.get_world_size())]


def decoded_e4m3(codes):
    """Returns the numbers of E4M3 codes, in FP64: ldexp has the exact powers."""
    import torch
    bits = codes.view(torch.uint8).to(torch.int64)
    exponent, fraction = (bits >> 3) & 15, bits & 7
    significand = torch.where(exponent == 0, fraction, fraction + 8).double()
    value = significand * torch.pow(2.0, (exponent.clamp(min=1) - 10).double())
    return torch.where(bits >= 128, -value, value)


def nearest_e4m3(x):
    """Rounds FP64 values to E4M3 by search in the table of its numbers; ties go to the even code."""
    import torch
    table = decoded_e4m3(torch.arange(127, dtype=torch.uint8)).to(x.device)
    above = torch.searchsorted(table, x.abs().contiguous()).clamp(1, 126)
    low, high = table[above - 1], table[above]
    up = (x.abs() - low > high - x.abs()) | ((x.abs() - low == high - x.abs()) & (above % 2 == 0))
    return torch.where(up, high, low) * torch.sign(x)


class Failed(Exception):
    pass


def compare(name, got, expected):
    """Prints the largest difference. Raises Failed if values are outside the tolerance."""
    import torch
    import torch.distributed as dist
    if got.shape != expected.shape:
        raise Failed(f"{name}: the shape is {tuple(got.shape)}, expected {tuple(expected.shape)}")
    difference = (got.double() - expected.double()).abs()
    wrong = int((~(difference <= TOLERANCE + TOLERANCE * expected.double().abs())).sum())
    if wrong:
        worst = int((difference - TOLERANCE * expected.double().abs()).argmax())
        found, wanted = (float(values.reshape(-1)[worst]) for values in (got, expected))
        raise Failed(f"{name}: {wrong} of {got.numel()} values differ; the worst is {found:.6g}, expected "
                     f"{wanted:.6g}")
    if dist.get_rank() == 0:
        print(f"{name}: {got.numel()} values, largest difference {float(difference.max()):.2g}: match",
              flush=True)


def check_19(options, rank, trial):
    import torch

    def make(of):
        seeded(19, of, trial)
        return torch.randn(options.rows, options.cols, dtype=torch.bfloat16, device=options.device)

    inputs, block = all_ranks(make), 128
    codes, scales = load("19_blocked_fp8_quantize")(inputs[rank], block)
    blocks = torch.cat(inputs).double().reshape(-1, block)
    amax = blocks.abs().amax(dim=1)
    compare("19 scales", scales.reshape(-1), amax / E4M3_MAX)
    # The problem divides in FP32. A quotient within its rounding error of a tie may round to either side.
    quotient = (blocks.float() / (amax.float() / E4M3_MAX).unsqueeze(1)).double()
    got = decoded_e4m3(codes).reshape(-1, block).to(quotient.device)
    compare("19 codes", got, nearest_e4m3(quotient))


def check_44(options, rank, trial):
    import torch
    import torch.distributed as dist
    world, block = dist.get_world_size(), min(128, max(16, options.cols // 4))
    count = max(options.rows * options.cols, world * 64)

    def make(of):
        seeded(44, of, trial)
        return torch.randn(count, dtype=torch.bfloat16, device=options.device)

    if world < 4:
        raise Failed(f"44: the solution is within the tolerance with 4 or more ranks, not {world}")
    inputs = all_ranks(make)
    mean = torch.zeros(-(-count // block) * block, dtype=torch.float64, device=options.device)
    for gradient in inputs:
        padded = torch.zeros_like(mean)
        padded[:count] = gradient.double()
        blocks = padded.float().reshape(-1, block)  # the problem divides in FP32: quotients may be ties
        unit = blocks.abs().amax(dim=1, keepdim=True).clamp(min=1e-8) / 127
        mean += ((blocks / unit).round().clamp(-127, 127) * unit).reshape(-1).double() / world
    got = load("44_quantized_grad_allreduce")(inputs[rank], block)
    compare("44 means", got, mean[:count].to(torch.bfloat16))


def check_52(options, rank, trial):
    import torch
    import torch.distributed as dist
    world = dist.get_world_size()
    part = max(64, min(options.rows * 64, 4096))

    def make(of):
        seeded(52, of, trial)
        return torch.randn(part * world, dtype=torch.bfloat16, device=options.device)

    inputs = all_ranks(make)
    history = torch.full((16,), 1e-8, dtype=torch.bfloat16, device=options.device)
    mean = torch.zeros(part, dtype=torch.float64, device=options.device)
    exact = torch.zeros_like(mean)
    mine = slice(rank * part, (rank + 1) * part)
    for gradient in inputs:
        scale = torch.maximum(gradient.abs().max(), history.max()).float() / E4M3_MAX
        rounded = nearest_e4m3((gradient.float()[mine] / scale).double()).float() * scale
        mean += rounded.to(torch.bfloat16).double() / world
        exact += gradient.double()[mine] / world
    solution = load("52_fp8_reduce_scatter_grads")
    shard, updated = solution(inputs[rank], history)
    compare("52 shard", shard, mean)
    expected_history = history.clone()
    expected_history[-1] = inputs[rank].abs().max()
    compare("52 history", updated, expected_history)
    # Gradwire's fp8 does not have the problem's bits. It must be at least as close to the exact mean.
    shard, _ = solution(inputs[rank], history, spec="fp8")
    own, problems = [float((x.double() - exact).square().mean().sqrt()) for x in (shard, mean)]
    if own > 1.1 * problems:
        raise Failed(f"52 with spec fp8: the error is {own:.3g}, the problem's {problems:.3g}")


CHECKS = {19: check_19, 44: check_44, 52: check_52}


def run_rank(options):
    import torch
    import torch.distributed as dist
    rank = int(os.environ["RANK"])
    if options.device == "cuda":
        options.device = f"cuda:{rank % torch.cuda.device_count()}"
        torch.cuda.set_device(options.device)
    dist.init_process_group("gloo" if options.device == "cpu" else "nccl")
    try:
        for problem in options.problems or CHECKS:
            for trial in range(options.trials):
                CHECKS[problem](options, rank, trial)
    except Failed as error:
        print(f"check: rank {rank}: {error}", file=sys.stderr)
        return 1
    dist.barrier()
    dist.destroy_process_group()
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems", nargs="*", type=int, metavar="PROBLEM", help="19, 44, 52 (default: all)")
    parser.add_argument("--ranks", type=int, default=4, help="ranks to start, unless a launcher started them")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--cols", type=int, default=1024)
    parser.add_argument("--trials", type=int, default=1)
    options = parser.parse_args()
    for problem in options.problems:
        if problem not in CHECKS:
            parser.error(f"no solution of problem {problem}; there are {', '.join(map(str, CHECKS))}")
    if "RANK" in os.environ:
        return run_rank(options)
    return ranks.run([sys.executable, __file__, *sys.argv[1:]], options.ranks, "", DEADLINE_S)


if __name__ == "__main__":
    sys.exit(main())
