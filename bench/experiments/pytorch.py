#!/usr/bin/env python3
"""FSDP2 and DDP with and without Gradwire: speed over slow links, and loss after training.

    pytorch.py fsdp-speed [--json FILE]     steps of a sharded transformer, and reduce-scatter alone, on 4
                                            hosts that are connected at 1 Gb/s (root, for network namespaces;
                                            10 minutes)
    pytorch.py fsdp-loss [--json FILE]      loss after training with each format, with error feedback and
                                            without
    pytorch.py ddp-speed [--json FILE]      as fsdp-speed, with the same transformer in DDP with a hook
    pytorch.py ddp-loss [--json FILE]       as fsdp-loss, with SGD and AdamW
    pytorch.py show FILE...                 the tables of results, in Markdown
    pytorch.py --smoke                      all of them on 2 ranks of this machine, one step of a tiny model

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
sys.path.insert(0, str(ROOT / "bench"))
from harness import smoke  # noqa: E402

SHAPED_LINK, HOST = HERE.parent / "harness" / "shaped_link.sh", HERE / "pytorch_host.py"
BF16_SUMS = {"reduce_dtype": "bfloat16"}
BF16_BOTH = {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}


def ours(gradients, weights, **others):
    return {"ours": {"gradients": gradients, "weights": weights, **others}}


NATIVE_FP32, NATIVE_BF16 = "PyTorch, fp32", "PyTorch, reduce_dtype=bf16"
STEP_MODES = [(NATIVE_FP32, {"native": {}}), (NATIVE_BF16, {"native": BF16_SUMS}),
              ("PyTorch, param_dtype=reduce_dtype=bf16", {"native": BF16_BOTH}),
              ("fp32 / fp32", ours("fp32", "fp32")), ("bf16 / bf16", ours("bf16", "bf16")),
              ("int8 / bf16", ours("int8", "bf16")), ("int8 / int8", ours("int8", "int8")),
              ("int4:rotate=hadamard / int8", ours("int4:rotate=hadamard", "int8"))]
REDUCE_SCATTER_MODES = [("PyTorch, fp32", {"native": True}),
                        *((spec, {"spec": f"{spec}{',' if ':' in spec else ':'}schedule=two_shot"})
                          for spec in ("fp32", "bf16", "int8", "int4", "int4:rotate=hadamard"))]
LOSS_MODES = [("PyTorch, fp32", {"native": {}}), ("PyTorch, reduce_dtype=bf16", {"native": BF16_SUMS}),
              *((f"{spec}{'' if residual == 'fp32' else ', residual=' + residual}",
                 ours(spec, "fp32", residual=residual))
                for spec in ("int8", "int4", "int4:rotate=hadamard", "int2")
                for residual in ("fp32", "int8", "off") if spec != "int8" or residual != "int8")]
POWERSGD = {"hook": "powerSGD_hook", "rank": 4, "start": 2}
DDP_SPEED_MODES = [(NATIVE_FP32, {"native": {}}),
                   ("PyTorch, bf16_compress_hook", {"native": {"hook": "bf16_compress_hook"}}),
                   ("PyTorch, powerSGD_hook, rank 4", {"native": POWERSGD}),
                   *((spec, {"ours": {"spec": spec}})
                     for spec in ("fp32", "bf16", "int8", "int4:rotate=hadamard", "powersgd:rank=4"))]
DDP_LOSS_MODES = [
    (NATIVE_FP32, {"native": {}}),
    ("PyTorch, bf16_compress_hook", {"native": {"hook": "bf16_compress_hook"}}),
    *((f"PyTorch, powerSGD_hook, rank 4, start {start}", {"native": {**POWERSGD, "start": start}})
      for start in (2, 20)),
    *((spec, {"ours": {"spec": spec}})
      for spec in ("bf16", "int8", "int4", "int4:rotate=hadamard", *(f"powersgd:rank=4,start={start}"
                                                                     for start in (0, 2, 5, 20))))
]
# Each with the best learning rate for FP32, out of 0.05 to 0.4 and 0.001 to 0.008.
OPTIMIZERS = {"sgd": {"lr": 0.05, "momentum": 0.9}, "adamw": {"lr": 0.002}}
# GPT-2's blocks, few tokens: communication takes most of a step, as with fast GPUs on such links.
SPEED_MODEL = {"width": 768, "depth": 4, "words": 1024, "length": 16}
LOSS_MODEL = {"width": 64, "depth": 2, "words": 509, "length": 32}
SMOKE_MODEL = {"width": 32, "depth": 1, "words": 17, "length": 4}


def settings(arguments, plan):
    def output(*command):
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip()

    cpu = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "date": datetime.date.today().isoformat(), "commit": output("git", "rev-parse", "--short=12", "HEAD"),
        "command": "bench/experiments/pytorch.py " + arguments.command,
        "torch": output(arguments.python, "-c", "import torch; print(torch.__version__)"),
        "python": platform.python_version(), "system": platform.platform(), "cpu": cpu[0] if cpu else "",
        "cores": len(cpu), "load": os.getloadavg()[0], "hosts": arguments.hosts,
        "rate": getattr(arguments, "rate", None), "model": plan["model"], "batch_size": plan["batch_size"]
    }


def measure(arguments, plan, shaped):
    """Runs the plan on arguments.hosts ranks. Writes the measurements even if a later item failed."""
    if arguments.smoke:
        small = {"elements": 6400, "warmup": 1}
        items = [{key: small.get(key, value) for key, value in item.items()} for item in plan["items"]]
        plan, shaped = {**plan, "model": SMOKE_MODEL, "items": items}, False
    about = settings(arguments, plan)
    with tempfile.TemporaryDirectory() as folder:
        results, path = pathlib.Path(folder, "results.jsonl"), pathlib.Path(folder, "plan.json")
        path.write_text(json.dumps({**plan, "results": str(results)}))
        command = [arguments.python, "-W", "ignore", str(HOST), str(path)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GRADWIRE_THREADS": "1"}
        if shaped:
            prefix = [str(SHAPED_LINK), "--hosts", str(arguments.hosts), "--rate", arguments.rate, "--"]
            code = subprocess.run([*prefix, *command], env=environment,
                                  timeout=arguments.deadline_s).returncode
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


def ddp_speed(arguments):
    items = [{
        "what": "step", "wrap": "ddp", "mode": mode, "repetition": repetition, "warmup": 3,
        "steps": arguments.steps, **how
    } for repetition in range(arguments.repetitions) for mode, how in DDP_SPEED_MODES]
    return measure(arguments, {"model": SPEED_MODEL, "batch_size": 1, "items": items}, shaped=True)


def ddp_loss(arguments):
    items = [{
        "what": "loss", "wrap": "ddp", "mode": mode, "seed": seed, "steps": arguments.steps,
        "optimizer": name, **options, **how
    } for seed in range(arguments.seeds) for name, options in OPTIMIZERS.items()
             for mode, how in DDP_LOSS_MODES]
    return measure(arguments, {"model": LOSS_MODEL, "batch_size": 8, "items": items}, shaped=False)


def speed(arguments):
    items = []
    # in turns, so that changes in the machine's speed affect all
    for repetition in range(arguments.repetitions):
        items += [{
            "what": "step", "mode": mode, "repetition": repetition, "warmup": 1, "steps": arguments.steps,
            **how
        } for mode, how in STEP_MODES]
        items += [{
            "what": "reduce_scatter", "mode": mode, "repetition": repetition, "elements": 6_400_000,
            "warmup": 1, "steps": arguments.steps, **how
        } for mode, how in REDUCE_SCATTER_MODES]
    return measure(arguments, {"model": SPEED_MODEL, "batch_size": 1, "items": items}, shaped=True)


def loss(arguments):
    items = [{
        "what": "loss", "mode": mode, "seed": seed, "steps": arguments.steps, "lr": 0.05, "momentum": 0.9,
        **how
    } for seed in range(arguments.seeds) for mode, how in LOSS_MODES]
    return measure(arguments, {"model": LOSS_MODEL, "batch_size": 8, "items": items}, shaped=False)


def by_mode(items, what, wrap="fsdp", optimizer="sgd"):
    found = {}
    for item in items:
        if (item["what"], item.get("wrap", "fsdp"), item.get("optimizer", "sgd")) == (what, wrap, optimizer):
            found.setdefault(item["mode"], []).append(item)
    return found


def milliseconds(items):
    """Returns the median over repetitions of the medians over steps."""
    return statistics.median(statistics.median(item["step_ms"]) for item in items)


def row(*cells):
    return "| " + " | ".join(cells) + " |"


def ddp_tables(items):
    lines = []
    steps = by_mode(items, "step", "ddp")
    if steps:
        base = milliseconds(steps[NATIVE_FP32]) if NATIVE_FP32 in steps else float("nan")
        lines += [row("", "MB sent per step", "ms per step", f"x {NATIVE_FP32}", "range of repetitions, ms"),
                  row("---", "---:", "---:", "---:", "---:")]
        for mode, found in steps.items():
            ms, each = milliseconds(found), [statistics.median(i["step_ms"]) for i in found]
            sent = statistics.median(i["sent_bytes"] for i in found) / 1e6
            lines.append(
                row(mode, f"{sent:.1f}", f"{ms:.0f}", f"{base / ms:.2f}",
                    f"{min(each):.0f} to {max(each):.0f}"))
        lines.append("")
    losses = {name: by_mode(items, "loss", "ddp", name) for name in OPTIMIZERS}
    if losses["sgd"]:
        lines += [
            row("", *(f"final loss, {name}" for name in losses),
                *(f"above FP32 of the same seed, {name}" for name in losses)),
            row("---", *["---:"] * len(losses), *["---"] * len(losses))
        ]
        for mode in losses["sgd"]:
            means, above = [], []
            for found in losses.values():
                base = {i["seed"]: i["final_loss"] for i in found.get(NATIVE_FP32, [])}
                means.append(f"{statistics.fmean(i['final_loss'] for i in found[mode]):.4f}")
                above.append(", ".join(f"{i['final_loss'] - base[i['seed']]:+.4f}" for i in found[mode]))
            lines.append(row(mode, *means, *above))
        lines.append("")
    return lines


def tables(paths):
    lines = []
    for path in paths:
        items = json.loads(path.read_text())["items"]
        lines += ddp_tables(items)
        steps, alone, losses = (by_mode(items, what) for what in ("step", "reduce_scatter", "loss"))
        if steps:
            base = [
                milliseconds(steps[m]) if m in steps else float("nan") for m in (NATIVE_FP32, NATIVE_BF16)
            ]
            lines += [
                row("gradients / weights", "ms per step", f"x {NATIVE_FP32}", f"x {NATIVE_BF16}",
                    "range of repetitions, ms"),
                row("---", "---:", "---:", "---:", "---:")
            ]
            for mode, found in steps.items():
                ms, each = milliseconds(found), [statistics.median(i["step_ms"]) for i in found]
                lines.append(
                    row(mode, f"{ms:.0f}", *(f"{b / ms:.2f}" for b in base),
                        f"{min(each):.0f} to {max(each):.0f}"))
            lines.append("")
        if alone:
            base = milliseconds(alone["fp32"]) if "fp32" in alone else float("nan")
            lines += [row("reduce-scatter of 25.6 MB", "ms", "x fp32"), row("---", "---:", "---:")]
            lines += [
                row(mode, f"{milliseconds(found):.1f}", f"{base / milliseconds(found):.2f}")
                for mode, found in alone.items()
            ]
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


def specs():
    """All specs of the modes."""
    for _, mode in (*STEP_MODES, *REDUCE_SCATTER_MODES, *LOSS_MODES, *DDP_SPEED_MODES, *DDP_LOSS_MODES):
        named = [*(mode["ours"].get(key)
                   for key in ("gradients", "weights", "spec"))] if "ours" in mode else [mode.get("spec")]
        yield from (spec for spec in named if spec)


def run_smoke(parser, names):
    smoke.check_specs(specs())
    for name in names:
        arguments = parser.parse_args([
            name, "--hosts", "2", "--steps", "1", "--json",
            str(ROOT / f"build/smoke/{name}.json"), "--repetitions" if name.endswith("speed") else "--seeds",
            "1"
        ])
        arguments.smoke = True
        if not os.access(arguments.python, os.X_OK):
            print(f"NOT CHECKED: no {arguments.python}")
            return smoke.SKIPPED
        if code := names[name](arguments):
            return code
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    experiments = {"fsdp-speed": speed, "fsdp-loss": loss, "ddp-speed": ddp_speed, "ddp-loss": ddp_loss}
    for name in experiments:
        command, is_speed = commands.add_parser(name), name.endswith("speed")
        command.add_argument("--json", type=pathlib.Path, default=ROOT / "build" / f"{name}.json")
        command.add_argument("--python", default=str(ROOT / "build" / "frameworks" / "python"))
        command.add_argument("--hosts", type=int, default=4 if is_speed else 2, help="ranks")
        command.add_argument("--steps", type=int, default=4 if is_speed else 300)
        command.add_argument("--deadline-s", type=int, default=3000)
        if is_speed:
            command.add_argument("--rate", default="1gbit")
            command.add_argument("--repetitions", type=int, default=3)
        else:
            command.add_argument("--seeds", type=int, default=3)
    shown = commands.add_parser("show")
    shown.add_argument("files", type=pathlib.Path, nargs="+")
    if sys.argv[1:] == ["--smoke"]:
        return run_smoke(parser, experiments)
    arguments = parser.parse_args()
    arguments.smoke = False
    if arguments.command == "show":
        print(tables(arguments.files))
        return 0
    return experiments[arguments.command](arguments)


if __name__ == "__main__":
    sys.exit(main())
