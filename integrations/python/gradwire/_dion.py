"""Dion, an optimizer whose ranks exchange low-rank factors instead of gradients."""
from __future__ import annotations

import collections
import copy
import ctypes
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist

from gradwire._communicator import Communicator
from gradwire._hook_state import entry_of, tensor_of
from gradwire._native import BadArgument, integer
from gradwire._process_group import communicator, normal_tensors, stream_of
from gradwire._reducer import Reducer, pack, unpack
from gradwire._spec import is_plain, stays_dense

_MOMENTS = ("exp_avg", "exp_avg_sq")
# A parameter: its name in the reducer, which says its algorithm, and its group.
_Parameter = Tuple[str, Dict[str, Any], torch.Tensor]


def _base(key: str) -> str:
    """Returns a key of _kept() without the rank."""
    return key.partition("_rank_")[0]


def _dtype(p: torch.Tensor) -> str:
    return str(p.dtype).replace("torch.", "")


class Dion(torch.optim.Optimizer):  # type: ignore[misc]  # Any without torch's types
    """Dion (Ahn et al., arXiv 2504.05295) for matrices, AdamW for other parameters.

    Gradients stay local: do not use DDP or another reduction. step() exchanges two factors of rank `rank` for
    each matrix, and the mean gradient of each other parameter, in the format `wire`. Parameters must be the same
    on all ranks at the start; they stay bit-identical. The loss in a format stays in the momentum.

        optimizer = Dion([{"params": matrices}, {"params": rest, "algorithm": "adamw", "lr": 1e-3}], rank=64)

    Train in float32 or bfloat16 without a GradScaler, which would let ranks skip different steps.

    A parameter without a gradient (`.grad` is None, or requires_grad is False) on every rank keeps its weights
    and state. With one on some ranks, the others count as zeros. A matrix whose gradients are zeros on all
    ranks keeps its momentum, and its weights only decay.

    Groups take "algorithm", "lr" and "weight_decay", and AdamW's "betas" and "eps". Use "adamw" for embeddings
    and the classifier. In a group of "dion", parameters of fewer than two dimensions use AdamW at `adamw_lr`,
    which follows schedulers: it is for the first lr of the group, and scales with it. A tensor of more
    dimensions is the matrix of its first dimension by the others.

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
        comm: the ranks. None: those of the default process group at the first step(), or this process alone
            without a group.
        seed: of the first factors; the same on all ranks.

    Raises:
        ValueError: an argument is wrong. The first step() compares the ranks' arguments.
    """

    _step_supports_amp_scaling = True  # so that GradScaler calls step() on every rank, which refuses

    def __init__(self, params: Iterable[Any], lr: float = 0.01, *, rank: int = 64, mu: float = 0.95,
                 orth: bool = False, weight_decay: float = 0.01, wire: str = "fp32", adamw_lr: float = 1e-3,
                 betas: Tuple[float, float] = (0.9, 0.95), eps: float = 1e-8,
                 comm: Optional[Communicator] = None, seed: int = 0) -> None:
        rank, seed = integer(rank, "rank"), integer(seed, "seed", ctypes.c_uint64)
        name, _, options = wire.partition(":")
        if "dense=" in options:
            raise ValueError(f"wire={wire!r}: use no dense=; the groups' algorithm decides")
        # Every matrix takes Dion's step, however small it is.
        narrow = stays_dense((1,), wire)
        self._spec = (f"dion:rank={rank},mu={mu},orth={'on' if orth else 'off'},seed={seed},wire={name}" +
                      ("," + options if options else "") + f",dense={'other.*' if narrow else 'off'}")
        self._rank, self._has_residuals = rank, not (narrow or is_plain(wire))
        self._comm, self._is_given = comm, comm is not None
        self._reducer: Optional[Reducer] = None  # made by step()
        self._placed: Dict[str, torch.Tensor] = {}  # in the reducer, by name
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "algorithm": "dion",
                                  "adamw_lr": adamw_lr, "betas": betas, "eps": eps})
        dtype = next((_dtype(p) for _, _, p in self._parameters()), "float32")
        with Communicator() as alone:  # for its errors
            Reducer(alone, self._spec, [("matrix", 2, 2), ("other.used", 1, 1)], dtype=dtype).close()

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Adds a group. Call it on every rank, with the same parameters."""
        super().add_param_group(param_group)
        try:
            self._check(self.param_groups[-1])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        with normal_tensors():
            self._begin_states(self.param_groups[-1])

    def _check(self, group: Dict[str, Any]) -> None:
        if group["algorithm"] not in ("dion", "adamw"):
            raise ValueError(f"algorithm must be 'dion' or 'adamw', not {group['algorithm']!r}")
        for key in ("lr", "adamw_lr", "weight_decay", "eps"):
            value = group[key]
            if (isinstance(value, torch.Tensor) and value.numel() != 1) or not float(value) >= 0:
                raise ValueError(f"{key} must be one number of at least 0, not {value!r}")
        kinds = {(p.dtype, p.device) for g in self.param_groups for p in g["params"]}
        if len(kinds) > 1:
            found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
            raise ValueError(f"all parameters must be of one dtype and on one device, not {found}")
        group.setdefault("reference_lr", float(group["lr"]))

    def _parameters(self) -> List[_Parameter]:
        pairs = [(group, p) for group in self.param_groups for p in group["params"]]
        return [(f"{'matrix' if self._is_matrix(group, p) else 'other'}.{i}", group, p)
                for i, (group, p) in enumerate(pairs)]

    @staticmethod
    def _is_matrix(group: Dict[str, Any], p: torch.Tensor) -> bool:
        return group["algorithm"] == "dion" and p.dim() > 1 and p.shape[0] > 1 and p.numel() > p.shape[0]

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Takes one step. Collective, also on ranks without a gradient.

        Afterwards p.grad holds the direction of a matrix's step, or the mean gradient of another parameter,
        if any rank had a gradient and p.requires_grad.

        Raises:
            CommFailed: a rank failed, or ranks differ in their arguments, parameters or frozen parameters.
        """
        if getattr(self, "found_inf", None) is not None:
            raise ValueError("Dion takes no GradScaler, because ranks would skip different steps; train in "
                             "bfloat16")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = self._parameters()
        if parameters:
            with torch.no_grad():
                reducer = self._reducer_for(parameters)
                self._take(reducer, [x for x in parameters if x[0] in self._placed], parameters[0][2])
        return loss

    def _take(self, reducer: Reducer, parameters: List[_Parameter], like: torch.Tensor) -> None:
        grads, flags = [], [0.0] * max(1, len(parameters))
        for i, (_, _, p) in enumerate(parameters):
            if p.grad is not None and p.grad.layout != torch.strided:
                raise ValueError("Dion takes no sparse gradients: use an embedding with sparse=False")
            flags[i] = float(p.requires_grad and p.grad is not None)
            grads.append(p.grad.contiguous() if flags[i] else
                         torch.zeros(p.shape, dtype=p.dtype, device=p.device))
        used = torch.tensor(flags, dtype=like.dtype, device=like.device)
        reducer.allreduce([*grads, used], stream_of(like))
        # The mean of the flags, which may have the error of a bf16 wire, is the same on all ranks. So they
        # skip the same parameters.
        world = self._place()[1]
        for (name, group, p), grad, mean in zip(parameters, grads, used.tolist()):
            is_matrix = name.startswith("matrix")
            if is_matrix:
                self.state[p]["step"] = self.state[p]["step"] + 1  # counts the exchanges
            if mean * world < 0.5:
                continue
            if p.requires_grad:
                p.grad = grad
            if is_matrix:
                lr = float(group["lr"])
                p.mul_(1 - lr * group["weight_decay"]).add_(grad, alpha=-lr)
            else:
                self._adamw(group, p, grad)

    def _adamw(self, group: Dict[str, Any], p: torch.Tensor, grad: torch.Tensor) -> None:
        lr, reference = float(group["lr"]), group.get("reference_lr")
        if group["algorithm"] != "adamw":
            lr = float(group["adamw_lr"]) * (lr / reference if reference else 1.0)
        (beta1, beta2), state = group["betas"], self.state[p]
        if state["step"] == 0:
            state.update((key, torch.zeros_like(p)) for key in _MOMENTS)
        state["step"] += 1
        steps, first, second = float(state["step"]), state["exp_avg"], state["exp_avg_sq"]
        first.mul_(beta1).add_(grad, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (second / (1 - beta2 ** steps)).sqrt_().add_(group["eps"])
        p.mul_(1 - lr * group["weight_decay"])
        p.addcdiv_(first, root, value=-lr / (1 - beta1 ** steps))

    def _place(self) -> Tuple[int, int]:
        if self._comm is not None:
            return self._comm.rank, self._comm.world
        grouped = dist.is_available() and dist.is_initialized()
        return (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)

    def _communicator(self, p: torch.Tensor) -> Communicator:
        if self._comm is None:
            device = p.device.index if p.is_cuda else "host"
            grouped = self._place()[1] > 1
            self._comm = communicator(device=device) if grouped else Communicator(device=device)
        return self._comm

    def _reducer_for(self, parameters: List[_Parameter]) -> Reducer:
        """Returns a reducer of the parameters that require gradients. Collective if it makes one."""
        wanted = [parameter for parameter in parameters if parameter[2].requires_grad]
        now = {name: p for name, _, p in parameters}
        if (self._reducer is not None and all(now.get(name) is p for name, p in self._placed.items())
                and all(name in self._placed for name, _, _ in wanted)):
            return self._reducer
        self._park()
        shapes = []
        for name, _, p in wanted:
            rows = p.shape[0] if name.startswith("matrix") else p.numel()
            shapes.append((name, rows, p.numel() // rows if rows else 1))
        shapes.append(("other.used", max(1, len(wanted)), 1))
        p = parameters[0][2]
        reducer = Reducer(self._communicator(p), self._spec, shapes, tag="Dion", skip_unused=True,
                          dtype=_dtype(p))
        self._fill(reducer, wanted)
        self._reducer, self._placed = reducer, {name: p for name, _, p in wanted}
        return reducer

    def _fill(self, reducer: Reducer, wanted: List[_Parameter]) -> None:
        """Moves the library's part of self.state into a new reducer."""
        steps = max((float(self.state[p]["step"]) for _, _, p in wanted), default=0.0)
        fresh = unpack(reducer.save_state())
        for name, group, p in wanted:
            state = self.state[p]
            for key, kind, _ in self._kept(group, p):
                if state["step"] > 0:
                    fresh.tensors[name].entries[kind] = entry_of(self._share(state, key))
                for other in [other for other in state if other.startswith(_base(key))]:
                    del state[other]
                state[key] = torch.empty(0, dtype=torch.float32, device=p.device)
            if name.startswith("matrix"):
                state["step"] = torch.full_like(state["step"], steps)
        if steps > 0:
            reducer.load_state(pack(fresh._replace(steps=int(steps))))

    def _park(self) -> None:
        """Moves the reducer's state into self.state, and closes the reducer."""
        if self._reducer is not None:
            self.state = self._full_state()
            self._reducer.close()
            self._reducer, self._placed = None, {}

    def _kept(self, group: Dict[str, Any], p: torch.Tensor) -> List[Tuple[str, str, Tuple[int, ...]]]:
        """Returns what the library keeps of a parameter: (key in state_dict(), the library's kind, shape).

        What differs between ranks has the rank in its key: torch.distributed.checkpoint saves only one of
        several tensors of one name.
        """
        rank, world = self._place()
        suffix = f"_rank_{rank}_of_{world}" if world > 1 else ""
        if self._is_matrix(group, p):
            rows, cols = p.shape[0], p.numel() // p.shape[0]
            return [(f"momentum{suffix}", "residual", tuple(p.shape)),
                    ("factor", "factor", (cols, min(self._rank, rows, cols)))]
        return [(f"residual{suffix}", "residual", tuple(p.shape))] if self._has_residuals else []

    def _share(self, state: Dict[str, Any], key: str) -> torch.Tensor:
        """Returns what this rank saved as `key`, or its part of the sum of all ranks' tensors."""
        if key in state:
            return state[key]
        base, (rank, world) = _base(key), self._place()
        total = state.get(base)
        if total is None:
            saved = sorted(other for other in state if other.startswith(f"{base}_rank_"))
            if not saved or len(saved) != int(saved[0].rpartition("_")[2]):
                raise BadArgument(
                    f"this is rank {rank} of {world}; the state has {', '.join(saved) or f'no {base}'}: load "
                    "the state_dict() of this rank, load_state_dicts() those of all ranks, or call "
                    "consolidate_state_dict() on every rank before one rank saves for all")
            total = torch.stack([state[other] for other in saved]).sum(0)
        return total / world

    def _begin_states(self, group: Dict[str, Any]) -> None:
        # PyTorch reads the keys of self.state. Empty tensors stand for what is in the reducer, or missing.
        for p in group["params"]:
            state = self.state[p]
            state["step"] = torch.tensor(float(state.get("step", 0.0)), dtype=torch.float32, device="cpu")
            moments = () if self._is_matrix(group, p) else _MOMENTS
            for key in (*(key for key, _, _ in self._kept(group, p)), *moments) if p.requires_grad else ():
                state.setdefault(key, torch.empty(0, dtype=torch.float32, device=p.device))

    def _full_state(self) -> Dict[Any, Dict[str, Any]]:
        """Returns self.state with copies of what the reducer keeps, and zeros for what has not begun."""
        full = collections.defaultdict(dict, {p: dict(state) for p, state in self.state.items()})
        held = unpack(self._reducer.save_state()).tensors if self._reducer is not None else {}
        names = {p: name for name, p in self._placed.items()}
        for _, group, p in self._parameters():
            state = full[p]
            begins = p.requires_grad and state["step"] == 0
            for key, kind, shape in self._kept(group, p):
                if p in names:
                    state[key] = tensor_of(held[names[p]].entries[kind]).reshape(shape).to(p.device)
                elif begins:
                    state[_base(key) if _base(key) in state else key] = torch.zeros(
                        shape, dtype=torch.float32, device=p.device)
            if begins and not self._is_matrix(group, p):
                state.update((key, torch.zeros_like(p)) for key in _MOMENTS)
        return full

    def state_dict(self) -> Dict[str, Any]:
        """Returns the state in the shape of PyTorch's optimizers. Not collective; save it on every rank.

        A matrix has "step", "factor" and "momentum"; another parameter "step", "exp_avg", "exp_avg_sq", and
        "residual" with a bf16 wire. Momenta and residuals differ between ranks: with several, their names end
        in "_rank_R_of_N". After consolidate_state_dict() there is one sum of all ranks, without this end.
        """
        own, self.state = self.state, self._full_state()
        try:
            return super().state_dict()
        finally:
            self.state = own

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Makes state_dict() the same on all ranks until the next step(). Collective.

        Call it before one rank saves for all, or for torch.distributed.checkpoint in another number of ranks:
        before saving, and before loading into a new optimizer. Lightning calls it. The next step() spreads the
        momentum evenly over the ranks.

        Args:
            to: as in ZeroRedundancyOptimizer; every rank has the whole state.
        """
        integer(to, "to")
        self._park()
        for _, group, p in self._parameters():
            state = self.state[p]
            for key in [key for key, _, _ in self._kept(group, p) if "_rank_" in key and key in state]:
                kept = state.pop(key)
                state[_base(key)] = (self._communicator(p).allreduce_(kept.clone(), op="sum")
                                     if state["step"] > 0 else kept)

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Restores this rank's state_dict(), or a consolidated one. Call it on every rank.

        Raises:
            BadArgument: the state lacks this rank's momentum, or is of another optimizer, rank= or model.
        """
        with normal_tensors():  # steps change them
            self._load(state_dict)

    def _load(self, state_dict: Dict[str, Any]) -> None:
        groups = state_dict["param_groups"]
        if "gradwire" in state_dict or not all("algorithm" in group for group in groups):
            raise BadArgument("the state is of another optimizer, or of Dion in an earlier version of "
                              "Gradwire: load the weights without it")
        saved = [(group, key) for group in groups for key in group["params"]]
        states, kept = dict(state_dict["state"]), {}
        for (group, index), (_, _, p) in zip(saved, self._parameters()):
            state = states.get(index, {})
            kept[p] = self._loadable(state, group, p) if float(state.get("step", 0.0)) > 0 else {}
            # PyTorch would cast the library's part to the parameter's type.
            states[index] = {key: value for key, value in state.items() if key in ("step", *_MOMENTS)}
        # PyTorch 2 keeps the tensors, and steps change them.
        super().load_state_dict(copy.deepcopy({**state_dict, "state": states}))
        if self._reducer is not None:
            self._reducer.close()
        self._reducer, self._placed = None, {}
        for p, tensors in kept.items():
            self.state[p].update(tensors)
        for group in self.param_groups:
            self._begin_states(group)

    def _loadable(self, state: Dict[str, Any], group: Dict[str, Any], p: torch.Tensor) -> Dict[str, Any]:
        """Returns float32 copies of the library's part of a saved state."""
        found: Dict[str, Any] = {}
        for key, _, shape in self._kept(group, p):
            if key.startswith("residual") and not any(other.startswith("residual") for other in state):
                state = {**state, key: torch.zeros(shape, dtype=torch.float32, device=p.device)}  # other wire
            tensor = self._share(state, key)
            if tuple(tensor.shape) != shape:
                raise BadArgument(f"{key} has shape {tuple(tensor.shape)} in the state, and {shape} here: "
                                  "the state is of another rank= or model")
            found[key] = tensor.detach().to(p.device, torch.float32, copy=True)
        return found

    def load_state_dicts(self, state_dicts: Sequence[Dict[str, Any]]) -> None:
        """Restores the results of state_dict() on all ranks of a run, in any number of ranks.

        The momentum of the mean gradient is kept: it is the sum of the ranks' momenta.
        """
        merged: Dict[Any, Dict[str, Any]] = {}
        for state_dict in state_dicts:
            for key, state in state_dict["state"].items():
                merged.setdefault(key, {}).update(state)
        self.load_state_dict({**state_dicts[0], "state": merged})

    def _contents(self) -> Dict[str, Any]:
        return {**super().__getstate__(), "state": self._full_state(), "_spec": self._spec,
                "_rank": self._rank, "_has_residuals": self._has_residuals, "_is_given": self._is_given,
                "_comm": None, "_reducer": None, "_placed": {}}

    def __getstate__(self) -> Dict[str, Any]:
        if self._is_given:
            raise TypeError("Dion(comm=...) cannot be pickled, because its communicator belongs to this "
                            "process: save state_dict(), or create Dion without comm=")
        return self._contents()

    def __deepcopy__(self, memo: Dict[int, Any]) -> "Dion":
        """Returns a copy that shares the communicator. Its first step() makes a reducer."""
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(self._contents(), memo))
        copied._comm = self._comm
        return copied

    def stats(self) -> Dict[str, Any]:
        """Returns the bytes and times of the last step: Reducer.stats(). Empty before the first."""
        return self._reducer.stats() if self._reducer is not None else {}
