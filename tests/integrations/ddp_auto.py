"""Scenarios of the DDP hook with spec "auto": docs/for-pytorch.md, "Choosing the format"."""
from __future__ import annotations

import pickle

import torch

import gradwire
import laws
from auto_choice import chooses_int8, chosen_at, errors_are_the_formats
from gradwire import _auto
from gradwire.torch import Hook
from rank import RANK, WORLD, check, refused
from scenarios import scenario
from training import Run, flat, network

BF16, INT8, POWERSGD = (f"{spec}schedule=two_shot" for spec in ("bf16:", "int8:", "powersgd:rank=2,"))
REQUEST = f"auto:error=0.1,allow={BF16}+{INT8}+{POWERSGD}"
STEPS = 40  # more than the choice and the check after it take


@scenario()
def auto_chooses_alike_and_checks_its_prediction() -> None:
    run = Run("auto", bucket_kb=30)
    hook = run.hook
    check(hook.choice is None and hook.spec == "fp32", "before the first step")
    first = chosen_at(run, run.hook)
    check(first >= _auto.OBSERVED + 2, f"chosen before step {first}")
    numbers = [hook.choice[key] for key in ("error", "communicate_ms", "exposed_ms")]
    laws.ranks_agree("the choice's numbers", numbers)
    specs = [row["spec"] for row in hook.choice["candidates"]]
    check(specs == ["fp32", *_auto._CANDIDATES] and hook.choice["spec"] == hook.spec, f"{specs}")
    errors_are_the_formats(hook.choice)
    check(hook.choice["error"] <= 0.1, "the error is within the default limit")
    run.steps(first + 1, STEPS)
    check(hook.choice["measured_step_ms"] > 0, "the choice was not checked")
    run.same_weights()
    check(hook.stats()["steps"] == STEPS, f"{hook.stats()['steps']} steps")
    hook.close()


@scenario()
def auto_has_the_bits_of_the_choice_after_steps_in_fp32() -> None:
    # In one bucket: a bucket's number decides which rank adds an element, and INT8's blocks.
    with chooses_int8():
        run = Run(REQUEST)
        first = chosen_at(run, run.hook)
        check(run.hook.spec == INT8, f"chose {run.hook.choice}")
        weights = run.steps(first + 1, first + 5)
    other = Run(f"{INT8},start={first}")
    apart = float((weights - other.steps(0, first + 5)).abs().max())
    # In FP32 schedule=auto measures, and with more than two ranks schedules add in different orders.
    check(apart <= (0 if WORLD == 2 else 1e-3), f"parameters are {apart:.1e} from a run with start={first}")
    for each in (run, other):
        each.hook.close()


def continues_from_its_checkpoint(run: Run, next_step: int) -> None:
    """Checks that a state has the choice, and that a new hook continues with it."""
    state = run.state()
    check(state["hook"]["spec"] == run.hook.spec, state["hook"]["spec"])
    unpickled = pickle.loads(pickle.dumps(run.hook))
    check(unpickled.spec == run.hook.spec, "a pickled hook keeps the choice")
    unpickled.close()
    resumed = Run(REQUEST, bucket_kb=30).load(state)
    check(resumed.hook.choice == {"spec": run.hook.spec, "loaded": True}, f"{resumed.hook.choice}")
    apart = float((run.steps(next_step, next_step + 3) - resumed.steps(next_step, next_step + 3)).abs().max())
    check(apart <= 1e-3, f"parameters are {apart:.1e} apart after the checkpoint")  # other buckets at first
    resumed.hook.close()


@scenario()
def auto_waits_for_finite_gradients_and_a_checkpoint_keeps_its_choice() -> None:
    with chooses_int8():
        run = Run(REQUEST, bucket_kb=30)
        run.step(0)
        early = run.hook.state_dict()
        check(early["spec"] == REQUEST, early["spec"])
        for step in range(1, _auto.OBSERVED + 6):
            if RANK == WORLD - 1:
                with torch.no_grad():
                    run.model[-1].bias.fill_(float("inf"))
            run.step(step)
            check(run.hook.choice is None, f"chose from NaN in step {step}")
            run.model.load_state_dict(network().state_dict())
            run.optimizer.state.clear()
        first = chosen_at(run, run.hook)
        check(run.hook.spec == INT8, f"chose {run.hook.choice}")
    saved = run.hook.state_dict(gather=False)
    refused(lambda: Hook("auto:allow=int4").load_state_dict(saved), gradwire.BadArgument, INT8)
    refused(lambda: Hook("int8").load_state_dict(early), gradwire.BadArgument, "auto:")
    continues_from_its_checkpoint(run, first + 1)
    run.hook.load_state_dict(early)
    check(run.hook.spec == INT8, "a state from before the choice keeps the hook's own")
    check(bool(flat(run.model).isfinite().all()), "the weights are not finite")
    run.hook.close()


@scenario(2)
def auto_refuses_what_it_cannot_choose() -> None:
    for spec, *words in (
        ("auto:best", "'best'", _auto.GRAMMAR), ("auto:error=x", "error=x"), ("auto:error=-1", "error=-1"),
        ("auto:allow=topk:momentum=0.9", "momentum=0.9", "cannot be a choice"), ("auto:allow=", "''"),
        ("auto:allow=int8:start=5", "start=5"), ("auto:allow=auto", "'auto'"), ("auto:allow=int9", "int9")):
        refused(lambda: Hook(spec), gradwire.BadArgument, *words)
    refused(lambda: Hook("auto", min_ranks=1), gradwire.BadArgument, "min_ranks=1", "name a spec")
