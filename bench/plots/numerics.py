"""Draws the result of gradwire-bench numerics: an allreduce's error by ranks, a panel per wire format."""
from plots.style import FAINT, INK, FuncFormatter, LogLocator, NullLocator, plt, style

# Schedule, its label, color and line style.
SCHEDULE_LINES = [
    ("ring", "ring", "#d55e00", "-"),
    ("tree", "tree", "#e69f00", "-"),
    ("hierarchical", "hierarchical", "#009e73", "-"),
    ("hierarchical,intra_node=fp32", "hierarchical,\nFP32 inside nodes", "#56b4e9", "--"),
    ("two_shot", "two-shot", "#0072b2", "-"),
]


def draw(rows, path):
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
                continue  # equals the schedule without intra_node
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
    figure.text(0.045, 0.893,
                f"{rows[0]['elements']:,} normal values per rank, no error feedback, round to nearest",
                fontsize=10.5, color=FAINT)
    figure.subplots_adjust(left=0.06, right=0.985, top=0.78, bottom=0.12, wspace=0.22)
    figure.savefig(path, dpi=110)
    plt.close(figure)
