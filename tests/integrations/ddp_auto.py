"""Tests the DDP hook with spec "auto": docs/for-pytorch.md, "Choosing the format"."""
from __future__ import annotations

import contextlib
import io
import pickle
from typing import Any, Dict, Iterator, List

import torch
import torch.distributed as dist

import gradwire
from gradwire import _auto
from gradwire.torch import Hook

from ddp_training import TASKS, Run, same_on_all_ranks
from rank import RANK, WORLD, check, refused, say

_SCHEDULE = "schedule=two_shot"
_LIST = [f"bf16:{_SCHEDULE}", f"int8:{_SCHEDULE}", f"powersgd:rank=2,{_SCHEDULE}"]
REQUEST = "auto:error=0.1,allow=" + "+".join(_LIST)
_STEPS = 40  # more than the choice and the check after it take


@contextlib.contextmanager
def _chooses_int8() -> Iterator[None]:
    """Makes the library's choice INT8: which spec is the fastest depends on the machine."""
    measured = _auto.choose

    def choose(comm: Any, specs: Any, gradients: Any, **options: Any) -> Any:
        return measured(comm, specs, gradients, **options)._replace(spec=_LIST[1])

    _auto.choose = choose
    try:
        yield
    finally:
        _auto.choose = measured


def _specs_of_all(hook: Hook) -> List[str]:
    specs: List[Any] = [None] * WORLD
    dist.all_gather_object(specs, hook.spec)
    return specs


def _chosen_at(hook: Hook, run: Run) -> int:
    """Trains until the hook has chosen. Returns the number of steps in FP32."""
    for step in range(_STEPS):
        run.step(step)
        if hook.choice is not None:
            return step
    raise AssertionError("no choice")


def auto_chooses_alike_and_checks_its_prediction() -> None:
    hook = Hook("auto")
    run = Run(TASKS["vit"], hook, bucket_cap_mb=0.25)
    check(hook.choice is None and hook.spec == "fp32", "before the first step")
    first = _chosen_at(hook, run)
    check(first >= _auto.OBSERVED + 2, f"chosen before step {first}")
    specs = _specs_of_all(hook)
    check(len(set(specs)) == 1 and specs[0] == hook.choice["spec"], f"{specs}")
    numbers = torch.tensor([hook.choice[key] for key in ("error", "communicate_ms", "exposed_ms")])
    same_on_all_ranks(numbers, "the choice's numbers")
    rows = {row["spec"]: row for row in hook.choice["candidates"]}
    check(list(rows) == ["fp32", *_auto._CANDIDATES], f"{list(rows)}")
    # A format's error follows from the format: between 2^-9 and 2^-8 of a BF16 value is lost, for example.
    for spec, least, most in (("fp32", 0, 1e-6), ("bf16", 5e-4, 4e-3), ("int8", 1e-3, 3e-2),
                              ("int4", 0.05, 0.5), ("powersgd:rank=1", 0.1, 1)):
        check(least <= rows[spec]["error"] <= most, f"{spec}: error {rows[spec]['error']}")
    check(hook.choice["error"] <= 0.1, "the error is within the default limit")
    for step in range(first + 1, _STEPS):
        run.step(step)
    check(hook.choice["measured_step_ms"] > 0, "the choice was not checked")
    same_on_all_ranks(run.parameters(), "the model")
    check(hook.stats()["steps"] == _STEPS, f"{hook.stats()['steps']} steps")
    hook.close()
    say(f"auto on {WORLD} ranks: {specs[0]}, chosen after {first} steps")


def auto_has_the_bits_of_the_choice_after_steps_in_fp32() -> None:
    # In one bucket: a bucket's number decides which rank adds an element, and INT8's blocks.
    with _chooses_int8():
        hook = Hook(REQUEST)
        run = Run(TASKS["vit"], hook, bucket_cap_mb=100)
        first = _chosen_at(hook, run)
        check(hook.spec == _LIST[1], f"chose {hook.choice}")
        for step in range(first + 1, first + 5):
            run.step(step)
    other_hook = Hook(f"int8:start={first},{_SCHEDULE}")
    other = Run(TASKS["vit"], other_hook, bucket_cap_mb=100)
    for step in range(first + 5):
        other.step(step)
    apart = float((run.parameters() - other.parameters()).abs().max())
    # In FP32 schedule=auto measures, and with more than two ranks schedules add in different orders.
    check(apart <= (0 if WORLD == 2 else 1e-3),
          f"parameters differ by {apart:.1e} from a run with start={first}")
    for one in (hook, other_hook):
        one.close()
    say(f"auto: after {first} steps within {apart:.1e} of int8:start={first}")


