#!/usr/bin/env python3
"""Compares Gradwire's PowerSGD with PyTorch's hook: 20 steps of random gradients on 2 and 4 ranks, from the
same first Q.

The hooks have different residuals: in Gradwire the error of the rank's projection, in PyTorch the distance to
the global approximation. The means of the residuals over the ranks are equal, and only the mean determines P,
Q and the result. So the averaged gradients must agree. PyTorch runs as in training: DDP on Gloo processes,
with DDP's bucket and hook. PyTorch's hook cannot compress before step 2, so both hooks send the first two
steps uncompressed.

Usage: powersgd_oracle_test.py POWERSGD_ORACLE_BINARY
"""
import datetime
import os
import pathlib
import pickle
import sys
import tempfile
import time

import numpy
import torch
import torch.distributed as dist
import torch.multiprocessing
from reducers import distance, gradients, run_ours
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as psgd

# Shapes in the order of DDP's bucket. Vectors and small matrices stay dense; a 4-D tensor is a matrix.
SHAPES = [(10,), (64, 48), (7, 5), (33, 129), (16, 3, 7, 7), (64, 48), (200, 20), (3,)]
STEPS, START, TOLERANCE = 20, 2, 1e-4


def run_exact(world: int, values: list, qs: list) -> list:
    """Computes PowerSGD in float64 on the mean over ranks, to attribute errors.

    The result depends on the mean only.
    """
    state = [(q.astype(numpy.float64).reshape(int(numpy.prod(s[1:])), -1) if q.size else None)
             for s, q in zip(SHAPES, qs)]
    error = [numpy.zeros(s) for s in SHAPES]
    outputs = []
    for number, step in enumerate(values):
        row = []
        for i, shape in enumerate(SHAPES):
            m = sum(step[r][i].astype(numpy.float64) for r in range(world)) / world
            if number >= START and state[i] is not None:
                m = (m + error[i]).reshape(shape[0], -1)
                p, _ = numpy.linalg.qr(m @ state[i])
                state[i] = m.T @ p
                error[i] = (m - p @ state[i].T).reshape(shape)
                m = (p @ state[i].T).reshape(shape)
            row.append(m)
        outputs.append(row)
    return outputs


def run_torch_rank(rank: int, world: int, store: str, approximation_rank: int, values: list, qs: list,
                   path: str):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world,
                            timeout=datetime.timedelta(seconds=60))
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1 << 30  # with several buckets the hook's callbacks abort in gloo

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            # DDP fills buckets in the reverse order of registration.
            self.weights = torch.nn.ParameterList(
                [torch.nn.Parameter(torch.zeros(s)) for s in reversed(SHAPES)])

        def forward(self, wanted):
            # The gradient of this sum with respect to w is g.
            return sum((w * g).sum() for w, g in zip(self.weights, wanted))

    model = torch.nn.parallel.DistributedDataParallel(Model(), bucket_cap_mb=1024)
    state = psgd.PowerSGDState(None, matrix_approximation_rank=approximation_rank, start_powerSGD_iter=START,
                               orthogonalization_epsilon=0)

    def hook(state, bucket):
        if state.iter == START and not state.q_memory_dict:
            shapes = [tuple(g.shape) for g in bucket.gradients()]
            assert bucket.is_last() and shapes == SHAPES, f"unexpected bucket layout {shapes}"
            by_shape = {}
            for shape, q in zip(shapes, qs):
                if q.size:
                    by_shape.setdefault((shape[0], int(numpy.prod(shape[1:]))), []).append(q)
            ordered = [torch.from_numpy(q.copy()) for group in by_shape.values() for q in group]
            state.q_memory_dict[bucket.index()] = torch.cat(ordered)
            p_size = sum(n * (q.size // m) for (n, m), group in by_shape.items() for q in group)
            state.p_memory_dict[bucket.index()] = torch.empty(p_size)
        return psgd.powerSGD_hook(state, bucket)

    model.register_comm_hook(state, hook)
    results = []
    for step in values:
        model.zero_grad()
        model([torch.from_numpy(g) for g in reversed(step[rank])]).backward()
        results.append([w.grad.numpy().copy() for w in reversed(model.module.weights)])
    if rank == 0:
        with open(path, "wb") as file:
            pickle.dump(results, file)
    dist.barrier()
    # Exits without destructors, because PyTorch 1.13's Reducer holds the GIL while it joins a thread that may
    # wait for the GIL. First waits for all ranks, because a rank that exits breaks the others' barrier.
    here = pathlib.Path(store).parent
    (here / f"rank_{rank}").touch()
    deadline = time.monotonic() + 60
    while any(not (here / f"rank_{r}").exists() for r in range(world)):
        assert time.monotonic() < deadline, "a rank did not get past the barrier"
        time.sleep(0.01)
    os._exit(0)


def main() -> int:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    failures = 0
    for world, rank in ((2, 1), (2, 4), (4, 2), (4, 4)):
        values = gradients(SHAPES, STEPS, world, seed=100 * world + rank)
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            qs, ours = run_ours(sys.argv[1], SHAPES, values, rank, START)
            compressed = sum(1 for q in qs if q.size)
            assert 4 <= compressed < len(SHAPES), f"{compressed} tensors compressed: the test does not test"
            torch.multiprocessing.start_processes(  # forked: importing torch costs more than the test
                run_torch_rank, (world, str(folder / "store"), rank, values, qs, str(folder / "torch")),
                nprocs=world, start_method="fork")
            with open(folder / "torch", "rb") as file:
                theirs = pickle.load(file)
        truth = run_exact(world, values, qs)
        worst = tensor_worst = our_error = their_error = 0.0
        for step in range(STEPS):
            worst = max(worst, distance(ours[step], theirs[step]))
            our_error = max(our_error, distance(ours[step], truth[step]))
            their_error = max(their_error, distance(theirs[step], truth[step]))
            for i in range(len(SHAPES)):
                tensor_worst = max(tensor_worst, distance([ours[step][i]], [theirs[step][i]]))
        for i, q in enumerate(qs):
            if q.size:  # compressed: the first compressed result is far from the plain mean
                exact = sum(values[START][r][i] for r in range(world)) / world
                assert distance([ours[START][i]], [exact]) > 0.05
        failures += not worst <= TOLERANCE
        print(f"{world} ranks, rank {rank}: relative difference over {STEPS} steps at most {worst:.1e} of the"
              f" gradient, {tensor_worst:.1e} of a tensor: {'ok' if worst <= TOLERANCE else 'TOO FAR'} (from"
              f" float64: ours {our_error:.1e}, PyTorch's {their_error:.1e})", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
