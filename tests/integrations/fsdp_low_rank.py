"""Scenarios of PowerSGD over HSDP's replicas, on replicas x shards, against unsharded references."""
from __future__ import annotations

import math
from typing import Any, Dict, List

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import gradwire
import laws
from fsdp_training import SHAPES, Shapes, Sharded, Tensors, gradients_of, mean, meshes
from gradwire._process_group import communicator
from gradwire._reducer import orthonormalize, unpack
from rank import RANK, WORLD, check, say
from scenarios import scenario


class Reference:
    """Unsharded PowerSGD in float64: an independent implementation, with QR. Holds the mean residual."""

    def __init__(self, rank: int, seed: int = 0) -> None:
        self.factors: Tensors = {}
        self.residuals = {name: torch.zeros(shape).double() for name, shape in SHAPES.items()}
        for i, (name, shape) in enumerate(SHAPES.items()):
            cols = math.prod(shape[1:])
            rank_of = min(shape[0], cols, rank)
            if len(shape) > 1 and (shape[0] + cols) * rank_of * 2 < shape[0] * cols:
                first, flags = torch.zeros(cols, rank_of), torch.zeros(1, dtype=torch.int32)
                with gradwire.Communicator() as alone:
                    orthonormalize(alone, first.data_ptr(), [(cols, rank_of, i)], True, seed, 0,
                                   flags.data_ptr())
                self.factors[name] = first.double()

    @staticmethod
    def _orthonormal(matrix: torch.Tensor) -> torch.Tensor:
        q, r = torch.linalg.qr(matrix)
        return q * r.diagonal().sign()

    def step(self, gradients: Tensors) -> Tensors:
        """Returns the result for the mean gradients."""
        result = {}
        for name, g in gradients.items():
            result[name] = g
            if name in self.factors:
                m = (g + self.residuals[name]).view(g.shape[0], -1)
                p = self._orthonormal(m @ self.factors[name])
                q = m.t() @ p
                result[name] = (p @ q.t()).view(g.shape)
                self.residuals[name] = (m - p @ q.t()).view(g.shape)
                self.factors[name] = self._orthonormal(q)
        return result


def low_rank(mesh: Any, options: str, shapes: Shapes = SHAPES, **more: Any) -> Sharded:
    return Sharded(mesh, {"replicas": f"powersgd:{options}"}, shapes, **more)


def near(what: str, result: Tensors, expected: Tensors, most: float = 1e-5, least: float = 0.0) -> None:
    check(result.keys() == expected.keys(), f"{what}: {sorted(result.keys() ^ expected.keys())}")
    worst = max(laws.near(f"{what}: {name}", value.double(), expected[name].double(), most)
                for name, value in result.items())
    check(worst >= least, f"{what} is only {worst:.1e} off")


class Library:
    """The library's reducer of whole matrices, on all ranks."""

    def __init__(self, spec: str, shapes: Shapes) -> None:
        self.comm = communicator()
        self.reducer = gradwire.Reducer(self.comm, spec,
                                        [(n, s[0], math.prod(s[1:])) for n, s in shapes.items()])

    def step(self, gradients: Tensors) -> Tensors:
        result = {name: g.clone() for name, g in gradients.items()}
        self.reducer.allreduce(list(result.values()))
        return result

    def close(self) -> None:
        self.reducer.close()
        self.comm.close()


@scenario(2, 4, 8)
def factors_are_those_of_an_unsharded_run() -> None:
    for mesh in meshes():
        cases = [(rank, rank % 3, rank % 2 == 0) for rank in range(1, 9)] + [(2, 5, False), (4, 6, False)]
        # 8 ranks: empty shards.
        for rank, seed, by_columns in cases[:2] if WORLD == 8 else cases:
            options = f"rank={rank},seed={seed}"
            run, reference = low_rank(mesh, options, by_columns=by_columns), Reference(rank, seed)
            library = Library(f"powersgd:{options}", SHAPES)
            for step in range(4):
                own, what = gradients_of(seed, step), f"{options}, {tuple(mesh.shape)}, step {step}"
                result = run.step(own)
                near(f"{what}, the reference", result, reference.step(mean(own)))
                near(f"{what}, the library", result, library.step(own))
                near(f"{what}, Q", run.factors(), reference.factors)
            library.close()
            run.handle.close()
        say(f"{tuple(mesh.shape)}: within 1e-5 of unsharded references")


@scenario()
def dependent_columns_are_the_librarys() -> None:
    """Checks gradients of a smaller rank than the factors', and zeros."""
    shapes: Shapes = {"a": (60, 48), "b": (32, 64)}
    for mesh in meshes():
        for by_columns in (False, True):
            run, library = low_rank(mesh, "rank=4,seed=3", shapes, by_columns=by_columns), Library(
                "powersgd:rank=4,seed=3", shapes)
            for step in range(4):
                own = {n: g * (step != 2) for n, g in gradients_of(1, step, shapes, deficient=True).items()}
                theirs, result = library.step(own), run.step(own)
                for name, full in gradients_of(1, step, shapes).items():
                    worst = float((result[name] - theirs[name]).abs().max() / full.abs().max())
                    check(worst <= 1e-5, f"step {step}: {name} is {worst:.1e} off the library")
                for name, q in run.factors().items():
                    error = float((q.t() @ q - torch.eye(4)).abs().max())
                    check(error < 1e-6, f"step {step}: columns of {name} are off by {error:.1e}")
            library.close()
            run.handle.close()


