"""The experiments that are one row of a table: the ranks, the compressions and the table of results.

Experiments with a page of their own, with a plan or a picture, are the other modules of this folder.
"""
import contextlib
import importlib
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import typing

from harness import ranks, report
from harness.report import GLOO, median_steps


class Experiment(typing.NamedTuple):
    """What run.py runs.

    Attributes:
        about: the description; its first line is a sentence.
        options: {option: default}; a tuple: the option may be repeated; False: a flag.
        smoke: the options of a smoke run that differ.
        measure: (options) -> a generator of measurements, which are dictionaries; on every rank. options.done
            has the measurements that the file has already.
        tables: (document) -> the text for {"settings": {...}, "items": [measurements]}.
        line: (item) -> a measurement in one line.
        render: (document, path, options) writes the result's page.
        settings: (options, items) -> more settings of the document.
        modules, specs: Python modules (torch>=2.9: of this version) and specs that a smoke run requires.
        environment: variables of the ranks.
        resumes: keeps the measurements of the result file.
        errors_are_results: measurements with an "error" do not fail the experiment.
    """
    about: str
    options: dict
    smoke: dict
    measure: typing.Callable
    tables: typing.Callable
    line: typing.Optional[typing.Callable] = None
    render: typing.Optional[typing.Callable] = None
    settings: typing.Callable = lambda options, items: {}
    modules: tuple = ()
    specs: tuple = ()
    environment: dict = {}
    resumes: bool = False
    errors_are_results: bool = False


# ---- DDP, FSDP2 and JAX ------------------------------------------------------------------------------------

TORCH, TORCH_BF16 = "PyTorch, fp32", "PyTorch, reduce_dtype=bf16"
BLOCKS = ("int8", "int4", "int4:rotate=hadamard")
BF16_HOOK = {"PyTorch, bf16_compress_hook": {"native": {"hook": "bf16_compress_hook"}}}
# The learning rates are the best rates for FP32, in the ranges from 0.05 to 0.4 and from 0.001 to 0.008.
SGD = {"sgd": {"lr": 0.05, "momentum": 0.9}}
ADAMW = {"adamw": {"lr": 0.002}}


def powersgd_hook(start):
    return {"native": {"hook": "powerSGD_hook", "rank": 4, "start": start}}


def ours(*specs):
    return {spec: {"ours": {"spec": spec}} for spec in specs}


def sharded(gradients, weights, **more):
    return {"ours": {"gradients": gradients, "weights": weights, **more}}


DDP_SPEED = {TORCH: {"native": {}}, **BF16_HOOK, "PyTorch, powerSGD_hook, rank 4": powersgd_hook(2),
             **ours("fp32", "bf16", "int8", "int4:rotate=hadamard", "powersgd:rank=4", "auto",
                    "auto:error=1")}
DDP_LOSS = {TORCH: {"native": {}}, **BF16_HOOK,
            **{f"PyTorch, powerSGD_hook, rank 4, start {start}": powersgd_hook(start) for start in (2, 20)},
            **ours("bf16", *BLOCKS, *(f"powersgd:rank=4,start={start}" for start in (0, 2, 5, 20)))}
FSDP_NATIVE = {TORCH: {"native": {}}, TORCH_BF16: {"native": {"reduce_dtype": "bfloat16"}}}
FSDP_SPEED = {**FSDP_NATIVE, "PyTorch, param_dtype=reduce_dtype=bf16":
              {"native": {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}},
              **{f"{pair[0]} / {pair[1]}": sharded(*pair)
                 for pair in (("fp32", "fp32"), ("bf16", "bf16"), ("int8", "bf16"), ("int8", "int8"),
                              ("int4:rotate=hadamard", "int8"))}}
SCATTER = {TORCH: {"native": True}, **{spec: {"ours": f"{spec}{',' if ':' in spec else ':'}schedule=two_shot"}
                                       for spec in ("fp32", "bf16", *BLOCKS)}}
FSDP_LOSS = {**FSDP_NATIVE, **{f"{spec}{'' if residual == 'fp32' else ', residual=' + residual}":
                               sharded(spec, "fp32", residual=residual)
                               for spec in (*BLOCKS, "int2") for residual in ("fp32", "int8", "off")
                               if (spec, residual) != ("int8", "int8")}}
