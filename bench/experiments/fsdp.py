#!/usr/bin/env python3
"""FSDP2 with gradwire.fsdp and without: how fast over slow links, and how well it trains.

    fsdp.py speed [--json FILE]     steps of a sharded transformer, and reduce-scatter alone, on 4 hosts that are
                                    connected at 1 Gb/s (root, for network namespaces; 10 minutes)
    fsdp.py loss [--json FILE]      loss after training with each format, with error feedback and without
    fsdp.py show FILE...            the tables of results, in Markdown

--python: an interpreter with PyTorch 2.15 (build/frameworks/python, from make test-frameworks).
"""
import argparse
import datetime
import json
import os
import pathlib
import platform
import socket
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SHAPED_LINK, HOST = HERE.parent / "harness" / "shaped_link.sh", HERE / "fsdp_host.py"
BF16_SUMS = {"reduce_dtype": "bfloat16"}
BF16_BOTH = {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}


def ours(gradients, weights, **others):
    return {"ours": {"gradients": gradients, "weights": weights, **others}}


NATIVE_FP32, NATIVE_BF16 = "PyTorch, fp32", "PyTorch, reduce_dtype=bf16"
STEP_MODES = [
    (NATIVE_FP32, {"native": {}}), (NATIVE_BF16, {"native": BF16_SUMS}),
    ("PyTorch, param_dtype=reduce_dtype=bf16", {"native": BF16_BOTH}),
    ("fp32 / fp32", ours("fp32", "fp32")), ("bf16 / bf16", ours("bf16", "bf16")), ("int8 / bf16", ours("int8", "bf16")),
    ("int8 / int8", ours("int8", "int8")), ("int4:rotate=hadamard / int8", ours("int4:rotate=hadamard", "int8"))]
REDUCE_SCATTER_MODES = [("PyTorch, fp32", {"native": True}),
                        *((spec, {"spec": f"{spec}{',' if ':' in spec else ':'}schedule=two_shot"})
                          for spec in ("fp32", "bf16", "int8", "int4", "int4:rotate=hadamard"))]
LOSS_MODES = [("PyTorch, fp32", {"native": {}}), ("PyTorch, reduce_dtype=bf16", {"native": BF16_SUMS}),
              *((f"{spec}{'' if residual == 'fp32' else ', residual=' + residual}", ours(spec, "fp32", residual=residual))
                for spec in ("int8", "int4", "int4:rotate=hadamard", "int2") for residual in ("fp32", "int8", "off")
                if spec != "int8" or residual != "int8")]
# GPT-2's blocks, few tokens: communication is most of a step, as with fast GPUs on such links.
SPEED_MODEL = {"width": 768, "depth": 4, "words": 1024, "length": 16}
LOSS_MODEL = {"width": 64, "depth": 2, "words": 509, "length": 32}


def settings(arguments, plan):
    def output(*command):
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip()

    cpu = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    return {"date": datetime.date.today().isoformat(), "commit": output("git", "rev-parse", "--short=12", "HEAD"),
            "command": "bench/experiments/fsdp.py " + arguments.command,
            "torch": output(arguments.python, "-c", "import torch; print(torch.__version__)"),
            "python": platform.python_version(), "system": platform.platform(), "cpu": cpu[0] if cpu else "", "cores": len(cpu),
            "load": os.getloadavg()[0], "hosts": arguments.hosts, "rate": getattr(arguments, "rate", None),
            "model": plan["model"], "batch_size": plan["batch_size"]}


def measure(arguments, plan, shaped):
    """Runs the plan on arguments.hosts ranks; writes what was measured, also if a later item failed."""
    about = settings(arguments, plan)
    with tempfile.TemporaryDirectory() as folder:
        results, path = pathlib.Path(folder, "results.jsonl"), pathlib.Path(folder, "plan.json")
        path.write_text(json.dumps({**plan, "results": str(results)}))
        command = [arguments.python, "-W", "ignore", str(HOST), str(path)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GRADWIRE_THREADS": "1"}
        if shaped:
            prefix = [str(SHAPED_LINK), "--hosts", str(arguments.hosts), "--rate", arguments.rate, "--"]
            code = subprocess.run([*prefix, *command], env=environment, timeout=arguments.deadline_s).returncode
        else:
            code = run_here(command, arguments.hosts, environment, arguments.deadline_s)
        items = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps({"schema": 1, "settings": about, "items": items}, indent=1) + "\n")
    print(f"Written: {arguments.json}\n\n{tables([arguments.json])}")
    return code


