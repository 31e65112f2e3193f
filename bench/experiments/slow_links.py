#!/usr/bin/env python3
"""The article's experiments: training steps over slow links with each kind of compression, and PyTorch's DDP.

    slow_links.py run [--quick] [--json FILE]   measures (5 to 10 minutes; root, for network namespaces)
    slow_links.py show FILE                     shows a result's tables again
    slow_links.py render FILE [--today FILE]    writes tables and pictures into docs/results/slow-links.md.
                                                --today: of a run with --no-sweep --no-fast and
                                                --python build/frameworks/python
    slow_links.py accuracy run FOLDER           trains on Fashion-MNIST: 3 compressions, 3 seeds, a log each
    slow_links.py accuracy render FOLDER        writes their table and picture into docs/results/slow-links.md
    slow_links.py --smoke                       run, show and accuracy on 2 hosts with a tiny model
"""
import argparse
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
BENCH, ROOT = HERE.parent, HERE.parents[1]
sys.path.insert(0, str(BENCH))
from harness import report, smoke  # noqa: E402

SHAPED_LINK = str(BENCH / "harness" / "shaped_link.sh")
PAGE = ROOT / "docs" / "results" / "slow-links.md"
# Bucket sizes of the sweep, for Gradwire and for PyTorch. None: one bucket.
SWEEP_MB = {"fp32": ((32, 16, 8, 4), (16, 8, 4)), "16bit": ((32, 16, 8, 4), (8, 4)),
            "powersgd4": ((None, 64, 32, 16), (16,))}
NOT_IN_QUICK = ("powersgd1", "powersgd2", "powersgd8")
UNTRIED_MB = {"fp32": 16, "16bit": 16, "4bit": 16}  # without a sweep
# ViT-S with ViT-L/32's 50 tokens. With batch 1, 4 hosts on a small machine with gigabit links spend 84 % of
# an FP32 step on communication, as the article's 8 GPUs did over PCIe.
MODEL = {"name": "vit_s_16", "image_size": 56, "patch": 8, "width": 384, "depth": 12, "heads": 6, "mlp": 1536,
         "classes": 1000}
SMOKE_MODEL = {**MODEL, "image_size": 16, "width": 32, "depth": 1, "heads": 1, "mlp": 32, "classes": 10}


def fail(message, code=2):
    print(f"experiments: {message}", file=sys.stderr)
    sys.exit(code)


def model_flags(model):
    flags = ["--model", model["name"]]
    for key in ("image_size", "patch", "width", "depth", "heads", "mlp"):
        flags += ["--" + key.replace("_", "-"), str(model[key])]
    return flags


