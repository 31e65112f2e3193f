"""Draws lines by number of ranks: an allreduce's error (gradwire-bench numerics), and predicted speeds (plan)."""
from plots.style import FAINT, INK, RUN_COLORS, FuncFormatter, NullLocator, finish, log_axis, style, subplots

# Schedule, its label, color and line style.
SCHEDULE_LINES = [("ring", "ring", "#d55e00", "-"),
                  ("tree", "tree", "#e69f00", "-"),
                  ("hierarchical", "hierarchical", "#009e73", "-"),
                  ("hierarchical,intra_node=fp32", "hierarchical,\nFP32 inside nodes", "#56b4e9", "--"),
                  ("two_shot", "two-shot", "#0072b2", "-")]


def by_ranks(axis, ticks):
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axis.xaxis.set_minor_locator(NullLocator())


def draw_numerics(rows, path):
    """Draws the error by ranks, with a panel per wire format."""
    figure, axes = subplots(3, (16, 5.2))
    for axis, wire, title in zip(axes, ("bf16", "fp8", "fp32"), ("BF16 wire", "FP8 wire", "FP32 wire")):
        style(axis, title, "ranks", "relative error of the sum" if wire == "bf16" else "")
        axis.set_yscale("log")
        for schedule, label, color, dashes in SCHEDULE_LINES:
            if wire == "fp32" and "intra_node" in schedule:
                continue  # equals the schedule without intra_node
            line = sorted((row["ranks"], row["rel_error"]) for row in rows
                          if row["schedule"] == schedule and row["compression"] == wire)
            if line:
                axis.plot(*zip(*line), dashes, color=color, linewidth=2, marker="o", markersize=4,
                          label=label)
        by_ranks(axis, sorted({row["ranks"] for row in rows if row["ranks"] & (row["ranks"] - 1) == 0}))
        log_axis(axis.yaxis, lambda value, _: f"{value:.0e}".replace("e-0", "e-"))
        low, high = axis.get_ylim()
        axis.set_ylim(low / 1.3, max(high * 1.3, low * 12))
    axes[0].legend(loc="upper left", frameon=False, fontsize=9.5, labelcolor=INK)
    finish(figure, path, "What one allreduce rounds away",
           f"{rows[0]['elements']:,} normal values per rank, no error feedback, round to nearest",
           (0.045, 0.945, 0.893), left=0.06, right=0.985, top=0.78, bottom=0.12, wspace=0.22)


def best_speeds(plan):
    """Returns {spec: speed with its fastest schedule}."""
    speeds = {}
    for row in plan["rows"]:
        speeds[row["compression"]] = max(row["speed"], speeds.get(row["compression"], 0))
    return speeds


def draw_plans(plans, path):
    """Draws the speed over NCCL's FP32 by ranks, a line per spec."""
    figure, axis = subplots(1, (9, 5.2))
    plans = sorted(plans, key=lambda plan: plan["ranks"])
    lines = {}
    for plan in plans:
        for spec, speed in best_speeds(plan).items():
            lines.setdefault(spec, []).append((plan["ranks"], speed))
    style(axis, "", "ranks", "speed over FP32 by NCCL")
    axis.axhline(1, color=FAINT, linewidth=0.8)
    for i, (spec, line) in enumerate(lines.items()):
        axis.plot(*zip(*line), color=RUN_COLORS[i % len(RUN_COLORS)], linewidth=2, marker="o", markersize=4,
                  label=spec)
    by_ranks(axis, [plan["ranks"] for plan in plans])
    axis.set_ylim(bottom=0)
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=9.5, labelcolor=INK)
    first = plans[0]
    finish(figure, path, "Predicted speed of a step",
           f"{first['cluster']}; {first['model']}, batch {first['batch_size']} per rank",
           (0.07, 0.945, 0.893), left=0.08, right=0.8, top=0.84, bottom=0.12)
