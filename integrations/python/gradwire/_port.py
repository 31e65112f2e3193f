"""A port for a rendezvous, which nobody else can take before it is used."""
from __future__ import annotations

import contextlib
import os
import socket
from typing import Optional

from gradwire import _native


def reserve_port(stack: contextlib.ExitStack) -> int:
    """A free port, which stays ours until the stack closes: bound but not listening, it lets the rendezvous
    listen there, because both set SO_REUSEADDR, and nobody else. With GRADWIRE_PORTS one of those.

    Raises BadArgument if GRADWIRE_PORTS is no range, CommFailed if none of its ports is free."""
    reserved = stack.enter_context(socket.socket())
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    allowed = _allowed()
    if allowed is None:
        reserved.bind(("", 0))
        return int(reserved.getsockname()[1])
    # The last first: ranks listen at the first that is free. Those that another process has reserved look free with
    # SO_REUSEADDR, and those of connections that have just ended look taken without it.
    for free in (_unused, lambda port: True):
        for port in filter(free, reversed(allowed)):
            with contextlib.suppress(OSError):
                reserved.bind(("", port))
                return port
    raise _native.CommFailed(f"none of the ports {allowed[0]} to {allowed[-1]} is free; allow more of them: GRADWIRE_PORTS")


def _unused(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
            return True
        except OSError:
            return False


def _allowed() -> Optional[range]:
    text = os.environ.get("GRADWIRE_PORTS", "")
    if not text:
        return None
    first, _, last = text.partition("-")
    if not (first.isdecimal() and (last or first).isdecimal() and 1 <= int(first) <= int(last or first) <= 65535):
        raise _native.BadArgument(f"GRADWIRE_PORTS is '{text}'; give a range of ports such as 20000-20100")
    return range(int(first), int(last or first) + 1)
