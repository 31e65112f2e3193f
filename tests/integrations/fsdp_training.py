"""Models under fully_shard() and compress(), with or without Gradwire, for the suite fsdp."""
from __future__ import annotations

import copy
import math
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

import laws
from gradwire._fsdp_state import folded
from gradwire.fsdp import Compression, compress
from rank import RANK, WORLD, check

PLAIN = {"gradients": "fp32", "weights": "fp32"}
WORDS, WIDTH, LENGTH, BATCH = 61, 64, 16, 4  # WORDS: not divisible by numbers of ranks, for uneven shards
Tensors = Dict[str, torch.Tensor]
Shapes = Dict[str, Tuple[int, ...]]


def replicas_of(replicas: int) -> Any:
    """Returns a mesh of replicas x shards over all ranks."""
    return init_device_mesh("cpu", (replicas, WORLD // replicas), mesh_dim_names=("replicas", "shards"))


def meshes() -> List[Any]:
    return [replicas_of(replicas) for replicas in {2: (2,), 4: (2, 4), 8: (2,)}[WORLD]]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def difference(a: Tensors, b: Tensors) -> float:
    check(a.keys() == b.keys(), f"parameters {sorted(a.keys() ^ b.keys())} are in one run only")
    return max(float((a[name].float() - b[name].float()).abs().max()) for name in a)


def residuals(handle: Compression) -> laws.Arrays:
    """Returns this rank's part of each parameter's residual, in the whole parameter's shape, or zeros."""
    place, tensors = handle._place()["shard"], handle.state_dict()["tensors"]
    return {name: folded(tensors.get(name, {}), place, param).double().numpy()
            for name, (param, _) in handle._params.items()}


def residual_sums(handle: Compression) -> laws.Arrays:
    everyones = laws.of_all_ranks(residuals(handle))
    return {name: sum(each[name] for each in everyones) for name in everyones[0]}


# ---- A transformer -----------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, n, WIDTH))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.spare, self.use_spare = nn.Linear(WIDTH, WIDTH), False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x + self.spare(x) if self.use_spare else x))


def new_model() -> Transformer:
    torch.manual_seed(7)
    return Transformer()


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    """Returns the loss on this rank's words of a step. A word depends on the previous one, with noise."""
    generator = torch.Generator().manual_seed(step * 1000 + RANK)
    tokens = [torch.randint(WORDS, (BATCH,), generator=generator)]
    for _ in range(LENGTH):
        tokens.append((7 * tokens[-1] + 3 + torch.randint(3, (BATCH,), generator=generator)) % WORDS)
    text = torch.stack(tokens, dim=1)
    return nn.functional.cross_entropy(model(text[:, :-1]).float().flatten(0, 1), text[:, 1:].flatten())


def shard_blocks(model: nn.Module, **options: Any) -> None:
    for module in (*model.blocks, model):
        fully_shard(module, **options)


class Run:
    """A sharded transformer and its optimizer.

    arguments: the arguments of compress(); None: PyTorch's collectives. shard: shards the model.
    """

    def __init__(self, arguments: Optional[Dict[str, Any]] = None, *, model: Optional[Transformer] = None,
                 before: Callable[[nn.Module], None] = lambda model: None,
                 shard: Callable[..., None] = shard_blocks, **options: Any) -> None:
        self.model = model if model is not None else new_model()
        before(self.model)
        shard(self.model, **options)
        self.handle: Any = None
        if arguments is not None:
            self.handle = compress(self.model, **{"timeout_s": 120, **arguments})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def step(self, step: int, accumulate: int = 1, clip: float = 0.0) -> float:
        self.optimizer.zero_grad()
        for k in range(accumulate):
            self.model.set_requires_gradient_sync(k + 1 == accumulate)
            loss = loss_of(self.model, step * accumulate + k)
            loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()
        return float(loss.detach())

    def steps(self, first: int, end: int) -> Tensors:
        for step in range(first, end):
            self.step(step)
        return self.parameters()

    def parameters(self) -> Tensors:
        return {n.replace("_orig_mod.", ""): whole(p.detach()).clone()
                for n, p in self.model.named_parameters()}

    def gradients(self) -> Tensors:
        return {n.replace("_orig_mod.", ""): whole(p.grad)
                for n, p in self.model.named_parameters() if p.grad is not None}

    def take(self, other: "Run") -> None:
        """Copies weights and the optimizer's state."""
        self.model.load_state_dict({name: value.clone() for name, value in other.model.state_dict().items()})
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))

    def close(self) -> None:
        if self.handle is not None:
            self.handle.close()


# ---- Models whose gradients are given ----------------------------------------------------------------------

