"""The article's experiments: training steps over slow links with each kind of compression, and PyTorch's DDP.

Takes 5 to 10 minutes, and root for network namespaces; with --quick (one repetition, fewer modes) two
minutes. --no-sweep: buckets of 16 MB and one bucket for PowerSGD, in place of the fastest sizes. --no-fast:
without loopback and threads. --batch-size is per host, and determines communication's share of the step.
--python is an interpreter with torch and torchvision.

run.py slow_links --render FILE writes a result's tables and pictures into docs/results/slow-links.md. With
--section today they are those of a run with --no-sweep --no-fast and --python build/frameworks/python.
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from harness import ranks, report, smoke

MODES = ("alone", *report.NAMES)
OPTIONS = {"quick": False, "repetitions": 3, "rate": "1gbit", "hosts": 4, "batch_size": 1, "threads": 1,
           "no_baseline": False, "no_sweep": False, "no_fast": False, "modes": MODES, "deadline_s": 60,
           "gradwire": ranks.GRADWIRE, "python": "/usr/bin/python3", "section": "results"}
SMOKE = {"quick": True, "no_sweep": True, "no_fast": True, "hosts": 2,
         "modes": ("alone", "fp32", "16bit", "powersgd4", "fp32-products")}
SPECS = tuple(method.spec for method in report.METHODS)
ERRORS_ARE_RESULTS = True  # PyTorch's PowerSGD aborts with several buckets over gloo
# Bucket sizes of the sweep, for Gradwire and for PyTorch. None: one bucket.
SWEEP_MB = {"fp32": ((32, 16, 8, 4), (16, 8, 4)), "16bit": ((32, 16, 8, 4), (8, 4)),
            "powersgd4": ((None, 64, 32, 16), (16,))}
NOT_IN_QUICK = ("powersgd1", "powersgd2", "powersgd8")
UNTRIED_MB = {"fp32": 16, "16bit": 16, "4bit": 16}  # bucket sizes without a sweep
# ViT-S with ViT-L/32's 50 tokens. With batch 1, 4 hosts on a small machine with gigabit links spend 84 % of
# an FP32 step on communication, as the article's 8 GPUs did over PCIe.
MODEL = {"name": "vit_s_16", "image_size": 56, "patch": 8, "width": 384, "depth": 12, "heads": 6, "mlp": 1536,
         "classes": 1000}
SMOKE_MODEL = {**MODEL, "image_size": 16, "width": 32, "depth": 1, "heads": 1, "mlp": 32, "classes": 10}


# ---- Measurements ------------------------------------------------------------------------------------------


def planned(options, who, method, bucket_mb=None, phase="main", network="shaped", ranks_are="hosts",
            repetition=0, extra=()):
    """Returns a planned measurement. Modes with short steps have more steps."""
    if method == "alone":
        steps, warmup, spec, hook, ranks_are = 14, 3, "fp32", {"hook": "alone"}, "alone"
    else:
        chosen = next(m for m in report.METHODS if m.key == method)
        spec, hook, extra = chosen.spec, chosen.hook, (*chosen.flags, *extra)
        steps, warmup = {"fp32": (5, 1), "fp32-products": (5, 1), "16bit": (7, 2), "4bit": (10, 3)}.get(
            method, (16, 4) if who == "gradwire" else (6, 4))
    if network != "shaped":
        steps, warmup = 9, 4
    if phase == "sweep" or options.quick:
        steps = max(3, steps // 2)
    if options.smoke:
        steps, warmup = (4, 4) if phase == "trace" else (1, min(warmup, 2))
    out = {"who": who, "method": method, "phase": phase, "network": network, "ranks_are": ranks_are,
           "repetition": repetition, "bucket_mb": bucket_mb, "warmup": warmup, "steps": steps,
           "deadline_s": options.deadline_s}
    if who == "gradwire":
        return {**out, "spec": spec, "flags": list(extra)}
    return {**out, **hook, "hook": hook_16bit(options.python) if hook["hook"] == "16bit" else hook["hook"]}


def sweep(options):
    """Returns the sweep's measurements. PyTorch's PowerSGD is last, because it aborts over gloo."""
    items = []
    for method, (ours, theirs) in SWEEP_MB.items():
        for i, mb in enumerate(ours):
            items.append(planned(options, "gradwire", method, mb, "sweep"))
            if i < len(theirs):
                items.append(planned(options, "pytorch", method, theirs[i], "sweep"))
    return sorted(items, key=lambda i: i.get("hook") == "powersgd")


def main_modes(options, best):
    """Returns the planned measurements. Gradwire and PyTorch alternate within each repetition."""
    items = []
    for repetition in range(1 if options.quick else options.repetitions):
        for method in options.modes:
            if options.quick and options.modes == MODES and method in NOT_IN_QUICK:
                continue
            sizes = [(None, None)]
            if method in UNTRIED_MB:
                sizes.append((best["gradwire", method], best["pytorch", method]))
            elif method != "alone":  # Gradwire with the best size; PyTorch's hook aborts with several buckets
                sizes = [(best["gradwire", method], None)]
            for ours, theirs in sizes:
                items.append(planned(options, "gradwire", method, ours, repetition=repetition))
                if method not in report.OURS_ALONE:
                    items.append(planned(options, "pytorch", method, theirs, repetition=repetition))
    return items


def without_shaping(options, best):
    """Returns measurements over loopback, and with Gradwire's ranks as threads of one process."""
    items = []
    for method in ("fp32", "16bit", "powersgd4"):
        sizes = {(None, None), (best["gradwire", method], best["pytorch", method])}
        if method.startswith("powersgd"):
            sizes = {(best["gradwire", method], None)}
        for ours, theirs in sorted(sizes, key=lambda pair: pair != (None, None)):
            items.append(planned(options, "gradwire", method, ours, network="loopback"))
            items.append(planned(options, "pytorch", method, theirs, network="loopback"))
            items.append(planned(options, "gradwire", method, ours, network="threads", ranks_are="threads"))
    return items