def item(arguments, who, method, bucket_mb=None, phase="main", network="shaped", ranks_are="hosts",
         repetition=0, extra=()):
    """Returns one measurement, with more steps if they are short."""
    if method == "alone":
        steps, warmup, spec, hook, ranks_are = 14, 3, "fp32", {"hook": "alone"}, "alone"
    else:
        chosen = next(m for m in report.METHODS if m.key == method)
        spec, hook, extra = chosen.spec, chosen.hook, (*chosen.flags, *extra)
        steps, warmup = {"fp32": (5, 1), "fp32-products": (5, 1), "16bit": (7, 2), "4bit": (10, 3)}.get(
            method, (16, 4) if who == "gradwire" else (6, 4))
    if network != "shaped":
        steps, warmup = 9, 4
    if phase == "sweep" or arguments.quick:
        steps = max(3, steps // 2)
    if arguments.smoke:
        steps, warmup = (4, 4) if phase == "trace" else (1, min(warmup, 2))
    out = {"who": who, "method": method, "phase": phase, "network": network, "ranks_are": ranks_are,
           "repetition": repetition, "bucket_mb": bucket_mb, "warmup": warmup, "steps": steps,
           "deadline_s": arguments.deadline_s}
    if who == "gradwire":
        return {**out, "spec": spec, "flags": list(extra)}
    return {**out, **hook, "hook": arguments.hook_16bit if hook["hook"] == "16bit" else hook["hook"]}


def sweep_items(arguments):
    """Puts PyTorch's PowerSGD with several buckets last, because it aborts over gloo."""
    items = []
    for method, (ours, theirs) in SWEEP_MB.items():
        for i, mb in enumerate(ours):
            items.append(item(arguments, "gradwire", method, mb, "sweep"))
            if i < len(theirs):
                items.append(item(arguments, "pytorch", method, theirs[i], "sweep"))
    return sorted(items, key=lambda i: i.get("hook") == "powersgd")


def main_items(arguments, best):
    """Returns ours and PyTorch's in turns, in each repetition."""
    items = []
    for repetition in range(arguments.repetitions):
        for method in arguments.modes:
            sizes = [(None, None)]
            if method in UNTRIED_MB:
                sizes.append((best["gradwire", method], best["pytorch", method]))
            elif method != "alone":  # ours with the best size; PyTorch's hook aborts with several buckets
                sizes = [(best["gradwire", method], None)]
            for ours, theirs in sizes:
                items.append(item(arguments, "gradwire", method, ours, repetition=repetition))
                if method not in report.OURS_ALONE:
                    items.append(item(arguments, "pytorch", method, theirs, repetition=repetition))
    return items


def fast_items(arguments, best):
    """Returns measurements without shaping: over loopback, and Gradwire's ranks as threads of one process."""
    items = []
    for method in ("fp32", "16bit", "powersgd4"):
        sizes = {(None, None), (best["gradwire", method], best["pytorch", method])}
        if method.startswith("powersgd"):
            sizes = {(best["gradwire", method], None)}
        for ours, theirs in sorted(sizes, key=lambda pair: pair != (None, None)):
            items.append(item(arguments, "gradwire", method, ours, network="loopback"))
            items.append(item(arguments, "pytorch", method, theirs, network="loopback"))
            items.append(item(arguments, "gradwire", method, ours, network="threads", ranks_are="threads"))
    return items


def trace_items(arguments, best):
    """Returns one run each of three modes, for pictures of a step."""
    items = []
    for method, mb in (("fp32", None), ("16bit", best["gradwire", "16bit"]), ("powersgd4", None)):
        path = trace_path(arguments.json, method)
        path.parent.mkdir(parents=True, exist_ok=True)
        items.append(item(arguments, "gradwire", method, mb, "trace",
                          extra=["--trace", str(path), "--trace-steps", "5:8"]))
    return items


def trace_path(result, method):
    return result.parent.resolve() / (result.stem + "-traces") / f"{method}.json"


class Session:
    """Runs plans, with or without shaped links, and stores the measurements."""

    def __init__(self, arguments):
        self.arguments, self.items = arguments, []
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="gradwire-experiments-"))
        self.plans = 0

    def plan(self, items):
        self.plans += 1
        folder = self.folder / str(self.plans)
        folder.mkdir()
        arguments = self.arguments
        flags = [*model_flags(arguments.model), "--data", "synthetic:512", "--device", "host", "--batch-size",
                 str(arguments.batch_size), "--optimizer", "sgd", "--lr", "0.01", "--momentum", "0",
                 "--eval-every", "0", "--timeout-s", "60"]
        baseline = {
            "threads": arguments.threads, "model": arguments.model, "batch_size": arguments.batch_size,
            "lr": 0.01, "momentum": 0.0, "timeout_s": 60
        }
        if arguments.no_baseline:
            items = [i for i in items if i["who"] == "gradwire"]
        path = folder / "plan.json"
        path.write_text(json.dumps({"folder": str(folder), "gradwire": arguments.gradwire,
                                    "python": arguments.python, "flags": flags, "baseline": baseline,
                                    "items": items}))
        return folder, path, items

    def environment(self):
        threads = str(self.arguments.threads)
        return {**os.environ, "GRADWIRE_THREADS": threads, "OMP_NUM_THREADS": threads,
                "OPENBLAS_NUM_THREADS": threads, "PYTHONDONTWRITEBYTECODE": "1"}

    def shaped(self, items):
        folder, path, items = self.plan(items)
        a = self.arguments
        command = [SHAPED_LINK, "--hosts", str(a.hosts), "--rate", a.rate, "--", sys.executable,
                   str(HERE / "slow_links_host.py"), str(path)]
        self.follow([subprocess.Popen(command, env=self.environment(), start_new_session=True)], folder,
                    items)

    def loopback(self, items):
        """Runs the same processes over loopback."""
        folder, path, items = self.plan(items)
        hosts, processes = self.arguments.hosts, []
        for rank in range(hosts):
            env = {**self.environment(), "RANK": str(rank), "WORLD_SIZE": str(hosts), "LOCAL_RANK": str(rank),
                   "LOCAL_WORLD_SIZE": str(hosts), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
                   "GLOO_SOCKET_IFNAME": "lo"}
            processes.append(subprocess.Popen([sys.executable, str(HERE / "slow_links_host.py"), str(path)],
                                              env=env, start_new_session=True))
        self.follow(processes, folder, items)

    def follow(self, processes, folder, items):
        deadline = time.monotonic() + 120 + sum(i["deadline_s"] for i in items)
        codes = []
        try:
            for process in processes:
                codes.append(process.wait(timeout=max(1, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            codes.append(1)
        finally:  # even after Ctrl-C: on SIGTERM shaped_link.sh removes its namespaces and their processes
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)
            for process in processes:
                try:
                    process.wait(timeout=30)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
        results = folder / "results.jsonl"
        if results.exists():
            self.items += [json.loads(line) for line in results.read_text().splitlines()]
        if any(codes):
            sys.exit(2 if 2 in codes and not results.exists() else 1)

    def best(self):
        """Returns the sweep's bucket size by side and method. None: one bucket."""
        sizes = {}
        for who in ("gradwire", "pytorch"):
            for method in report.NAMES:
                tried = "powersgd4" if method.startswith("powersgd") else {"4bit": "16bit"}.get(
                    method, method)
                sizes[who, method] = report.best_bucket_mb(self.items, who, tried, UNTRIED_MB.get(method))
        return sizes


def output_of(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=30).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def hook_16bit(python):
    """Returns PyTorch's 16-bit hook: bf16 since 2.x, whose gloo sums BF16; otherwise fp16."""
    version = output_of(python, "-c", "import torch; print(torch.__version__)")
    return "bf16" if version and int(version.split(".")[0]) >= 2 else "fp16"


def settings(arguments, items):
    cpu = [line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    first = {who: next((i for i in items if i["who"] == who and "error" not in i), {})
             for who in ("gradwire", "pytorch")}
    commit = output_of("git", "rev-parse", "--short=12", "HEAD") or "unknown"
    if subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=ROOT, stderr=subprocess.DEVNULL).returncode:
        commit += ", with changes"
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()), "commit": commit,
        "command": "bench/experiments/slow_links.py " + " ".join(sys.argv[1:]), "hosts": arguments.hosts,
        "rate": arguments.rate, "model": arguments.model, "parameters": first["gradwire"].get("parameters"),
        "baseline_parameters": first["pytorch"].get("parameters"), "batch_size": arguments.batch_size,
        "threads": arguments.threads, "repetitions": arguments.repetitions,
        "cpu": cpu[0] if cpu else "unknown", "cores": os.cpu_count(), "system": output_of("uname", "-sr"),
        "gradwire": output_of(arguments.gradwire, "--version"), "torch": first["pytorch"].get("torch"),
        "torchvision": first["pytorch"].get("torchvision"), "load_before": arguments.load
    }


