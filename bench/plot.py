#!/usr/bin/env python3
"""Draws what `gradwire compare --json` measured: accuracy against bytes sent, loss against time, where a step's time went.

    bench/plot.py build/demo/compare.json -o report.png
    bench/plot.py run-a.jsonl run-b.jsonl -o report.png     logs of single runs (gradwire train --log)
    bench/plot.py numerics.json -o numerics.png             what gradwire-bench numerics --json measured
    bench/plot.py experiments.json -o experiments.png       what bench/experiments.py measured
    bench/plot.py trace.json -o timeline.png                one step of gradwire train --trace, all ranks below each other

Beside compare.json lie the runs' logs, compare.0.jsonl and so on (docs/formats.md).
"""
import argparse
import json
import pathlib
import statistics
import sys

try:
    import matplotlib
except ImportError:
    sys.exit("plot.py: matplotlib is missing; install Debian's python3-matplotlib")
matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator  # noqa: E402

INK, FAINT, GRID = "#22272e", "#6b7280", "#e5e7eb"
# Okabe and Ito's colors, which the color-blind can tell apart.
RUN_COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f"]
# The parts of a step in the order in which they happen; what is exposed of communication stands out.
PARTS = [
    ("data_ms", "data", "#d1d5db"),
    ("forward_ms", "forward", "#9db7d5"),
    ("backward_ms", "backward", "#4f7cac"),
    ("exposed_comm_ms", "waiting for communication", "#d1495b"),
    ("optimizer_ms", "optimizer", "#edae49"),
]


class Run:
    """One run's log."""

    def __init__(self, path):
        self.config, self.summary, self.steps, self.evals = {}, {}, [], []
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                record = json.loads(line)
            except ValueError as error:
                raise SystemExit(f"plot.py: {path}:{number}: not JSON: {error}")
            kind = record.get("type")
            if kind == "run":
                self.config = record
            elif kind == "step":
                self.steps.append(record)
            elif kind == "eval":
                self.evals.append(record)
            elif kind == "summary":
                self.summary = record
        if not self.config or not self.steps:
            raise SystemExit(f"plot.py: {path}: no run and no steps in it")
        self.name = self.config["compression"]

    def seconds(self):
        """When each step ended, in seconds of training (evaluations not counted)."""
        total, ends = 0.0, []
        for step in self.steps:
            total += (step["step_ms"] or 0) / 1000
            ends.append(total)
        return ends

    def accuracy_by_bytes(self):
        """(bytes sent until then, accuracy) of each evaluation."""
        sent, totals = 0, {0: 0}
        for step in self.steps:
            sent += step["wire_bytes"]
            totals[step["step"] + 1] = sent
        return [(totals.get(e["step"], sent), e["test_accuracy"]) for e in self.evals if e["test_accuracy"] is not None]

    def median(self, field):
        values = [s[field] for s in self.steps if s.get(field) is not None]
        return statistics.median(values) if values else 0.0


def load(paths):
    runs = []
    for path in map(pathlib.Path, paths):
        try:
            if path.suffix == ".jsonl":
                runs.append(Run(path))
                continue
            count = len(json.loads(path.read_text()))
            runs += [Run(path.with_suffix(f".{i}.jsonl")) for i in range(count)]
        except OSError as error:
            raise SystemExit(f"plot.py: {error.filename}: {error.strerror}")
        except ValueError as error:
            raise SystemExit(f"plot.py: {path}: not JSON: {error}")
    if not runs:
        raise SystemExit("plot.py: no runs to draw")
    return runs


def human_bytes(value, _=None):
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"


def smooth(values, window):
    """Mean over a trailing window; a missing value (a loss that was not finite) leaves a gap."""
    out = []
    for i in range(len(values)):
        known = [v for v in values[max(0, i - window + 1):i + 1] if v is not None]
        out.append(sum(known) / len(known) if known and values[i] is not None else float("nan"))
    return out