def run_here(command, ranks, environment, deadline_s):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {**environment, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [subprocess.Popen(command, env={**shared, "RANK": str(rank)}) for rank in range(ranks)]
    try:
        return max(abs(process.wait(timeout=deadline_s)) for process in processes)
    finally:
        for process in processes:
            process.kill()


def speed(arguments):
    items = []
    for repetition in range(arguments.repetitions):  # in turns, so that changes in the machine's speed affect all
        items += [{"what": "step", "mode": mode, "repetition": repetition, "warmup": 1, "steps": arguments.steps, **how}
                  for mode, how in STEP_MODES]
        items += [{"what": "reduce_scatter", "mode": mode, "repetition": repetition, "elements": 6_400_000, "warmup": 1,
                   "steps": arguments.steps, **how} for mode, how in REDUCE_SCATTER_MODES]
    return measure(arguments, {"model": SPEED_MODEL, "batch_size": 1, "items": items}, shaped=True)


def loss(arguments):
    items = [{"what": "loss", "mode": mode, "seed": seed, "steps": arguments.steps, "lr": 0.05, "momentum": 0.9, **how}
             for seed in range(arguments.seeds) for mode, how in LOSS_MODES]
    return measure(arguments, {"model": LOSS_MODEL, "batch_size": 8, "items": items}, shaped=False)


def by_mode(items, what):
    found = {}
    for item in items:
        if item["what"] == what:
            found.setdefault(item["mode"], []).append(item)
    return found


def milliseconds(items):
    """The median over repetitions of the medians over steps."""
    return statistics.median(statistics.median(item["step_ms"]) for item in items)


def row(*cells):
    return "| " + " | ".join(cells) + " |"


def tables(paths):
    lines = []
    for path in paths:
        items = json.loads(path.read_text())["items"]
        steps, alone, losses = (by_mode(items, what) for what in ("step", "reduce_scatter", "loss"))
        if steps:
            base = [milliseconds(steps[m]) if m in steps else float("nan") for m in (NATIVE_FP32, NATIVE_BF16)]
            lines += [row("gradients / weights", "ms per step", f"x {NATIVE_FP32}", f"x {NATIVE_BF16}", "range of repetitions, ms"),
                      row("---", "---:", "---:", "---:", "---:")]
            for mode, found in steps.items():
                ms, each = milliseconds(found), [statistics.median(i["step_ms"]) for i in found]
                lines.append(row(mode, f"{ms:.0f}", *(f"{b / ms:.2f}" for b in base), f"{min(each):.0f} to {max(each):.0f}"))
            lines.append("")
        if alone:
            base = milliseconds(alone["fp32"]) if "fp32" in alone else float("nan")
            lines += [row("reduce-scatter of 25.6 MB", "ms", "x fp32"), row("---", "---:", "---:")]
            lines += [row(mode, f"{milliseconds(found):.1f}", f"{base / milliseconds(found):.2f}") for mode, found in alone.items()]
            lines.append("")
        if losses:
            lines += [row("gradients", "final loss, mean of seeds", "above PyTorch, fp32", "of each seed"),
                      row("---", "---:", "---:", "---")]
            base = {i["seed"]: i["final_loss"] for i in losses.get(NATIVE_FP32, [])}
            for mode, found in losses.items():
                values = [i["final_loss"] for i in found]
                above = [i["final_loss"] - base.get(i["seed"], float("nan")) for i in found]
                lines.append(row(mode, f"{statistics.fmean(values):.4f}", f"{statistics.fmean(above):+.4f}",
                                 ", ".join(f"{a:+.4f}" for a in above)))
            lines.append("")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("speed", "loss"):
        command = commands.add_parser(name)
        command.add_argument("--json", type=pathlib.Path, default=ROOT / "build" / f"fsdp-{name}.json")
        command.add_argument("--python", default=str(ROOT / "build" / "frameworks" / "python"))
        command.add_argument("--hosts", type=int, default=4 if name == "speed" else 2, help="ranks")
        command.add_argument("--steps", type=int, default=4 if name == "speed" else 300)
        command.add_argument("--deadline-s", type=int, default=3000)
    commands.choices["speed"].add_argument("--rate", default="1gbit")
    commands.choices["speed"].add_argument("--repetitions", type=int, default=3)
    commands.choices["loss"].add_argument("--seeds", type=int, default=3)
    shown = commands.add_parser("show")
    shown.add_argument("files", type=pathlib.Path, nargs="+")
    arguments = parser.parse_args()
    if arguments.command == "show":
        print(tables(arguments.files))
        return 0
    return speed(arguments) if arguments.command == "speed" else loss(arguments)


if __name__ == "__main__":
    sys.exit(main())