def show(result):
    base, alone = result.base("gradwire"), result.alone("gradwire")
    s = result.settings
    print(f"\n{s['parameters'] or 0:,} parameters, batch {s['batch_size']}, {s['hosts']} hosts, "
          f"{s['rate']} links; {s['repetitions']} repetitions, medians\n")
    print(report.plain(report.main_table(result)))
    print("\nWhere Gradwire's step goes, ms\n")
    print(report.plain(report.parts_table(result)))
    if any(i["phase"] == "sweep" for i in result.items):
        print("\nSize of buckets, ms/step\n")
        print(report.plain(report.sweep_table(result.items)))
    for network, title in (("loopback", "Loopback, no shaping"), ("threads", "Threads of one process")):
        if result.rows(network):
            print(f"\n{title}\n")
            print(report.plain(report.main_table(result, network)))
    print()
    if result.share():
        print(f"Communication is {100 * result.share():.0f} % of Gradwire's FP32 step with one bucket "
              f"({base.ms:.0f} ms; {alone.ms:.0f} ms without communication). The article's: 84 %.")
    print("\n".join(report.goal_lines(result)))
    for line in report.errors(result):
        print("failed: " + line)


def write(path, document):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def measure(arguments):
    if not os.access(arguments.gradwire, os.X_OK):
        fail(f"{arguments.gradwire} is missing; run make build")
    probe = subprocess.run([SHAPED_LINK, "--hosts", "2", "--", "true"], capture_output=True, text=True)
    if probe.returncode != 0 and not arguments.smoke:
        fail("no slow links here: " + (probe.stderr.strip().splitlines() or ["shaped_link.sh failed"])[-1])
    arguments.load = os.getloadavg()[0]
    arguments.hook_16bit = hook_16bit(arguments.python)
    session = Session(arguments)
    if probe.returncode != 0:
        session.shaped = session.loopback
    try:
        if not arguments.quick and not arguments.no_sweep:
            print("== Size of buckets", flush=True)
            session.shaped(sweep_items(arguments))
        best = session.best()
        print("== Every mode, on links of " + arguments.rate, flush=True)
        session.shaped(main_items(arguments, best))
        if arguments.traced:
            print("== Traces of a step", flush=True)
            session.shaped(trace_items(arguments, best))
        if not arguments.no_fast:
            print("== Fast links", flush=True)
            session.loopback(fast_items(arguments, best))
    finally:  # keeps the measurements before a failure
        shutil.rmtree(session.folder, ignore_errors=True)
        if session.items:
            document = {"schema": 1, "settings": settings(arguments, session.items), "items": session.items}
            write(arguments.json, document)
    show(report.Result(document))
    if arguments.smoke:
        return
    print(f"\nResult: {arguments.json}; to put it into docs/results/slow-links.md: "
          f"bench/experiments/slow_links.py render {arguments.json}")


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
                     "in the table above:\n\n"
                     + report.markdown(report.sweep_table(result.items)))
    for network, title in (("loopback", "Fast links: the same processes over loopback, not shaped"),
                           ("threads", "Fast links: Gradwire's ranks as threads of one process")):
        if result.rows(network):
            parts.append(f"{title}:\n\n" + report.markdown(report.main_table(result, network)))
    failed = report.errors(result)
    if failed:
        parts.append("Failed:\n\n" + "\n".join("- " + line for line in failed))
    return "\n\n".join(part.strip() for part in parts)


