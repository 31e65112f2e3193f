"""Gradwire for PyTorch's FSDP2: compressed reduce-scatter of gradients and all-gather of weights.

    from gradwire.fsdp import compress
    handle = compress(model, gradients="int8", weights="bf16")     # after fully_shard(model)

Nothing else changes. docs/for-fsdp.md has savings, costs and limits.
"""
from __future__ import annotations

import contextlib
import copy
import ctypes
import logging
import math
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import torch
import torch.distributed as dist

from gradwire import _native
from gradwire._auto import PLAIN, GroupAuto, Request, is_request, parse
from gradwire._fsdp_comm import (AllGather, Communicators, Options, ParamGroup, ReduceScatter, check_spec,
                                 dense_rule)
from gradwire._fsdp_low_rank import LowRank, is_low_rank, read as read_low_rank
from gradwire._fsdp_residual import MODES, Residual
from gradwire._fsdp_state import (chosen, fsdp_module_class, name_of, param_groups, plain_name, shards_of,
                                  whole_of)
from gradwire._hook_state import follow
from gradwire._mesh import Place, other_dimensions, root_of, states_here
from gradwire._process_group import TIMEOUT_S
from gradwire._spec import encoded_once

__all__ = ["Compression", "compress"]

_log = logging.getLogger("gradwire")


def compress(model: torch.nn.Module, gradients: str = "int8", weights: str = "bf16", residual: str = "fp32",
             dense: "bool | Sequence[str]" = True, *, replicas: Optional[str] = None,
             timeout_s: _native.Seconds = TIMEOUT_S, seed: int = 0) -> "Compression":
    """Compresses the collectives of a fully_shard()ed model. Collective: all ranks pass the same arguments.

    Call it after fully_shard() of the blocks and of the model, before the first forward or between steps;
    before or after to_empty() of a model on the meta device, and before or after torch.compile() of blocks.

    Args:
        model: the model. It must contain all modules of fully_shard([...]).
        gradients: wire format of the reduce-scatter: a format of docs/formats.md with its options, such as
            "int8", "bf16", "int4:rotate=hadamard" or "fp32". Each
            rank encodes its gradients once; the owner of a shard adds all ranks' values in FP32, in rank
            order. (schedule=two_shot, unless the spec names another schedule. schedule=ring sends less
            between nodes of several ranks, and encodes in every hop.) Or
            "auto[:error=E][,allow=SPEC+SPEC...]": see Compression.choice.
        weights: wire format of the all-gather. All ranks, including the owner, compute with the transmitted
            values. The sharded parameters, which the optimizer updates, are not rounded.
        residual: the type of error feedback's residuals, which every rank has for the whole model. Bytes per
            trained parameter: "fp32" 4; "bf16" 2; "int8" 1.03; "off" 0. "bf16" and "int8" round
            stochastically. "off" disables error feedback.
        dense: parameters that are sent in FP32, or in BF16 if gradients or weights are BF16. True: for
            formats of fewer than 16 bits, vectors of at most 65,536 elements and other parameters of fewer
            than 1,024 elements; with PowerSGD over replicas, only if its wire= has fewer than 8 bits. False:
            no parameters. Otherwise names with shell wildcards, for any format except fp32; the name "auto"
            means the parameters of True.
        replicas: format of HSDP's allreduce over replicas: a wire format, or "powersgd:rank=R" with options.
            None: the format of gradients. PowerSGD's dense parameters are those of the DDP hook.
        timeout_s: the longest wait for a peer. After it, or when a peer dies, forward() or backward() raises
            CommFailed on every rank that waits.
        seed: for the stochastic rounding of residuals in bf16 and int8.

    Returns:
        A handle with the residuals' state. The model keeps it alive.

    Raises:
        BadArgument: the model is not fully_shard()ed, is compressed already, or a format is unknown.
        Unsupported: PyTorch is too old, or a format needs whole matrices (powersgd, except for replicas).
    """
    module_class = fsdp_module_class()
    timeout_s, seed = _native.seconds(timeout_s), _native.integer(seed, "seed", ctypes.c_uint64)
    if residual not in MODES:
        raise _native.BadArgument(f"residual must be one of {', '.join(map(repr, MODES))}, not {residual!r}")
    request = parse(gradients, ("bf16", "int8", "int4")) if is_request(gradients) else None
    formats = [gradients] if request is None else request.specs
    gradients = formats[0]
    for argument, spec in (*(("gradients", spec) for spec in formats), ("weights", weights)):
        check_spec(argument, spec)
    over_replicas = gradients if replicas is None else replicas
    low_rank = read_low_rank(over_replicas) if is_low_rank(over_replicas) else None
    if low_rank is None:
        check_spec("replicas", over_replicas)
        over_replicas = encoded_once(over_replicas)
    modules = [m for m in model.modules() if isinstance(m, module_class)]
    if not modules:
        raise _native.BadArgument("no module of the model is sharded: call "
                                  "torch.distributed.fsdp.fully_shard() on its blocks and on the model "
                                  "first. For DistributedDataParallel use gradwire.torch.compress()")
    options = Options(encoded_once(gradients), weights, over_replicas, residual,
                      dense_rule(dense, gradients), dense_rule(dense, weights),
                      dense_rule(dense, over_replicas, low_rank), low_rank, timeout_s, seed)
    return Compression(model, modules, options, request, lambda spec: options._replace(
        gradients=encoded_once(spec), dense_gradients=dense_rule(dense, spec)))


