"""Tests the DDP hook with spec "auto": docs/for-pytorch.md, "Choosing the format"."""
from __future__ import annotations

import contextlib
import fnmatch
import io
import pickle
from typing import Any, Dict, Iterator, List

import torch
import torch.distributed as dist

import gradwire
from gradwire import _auto, _spec
from gradwire.torch import Hook

from ddp_training import TASKS, Run, same_on_all_ranks
from rank import RANK, WORLD, check, refused, say

_SCHEDULE = "schedule=two_shot"
_LIST = [f"bf16:{_SCHEDULE}", f"int8:{_SCHEDULE}", f"powersgd:rank=2,{_SCHEDULE}"]
REQUEST = "auto:error=0.1,allow=" + "+".join(_LIST)
_STEPS = 40  # more than the choice and the check after it take


@contextlib.contextmanager
def _durations(ms: Dict[str, float], hidden: bool = False) -> Iterator[None]:
    """Replaces the measured times of a bucket, which depend on the machine; FP32: 2 s.

    Rank r of n adds 1200 (r - (n-1) / 2) ms to BF16, which is the fastest on rank 0, but not in the mean.
    With hidden, all buckets but the last take no time.
    """
    measured = _auto.Auto.after

    def after(self: Any, hook: Any, entry: Any, buffer: Any, stream: int) -> None:
        measured(self, hook, entry, buffer, stream)
        trial = self._trials.get(entry.index)
        if trial is not None:
            own = {**ms, _LIST[0]: ms[_LIST[0]] + 1200 * (RANK - (WORLD - 1) / 2)}
            exposed = not hidden or entry.index == len(hook._buckets) - 1
            trial.durations[:] = [exposed * own.get(spec, 2000.0) for spec in self.request.specs]

    _auto.Auto.after = after  # type: ignore[method-assign]
    try:
        yield
    finally:
        _auto.Auto.after = measured  # type: ignore[method-assign]


INT8 = {_LIST[0]: 600.0, _LIST[1]: 300.0, _LIST[2]: 200.0}  # powersgd's error is more than 0.1


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
    numbers = torch.tensor([hook.choice[key] for key in ("error", "step_ms", "fp32_step_ms")])
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
    with _durations(INT8):
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


def buckets_that_backward_hides_stay_in_fp32() -> None:
    with _durations(INT8, hidden=True):
        hook = Hook(REQUEST)
        run = Run(TASKS["vit"], hook, bucket_cap_mb=0.25)
        first = _chosen_at(hook, run)
    choice, buckets = hook.choice, hook.stats()["buckets"]
    check(buckets > 2 and choice["fp32_buckets"] == buckets - 1, f"{buckets} buckets, {choice}")
    check(hook.spec.startswith(f"{_LIST[1]},dense=+"), hook.spec)
    check(len(set(_specs_of_all(hook))) == 1, "ranks chose other buckets")
    whole = next(row for row in choice["candidates"] if row["spec"] == _LIST[1])
    check(0 < choice["error"] < whole["error"], f"{choice}")
    run.step(first + 1)
    sent = hook.stats()["wire_bytes"]
    check(sent > 0.5 * hook.stats()["dense_bytes"], f"{sent} B of {hook.stats()['dense_bytes']}")
    same_on_all_ranks(run.parameters(), "the model")
    model = {key: value.clone() for key, value in run.model.state_dict().items()}
    resumed = Hook(REQUEST)
    other = Run(TASKS["vit"], resumed, bucket_cap_mb=0.25)
    other.model.load_state_dict(model)
    other.optimizer.load_state_dict(run.optimizer.state_dict())
    resumed.load_state_dict(hook.state_dict())
    check(resumed.spec == hook.spec and resumed.choice["loaded"], resumed.spec)
    for step in range(first + 2, first + 5):
        run.step(step)
        other.step(step)
    apart = float((run.parameters() - other.parameters()).abs().max())
    check(apart <= 1e-3, f"parameters differ by {apart:.1e} after the checkpoint")
    for one in (hook, resumed):
        one.close()


