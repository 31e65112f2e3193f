"""Tests PowerSGD over HSDP's replicas, on meshes of replicas x shards, against unsharded references."""
from __future__ import annotations

import copy
import math
import os
import pathlib
from typing import Any, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import gradwire
from gradwire._fsdp_state import folded
from gradwire._process_group import communicator
from gradwire._reducer import orthonormalize
from gradwire.fsdp import compress

from fsdp_failures import leave
from fsdp_numbers import violation
from fsdp_training import Run, difference, loss_of, residual_sums, whole
from rank import RANK, WORLD, check, refused, say

# Uneven and empty shards of rows, more than two dimensions, a vector, and a matrix too small for rank 8.
SHAPES = {"uneven": (61, 40), "short": (3, 90), "filter": (24, 8, 3, 3), "bias": (50,), "even": (96, 64),
          "small": (12, 20)}
PLAIN = {"gradients": "fp32", "weights": "fp32"}


def meshes() -> List[Any]:
    shapes = {2: [(2, 1)], 4: [(2, 2), (4, 1)], 8: [(2, 4)]}[WORLD]
    return [init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")) for shape in shapes]


def name_of(mesh: Any) -> str:
    return f"{mesh.shape[0]} x {mesh.shape[1]}"


class Matrices(nn.Module):
    """A module whose gradients in a step are given tensors, different on every rank."""

    def __init__(self, shapes: Dict[str, Tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape)))

    def forward(self, gradients: Dict[str, torch.Tensor]) -> torch.Tensor:
        return sum((getattr(self, name) * g).sum() for name, g in gradients.items())


def gradients_of(seed: int, step: int, shapes: Dict[str, Tuple[int, ...]], rank: int = RANK,
                 deficient: bool = False) -> Dict[str, torch.Tensor]:
    """Returns matrices of rank 10, whose singular values fall by 0.6, plus noise. deficient: of rank 2."""
    found = {}
    for i, (name, shape) in enumerate(shapes.items()):
        generator = torch.Generator().manual_seed(seed * 7 + i)
        own = torch.Generator().manual_seed(((seed * 100 + step) * 64 + rank) * 32 + i)
        rows, cols = shape[0], math.prod(shape[1:])
        inner = 2 if deficient else 10
        left, right = (torch.randn(n, inner, generator=generator) for n in (rows, cols))
        turned = left + (0 if deficient else 0.2) * torch.randn(rows, inner, generator=own)
        matrix = turned * 0.6**torch.arange(inner) @ right.t()
        if not deficient:
            matrix += 0.01 * torch.randn(rows, cols, generator=own)
        found[name] = matrix.view(shape)
    return found