HSDP_LOSS = {TORCH: {"native": {}, "replicas": 2},
             **{spec: {**sharded("fp32", "fp32", replicas=spec), "replicas": 2}
                for spec in ("powersgd:rank=4", "powersgd:rank=4,wire=int8", "powersgd:rank=8")}}
WITH_TORCH = {"modules": ("torch>=2.9", "torch.distributed.fsdp._fully_shard"),
              "environment": {"OMP_NUM_THREADS": "1", "GRADWIRE_THREADS": "1"}}
SHORT = {"ranks": 2, "rate": "", "steps": 1}


def in_module(name, function, *arguments):
    """Returns a measurement of a module of harness/, which imports what only its experiments need."""
    def measure(options):
        module = importlib.import_module(f"harness.{name}")
        return getattr(module, function)(options, *arguments)

    return measure


def speeds(*bases, before=""):
    return lambda document: before + report.markdown(report.speed_table(document["items"], *bases))


def torch_speed(about, function, *modes, specs, tables=speeds(TORCH), **more):
    options = {"ranks": 4, "rate": "1gbit", "steps": 4, "warm_up": 1, "repetitions": 3, **more}
    return Experiment(about, options,
                      {**SHORT, "repetitions": 1}, in_module("pytorch_training", "steps", function, *modes),
                      tables, line=report.speed_line, **WITH_TORCH, specs=specs)


def losses(base):
    return lambda document: report.markdown(report.loss_table(document["items"], base))


def torch_loss(about, function, modes, optimizers, specs, ranks=2):
    return Experiment(about, {"ranks": ranks, "steps": 300, "seeds": 3}, {**SHORT, "seeds": 1},
                      in_module("pytorch_training", "losses", function, modes, optimizers), losses(TORCH),
                      line=report.loss_line, **WITH_TORCH, specs=specs)


def fsdp_tables(document):
    steps, scatter = ([i for i in document["items"] if i["what"] == what]
                      for what in ("step", "reduce_scatter"))
    return (report.markdown(report.speed_table(steps, TORCH, TORCH_BF16, first="gradients / weights"))
            + "\n" + report.markdown(report.speed_table(scatter, "fp32", first="reduce-scatter of 25.6 MB")))


# ---- Small collectives, and starts of groups -----------------------------------------------------------


def join(options):
    import numpy as np

    import gradwire
    from gradwire._port import reserve_port
    rank, address = int(os.environ["RANK"]), os.environ["MASTER_ADDR"]
    with gradwire.Communicator(f"tcp://{address}:{os.environ['MASTER_PORT']}", rank, options.ranks) as all_:
        for i in range(2 * options.repetitions):
            mode = ("with a secret", "without a secret")[i % 2]
            with contextlib.ExitStack() as stack:
                port = np.array([reserve_port(stack) if rank == 0 else 0], np.float32)
                all_.broadcast_(port)
                time.sleep(0.3)  # the processes of the last group become idle
                all_.allreduce_(np.zeros(1, np.float32))
                begin = time.perf_counter()
                group = gradwire.Communicator(f"tcp://{address}:{int(port[0])}", rank, options.ranks,
                                              secret="of this run alone" if mode == "with a secret" else "")
                times = np.zeros(options.ranks, np.float32)
                times[rank] = time.perf_counter() - begin
                all_.allreduce_(times, op="sum")
                group.close()
            yield {"mode": mode, "step_ms": [float(times.max()) * 1e3]}


CALLS, WARM_UP_CALLS, PAUSE_S = 300, 20, 3


def cpu_s():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def small_allreduce(options):
    import torch
    import torch.distributed as dist

    from gradwire.torch import communicator
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    comm = communicator()
    values = torch.ones(options.kib * 256)
    calls = {"gloo": lambda: dist.all_reduce(values),
             "gradwire": lambda: comm.allreduce_(values, "fp32", "avg")}
    for mode, call in [*calls.items()] * options.repetitions:
        dist.barrier()
        for _ in range(WARM_UP_CALLS):
            call()
        times, before = [], cpu_s()
        for _ in range(CALLS):
            begin = time.perf_counter()
            call()
            times.append((time.perf_counter() - begin) * 1e3)
        yield {"mode": mode, "step_ms": times, "cpu_ms": (cpu_s() - before) / CALLS * 1e3}
    for mode, call in calls.items():  # rank 0 waits for the last rank, which pauses
        dist.barrier()
        before = cpu_s()
        if dist.get_rank() == options.ranks - 1:
            time.sleep(PAUSE_S)
        call()
        yield {"mode": mode, "waiting_cores": (cpu_s() - before) / PAUSE_S}
    dist.barrier()
    comm.close()
    dist.destroy_process_group()


