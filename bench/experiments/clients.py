"""The frameworks of docs/for-trainers.md with and without Gradwire: loss, time per step, checkpoints.

2 hosts, 20 minutes, with build/frameworks/python (make test-frameworks installs it); the links need root. The
loss is that of a small transformer on held-out examples after 300 steps; the steps are those of a transformer
of 29.9 million parameters. Continues an interrupted run. --render FILE writes the table into the page.
"""
import json
import os
import re
import statistics
import sys
import tempfile

from experiments.table import Experiment
from harness import ranks, report

PAGE = ranks.ROOT / "docs/for-trainers.md"
TRAINING = ranks.ROOT / "bench/harness/client_training.py"
# The name in the table, and the section of the page.
CLIENTS = {"lightning": ("Lightning", "Lightning"), "accelerate": ("Accelerate, DDP", "Accelerate"),
           "fsdp2": ("Accelerate, FSDP2", "Accelerate"),
           "transformers": ("transformers' Trainer", "transformers' Trainer"),
           "ray": ("Ray Train", "Ray Train"), "deepspeed2": ("DeepSpeed, ZeRO-2", "DeepSpeed"),
           "deepspeed3": ("DeepSpeed, ZeRO-3", "DeepSpeed"), "torchtitan": ("torchtitan", "torchtitan"),
           "megatron": ("Megatron, DDP", "Megatron")}
WITHOUT_POWERSGD = ("fsdp2", "deepspeed2", "deepspeed3", "torchtitan", "megatron")
WITHOUT_CHECKPOINT = ("megatron",)  # its optimizers, which save checkpoints, need a GPU
POWERSGD = "powersgd:rank=4"
RING = "powersgd:rank=4,schedule=ring"  # results do not depend on DDP's buckets
CHECKPOINT_SPECS = {"fsdp2": "int8", "torchtitan": "int8", "deepspeed2": "int8", "deepspeed3": "int8"}
WHAT = ("loss", "speed", "resume")
PACKAGE = str(ranks.ROOT / "integrations/python")  # also for Ray's workers
RANKS = {"OMP_NUM_THREADS": "1", "GRADWIRE_THREADS": "1",
         "PYTHONPATH": os.pathsep.join([PACKAGE, os.environ.get("PYTHONPATH", "")])}


def train(options, client, job, rate=""):
    """Returns the records of both ranks."""
    import torch
    with tempfile.TemporaryDirectory(prefix="gradwire-clients-") as folder:
        output, records = f"{folder}/record", []
        jobs = [{**job, "folder": f"{folder}/checkpoint" if job["epochs"] > 1 else ""}]
        if job["epochs"] > 1:
            jobs.append({**jobs[0], "resume": True})
        for each in jobs:
            code = ranks.run([sys.executable, "-B", str(TRAINING), client, json.dumps(each), output], 2, rate,
                             options.deadline_s, RANKS)
            if code:
                return None
            records.append(torch.load(f"{output}-0.pt"))
        return records


def measured(options, item):
    """Returns the item with its result."""
    problems = {"loss": "language", "speed": "speed", "resume": "regression"}
    problem = problems[item["what"]]
    if options.smoke or (item["what"] == "resume" and item["client"] in ("torchtitan", "deepspeed3")):
        problem = "tiny"
    job = {"problem": problem, "spec": item["spec"], "epochs": 2 if item["what"] == "resume" else 1}
    load = os.getloadavg()[0]  # when the item starts
    records = train(options, item["client"], job, options.rate if item["what"] == "speed" else "")
    if records is None:
        return {**item, "error": "the ranks failed"}
    first = records[0]
    if item["what"] == "loss":
        return {**item, "loss": first["held_out"]}
    if item["what"] == "speed":
        steps = [1000 * (b - a) for a, b in zip(first["times"], first["times"][1:])]
        return {**item, "step_ms": steps[options.warm_up:], "load": load}
    again = records[1]
    same = first["losses"][len(again["losses"]):] == again["losses"] and all(
        a.equal(b) for a, b in zip(first["weights"], again["weights"]))
    return {**item, "same": same}


def planned(options):
    items = []
    for client in options.clients:
        for what in options.what:
            specs = ["", "int8"] + ([] if client in WITHOUT_POWERSGD else [POWERSGD])
            if what == "resume" and client in WITHOUT_CHECKPOINT:
                specs = []
            elif what == "resume":
                specs = [CHECKPOINT_SPECS.get(client, RING)]
            items += [{"what": what, "client": client, "spec": spec} for spec in specs]
    return items


def measure(options):
    if unknown := set(options.clients) - set(CLIENTS):
        sys.exit(f"clients: --clients {min(unknown)} is not one of {', '.join(CLIENTS)}")
    if options.rate and (why := ranks.no_links()):
        sys.exit(f"clients: no slow links on this machine: {why}")
    done = [{key: item[key] for key in ("what", "client", "spec")} for item in options.done
            if "error" not in item]
    for item in planned(options):
        if item not in done:
            yield measured(options, item)


def settings(options, items):
    """Returns the clients and the properties in the file, also those from earlier runs."""
    return {key: [name for name in names if any(item[column] == name for item in items)]
            for key, column, names in (("clients", "client", CLIENTS), ("what", "what", WHAT))}


def line(item):
    result = {key: value for key, value in item.items() if key not in ("what", "client", "spec")}
    return f"{item['client']:12} {item['what']:7} {item['spec'] or 'without':30} {result}"


def added_lines(section):
    """Returns how many lines of the page's example contain Gradwire."""
    text = re.search(rf"^## {re.escape(section)}$(.*?)^## ", PAGE.read_text(), re.M | re.S)[1]
    examples = [row for row in text.splitlines() if row.startswith("    ")]
    return sum(any(word in row for word in ("radwire", "Compress", "hook", "handle")) for row in examples)


def tables(document):
    found = {(item["client"], item["what"], item["spec"]): item for item in document["items"]
             if "error" not in item}
    rows = [["", "lines", "loss, FP32", "int8", "PowerSGD", "ms per step, FP32", "int8", "PowerSGD",
             "continues bit for bit"]]
    for client, (name, section) in CLIENTS.items():
        if not any(key[0] == client for key in found):
            continue
        row = [name, str(added_lines(section))]
        for what, show in (("loss", lambda i: f"{i['loss']:.4f}"),
                           ("speed", lambda i: f"{statistics.median(i['step_ms']):.0f}")):
            row += [show(found[client, what, spec]) if (client, what, spec) in found else "-"
                    for spec in ("", "int8", POWERSGD)]
        spec = CHECKPOINT_SPECS.get(client, RING)
        resumed = found.get((client, "resume", spec), {}).get("same")
        row.append("-" if resumed is None else
                   f"{'yes' if resumed else 'no'}, `{spec.split(':')[0]}`")
        rows.append(row)
    return report.markdown(rows)


def render(document, path, options):
    """Writes the table into docs/for-trainers.md."""
    report.put_section(PAGE, "clients", tables(document))


EXPERIMENT = Experiment(
    __doc__, {"rate": "1gbit", "clients": tuple(CLIENTS), "what": WHAT, "warm_up": 3, "deadline_s": 240},
    {"rate": "", "clients": ("accelerate",), "warm_up": 1}, measure, tables, line=line, render=render,
    settings=settings, modules=("torch>=2.9", "torch.distributed.fsdp._fully_shard", "accelerate"),
    specs=("int8", POWERSGD, RING), resumes=True)
