"""Draws many compressions of gradwire compare: accuracy by bytes per step and element, and their Pareto
front."""
import math

from plots.style import FAINT, GRID, finish, log_axis, plt, style, subplots

FRONT, OTHER = "#0072b2", "#9ca3af"
MARGINS = {"left": 0.065, "right": 0.98, "top": 0.87, "bottom": 0.09}


class Point:
    def __init__(self, row):
        self.name = row["compression"]
        self.bytes = row["wire_bytes_per_element"]
        self.accuracy = 100 * row["test_accuracy"]
        self.spread = 100 * (row["test_accuracy_std"] or 0)
        self.seeds = [100 * seed["test_accuracy"] for seed in row["seeds"]]
        self.stochastic = "stochastic" in self.name
        self.shown = self.accuracy  # position in the picture


def points_of(rows):
    """Returns one point per compression, with the first of several bucket sizes."""
    points = {}
    for row in rows:
        if row["test_accuracy"] is not None and row["wire_bytes_per_element"]:
            points.setdefault(row["compression"], Point(row))
    if not points:
        raise SystemExit(
            "plot.py: nothing was evaluated, or nothing was sent: use --ranks 2 or more, and --eval-every 1")
    return list(points.values())


def pareto_front(points):
    """Returns the points that are more accurate than all points with fewer bytes, in order of bytes."""
    front = []
    for point in sorted(points, key=lambda p: (p.bytes, -p.accuracy)):
        if not front or point.accuracy > front[-1].accuracy:
            front.append(point)
    return front


def lowest_shown(points):
    """Returns the lower end of the axis. Accuracies far below the others are not shown."""
    values = sorted(p.accuracy for p in points)
    best, middle = values[-1], values[len(values) // 2]
    return max(values[0], best - max(6 * (best - middle), 5.0))


def place_labels(axis, labels, points):
    """Places each label at the first free position around its point, the most important labels first."""
    figure = axis.figure
    figure.canvas.draw()
    renderer, frame = figure.canvas.get_renderer(), axis.get_window_extent()
    pixel = figure.dpi / 72
    taken = []
    for point in points:
        x, y = axis.transData.transform((point.bytes, point.shown))
        taken.append((x - 4 * pixel, y - 4 * pixel, x + 4 * pixel, y + 4 * pixel))
    lifts = (0, 9, -9, 18, -18, 30, -30, 44, -44, 60, -60)
    for point, sides, style_of in labels:
        def annotated(dx, dy, arrow):
            return axis.annotate(
                point.name, (point.bytes, point.shown), textcoords="offset points", xytext=(dx, dy),
                va="center", ha="left" if dx > 0 else "right", **style_of,
                arrowprops={"arrowstyle": "-", "shrinkA": 0, "shrinkB": 3, **arrow}
                if abs(dy) > 9 or abs(dx) > 16 else None)

        best = None
        for dx, dy in [(side * reach, lift) for reach in (7, 16, 30, 50) for lift in lifts for side in sides]:
            text = annotated(dx, dy, {"color": GRID})
            box = text.get_window_extent(renderer)
            outside = box.x0 < frame.x0 or box.x1 > frame.x1 or box.y0 < frame.y0 or box.y1 > frame.y1
            overlaps = (1e9 if outside else 0) + sum(
                max(0, min(box.x1, x1) - max(box.x0, x0)) * max(0, min(box.y1, y1) - max(box.y0, y0))
                for x0, y0, x1, y1 in taken)
            text.remove()
            if best is None or overlaps < best[0]:
                best = (overlaps, dx, dy, box)
            if overlaps == 0:
                break
        _, dx, dy, box = best
        taken.append((box.x0, box.y0, box.x1, box.y1))
        annotated(dx, dy, {"color": OTHER, "linewidth": 0.6})


def draw_points(axis, points, front, lowest):
    for point in points:
        color = FRONT if point in front else OTHER
        point.shown = max(point.accuracy, lowest)
        if point.accuracy < lowest:
            point.name += f"  {point.accuracy:.1f} %"
            axis.plot(point.bytes, lowest, marker="v", color=color, markersize=7, clip_on=False)
            continue
        if point.spread:
            axis.errorbar(point.bytes, point.accuracy, yerr=point.spread, color=color, linewidth=1.2,
                          capsize=3)
        axis.plot(point.bytes, point.accuracy, marker="o", markersize=7, color=color, zorder=3,
                  markerfacecolor="white" if point.stochastic else color)
    line = [(p.bytes, p.accuracy) for p in front if p.accuracy >= lowest]
    if line:
        axis.step(*zip(*line), where="post", color=FRONT, linewidth=1.6, alpha=0.6, zorder=1)


def subtitle(rows):
    row = rows[0]
    seeds = len(row["seeds"])
    text = f"{row['ranks']} ranks on {row['device']}"
    if seeds > 1:
        text += f"; means of {seeds} seeds, bars are one standard deviation"
    return text


def draw(rows, title, path):
    points = points_of(rows)
    front, lowest = pareto_front(points), lowest_shown(points)
    figure, axis = subplots(1, (12, 7.2))
    style(axis, "", "bytes sent per step, rank and element of the gradient", "test accuracy, %")
    axis.set_xscale("log")
    draw_points(axis, points, front, lowest)
    log_axis(axis.xaxis, lambda value, _: f"{value:g}")
    few, many = min(p.bytes for p in points), max(p.bytes for p in points)
    margin = max(0.12 * math.log10(many / few), 0.15)
    axis.set_xlim(few / 10 ** margin, many * 10 ** margin)
    top = max(p.accuracy + p.spread for p in points)
    room = max(0.06 * (top - lowest), 0.05)
    axis.set_ylim(lowest - room, top + 2 * room)
    handles = [plt.Line2D([], [], color=FRONT, linewidth=1.6),
               plt.Line2D([], [], color=OTHER, marker="o", linestyle=""),
               plt.Line2D([], [], color=OTHER, marker="o", linestyle="", markerfacecolor="white")]
    figure.legend(handles, [
        "Pareto front: nothing is more accurate with fewer bytes", "round to nearest", "stochastic rounding"
    ], loc="upper right", bbox_to_anchor=(0.985, 0.985), frameon=False, fontsize=9.5, labelcolor=FAINT)
    figure.subplots_adjust(**MARGINS)  # the labels' places depend on them
    others = sorted((p for p in points if p not in front), key=lambda p: -p.accuracy)
    # The front extends to the right of its points.
    place_labels(axis, [(p, (-1, 1), {"color": FRONT, "fontweight": "bold", "fontsize": 9.5})
                        for p in front] + [(p, (1, -1), {"color": FAINT, "fontsize": 8}) for p in others],
                 points)
    finish(figure, path, title, subtitle(rows), (0.065, 0.95, 0.912), 130, **MARGINS)