def traces(options, best):
    """Returns one run each of three modes, for pictures of a step."""
    items = []
    for method, mb in (("fp32", None), ("16bit", best["gradwire", "16bit"]), ("powersgd4", None)):
        path = trace_path(options.json, method)
        path.parent.mkdir(parents=True, exist_ok=True)
        items.append(planned(options, "gradwire", method, mb, "trace",
                             extra=["--trace", str(path), "--trace-steps", "5:8"]))
    return items


def trace_path(result, method):
    return result.parent.resolve() / (result.stem + "-traces") / f"{method}.json"


def hook_16bit(python):
    """Returns PyTorch's 16-bit hook: bf16, which PyTorch before 2.9 may refuse without CUDA, otherwise fp16."""
    version = ranks.output_of(python, "-c", "import torch; print(torch.__version__)")
    return "bf16" if smoke.at_least(version or "0", "2.9") else "fp16"


def carried_out(options, items, rate):
    """Runs the measurements on all hosts. Returns the items with their results, and the exit status."""
    model = SMOKE_MODEL if options.smoke else MODEL
    training = {"batch_size": options.batch_size, "lr": 0.01, "momentum": 0.0, "timeout_s": 60}
    flags = ["--model", model["name"], "--data", "synthetic:512", "--device", "host", "--optimizer", "sgd",
             "--eval-every", "0"]
    sizes = ("image_size", "patch", "width", "depth", "heads", "mlp")
    for flag, value in {**{size: model[size] for size in sizes}, **training}.items():
        flags += ["--" + flag.replace("_", "-"), str(value)]
    if options.no_baseline:
        items = [i for i in items if i["who"] == "gradwire"]
    with tempfile.TemporaryDirectory(prefix="gradwire-experiments-") as folder:
        plan, results = pathlib.Path(folder, "plan.json"), pathlib.Path(folder, "results.jsonl")
        plan.write_text(json.dumps({
            "folder": folder, "gradwire": options.gradwire, "python": options.python, "flags": flags,
            "baseline": {"threads": options.threads, "model": model, **training}, "items": items}))
        threads = {f"{library}_THREADS": str(options.threads)
                   for library in ("GRADWIRE", "OMP_NUM", "OPENBLAS_NUM")}
        host = str(ranks.ROOT / "bench/harness/slow_links_host.py")
        code = ranks.run([sys.executable, "-B", host, str(plan)], options.hosts, rate,
                         120 + sum(i["deadline_s"] for i in items), threads)
        found = results.read_text().splitlines() if results.exists() else []
    return [json.loads(line) for line in found], code


def measure(options):
    if not os.access(options.gradwire, os.X_OK):
        sys.exit(f"slow_links: {options.gradwire} is missing; run make build")
    if unknown := set(options.modes) - set(MODES):
        sys.exit(f"slow_links: --modes {min(unknown)} is not one of {', '.join(MODES)}")
    why = ranks.no_links()
    if why and not options.smoke:
        sys.exit(f"slow_links: no slow links on this machine: {why}")
    items = []
    traced = options.smoke or (not options.quick and options.modes == MODES)
    phases = [("Size of buckets", not options.quick and not options.no_sweep, lambda _: sweep(options)),
              ("Every mode", True, lambda best: main_modes(options, best)),
              ("Traces of a step", traced, lambda best: traces(options, best)),
              ("Fast links", not options.no_fast, lambda best: without_shaping(options, best))]
    for title, wanted, plan in phases:
        if wanted:
            print(f"== {title}", flush=True)
            shaped = title != "Fast links" and not why
            found, code = carried_out(options, plan(best_sizes(items)), options.rate if shaped else "")
            items += found
            yield from found
            if code:
                sys.exit(code)