def small_allreduce_tables(document):
    waiting = {i["mode"]: i["waiting_cores"] for i in document["items"] if "waiting_cores" in i}
    rows = [["", "ms per call", "95 % of calls within, ms", "CPU ms per call", "cores while waiting"]]
    for mode, items in report.by_mode([i for i in document["items"] if "step_ms" in i]).items():
        rows.append([mode, f"{median_steps(items):.2f}",
                     f"{report.median(sorted(i['step_ms'])[int(0.95 * CALLS)] for i in items):.2f}",
                     f"{report.median(i['cpu_ms'] for i in items):.2f}", f"{waiting.get(mode, 0):.3f}"])
    return report.markdown(rows)


# ---- gradwire train and gradwire-bench ---------------------------------------------------------------------

ACCURACY_SPECS = ("fp32", "bf16", "powersgd:rank=4")
GOALS = {"bf16": 0.2, "powersgd:rank=4": 0.5}  # how far the mean may be below FP32's, in points


def accuracy(options):
    done = {(i["compression"], i["seed"]) for i in options.done}
    for seed in range(options.seeds):
        for spec in ACCURACY_SPECS:
            if (spec, seed) not in done:
                records = ranks.train([
                    "--model", "vit_tiny", "--data", options.data, "--ranks", "8",
                    "--batch-size", "32", "--epochs", options.epochs, "--lr", "2e-3", "--timeout-s", "600",
                    "--log-every", "500", "--compression", spec, "--seed", seed], gradwire=options.gradwire)
                summary = next(r for r in records if r["type"] == "summary")
                yield {"compression": spec, "seed": seed, "test_accuracy": summary["test_accuracy"],
                       "bytes": summary["total_wire_bytes"], "ratio": summary["ratio"],
                       "run": next(r for r in records if r["type"] == "run"),
                       "evals": [r for r in records if r["type"] == "eval"]}


def accuracies(items):
    """Returns a row per spec: accuracies, differences from FP32 with the same seed, and bytes."""
    found = {}
    for item in items:
        found.setdefault(item["compression"], {})[item["seed"]] = item
    fp32, rows = found.get("fp32", {}), []
    for spec, runs in sorted(found.items(), key=lambda pair: (pair[0] != "fp32", pair[0])):
        values = [runs[seed]["test_accuracy"] for seed in sorted(runs)]
        rows.append({"spec": spec, "accuracies": values, "mean": statistics.mean(values),
                     "differences": [runs[seed]["test_accuracy"] - fp32[seed]["test_accuracy"]
                                     for seed in sorted(runs) if seed in fp32],
                     "bytes": report.median(r["bytes"] for r in runs.values()),
                     "ratio": report.median(r["ratio"] for r in runs.values())})
    return rows


def accuracy_table(rows):
    out = [["compression", "accuracy by seed, %", "mean, %", "spread, points",
            "difference to FP32 by seed, points", "mean difference", "sent per rank", "fewer bytes"]]
    for row in rows:
        differences = [] if row["spec"] == "fp32" else row["differences"]
        out.append([f"`{row['spec']}`", ", ".join(f"{100 * a:.2f}" for a in row["accuracies"]),
                    f"{100 * row['mean']:.2f}",
                    f"{100 * (max(row['accuracies']) - min(row['accuracies'])):.2f}",
                    ", ".join(f"{100 * d:+.2f}" for d in differences) or "-",
                    f"{100 * statistics.mean(differences):+.2f}" if differences else "-",
                    f"{row['bytes'] / 1e9:.3f} GB", f"{row['ratio']:.1f}x" if row["ratio"] else "-"])
    return out


