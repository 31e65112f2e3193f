#!/usr/bin/python3
"""Tests gradwire.torch.Dion: its steps, what it conserves, its states, and that it is an optimizer like PyTorch's.

Ranks are threads of this process; ddp_dion.py has its states in a process group.
"""
from __future__ import annotations

import copy
import io
import pickle
import unittest
import warnings
from typing import Any, Callable, Dict, List, Sequence

import gradwire
import laws
import numpy as np
import torch
from gradwire._reducer import unpack
from gradwire.torch import Dion
from laws import same_bits
from thread_ranks import run_ranks
from torch.nn import Parameter

SHAPES = [(24, 40), (16, 3, 5), (9,), (40, 24)]
WIRES = ("fp32", "bf16", "int8", "int4:block=32")
TODAY = hasattr(torch.optim.Optimizer, "register_step_post_hook")


def gradients(rank: int, step: int) -> List[torch.Tensor]:
    generator = torch.Generator().manual_seed(step * 100 + rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def parameters() -> List[Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


class Trained:
    """Parameters and their optimizer."""

    def __init__(self, lr: float = 0.01, comm: Any = None, params: Any = None, **options: Any) -> None:
        self.params: List[Parameter] = parameters() if params is None else params
        self.rank = comm.rank if comm is not None else 0
        self.optimizer = Dion(self.params, lr, comm=comm, **{"rank": 4, **options})

    def steps(self, begin: int, end: int, without: Sequence[int] = (), given: Any = None) -> "Trained":
        """Takes steps in which the parameters `without` have no gradient on this rank."""
        for step in range(begin, end):
            values = gradients(self.rank, step) if given is None else given
            for i, (p, gradient) in enumerate(zip(self.params, values)):
                p.grad = None if i in without else gradient.to(p.dtype)
            self.optimizer.step()
        return self

    def state(self) -> Dict[Any, Any]:
        """Returns a copy of each parameter's state."""
        return copy.deepcopy(self.optimizer.state_dict()["state"])

    def values(self) -> List[torch.Tensor]:
        return [p.detach().clone() for p in self.params]


class Steps(unittest.TestCase):
    def trained(self, world: int, steps: int, lr: float = 0.01, **options: Any) -> List[Trained]:
        """Returns what each rank has trained. Checks that their parameters are equal."""
        ranks = run_ranks(world, lambda comm: Trained(lr, comm, **options).steps(0, steps))
        self.assertTrue(all(same_bits(rank.params, ranks[0].params) for rank in ranks))
        return ranks

    def test_ranks_agree_and_a_matrix_moves_by_the_norm_of_its_shape(self) -> None:
        for wire in WIRES:
            self.trained(2, 4, wire=wire)
            for p in self.trained(2, 1, lr=0.0, wire=wire)[0].params:
                if p.dim() > 1:
                    want = (4 * p.shape[0] / p[0].numel()) ** 0.5
                    self.assertAlmostEqual(float(p.grad.norm()), want, places=4)

    def test_orth_makes_the_singular_values_of_a_step_equal(self) -> None:
        for p in self.trained(2, 1, lr=0.0, orth=True, wire="int8")[0].params:
            if p.dim() > 1:
                values = torch.linalg.svdvals(p.grad.reshape(p.shape[0], -1))[:4]
                np.testing.assert_allclose(values, (p.shape[0] / p[0].numel()) ** 0.5, rtol=1e-5)

    def test_vectors_take_the_steps_of_adamw_with_a_scheduler(self) -> None:
        def body(comm: gradwire.Communicator) -> None:
            trained, reference = Trained(0.02, comm, adamw_lr=0.003, weight_decay=0.1), parameters()[2]
            adamw = torch.optim.AdamW([reference], lr=0.003, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
            schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step))
                          for o in (trained.optimizer, adamw)]
            for step in range(5):
                trained.steps(step, step + 1)
                reference.grad = (gradients(0, step)[2] + gradients(1, step)[2]) / 2
                adamw.step()
                for scheduler in schedulers:
                    scheduler.step()
            np.testing.assert_allclose(trained.values()[2], reference.detach(), rtol=1e-5, atol=1e-6)

        run_ranks(2, body)
        scheduled, other = Trained(0.02).steps(0, 1), Trained(0.5)
        scheduled.optimizer.param_groups[0]["lr"] = 0.01
        other.optimizer.load_state_dict(scheduled.optimizer.state_dict())
        self.assertEqual(other.optimizer.param_groups[0]["reference_lr"], 0.02)  # keeps the ratio

    def test_momentum_and_gradients_are_conserved(self) -> None:
        # With mu=1 a step takes nothing from the momentum: its sum over ranks is that of the mean gradients.
        for wire in ("fp32", "int8", "int4:block=32"):
            def body(comm: gradwire.Communicator) -> Any:
                trained, sent = Trained(comm=comm, wire=wire, mu=1.0), [torch.zeros(s) for s in SHAPES]
                for step in range(8):
                    # Matrix 0 is unused on rank 0 in odd steps, 1 on all ranks in some, 3 never.
                    missing = [i for i in (0, 1) if (i == 0 and step % 2 == 1 and comm.rank == 0) or
                               (i == 1 and step in (2, 3, 6))]
                    for i, gradient in enumerate(gradients(comm.rank, step)):
                        sent[i] += 0 if i in missing else gradient / comm.world
                    trained.steps(step, step + 1, missing)
                key = f"momentum_rank_{comm.rank}_of_{comm.world}"
                return sent, [state.get(key) for state in trained.state().values()]

            ranks = run_ranks(2, body)
            for i in (0, 1, 3):
                sent, kept = (sum(rank[part][i] for rank in ranks) for part in (0, 1))
                laws.near(f"{wire}, {i}", kept, sent, 1e-5)

    def test_a_parameter_that_no_rank_used_keeps_weights_and_state(self) -> None:
        for wire in WIRES:
            for world in (1, 2):
                def body(comm: gradwire.Communicator) -> None:
                    trained = Trained(comm=comm, wire=wire, weight_decay=0.1).steps(0, 3)
                    weights, state = trained.values(), trained.state()
                    after = trained.steps(3, 6, without=(0, 2)).state()
                    for i, p in enumerate(trained.params):
                        unused = i in (0, 2)
                        same = all(same_bits(state[i][key], after[i][key]) for key in after[i]
                                   if key != "step" or i == 2)
                        self.assertEqual([torch.equal(p, weights[i]), same, p.grad is None], [unused] * 3, i)

                with self.subTest(f"{wire}, {world} ranks"):
                    run_ranks(world, body)

    def test_a_parameter_that_some_ranks_used_counts_zeros_on_the_others(self) -> None:
        def body(comm: gradwire.Communicator) -> List[Parameter]:
            results = []
            for zeros in (False, True):
                trained = Trained(comm=comm)
                for step in range(4):
                    trained.steps(step, step + 1)
                    missing = (step % 4, (step + 1) % 4) if comm.rank == step % 2 else ()
                    given = [g * (i not in missing) for i, g in enumerate(gradients(comm.rank, step))]
                    trained.steps(step, step + 1, () if zeros else missing, given)
                results.append(trained.params)
            self.assertTrue(same_bits(*results))
            return results[0]

        self.assertTrue(same_bits(*run_ranks(2, body)))

    def test_opposite_gradients_are_used_on_all_ranks_alike(self) -> None:
        def body(comm: gradwire.Communicator) -> List[Parameter]:
            trained = Trained(comm=comm, weight_decay=0.1)
            for step in range(3):
                trained.steps(step, step + 1, given=gradients(0, step))
                before = trained.values()[2]
                trained.steps(step, step + 1, range(4) if comm.rank == 2 else (),
                              [torch.full_like(p, 1.0 - 2.0 * comm.rank) for p in trained.params])
                self.assertFalse(torch.equal(trained.params[2], before))  # as AdamW with a mean of zeros
            return trained.params

        results = run_ranks(3, body)
        self.assertTrue(same_bits(results[0], results[2]))

    def test_frozen_parameters_do_not_move_and_continue_when_thawed(self) -> None:
        def body(comm: gradwire.Communicator) -> None:
            params = parameters()
            for i in (0, 2):
                params[i].requires_grad_(False)
            trained = Trained(comm=comm, params=params, weight_decay=0.1)
            start = trained.values()
            trained.steps(0, 3, without=(0, 2))
            params[1].requires_grad_(False)  # its .grad stays
            frozen = trained.values()[1]
            for step in range(3, 6):
                params[3].grad = gradients(comm.rank, step)[3]
                trained.optimizer.step()
            self.assertTrue(same_bits(params[0], start[0]) and same_bits(params[2], start[2]))
            self.assertTrue(torch.equal(params[1], frozen) and params[1].grad is not None)
            momentum = trained.state()
            for p in params:
                p.requires_grad_(True)
            trained.optimizer._park()
            self.assertTrue(same_bits(momentum[1], trained.state()[1]))
            trained.steps(6, 9)
            self.assertFalse(any(torch.equal(p, q) for p, q in zip(params, start)))

        run_ranks(2, body)

    def test_trains_a_model_without_a_process_group(self) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
        x = torch.randn(256, 20)
        optimizer = Dion([{"params": [model[0].weight]},
                          {"params": [model[0].bias, *model[2].parameters()], "algorithm": "adamw",
                           "lr": 3e-3}], rank=8, wire="int8")
        calls: List[str] = []
        if TODAY:
            optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
            optimizer.register_step_post_hook(lambda *_: calls.append("post"))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
            loss.backward()
            return loss

        with torch.no_grad():
            losses = [float(optimizer.step(closure)) for _ in range(150)]
        self.assertLess(losses[-1], 0.4 * losses[0])
        self.assertEqual(calls, ["pre", "post"] * 150 if TODAY else [])


