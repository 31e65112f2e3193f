"""Creates communicators of the ranks of a torch.distributed process group."""
from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import secrets
import socket
import weakref
from typing import Any, List

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from gradwire import _native
from gradwire._communicator import Communicator
from gradwire._port import reserve_port

# PyTorch's default, half an hour. A rank may pause for minutes, as rank 0 does when it writes a checkpoint. A
# dead rank is detected at once, with any timeout: its connections break.
TIMEOUT_S = default_pg_timeout.total_seconds()


def _default_group() -> Any:
    return dist.distributed_c10d._get_default_group() if dist.is_initialized() else None


class Origin:
    """The process and the process groups for which a communicator is valid.

    The groups are the default group and, if different, the group of the communicator's ranks.
    """

    def __init__(self, process_group: Any = None) -> None:
        group = _default_group()
        self._process = os.getpid()
        self._group = weakref.ref(group) if group is not None else None
        self._own = process_group

    def forked(self) -> bool:
        """Returns whether this process is a fork of the communicator's process."""
        return self._process != os.getpid()

    def ended(self) -> str:
        """Returns why a communicator of this origin cannot be used now; "" if it can."""
        if self.forked():
            return "this process is a fork of the process that made its communicator"
        now = _default_group()
        if now is None or self._group is None or (self._group() is now and _registered(self._own)):
            return ""
        return "torch.distributed.destroy_process_group() has ended the process group of its communicator"


def _registered(group: Any) -> bool:
    if group is None or group == dist.group.WORLD:
        return True
    try:
        dist.get_rank(group)
        return True
    except (RuntimeError, ValueError):  # PyTorch 1.13, and later
        return False


def normal_tensors() -> Any:
    """Returns a context for PyTorch's collectives of objects, which fail in inference mode in PyTorch 1.13."""
    return torch.inference_mode(False)


class _Inherited:
    """A default process group that a forked process inherits. The parent has the threads and connections."""

    group: Any = None

    @classmethod
    def remember(cls) -> None:
        group = _default_group()
        cls.group = weakref.ref(group) if group is not None else None


os.register_at_fork(after_in_child=_Inherited.remember)


def _refuse_inherited() -> None:
    if _Inherited.group is not None and _Inherited.group() is _default_group():
        raise _native.BadHandle("the default process group belongs to the parent of this forked process: "
                                "call init_process_group() in this process, or start it with the spawn "
                                "method")


def global_rank(group: Any, rank: int) -> int:
    if group is None or group == dist.group.WORLD:
        return rank
    find = getattr(dist, "get_global_rank", None) or dist.distributed_c10d._get_global_rank
    return int(find(group, rank))


def _network() -> str:
    """Returns an identifier of the network of this process's 127.0.0.1.

    It is equal in two processes only if they share that network. The host name is not sufficient: containers
    of one image, and network namespaces of one machine, share it.
    """
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/net"))
    return " ".join(parts)


def _own_address() -> str:
    """Returns this machine's address on the network that leads to MASTER_ADDR; "" if unknown.

    gethostbyname(gethostname()) returns 127.0.1.1 on Debian.
    """
    master = os.environ.get("MASTER_ADDR", "")
    if not master:
        return ""
    try:
        family, kind, _, _, address = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            host = str(probe.getsockname()[0])
    except OSError:
        return ""
    return f"[{host}]" if ":" in host else host


def _rendezvous(stack: contextlib.ExitStack, networks: List[str]) -> List[str]:
    """Returns the rendezvous address of this process, which is rank 0, and a secret.

    gw_comm_options.store is not used, for three reasons. The store does not know the ranks' networks, so rank
    0 would listen on all addresses; with this function ranks of one machine use 127.0.0.1, which other
    machines cannot reach. The store publishes only the addresses of rank 0's interfaces, while MASTER_ADDR
    may be another address of this machine. A process group is not a store, and callbacks that adapt it would
    make this file longer.

    Args:
        stack: reserves the port until it closes.
        networks: _network() of every rank.
    """
    host = "127.0.0.1"
    if len(set(networks)) > 1:
        # An address that the other ranks can reach: MASTER_ADDR if torch's store also runs in this process.
        host = os.environ.get("MASTER_ADDR", "") if dist.get_rank() == 0 else _own_address()
        host = host or socket.gethostname()
    return [f"tcp://{host}:{reserve_port(stack)}", secrets.token_hex(16)]


def communicator(process_group: Any = None, device: "str | int" = "host",
                 timeout_s: _native.Seconds = TIMEOUT_S, shrinkable: bool = False) -> Communicator:
    """Creates a communicator of the ranks of a torch.distributed process group. Collective.

    Rank 0 chooses a free port and a secret, and broadcasts both through the process group.

    Args:
        process_group: None: the default group.
        device, timeout_s, shrinkable: see Communicator.
    """
    device, timeout_s = _native.device(device), _native.seconds(timeout_s)  # before ranks wait for each other
    rank, world = dist.get_rank(process_group), dist.get_world_size(process_group)
    if world == 1:
        return Communicator(device=device, timeout_s=timeout_s)
    _refuse_inherited()
    networks: List[Any] = [None] * world
    rendezvous: List[Any] = [None, None]
    with contextlib.ExitStack() as stack, normal_tensors():
        dist.all_gather_object(networks, _network(), group=process_group)
        if rank == 0:
            rendezvous = list(_rendezvous(stack, networks))
        dist.broadcast_object_list(rendezvous, src=global_rank(process_group, 0), group=process_group)
        comm = Communicator(rendezvous[0], rank, world, device=device, timeout_s=timeout_s,
                            secret=rendezvous[1], shrinkable=shrinkable)
    comm._key = hashlib.sha256(rendezvous[1].encode()).hexdigest()[:16]
    return comm


def communicator_of_store(store: Any, rank: int, world: int, timeout_s: float = TIMEOUT_S) -> Communicator:
    """Creates a communicator on the host of ranks that share a torch.distributed store. Collective."""
    # A store can outlive its group. Every rank counts the groups, so that no rank reads an old address.
    group = f"gradwire/{store.add(f'gradwire/groups/{rank}', 1)}"
    store.set(f"{group}/network/{rank}", _network())
    with contextlib.ExitStack() as stack:
        if rank == 0:
            networks = [store.get(f"{group}/network/{r}").decode() for r in range(world)]
            store.set(f"{group}/rendezvous", " ".join(_rendezvous(stack, networks)))
        address, secret = store.get(f"{group}/rendezvous").decode().split()
        comm = Communicator(address, rank, world, timeout_s=timeout_s, secret=secret)
    return comm
