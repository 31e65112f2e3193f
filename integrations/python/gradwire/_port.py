"""A port for a rendezvous, which nobody else can take before it is used."""
from __future__ import annotations

import contextlib
import socket


def reserve_port(stack: contextlib.ExitStack) -> int:
    """A free port, which stays ours until the stack closes: bound but not listening, it lets the rendezvous
    listen there, because both set SO_REUSEADDR, and nobody else."""
    reserved = stack.enter_context(socket.socket())
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", 0))
    return int(reserved.getsockname()[1])