class States(unittest.TestCase):
    def continues(self, params: Any, load: Callable[[Dion], Any], want: Any) -> None:
        other = Trained(params=copy.deepcopy(params), seed=5)
        load(other.optimizer)
        self.assertTrue(same_bits(other.steps(3, 6).params, want))

    def test_a_state_has_the_shape_of_pytorchs_and_continues_bit_for_bit(self) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            trained = Trained(params=[Parameter(p.detach().to(dtype)) for p in parameters()]).steps(0, 3)
            state, stream = copy.deepcopy(trained.optimizer.state_dict()), io.BytesIO()
            self.assertEqual(set(state), {"state", "param_groups"})
            shapes = [{key: tuple(value.shape) for key, value in s.items()} for s in state["state"].values()]
            self.assertEqual(shapes[:3], [{"step": (), "momentum": (24, 40), "factor": (40, 4)},
                                          {"step": (), "momentum": (16, 3, 5), "factor": (15, 4)},
                                          {"step": (), "exp_avg": (9,), "exp_avg_sq": (9,)}])
            self.assertTrue(all(s["step"] == 3 for s in state["state"].values()))
            self.assertEqual(unpack(trained.optimizer._reducer.save_state()).steps, 3)
            torch.save(state, stream)
            stream.seek(0)
            loaded = torch.load(stream, **({"weights_only": True} if TODAY else {}))
            self.assertTrue(same_bits(loaded["state"], state["state"]))
            start = trained.values()
            own, other = copy.deepcopy((trained.params, trained.optimizer))
            copies = [(own, other), pickle.loads(pickle.dumps((trained.params, trained.optimizer)))]
            want = trained.steps(3, 6).params
            start = [Parameter(p) for p in start]
            self.continues(start, lambda o: o.load_state_dict(loaded), want)
            self.continues(start, lambda o: (o.load_state_dict(state), o.load_state_dict(
                copy.deepcopy(o.state_dict()))), want)
            for params, optimizer in copies:
                again = Trained(params=params)
                again.optimizer = optimizer
                self.assertTrue(same_bits(again.steps(3, 6).params, want))

    def test_states_continue_in_the_same_and_in_another_world(self) -> None:
        want = run_ranks(2, lambda comm: Trained(0.02, comm).steps(0, 6).values())[0]
        saved = run_ranks(2, lambda comm: (lambda t: (t.values(), copy.deepcopy(t.optimizer.state_dict())))(
            Trained(0.02, comm).steps(0, 3)))

        def body(comm: gradwire.Communicator) -> List[torch.Tensor]:
            trained = Trained(0.02, comm, [Parameter(p.clone()) for p in saved[0][0]])
            if comm.world == 2:
                trained.optimizer.load_state_dict(saved[comm.rank][1])
                return trained.steps(3, 6).values()
            trained.optimizer.load_state_dicts([state for _, state in saved])
            for step in range(3, 6):
                trained.steps(step, step + 1, given=[(a + b) / 2 for a, b in zip(
                    gradients(0, step), gradients(1, step))])
            return trained.values()

        for world, tolerance in ((2, 0.0), (1, 1e-4)):
            for values in run_ranks(world, body):
                for got, exact in zip(values, want):
                    torch.testing.assert_close(got, exact, rtol=tolerance, atol=tolerance)

    def test_getting_or_loading_a_fresh_state_changes_nothing(self) -> None:
        trained, plain = Trained(), Trained()
        self.assertTrue(trained.optimizer.state)  # PyTorch would otherwise take a step to make one
        state = copy.deepcopy(trained.optimizer.state_dict())
        self.assertIsNone(trained.optimizer._comm)
        trained.steps(7, 8)  # forgotten below
        with torch.no_grad():
            for p, q in zip(trained.params, plain.params):
                p.copy_(q)
        trained.optimizer.load_state_dict(state)
        self.assertTrue(same_bits(trained.steps(0, 3).params, plain.steps(0, 3).params))

    def test_a_copy_shares_a_given_communicator_and_a_pickle_is_refused(self) -> None:
        def body(comm: gradwire.Communicator) -> None:
            trained = Trained(comm=comm).steps(0, 1)
            other = Trained(comm=comm)
            other.params, other.optimizer = copy.deepcopy((trained.params, trained.optimizer))
            self.assertTrue(same_bits(trained.steps(1, 2).params, other.steps(1, 2).params))
            with self.assertRaisesRegex(TypeError, "state_dict"):
                pickle.dumps(trained.optimizer)

        run_ranks(2, body)

    def test_refuses_states_of_something_else(self) -> None:
        trained = Trained().steps(0, 3)
        before, state = trained.state(), copy.deepcopy(trained.optimizer.state_dict())
        damaged = copy.deepcopy(state)
        del damaged["state"][0]["momentum"]
        for optimizer, wrong, text in (
                (trained.optimizer, {**state, "gradwire": b""}, "earlier version"),
                (trained.optimizer, torch.optim.AdamW(trained.params).state_dict(), "another optimizer"),
                (Dion(parameters(), rank=8), state, r"factor has shape \(40, 4\).*another rank="),
                (trained.optimizer, damaged, "no momentum")):
            with self.assertRaisesRegex(gradwire.BadArgument, text):
                optimizer.load_state_dict(wrong)
        self.assertTrue(same_bits(before, trained.state()))


