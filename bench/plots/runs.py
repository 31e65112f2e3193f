"""Draws runs of gradwire train and compare: accuracy by bytes, loss by time, parts of a step's time."""
import json
import pathlib
import re
import statistics

from plots.style import FAINT, INK, RUN_COLORS, finish, human_bytes, log_axis, plt, style, subplots

# The parts of a step in order. Exposed communication is highlighted.
PARTS = [("data_ms", "data", "#d1d5db"),
         ("forward_ms", "forward", "#9db7d5"),
         ("backward_ms", "backward", "#4f7cac"),
         ("exposed_comm_ms", "waiting for communication", "#d1495b"),
         ("optimizer_ms", "optimizer", "#edae49")]


class Run:
    """The log of one run."""

    def __init__(self, path, row=None):
        """Reads a log. row: of the comparison to which the run belongs."""
        self.target = 100 * ((row or {}).get("target_accuracy") or 0)
        self.seconds_to_target = (row or {}).get("seconds_to_target")
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
            raise SystemExit(f"plot.py: {path} has no steps of a run")
        self.name = self.config["compression"]

    def seconds(self):
        """Returns the end of each step, in seconds of training, without evaluations."""
        total, ends = 0.0, []
        for step in self.steps:
            total += (step["step_ms"] or 0) / 1000
            ends.append(total)
        return ends

    def accuracy_by_seconds(self):
        """Returns (seconds of training without evaluations, accuracy) of each evaluation."""
        ends = [0.0, *self.seconds()]
        first = self.steps[0]["step"]
        return [(ends[min(max(e["step"] - first, 0), len(ends) - 1)], e["test_accuracy"]) for e in self.evals
                if e["test_accuracy"] is not None]

    def accuracy_by_bytes(self):
        """Returns (bytes sent so far, accuracy) of each evaluation."""
        sent, totals = 0, {0: 0}
        for step in self.steps:
            sent += step["wire_bytes"]
            totals[step["step"] + 1] = sent
        return [(totals.get(e["step"], sent), e["test_accuracy"]) for e in self.evals
                if e["test_accuracy"] is not None]

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
            rows = json.loads(path.read_text())
            runs += [Run(path.parent / seed["log"], row) for row in rows for seed in row["seeds"]]
        except OSError as error:
            raise SystemExit(f"plot.py: {error.filename}: {error.strerror}")
        except ValueError as error:
            raise SystemExit(f"plot.py: {path}: not JSON: {error}")
        except (KeyError, TypeError):
            raise SystemExit(f"plot.py: {path}: not the result of gradwire compare --json of this version")
    if not runs:
        raise SystemExit("plot.py: no runs to draw")
    return runs


def first_log(path, rows):
    """Returns the log of a comparison's first run, which is next to the file at `path`."""
    return load([str(pathlib.Path(path).parent / rows[0]["seeds"][0]["log"])])[0]


def title(run):
    return f"{run.config['model']['name']} on {run.config['data'].split(':')[0]}"


def smooth(values, window):
    """Returns the means over a trailing window. A missing value, a loss that was not finite, gives a gap."""
    out = []
    for i in range(len(values)):
        known = [v for v in values[max(0, i - window + 1):i + 1] if v is not None]
        out.append(sum(known) / len(known) if known and values[i] is not None else float("nan"))
    return out


def draw_accuracy(axis, runs):
    style(axis, "Accuracy against bytes sent", "bytes sent by each rank, so far", "test accuracy, %")
    marks, drawn = [], []
    for run, color in zip(runs, RUN_COLORS * len(runs)):
        points = [(sent, 100 * accuracy) for sent, accuracy in run.accuracy_by_bytes() if sent > 0]
        if not points:
            continue
        drawn += [sent for sent, _ in points]
        axis.plot(*zip(*points), color=color, linewidth=2, marker="o", markersize=5, markeredgecolor="white")
        marks.append((*points[-1], f"{points[-1][1]:.1f} %", color))
    if not drawn:
        axis.text(0.5, 0.5, "no evaluation, or nothing was sent", transform=axis.transAxes, ha="center",
                  color=FAINT)
        return
    axis.set_xscale("log")
    log_axis(axis.xaxis, human_bytes, (1, 2, 5) if max(drawn) < 50 * min(drawn) else (1,))
    axis.margins(x=0.14)
    set_range(axis, runs)
    label(axis, marks)


def set_range(axis, runs):
    """Gives an axis the range of all accuracies but the first, which are far below the others."""
    accuracies = [[100 * a for _, a in run.accuracy_by_seconds()] for run in runs]
    low = min(a[min(1, len(a) - 1)] for a in accuracies if a) - 1
    high = max(map(max, filter(None, accuracies)))
    axis.set_ylim(low, high + max(high - low, 1) * 0.28)


