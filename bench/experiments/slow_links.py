"""The article's experiments: training steps over slow links with each kind of compression, and PyTorch's DDP.

Takes 20 minutes, and root for network namespaces; with --quick (one repetition, fewer modes) three
minutes. --no-sweep: buckets of 16 MB and one bucket for PowerSGD, in place of the fastest sizes. --no-fast:
without loopback and threads. --batch-size is per host, and determines communication's share of the step.
--python is an interpreter with torch and torchvision.

run.py slow_links --render FILE writes a result's tables and pictures into docs/results/slow-links.md. With
--section today they are those of a run with --no-sweep --no-fast and --python build/frameworks/python.
"""
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from experiments.table import Experiment
from harness import ranks, report, smoke
from harness.slow_links import (ALONE, METHODS, MODES, NAMES, ONE_BUCKET_MB, SIDES, Result, best_bucket_mb,
                                buckets_of, errors, goal_lines, goals, main_table, parts_table, sweep_table,
                                theirs_16bit)

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


def planned(options, who, method, bucket_mb=None, phase="main", network="shaped", repetition=0, flags=()):
    """Returns a planned measurement. Modes with short steps have more steps."""
    chosen = next(m for m in (ALONE, *METHODS) if m.key == method)
    steps, warmup = (6, 4) if who == "pytorch" and method.startswith("powersgd") else chosen.steps
    if network != "shaped":
        steps, warmup = 9, 4
    if phase == "sweep" or options.quick:
        steps = max(3, steps // 2)
    if options.smoke:
        steps, warmup = (4, 4) if phase == "trace" else (1, min(warmup, 2))
    how = ({"spec": chosen.spec, "flags": [*chosen.flags, *flags]} if who == "gradwire" else chosen.hook)
    return {"who": who, "method": method, "phase": phase, "network": network, "repetition": repetition,
            "bucket_mb": bucket_mb, "warmup": warmup, "steps": steps, **how}


def both(options, method, ours, theirs, **more):
    """Returns the measurements of a method with Gradwire and, if it has such a hook, with PyTorch."""
    hook = method == "alone" or next(m for m in METHODS if m.key == method).hook
    return [planned(options, "gradwire", method, ours, **more),
            *([planned(options, "pytorch", method, theirs, **more)] if hook else [])]


def sweep(options, best):
    """Returns the sweep's measurements. PyTorch's PowerSGD is last, because it aborts over gloo."""
    items = []
    for method, (ours, theirs) in SWEEP_MB.items():
        for our_mb, their_mb in itertools.zip_longest(ours, theirs, fillvalue=0):
            items += both(options, method, our_mb, their_mb, phase="sweep")
    items = [i for i in items if i["bucket_mb"] != 0]  # no size left on this side
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
                items += both(options, method, ours, theirs, repetition=repetition)
    return items


def without_shaping(options, best):
    """Returns measurements over loopback, and with Gradwire's ranks as threads of one process."""
    items = []
    for method in SWEEP_MB:
        sizes = {(None, None), (best["gradwire", method], best["pytorch", method])}
        if method.startswith("powersgd"):
            sizes = {(best["gradwire", method], None)}
        for ours, theirs in sorted(sizes, key=lambda pair: pair != (None, None)):
            items += both(options, method, ours, theirs, network="loopback")
            items.append(planned(options, "gradwire", method, ours, network="threads"))
    return items


def traces(options, best):
    """Returns one run each of three modes, for pictures of a step."""
    items = []
    for method, mb in (("fp32", None), ("16bit", best["gradwire", "16bit"]), ("powersgd4", None)):
        path = trace_path(options.json, method)
        path.parent.mkdir(parents=True, exist_ok=True)
        items.append(planned(options, "gradwire", method, mb, "trace",
                             flags=["--trace", str(path), "--trace-steps", "5:8"]))
    return items


def trace_path(result, method):
    return result.parent.resolve() / (result.stem + "-traces") / f"{method}.json"


def hook_16bit(python):
    """Returns PyTorch's 16-bit hook: bf16, which PyTorch before 2.9 may refuse without CUDA, otherwise fp16."""
    version = ranks.output_of(python, "-c", "import torch; print(torch.__version__)")
    return "bf16" if smoke.at_least(version or "0", "2.9") else "fp16"


def carried_out(options, item, rate):
    """Returns a measurement with its result: host 0's steps, or the error of a host."""
    model = SMOKE_MODEL if options.smoke else MODEL
    training = {"batch_size": options.batch_size, "lr": 0.01, "momentum": 0.0, "timeout_s": 60}
    threads = dict.fromkeys(("GRADWIRE_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
                            str(options.threads))
    hosts = {"count": options.hosts, "rate": rate, "deadline_s": options.deadline_s, "environment": threads}
    try:
        if item["who"] == "pytorch":
            with tempfile.TemporaryDirectory() as folder:
                config = {**training, **item, "model": model, "threads": options.threads,
                          "output": f"{folder}/result.json"}
                script = str(ranks.ROOT / "bench/baselines/pytorch_train.py")
                ranks.run_quietly([options.python, "-W", "ignore", script, json.dumps(config)], **hosts)
                return {**item, **json.loads(pathlib.Path(config["output"]).read_text())}
        flags = ["--model", model["name"], "--data", "synthetic:512", "--device", "host", "--optimizer",
                 "sgd", "--eval-every", "0", "--compression", item["spec"], "--steps",
                 item["warmup"] + item["steps"], "--bucket-mb", item["bucket_mb"] or ONE_BUCKET_MB,
                 *item["flags"]]
        sizes = {key: model[key] for key in ("image_size", "patch", "width", "depth", "heads", "mlp")}
        for flag, value in {**sizes, **training}.items():
            flags += ["--" + flag.replace("_", "-"), value]
        if item["network"] == "threads":
            flags += ["--ranks", options.hosts]
            hosts.update(count=1, environment={"GRADWIRE_THREADS": str(os.cpu_count())})
        records = ranks.train(flags, **hosts, gradwire=options.gradwire, alone=item["method"] == "alone")
        return {**item, **report.result_of(records, item["warmup"])}
    except ranks.Failed as error:
        return {**item, "error": str(error)}


def measure(options):
    if not os.access(options.gradwire, os.X_OK):
        sys.exit(f"slow_links: {options.gradwire} is missing; run make build")
    if unknown := set(options.modes) - set(MODES):
        sys.exit(f"slow_links: --modes {min(unknown)} is not one of {', '.join(MODES)}")
    why = ranks.no_links()
    if why and not options.smoke:
        sys.exit(f"slow_links: no slow links on this machine: {why}")
    items, hook = [], hook_16bit(options.python)
    phases = [(not options.quick and not options.no_sweep, sweep), (True, main_modes),
              (options.smoke or (not options.quick and options.modes == MODES), traces),
              (not options.no_fast, without_shaping)]
    for wanted, plan in phases:
        for item in plan(options, best_sizes(items)) if wanted else ():
            if item.get("hook") == "16bit":
                item["hook"] = hook
            if item["who"] == "gradwire" or not options.no_baseline:
                shaped = item["network"] == "shaped" and not why
                items.append(carried_out(options, item, options.rate if shaped else ""))
                yield items[-1]


def line(item):
    name = theirs_16bit([item]) if (item["who"], item["method"]) == ("pytorch", "16bit") else NAMES.get(
        item["method"], ALONE.name)
    shown = item.get("error") or f"{report.median(item['step_ms']):.1f} ms"
    return (f"{item['phase']}: {SIDES[item['who']]} {name}, {buckets_of(item['bucket_mb'])}, "
            f"{item['network']}: {shown}")


def best_sizes(items):
    """Returns the sweep's fastest bucket size by side and method. None means one bucket."""
    tried = {"4bit": "16bit", **{name: "powersgd4" for name in NAMES if name.startswith("powersgd")}}
    return {(who, method): best_bucket_mb(items, who, tried.get(method, method), UNTRIED_MB.get(method))
            for who in SIDES for method in NAMES}


def settings(options, items):
    first = {who: next((i for i in items if i["who"] == who and "error" not in i), {}) for who in SIDES}
    return {
        "model": SMOKE_MODEL if options.smoke else MODEL, "parameters": first["gradwire"].get("parameters"),
        "baseline_parameters": first["pytorch"].get("parameters"), "torch": first["pytorch"].get("torch"),
        "torchvision": first["pytorch"].get("torchvision"),
        "gradwire": ranks.output_of(options.gradwire, "--version")}


# ---- Results -----------------------------------------------------------------------------------------------


def sections(result):
    """Returns the tables below the main one: a title and the rows of each."""
    found = [("Where Gradwire's step goes (medians, ms; host 0's marks)", parts_table(result))]
    if any(i["phase"] == "sweep" for i in result.items):
        found.append(("Size of buckets, ms per step; the fastest of each row is the size used for "
                      "\"buckets\" in the table above", sweep_table(result.items)))
    for network, title in (("loopback", "Fast links: the same processes over loopback, not shaped"),
                           ("threads", "Fast links: Gradwire's ranks as threads of one process")):
        if result.rows(network):
            found.append((title, main_table(result, network)))
    return found


def share_text(result):
    if result.share() is None:
        return ""
    return (f"Communication is {100 * result.share():.0f} % of Gradwire's FP32 step with one bucket "
            f"({result.base('gradwire').ms:.0f} ms, {result.alone('gradwire').ms:.0f} without communication); "
            "in the article it was 84 %.")


def tables(document):
    result = Result(document)
    s = result.settings
    parts = [f"{s['parameters'] or 0:,} parameters, batch {s['batch_size']}, {s['hosts']} hosts, "
             f"{s['rate']} links; {s['repetitions']} repetitions, medians",
             report.plain(main_table(result))]
    for title, table in sections(result):
        parts += [title, report.plain(table)]
    parts += [share_text(result), "\n".join([*goal_lines(result), *("failed: " + e for e in errors(result))])]
    return "\n\n".join(filter(None, parts))


def page_text(result, traced=(), picture=True):
    """Returns the section of docs/results/slow-links.md for a result. traced: methods with a timeline."""
    s = result.settings
    parts = [
        f"{s['date']}, commit {s['commit']}, {s['cpu']}, {s['cores']} cores, {s['system']}, {s['gradwire']}, "
        f"PyTorch {s['torch']}, torchvision {s['torchvision']}. `{s['command']}`, "
        f"{s['repetitions']} repetition{'s' if s['repetitions'] != 1 else ''}. "
        f"{s['parameters']:,} parameters, batch {s['batch_size']} per host. " + share_text(result),
        *(["![Speed of every mode](experiments.png)"] if picture else []),
        report.markdown(main_table(result)),
        "Goals:\n\n" + report.markdown([["goal", "measured", "at least", ""], *goals(result)])]
    first, *others = (f"{title}:\n\n{report.markdown(table)}" for title, table in sections(result))
    parts.append(first)
    if traced:
        parts.append("One step of each mode, all hosts on one clock (`--trace`, `bench/plots/plot.py`):")
        parts += [f"![One step: {NAMES[method]}](timeline-{method}.png)" for method in traced]
    parts += others
    if failed := errors(result):
        parts.append("Failed:\n\n" + "\n".join("- " + line for line in failed))
    return "\n\n".join(part.strip() for part in parts)


def render(document, path, options):
    """Writes tables and pictures into docs/results/slow-links.md."""
    result, page = Result(document), report.SLOW_LINKS_PAGE
    if not result.base("gradwire"):
        sys.exit(f"slow_links: {path} has no result for Gradwire's FP32 with one bucket, to which all others "
                 "are compared")
    if options.section != "results":
        report.put_section(page, options.section, page_text(result, picture=False))
        return
    found = {m: trace_path(path, m) for m in NAMES if trace_path(path, m).exists()}
    report.put_section(page, "results", page_text(result, found))
    for source, picture in [(path, "experiments.png"),
                            *((trace, f"timeline-{method}.png") for method, trace in found.items())]:
        subprocess.run([sys.executable, str(ranks.ROOT / "bench/plots/plot.py"), str(source), "-o",
                        str(page.parent / picture)], check=False)


EXPERIMENT = Experiment(
    __doc__,
    {"quick": False, "repetitions": 3, "rate": "1gbit", "hosts": 4, "batch_size": 1, "threads": 1,
     "no_baseline": False, "no_sweep": False, "no_fast": False, "modes": MODES, "deadline_s": 120,
     "gradwire": ranks.GRADWIRE, "python": "/usr/bin/python3", "section": "results"},
    {"quick": True, "no_sweep": True, "no_fast": True, "hosts": 2,
     "modes": ("alone", "fp32", "powersgd4", "fp32-products")},
    measure, tables, line=line, render=render, settings=settings, specs=tuple(m.spec for m in METHODS),
    errors_are_results=True)  # PyTorch's PowerSGD aborts with several buckets over gloo
