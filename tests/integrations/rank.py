"""Provides the scenarios of all frameworks with the rank's number, output and checks."""
from __future__ import annotations

import math
import os
import time
from typing import Any, Callable

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def say(text: str) -> None:
    if RANK == 0:
        print(text, flush=True)


def check(condition: bool, text: str) -> None:
    if not condition:
        raise AssertionError(f"rank {RANK} of {WORLD}: {text}")


def refused(call: Callable[[], Any], error: Any, *words: str, within_s: float = math.inf) -> str:
    """Expects an error, or one of a tuple of errors, whose text contains all words. Returns the text."""
    begin = time.monotonic()
    try:
        call()
    except error as raised:
        missing = [word for word in words if word not in str(raised)]
        check(not missing, f"{missing} not in: {raised}")
        took_s = time.monotonic() - begin
        check(took_s < within_s, f"raised after {took_s:.0f} s: {raised}")
        return str(raised)
    raise AssertionError(f"rank {RANK} of {WORLD}: no error that says {words}")