def best_sizes(items):
    """Returns the sweep's fastest bucket size by side and method. None means one bucket."""
    sizes = {}
    for who in ("gradwire", "pytorch"):
        for method in report.NAMES:
            tried = "powersgd4" if method.startswith("powersgd") else {"4bit": "16bit"}.get(method, method)
            sizes[who, method] = report.best_bucket_mb(items, who, tried, UNTRIED_MB.get(method))
    return sizes


def settings(options, items):
    first = {who: next((i for i in items if i["who"] == who and "error" not in i), {})
             for who in ("gradwire", "pytorch")}
    return {
        "model": SMOKE_MODEL if options.smoke else MODEL, "parameters": first["gradwire"].get("parameters"),
        "baseline_parameters": first["pytorch"].get("parameters"), "torch": first["pytorch"].get("torch"),
        "torchvision": first["pytorch"].get("torchvision"),
        "gradwire": ranks.output_of(options.gradwire, "--version")
    }


# ---- Results -----------------------------------------------------------------------------------------------


def tables(document):
    result = report.Result(document)
    base, alone, s = result.base("gradwire"), result.alone("gradwire"), result.settings
    parts = [f"{s['parameters'] or 0:,} parameters, batch {s['batch_size']}, {s['hosts']} hosts, "
             f"{s['rate']} links; {s['repetitions']} repetitions, medians",
             report.plain(report.main_table(result)),
             "Where Gradwire's step goes, ms", report.plain(report.parts_table(result))]
    if any(i["phase"] == "sweep" for i in result.items):
        parts += ["Size of buckets, ms/step", report.plain(report.sweep_table(result.items))]
    for network, title in (("loopback", "Loopback, no shaping"), ("threads", "Threads of one process")):
        if result.rows(network):
            parts += [title, report.plain(report.main_table(result, network))]
    if result.share():
        parts.append(f"Communication is {100 * result.share():.0f} % of Gradwire's FP32 step with one bucket "
                     f"({base.ms:.0f} ms; {alone.ms:.0f} ms without communication). The article's: 84 %.")
    parts.append("\n".join([*report.goal_lines(result), *("failed: " + e for e in report.errors(result))]))
    return "\n\n".join(parts)


def page_text(result, traced=(), picture=True):
    """Returns the section of docs/results/slow-links.md for a result. traced: methods with a timeline."""
    s, base, alone = result.settings, result.base("gradwire"), result.alone("gradwire")
    parts = [
        f"{s['date']}, commit {s['commit']}, {s['cpu']}, {s['cores']} cores, {s['system']}, {s['gradwire']}, "
        f"PyTorch {s['torch']}, torchvision {s['torchvision']}. `{s['command']}`, "
        f"{s['repetitions']} repetition{'s' if s['repetitions'] != 1 else ''}. "
        f"{s['parameters']:,} parameters, batch {s['batch_size']} per host." +
        (f" Communication is {100 * result.share():.0f} % of Gradwire's FP32 step with one bucket "
         f"({base.ms:.0f} ms, {alone.ms:.0f} without communication); in the article it was 84 %."
         if alone else ""), *(["![Speed of every mode](experiments.png)"] if picture else []),
        report.markdown(report.main_table(result)), "Goals:\n\n" + report.markdown(report.goal_table(result)),
        "Where Gradwire's step goes (medians, ms; host 0's marks):\n\n" +
        report.markdown(report.parts_table(result))
    ]
    if traced:
        parts.append("One step of each mode, all hosts on one clock (`--trace`, `bench/plots/plot.py`):")
        parts += [f"![One step: {report.NAMES[method]}](timeline-{method}.png)" for method in traced]
    if any(i["phase"] == "sweep" for i in result.items):
        parts.append("Size of buckets, ms per step; the fastest of each row is the size used for \"buckets\" "
                     "in the table above:\n\n" + report.markdown(report.sweep_table(result.items)))
    for network, title in (("loopback", "Fast links: the same processes over loopback, not shaped"),
                           ("threads", "Fast links: Gradwire's ranks as threads of one process")):
        if result.rows(network):
            parts.append(f"{title}:\n\n" + report.markdown(report.main_table(result, network)))
    if failed := report.errors(result):
        parts.append("Failed:\n\n" + "\n".join("- " + line for line in failed))
    return "\n\n".join(part.strip() for part in parts)


def render(document, path, options):
    """Writes tables and pictures into docs/results/slow-links.md."""
    result = report.Result(document)
    if not result.base("gradwire"):
        sys.exit(f"slow_links: {path} has no result for Gradwire's FP32 with one bucket, to which all others "
                 "are compared")
    if options.section != "results":
        report.put_section(options.section, page_text(result, picture=False))
        return
    found = {m: trace_path(path, m) for m in report.NAMES if trace_path(path, m).exists()}
    report.put_section("results", page_text(result, found))
    plot, folder = str(ranks.ROOT / "bench/plots/plot.py"), report.PAGE.parent
    for source, picture in [(path, "experiments.png"),
                            *((trace, f"timeline-{method}.png") for method, trace in found.items())]:
        subprocess.run([sys.executable, plot, str(source), "-o", str(folder / picture)], check=False)