def auto_waits_for_finite_gradients() -> None:
    with _durations(INT8):
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
    with _durations(INT8):
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
        ("auto:best", "'best'", _auto.GRAMMAR), ("auto:error=x", "'x'"), ("auto:error=-1", "'-1'"),
        ("auto:error=0.1,error=0.2", "given twice"), ("auto:allow=", "empty spec"),
        ("auto:allow=int8+int8", "int8 is allowed twice"), ("auto:allow=topk:momentum=0.9", "momentum=0.9"),
        ("auto:allow=int8:start=5", "start=5"), ("auto:allow=auto", "cannot choose auto"),
        ("auto:allow=int9", "int9"),
    ):
        refused(lambda spec=spec: Hook(spec), gradwire.BadArgument, *words)
    refused(lambda: Hook("auto", min_ranks=1), gradwire.BadArgument, "min_ranks=1", "name a spec")


class _One:
    """A spec's numbers in a made-up step."""

    def __init__(self, durations: List[float], error: float) -> None:
        self.durations, self.error = durations, error


def _choice(step_ms: float, ready: List[float], error: float = 0.1, **specs: _One) -> Dict[str, Any]:
    return _auto.choose(_auto.Request(error, tuple(specs)), step_ms, ready,
                        {spec: one.durations for spec, one in specs.items()},
                        {spec: one.error for spec, one in specs.items()})


def auto_predicts_steps_from_queued_buckets() -> None:
    # Buckets wait for each other: 0..40, 40..80, 80..120; the last is ready at 50, so 70 ms are exposed.
    check(_auto.exposed_ms([0, 10, 50], [40, 40, 40]) == 70, "queued")
    check(_auto.exposed_ms([0, 10, 50], [5, 5, 5]) == 5, "only the last")
    fp32 = _One([40, 40, 40], 0)
    chosen = _choice(130, [0, 10, 50], fp32=fp32, int8=_One([10, 10, 10], 0.01), int4=_One([5, 5, 5], 0.2))
    check((chosen["spec"], chosen["step_ms"], chosen["fp32_step_ms"]) == ("int8", 70, 130), f"{chosen}")
    check(_choice(130, [0, 10, 50], 1.0, fp32=fp32, int4=_One([5, 5, 5], 0.2))["spec"] == "int4", "error=1")
    # A tie goes to the smallest error: with hidden communication, to FP32.
    hidden = _choice(200, [0, 60, 150], fp32=_One([40, 40, 8], 0), int8=_One([10, 10, 2], 0.01))
    check(hidden["spec"] == "fp32", f"{hidden}")


def hidden_buckets_do_not_lengthen_the_step() -> None:
    ready, int8, fp32 = [0.0, 50.0, 100.0, 150.0], [10.0] * 4, [20.0] * 4
    # 0.4 of the 150 ms of backward hide three buckets of 20 ms.
    check(_auto.hidden_buckets(ready, int8, fp32) == 3, "all but the last")
    check(_auto.hidden_buckets(ready, int8, [25.0] * 4) == 2, "the third bucket would delay the last")
    check(_auto.hidden_buckets([0.0] * 4, int8, fp32) == 0, "nothing is hidden without backward")
    check(_auto.hidden_buckets([0.0], [1.0], [1.0]) == 0, "the last bucket is never hidden")


def patterns_match_exactly_the_names() -> None:
    every = [f"layer{n}.{m}.{k}" for n in range(12) for m in ("fc", "ln") for k in ("weight", "bias")]
    every += ["layer", "head.weight", "cls"]
    for count in range(len(every) + 1):
        some = every[:count]
        found = _spec.patterns(every, some)
        matched = [name for name in every if any(fnmatch.fnmatchcase(name, pattern) for pattern in found)]
        check(matched == some, f"{found} for {some}")
    check(_spec.patterns(every, every[:5]) == ["layer0.*", "layer1.fc.weight"], "as few as possible")
    ring = "int8:schedule=ring"
    text = _spec.with_dense(ring, ["a.*", "b"])
    check(text == f"{ring},dense=+a.*+b" and _spec.without_dense(text) == ring, text)
    check(_spec.without_dense(_spec.with_dense("int8", ["a"])) == "int8", "without options")


SCENARIOS = [hidden_buckets_do_not_lengthen_the_step, patterns_match_exactly_the_names,
             buckets_that_backward_hides_stay_in_fp32, auto_chooses_alike_and_checks_its_prediction,
             auto_has_the_bits_of_the_choice_after_steps_in_fp32, auto_waits_for_finite_gradients,
             a_checkpoint_keeps_autos_choice, auto_refuses_what_it_cannot_choose,
             auto_predicts_steps_from_queued_buckets]
