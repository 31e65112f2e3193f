"""Runs ranks as threads of this process."""
from __future__ import annotations

import threading
from typing import Any, Callable, List

import gradwire

_next_name = iter(range(1 << 30))


def run_ranks(world: int, body: Callable[[gradwire.Communicator], Any], name: str = "",
              **options: Any) -> List[Any]:
    """Runs body in one thread per rank. Returns the results, or raises the first exception.

    name: the rendezvous, by default in this process.
    """
    name = name or f"local://package{next(_next_name)}"
    results: List[Any] = [None] * world
    errors: List[BaseException] = []

    def run(rank: int) -> None:
        try:
            with gradwire.Communicator(name, rank, world, timeout_s=60, **options) as comm:
                results[rank] = body(comm)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]
    return results