def style(axis, title, x, y):
    axis.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK, pad=12)
    axis.set_xlabel(x, color=FAINT)
    axis.set_ylabel(y, color=FAINT)
    axis.tick_params(which="both", colors=FAINT, length=0)
    axis.grid(color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(GRID)


def draw_accuracy(axis, runs):
    style(axis, "Accuracy against bytes sent", "bytes sent by each rank, so far", "test accuracy, %")
    drawn = False
    for run, color in zip(runs, RUN_COLORS * len(runs)):
        points = [(sent, 100 * accuracy) for sent, accuracy in run.accuracy_by_bytes() if sent > 0]
        if not points:
            continue
        drawn = True
        sent, accuracy = zip(*points)
        axis.plot(sent, accuracy, color=color, linewidth=2, marker="o", markersize=6, markeredgecolor="white")
        axis.annotate(f"{accuracy[-1]:.1f} %", (sent[-1], accuracy[-1]), textcoords="offset points", xytext=(0, 9),
                      ha="center", color=color, fontweight="bold")
    if not drawn:
        axis.text(0.5, 0.5, "no evaluation, or nothing was sent", transform=axis.transAxes, ha="center", color=FAINT)
        return
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(FuncFormatter(human_bytes))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.margins(x=0.14, y=0.18)


def draw_loss(axis, runs):
    style(axis, "Loss against time", "seconds of training", "training loss")
    for run, color in zip(runs, RUN_COLORS * len(runs)):
        seconds, losses = run.seconds(), [s["loss"] for s in run.steps]
        raw = [float("nan") if v is None else v for v in losses]
        axis.plot(seconds, raw, color=color, linewidth=0.6, alpha=0.18)
        axis.plot(seconds, smooth(losses, max(1, len(losses) // 40)), color=color, linewidth=2)
    axis.set_xlim(left=0)


def draw_time(axis, runs):
    style(axis, "Where a step's time went", "milliseconds per step, median", "")
    axis.grid(axis="y", visible=False)
    longest = max(run.median("step_ms") for run in runs)
    for row, run in enumerate(runs):
        left, step = 0.0, run.median("step_ms")
        parts = [(label, color, run.median(field)) for field, label, color in PARTS]
        parts.append(("other", "#f3f4f6", max(0.0, step - sum(ms for _, _, ms in parts))))
        for label, color, ms in parts:
            axis.barh(row, ms, left=left, height=0.5, color=color, edgecolor="white", linewidth=0.8,
                      label=label if row == 0 else None)
            left += ms
        axis.text(left + longest * 0.02, row, f"{step:.1f}", va="center", color=INK, fontweight="bold")
    for row, (run, color) in enumerate(zip(runs, RUN_COLORS * len(runs))):
        axis.text(0, row - 0.36, run.name, color=color, fontweight="bold", va="bottom")
    axis.set_yticks([])
    axis.set_ylim(len(runs) - 0.6, -0.75)
    axis.set_xlim(0, longest * 1.14)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncol=3, frameon=False, fontsize=9, labelcolor=FAINT,
                handlelength=1.0, handleheight=1.0, columnspacing=1.4)


def ratio_text(run):
    ratio = run.summary.get("ratio")
    return f"{run.name}  ({ratio:.1f}x fewer bytes)" if ratio and ratio > 1.05 else run.name


def draw(runs, path):
    plt.rcParams.update({"font.family": "DejaVu Sans", "font.size": 10, "text.color": INK})
    figure, axes = plt.subplots(1, 3, figsize=(16, 5.6), gridspec_kw={"width_ratios": [1, 1, 1.15]})
    figure.patch.set_facecolor("white")
    draw_accuracy(axes[0], runs)
    draw_loss(axes[1], runs)
    draw_time(axes[2], runs)

    config = runs[0].config
    figure.text(0.045, 0.955, f"{config['model']['name']} on {config['data'].split(':')[0]}", fontsize=16, fontweight="bold")
    figure.text(0.045, 0.907, f"{config['ranks']} ranks on {config['device']}, batch {config['batch_size']} per rank, "
                f"{config['steps']} steps, schedule {config['schedule']}", fontsize=10.5, color=FAINT)
    handles = [plt.Line2D([], [], color=color, linewidth=3) for _, color in zip(runs, RUN_COLORS * len(runs))]
    figure.legend(handles, [ratio_text(run) for run in runs], loc="upper right", bbox_to_anchor=(0.975, 0.985),
                  ncol=min(4, len(runs)), frameon=False, fontsize=10.5, handlelength=1.4)
    figure.subplots_adjust(left=0.045, right=0.975, top=0.79, bottom=0.21, wspace=0.27)
    figure.savefig(path, dpi=130)
    plt.close(figure)


# Schedules by how they look in the picture of `gradwire-bench numerics`.
SCHEDULE_LINES = [
    ("ring", "ring", "#d55e00", "-"),
    ("tree", "tree", "#e69f00", "-"),
    ("hierarchical", "hierarchical", "#009e73", "-"),
    ("hierarchical,intra_node=fp32", "hierarchical,\nFP32 inside nodes", "#56b4e9", "--"),
    ("two_shot", "two-shot", "#0072b2", "-"),
]


def draw_numerics(rows, path):
    """Error of an allreduce against ranks, a panel per wire format."""
    plt.rcParams.update({"font.family": "DejaVu Sans", "font.size": 10, "text.color": INK})
    figure, axes = plt.subplots(1, 3, figsize=(16, 5.2))
    figure.patch.set_facecolor("white")
    ranks = sorted({row["ranks"] for row in rows})
    for axis, wire, title in zip(axes, ("bf16", "fp8", "fp32"), ("BF16 wire", "FP8 wire", "FP32 wire")):
        style(axis, title, "ranks", "relative error of the sum" if wire == "bf16" else "")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        for schedule, label, color, dashes in SCHEDULE_LINES:
            if wire == "fp32" and "intra_node" in schedule:
                continue  # the same as without
            line = sorted((row["ranks"], row["rel_error"]) for row in rows
                          if row["schedule"] == schedule and row["compression"] == wire)
            if not line:
                continue
            axis.plot(*zip(*line), dashes, color=color, linewidth=2, marker="o", markersize=4, label=label)
        axis.set_xticks([n for n in ranks if n & (n - 1) == 0])
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}".replace("e-0", "e-")))
        axis.yaxis.set_minor_locator(NullLocator())
        low, high = axis.get_ylim()
        axis.set_ylim(low / 1.3, max(high * 1.3, low * 12))
    axes[0].legend(loc="upper left", frameon=False, fontsize=9.5, labelcolor=INK)
    figure.text(0.045, 0.945, "What one allreduce rounds away", fontsize=16, fontweight="bold")
    figure.text(0.045, 0.893, f"{rows[0]['elements']:,} normal values per rank, no error feedback, round to nearest",
                fontsize=10.5, color=FAINT)
    figure.subplots_adjust(left=0.06, right=0.985, top=0.78, bottom=0.12, wspace=0.22)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def document_of(paths):
    """What the one JSON file holds, or None."""
    if len(paths) != 1 or not paths[0].endswith(".json"):
        return None
    try:
        return json.loads(pathlib.Path(paths[0]).read_text())
    except (OSError, ValueError):
        return None  # load() says what is wrong


def experiments_of(paths):
    """The result of bench/experiments.py, or None when the files are something else."""
    document = document_of(paths)
    return document if isinstance(document, dict) and {"settings", "items"} <= set(document) else None


def trace_of(paths):
    """What gradwire train --trace wrote, or None when the files are something else."""
    document = document_of(paths)
    return document if isinstance(document, dict) and {"traceEvents", "otherData"} <= set(document) else None


def numerics_of(paths):
    """The rows of `gradwire-bench numerics --json`, or None when the files are something else."""
    rows = document_of(paths)
    return rows if rows and isinstance(rows, list) and "lossy_steps" in rows[0] and "rel_error" in rows[0] else None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", help="compare.json, run logs (.jsonl), numerics.json, or a trace")
    parser.add_argument("-o", "--output", default="report.png", help="picture to write (default: report.png)")
    parser.add_argument("--step", type=int, help="of a trace: the step to draw (default: one of median length)")
    arguments = parser.parse_args()
    trace = trace_of(arguments.files)
    numerics, experiments = numerics_of(arguments.files), experiments_of(arguments.files)
    if experiments:
        import plot_experiments
        plot_experiments.draw(experiments, arguments.output)
    elif trace:
        import plot_timeline
        plot_timeline.draw(trace, arguments.step, arguments.output)
    elif numerics:
        draw_numerics(numerics, arguments.output)
    else:
        draw(load(arguments.files), arguments.output)
    print(f"Picture: {arguments.output}")


if __name__ == "__main__":
    main()