def label(axis, marks):
    """Writes the texts of points (x, y, text, color) above all lines, next to each other or in a second row."""
    renderer, rows = axis.figure.canvas.get_renderer(), [0.0, 0.0, 0.0]
    for x, y, text, color in sorted(marks):
        written = axis.text(x, 0.985, text, transform=axis.get_xaxis_transform(), ha="center", va="top",
                            color=color, fontweight="bold")
        box = written.get_window_extent(renderer)
        row = next((i for i, end in enumerate(rows) if end < box.x0), len(rows) - 1)
        rows[row] = box.x1 + 12
        written.set_y(0.985 - 0.065 * row)
        top = axis.get_xaxis_transform().inverted().transform((0, box.y0))[1] - 0.065 * row
        low, high = axis.get_ylim()
        axis.plot([x, x], [y, low + (high - low) * (top - 0.01)], color=color, linewidth=1, linestyle=":")


def draw_loss(axis, runs):
    style(axis, "Loss against time", "seconds of training", "training loss")
    for run, color in zip(runs, RUN_COLORS * len(runs)):
        seconds, losses = run.seconds(), [s["loss"] for s in run.steps]
        raw = [float("nan") if v is None else v for v in losses]
        axis.plot(seconds, raw, color=color, linewidth=0.6, alpha=0.18)
        axis.plot(seconds, smooth(losses, max(1, len(losses) // 40)), color=color, linewidth=2)
    axis.set_xlim(left=0)


def draw_accuracy_by_time(axis, runs):
    link = re.sub(r"(\d)([kMG]?bit)", r"\1 \2/s", runs[0].config.get("link") or "")
    style(axis, f"Accuracy against time, {link} links" if link else "Accuracy against time",
          "seconds of training", "test accuracy, %")
    for run, color in zip(runs, RUN_COLORS * len(runs)):
        axis.plot(*zip(*((s, 100 * a) for s, a in run.accuracy_by_seconds())), color=color, linewidth=2,
                  marker="o", markersize=5, markeredgecolor="white")
    axis.set_xlim(left=0)
    set_range(axis, runs)
    reached = [(run, color) for run, color in zip(runs, RUN_COLORS * len(runs)) if run.seconds_to_target]
    for run, color in reached:
        axis.plot(run.seconds_to_target, run.target, color=color, marker="D", markersize=8, zorder=3,
                  markeredgecolor="white")
    if reached:
        axis.axhline(reached[0][0].target, color=FAINT, linewidth=1, linestyle="--", zorder=1)
        axis.set_xlabel(f"seconds of training; diamonds: the time to {reached[0][0].target:g} %")
        label(axis, [(run.seconds_to_target, run.target, f"{run.seconds_to_target:.1f} s", color)
                     for run, color in reached])


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
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncol=3, frameon=False, fontsize=9,
                labelcolor=FAINT, handlelength=1.0, handleheight=1.0, columnspacing=1.4)


def ratio_text(run):
    ratio = run.summary.get("ratio")
    return f"{run.name}  ({ratio:.1f}x fewer bytes)" if ratio and ratio > 1.05 else run.name


def draw(runs, path):
    figure, axes = subplots(3, (16, 5.6), gridspec_kw={
        "width_ratios": [1, 1, 1.15], "left": 0.045, "right": 0.975, "top": 0.75, "bottom": 0.2,
        "wspace": 0.22})
    # With enough evaluations the accuracy shows what a slow link costs; otherwise the loss does.
    if all(len(run.accuracy_by_seconds()) >= 4 for run in runs):
        draw_accuracy_by_time(axes[0], runs)
        draw_accuracy(axes[1], runs)
    else:
        draw_accuracy(axes[0], runs)
        draw_loss(axes[1], runs)
    draw_time(axes[2], runs)

    config = runs[0].config
    handles = [plt.Line2D([], [], color=color, linewidth=3) for _, color in zip(runs, RUN_COLORS * len(runs))]
    figure.legend(handles, [ratio_text(run) for run in runs], loc="upper right",
                  bbox_to_anchor=(0.98, 0.955), ncol=min(4, len(runs)), frameon=False, fontsize=10.5,
                  handlelength=1.4)
    finish(figure, path, title(runs[0]),
           f"{config['ranks']} ranks on {config['device']}, batch {config['batch_size']} per rank, "
           f"{config['steps']} steps, schedule {config['schedule']}", (0.045, 0.905, 0.857), 130)
