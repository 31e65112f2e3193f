"""Predicts a DDP step of a PyTorch model with each spec: python -m gradwire.doctor --model FILE.py:BUILD.

    step = forward and backward + compression + sending that backward does not hide

Forward, backward and compression are measured on this machine; sending is computed from bytes and link.
"""
from __future__ import annotations

import collections
import itertools
import math
import os
import re
import runpy
import statistics
import sys
import time
import traceback
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

import torch

from gradwire import _auto, _native, _reducer
from gradwire._buckets import spec_for
from gradwire._communicator import Communicator
from gradwire._spec import matrix
from gradwire.doctor import on_two_ranks

_MEASURE_S, _LEAST = 3.0, 3  # time of the timed steps, and their least number
_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20  # DDP's defaults, in bytes
_SAMPLE = 1 << 24  # elements whose compression is measured
_PACKET = 1514 / 1448  # bytes of a full Ethernet packet per byte of payload
_TIE = 1.05  # as gw_choose()


# What was measured. step_ms: forward and backward, at best; usual_ms: the median; buckets: bytes of DDP's
# buckets, in the order of backward; specs: error of one encode, ms to compress, bytes that one of two ranks
# sends.
Costs = NamedTuple("Costs", [("step_ms", float), ("usual_ms", float), ("backward_ms", float),
                             ("buckets", List[int]), ("specs", Dict[str, Tuple[float, float, float]])])
# A step with a spec. sent: bytes that a rank sends.
Prediction = NamedTuple("Prediction", [
    ("spec", str), ("error", float), ("sent", float), ("compress_ms", float), ("send_ms", float),
    ("exposed_ms", float), ("step_ms", float)])


def link_of(text: str) -> Tuple[float, float]:
    """Returns (bits per second, delay in ms) of RATE[,DELAY], such as "100Mbps,20ms". Raises BadArgument."""
    found = re.fullmatch(r"(\d+\.?\d*)(?=[a-zA-Z])([kKmMgGtT]?)(?:[Bb]it(?:/s)?|bps|b/s)?"
                         r"(?:,(\d+\.?\d*)(us|ms|s))?", text)
    if found is None or float(found[1]) == 0:
        raise _native.BadArgument(f"--link {text!r} is not RATE[,DELAY]: write for example 1Gbit, 100Mbps or "
                                  "10Gbit,50us")
    return (float(found[1]) * 1000.0 ** " kmgt".index(found[2].lower() or " "),
            float(found[3] or 0) * {"us": 1e-3, "s": 1e3}.get(found[4], 1.0))


def load(place: str) -> Tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """Returns what BUILD() of "FILE.py:BUILD" returns: a model and its loss function. Raises BadArgument."""
    file, _, name = place.rpartition(":")
    if not name.isidentifier() or not file:
        raise _native.BadArgument(f"--model {place!r} is not FILE.py:BUILD, a file and a function in it")
    if not os.path.isfile(file):
        raise _native.BadArgument(f"--model {place}: {os.path.abspath(file)} is no file")
    sys.path.insert(0, os.path.dirname(os.path.abspath(file)))  # for the file's imports
    try:
        build = runpy.run_path(file).get(name)
    except (Exception, SystemExit) as error:
        raise _failed(place, error, ". The doctor runs the file to find the function: put what trains under "
                      'if __name__ == "__main__":') from error
    try:
        made = build() if callable(build) else None
    except (Exception, SystemExit) as error:
        raise _failed(place, error) from error
    model, loss = made if isinstance(made, tuple) and len(made) == 2 else (None, None)
    if isinstance(model, torch.nn.Module) and callable(loss):
        return model, loss
    found = f"it returned {type(made).__name__}" if callable(build) else f"{file} has no such function"
    raise _native.BadArgument(f"--model {place}: {found}; {name}() must return (model, loss): a "
                              "torch.nn.Module, and a function that returns the loss of one batch")


def _failed(place: str, error: BaseException, remedy: str = "") -> _native.BadArgument:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return _native.BadArgument(f"--model {place}: {type(error).__name__}: {str(error).partition(chr(10))[0]} "
                               f"({frame.filename}:{frame.lineno}){remedy}")