class Arguments(unittest.TestCase):
    def test_a_group_is_added_and_the_momentum_kept(self) -> None:
        def body(comm: gradwire.Communicator) -> None:
            params = parameters()
            optimizer = Dion([{"params": params[:2]}, {"params": []}], comm=comm, rank=4)
            trained = Trained(comm=comm, params=params[:2])
            trained.optimizer = optimizer
            before = trained.steps(0, 2).state()
            other = Parameter(torch.zeros(3, dtype=torch.bfloat16))
            for wrong, text in (({"params": params[2:], "algorithm": "sgd"}, "'sgd'"),
                                ({"params": [other]}, "one dtype"),
                                ({"params": params[2:], "lr": -1.0}, "lr must be")):
                with self.assertRaisesRegex(ValueError, text):
                    optimizer.add_param_group(wrong)
            optimizer.add_param_group({"params": params[2:], "lr": 0.5, "adamw_lr": 0.25})
            after = trained.state()
            self.assertTrue(same_bits(before, {i: after[i] for i in before}))
            trained.params = params
            start = trained.values()
            trained.steps(2, 3)
            self.assertFalse(any(torch.equal(p, q) for p, q in zip(params, start)))
            self.assertEqual(float(optimizer.state[params[0]]["step"]), 3)

        run_ranks(2, body)

    def test_layouts_and_odd_shapes_take_the_same_steps(self) -> None:
        def transposed(t: torch.Tensor) -> torch.Tensor:
            return t.detach().transpose(0, -1).contiguous().transpose(0, -1)

        other = Trained(torch.tensor(0.02), params=[Parameter(transposed(p)) for p in parameters()])
        for step in range(3):
            other.steps(step, step + 1, given=[transposed(g) for g in gradients(0, step)])
        self.assertTrue(same_bits(Trained(0.02).steps(0, 3).params, other.params))
        self.assertIsNone(Dion([{"params": []}]).step())
        odd = Trained(params=[Parameter(torch.ones(s)) for s in ((), (0,), (1, 1), (5, 0), (1, 7), (7, 1))])
        odd.optimizer.zero_grad()
        odd.steps(0, 1, given=[torch.ones_like(p) for p in odd.params])
        Dion(copy.deepcopy(odd.params), rank=4).load_state_dict(odd.optimizer.state_dict())

    def test_rejects_wrong_arguments(self) -> None:
        sparse, scaled = torch.nn.Embedding(6, 4, sparse=True), Trained()
        sparse(torch.tensor([1, 2])).sum().backward()
        scaled.optimizer.found_inf = torch.zeros(())  # as GradScaler.step() sets it
        before = scaled.values()
        mixed = [Parameter(torch.zeros(3)), Parameter(torch.zeros(3, dtype=torch.bfloat16))]
        cases: List[Any] = [
            (lambda: Dion([{"params": parameters(), "algorithm": "lamb"}]),
             "algorithm must be 'dion' or 'adamw', not 'lamb'"),
            (lambda: Dion(mixed), "one dtype"), (lambda: Dion(parameters(), wire="int4:dense=off"), "dense="),
            (lambda: Dion(parameters(), rank=513), "rank='513'"),
            (lambda: Dion(sparse.parameters()).step(), "sparse=False"),
            (lambda: scaled.steps(0, 1), "GradScaler")]
        for call, text in cases:
            with self.assertRaisesRegex(ValueError, text):
                call()
        self.assertTrue(same_bits(scaled.values(), before))

    @unittest.skipUnless(TODAY, "PyTorch 1.13 has no such list")
    def test_refuses_what_pytorchs_optimizers_refuse(self) -> None:
        from torch.testing._internal.common_optimizers import get_error_inputs_for_all_optims
        for case in get_error_inputs_for_all_optims("cpu", torch.float32):
            given = case.optimizer_error_input
            with self.subTest(given.desc), warnings.catch_warnings():
                warnings.simplefilter("error")
                words = "" if "Tensor lr" in given.desc else case.error_regex
                with self.assertRaisesRegex(case.error_type, words):
                    Dion(given.params if given.params is not None else parameters(), **given.kwargs)


if __name__ == "__main__":
    unittest.main()