def put(section, text):
    try:
        page = report.replace_section(PAGE.read_text(), section, text)
    except ValueError as error:
        fail(f"{PAGE}: {error}", 1)
    PAGE.write_text(page)
    print(f"Written: {PAGE.relative_to(ROOT)}, section {section}")


def pictures():
    """Returns bench/plots/experiments.py, or None if matplotlib is missing."""
    try:
        from plots import experiments
        return experiments
    except SystemExit as missing:
        print(f"No picture: {missing}", file=sys.stderr)
        return None


def read_result(path):
    document = json.loads(path.read_text())
    result = report.Result(document)
    if not result.base("gradwire"):
        fail(f"{path} has no result for Gradwire's FP32 with one bucket, to which all others are compared", 1)
    return document, result


def render(path, today):
    document, result = read_result(path)
    if today:
        put("today", page_text(read_result(today)[1], picture=False))
    traces = {m: trace_path(path, m) for m in report.NAMES if trace_path(path, m).exists()}
    plot, folder = pictures(), PAGE.parent
    put("results", page_text(result, traces if plot else ()))
    if plot:
        plot.draw(document, folder / "experiments.png")
        print("Written: docs/results/experiments.png")
        for method, trace in traces.items():
            subprocess.run([sys.executable, str(BENCH / "plots" / "plot.py"), str(trace), "-o",
                            str(folder / f"timeline-{method}.png")], check=True)


