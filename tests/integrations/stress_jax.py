"""Implements the operations of stress.py on gradwire.jax."""
from __future__ import annotations

import copy
import os
import pickle
from typing import Any, Callable, Dict, List, Tuple

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradwire
import gradwire.jax
from stress import SHAPES, TIMEOUT_S, Run, Wrong, gradient

SPECS = ("fp32", "bf16", "int8", "int4", "fp8", "powersgd:rank=2", "powersgd:rank=2,wire=bf16")
CLEAR = (gradwire.Error, ValueError, TypeError, RuntimeError)


class Trained:
    """An optax chain with compress(), its state, and a traced function, possibly from another world."""

    def __init__(self, spec: str, number: int) -> None:
        self.spec, self.number = spec, number
        self.names = list(SHAPES)
        self.transformation = gradwire.jax.compress(spec, name=f"model {number}")
        self.optimizer = optax.chain(self.transformation, optax.scale(1.0))
        self.step = jax.jit(self.optimizer.update)
        self.state = self.fresh()
        self.scale = 1.0
        self.saved: Any = None

    def fresh(self) -> Any:
        return self.optimizer.init({name: jnp.zeros(SHAPES[name]) for name in self.names})


class Subject:
    def __init__(self, run: Run) -> None:
        self.run = run
        self.number = 0
        self.models: List[Trained] = []
        self.functions: Dict[str, Callable[..., Any]] = {}
        self.connected = False

    def choose(self) -> Tuple[str, Callable[[], None]]:
        names = [
            "average", "average", "train", "train", "train", "retrace", "compress", "save", "load", "freeze",
            "unfreeze", "scale", "deepcopy", "fork", "init", "destroy"]
        if not self.connected:
            names += ["init"] * 10
        name = self.run.draw.choice(names)
        return name, getattr(self, f"do_{name}")

    def next(self) -> int:
        self.number += 1
        return self.number

    def guarded(self, call: Callable[[], Any]) -> Any:
        """Returns the result of `call`, or None if the call is refused because there is no group."""
        try:
            return jax.block_until_ready(call())
        except CLEAR as error:
            if self.connected:
                raise
            self.run.clear(error, *CLEAR)
            return None

    def do_init(self) -> None:
        parts = self.run.parts()
        part = next(part for part in parts if self.run.rank in part)
        meeting = self.run.meeting(part)
        if self.connected:
            try:
                gradwire.jax.init(f"file://{meeting}", part.index(self.run.rank), len(part),
                                  timeout_s=TIMEOUT_S)
            except RuntimeError as error:
                return self.run.clear(error, RuntimeError)
            raise Wrong("init() was accepted twice")
        without_rendezvous = self.run.draw.random() < 0.5
        if len(part) == 1 and without_rendezvous:
            gradwire.jax.init()
        else:
            gradwire.jax.init(f"file://{meeting}", part.index(self.run.rank), len(part), timeout_s=TIMEOUT_S)
        self.run.part, self.connected = part, True

    def do_destroy(self) -> None:
        gradwire.jax.shutdown()
        self.run.part, self.connected = [], False

    def do_average(self) -> None:
        """Averages with an earlier or a new traced function, also in a scan."""
        step, spec = self.next(), self.run.draw.choice(("fp32", "bf16", "int8", "int4"))
        how = self.run.draw.choice(("jit", "eager", "scan"))
        function: Callable[..., Any] = self.functions.get(
            f"{how} {spec}", lambda x: gradwire.jax.pmean(x, spec, name=f"{how} {spec}"))
        if how != "eager":
            if f"{how} {spec}" not in self.functions:
                inner = function
                function = jax.jit(inner if how == "jit" else lambda x: jax.lax.scan(
                    lambda carry, y: (carry, inner(y)), 0, x[None])[1][0])
                self.functions[f"{how} {spec}"] = function
        name = self.run.draw.choice(list(SHAPES))
        out = self.guarded(lambda: function(jnp.asarray(gradient(self.run.seed, step, self.run.rank, name))))
        if out is not None:
            self.run.check(f"pmean by {how}", np.asarray(out), name, step, spec)

    def do_retrace(self) -> None:
        for model in self.models:
            model.step = jax.jit(model.optimizer.update)
        self.functions.clear()
        if self.run.draw.random() < 0.3:
            jax.clear_caches()

    def do_compress(self) -> None:
        if len(self.models) < 3:
            self.models.append(Trained(self.run.draw.choice(SPECS), self.next()))

    def model(self) -> "Trained | None":
        if not self.models:
            self.do_compress()
        return self.run.draw.choice(self.models)

    def do_train(self) -> None:
        model, step = self.model(), self.next()
        given = {name: jnp.asarray(gradient(self.run.seed, step, self.run.rank, name, model.scale))
                 for name in model.names}
        result = self.guarded(lambda: model.step(given, model.state))
        if result is None:
            return
        averaged, model.state = result
        for name in model.names:
            self.run.check(f"model {model.number}", np.asarray(averaged[name]), name, step, model.spec,
                           model.scale)

    def do_save(self) -> None:
        model = self.model()
        model.saved = (pickle.dumps(jax.tree.map(np.asarray, model.state)), list(model.names), model.scale)

    def do_load(self) -> None:
        """Loads the saved state. Expects an error if the state is for other parameters."""
        model = self.model()
        if model.saved is None:
            return
        blob, names, scale = model.saved
        state = jax.tree.map(jnp.asarray, pickle.loads(blob))
        if names != model.names:
            step = self.next()
            given = {name: jnp.asarray(gradient(self.run.seed, step, self.run.rank, name))
                     for name in model.names}
            try:
                model.step(given, state)
            except (ValueError, RuntimeError) as error:
                return self.run.clear(error, ValueError, RuntimeError)
            raise Wrong("a state of other parameters was accepted")
        model.state = gradwire.jax.rescale(state, model.scale / scale)

    def do_freeze(self) -> None:
        """Removes a parameter. The state of the other parameters is unchanged."""
        model = self.model()
        if len(model.names) > 1:
            name = self.run.draw.choice(model.names)
            model.names.remove(name)
            self.only(model)

    def do_unfreeze(self) -> None:
        model = self.model()
        model.names = list(SHAPES)
        self.only(model)

    def only(self, model: Trained) -> None:
        before, fresh = model.state[0], model.fresh()

        def chosen(old: Any, new: Any) -> Any:
            return {name: old.get(name, value)
                    for name, value in new.items()} if isinstance(new, dict) else old

        model.state = (gradwire.jax.CompressState(*(chosen(old, new)
                                                    for old, new in zip(before, fresh[0]))), *fresh[1:])

    def do_scale(self) -> None:
        model = self.model()
        scale = self.run.draw.choice((1.0, 1024.0, 65536.0, 2.0**-10))
        model.state = gradwire.jax.rescale(model.state, scale / model.scale)
        model.scale = scale

    def do_deepcopy(self) -> None:
        model = self.model()
        model.state = copy.deepcopy(model.state)

    def do_fork(self) -> None:
        """Forks a child that exits, like a data loader's child, or first leaves the group."""
        leaves = self.run.draw.random() < 0.5
        child = os.fork()
        if child == 0:
            try:
                if leaves:
                    gradwire.jax.shutdown()
            except BaseException:
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1] != 0:
            raise Wrong("shutdown() in a fork failed")

    def end(self) -> None:
        if self.connected:
            self.do_destroy()
