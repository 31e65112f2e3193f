#!/usr/bin/env python3
"""Compares an unmodified program of torch.distributed with and without the NCCL interposer.

    interposed.py cuda|cpu libgradwire_nccl.so    cpu: with Gloo, which the interposer does not affect

The program trains a small model with DDP and sums two arrays, in two ranks. On cuda they share a GPU, which
NCCL accepts from ranks that seem to be on different hosts. Exits with 77 if Python lacks PyTorch.
"""
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile

DEADLINE_S = 50  # of each of two runs
WIDTH, STEPS = 1024, 10
SPEC = "bf16"


def run_rank(kind):
    """The unmodified program."""
    import torch
    import torch.distributed as dist
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    torch.manual_seed(7)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(6))).to(device)
    model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=8, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator(device).manual_seed(100 + dist.get_rank())
    losses = []
    for _ in range(STEPS):
        x = torch.randn(64, WIDTH, device=device, generator=generator)
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    sums = []
    for value in (1, 0.1):  # 4 MiB; 1 + 2 is exact in every format, 0.1 + 0.2 is not in BF16
        array = torch.full((1 << 20,), value * (dist.get_rank() + 1), device=device)
        dist.all_reduce(array)
        assert bool((array == array[0]).all())
        sums.append(float(array[0]))
    weights = sum(float(p.detach().double().sum()) for p in model.parameters())
    print(json.dumps({"rank": dist.get_rank(), "losses": losses, "sums": sums, "weights": weights}),
          flush=True)
    dist.destroy_process_group()


def run_program(kind, **environment):
    """Returns the results of the two ranks, and their messages. Exits if a rank fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1",
              "GLOO_SOCKET_IFNAME": "lo", "USE_LIBUV": "0", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "=lo",
              "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1",
              "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2", "NCCL_RAS_ENABLE": "0", **environment}
    with tempfile.TemporaryFile("w+") as output:
        ranks = [subprocess.Popen([sys.executable, __file__, kind], stdout=output, stderr=output,
                                  env={**os.environ, **shared, "RANK": str(rank),
                                       "NCCL_HOSTID": f"{os.getpid()}-{rank}"}) for rank in range(2)]
        try:
            codes = [rank.wait(DEADLINE_S) for rank in ranks]
        except subprocess.TimeoutExpired:
            codes = [f"none within {DEADLINE_S} s"]
        for rank in ranks:
            rank.kill()
        output.seek(0)
        lines = output.read().splitlines()
    print("\n".join(lines), flush=True)
    results = sorted((json.loads(line) for line in lines if line.startswith("{")), key=lambda r: r["rank"])
    if codes != [0, 0] or len(results) != 2:
        sys.exit(f"interposed: exit codes of the ranks: {codes}, with {environment or 'no interposer'}")
    return results, " ".join(lines)


def main():
    if "RANK" in os.environ:
        return run_rank(sys.argv[1])
    kind, library = sys.argv[1], str(pathlib.Path(sys.argv[2]).resolve())
    try:
        import torch  # noqa: F401
    except ImportError as error:
        print(f"NOT CHECKED: {error}")
        return 77
    (plain, other), _ = run_program(kind)
    (through, peer), messages = run_program(kind, LD_PRELOAD=library, GRADWIRE_NCCL_SPEC=SPEC)
    assert plain["weights"] == other["weights"] and through["weights"] == peer["weights"], "ranks differ"
    assert plain["sums"][0] == through["sums"][0] == 3, "1 + 2 is not 3"
    assert abs(plain["sums"][1] - 0.3) < 1e-6, "the program alone has lost bits"
    if kind == "cpu":
        assert through == plain, "the interposer changed a program that does not use NCCL"
    else:
        assert f"is sent as {SPEC} over 2 ranks" in messages, "the interposer has not seen a large allreduce"
        assert 1e-6 < abs(through["sums"][1] - 0.3) < 2e-3, f"0.1 + 0.2 was not sent as {SPEC}"
        assert abs(through["losses"][-1] / plain["losses"][-1] - 1) < 0.02, "the training differs"
    print("PASSED")
    return 0


if __name__ == "__main__":
    sys.exit(main())
