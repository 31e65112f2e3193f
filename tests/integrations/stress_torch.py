"""Implements the operations of stress.py on gradwire.torch."""
from __future__ import annotations

import atexit
import contextlib
import copy
import datetime
import io
import os
import pickle
import time
import warnings
from typing import Any, Callable, Dict, List, Optional, Tuple

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire
import gradwire.torch
from stress import SHAPES, TIMEOUT_S, Run, Wrong, gradient

with contextlib.suppress(ImportError):
    import torch._dynamo  # DDP's constructor imports it, which takes seconds
torch.set_num_threads(1)
warnings.filterwarnings("ignore")
SPECS = ("fp32", "bf16", "int8", "int4", "fp8", "powersgd:rank=2", "powersgd:rank=2,wire=bf16")
CLEAR = (gradwire.Error, ValueError, TypeError, RuntimeError)


class Module(torch.nn.Module):
    """A module whose gradients are its inputs."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            setattr(self, name, torch.nn.Parameter(torch.zeros(shape)))

    def forward(self, given: Dict[str, torch.Tensor]) -> torch.Tensor:
        return sum((getattr(self, name) * values).sum() for name, values in given.items())


class Scaler:
    """A loss scale that the sequence chooses."""

    def __init__(self) -> None:
        self.scale = 1.0

    def get_scale(self) -> float:
        return self.scale

    def update(self, new_scale: Optional[float] = None) -> None:
        """Sets the scale. Without `new_scale` halves the scale, as after a skipped step."""
        self.scale = self.scale / 2 if new_scale is None else new_scale


class Model:
    """A module. On the members of a group, it is in a DistributedDataParallel over the group."""

    ddp: Any = None
    hook: Any = None
    closed = False
    dead = False  # backward() has raised, so PyTorch's reducer is unusable
    may_refuse = False  # the next backward may raise, for a state of another model
    saved: Any = None
    entry: Any = None  # an entry of Subject.groups
    scale = property(lambda self: self.scaler.scale)

    def __init__(self, number: int, spec: str, group: Any, part: List[int]) -> None:
        self.number, self.spec, self.group, self.part = number, spec, group, part
        self.module, self.names, self.scaler = Module(), list(SHAPES), Scaler()

    def unusable(self, rank: int) -> bool:
        """Returns whether the model can no longer average, on any rank of its part."""
        return self.closed or self.dead or (rank in self.part and self.hook is None)

    def wrap(self) -> None:
        for name in SHAPES:
            getattr(self.module, name).requires_grad_(name in self.names)
        self.ddp = DistributedDataParallel(self.module, process_group=self.group, bucket_cap_mb=0.012)

    def compress(self) -> None:
        self.use(gradwire.torch.compress(self.ddp, self.spec, timeout_s=TIMEOUT_S))
        self.closed = False

    def use(self, hook: Any) -> None:
        self.hook = hook
        hook.use_scaler(self.scaler)


class Subject:
    def __init__(self, run: Run) -> None:
        self.run = run
        self.number = 0
        self.models: List[Model] = []
        self.groups: List[Tuple[Any, List[int]]] = []
        self.spare: List[Tuple[str, Any]] = []  # hooks without a model
        self.connected = False

    def choose(self) -> Tuple[str, Callable[[], None]]:
        names = ["average", "average", "spare_hook", "fork", "init", "destroy"]
        names += ["train"] * 8 + [
            "new_group", "compress", "compress", "twice", "close", "deepcopy", "save", "load", "load", "skip",
            "freeze", "unfreeze", "scale", "pickle", "share", "reuse", "destroy_group"
        ] if self.connected else ["init"] * 8
        name = self.run.draw.choice(names)
        return name, getattr(self, f"do_{name}")

    def next(self) -> int:
        self.number += 1
        return self.number

    def mine(self, part: List[int]) -> bool:
        return self.run.rank in part

    def in_use(self, model: Model) -> bool:
        return self.mine(model.part) and not model.unusable(self.run.rank)

    def gradient(self, step: int, name: str, scale: float = 1.0) -> torch.Tensor:
        return torch.from_numpy(gradient(self.run.seed, step, self.run.rank, name, scale))

    def inputs(self, model: Model, step: int) -> Dict[str, torch.Tensor]:
        return {name: self.gradient(step, name, model.scale) for name in model.names}

    # ---- Groups -------------------------------------------------------------------------------------------

    def connect(self, part: List[int], meeting: str) -> None:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=part.index(self.run.rank),
                                world_size=len(part), timeout=datetime.timedelta(seconds=TIMEOUT_S))
        dist.barrier()  # no rank leaves the group again before the others have connected

    def do_init(self) -> None:
        parts = self.run.parts()
        if self.connected:
            self.do_destroy()
        part = next(part for part in parts if self.run.rank in part)
        self.connect(part, self.run.meeting(part))
        self.run.part, self.connected = part, True
        self.groups = [(None, part)]

    def do_destroy(self) -> None:
        closes = [self.run.draw.random() < 0.5 for _ in self.models]
        if self.connected:
            for model, close in zip(self.models, closes):
                if model.hook is not None and close:
                    model.hook.close()
                elif model.hook is not None and model.spec in ("fp32", "int8") and len(
                        model.part) == self.run.world:
                    self.spare.append((model.spec, model.hook))  # the hook outlives its group
            time.sleep(0.05)  # see ddp_lifetimes.destroy()
            dist.destroy_process_group()
        self.models, self.groups, self.run.part, self.connected = [], [], [], False

    def do_new_group(self) -> None:
        everyone = self.run.draw.random() < 0.5
        part = self.run.part
        members = part if everyone or len(part) == 1 else part[:-1]
        group = dist.new_group([part.index(rank) for rank in members])
        self.groups.append((group, members))

    def do_destroy_group(self) -> None:
        """Destroys a group of some or all ranks.

        The hooks of its models must then fail, and not average over the remaining ranks.
        """
        if len(self.groups) == 1:
            return
        entry = self.run.draw.choice(self.groups[1:])
        self.groups = [other for other in self.groups if other is not entry]
        ended = [model for model in self.models if model.entry is entry]
        self.models = [model for model in self.models if model.entry is not entry]
        if self.mine(entry[1]):
            time.sleep(0.05)
            dist.destroy_process_group(entry[0])
        for model in ended:
            was_dead, model.may_refuse = model.dead, True
            self.train([model], "model of an ended group")
            if self.mine(model.part) and not (was_dead or model.dead):
                raise Wrong("a hook has averaged over a process group that has ended")
            if model.hook is not None:
                model.hook.close()

    # ---- Averages -----------------------------------------------------------------------------------------

    def do_average(self) -> None:
        step, spec = self.next(), self.run.draw.choice(("fp32", "bf16", "int8", "int4"))
        name = self.run.draw.choice(list(SHAPES))
        dtype = self.run.draw.choice(
            (torch.float32, torch.float32, torch.float16, torch.float64, torch.complex64))
        tensor = self.gradient(step, name).to(dtype)
        try:
            gradwire.allreduce_(tensor, spec)
        except CLEAR as error:
            if self.connected and dtype in (torch.float32, torch.float16):
                raise
            return self.run.clear(error, *CLEAR)
        real = torch.real(tensor) if tensor.is_complex() else tensor
        self.run.check("allreduce_", real.float().numpy(), name, step, spec,
                       floor=1e-3 if dtype == torch.float16 else 1e-6)

    def train(self, models: List[Model], what: str) -> None:
        """Runs one backward() of all these models."""
        step = self.next()
        if not self.mine(models[0].part) or any(model.dead for model in models):
            return
        for model in models:
            model.module.zero_grad(set_to_none=True)
        may_refuse = any(model.closed or model.dead or model.may_refuse for model in models)
        try:
            sum(model.ddp(self.inputs(model, step)) for model in models).backward()
        except CLEAR as error:
            if not may_refuse:
                raise
            self.run.clear(error, *CLEAR)
            for model in models:
                model.dead = True
            return
        for model in models:
            model.may_refuse = False
            for name in model.names:
                got = getattr(model.module, name).grad.numpy()
                self.run.check(f"{what} {model.number}", got, name, step, model.spec, model.scale, model.part)

    def model(self) -> Model:
        if not self.models:
            self.do_compress()
        return self.run.draw.choice(self.models)

    def do_train(self) -> None:
        self.train([self.model()], "model")

    # ---- Models -------------------------------------------------------------------------------------------

    def made(self, spec: str, group: Any, part: List[int]) -> Model:
        model = Model(self.next(), spec, group, part)
        if self.mine(part):
            model.wrap()
        return model

    def do_compress(self) -> None:
        spec, entry = self.run.draw.choice(SPECS), self.run.draw.choice(self.groups)
        group, part = entry
        model = self.made(spec, group, part)
        model.entry = entry
        if self.mine(part):
            model.compress()
        self.models.append(model)

    def do_twice(self) -> None:
        model = self.model()
        if not self.mine(model.part) or model.hook is None:
            return
        try:
            gradwire.torch.compress(model.ddp, model.spec)
        except gradwire.BadArgument as error:
            return self.run.clear(error, gradwire.BadArgument)
        raise Wrong("compress() was accepted twice")

    def do_share(self) -> None:
        """Runs one backward() of two models that share a communicator."""
        models = [self.made("int8", None, self.run.part) for _ in range(2)]
        comm = gradwire.torch.communicator(timeout_s=TIMEOUT_S)
        try:
            for model in models:
                model.hook = gradwire.torch.compress(model.ddp, model.spec, comm=comm)
        except CLEAR as error:
            self.run.clear(error, *CLEAR)
            models = models[:1]
        self.train(models, "sharing model")
        for model in models:
            model.hook.close()
        comm.close()

    def do_reuse(self) -> None:
        """Registers a hook that was created earlier, possibly for another group."""
        if not self.spare:
            return
        spec, hook = self.spare.pop(self.run.draw.randrange(len(self.spare)))
        model = self.made(spec, None, self.run.part)
        model.ddp.register_comm_hook(hook, gradwire.torch.allreduce_hook)
        model.use(hook)
        model.may_refuse = True
        self.models.append(model)
        self.train([model], "reusing model")

    def do_spare_hook(self) -> None:
        spec = self.run.draw.choice(("fp32", "int8"))
        self.spare.append((spec, gradwire.torch.Hook(spec, timeout_s=TIMEOUT_S)))

    def do_close(self) -> None:
        model = self.model()
        if self.mine(model.part) and model.hook is not None:
            model.hook.close()
        model.closed = True

    def do_deepcopy(self) -> None:
        """Copies a model. As in PyTorch, the copy averages over the default group, compressed or not."""
        model = self.model()
        compresses = self.run.draw.random() < 0.5
        if model.group is not None or model.dead or model.may_refuse:
            return
        copied = Model(self.next(), model.spec, None, self.run.part)
        copied.names, copied.scaler.scale = list(model.names), model.scale
        copied.ddp = copy.deepcopy(model.ddp)
        copied.module = copied.ddp.module
        if compresses:
            copied.compress()
        self.models.append(copied)
        self.train([copied] if model.closed else [copied, model], "copied model")

    # ---- States -------------------------------------------------------------------------------------------

    def do_save(self) -> None:
        model = self.model()
        if not self.in_use(model):
            return
        file = io.BytesIO()
        torch.save(model.hook.state_dict(), file)
        model.saved = (file.getvalue(), list(model.names), model.spec, model.scale)

    def do_load(self) -> None:
        model, source = self.model(), self.model()
        if not self.in_use(model) or source.saved is None or not self.mine(source.part):
            return
        blob, names, spec, scale = source.saved
        fits = (spec, names, source.part) == (model.spec, model.names, model.part)
        if fits and scale != model.scale:
            return  # a state with another loss scale is not loaded
        try:
            model.hook.load_state_dict(torch.load(io.BytesIO(blob)))
        except CLEAR as error:
            if fits:
                raise
            return self.run.clear(error, *CLEAR)
        if scale != model.scale:
            model.may_refuse = True
            model.scaler.scale = scale
        model.may_refuse = model.may_refuse or not fits

    def do_freeze(self) -> None:
        model = self.model()
        if len(model.names) > 1:
            left = [name for name in model.names if name != self.run.draw.choice(model.names)]
            self.only(model, left or model.names)

    def do_unfreeze(self) -> None:
        self.only(self.model(), list(SHAPES))

    def only(self, model: Model, names: List[str]) -> None:
        """Wraps the module again, for other parameters, and carries the state over."""
        if model.may_refuse or model.unusable(self.run.rank):
            return
        changed, model.names = names != model.names, names
        if not self.mine(model.part):
            return
        state, named = model.hook.state_dict(), model.hook._names.are_a_models
        model.hook.close()
        model.module.zero_grad(set_to_none=True)
        model.wrap()
        model.compress()
        try:
            model.hook.load_state_dict(state)
        except CLEAR as error:
            if not changed and named:
                raise
            return self.run.clear(error, *CLEAR)
        model.may_refuse = changed and not named

    def do_scale(self) -> None:
        model = self.model()
        scale = self.run.draw.choice((1.0, 1024.0, 65536.0, 2.0**-10))
        if not model.unusable(self.run.rank):
            model.scaler.update(scale)

    def do_skip(self) -> None:
        """Makes a step with an infinite gradient on one rank, which the scaler skips.

        The skipped step must not affect the next step.
        """
        model, victim, step = self.model(), self.run.draw.choice(self.run.part), self.next()
        name = self.run.draw.choice(model.names)
        if not self.in_use(model) or model.may_refuse:
            return
        given = self.inputs(model, step)
        if self.run.rank == (victim if victim in model.part else model.part[0]):
            given[name].view(-1)[self.run.draw.randrange(given[name].numel())] = float("inf")
        model.module.zero_grad(set_to_none=True)
        model.ddp(given).backward()
        if bool(torch.isfinite(getattr(model.module, name).grad).all()):
            raise Wrong(f"an infinite gradient of {name} has gone")
        model.scaler.update()

    def do_pickle(self) -> None:
        """Pickles a hook, and uses the copy with another model."""
        model = self.model()
        if (model.group is not None or model.closed or model.hook is None or model.may_refuse
                or model.names != list(SHAPES)):
            return
        hook = pickle.loads(pickle.dumps(model.hook))
        copied = self.made(model.spec, None, self.run.part)
        copied.scaler.scale = model.scale
        hook.name_parameters(copied.ddp)
        copied.ddp.register_comm_hook(hook, gradwire.torch.allreduce_hook)
        copied.use(hook)
        self.models.append(copied)
        self.train([copied], "unpickled model")

    # ---- Forks --------------------------------------------------------------------------------------------

    def do_fork(self) -> None:
        """Forks a child that exits, like a data loader's child.

        Without a group, the child creates a group, and trains with hooks that were created before the fork.
        """
        closes = self.run.draw.random() < 0.3
        part = list(range(self.run.world))
        meeting = self.run.meeting(part)
        step = self.next()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                if closes:
                    for _, hook in self.spare:
                        hook.close()
                elif not self.connected:
                    self.in_fork(part, meeting, step)
                atexit._run_exitfuncs()
                os._exit(0)
            except BaseException as error:
                os.write(writing, f"{type(error).__name__}: {error}"[:4000].encode())
                os._exit(1)
        os.close(writing)
        with os.fdopen(reading) as told:
            text = told.read()
        status = os.waitpid(child, 0)[1]
        if status != 0:
            raise Wrong(f"in a fork: {text or f'status {status}'}")

    def in_fork(self, part: List[int], meeting: str, step: int) -> None:
        self.connect(part, meeting)
        self.run.part = part
        tensor = self.gradient(step, "vector")
        gradwire.allreduce_(tensor)
        self.run.check("allreduce_ in a fork", tensor.numpy(), "vector", step, "fp32")
        for spec, hook in self.spare:
            model = self.made(spec, None, part)
            try:
                model.ddp.register_comm_hook(hook, gradwire.torch.allreduce_hook)
                model.use(hook)
                model.may_refuse = True
                self.train([model], "model in a fork")
            finally:
                hook.close()
        time.sleep(0.05)
        dist.destroy_process_group()

    def end(self) -> None:
        """Destroys the group in half of the sequences. In the others, the end of the program destroys it."""
        if self.run.draw.random() < 0.5 and self.connected:
            self.do_destroy()
