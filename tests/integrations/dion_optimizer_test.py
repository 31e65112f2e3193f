#!/usr/bin/python3
"""Tests that gradwire.torch.Dion is an optimizer like PyTorch's: unused and frozen parameters, states, groups."""
from __future__ import annotations

import copy
import io
import pickle
import unittest
import warnings
from typing import Any, Callable, Dict, List, Optional, Sequence

import gradwire
import torch
from dion_test import gradients, parameters
from gradwire._reducer import unpack
from gradwire.torch import Dion
from thread_ranks import run_ranks

Parameters = List[torch.nn.Parameter]
TODAY = hasattr(torch.optim.Optimizer, "register_step_post_hook")


def take(optimizer: Dion, params: Parameters, rank: int, step: int, without: Sequence[int] = ()) -> None:
    """Takes a step in which the parameters `without` have no gradient on this rank."""
    for i, (p, gradient) in enumerate(zip(params, gradients(rank, step))):
        p.grad = None if i in without else gradient.to(p.dtype)
    optimizer.step()


def copied(value: Any) -> Any:
    return copy.deepcopy(value)


def equal(a: Any, b: Any) -> bool:
    """Compares nested states, tensors by their bits."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


class Unused(unittest.TestCase):
    def test_a_parameter_that_no_rank_used_keeps_weights_and_state(self) -> None:
        for wire in ("fp32", "bf16", "int8", "int4:block=32"):
            for world in (1, 2):
                def body(comm: gradwire.Communicator, wire: str = wire) -> None:
                    params = parameters()
                    optimizer = Dion(params, comm=comm, rank=4, wire=wire, weight_decay=0.1)
                    for step in range(3):
                        take(optimizer, params, comm.rank, step)
                    weights, state = copied(params), copied(optimizer.state_dict()["state"])
                    for step in range(3, 6):
                        take(optimizer, params, comm.rank, step, without=(0, 2))
                    for i in range(len(params)):
                        after = optimizer.state_dict()["state"][i]
                        same = {key: equal(state[i][key], after[key]) for key in after
                                if key != "step" or i == 2}
                        unused = i in (0, 2)
                        self.assertEqual(torch.equal(params[i], weights[i]), unused, i)
                        self.assertEqual(all(same.values()), unused, (i, same))
                        self.assertEqual(params[i].grad is None, unused, i)

                with self.subTest(f"{wire}, {world} ranks"):
                    run_ranks(world, body)

    def test_a_parameter_that_some_ranks_used_counts_zeros_on_the_others(self) -> None:
        def body(comm: gradwire.Communicator) -> List[Any]:
            results = []
            for zeros in (False, True):
                params = parameters()
                optimizer = Dion(params, comm=comm, rank=4)
                for step in range(4):
                    take(optimizer, params, comm.rank, step)
                    missing = (step % 4, (step + 1) % 4) if comm.rank == step % 2 else ()
                    if zeros:
                        for i, (p, gradient) in enumerate(zip(params, gradients(comm.rank, step))):
                            p.grad = torch.zeros_like(p) if i in missing else gradient
                        optimizer.step()
                    else:
                        take(optimizer, params, comm.rank, step, missing)
                results.append(params)
            self.assertTrue(equal(*results))
            return results[0]

        self.assertTrue(equal(*run_ranks(2, body)))

    def test_opposite_gradients_are_used_on_all_ranks_alike(self) -> None:
        def body(comm: gradwire.Communicator) -> List[Any]:
            params = parameters()
            optimizer = Dion(params, comm=comm, rank=4, weight_decay=0.1)
            for step in range(3):
                take(optimizer, params, 0, step)
                before = copied(params[2])
                for p in params:
                    p.grad = None if comm.rank == 2 else torch.full_like(p, 1.0 - 2.0 * comm.rank)
                optimizer.step()
                self.assertFalse(torch.equal(params[2], before))  # as PyTorch's AdamW with a mean of zeros
            return params

        results = run_ranks(3, body)
        self.assertTrue(equal(results[0], results[2]))

    def test_momentum_and_gradients_are_conserved(self) -> None:
        # With mu=1 a step takes nothing from the momentum: its sum over ranks is that of the mean gradients.
        for wire in ("fp32", "int8", "int4:block=32"):
            def body(comm: gradwire.Communicator, wire: str = wire) -> Any:
                params = parameters()
                optimizer = Dion(params, comm=comm, rank=4, wire=wire, mu=1.0)
                sent = [torch.zeros_like(p) for p in params]
                for step in range(8):
                    # Matrix 0 is unused on rank 0 in odd steps, 1 on all ranks in some, 3 never.
                    missing = {i for i in (0, 1) if (step % 2 == 1 and comm.rank == 0 and i == 0) or
                               (step in (2, 3, 6) and i == 1)}
                    for i, gradient in enumerate(gradients(comm.rank, step)):
                        sent[i] += 0 if i in missing else gradient / comm.world
                    take(optimizer, params, comm.rank, step, sorted(missing))
                key = f"momentum_rank_{comm.rank}_of_{comm.world}"
                return sent, [optimizer.state_dict()["state"][i].get(key) for i in range(4)]

            ranks = run_ranks(2, body)
            for i in (0, 1, 3):
                sent, kept = (sum(rank[part][i] for rank in ranks) for part in (0, 1))
                self.assertLess(float((sent - kept).norm() / sent.norm()), 1e-5, (wire, i))

    def test_frozen_parameters_do_not_move_and_continue_when_thawed(self) -> None:
        def body(comm: gradwire.Communicator) -> None:
            params = parameters()
            params[0].requires_grad_(False)
            params[2].requires_grad_(False)
            optimizer = Dion(params, comm=comm, rank=4, weight_decay=0.1)
            start = copied(params)

            def train(begin: int, end: int) -> None:
                for step in range(begin, end):
                    for p, gradient in zip(params, gradients(comm.rank, step)):
                        p.grad = gradient if p.requires_grad else p.grad
                    optimizer.step()

            train(0, 3)
            params[1].requires_grad_(False)  # its .grad stays
            frozen, grad = copied(params[1]), copied(params[1].grad)
            train(3, 6)
            for i in (0, 2):
                self.assertTrue(torch.equal(params[i], start[i]) and params[i].grad is None)
            self.assertTrue(torch.equal(params[1], frozen) and grad is not None)
            momentum = copied(optimizer.state_dict()["state"])
            for p in params:
                p.requires_grad_(True)
            optimizer._park()
            self.assertTrue(equal(momentum[1], optimizer.state_dict()["state"][1]))
            train(6, 9)
            self.assertFalse(any(torch.equal(p, q) for p, q in zip(params, start)))

        run_ranks(2, body)


class States(unittest.TestCase):
    def trained(self, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
        params = [torch.nn.Parameter(p.detach().to(dtype)) for p in parameters()]
        optimizer = Dion(params, rank=4, **options)
        for step in range(3):
            take(optimizer, params, 0, step)
        return params, optimizer

    def continues(self, params: Parameters, load: Callable[[Dion], Any], want: Parameters) -> None:
        others = copied(params)
        optimizer = Dion(others, rank=4, seed=5)
        load(optimizer)
        for step in range(3, 6):
            take(optimizer, others, 0, step)
        self.assertTrue(equal(others, want))

    def test_the_state_has_the_shape_of_pytorchs(self) -> None:
        _, optimizer = self.trained()
        state = optimizer.state_dict()
        self.assertEqual(set(state), {"state", "param_groups"})
        shapes = {i: {key: tuple(value.shape) for key, value in s.items()} for i, s in state["state"].items()}
        self.assertEqual(shapes[0], {"step": (), "momentum": (24, 40), "factor": (40, 4)})
        self.assertEqual(shapes[1], {"step": (), "momentum": (16, 3, 5), "factor": (15, 4)})
        self.assertEqual(shapes[2], {"step": (), "exp_avg": (9,), "exp_avg_sq": (9,)})
        self.assertTrue(all(s["step"] == 3 for s in state["state"].values()))
        self.assertEqual(unpack(optimizer._reducer.save_state()).steps, 3)

    def test_a_saved_state_continues_bit_for_bit(self) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            params, optimizer = self.trained(dtype)
            start, state, stream = copied(params), copied(optimizer.state_dict()), io.BytesIO()
            torch.save(state, stream)
            stream.seek(0)
            options: Dict[str, Any] = {"weights_only": True} if TODAY else {}
            loaded = torch.load(stream, **options)
            self.assertTrue(equal(loaded, state))
            for step in range(3, 6):
                take(optimizer, params, 0, step)
            self.continues(start, lambda other, loaded=loaded: other.load_state_dict(loaded), params)
            self.continues(start, lambda other, state=state: (
                other.load_state_dict(state), other.load_state_dict(copied(other.state_dict()))), params)

    def test_getting_or_loading_a_fresh_state_changes_nothing(self) -> None:
        params, plain = parameters(), parameters()
        optimizer, reference = Dion(params, rank=4), Dion(plain, rank=4)
        self.assertTrue(optimizer.state)  # PyTorch would otherwise take a step to make one
        state = optimizer.state_dict()
        self.assertIsNone(optimizer._comm)
        take(optimizer, params, 0, 7)  # forgotten below
        with torch.no_grad():
            for p, q in zip(params, plain):
                p.copy_(q)
        optimizer.load_state_dict({**state, "state": {i: {**s, "step": torch.tensor(0.0)}
                                                      for i, s in state["state"].items()}})
        for step in range(3):
            take(optimizer, params, 0, step)
            take(reference, plain, 0, step)
        self.assertTrue(equal(params, plain))

    def test_copies_and_pickles_continue(self) -> None:
        params, optimizer = self.trained()
        both = [copied((params, optimizer)), pickle.loads(pickle.dumps((params, optimizer)))]
        optimizer.state_dict()
        for own, other in (*both, (params, optimizer)):
            for step in range(3, 6):
                take(other, own, 0, step)
            self.assertTrue(equal(own, both[0][0]))

    def test_a_copy_shares_a_given_communicator_and_a_pickle_is_refused(self) -> None:
        def body(comm: gradwire.Communicator) -> None:
            params = parameters()
            optimizer = Dion(params, comm=comm, rank=4)
            take(optimizer, params, comm.rank, 0)
            others, other = copied((params, optimizer))
            take(optimizer, params, comm.rank, 1)
            take(other, others, comm.rank, 1)
            self.assertTrue(equal(params, others))
            with self.assertRaisesRegex(TypeError, "state_dict"):
                pickle.dumps(optimizer)

        run_ranks(2, body)

    def test_refuses_states_of_something_else(self) -> None:
        params, optimizer = self.trained()
        before = copied(optimizer.state_dict())
        state = copied(before)
        with self.assertRaisesRegex(gradwire.BadArgument, "earlier version"):
            optimizer.load_state_dict({**state, "gradwire": b""})
        with self.assertRaisesRegex(gradwire.BadArgument, "another optimizer"):
            optimizer.load_state_dict(torch.optim.AdamW(params).state_dict())
        with self.assertRaisesRegex(gradwire.BadArgument, r"factor has shape \(40, 4\).*another rank="):
            Dion(parameters(), rank=8).load_state_dict(state)
        del state["state"][0]["momentum"]
        with self.assertRaisesRegex(gradwire.BadArgument, "no momentum"):
            optimizer.load_state_dict(state)
        self.assertTrue(equal(before, optimizer.state_dict()))


class Groups(unittest.TestCase):
    def test_a_group_is_added_and_the_momentum_kept(self) -> None:
        def body(comm: gradwire.Communicator) -> None:
            params = parameters()
            optimizer = Dion([{"params": params[:2]}, {"params": []}], comm=comm, rank=4)
            for step in range(2):
                take(optimizer, params[:2], comm.rank, step)
            before = copied(optimizer.state_dict()["state"])
            with self.assertRaisesRegex(ValueError, "'sgd'"):
                optimizer.add_param_group({"params": params[2:], "algorithm": "sgd"})
            other = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
            with self.assertRaisesRegex(ValueError, "one dtype"):
                optimizer.add_param_group({"params": [other]})
            with self.assertRaisesRegex(ValueError, "lr must be"):
                optimizer.add_param_group({"params": params[2:], "lr": -1.0})
            optimizer.add_param_group({"params": params[2:], "lr": 0.5, "adamw_lr": 0.25})
            after = optimizer.state_dict()["state"]
            self.assertTrue(equal(before, {i: after[i] for i in before}))
            start = copied(params)
            take(optimizer, params, comm.rank, 2)
            self.assertFalse(any(torch.equal(p, q) for p, q in zip(params, start)))
            self.assertEqual(float(optimizer.state[params[0]]["step"]), 3)

        run_ranks(2, body)

    def test_adamw_lr_follows_schedulers(self) -> None:
        params, reference = parameters(), parameters()[2]
        optimizer = Dion(params, 0.02, rank=4, adamw_lr=0.003)
        adamw = torch.optim.AdamW([reference], lr=0.003, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
        schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step))
                      for o in (optimizer, adamw)]
        for step in range(4):
            take(optimizer, params, 0, step)
            reference.grad = gradients(0, step)[2]
            adamw.step()
            for scheduler in schedulers:
                scheduler.step()
            other = Dion(parameters(), 0.5, rank=4)
            other.load_state_dict(optimizer.state_dict())  # keeps the ratio
            self.assertEqual(other.param_groups[0]["reference_lr"], 0.02)
        self.assertTrue(torch.allclose(params[2], reference, rtol=1e-5, atol=1e-7))

    def test_a_closure_has_gradients_and_hooks_are_called(self) -> None:
        params = parameters()
        optimizer = Dion(params, rank=4)
        calls: List[str] = []
        if TODAY:
            optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
            optimizer.register_step_post_hook(lambda *_: calls.append("post"))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = sum(p.square().sum() for p in params)
            loss.backward()  # type: ignore[union-attr]
            return loss  # type: ignore[return-value]

        with torch.no_grad():
            losses = [float(optimizer.step(closure)) for _ in range(5)]
        self.assertLess(losses[-1], losses[0])
        self.assertEqual(calls, ["pre", "post"] * 5 if TODAY else [])

    def test_layouts_and_groups_without_parameters(self) -> None:
        results = []
        for transposed in (False, True):
            params = parameters()
            if transposed:
                params = [torch.nn.Parameter(p.detach().transpose(0, -1).contiguous().transpose(0, -1))
                          for p in params]
            optimizer = Dion(params, torch.tensor(0.02), rank=4)
            for step in range(3):
                for p, gradient in zip(params, gradients(0, step)):
                    other = gradient.transpose(0, -1).contiguous().transpose(0, -1)
                    p.grad = other if transposed else gradient
                optimizer.step()
            results.append([p.detach() for p in params])
        self.assertTrue(equal(*results))
        self.assertIsNone(Dion([{"params": []}]).step())
        odd = [torch.nn.Parameter(torch.ones(shape)) for shape in ((), (0,), (1, 1), (5, 0), (1, 7), (7, 1))]
        optimizer = Dion(odd, rank=4)
        optimizer.zero_grad()
        for p in odd:
            p.grad = torch.ones_like(p)
        optimizer.step()
        Dion(copied(odd), rank=4).load_state_dict(optimizer.state_dict())
        sparse = torch.nn.Embedding(6, 4, sparse=True)
        sparse(torch.tensor([1, 2])).sum().backward()
        with self.assertRaisesRegex(ValueError, "sparse=False"):
            Dion(sparse.parameters()).step()

    @unittest.skipUnless(TODAY, "PyTorch 1.13 has no such list")
    def test_refuses_what_pytorchs_optimizers_refuse(self) -> None:
        from torch.testing._internal.common_optimizers import get_error_inputs_for_all_optims
        for case in get_error_inputs_for_all_optims("cpu", torch.float32):
            given = case.optimizer_error_input
            params: Optional[Any] = given.params if given.params is not None else parameters()
            with self.subTest(given.desc), warnings.catch_warnings():
                warnings.simplefilter("error")
                words = "" if "Tensor lr" in given.desc else case.error_regex
                with self.assertRaisesRegex(case.error_type, words):
                    Dion(params, **given.kwargs)


if __name__ == "__main__":
    unittest.main()