@scenario()
def the_slow_axis_carries_a_twentieth() -> None:
    shapes: Shapes = {"weight": (512, 768), "other": (256, 512), "bias": (768,)}
    for mesh in meshes():
        sent: List[int] = []
        for replicas in ("fp32", "powersgd:rank=4,wire=int8", "powersgd:rank=4", "powersgd:rank=8"):
            run = Sharded(mesh, {"replicas": replicas}, shapes)
            slow = run.handle._communicators.of("replicas", mesh.get_group("replicas"), torch.device("cpu"))
            run.step(gradients_of(0, 0, shapes))
            before = slow.bytes_sent
            run.step(gradients_of(0, 1, shapes))
            sent.append(slow.bytes_sent - before)
            run.handle.close()
        check(max(sent[1:]) <= sent[0] / 20, f"{tuple(mesh.shape)}: {sent} bytes")


@scenario()
def an_infinite_gradient_stays_in_its_matrix() -> None:
    for mesh in meshes():
        for by_columns in (False, True):
            run = low_rank(mesh, "rank=2", by_columns=by_columns)
            run.step(gradients_of(0, 0))
            before, own = run.state(), gradients_of(0, 1)
            if RANK == WORLD - 1:
                own["even"][-1, 3] = math.inf
            result, after = run.step(own), run.state()
            for name in SHAPES:
                check(bool(result[name].isnan().all() if name == "even" else result[name].isfinite().all()),
                      f"{name}: {result[name]}")
            for kind in ("replica_residual", "factor"):
                same = [torch.equal(after[name][kind], before[name][kind]) for name in ("even", "uneven")]
                check(same == [True, False], f"{kind} of the infinite and another matrix: {same}")
            check(bool(run.step(gradients_of(0, 2))["even"].isfinite().all()), "NaN in the next step")
            run.handle.close()


@scenario()
def parameters_without_a_gradient_wait_and_bf16_gradients_are_close() -> None:
    torch.set_float32_matmul_precision("medium")  # products of factors stay in FP32
    for mesh in meshes():
        for dtype, missing, limits in ((None, (("even", "bias"), ("uneven",), ()), (1e-5,)),
                                       (torch.bfloat16, ((),), (2e-2, 1e-4))):
            policy, reference = MixedPrecisionPolicy(reduce_dtype=dtype), Reference(3)
            run = low_rank(mesh, "rank=3", policy=policy)
            for step in range(6 if dtype is None else 3):
                own = gradients_of(0, step)
                for name in missing[step % len(missing)]:
                    del own[name]
                near(f"step {step}", run.step(own), reference.step(mean(own)), *limits)
            run.handle.close()
    torch.set_float32_matmul_precision("highest")


@scenario()
def a_run_loaded_before_start_compresses_from_start() -> None:
    run = low_rank(meshes()[0], "rank=2,start=3")
    for step in range(2):
        run.step(gradients_of(0, step))
    states = laws.of_all_ranks(run.handle.state_dict())
    for mesh in meshes():
        other = low_rank(mesh, "rank=2,start=3")
        other.handle.load_state_dict(states)
        for step, count in ((2, 0), (3, 4)):
            other.step(gradients_of(0, step))
            check(len(other.factors()) == count, f"{tuple(mesh.shape)}: factors after step {step + 1}")
        other.handle.close()
    run.handle.close()


@scenario()
def a_skipped_step_changes_no_factor() -> None:
    run, states = low_rank(meshes()[0], "rank=2"), []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    run.handle.use_scaler(scaler, optimizer)
    for step in range(3):
        own = gradients_of(0, step)
        if step == 1:
            own["even"].fill_(math.inf)
        optimizer.zero_grad()
        scaler.scale(run.model(own)).backward()
        scaler.step(optimizer)
        scaler.update()
        states.append(run.state())
    for name in ("uneven", "even"):
        first, skipped, last = (state[name] for state in states)
        check(torch.equal(first["factor"], skipped["factor"]), f"the factor of {name}")
        check(torch.equal(first["replica_residual"] / 2, skipped["replica_residual"]), f"{name}'s residual")
        check(not torch.equal(skipped["factor"], last["factor"]), f"{name} is stuck")
    run.handle.close()


@scenario(2)
def the_library_and_fsdp_compress_the_same_matrices() -> None:
    """Compares which matrices have a factor, for shapes at the limits of the rule."""
    shapes: Shapes = {"small": (30, 30), "below": (31, 33), "least": (32, 32), "wide": (2, 700),
                      "narrow": (700, 2), "row": (1, 2000), "column": (2000, 1), "filter": (40, 4, 3, 3),
                      "vector": (3000,)}
    found: Dict[frozenset, str] = {}
    for options in ("rank=1", "rank=2,min_ratio=0", "rank=1,min_ratio=0.5", "rank=500,min_ratio=1",
                    "rank=8,min_ratio=15"):
        for wire in ("fp32", "int8", "int4", "int2", "topk,k=4,of=64"):
            spec, own = f"{options},wire={wire}", gradients_of(1, 0, shapes)
            library, run = Library(f"powersgd:{spec}", shapes), low_rank(meshes()[0], spec, shapes)
            library.step(own)
            run.step(own)
            tensors = unpack(library.reducer.save_state()).tensors
            theirs = {name for name, t in tensors.items() if "factor" in t.entries}
            check(run.factors().keys() == theirs, f"{spec}: {sorted(run.factors().keys() ^ theirs)}")
            found[frozenset(theirs)] = spec
            library.close()
            run.handle.close()
    check(len(found) >= 5, f"only {found}")
