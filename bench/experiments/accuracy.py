"""Accuracy on Fashion-MNIST with three compressions: 8 ranks, 12 epochs, 3 seeds; half an hour or more.

Skips runs that the result has already, so it can be interrupted. run.py accuracy --render FILE writes the
table and the picture into docs/results/slow-links.md.
"""
import json
import pathlib
import statistics
import subprocess
import tempfile

from harness import report, smoke
from harness.ranks import GRADWIRE

SPECS = ("fp32", "bf16", "powersgd:rank=4")
OPTIONS = {"seeds": 3, "gradwire": GRADWIRE}
SMOKE = {"seeds": 1}
RESUMES = True
FLAGS = ["--model", "vit_tiny", "--data", "fashion-mnist", "--ranks", "8", "--batch-size", "32", "--epochs",
         "12", "--lr", "2e-3", "--timeout-s", "600", "--log-every", "500"]
GOALS = {"bf16": 0.2, "powersgd:rank=4": 0.5}  # how far the mean may be below FP32's, in points


def measure(options):
    done = {(i["compression"], i["seed"]) for i in options.done}
    for seed in range(options.seeds):
        for spec in SPECS:
            if (spec, seed) in done:
                continue
            with tempfile.TemporaryDirectory() as folder:
                log = pathlib.Path(folder, "run.jsonl")
                command = [options.gradwire, "train", *FLAGS, "--compression", spec, "--seed", str(seed),
                           "--log", str(log)]
                if options.smoke:
                    command = smoke.tiny(command, {"--epochs": "1", "--data": "synthetic:64"})
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                records = [json.loads(line) for line in log.read_text().splitlines()]
            summary = next(r for r in records if r["type"] == "summary")
            yield {"compression": spec, "seed": seed, "test_accuracy": summary["test_accuracy"],
                   "bytes": summary["total_wire_bytes"], "ratio": summary["ratio"],
                   "run": next(r for r in records if r["type"] == "run"),
                   "evals": [r for r in records if r["type"] == "eval"]}


def line(item):
    return f"{item['compression']}, seed {item['seed']}: {100 * item['test_accuracy']:.2f} %"


def by_spec(items):
    """Returns a row per spec: accuracies, differences from FP32 with the same seed, and bytes."""
    found = {}
    for item in items:
        found.setdefault(item["compression"], {})[item["seed"]] = item
    fp32, rows = found.get("fp32", {}), []
    for spec, runs in sorted(found.items(), key=lambda pair: (pair[0] != "fp32", pair[0])):
        accuracies = [runs[seed]["test_accuracy"] for seed in sorted(runs)]
        rows.append({"spec": spec, "accuracies": accuracies, "mean": statistics.mean(accuracies),
                     "differences": [runs[seed]["test_accuracy"] - fp32[seed]["test_accuracy"]
                                     for seed in sorted(runs) if seed in fp32],
                     "bytes": report.median(r["bytes"] for r in runs.values()),
                     "ratio": report.median(r["ratio"] for r in runs.values())})
    return rows


def table(rows):
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


def goals(rows):
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


def tables(document):
    rows = by_spec(document["items"])
    return report.plain(table(rows)) + "\n\n" + "\n".join(goals(rows))


def render(document, path, options):
    """Writes the table and the picture into docs/results/slow-links.md."""
    from plots import experiments
    rows, run = by_spec(document["items"]), document["items"][0]["run"]
    about = (f"{run['model']['name']} on {run['data']}, {run['ranks']} ranks, batch {run['batch_size']} "
             f"per rank, {run['epochs']:g} epochs, {run['optimizer']}, learning rate {run['lr']:g}; "
             "test accuracy is taken after the last epoch, not at the best one.")
    report.put_section("accuracy", "\n\n".join([
        about, "![Accuracy](accuracy.png)", report.markdown(table(rows)).strip(),
        "\n".join("- " + line for line in goals(rows))]))
    experiments.draw_accuracy(document["items"], rows, report.PAGE.parent / "accuracy.png")
