"""Draws plans of one cluster for several numbers of ranks: speed over NCCL's FP32, a line per spec."""
from plots.style import FAINT, INK, RUN_COLORS, FuncFormatter, NullLocator, plt, style


def best_speeds(plan):
    """Returns {spec: speed with its fastest schedule}."""
    speeds = {}
    for row in plan["rows"]:
        speeds[row["compression"]] = max(row["speed"], speeds.get(row["compression"], 0))
    return speeds


def draw(plans, path):
    plt.rcParams.update({"font.family": "DejaVu Sans", "font.size": 10, "text.color": INK})
    figure, axis = plt.subplots(figsize=(9, 5.2))
    figure.patch.set_facecolor("white")
    plans = sorted(plans, key=lambda plan: plan["ranks"])
    lines = {}
    for plan in plans:
        for spec, speed in best_speeds(plan).items():
            lines.setdefault(spec, []).append((plan["ranks"], speed))
    style(axis, "", "ranks", "speed over FP32 by NCCL")
    axis.axhline(1, color=FAINT, linewidth=0.8)
    axis.set_xscale("log", base=2)
    for i, (spec, line) in enumerate(lines.items()):
        axis.plot(*zip(*line), color=RUN_COLORS[i % len(RUN_COLORS)], linewidth=2, marker="o", markersize=4,
                  label=spec)
    axis.set_xticks([plan["ranks"] for plan in plans])
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_ylim(bottom=0)
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=9.5, labelcolor=INK)
    figure.text(0.07, 0.945, "Predicted speed of a step", fontsize=16, fontweight="bold")
    first = plans[0]
    figure.text(0.07, 0.893, f"{first['cluster']}; {first['model']}, batch {first['batch_size']} per rank",
                fontsize=10.5, color=FAINT)
    figure.subplots_adjust(left=0.08, right=0.8, top=0.84, bottom=0.12)
    figure.savefig(path, dpi=110)
    plt.close(figure)