def measure(place: str, specs: Sequence[str]) -> Costs:
    """Measures the model of "FILE.py:BUILD" on this machine. Raises BadArgument."""
    model, loss = load(place)
    times: List[Tuple[float, float]] = []  # of each step, and its backward
    begin = time.perf_counter()
    while len(times) < 1 + _LEAST or time.perf_counter() < begin + _MEASURE_S:
        model.zero_grad()
        try:
            start = time.perf_counter()
            value = loss()
            middle = time.perf_counter()
            value.backward()
        except Exception as error:
            raise _failed(place, error) from error
        end = time.perf_counter()
        times.append((1e3 * (end - start), 1e3 * (end - middle)))
    # Backward completes gradients approximately in the reverse order of the parameters, as DDP assumes.
    gradients = {name: p.grad for name, p in reversed(list(model.named_parameters()))
                 if p.grad is not None and p.grad.layout == torch.strided and p.grad.numel() > 0}
    if not gradients:
        raise _native.BadArgument(f"--model {place}: after backward no parameter of the model has a "
                                  "gradient: loss() must use the model that is returned with it")
    if any(gradient.is_cuda for gradient in gradients.values()):
        raise _native.BadArgument(f"--model {place}: compression is measured on the host alone, so BUILD "
                                  "must return a model on the CPU")
    buckets, limit = [0], _FIRST_BUCKET
    for gradient in gradients.values():
        if buckets[-1] >= limit:
            buckets.append(0)
            limit = _BUCKET
        buckets[-1] += gradient.numel() * gradient.element_size()
    step_ms, backward_ms = min(times[1:])  # other programs only lengthen a step
    usual_ms = statistics.median(total for total, _ in times[1:])
    return Costs(step_ms, usual_ms, backward_ms, buckets, _try(specs, gradients))


def _try(specs: Sequence[str], gradients: Dict[str, Any]) -> Dict[str, Tuple[float, float, float]]:
    """Returns Costs.specs: averages the gradients over two ranks of this machine, with each spec.

    Of large models it averages only each n-th tensor of a shape, and scales the costs.
    """
    by_shape: Dict[Any, List[Any]] = collections.defaultdict(list)
    for item in gradients.items():
        by_shape[item[1].shape].append(item)
    elements = sum(g.numel() for g in gradients.values())
    part = [item for items in by_shape.values() for item in items[::math.ceil(elements / _SAMPLE)]]
    scale = elements / sum(g.numel() for _, g in part)
    sent_as = [spec_for(spec, part[0][1].dtype) for spec in specs]
    floats = {name: g.detach().to("cpu", torch.float32).contiguous() for name, g in part}

    def rank(comm: Communicator) -> List[Tuple[float, float, float]]:
        trials = _reducer.choose(comm, sent_as, floats, error=1e6).trials
        found = []
        for spec in sent_as:
            reducer = _reducer.Reducer(comm, spec, [(name, *matrix(g.shape)) for name, g in floats.items()])
            reducer.allreduce([g.clone() for g in floats.values()])
            found.append((trials[spec].error, trials[spec].communicate_ms, reducer.stats()["wire_bytes"]))
            reducer.close()
        return found

    first, _ = on_two_ranks(rank)
    _, plain_ms, plain_bytes = first[0]
    # What a spec takes beyond moving its bytes within this machine is compression.
    return {spec: (error, scale * max(0.0, ms - plain_ms * sent / plain_bytes), scale * sent)
            for spec, (error, ms, sent) in zip(specs, first)}


