#!/usr/bin/python3
"""Tests gradwire.torch.Dion: parity with the paper's algorithm, formats, states, and training in PyTorch."""
from __future__ import annotations

import threading
import unittest
from typing import Any, Dict, List, Tuple

import gradwire
import numpy as np
import torch
from gradwire.torch import Dion
from thread_ranks import run_ranks

SHAPES = [(24, 40), (16, 3, 5), (9,), (40, 24)]


def gradients(rank: int, step: int) -> List[torch.Tensor]:
    generator = torch.Generator().manual_seed(step * 100 + rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def parameters() -> List[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def take(optimizer: Dion, params: List[torch.nn.Parameter], rank: int, step: int) -> None:
    for p, gradient in zip(params, gradients(rank, step)):
        p.grad = gradient
    optimizer.step()


class DionTest(unittest.TestCase):
    def run_world(self, world: int, steps: int,
                  **options: Any) -> Tuple[List[np.ndarray], List[Dict[str, Any]]]:
        """Returns the parameters after `steps` steps, equal on all ranks, and every rank's state."""
        results: List[Any] = [None] * world
        states: List[Any] = [None] * world

        def body(comm: gradwire.Communicator) -> None:
            params = parameters()
            optimizer = Dion(params, 0.02, comm=comm, rank=4, **options)
            for step in range(steps):
                take(optimizer, params, comm.rank, step)
            results[comm.rank] = [p.detach().numpy() for p in params]
            states[comm.rank] = optimizer.state_dict()

        run_ranks(world, body)
        for other in results[1:]:
            for a, b in zip(other, results[0]):
                self.assertEqual(a.tobytes(), b.tobytes())
        return results[0], states

    def test_ranks_are_bit_identical_in_every_format(self) -> None:
        for wire in ("fp32", "bf16", "int8", "int4:block=32"):
            with self.subTest(wire):
                self.run_world(2, 4, wire=wire)

    def test_orth_makes_the_singular_values_of_a_step_equal(self) -> None:
        def body(comm: gradwire.Communicator) -> None:
            params = parameters()
            take(Dion(params, 0.0, comm=comm, rank=4, orth=True, wire="int8"), params, comm.rank, 0)
            for p in params:
                if p.dim() > 1:
                    values = torch.linalg.svdvals(p.grad.reshape(p.shape[0], -1))[:4]
                    want = (p.shape[0] / p[0].numel()) ** 0.5
                    np.testing.assert_allclose(values.numpy(), want, rtol=1e-5)

        run_ranks(2, body)

    def test_vectors_take_the_steps_of_adamw(self) -> None:
        got, _ = self.run_world(2, 5, adamw_lr=0.003, weight_decay=0.1)
        p = parameters()[2]
        adamw = torch.optim.AdamW([p], lr=0.003, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        for step in range(5):
            p.grad = (gradients(0, step)[2] + gradients(1, step)[2]) / 2
            adamw.step()
        np.testing.assert_allclose(got[2], p.detach().numpy(), rtol=1e-5, atol=1e-6)

    def test_a_step_of_a_matrix_has_the_norm_of_its_shape(self) -> None:
        def body(comm: gradwire.Communicator) -> None:
            params = parameters()
            optimizer = Dion(params, 0.0, comm=comm, rank=4, wire=wire)
            take(optimizer, params, comm.rank, 0)
            for p in params:
                if p.dim() > 1:
                    rows, cols = p.shape[0], p[0].numel()
                    norm = float(p.grad.norm())  # type: ignore[union-attr]
                    self.assertAlmostEqual(norm, (4 * rows / cols) ** 0.5, places=4)

        for wire in ("fp32", "bf16", "int8", "int4:block=32"):
            run_ranks(2, body)

    def test_states_continue_in_the_same_and_in_another_world(self) -> None:
        want, _ = self.run_world(2, 6)
        values, states = self.run_world(2, 3)
        for world, tolerance in ((2, 0.0), (1, 1e-4)):
            lock = threading.Lock()
            results: List[Any] = []

            def body(comm: gradwire.Communicator, world: int = world, lock: Any = lock,
                     results: List[Any] = results) -> None:
                params = parameters()
                optimizer = Dion(params, 0.02, comm=comm, rank=4)
                for p, value in zip(params, values):
                    p.data = torch.from_numpy(value.copy())
                if world == 2:
                    optimizer.load_state_dict(states[comm.rank])
                else:
                    optimizer.load_state_dicts(states)
                for step in range(3, 6):
                    if world == 2:
                        take(optimizer, params, comm.rank, step)
                        continue
                    for p, a, b in zip(params, gradients(0, step), gradients(1, step)):
                        p.grad = (a + b) / 2
                    optimizer.step()
                with lock:
                    results.append([p.detach().numpy() for p in params])

            run_ranks(world, body)
            for got in results:
                for a, b in zip(got, want):
                    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)

    def test_trains_a_model_without_a_process_group(self) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
        x = torch.randn(256, 20)
        y = x[:, :4].argmax(1)
        optimizer = Dion([{"params": [model[0].weight]},
                          {"params": [model[0].bias, *model[2].parameters()], "algorithm": "adamw",
                           "lr": 3e-3}], rank=8, wire="int8")
        losses = []
        for _ in range(150):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        self.assertLess(losses[-1], 0.4 * losses[0])

    def test_refuses_a_grad_scaler_before_it_sends_anything(self) -> None:
        params = parameters()
        optimizer = Dion(params, rank=4)
        optimizer.found_inf = torch.zeros(())  # as GradScaler.step() sets it
        before = [p.detach().clone() for p in params]
        with self.assertRaisesRegex(ValueError, "GradScaler"):
            take(optimizer, params, 0, 0)
        for p, value in zip(params, before):
            self.assertTrue(torch.equal(p, value))

    def test_rejects_wrong_arguments(self) -> None:
        with self.assertRaisesRegex(ValueError, "algorithm must be 'dion' or 'adamw', not 'lamb'"):
            Dion([{"params": parameters(), "algorithm": "lamb"}])
        mixed = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))]
        with self.assertRaisesRegex(ValueError, "one dtype"):
            Dion(mixed)
        with self.assertRaisesRegex(ValueError, "dense="):
            Dion(parameters(), wire="int4:dense=off")
        with self.assertRaisesRegex(gradwire.BadArgument, "rank='513'"):
            Dion(parameters(), rank=513)


if __name__ == "__main__":
    unittest.main()