# Uneven and empty shards of rows, more than two dimensions, a vector, and a matrix too small for rank 8.
SHAPES: Shapes = {"uneven": (61, 40), "short": (3, 90), "filter": (24, 8, 3, 3), "bias": (50,),
                  "even": (96, 64), "small": (12, 20)}


def gradients_of(seed: int, step: int, shapes: Shapes = SHAPES, deficient: bool = False) -> Tensors:
    """Returns matrices of rank 10, whose singular values fall by 0.6, plus noise. deficient: of rank 2."""
    found = {}
    for i, (name, shape) in enumerate(shapes.items()):
        generator = torch.Generator().manual_seed(seed * 7 + i)
        own = torch.Generator().manual_seed(((seed * 100 + step) * 64 + RANK) * 32 + i)
        rows, cols, inner = shape[0], math.prod(shape[1:]), 2 if deficient else 10
        left, right = (torch.randn(n, inner, generator=generator) for n in (rows, cols))
        turned = left + (0 if deficient else 0.2) * torch.randn(rows, inner, generator=own)
        matrix = turned * 0.6**torch.arange(inner) @ right.t()
        if not deficient:
            matrix += 0.01 * torch.randn(rows, cols, generator=own)
        found[name] = matrix.view(shape)
    return found


def mean(gradients: Tensors) -> Tensors:
    """Returns the mean over the ranks, in float64."""
    total = {name: g.double() for name, g in gradients.items()}
    for g in total.values():
        dist.all_reduce(g)
    return {name: g / WORLD for name, g in total.items()}


class Matrices(nn.Module):
    """A module whose gradients in a step are given tensors, different on every rank."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape)))

    def forward(self, gradients: Tensors) -> torch.Tensor:
        return sum((getattr(self, name) * g).sum() for name, g in gradients.items())


class Experts(nn.ModuleList):
    """Matrices, of which a step uses those that have gradients."""

    def forward(self, gradients: Tensors) -> torch.Tensor:
        given = [(part, {n: g for n, g in gradients.items() if hasattr(part, n)}) for part in self]
        return sum(part(own) for part, own in given if own)


class Sharded:
    """Matrices under fully_shard() and compress(). Names of parameters are those of `shapes`.

    experts: shapes of several modules, of which each may be unused. blockwise: each is a parameter group.
    """

    def __init__(self, mesh: Any, arguments: Dict[str, Any], shapes: Shapes = SHAPES,
                 by_columns: bool = False, experts: "List[Shapes] | None" = None, blockwise: bool = False,
                 policy: MixedPrecisionPolicy = MixedPrecisionPolicy()) -> None:
        shards = WORLD if mesh is None else mesh.shape[-1]

        def place(parameter: nn.Parameter) -> Optional[Shard]:
            even = parameter.ndim > 1 and parameter.shape[1] % shards == 0
            return Shard(1) if by_columns and even else None

        self.model = Experts(Matrices(each) for each in experts or [shapes])
        for module in (*(self.model if blockwise else ()), self.model):
            fully_shard(module, mesh=mesh, shard_placement_fn=place, mp_policy=policy)
        self.handle = compress(self.model, **{**PLAIN, "timeout_s": 60, **arguments})

    def step(self, gradients: Tensors, set_to_none: bool = True) -> Tensors:
        """Returns the averaged gradients."""
        self.model.zero_grad(set_to_none=set_to_none)
        if gradients:
            self.model(gradients).backward()
        return {name.partition(".")[2]: whole(p.grad).clone() for name, p in self.model.named_parameters()
                if p.grad is not None}

    def residuals(self) -> laws.Arrays:
        return {name.partition(".")[2]: values for name, values in residuals(self.handle).items()}

    def step_without_loss(self, what: str, own: Tensors, limit: float = 1e-6, decay: float = 1.0,
                          set_to_none: bool = True) -> Tensors:
        """Makes a step, and checks that nothing of gradients and residuals is lost."""
        before = {name: decay * values for name, values in self.residuals().items()}
        result, given = self.step(own, set_to_none), {name: g.numpy() for name, g in own.items()}
        laws.nothing_is_lost(what, given, before, {n: g.numpy() for n, g in result.items()}, self.residuals(),
                             limit)
        laws.ranks_agree(what, *(g.numpy() for g in result.values()))
        return result

    def state(self) -> Dict[str, Dict[str, Any]]:
        """Returns a copy of each parameter's part of the state."""
        tensors = copy.deepcopy(self.handle.state_dict()["tensors"])
        return {name.partition(".")[2]: entry for name, entry in tensors.items()}

    def factors(self) -> Tensors:
        return {name: entry["factor"] for name, entry in self.state().items() if "factor" in entry}