def predict(costs: Costs, link: Tuple[float, float], ranks: int) -> List[Prediction]:
    """Predicts a step with each spec of `costs` for ranks that have a link_of() each."""
    shares = [size / sum(costs.buckets) for size in costs.buckets]
    found = []
    for spec, (error, compress_ms, two_ranks_send) in costs.specs.items():
        sent = two_ranks_send * 2 * (ranks - 1) / ranks  # of an allreduce in two halves
        exchanges = (4 if "powersgd" in spec else 2) * len(shares)
        send_ms = 1e3 * 8 * sent * _PACKET / link[0] + exchanges * link[1]
        # Backward has completed a bucket: the rest of it hides sending this bucket and the later ones.
        exposed_ms = max(0.0, *(send_ms * (1 - done + share) - costs.backward_ms * (1 - done)
                                for share, done in zip(shares, itertools.accumulate(shares))))
        found.append(Prediction(spec, error, sent, compress_ms, send_ms, exposed_ms,
                                costs.step_ms + compress_ms + exposed_ms))
    return found


def recommended(predictions: Sequence[Prediction], error: float) -> Prediction:
    """Returns the shortest step within the error, which the first always is; in a tie the smallest error."""
    allowed = [p for p in predictions if p is predictions[0] or p.error <= error]
    shortest = min(p.step_ms for p in allowed)
    return min((p for p in allowed if p.step_ms <= _TIE * shortest), key=lambda p: p.error)


def report(place: str, link_text: str, ranks: int, spec: str) -> str:
    """Returns the doctor's report about a model. Raises BadArgument."""
    if not _auto.is_request(spec):
        raise _native.BadArgument(f"--spec {spec!r} is not auto[:error=E][,allow=SPEC+SPEC...]; to compare "
                                  f"one spec with FP32 write auto:error=1,allow={spec}")
    link, request = link_of(link_text), _auto.parse(spec)
    if ranks < 2:
        raise _native.BadArgument(f"--ranks {ranks}: one rank sends nothing; at least 2")
    costs = measure(place, request.specs)
    predictions = predict(costs, link, ranks)
    plain, best = predictions[0], recommended(predictions, request.error)
    lines = [f"{place}: {sum(costs.buckets) / 1e6:.1f} MB of gradients, {len(costs.buckets)} DDP buckets; "
             f"forward and backward take {costs.step_ms:.1f} ms here with {torch.get_num_threads()} threads, "
             f"backward {costs.backward_ms:.1f}",
             f"Predicted for {ranks} ranks with links of {link_text}, without optimizer and data loading:", "",
             f"{'spec':16} {'error':>8} {'MB sent':>9} {'compress':>9} {'send':>9} {'not hidden':>11} "
             f"{'ms per step':>12} {'speedup':>8}"]
    lines += [f"{p.spec:16} {p.error:8.4f} {p.sent / 1e6:9.2f} {p.compress_ms:9.1f} {p.send_ms:9.1f} "
              f"{p.exposed_ms:11.1f} {p.step_ms:12.1f} {plain.step_ms / p.step_ms:8.2f}" for p in predictions]
    if best is plain:
        lines += ["", f"Recommendation: no compression. A step in FP32 waits {plain.exposed_ms:.1f} ms for "
                  f"the links, and no spec with an error up to {request.error:g} is 5 % faster."]
    else:
        lines += ["", f'Recommendation: compress(ddp_model, "{best.spec}"), '
                  f"{plain.step_ms / best.step_ms:.2f} times as fast: {costs.step_ms:.1f} + "
                  f"{best.compress_ms:.1f} (compress) + {best.exposed_ms:.1f} (not hidden) = "
                  f"{best.step_ms:.1f} ms; FP32: {costs.step_ms:.1f} + {plain.exposed_ms:.1f} = "
                  f"{plain.step_ms:.1f} ms."]
    if costs.usual_ms > 1.2 * costs.step_ms:
        lines += [f"The median step took {costs.usual_ms / costs.step_ms:.1f} times as long as the shortest: other "
                  "programs use the cores. Measure again when the machine is idle."]
    faster = min(predictions, key=lambda p: p.step_ms)
    if faster.step_ms * _TIE < best.step_ms:
        lines.append(f"{faster.spec} takes {faster.step_ms:.1f} ms, but one encode loses {faster.error:.0%}: "
                     "compare the loss of a short training before you use it.")
    return "\n".join([*lines, "Compression was measured with two ranks on this machine's cores; it takes "
                      "less with a machine for each rank."])