def accuracy_goals(rows):
    """Returns a line per goal: the goal, the result, the verdict."""
    lines = []
    for row in rows:
        if row["spec"] == "fp32":
            met = row["mean"] >= 0.88
            lines.append(f"FP32 passes 88 %: {100 * row['mean']:.2f} %, {'met' if met else 'NOT MET'}")
        elif row["spec"] in GOALS and row["differences"]:
            least, mean = GOALS[row["spec"]], 100 * statistics.mean(row["differences"])
            lines.append(f"{row['spec']} within {least} points of FP32 over {len(row['differences'])} seeds: "
                         f"{mean:+.2f}, {'met' if mean >= -least else 'NOT MET'}")
    return lines


def accuracy_tables(document):
    rows = accuracies(document["items"])
    return report.plain(accuracy_table(rows)) + "\n\n" + "\n".join(accuracy_goals(rows))


def render_accuracy(document, path, options):
    """Writes the table and the picture into docs/results/slow-links.md."""
    from plots import pareto
    rows, run, page = accuracies(document["items"]), document["items"][0]["run"], report.SLOW_LINKS_PAGE
    title = f"{run['model']['name']} on {run['data']}"
    about = (f"{title}, {run['ranks']} ranks, batch {run['batch_size']} per rank, {run['epochs']:g} epochs, "
             f"{run['optimizer']}, learning rate {run['lr']:g}; test accuracy is taken after the last epoch, not "
             "at the best one.")
    report.put_section(page, "accuracy", "\n\n".join([
        about, "![Accuracy](accuracy.png)", report.markdown(accuracy_table(rows)).strip(),
        "\n".join("- " + line for line in accuracy_goals(rows))]))
    elements = run["steps"] * run["parameters"]
    pareto.draw([{**run, "compression": row["spec"], "wire_bytes_per_element": row["bytes"] / elements,
                  "test_accuracy": row["mean"],
                  "test_accuracy_std": statistics.stdev(row["accuracies"]) if row["accuracies"][1:] else 0,
                  "seeds": [{"test_accuracy": value} for value in row["accuracies"]]} for row in rows],
                title, page.parent / "accuracy.png")


UNLIMITED, BURST = "1Tbit", ",0us,128KiB"  # the burst of shaped_link.sh
WAYS = {"namespaces": "namespaces", "processes": "processes, `--link`", "threads": "threads, `--link`"}


def emulated_links(options):
    why = ranks.no_links()
    if why and not options.smoke:
        sys.exit(f"emulated_links: no slow links on this machine: {why}")
    ways = [way for way in WAYS if not (why and way == "namespaces")]
    cells = [(way, rate, spec) for rate in options.rate for spec in options.spec for way in ways]
    cells += [(way, rate, options.spec[0]) for way in ("processes", "threads") for rate in ("", UNLIMITED)]
    for repetition in range(options.repetitions):
        for way, rate, spec in cells:
            flags = ["--width", "128", "--batch-size", "4", "--data", "synthetic:4000", "--eval-every", "0",
                     "--device", "host", "--compression", spec, "--steps", options.warmup + options.steps]
            if way == "threads":
                flags += ["--ranks", options.hosts]
            if way != "namespaces" and rate:
                flags += ["--link", rate + BURST]
            item = {"way": way, "rate": rate, "spec": spec, "repetition": repetition}
            try:
                records = ranks.train(flags, 1 if way == "threads" else options.hosts,
                                      rate.lower() if way == "namespaces" else "", options.deadline_s,
                                      {"GRADWIRE_THREADS": "1"})
                yield {**item, **report.result_of(records, options.warmup)}
            except ranks.Failed as error:
                yield {**item, "error": str(error)}


def emulated_links_tables(document):
    def step_ms(*cell):
        return median_steps(i for i in document["items"] if (i["way"], i["rate"], i["spec"]) == cell)

    settings = document["settings"]
    rows = [["rate", "compression", "namespaces, ms", *(f"{WAYS[w]}, ms" for w in ("processes", "threads"))]]
    for rate in settings["rate"]:
        for spec in settings["spec"]:
            base = step_ms("namespaces", rate, spec)
            times = [step_ms(way, rate, spec) for way in ("processes", "threads")]
            rows.append([rate, f"`{spec}`", f"{base:.1f}" if base else "-",
                         *(f"{t:.1f} ({100 * (t / base - 1):+.1f} %)" if t and base else "-" for t in times)])
    text = "Median step; in brackets, the difference to namespaces:\n\n" + report.markdown(rows)
    rows = [["ranks", "no `--link`, ms", f"`--link {UNLIMITED}`, ms"]]
    for way in ("processes", "threads"):
        times = [step_ms(way, rate, settings["spec"][0]) for rate in ("", UNLIMITED)]
        rows.append([way, *(f"{t:.1f}" if t else "-" for t in times)])
    return text + "\n\nWithout a limit:\n\n" + report.markdown(rows)


