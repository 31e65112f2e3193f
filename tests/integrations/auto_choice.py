"""The choice of spec "auto": what the suites of DDP and FSDP2 share."""
from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator

import laws
from gradwire import _auto
from rank import check


@contextlib.contextmanager
def chooses_int8() -> Iterator[None]:
    """Makes the library's choice INT8: which spec is the fastest depends on the machine."""
    measured = _auto.choose

    def choose(comm: Any, specs: Any, gradients: Any, **options: Any) -> Any:
        int8 = next(spec for spec in specs if spec.startswith("int8"))
        return measured(comm, specs, gradients, **options)._replace(spec=int8)

    _auto.choose = choose
    try:
        yield
    finally:
        _auto.choose = measured


def chosen_at(run: Any, handle: Any, steps: int = 40) -> int:
    """Trains until all ranks have chosen alike. Returns the number of steps in FP32."""
    for step in range(steps):
        run.step(step)
        if handle.choice is not None:
            specs = laws.of_all_ranks(handle.choice["spec"])
            check(len(set(specs)) == 1, f"{specs}")
            return step
    raise AssertionError("no choice")


def errors_are_the_formats(choice: Dict[str, Any]) -> None:
    """Checks the errors, which follow from the formats: BF16 loses 2^-9 to 2^-8 of a value, for example."""
    limits = {"fp32": (0, 1e-6), "bf16": (3e-4, 5e-3), "int8": (5e-4, 4e-2), "int4": (0.02, 0.6),
              "powersgd:rank=1": (0.1, 1)}
    for row in choice["candidates"]:
        least, most = limits.get(row["spec"], (0, 1))
        check(least <= row["error"] <= most, f"{row}")
