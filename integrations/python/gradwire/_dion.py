"""Dion, an optimizer whose ranks exchange low-rank factors instead of gradients."""
from __future__ import annotations

import copy
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

import torch

from gradwire._communicator import Communicator
from gradwire._process_group import communicator
from gradwire._reducer import Reducer
from gradwire._spec import stays_dense


class Dion(torch.optim.Optimizer):  # type: ignore[misc]  # Any without torch's types
    """Dion (Ahn et al., arXiv 2504.05295) for matrices, AdamW for other parameters.

    Gradients stay local: do not use DDP or another reduction. step() exchanges two factors of rank `rank` for
    each matrix, and the mean gradient of each other parameter, in the format `wire`. Parameters must be the same
    on all ranks at the start; they stay bit-identical. The loss in a format stays in the momentum.

        optimizer = Dion([{"params": matrices}, {"params": rest, "algorithm": "adamw", "lr": 1e-3}], rank=64)

    Train in float32 or bfloat16 without a GradScaler, which would let ranks skip different steps.

    Groups take "algorithm", "lr" and "weight_decay", and AdamW's "betas" and "eps". Use "adamw" for embeddings
    and the classifier. In a group of "dion", parameters of fewer than two dimensions use AdamW at `adamw_lr`. A
    tensor of more dimensions is the matrix of its first dimension by the others.

    Args:
        params: parameters or groups, all of one dtype (float32 or bfloat16) and on one device.
        lr: the learning rate of matrices.
        rank: the factors' rank, up to 512; at most the smaller extent of a matrix.
        mu: the momentum's decay along the directions of a step.
        orth: Orth-Dion (Nakamori et al., arXiv 2605.16341): both factors of a step are orthonormal.
        weight_decay: decoupled, times the learning rate.
        wire: the format of factors: "fp32", "int8", "int4:block=64", see docs/formats.md. Other gradients
            travel in "fp32" or "bf16" as well; with smaller formats they are not compressed.
        adamw_lr, betas, eps: AdamW's.
        comm: the ranks. None: those of the default process group, or this process alone without a group.
        seed: of the first factors; the same on all ranks.
    """

    _step_supports_amp_scaling = True  # so that GradScaler calls step() on every rank, which refuses

    def __init__(self, params: Iterable[Any], lr: float = 0.01, *, rank: int = 64, mu: float = 0.95,
                 orth: bool = False, weight_decay: float = 0.01, wire: str = "fp32", adamw_lr: float = 1e-3,
                 betas: Tuple[float, float] = (0.9, 0.95), eps: float = 1e-8,
                 comm: Optional[Communicator] = None, seed: int = 0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "algorithm": "dion",
                                  "adamw_lr": adamw_lr, "betas": betas, "eps": eps})
        for group in self.param_groups:
            if group["algorithm"] not in ("dion", "adamw"):
                raise ValueError(f"algorithm must be 'dion' or 'adamw', not {group['algorithm']!r}")
        name, _, options = wire.partition(":")
        if "dense=" in options:
            raise ValueError(f"wire={wire!r}: use no dense=; the groups' algorithm decides")
        self._spec = (f"dion:rank={rank},mu={mu},orth={'on' if orth else 'off'},seed={seed},wire={name}" +
                      ("," + options if options else ""))
        self._reducer = self._make_reducer(comm, wire)

    def _parameters(self) -> List[Tuple[Dict[str, Any], torch.Tensor]]:
        return [(group, p) for group in self.param_groups for p in group["params"]]

    @staticmethod
    def _is_matrix(group: Dict[str, Any], p: torch.Tensor) -> bool:
        return group["algorithm"] == "dion" and p.dim() > 1 and p.shape[0] > 1 and p.numel() > p.shape[0]

    def _make_reducer(self, comm: Optional[Communicator], wire: str) -> Reducer:
        tensors = [p for _, p in self._parameters()]
        kinds = {(p.dtype, p.device) for p in tensors}
        if len(kinds) != 1:
            found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds)) or "none"
            raise ValueError(f"all parameters must be of one dtype and on one device, not {found}")
        if comm is None:
            device = tensors[0].device.index if tensors[0].is_cuda else "host"
            grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
            comm = communicator(device=device) if grouped else Communicator(device=device)
        shapes = []
        for i, (group, p) in enumerate(self._parameters()):
            rows = p.shape[0] if self._is_matrix(group, p) else p.numel()
            kind = "matrix" if self._is_matrix(group, p) else "other"
            shapes.append((f"{kind}.{i}", rows, p.numel() // rows if rows else 1))
        dtype = str(tensors[0].dtype).replace("torch.", "")
        # Every matrix takes Dion's step, however small it is.
        dense = "off"
        if stays_dense((1,), wire) and any(name.startswith("other") for name, _, _ in shapes):
            dense = "other.*"
        return Reducer(comm, f"{self._spec},dense={dense}", shapes, tag="Dion", skip_unused=True, dtype=dtype)

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Takes one step. Collective. A parameter without a gradient counts as one with zeros.

        Afterwards p.grad holds the direction of a matrix's step, or the mean gradient of another parameter.
        """
        if getattr(self, "found_inf", None) is not None:
            raise ValueError("Dion takes no GradScaler, because ranks would skip different steps; train in "
                             "bfloat16")
        loss = closure() if closure is not None else None
        parameters = self._parameters()
        for _, p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            elif not p.grad.is_contiguous():
                p.grad = p.grad.contiguous()
        device = parameters[0][1].device
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        self._reducer.allreduce([p.grad for _, p in parameters], stream)
        with torch.no_grad():
            for group, p in parameters:
                if self._is_matrix(group, p):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(p.grad, alpha=-group["lr"])
                else:
                    self._adamw(group, p)
        return loss

    def _adamw(self, group: Dict[str, Any], p: torch.Tensor) -> None:
        lr = group["lr"] if group["algorithm"] == "adamw" else group["adamw_lr"]
        (beta1, beta2), grad = group["betas"], p.grad
        state = self.state[p]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p)
        state["step"] += 1
        first, second = state["exp_avg"], state["exp_avg_sq"]
        first.mul_(beta1).add_(grad, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (second / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
        p.mul_(1 - lr * group["weight_decay"])
        p.addcdiv_(first, root, value=-lr / (1 - beta1 ** state["step"]))

    def state_dict(self) -> Dict[str, Any]:
        """Returns AdamW's state and, as "gradwire", this rank's momentum and factors. Save it on every rank."""
        return {**super().state_dict(), "gradwire": bytes(self._reducer.save_state())}

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Restores the result of this rank's state_dict(). For another number of ranks: load_state_dicts()."""
        self.load_state_dicts([state_dict])

    def load_state_dicts(self, state_dicts: Sequence[Dict[str, Any]]) -> None:
        """Restores the results of state_dict() on all ranks of a run, in any number of ranks.

        The momentum of the mean gradient is kept: it is the sum of the ranks' momenta.
        """
        rest = {key: value for key, value in state_dicts[0].items() if key != "gradwire"}
        super().load_state_dict(copy.deepcopy(rest))  # PyTorch 2 keeps the tensors, and steps change them
        momenta = [state["gradwire"] for state in state_dicts]
        if len(momenta) == 1:
            self._reducer.load_state(momenta[0])
        else:
            self._reducer.load_states(momenta)

    def stats(self) -> Dict[str, Any]:
        """Returns the bytes and times of the last step: Reducer.stats()."""
        return self._reducer.stats()