ACCURACY_SPECS, ACCURACY_SEEDS = ("fp32", "bf16", "powersgd:rank=4"), (0, 1, 2)
ACCURACY_FLAGS = ["--model", "vit_tiny", "--data", "fashion-mnist", "--ranks", "8", "--batch-size", "32",
                  "--epochs", "12", "--lr", "2e-3", "--timeout-s", "600"]


def accuracy_run(folder, gradwire, seeds=ACCURACY_SEEDS, shrink=list):
    """Takes half an hour or more. Reuses complete logs, so an interrupted run can be continued. `shrink`
    changes the words of a command."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        for spec in ACCURACY_SPECS:
            log = folder / f"{spec}-{seed}.jsonl"
            if log.exists() and report.read_accuracy_log(log):
                continue
            print(f"== {spec}, seed {seed}", flush=True)
            unfinished = folder / f"unfinished-{spec}-{seed}.jsonl"
            subprocess.run(
                shrink([
                    gradwire, "train", *ACCURACY_FLAGS, "--compression", spec, "--seed",
                    str(seed), "--log-every", "500", "--log",
                    str(unfinished)
                ]), check=True)
            unfinished.rename(log)


def accuracy_render(folder):
    """Renders the complete logs in folder."""
    found = {path: report.read_accuracy_log(path) for path in sorted(folder.glob("*.jsonl"))}
    found = {path: log for path, log in found.items() if log}
    if not found:
        fail(f"{folder} has no log of a complete run; use accuracy run first", 1)
    logs, run = [log for log, _ in found.values()], next(iter(found.values()))[1]
    rows = report.accuracy_rows(logs)
    print(report.plain(report.accuracy_table(rows)))
    print("\n".join(report.accuracy_goals(rows)))
    about = (f"{run['model']['name']} on {run['data']}, {run['ranks']} ranks, batch {run['batch_size']} "
             f"per rank, {run['epochs']:g} epochs, {run['optimizer']}, learning rate {run['lr']:g}; "
             "test accuracy is taken after the last epoch, not at the best one.")
    put("accuracy",
        "\n\n".join([about, "![Accuracy](accuracy.png)", report.markdown(report.accuracy_table(rows)).strip(),
                      "\n".join("- " + line for line in report.accuracy_goals(rows))]))
    plot = pictures()
    if plot:
        from plots.runs import Run
        plot.draw_accuracy(logs, [Run(path) for path in found], PAGE.parent / "accuracy.png")
        print("Written: docs/results/accuracy.png")


def run_smoke(parser):
    """Everything but what writes into docs/."""
    with tempfile.TemporaryDirectory(prefix="gradwire-experiments-") as folder:
        arguments = parser.parse_args(
            ["run", "--quick", "--no-sweep", "--no-fast", "--hosts", "2", "--json", f"{folder}/result.json"])
        smoke.check_specs([method.spec for method in report.METHODS])
        vars(arguments).update(smoke=True, model=SMOKE_MODEL, traced=True, repetitions=1,
                               modes=["alone", "fp32", "16bit", "powersgd4", "fp32-products"])
        measure(arguments)
        result = read_result(arguments.json)[1]
        page_text(result, [m for m in report.NAMES if trace_path(arguments.json, m).exists()])
        logs = pathlib.Path(folder, "accuracy")
        accuracy_run(logs, arguments.gradwire, ACCURACY_SEEDS[:1],
                     lambda words: smoke.tiny(words, {"--epochs": "1", "--data": "synthetic:64"}))
        rows = report.accuracy_rows(
            [report.read_accuracy_log(path)[0] for path in sorted(logs.glob("*.jsonl"))])
        print(report.plain(report.accuracy_table(rows)))
    return 1 if report.errors(result) else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure")
    run.add_argument("--quick", action="store_true", help="one repetition, fewer modes: two minutes")
    run.add_argument("--repetitions", type=int, default=None, help="default: 3, with --quick 1")
    run.add_argument("--json", type=pathlib.Path, default=ROOT / "build" / "experiments.json")
    run.add_argument("--rate", default="1gbit")
    run.add_argument("--hosts", type=int, default=4)
    run.add_argument("--batch-size", type=int, default=1,
                     help="per host; determines communication's share of the step")
    run.add_argument("--threads", type=int, default=1, help="threads of each host, for both sides")
    run.add_argument("--no-baseline", action="store_true", help="without PyTorch")
    run.add_argument("--no-sweep", action="store_true",
                     help="no sweep: buckets of 16 MB, one bucket for PowerSGD")
    run.add_argument("--modes", type=lambda text: text.split(","), metavar="MODE,MODE...",
                     help="only these, without pictures of a step: alone, " + ", ".join(report.NAMES))
    run.add_argument("--no-fast", action="store_true", help="without loopback and threads")
    run.add_argument("--deadline-s", type=int, default=60, help="deadline of one measurement")
    run.add_argument("--gradwire", default=str(ROOT / "build" / "bin" / "gradwire"))
    run.add_argument("--python", default="/usr/bin/python3",
                     help="a Python interpreter with torch and torchvision")
    shown = commands.add_parser("show", help="print a result's tables")
    shown.add_argument("json", type=pathlib.Path)
    rendered = commands.add_parser("render", help="put a result into docs/results/slow-links.md")
    rendered.add_argument("json", type=pathlib.Path)
    rendered.add_argument("--today", type=pathlib.Path, help="a result with PyTorch 2.15")
    accuracy = commands.add_parser("accuracy", help="Fashion-MNIST with each compression")
    accuracy.add_argument("what", choices=["run", "render"])
    accuracy.add_argument("folder", type=pathlib.Path)
    accuracy.add_argument("--gradwire", default=str(ROOT / "build" / "bin" / "gradwire"))
    if sys.argv[1:] == ["--smoke"]:
        return run_smoke(parser)
    arguments = parser.parse_args()
    if arguments.command == "run":
        vars(arguments).update(smoke=False, model=MODEL)
        arguments.repetitions = arguments.repetitions or (1 if arguments.quick else 3)
        modes = ["alone", *report.NAMES]
        for mode in arguments.modes or ():
            if mode not in modes:
                run.error(f"--modes: no mode is called {mode!r}; there are {', '.join(modes)}")
        arguments.traced = not arguments.quick and not arguments.modes
        if not arguments.modes:
            arguments.modes = [m for m in modes if not arguments.quick or m not in NOT_IN_QUICK]
        measure(arguments)
    elif arguments.command == "show":
        show(report.Result(json.loads(arguments.json.read_text())))
    elif arguments.command == "render":
        render(arguments.json, arguments.today)
    elif arguments.what == "run":
        accuracy_run(arguments.folder, arguments.gradwire)
    else:
        accuracy_render(arguments.folder)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
