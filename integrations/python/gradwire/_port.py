"""Reserves a port for a rendezvous."""
from __future__ import annotations

import contextlib
import os
import socket
from typing import Optional

from gradwire import _native


def reserve_port(stack: contextlib.ExitStack) -> int:
    """Reserves a free port until the stack closes, and returns it.

    The port is bound but not listening. The rendezvous can listen on it, because both set SO_REUSEADDR; other
    processes cannot bind it. GRADWIRE_PORTS limits the choice.

    Raises:
        BadArgument: GRADWIRE_PORTS is not a range.
        CommFailed: no port in GRADWIRE_PORTS is free.
    """
    reserved = stack.enter_context(socket.socket())
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    allowed = _allowed()
    if allowed is None:
        reserved.bind(("", 0))
        return int(reserved.getsockname()[1])
    # Tries the highest port first, because ranks listen at the lowest free port. Ports reserved by another
    # process look free with SO_REUSEADDR; ports of connections that have just ended look taken without it.
    for free in (_unused, lambda port: True):
        for port in filter(free, reversed(allowed)):
            with contextlib.suppress(OSError):
                reserved.bind(("", port))
                return port
    raise _native.CommFailed(f"none of the ports {allowed[0]} to {allowed[-1]} is free: set GRADWIRE_PORTS "
                             "to a larger range")


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
    if not (first.isdecimal() and (last or first).isdecimal()
            and 1 <= int(first) <= int(last or first) <= 65535):
        raise _native.BadArgument("GRADWIRE_PORTS must be a range of ports such as 20000-20100, not "
                                  f"'{text}'")
    return range(int(first), int(last or first) + 1)
