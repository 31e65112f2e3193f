"""Whole training steps on one GPU: `gradwire train` and PyTorch, eager and through torch.compile, alternating.

ViT-L/32, batch 32. PyTorch: bench/baselines/pytorch_vit.py; compiled models run once and take a minute per
precision. Gradwire: a world of 1, synthetic images, with and without --graph; medians of its log. With --gelu
tanh both sides use the tanh form of GELU. --deadline-s is that of one run of gradwire.

First, in the first precision, with a CUDA graph per step on both sides: Gradwire, PyTorch eager, Gradwire,
torch.compile, Gradwire. These compare GPUs' work, although only Gradwire copies 19 MB of images to the device
per step, and the goals use them. --captured measures nothing else. Rows without a graph compare the launch
paths of two hosts. Last, two ranks that share the GPU and exchange gradients in groups of --gradient-group
layers. Compare these only with each other.
"""
import statistics
import sys

from experiments.table import Experiment
from harness import ranks, report

GRADWIRE_SIZES = {"vit_l_32": ["--model", "vit_l_32"],
                  "tiny": ["--model", "vit_s_16", "--image-size", "32", "--patch", "8", "--depth", "2",
                           "--heads", "4", "--width", "64", "--mlp", "128"]}


def pytorch_row(options, precision, compiled, captured=False):
    import torch

    from baselines import pytorch_vit
    row = {"who": ("torch.compile" if compiled else "PyTorch eager") + ", captured" * captured,
           "precision": precision}
    if compiled and not hasattr(torch, "compile"):
        return {**row, "error": f"torch {torch.__version__} has no torch.compile"}
    try:
        baseline = pytorch_vit.PyTorch(options, precision, compiled, captured)
        return {**row, "step_ms": baseline.measure(), "parameters": baseline.parameters,
                "model": baseline.source}
    except Exception as error:  # torch.compile can fail in many ways; keep the other rows
        return {**row, "error": (str(error).splitlines() or [type(error).__name__])[0][:200]}
    finally:
        if options.device == "cuda":
            torch.cuda.empty_cache()


def gradwire_row(options, precision, graph=False, group=None):
    """Measures Gradwire on one rank. `group`: measures two ranks that exchange `group` layers together."""
    flags = ["--graph"] if graph else ["--gradient-group", str(group)] if group else []
    row = {"who": " ".join(["Gradwire", *(["--ranks 2"] if group else []), *flags]), "precision": precision}
    try:
        records = ranks.train([
            *GRADWIRE_SIZES[options.model], "--data", "synthetic", "--device",
            "host" if options.device == "cpu" else "cuda", "--ranks", "2" if group else "1", "--batch-size",
            options.batch_size, "--steps", options.warmup + options.steps, "--optimizer", "sgd", "--lr",
            "0.01", "--momentum", "0", "--eval-every", "0", "--precision", precision, "--gelu", options.gelu,
            *flags],
            deadline_s=options.deadline_s, gradwire=options.gradwire)
    except (OSError, ranks.Failed) as error:
        return {**row, "error": str(error)[:200]}
    result = report.result_of(records, options.warmup)
    return {**row, "step_ms": result["step_ms"], "parameters": result["parameters"]}


def measure(options):
    import torch
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu_training: PyTorch sees no GPU")
    first = options.precision[0]
    for compiled in (False,) if options.no_compile else (False, True):
        yield gradwire_row(options, first, graph=True)
        yield pytorch_row(options, first, compiled, captured=True)
    yield gradwire_row(options, first, graph=True)
    if options.captured:
        return
    for precision in options.precision:
        for repetition in range(options.repetitions):
            yield gradwire_row(options, precision)
            if not options.no_graph:
                yield gradwire_row(options, precision, graph=True)
            yield pytorch_row(options, precision, compiled=False)
            if repetition == 0 and not options.no_compile:
                yield pytorch_row(options, precision, compiled=True)
    for group in options.gradient_group:
        yield gradwire_row(options, first, group=group)


def settings(options, items):
    import torch
    return {"device_name": torch.cuda.get_device_name() if options.device == "cuda" else "host"}


def line(row):
    result = row.get("error") or f"{statistics.median(row['step_ms']):.2f} ms"
    return f"{row['precision']}  {row['who']}: {result}"


def medians(rows):
    """Returns a dictionary: (precision, who) -> the median step over all repetitions."""
    all_ms = {}
    for row in rows:
        if "step_ms" in row:
            all_ms.setdefault((row["precision"], row["who"]), []).extend(row["step_ms"])
    return {key: statistics.median(ms) for key, ms in all_ms.items()}


def goal_lines(rows):
    """Returns the project's goals on one GPU, and whether each goal is met."""
    ms = medians(rows)
    ours = {p: min((ms[p, w] for w in ("Gradwire", "Gradwire --graph") if (p, w) in ms), default=None)
            for p in ("fp32", "tf32", "bf16")}
    wanted = [("bf16", "PyTorch eager, captured", 1.0), ("bf16", "torch.compile, captured", 1.2),
              ("fp32", "PyTorch eager", 1.0), ("tf32", "PyTorch eager", 1.0)]
    lines = []
    for precision, baseline, least in wanted:
        if ours[precision] and (precision, baseline) in ms:
            ratio = ms[precision, baseline] / ours[precision]
            lines.append(f"{precision}: {ratio:.2f}x of {baseline}'s steps/s (goal {least:g}x): "
                         f"{'met' if ratio >= least else 'NOT MET'}")
    for precision in ours:
        if (precision, "Gradwire") in ms and (precision, "Gradwire --graph") in ms:
            ratio = ms[precision, "Gradwire"] / ms[precision, "Gradwire --graph"]
            lines.append(f"{precision}: --graph {ratio:.2f}x as fast as without (goal 1x): "
                         f"{'met' if ratio >= 1 else 'NOT MET'}")
    return lines


def table(rows, batch_size):
    ms = medians(rows)
    out = [["precision", "", "ms/step", "steps/s", "images/s"]]
    for key in dict.fromkeys((r["precision"], r["who"]) for r in rows):
        error = next((r["error"] for r in rows if (r["precision"], r["who"]) == key and "error" in r), "")
        if key in ms:
            out.append([*key, f"{ms[key]:.2f}", f"{1e3 / ms[key]:.2f}", f"{1e3 * batch_size / ms[key]:.0f}"])
        else:
            out.append([*key, "-", "-", error])
    return out


def tables(document):
    rows = document["items"]
    return (report.plain(table(rows, document["settings"]["batch_size"])) + "\n\n"
            + "\n".join(goal_lines(rows)))


EXPERIMENT = Experiment(
    __doc__,
    {"device": "cuda", "gradwire": ranks.GRADWIRE, "model": "vit_l_32", "precision": ("bf16", "tf32", "fp32"),
     "gelu": "exact", "gradient_group": (2, 4), "batch_size": 32, "steps": 30, "warmup": 10,
     "repetitions": 1, "deadline_s": 120, "no_compile": False, "no_graph": False, "captured": False},
    {"device": "cpu", "model": "tiny", "precision": ("fp32",), "steps": 1, "warmup": 1, "batch_size": 1,
     "no_compile": True}, measure, tables, line=line, settings=settings, modules=("torch",))