class Compression:
    """The result of compress(): saves and loads residuals, and ends compression."""

    def __init__(self, model: torch.nn.Module, modules: List[Any], options: Options,
                 request: Optional[Request], options_of: Callable[[str], Options]) -> None:
        self._options = options
        self._auto, self._options_of = None if request is None else GroupAuto(request), options_of
        self._communicators = Communicators(options.timeout_s)
        self._restore: List[Callable[[], None]] = []
        self._groups: List[ParamGroup] = []
        self._params: Dict[str, Tuple[Any, ParamGroup]] = {}
        self._closed = False
        self._end_of_scaler: Optional[Callable[[], None]] = None
        self._alone: Any = None  # for HSDP: a process group of this rank only
        prefixes = {id(module): plain_name(name) for name, module in model.named_modules()}
        for theirs in param_groups(modules):
            names = {id(p): name_of(p, prefixes) for p in theirs.fsdp_params}
            self._check(theirs, next(iter(names.values())))
            ours = ParamGroup(theirs, names, options, self._communicators, len(self._groups),
                              len(self._params))
            ours.auto = self._auto
            self._groups.append(ours)
            self._params.update({names[id(p)]: (p, ours) for p in theirs.fsdp_params})
        try:
            for ours in self._groups:  # after all checks: a rejected model is unchanged
                self._install(ours)
        except BaseException:
            self.close()
            raise

    # ---- Installing ----------------------------------------------------------------------------------------

    def _check(self, theirs: Any, name: str) -> None:
        mesh = theirs.mesh_info
        if isinstance(theirs._reduce_scatter_comm, ReduceScatter):
            raise _native.BadArgument(f"the group of {name!r} is compressed already: close() the result of "
                                      "the earlier compress() first")
        if not hasattr(mesh, "shard_process_group"):
            raise _native.Unsupported(f"{name!r} is replicated, not sharded: use DistributedDataParallel "
                                      "with gradwire.torch.compress()")
        options = self._options
        if self._auto is not None and (hasattr(mesh, "replicate_process_group")
                                       or mesh.shard_mesh_size != dist.get_world_size()):
            raise _native.Unsupported("gradients='auto' needs parameters that are sharded over all ranks, "
                                      f"but {name!r} is not: name formats of gradients and replicas")
        if options.replicas != options.gradients and not hasattr(mesh, "replicate_process_group"):
            raise _native.BadArgument(f"replicas={options.replicas!r} needs replicas, but {name!r} has none: "
                                      "pass fully_shard() a 2-D mesh, or omit replicas")
        if hasattr(mesh, "replicate_process_group") and theirs._all_reduce_hook is not None:
            raise _native.BadArgument(f"the group of {name!r} has an all-reduce hook, but HSDP's compressed "
                                      "allreduce needs one itself: remove it, or shard over a 1-D mesh")

    def _install(self, ours: ParamGroup) -> None:
        ours.handle = self  # keeps the handle alive as long as the model
        theirs, mesh = ours.theirs, ours.theirs.mesh_info
        replicas = getattr(mesh, "replicate_process_group", None)
        device = theirs.device
        if mesh.shard_mesh_size > 1:
            self._communicators.of("gradients", theirs._reduce_scatter_process_group if hasattr(
                theirs, "_reduce_scatter_process_group") else mesh.shard_process_group, device)
            self._communicators.of("weights", mesh.shard_process_group, device)
        if replicas is not None and (replicas.size() > 1 or ours.low_rank is not None):
            # FSDP has no Comm for the allreduce over the replicas. A group of this rank alone replaces FSDP's
            # group, so that FSDP's allreduce has no effect. Then the hook averages, and
            # set_requires_all_reduce() still works.
            self._communicators.of("replicas", replicas, device)
            if ours.low_rank is not None and mesh.shard_mesh_size > 1:
                self._communicators.of("factors", mesh.shard_process_group, device)
            if self._alone is None:
                self._alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
            ours.replicas = replicas
            self._replace_replicas(theirs, self._alone)
            self._change(theirs, "_all_reduce_hook", ours.all_reduce)
        self._change(theirs, "_reduce_scatter_comm", ReduceScatter(ours))
        self._change(theirs, "_all_gather_comm", AllGather(ours))
        prepare: Any = getattr(theirs, "_prepare_reduce_scatter_inputs", None)
        if prepare is not None:  # PyTorch 2.15

            def prepare_and_tell(params: Sequence[Any], *arguments: Any) -> Any:
                ours.expect(params)
                return prepare(params, *arguments)

            self._change(theirs, "_prepare_reduce_scatter_inputs", prepare_and_tell)

    def _change(self, owner: Any, name: str, value: Any) -> None:
        """Sets an attribute. close() restores the old value if the attribute still has this value."""
        old = getattr(owner, name)

        def restore() -> None:
            if getattr(owner, name) is value:
                setattr(owner, name, old)

        setattr(owner, name, value)
        self._restore.append(restore)

    def _replace_replicas(self, theirs: Any, group: Any) -> None:
        """Replaces the process group of one parameter group's replicas.

        Uses a copy of the mesh's description, because several parameter groups may share the description.
        """
        mesh, ours = theirs.mesh_info, copy.copy(theirs.mesh_info)

        def restore() -> None:
            if theirs.mesh_info is ours:
                # set_separate_reduce_scatter_group(), for example, may have changed the copy.
                vars(mesh).update({**vars(ours), "replicate_process_group": mesh.replicate_process_group})
                theirs.mesh_info = mesh

        ours.replicate_process_group = group
        theirs.mesh_info = ours
        self._restore.append(restore)

    def close(self) -> None:
        """Restores PyTorch's collectives and drops the residuals. May be called twice.

        Call it between steps. The model can then be trained with PyTorch's collectives, or compressed again.
        """
        if self._end_of_scaler is not None:
            self._end_of_scaler()
            self._end_of_scaler = None
        while self._restore:
            self._restore.pop()()
        self._communicators.close()
        self._closed = True
        for group in self._groups:
            group.residual = group.replica_residual = group.low_rank = None
        alone, self._alone = self._alone, None
        if alone is not None and dist.is_initialized():
            with contextlib.suppress(ValueError, AssertionError):  # already destroyed with the default group
                dist.destroy_process_group(alone)

    def _use(self, gradients: str) -> None:
        """Reduces all groups' gradients in another format from now on. For gradients="auto"."""
        self._options = self._options_of(gradients)
        for group in self._groups:
            group.use(self._options, can_undo=self._end_of_scaler is not None)

    @property
    def choice(self) -> Optional[Dict[str, Any]]:
        """Returns what gradients="auto" has chosen, after seven backwards in FP32; otherwise None.

        As gradwire.torch.Hook.choice, measured on one parameter group, and "measured_step_ms" is None.
        Backwards with a gradient that is not finite come in addition. On one rank always None.
        """
        return None if self._auto is None else self._auto.choice

    # ---- State ---------------------------------------------------------------------------------------------

    @property
    def residual_bytes(self) -> int:
        """Returns the bytes of residuals on this rank. 0 before the first backward and after close()."""
        return sum(r.bytes for r in self._residuals())

    def _residuals(self) -> List[Residual]:
        return [r for g in self._groups for r in (g.residual, g.replica_residual) if r is not None]

    def _low_ranks(self) -> List[LowRank]:
        return [g.low_rank for g in self._groups if g.low_rank is not None]

    def use_scaler(self, scaler: Any, optimizer: Any = None) -> None:
        """Rescales residuals when a GradScaler changes the gradients' scale. Call it before the first step.

        See gradwire.torch.Hook.use_scaler(). A rank then also holds the residuals from before the step, which
        doubles their memory.

        Raises:
            BadArgument: `scaler` has no get_scale() and update().
            BadHandle: close() was called.
        """
        self._check_open()
        end = follow(scaler, optimizer, self._scale_changed)
        if self._end_of_scaler is not None:
            self._end_of_scaler()
        self._end_of_scaler = end
        for residual in self._residuals():
            residual.can_undo = True
        for low_rank in self._low_ranks():
            low_rank.can_undo = True

    def _scale_changed(self, factor: float, skipped: bool) -> None:
        for residual in self._residuals():
            residual.settle(factor, skipped)
        for low_rank in self._low_ranks():
            low_rank.settle(skipped)

    def _place(self) -> Place:
        mesh = self._groups[0].theirs.mesh_info
        replica = (0, 1)
        if hasattr(mesh, "replicate_mesh_rank"):
            replica = (mesh.replicate_mesh_rank, mesh.replicate_mesh_size)
        return {"shard": (mesh.shard_mesh_rank, mesh.shard_mesh_size), "replica": replica}

    def _other_dimensions(self) -> Place:
        meshes = {(group.theirs.mesh_info.mesh, around) for group in self._groups for around in (
            root_of(group.theirs.mesh_info.mesh),
            *(param.sharded_param.device_mesh for param in group.theirs.fsdp_params))}
        return other_dimensions(meshes)

    def state_dict(self) -> Dict[str, Any]:
        """Returns this rank's residuals by parameter, for torch.save(). Every rank saves its own.

        Call it between steps.

        Returns:
            {"version": 1, "gradients": spec, "shard": (rank, ranks), "replica": (rank, ranks), "mesh": {name
            of each other mesh dimension, such as tensor parallelism's: (rank, ranks)}, "parameters": names of
            parameters with error feedback, "tensors": {name: {"steps", "residual": float32 of the parameter's
            whole shape (with tensor parallelism, of this rank's part), and with HSDP "replica_residual":
            float32 of this rank's shard, padded, 1-D, and "dim", along which the parameter is sharded; with
            PowerSGD "factor": Q, (columns, rank), and "factor_steps"}}}, on the CPU. "tensors" lacks parameters
            that had no gradient yet, but for "factor_steps".

        Raises:
            BadHandle: close() was called.
        """
        self._check_open()
        tensors: Dict[str, Dict[str, Any]] = {}
        for group in self._groups:
            rows = group.theirs.mesh_info.shard_mesh_size
            if group.residual is not None:
                for name, flat in group.residual.state().items():
                    whole = whole_of(flat, self._params[name][0], rows)
                    tensors.setdefault(name, {"steps": group.residual.steps})["residual"] = whole
            if group.replica_residual is not None:
                for name, flat in group.replica_residual.state().items():
                    entry = tensors.setdefault(name, {"steps": group.replica_residual.steps})
                    entry["replica_residual"] = flat
                    entry["dim"] = self._params[name][0].fsdp_placement.dim
            if group.low_rank is not None and group.low_rank.steps > 0:
                factors = group.low_rank.state()  # empty up to the step `start`
                for name, (_, owner) in self._params.items():
                    if owner is group and self._is_low_rank(name):
                        entry = tensors.setdefault(name, {"steps": 0})
                        entry["factor_steps"] = group.low_rank.steps
                        entry.update({"factor": factors[name]} if name in factors else {})
        undecided = {"undecided": True} if self._auto is not None and self._auto.choice is None else {}
        return {"version": 1, "gradients": self._options.gradients, **undecided, **self._place(),
                "mesh": self._other_dimensions(), "parameters": self._kept(), "tensors": tensors}

    def load_state_dict(self, state: Union[Dict[str, Any], Sequence[Dict[str, Any]]]) -> None:
        """Restores residuals. Call it between steps.

        Residuals that the state lacks become zero; for parameters that it does not list, a warning is logged.

        Args:
            state: this rank's state_dict(); or a list of states, in any order, from a run with another world
                size. Rank r of n then loads the sum of the residuals of ranks r, r + n, r + 2n, ..., and
                needs only these states. The sum over all ranks is preserved. Residuals of HSDP's replicas are
                added to the other residuals. PowerSGD's are added likewise for replicas in place of ranks.
                The sizes of other mesh dimensions, such as tensor parallelism's, must be those of the states.

        Raises:
            BadArgument: a state is of another version, mesh, rank or model, a state that is needed is missing,
                or several are of one rank.
            BadHandle: close() was called.
        """
        self._check_open()
        states = [state] if isinstance(state, dict) else list(state)
        if not states or any(s.get("version") != 1 for s in states):
            raise _native.BadArgument(f"the states have versions {[s.get('version') for s in states]}; this "
                                      "package reads version 1")
        states = states_here(states, [{kind: s[kind] for kind in ("shard", "replica")} for s in states],
                             self._other_dimensions())
        auto = self._auto if not states[0].get("undecided") else None
        adopted = [spec for spec in (auto.request.specs if auto is not None and auto.choice is None else ())
                   if encoded_once(spec) == states[0]["gradients"]]
        if auto is not None and adopted:
            auto.adopt(adopted[0])
            self._use(adopted[0])
        try:
            for s in states:
                self._check_names(s)
        except _native.BadArgument:
            if auto is not None and adopted:
                auto.choice = None
                self._use(PLAIN)
            raise
        known = {name for s in states for name in s.get("parameters", s["tensors"])}
        unknown = [name for name in self._kept() if name not in known]
        if unknown and known:
            _log.warning("the loaded state lacks %d parameters, such as %r: their residuals begin at zero",
                         len(unknown), unknown[0])
        low_rank = {name for name in self._params if self._is_low_rank(name)}
        self._load(chosen(states, self._place(), {n: p for n, (p, _) in self._params.items()}, low_rank))

    def _kept(self) -> List[str]:
        """Returns the parameters that have a residual after their first gradient."""
        return [name for name, (param, group) in self._params.items() if group.keeps(name, param)]

    def _is_low_rank(self, name: str) -> bool:
        param, group = self._params[name]
        return group.replicas is not None and group.is_low_rank(name, param)

    def _check_open(self) -> None:
        if self._closed:
            raise _native.BadHandle("close() dropped the residuals: call compress() again")

    def _check_names(self, state: Dict[str, Any]) -> None:
        kinds = ("residual", "replica_residual")
        if not self._residuals() and any(kind in e for e in state["tensors"].values() for kind in kinds):
            why = ("residual='off'" if self._options.residual == "off"
                   else f"gradients={self._options.gradients!r}")
            raise _native.BadArgument(f"the state has residuals, which {why} would drop: do not load the "
                                      "state, or pass compress() a lossy format and a residual type")
        for name, entry in state["tensors"].items():
            if name not in self._params:
                raise _native.BadArgument(f"the state has a residual of {name!r}, but this model has no such "
                                          "parameter: the state is of another model")
            param, group = self._params[name]
            shape = tuple(param._orig_size)
            if "residual" in entry and tuple(entry["residual"].shape) != shape:
                raise _native.BadArgument(f"the state's residual of {name!r} is "
                                          f"{tuple(entry['residual'].shape)}, but the parameter is {shape}: "
                                          "the state is of another model")
            low_rank = self._options.low_rank if self._is_low_rank(name) else None
            dropped = "residual" in entry or ("replica_residual" in entry and low_rank is None)
            if group.residual is None and dropped:
                raise _native.BadArgument(f"the state has a residual of {name!r}, which gradients="
                                          f"{self._options.gradients!r} would drop: pass compress() the "
                                          "formats with which the state was saved")
            factor = (math.prod(shape[1:]), low_rank.rank_of(shape)) if low_rank is not None else None
            if factor is not None and "factor" in entry and tuple(entry["factor"].shape) != factor:
                raise _native.BadArgument(f"the state's factor of {name!r} is "
                                          f"{tuple(entry['factor'].shape)}, but replicas="
                                          f"{self._options.replicas!r} has {factor}: pass compress() the "
                                          "rank with which the state was saved")

    def _load(self, tensors: Dict[str, Dict[str, Any]]) -> None:
        for group in self._groups:
            rows = group.theirs.mesh_info.shard_mesh_size
            own = {n: e for n, e in tensors.items() if self._params[n][1] is group}
            steps = max([e["steps"] for e in own.values()], default=0)
            if group.residual is not None:
                group.residual.load({n: shards_of(e["residual"], self._params[n][0], rows)
                                     for n, e in own.items() if "residual" in e}, steps)
            if group.replica_residual is not None:
                group.replica_residual.load({n: e["replica_residual"] for n, e in own.items()
                                             if "replica_residual" in e}, steps)
            if group.low_rank is not None:
                group.low_rank.load({n: e["factor"] for n, e in own.items() if "factor" in e},
                                    max([e.get("factor_steps", 0) for e in own.values()], default=0),
                                    group.theirs.device)