SHARD_SPECS = ("fp32", "int8", "int8:residual=int8")
SHARDS = ("none", "optimizer")


def shard_memory(options):
    for spec in SHARD_SPECS:
        for shard in SHARDS:
            for world in options.worlds:
                if world > 1 or shard == "none":  # a single rank has nothing to divide
                    records = ranks.train([
                        "--model", options.model, "--image-size", options.image_size, "--data",
                        "synthetic:64", "--batch-size", "1", "--steps", "2", "--eval-every", "0", "--ranks",
                        world, "--compression", spec, "--shard", shard, "--timeout-s", "600"],
                        gradwire=options.gradwire)
                    yield {"compression": spec, "shard": shard, "ranks": world,
                           "bytes": records[-1]["memory_bytes"]}


def shard_memory_tables(document):
    sizes = {(i["compression"], i["shard"], i["ranks"]): i["bytes"] for i in document["items"]}
    worlds = sorted({world for _, _, world in sizes})
    rows = [["compression", "`--shard`", *(f"{n} rank{'s' * (n > 1)}" for n in worlds)]]
    for spec in SHARD_SPECS:
        for shard in SHARDS:
            found = [sizes.get((spec, shard if n > 1 else "none", n)) for n in worlds]
            rows.append([f"`{spec}`", f"`{shard}`",
                         *("" if size is None else f"{size / 1e6:,.0f} MB" for size in found)])
    return report.markdown(rows)


# Kernels whose time is proportional to the size of their arrays, which fit a core's caches.
KERNELS = ("bf16_decode", "bf16_reduce_encode (residual)", "int8_decode", "sgd_step (momentum)")