def auto_waits_for_finite_gradients() -> None:
    with _chooses_int8():
        hook = Hook(REQUEST)
        run = Run(TASKS["vit"], hook)
        for step in range(_auto.OBSERVED + 8):
            with torch.no_grad():
                kept = run.model.heads.head.bias.clone()
                if step < _auto.OBSERVED + 6 and RANK == WORLD - 1:
                    run.model.heads.head.bias.fill_(float("inf"))
            run.step(step)
            if step < _auto.OBSERVED + 6:
                check(hook.choice is None, f"chose from NaN in step {step}")
                run.model.load_state_dict(_finite(run, kept))
        check(hook.spec == _LIST[1], f"chose {hook.choice}")
    hook.close()


def _finite(run: Run, bias: torch.Tensor) -> Dict[str, Any]:
    torch.manual_seed(7)
    fresh = run.task.build().state_dict()
    return {**fresh, "heads.head.bias": bias}


def a_checkpoint_keeps_autos_choice() -> None:
    with _chooses_int8():
        hook = Hook(REQUEST)
        run = Run(TASKS["vit"], hook, bucket_cap_mb=0.25)
        run.step(0)
        early = hook.state_dict()
        check(early["spec"] == REQUEST, early["spec"])
        first = _chosen_at(hook, run)
    file = io.BytesIO()
    torch.save({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict(),
                "hook": hook.state_dict(gather=False)}, file)
    unpickled = pickle.loads(pickle.dumps(hook))
    check(unpickled.spec == _LIST[1], "a pickled hook keeps the choice")
    unpickled.close()
    file.seek(0)
    saved = torch.load(file)
    check(saved["hook"]["spec"] == _LIST[1], saved["hook"]["spec"])
    for step in range(first + 1, first + 4):
        run.step(step)
    resumed = Hook(REQUEST)
    other = Run(TASKS["vit"], resumed, bucket_cap_mb=0.25)
    other.model.load_state_dict(saved["model"])
    other.optimizer.load_state_dict(saved["optimizer"])
    resumed.load_state_dict(saved["hook"])
    check(resumed.choice == {"spec": _LIST[1], "loaded": True}, f"{resumed.choice}")
    for step in range(first + 1, first + 4):
        other.step(step)
    apart = float((run.parameters() - other.parameters()).abs().max())
    check(apart <= 1e-3, f"parameters differ by {apart:.1e} after the checkpoint")  # other buckets at first
    refused(lambda: Hook("auto:allow=int4").load_state_dict(saved["hook"]), gradwire.BadArgument, _LIST[1])
    refused(lambda: Hook("int8").load_state_dict(early), gradwire.BadArgument, "auto:")
    resumed.load_state_dict(early)
    check(resumed.spec == _LIST[1], "a state from before the choice keeps the hook's own")
    for one in (hook, resumed):
        one.close()


def auto_refuses_what_it_cannot_choose() -> None:
    for spec, *words in (
        ("auto:best", "'best'", _auto.GRAMMAR), ("auto:error=x", "error=x"), ("auto:error=-1", "error=-1"),
        ("auto:allow=topk:momentum=0.9", "momentum=0.9", "cannot be a choice"), ("auto:allow=", "''"),
        ("auto:allow=int8:start=5", "start=5"), ("auto:allow=auto", "'auto'"), ("auto:allow=int9", "int9"),
    ):
        refused(lambda spec=spec: Hook(spec), gradwire.BadArgument, *words)
    refused(lambda: Hook("auto", min_ranks=1), gradwire.BadArgument, "min_ranks=1", "name a spec")


SCENARIOS = [auto_chooses_alike_and_checks_its_prediction,
             auto_has_the_bits_of_the_choice_after_steps_in_fp32, auto_waits_for_finite_gradients,
             a_checkpoint_keeps_autos_choice, auto_refuses_what_it_cannot_choose]
