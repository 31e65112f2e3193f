"""The state of the DistributedDataParallel hook: buckets, their reducers, and checkpoints."""
from __future__ import annotations

import logging
import weakref
from typing import Any, Dict, List, Optional, Sequence, Union

import torch
import torch.distributed as dist

from gradwire import _native
from gradwire._auto import BucketAuto, is_request
from gradwire._buckets import Bucket, real_view, total_stats
from gradwire._communicator import Communicator, calls_of
from gradwire._elastic import Elastic, check_uses_no_process_group
from gradwire._find_ddp import PYTHON_REDUCER
from gradwire._hook_buckets import HookBuckets
from gradwire._hook_state import (Checkpoint, LossScale, Place, as_list, check_names, for_rank, from_dict,
                                  gathered, to_dict)
from gradwire._mesh import other_dimensions, root_of
from gradwire._process_group import TIMEOUT_S, Origin, communicator, during, place_in, until
from gradwire._reducer import Reducer, State

DEFAULT_SPEC = "int8"  # no loss of accuracy in docs/for-pytorch.md's table, with SGD or AdamW

_log = logging.getLogger("gradwire")


class Hook(HookBuckets):
    """The state of allreduce_hook: the compression, the ranks, and the codecs' state.

    The constructor is not collective: the first gradient creates the communicator. Use one hook per model.

    Gradients are reduced as float32; buckets of other floating-point types are converted to float32 and back.
    bfloat16 buckets are sent as bfloat16 wherever the spec means FP32: all tensors with "fp32", dense
    tensors, and factors of "powersgd" and values of "randk" without wire=. float16 buckets are sent as the
    spec says: "fp32" is exact and doubles their bytes; "bf16" has as many bytes as float16.

    A hook can be pickled between steps. The pickle contains its state_dict(). The copy uses the default
    process group. If the names came from a model, call name_parameters(model) before DDP's first step.

    Args:
        spec: a spec of docs/formats.md, such as "fp32", "bf16:round=stochastic" or
            "powersgd:rank=4,wire=int8,start=1000". With ",momentum=X" the optimizer's must be 0. Or
            `auto[:error=E][,allow=SPEC+SPEC...]`: averages in FP32, measures, and chooses the spec of the
            shortest predicted step whose error is at most E: see `choice`.
        process_group: DDP's process group. None: the group of `model`, or the default group.
        model: provides the parameters' names for error messages and state_dict(). None: parameters are
            numbered in the order of DDP's first buckets, which is the same in every run of the same model.
        timeout_s: the longest wait for a peer that is connected but silent, in seconds or as a timedelta; by
            default half an hour, as in PyTorch. Then backward() raises with the text of gradwire.CommFailed.
        comm: a communicator to use in place of the process group's. Nothing else may use the communicator
            until close().
        seed: for stochastic rounding.
        min_ranks: when ranks die, the others continue while at least this number of ranks is left, and
            backward() returns the mean over them. 0: backward() raises. Host only; see docs/for-pytorch.md
            for requirements.

    Raises:
        BadArgument: an argument is invalid. The constructor checks all of them.
    """

    __module__ = "gradwire.torch"  # the name in pickles, and in messages

    def __init__(self, spec: str = DEFAULT_SPEC, *, process_group: Any = None,
                 model: Optional[torch.nn.Module] = None, timeout_s: _native.Seconds = TIMEOUT_S,
                 comm: Optional[Communicator] = None, seed: int = 0, min_ranks: int = 0) -> None:
        timeout_s, min_ranks = _native.seconds(timeout_s), _native.integer(min_ranks, "min_ranks")
        try:  # a wrong spec must fail here, not in backward
            auto = BucketAuto(spec) if is_request(spec) else None
            if auto is None:
                with Communicator() as alone:
                    Reducer(alone, spec, [], seed=seed).close()
        except _native.BadArgument as error:
            raise error.with_traceback(None) from None  # without the frames of the library's calls
        if auto is not None and min_ranks > 0:
            raise _native.BadArgument(f"spec {spec!r} with min_ranks={min_ranks}: auto cannot measure with "
                                      "ranks that may die: name a spec")
        if min_ranks < 0 or (min_ranks > 0 and comm is not None):
            raise _native.BadArgument(f"min_ranks={min_ranks}: " + (
                "the hook creates the communicators itself; pass no comm"
                if comm is not None else "must be at least 1, or 0 to disable"))
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            if min_ranks > 0:
                check_uses_no_process_group(model)
            if process_group is None:
                process_group = model.process_group
            elif process_group != model.process_group:
                raise _native.BadArgument("process_group differs from the DistributedDataParallel's, over "
                                          "which the hook must average: leave process_group out")
        if comm is None and torch.distributed.is_available() and torch.distributed.is_initialized():
            _, world = place_in(process_group)
            if min_ranks > world:
                raise _native.BadArgument(f"min_ranks={min_ranks}: the process group has {world} ranks")
        super().__init__("fp32" if auto is not None else spec, seed, auto)
        self._keeps_copies = min_ranks > 0
        # The rank's place on other mesh dimensions than data parallelism, if DDP knows the mesh.
        is_ddp = isinstance(model, torch.nn.parallel.DistributedDataParallel)
        mesh = getattr(model, "device_mesh", None) if is_ddp else None
        self._mesh = other_dimensions([(mesh, root_of(mesh))]) if mesh is not None else {}
        self._process_group = process_group
        self._timeout_s = timeout_s
        self._comm = comm
        if model is not None:
            self.name_parameters(model)
        self._failure: Optional[BaseException] = None
        self._elastic = Elastic(min_ranks) if min_ranks > 0 else None
        self._side_stream: Any = None
        self._origin: Optional[Origin] = None  # the communicator's process and groups
        self._sent -= comm.bytes_sent if comm is not None else 0
        if comm is not None:
            comm._claim(self, "a Hook")
            self._origin = Origin()
        self._finalizer = weakref.finalize(self, self._worker.shut_down)

    # ---- The hook ------------------------------------------------------------------------------------------

    def __call__(self, bucket: "dist.GradBucket") -> "torch.futures.Future[torch.Tensor]":
        """Reduces a bucket. DDP calls the hook for every bucket, in the same order on every rank."""
        if not self._finalizer.alive:
            raise _native.BadHandle("the hook was closed: create another Hook for DDP")
        if self._failure is not None:
            raise _native.CommFailed(f"an earlier step failed: {self._failure}") from self._failure
        if self._origin is not None and self._origin.ended():
            raise _native.BadHandle(f"the hook can no longer be used: {self._origin.ended()}; create another "
                                    "Hook for DDP")
        if isinstance(bucket, tuple):
            raise _native.Unsupported(PYTHON_REDUCER)
        gradients = bucket.buffer()
        if gradients.layout != torch.strided:
            return self._pass_through(gradients)
        buffer = real_view(gradients)
        entry = self._entry_for(bucket, buffer)
        if self._auto is not None:
            self._auto.called(entry, buffer)
        if buffer.is_cuda:
            return self._enqueue_cuda(entry, gradients, buffer)
        done: "torch.futures.Future[Any]" = torch.futures.Future()
        addresses = entry.addresses_in(buffer)

        def job() -> Optional[BaseException]:
            try:
                self._reduce(entry, buffer, addresses, 0)
            except BaseException as error:  # result() raises it
                self._failure = error
                return error
            return None

        def result(finished: "torch.futures.Future[Any]") -> torch.Tensor:
            failure = finished.value()
            if failure is not None:
                raise failure
            return gradients

        if self._elastic is not None:
            done = self._elastic.submit(self, entry, bucket, buffer, addresses)
        else:
            self._worker.submit(job, done)
        return until(done.then(result), self.spec, f"DDP bucket {entry.index}", buffer)

    def _pass_through(self, gradient: torch.Tensor) -> "torch.futures.Future[torch.Tensor]":
        """Averages a sparse gradient over the process group, as DDP does without a hook."""
        if self._elastic is not None:
            raise _native.Unsupported("a gradient is sparse. Sparse gradients are averaged by the process "
                                      "group, which cannot lose ranks: use sparse=False, or a hook without "
                                      "min_ranks")
        gradient.div_(dist.get_world_size(self._process_group))
        work = dist.all_reduce(gradient, group=self._process_group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    def _enqueue_cuda(self, entry: Bucket, gradients: torch.Tensor,
                      buffer: torch.Tensor) -> "torch.futures.Future[torch.Tensor]":
        # Uses a side stream, so that backward continues. The Future lets DDP wait for that stream.
        if self._comm is not None:
            self._comm.check()  # an earlier step may have failed on its stream, which reports no errors
        if self._side_stream is None:
            self._side_stream = torch.cuda.Stream(buffer.device)
        future: "torch.futures.Future[torch.Tensor]" = torch.futures.Future(devices=[buffer.device])
        self._side_stream.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(self._side_stream), during(self.spec, f"DDP bucket {entry.index}", buffer):
            addresses = entry.addresses_in(buffer)
            try:
                self._reduce(entry, buffer, addresses, self._side_stream.cuda_stream)
            except BaseException as error:
                self._failure = error
                raise
            buffer.record_stream(self._side_stream)
            future.set_result(gradients)
        return future

    def _reduce(self, entry: Bucket, buffer: torch.Tensor, addresses: Any, stream: int) -> None:
        with calls_of(self):
            if self._auto is not None:
                chosen = self._auto.before(entry)
                if chosen is not None:
                    self._use(chosen)
            if entry.reducer is None:
                entry.reducer = self._make_reducer(entry, buffer)
            if self._scale is not None:
                self._scale.keep(list(self._buckets.values()))
            if entry.staging is not None:
                entry.staging.copy_(buffer)
            entry.reducer.allreduce_at(addresses, stream)
            if self._auto is not None:
                self._auto.after(self._communicator(buffer), entry, buffer,
                                 entry.index == max(self._buckets), self._seed, stream)
        if entry.staging is not None:
            buffer.copy_(entry.staging)

    def _communicator(self, buffer: torch.Tensor) -> Communicator:
        if self._comm is None:
            device: "str | int" = buffer.device.index if buffer.is_cuda else "host"
            self._origin = Origin(self._process_group)
            self._take_communicator(communicator(self._process_group, device, self._timeout_s,
                                                 shrinkable=self._elastic is not None))
        return self._comm  # type: ignore[return-value]

    def _take_communicator(self, comm: Communicator) -> None:
        """Replaces the communicator. The reducers of the old one are closed already."""
        comm._finalizer.atexit = False  # shut_down() closes it, after the worker has stopped
        before, self._comm = self._comm, comm
        self._worker.communicators[:] = [comm]
        if before is not None:
            self._sent += before.bytes_sent
            before.close()
        elif self._elastic is not None:
            self._elastic.ranks = list(range(comm.world))

    @property
    def choice(self) -> Optional[Dict[str, Any]]:
        """Returns what spec "auto" has chosen; None before the choice, and with another spec.

        "spec"; "error": relative L2 error of one encode; "communicate_ms"; "exposed_ms": communication that
        backward does not hide; "step_ms": this rank's predicted step; "fp32_step_ms": the same in FP32;
        "candidates": these numbers of each spec; "measured_step_ms": this rank's median of 20 steps after the
        choice, or None. Errors and times of communication are means over the ranks. After load_state_dict()
        only "spec", and "loaded". On one rank always None.
        """
        return None if self._auto is None else self._auto.choice

    def _named_spec(self) -> str:
        """Returns the spec for states: "auto..." before the choice."""
        return self._auto.text if self._auto is not None and self._auto.choice is None else self.spec

    @property
    def ranks(self) -> List[int]:
        """Returns the process group's ranks over which backward() averages; with min_ranks, the survivors."""
        if self._elastic is not None and self._elastic.ranks:
            return list(self._elastic.ranks)
        return list(range(place.world)) if (place := self._place()) is not None else []

    # ---- Checkpoints, statistics, closing ------------------------------------------------------------------

    def state_dict(self, gather: bool = True) -> Dict[str, Any]:
        """Returns each parameter's state, and the step count, for torch.save(). Call it between steps only.

        Args:
            gather: True: rank 0 gets the states of all ranks, whose residuals differ; other ranks get their
                own state. Collective: call it on every rank, and save rank 0's result. False: this rank's
                state, which every rank must save. With min_ranks or comm, and before the first step, always
                this rank's state.

        Returns:
            {"version", "identity", "steps", "spec", "tensors": {name: {"rows", "cols", "state": {kind:
            tensor}}}}, with 1-D CPU tensors of kind "residual", PowerSGD's "factor", ...; "others": [the other
            ranks' states]; and with DistributedDataParallel(device_mesh=...) "mesh": {name of each other mesh
            dimension: (rank, ranks)}. Rank 0 of each DDP process group gets its group's states.

        Raises:
            CommFailed: a rank did not call state_dict() within timeout_s. After 10 s a warning names that
                rank.
            BadHandle: the hook was closed.
        """
        if not self._finalizer.alive:
            raise _native.BadHandle("the hook was closed and its state dropped: call state_dict() before "
                                    "close()")
        self._worker.drain()
        state = to_dict(self._collect(lambda index: True) or State("", 0, {}), self._named_spec(),
                        self._place())
        state.update({"mesh": self._mesh} if self._mesh else {})
        if not gather or self._elastic is not None or self._comm is None or not self._comm._key:
            return state
        return gathered(state, self._process_group, self._comm._key, self._timeout_s)

    def load_state_dict(self, state: Union[Dict[str, Any], Sequence[Dict[str, Any]]]) -> None:
        """Restores a state_dict(). With model and optimizer also restored, training continues bit for bit.

        Call it between steps only. Parameters are found by name. A parameter that the state lacks, for
        example because it was frozen when saved, begins without a residual, and a warning is logged (logging,
        "gradwire").

        Args:
            state: rank 0's state_dict(); or this rank's state_dict(gather=False); or a list of states, in any
                order, from a run with another world size m. Rank r of n then loads the sum of the residuals
                of ranks r, r + n, r + 2n, ..., and needs only these states (if n > m, rank r % m). The sum
                over all ranks is preserved.

        Raises:
            BadArgument: a state is of another version, spec, mesh or model, a state that is needed is missing,
                or several are of one rank.
        """
        states = as_list(state)
        saved = states[0]["spec"]
        # A state from before the choice is one of FP32, which every spec continues.
        auto = self._auto is not None and (is_request(saved) or saved in self._auto.request.specs)
        chosen = for_rank(states, saved if auto else self._named_spec(), self._place(), self._mesh)
        if self._names.are_a_models:
            check_names(chosen, self._names.all())
        self._worker.drain()
        for entry in self._buckets.values():
            if entry.reducer is not None:
                entry.reducer.close()
        self._buckets.clear()
        if self._auto is not None and not is_request(saved):
            self._auto.adopt(saved)
            self.spec = saved
        elif self._auto is not None and self._auto.choice is None:
            self._auto.restart()
        self._carried = from_dict(chosen)
        self._from_load = True
        if self._scale is not None:
            self._scale.forget()

    def use_scaler(self, scaler: Any, optimizer: Any = None) -> None:
        """Rescales residuals when a GradScaler changes the gradients' scale. Call it before the first step.

        When scaler.update() changes the scale, residuals are multiplied by new / old. When the optimizer
        skips a step, because a gradient is infinite or NaN, residuals are first restored to their values
        before the step, because no weight received the values sent. Every step therefore copies the state to
        host memory. Does not support ddp.join().

        Args:
            scaler: the training loop's torch.amp.GradScaler, or an object with its get_scale() and update().
            optimizer: the model's optimizer, if the scaler has several optimizers, which skip steps
                independently.

        Raises:
            BadArgument: `scaler` is not a scaler, or the hook has min_ranks or max_norm.
        """
        if self._elastic is not None:
            raise _native.BadArgument("use_scaler() does not work with min_ranks, which repeats steps "
                                      "itself: use bfloat16, which needs no loss scale, or a hook without "
                                      "min_ranks")
        if "max_norm=" in self.spec:
            raise _native.BadArgument(f"use_scaler() does not work with {self.spec!r}: max_norm limits the "
                                      "scaled gradients; drop max_norm, or use bfloat16 without a scaler")
        scale = LossScale(self, scaler, optimizer)
        if self._scale is not None:
            self._scale.end()
        self._scale = scale

    def checkpoint(self, load_from: Any = None) -> Checkpoint:
        """Returns a Stateful for torch.distributed.checkpoint, with which every rank saves its own state.

            dcp.save({"model": ..., "hook": hook.checkpoint()}, checkpoint_id=folder)
            dcp.load({"model": ..., "hook": hook.checkpoint(load_from=folder)}, checkpoint_id=folder)

        Args:
            load_from: the folder, or a StorageReader, from which to read the saved world size. For another
                world size see load_state_dict(). None: the current world size.
        """
        return Checkpoint(self, load_from)

    def _place(self) -> Optional[Place]:
        if self._comm is not None:
            return Place(self._comm.rank, self._comm.world)
        if not (dist.is_available() and dist.is_initialized()):
            return None
        return Place(dist.get_rank(self._process_group), dist.get_world_size(self._process_group))

    def __getstate__(self) -> Dict[str, Any]:
        # A closed hook has no state. The state of a forked process belongs to its parent.
        ended = not self._finalizer.alive or (self._origin is not None and self._origin.forked())
        return {"spec": self._named_spec(), "timeout_s": self._timeout_s, "seed": self._seed,
                "state": (to_dict(State("", 0, {}), self._named_spec(), None) if ended
                          else self.state_dict(gather=False)),
                "min_ranks": self._elastic.min_ranks if self._elastic is not None else 0}

    def __setstate__(self, pickled: Dict[str, Any]) -> None:
        self.__init__(  # type: ignore[misc]
            pickled["spec"], timeout_s=pickled["timeout_s"], seed=pickled["seed"],
            min_ranks=pickled.get("min_ranks", 0))
        self._carried = from_dict(pickled["state"])

    def __deepcopy__(self, memo: Dict[int, Any]) -> "Hook":
        """Returns a hook with a copy of the state.

        A deep copy of a DDP has the copied hook in its list for logging only: its reducer has no hook.
        """
        _log.warning("a Hook was copied: the copy of a compressed DistributedDataParallel averages without "
                     "compression until compress(copy, %r)", self._named_spec())
        copied = Hook.__new__(Hook)
        copied.__setstate__(self.__getstate__())
        return copied

    def check(self) -> None:
        """Blocks until the last backward's communication is done. Raises CommFailed if it failed.

        On the host backward() raises. On CUDA it cannot: streams do not report errors, and when a peer dies
        the gradients are garbage. Without check() only the next backward() raises, after an optimizer.step()
        with these gradients. Call it before optimizer.step(), or at least before writing a checkpoint.
        """
        self._worker.drain()
        if self._side_stream is not None:
            self._side_stream.synchronize()
        if self._failure is not None:
            raise _native.CommFailed(f"the step failed: {self._failure}") from self._failure
        if self._comm is not None:
            self._comm.check()

    def stats(self) -> Dict[str, Any]:
        """Returns statistics of this rank.

        Of the last step, summed over buckets: "wire_bytes" that it sent; "dense_bytes" that it would have
        sent uncompressed, in the gradients' type; "ratio": dense_bytes / wire_bytes; "comm_ms". Of all steps
        since the hook was created: "total_wire_bytes". And "steps", with those of a loaded state;
        "extra_bytes" of memory; "buckets"; "buckets_in_place"; "description". All but the last are numbers.

        Raises:
            BadHandle: the hook was closed.
        """
        if not self._finalizer.alive:
            raise _native.BadHandle("the hook was closed: call stats() before close()")
        self._worker.drain()
        if self._side_stream is not None:
            self._side_stream.synchronize()
        sent = self._sent + self._comm.bytes_sent if self._comm is not None else 0
        return {**total_stats(self._buckets), "total_wire_bytes": sent}

    def __repr__(self) -> str:
        if not self._finalizer.alive:
            state = "closed"
        elif self._failure is not None:
            state = f"failed: {self._failure}"
        elif self._comm is None:
            state = "before the first step"
        else:
            state = f"{self._comm.world} ranks, {len(self._buckets)} DDP buckets"
        return f"<gradwire.torch.Hook {self._named_spec()!r}: {state}>"

    def close(self) -> None:
        """Stops the thread and closes the communicator; also done at exit. Do not use the hook afterwards."""
        if self._finalizer.alive:
            if self._scale is not None:
                self._scale.end()
            for entry in self._buckets.values():
                if entry.reducer is not None and not self._worker.busy:
                    entry.reducer.close()
            self._buckets.clear()
            self._finalizer()
            if self._comm is not None:
                self._comm._release(self)