def compare_runs(options):
    def kernels(name, size):
        """Measures the kernels. Returns the result file."""
        path = folder / f"{name}.json"
        filters = [word for kernel in options.kernels for word in ("--filter", kernel)]
        subprocess.run([
            options.program, "kernels", "--device", "host", "--threads", str(options.threads), "--cache",
            "warm", "--min-size", str(size), "--max-size", str(size), "--stop", options.stop, *filters,
            "--json", path], check=True, stdout=subprocess.DEVNULL)
        return path

    def compared(kind, first, second):
        """Returns the verdicts on each row of these runs."""
        path = folder / f"{kind}.json"
        ran = subprocess.run([
            options.program, "compare", *(",".join(map(str, paths)) for paths in (first, second)), "--ignore",
            "size_bytes", "--ignore", "shape", "--json", path], stdout=subprocess.DEVNULL)
        verdicts = json.loads(path.read_text())
        if ran.returncode != int(any(row["verdict"] == "SLOWER" for row in verdicts)):
            raise RuntimeError(f"gradwire-bench compare ended with {ran.returncode}")
        return {row["row"]: row["verdict"] for row in verdicts}

    with tempfile.TemporaryDirectory(prefix="gradwire-compare-") as scratch:
        folder = pathlib.Path(scratch)
        for pair in range(options.pairs):
            sizes = {"a": options.size, "b": options.size, "c": int(options.size * options.more) // 4 * 4}
            turns = [[kernels(f"{name}{turn}", size) for name, size in sizes.items()]
                     for turn in range(options.runs)]
            a, b, c = zip(*turns)
            noise = [row["noise"] for path in (*a, *b, *c) for row in json.loads(path.read_text())]
            yield {"pair": pair, "noise": statistics.median(noise), "most_noise": max(noise),
                   "same": compared("same", a, b), "more": compared("more", a, c)}


def compare_runs_tables(document):
    items = document["items"]
    rows = [["row", "same work: SAME", "UNSURE", "FASTER or SLOWER", "more work: SLOWER", "UNSURE", "other"]]
    for name in items[0]["same"]:
        same, more = ([item[kind][name] for item in items] for kind in ("same", "more"))
        rows.append([name, same.count("SAME"), same.count("UNSURE"),
                     same.count("FASTER") + same.count("SLOWER"), more.count("SLOWER"), more.count("UNSURE"),
                     more.count("SAME") + more.count("FASTER")])
    right = sum(all(v in ("SAME", "UNSURE") for v in item["same"].values()) for item in items)
    found = sum(all(v == "SLOWER" for v in item["more"].values()) for item in items)
    noise = statistics.median(item["noise"] for item in items)
    return (report.markdown([[str(cell) for cell in row] for row in rows]) +
            f"\nNo row of {right} of {len(items)} pairs with the same work is FASTER or SLOWER. Every row of "
            f"{found} of {len(items)} with more work is SLOWER. Median noise {100 * noise:.1f} %.")


# ---- The table ---------------------------------------------------------------------------------------------

BLOCK_SPECS = ("fp32", "bf16", *BLOCKS)
ROWS = {
    "accuracy": Experiment(
        "Accuracy on Fashion-MNIST with three compressions: 8 ranks, 12 epochs, 3 seeds; half an hour or more.\n\n"
        "Skips runs that the result has already. --render FILE writes docs/results/slow-links.md.",
        {"seeds": 3, "epochs": "12", "data": "fashion-mnist", "gradwire": ranks.GRADWIRE},
        {"seeds": 1, "epochs": "1", "data": "synthetic:256"}, accuracy, accuracy_tables,
        line=lambda i: f"{i['compression']}, seed {i['seed']}: {100 * i['test_accuracy']:.2f} %",
        render=render_accuracy, resumes=True),
    "compare_runs": Experiment(
        "How often gradwire-bench compare is right: runs of one build, and runs whose work is 10 % more.\n\n"
        "Each pair measures some kernels in --runs turns: A and B with the same arrays, C with arrays that are\n"
        "--more times as large. compare should call no row of A and B FASTER or SLOWER, and each row of A and C\n"
        "SLOWER. The machine's noise is the standard deviation over the mean of the samples of a row.",
        {"pairs": 20, "size": 256 << 10, "more": 1.1, "kernels": KERNELS, "threads": 1, "runs": 9,
         "stop": "200ms", "program": ranks.GRADWIRE + "-bench"},
        {"pairs": 1, "runs": 2, "size": 64 << 10, "stop": "5ms"}, compare_runs, compare_runs_tables,
        line=lambda i: f"pair {i['pair']}: noise {100 * i['noise']:.1f} %; same work: {i['same']}; more "
        f"work: {i['more']}"),
    "ddp_loss": torch_loss(
        "Loss after training with DDP, for PyTorch's hooks and for Gradwire's, with SGD and AdamW.", "ddp",
        DDP_LOSS, {**SGD, **ADAMW}, ("bf16", *BLOCKS, "powersgd:rank=4,start=20")),
    "ddp_speed": torch_speed(
        "DDP with PyTorch's hooks and with Gradwire's over slow links: steps of fsdp_speed's transformer.",
        "ddp", DDP_SPEED, warm_up=3,
        specs=("fp32", "bf16", "int8", "int4:rotate=hadamard", "powersgd:rank=4")),
    "emulated_links": Experiment(
        "Step times over emulated links (gradwire train --link), between processes and between threads, and over\n"
        "shaped links between network namespaces, alternating in one run. Needs root for the namespaces. Takes\n"
        "eight minutes. Also compares a rate that no step reaches with no --link at all.",
        {"hosts": 4, "repetitions": 3, "steps": 12, "warmup": 3, "rate": ("100Mbit", "200Mbit", "1Gbit"),
         "spec": ("fp32", "bf16", "powersgd:rank=4"), "deadline_s": 120},
        {"hosts": 2, "repetitions": 1, "steps": 2, "warmup": 1, "rate": ("1Gbit",), "spec": ("fp32",)},
        emulated_links, emulated_links_tables,
        line=lambda i: f"{i['way']}, {i['rate'] or 'no link'}, {i['spec']}: " + (
            i.get("error") or f"{statistics.median(i['step_ms']):.1f} ms")),
    "fsdp_loss": torch_loss(
        "Loss after training with FSDP2, for each format of the gradients, with error feedback and without.",
        "fsdp", FSDP_LOSS, SGD, (*BLOCKS, "int2")),
    "fsdp_speed": torch_speed(
        "FSDP2 with and without Gradwire over slow links: steps of a sharded transformer, and reduce-scatter alone.\n\n"
        "4 hosts at 1 Gb/s, 10 minutes, PyTorch 2.9 or later. The model has GPT-2's blocks and few tokens:\n"
        "communication takes most of a step, as with fast GPUs on such links.",
        "fsdp", FSDP_SPEED, SCATTER, 6_400_000, specs=BLOCK_SPECS, tables=fsdp_tables),
    "hsdp_loss": torch_loss(
        "Loss after training with FSDP2 on two replicas, for PowerSGD between the replicas.", "fsdp",
        HSDP_LOSS, SGD, tuple(HSDP_LOSS)[1:], ranks=4),
    "jax_allreduce": Experiment(
        "gradwire.jax.pmean and jax.lax.pmean (Gloo), inside jit, on the CPU.",
        {"ranks": 2, "mib": 16.0, "repetitions": 7}, {"ranks": 2, "mib": 0.01, "repetitions": 1, "rate": ""},
        in_module("jax_training", "allreduces", BLOCK_SPECS), speeds(GLOO), modules=("jax",),
        specs=BLOCK_SPECS),
    "jax_loss": Experiment(
        "Loss of a small transformer after training in JAX: each compression and jax.lax.pmean (Gloo), on the CPU.\n\n"
        "The experiment uses the model, the data and the held-out batches of ddp_loss.",
        {"ranks": 2, "seeds": 3, "steps": 300, "modes": (GLOO, *BLOCK_SPECS, "powersgd:rank=4,start=20")},
        {**SHORT, "seeds": 1, "modes": (GLOO, "int8")},  # each mode takes ten seconds to compile
        in_module("jax_training", "losses"), losses(GLOO), line=report.loss_line, modules=("jax", "optax"),
        specs=(*BLOCK_SPECS, "powersgd:rank=4,start=20")),
    "jax_step": Experiment(
        "Time of a training step in JAX with each compression and with jax.lax.pmean (Gloo), on the CPU.\n\n"
        "jax_loss's transformer and AdamW step, 512 wide and 4 blocks deep, with a small batch: a model whose\n"
        "gradients take longer to exchange than to compute.",
        {"ranks": 4, "steps": 5, "repetitions": 3, "width": 512, "depth": 4,
         "modes": (GLOO, "fp32", "bf16", "int8", "int4", "powersgd:rank=4,start=2")},
        {**SHORT, "repetitions": 1, "modes": (GLOO, "int8"), "width": 64, "depth": 1},
        in_module("jax_training", "steps"), speeds(GLOO), line=report.speed_line, modules=("jax", "optax"),
        specs=("fp32", "bf16", "int8", "int4", "powersgd:rank=4,start=2")),
    "joining": Experiment(
        "Time for ranks to join, with and without a secret, alternating in one run.",
        {"ranks": 16, "repetitions": 15}, {"ranks": 2, "repetitions": 1, "rate": ""}, join,
        speeds("without a secret", before="Slowest rank:\n\n"), modules=("numpy",)),
    "shard_memory": Experiment(
        "Peak memory of a rank of `gradwire train`, for each --shard and number of ranks.\n\n"
        "ViT-B/32 with AdamW, batches of one image: 10 minutes, 20 GB of memory.",
        {"model": "vit_b_32", "image_size": 224, "worlds": (1, 2, 4, 8), "gradwire": ranks.GRADWIRE},
        {"model": "vit_tiny", "image_size": 28, "worlds": (1, 2)}, shard_memory, shard_memory_tables,
        line=lambda i: f"{i['compression']:20} {i['shard']:10} {i['ranks']} ranks: "
        f"{i['bytes'] / 1e6:.0f} MB"),
    "small_allreduce": Experiment(
        "A small allreduce with more ranks than cores: latency and CPU time of Gradwire and gloo, alternating.",
        {"ranks": 2 * len(os.sched_getaffinity(0)), "kib": 64, "repetitions": 5},
        {"ranks": 2, "repetitions": 1, "rate": ""}, small_allreduce, small_allreduce_tables,
        modules=("torch",)),
}