class Reference:
    """Unsharded PowerSGD in float64: an independent implementation, with QR. Holds the mean residual."""

    def __init__(self, rank: int, shapes: Dict[str, Tuple[int, ...]], seed: int) -> None:
        self.factors: Dict[str, torch.Tensor] = {}
        self.residuals = {name: torch.zeros(shape).double() for name, shape in shapes.items()}
        for i, (name, shape) in enumerate(shapes.items()):
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

    def step(self, gradients: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
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


class Sharded:
    """Matrices under fully_shard() and compress()."""

    def __init__(self, mesh: Any, replicas: str, shapes: Dict[str, Tuple[int, ...]] = SHAPES,
                 by_columns: bool = False, policy: MixedPrecisionPolicy = MixedPrecisionPolicy()) -> None:
        self.model = Matrices(shapes)

        def place(parameter: nn.Parameter) -> Optional[Shard]:
            even = parameter.ndim > 1 and parameter.shape[1] % mesh.shape[1] == 0
            return Shard(1) if by_columns and even else None

        fully_shard(self.model, mesh=mesh, shard_placement_fn=place, mp_policy=policy)
        self.handle = compress(self.model, **PLAIN, timeout_s=60, replicas=replicas)

    def step(self, gradients: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
        self.model.zero_grad()
        self.model(gradients).backward()
        named = self.model.named_parameters()
        return {name: whole(p.grad).clone() for name, p in named if p.grad is not None}

    def factors(self) -> Dict[str, torch.Tensor]:
        return {name: entry["factor"] for name, entry in self.handle.state_dict()["tensors"].items()
                if "factor" in entry}


def mean(gradients: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
    total = {name: g.double() for name, g in gradients.items()}
    for g in total.values():
        dist.all_reduce(g)
    return {name: g / WORLD for name, g in total.items()}


def off(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def factors_are_those_of_an_unsharded_run() -> None:
    world = communicator()
    for mesh in meshes():
        worst = 0.0
        cases = [(rank, rank % 3, rank % 2 == 0) for rank in range(1, 9)] + [(2, 5, False), (4, 6, False)]
        # 8 ranks: empty shards.
        for rank, seed, by_columns in cases[:2] if WORLD == 8 else cases:
            spec = f"powersgd:rank={rank},seed={seed}"
            run, reference = Sharded(mesh, spec, by_columns=by_columns), Reference(rank, SHAPES, seed)
            library = gradwire.Reducer(world, spec, [(n, s[0], math.prod(s[1:])) for n, s in SHAPES.items()])
            for step in range(4):
                own = gradients_of(seed, step, SHAPES)
                result, expected = run.step(own), reference.step(mean(own))
                theirs = {name: g.clone() for name, g in own.items()}
                library.allreduce(list(theirs.values()))
                for name in SHAPES:
                    differences = off(result[name], expected[name]), off(result[name], theirs[name])
                    worst = max(worst, *differences)
                    check(max(differences) <= 1e-5, f"rank {rank}, {name_of(mesh)}, step {step}: {name} is "
                          f"{differences} off the reference and the library")
                for name, q in run.factors().items():
                    worst = max(worst, off(q, reference.factors[name]))
                    check(off(q, reference.factors[name]) <= 1e-5, f"rank {rank}: Q of {name} is off by "
                          f"{off(q, reference.factors[name]):.1e}")
            check(run.factors().keys() == reference.factors.keys(), f"rank {rank}: {run.factors().keys()}")
            library.close()
            run.handle.close()
        say(f"{name_of(mesh)}: up to rank {max(cases)[0] if WORLD < 8 else 2} within {worst:.1e} of unsharded references")
    world.close()


def dependent_columns_are_the_librarys() -> None:
    world = communicator()
    for mesh in meshes():
        for by_columns in (False, True):
            spec, shapes = "powersgd:rank=4,seed=3", {"a": (60, 48), "b": (32, 64)}
            run = Sharded(mesh, spec, shapes, by_columns)
            library = gradwire.Reducer(world, spec, [(n, *s) for n, s in shapes.items()])
            for step in range(4):
                own = gradients_of(1, step, shapes, deficient=True)
                if step == 2:
                    own = {name: torch.zeros_like(g) for name, g in own.items()}
                theirs = {name: g.clone() for name, g in own.items()}
                result = run.step(own)
                library.allreduce(list(theirs.values()))
                scale = max(float(g.abs().max()) for g in gradients_of(1, step, shapes).values())
                worst = max(float((result[n] - theirs[n]).abs().max()) / scale for n in shapes)
                check(worst <= 1e-5, f"step {step}: {worst:.1e}")
                for name, q in run.factors().items():
                    error = float((q.t() @ q - torch.eye(4)).abs().max())
                    check(error < 1e-6, f"step {step}: columns of {name} are off by {error:.1e}")
            library.close()
            run.handle.close()
    world.close()
    say("gradients of rank 2, and zeros: every factor of rank 4 stays orthonormal, results are the library's")


def replicas_have_the_same_bits() -> None:
    for mesh in meshes():
        run = Run({**PLAIN, "gradients": "int8", "replicas": "powersgd:rank=4"}, mesh=mesh)
        for step in range(4):
            run.step(step)
        for name, p in run.model.named_parameters():
            for tensor in (p, p.grad) if p.grad is not None else (p,):
                local = tensor.to_local().detach().contiguous()
                everybody = [torch.empty_like(local) for _ in range(mesh.shape[0])]
                dist.all_gather(everybody, local, group=mesh.get_group("replicas"))
                check(all(torch.equal(other, local) for other in everybody), f"{name}: replicas differ")
        run.close()
    say("after 4 steps weights and gradients have the same bits on all replicas")


def the_slow_axis_carries_a_twentieth() -> None:
    shapes = {"weight": (512, 768), "other": (256, 512), "bias": (768,)}
    elements = sum(math.prod(shape) for shape in shapes.values())
    for mesh in meshes():
        exact = 0
        for replicas in ("fp32", "powersgd:rank=4,wire=int8", "powersgd:rank=4", "powersgd:rank=8"):
            run = Sharded(mesh, replicas, shapes)
            slow = run.handle._communicators.of("replicas", mesh.get_group("replicas"), torch.device("cpu"))
            run.step(gradients_of(0, 0, shapes))
            before = slow.bytes_sent
            run.step(gradients_of(0, 1, shapes))
            sent = slow.bytes_sent - before
            run.handle.close()
            exact = exact or sent
            check(sent <= exact / 20 or replicas == "fp32", f"{name_of(mesh)}, {replicas}: {sent} of {exact}")
            say(f"{name_of(mesh)}, {replicas}: {sent} bytes to replicas, 1/{exact / sent:.0f} of FP32's, "
                f"{4 * sent / exact:.4f} bytes per parameter of {elements}")


def low_rank_loses_nothing() -> None:
    for mesh in meshes():
        for spec, arguments in (("powersgd:rank=2", {}), ("powersgd:rank=2,wire=int8", {}),
                                ("powersgd:rank=2,wire=int4,block=64", {"gradients": "int4"}),
                                ("powersgd:rank=2,start=2", {}), ("powersgd:rank=2", {"residual": "bf16"})):
            run = Run({**PLAIN, **arguments, "replicas": spec}, mesh=mesh)
            worst = max(violation(run, s) for s in range(4))
            limit = 1e-6 if "residual" not in arguments else 1e-2
            check(worst < limit, f"{name_of(mesh)}, {spec}, {arguments}: {worst:.1e}")
            check(float(residual_sums(run.handle)["blocks.0.up.weight"].abs().max()) > 0, "nothing was lost")
            run.close()
            say(f"{name_of(mesh)}, {spec}, {arguments}: conservation within {worst:.1e}")


def an_infinite_gradient_stays_in_its_matrix() -> None:
    for mesh in meshes():
        for by_columns in (False, True):
            run = Sharded(mesh, "powersgd:rank=2", by_columns=by_columns)
            run.step(gradients_of(0, 0, SHAPES))
            before = copy.deepcopy(run.handle.state_dict()["tensors"])
            own = gradients_of(0, 1, SHAPES)
            if RANK == WORLD - 1:
                own["even"][-1, 3] = math.inf
            result = run.step(own)
            after = run.handle.state_dict()["tensors"]
            for name in SHAPES:
                check(bool(result[name].isnan().all() if name == "even" else result[name].isfinite().all()),
                      f"{name}: {result[name]}")
            for kind in ("replica_residual", "factor"):
                check(torch.equal(after["even"][kind], before["even"][kind]), f"{kind} changed")
                check(not torch.equal(after["uneven"][kind], before["uneven"][kind]), f"{kind} is unchanged")
            check(bool(run.step(gradients_of(0, 2, SHAPES))["even"].isfinite().all()), "NaN in the next step")
            run.handle.close()
    say("an infinite gradient: NaN in its whole matrix, whose residual and factor are unchanged")


def parameters_without_a_gradient_wait() -> None:
    torch.set_float32_matmul_precision("medium")  # products of factors stay in FP32
    for mesh in meshes():
        run, reference = Sharded(mesh, "powersgd:rank=3"), Reference(3, SHAPES, 0)
        for step in range(6):
            own = gradients_of(0, step, SHAPES)
            for name in (("even", "bias"), ("uneven",), ())[step % 3]:
                del own[name]
            result, expected = run.step(own), reference.step(mean(own))
            check(result.keys() == expected.keys(), f"gradients of {result.keys()}")
            worst = max(off(result[name], expected[name]) for name in result)
            check(worst <= 1e-5, f"step {step}: {worst:.1e}")
        run.handle.close()
        policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
        rounded, exact = Sharded(mesh, "powersgd:rank=3", policy=policy), Reference(3, SHAPES, 0)
        for step in range(3):
            own = gradients_of(0, step, SHAPES)
            result, expected = rounded.step(own), exact.step(mean(own))
            worst = max(off(result[name], expected[name]) for name in result)
            check(1e-4 < worst <= 2e-2, f"reduce_dtype=bfloat16, step {step}: {worst:.1e}")
        rounded.handle.close()
    torch.set_float32_matmul_precision("highest")
    say("parameters without a gradient in some steps keep residual and factor; BF16 gradients are close")


def a_low_rank_checkpoint_continues_bit_for_bit() -> None:
    for mesh in meshes():
        for residual, start in (("fp32", 0), ("bf16", 0), ("fp32", 4)):
            arguments = {**PLAIN, "replicas": f"powersgd:rank=2,start={start}", "residual": residual}
            run = Run(arguments, mesh=mesh)
            for step in range(3):
                run.step(step)
            state = copy.deepcopy(run.handle.state_dict())
            model = {name: value.clone() for name, value in run.model.state_dict().items()}
            optimizer = copy.deepcopy(run.optimizer.state_dict())
            other = Run(arguments, mesh=mesh)
            other.step(99)
            other.model.load_state_dict(model)
            other.optimizer.load_state_dict(optimizer)
            other.handle.load_state_dict(state)
            for step in range(3, 6):
                check(run.step(step) == other.step(step), f"step {step}: another loss")
            check(difference(run.parameters(), other.parameters()) == 0.0, f"{residual}: other weights")
            run.close()
            other.close()
    say("checkpoint: factors and residuals continue bit for bit")


def a_run_loaded_before_start_compresses_from_start() -> None:
    run, states = Sharded(meshes()[0], "powersgd:rank=2,start=3"), [None] * WORLD
    run.step(gradients_of(0, 0, SHAPES))
    run.step(gradients_of(0, 1, SHAPES))
    dist.all_gather_object(states, run.handle.state_dict())
    for mesh in meshes():
        other = Sharded(mesh, "powersgd:rank=2,start=3")
        other.handle.load_state_dict(states)
        for step in (2, 3):
            other.step(gradients_of(0, step, SHAPES))
            check(len(other.factors()) == (0, 4)[step - 2], f"{name_of(mesh)}: factors after step {step + 1}")
        other.handle.close()


def a_skipped_step_changes_no_factor() -> None:
    mesh = meshes()[0]
    run = Sharded(mesh, "powersgd:rank=2")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    run.handle.use_scaler(scaler, optimizer)
    states = []
    for step in range(3):
        own = gradients_of(0, step, SHAPES)
        if step == 1:
            own["even"].fill_(math.inf)
        optimizer.zero_grad()
        scaler.scale(run.model(own)).backward()
        scaler.step(optimizer)
        scaler.update()
        states.append(copy.deepcopy(run.handle.state_dict()["tensors"]))
    for name in ("uneven", "even"):
        check(torch.equal(states[0][name]["factor"], states[1][name]["factor"]), f"the factor of {name}")
        halved = states[0][name]["replica_residual"] / 2
        check(torch.equal(halved, states[1][name]["replica_residual"]), f"the residual of {name}")
        check(not torch.equal(states[1][name]["factor"], states[2][name]["factor"]), f"{name} is stuck")
    run.handle.close()
    say("a step that GradScaler skips leaves factors unchanged and rescales residuals")


def the_loss_is_near_fp32s() -> None:
    losses = {}
    for replicas in ("fp32", "powersgd:rank=4", "powersgd:rank=8,wire=int8"):
        run = Run({**PLAIN, "replicas": replicas}, mesh=meshes()[0], lr=0.05)
        total = torch.tensor([run.step(step) for step in range(120)][-10:]).double().mean()
        dist.all_reduce(total)
        losses[replicas] = float(total) / WORLD
        run.close()
    exact, *others = losses.values()
    check(exact < 1.5 and all(abs(loss - exact) < 0.2 for loss in others), f"losses {losses}")
    say("120 steps: " + ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items()))


def low_rank_is_refused_where_it_cannot_work() -> None:
    mesh = meshes()[0]
    flat = Run()
    cases = [("powersgd:rank=4", "2-D mesh"), ("int4", "2-D mesh"), ("powersgd:wire=int9", "int9"),
             ("powersgd:rank=4,alternate=on", "alternate"), ("powersgd:rank=4,ef=off", "ef=off"),
             ("powersgd:rank=0", "rank"), ("powersgd:steps=3", "steps"), ("randk:ratio=0.1", "whole tensors")]
    errors = gradwire.BadArgument, gradwire.Unsupported
    for spec, text in cases:
        refused(lambda: compress(flat.model, replicas=spec), errors, text)
    run = Sharded(mesh, "powersgd:rank=4")
    run.step(gradients_of(0, 0, SHAPES))
    other = Sharded(mesh, "powersgd:rank=2")
    refused(lambda: other.handle.load_state_dict(run.handle.state_dict()), gradwire.BadArgument, "rank")
    plain = Sharded(mesh, "fp32")
    refused(lambda: plain.handle.load_state_dict(run.handle.state_dict()), gradwire.BadArgument, "drop")
    for r in (run, other, plain):
        r.handle.close()


def a_dead_replica_raises() -> None:
    run = Run({**PLAIN, "replicas": "powersgd:rank=4", "timeout_s": 6}, mesh=meshes()[0])
    run.step(0)
    loss = loss_of(run.model, 1, run.model.words)
    if RANK == WORLD - 1:
        leave()
    error = refused(loss.backward, gradwire.CommFailed, f"rank {WORLD - 1}", within_s=60)
    say(f"backward() raises: {error}")
    leave()


# ---- Another mesh: fsdp_test.py runs these one after the other, with a folder ------------------------------


def _mesh_of_environment() -> Any:
    replicas = int(os.environ["FSDP_REPLICAS"])
    return init_device_mesh("cpu", (replicas, WORLD // replicas), mesh_dim_names=("replicas", "shards"))


def saves_low_rank_for_another_mesh() -> None:
    folder = pathlib.Path(os.environ["FSDP_FOLDER"])
    for by_columns in (False, True):
        run = Sharded(_mesh_of_environment(), "powersgd:rank=2", by_columns=by_columns)
        for step in range(3):
            run.step(gradients_of(0, step, SHAPES))
        torch.save(run.handle.state_dict(), folder / f"state.{by_columns}.{RANK}")
        sums = _sums(run)
        if RANK == 0:
            torch.save((WORLD, sums), folder / f"sums.{by_columns}")
        run.handle.close()


def _sums(run: Sharded) -> Dict[str, torch.Tensor]:
    place, found = run.handle._place()["shard"], {}
    for name, entry in sorted(run.handle.state_dict()["tensors"].items()):
        found[name] = folded(entry, place, run.handle._params[name][0]).double()
        dist.all_reduce(found[name])
    return found


def loads_low_rank_from_another_mesh() -> None:
    folder = pathlib.Path(os.environ["FSDP_FOLDER"])
    for by_columns in (False, True):
        world, sums = torch.load(folder / f"sums.{by_columns}")
        states = [torch.load(folder / f"state.{by_columns}.{r}") for r in range(world)]
        run = Sharded(_mesh_of_environment(), "powersgd:rank=2", by_columns=by_columns)
        run.handle.load_state_dict(states)
        loaded = _sums(run)
        check(loaded.keys() == sums.keys() and len(sums) == 4, f"residuals of {loaded.keys()}")
        for name, total in sums.items():
            error = off(loaded[name], total)
            check(error < 1e-6, f"{name}: the sum changed by {error:.1e}")
        for name, q in run.factors().items():
            check(torch.equal(q, states[0]["tensors"][name]["factor"]), f"{name}: another factor")
        own = gradients_of(0, 3, SHAPES)
        result, after = run.step(own), _sums(run)
        for name, g in mean(own).items():
            came_out = WORLD * result[name].double() + after.get(name, 0.0)
            error = off(came_out, WORLD * g + sums.get(name, 0.0))
            check(error < 1e-6, f"{name}: the next step is {error:.1e} off conservation")
        run.handle.close()
    say(f"{world} ranks' low-rank state loaded by a mesh of {os.environ['FSDP_REPLICAS']} replicas of {WORLD}")
