"""The common style of bench/plots' pictures. The only module that imports matplotlib."""
import pathlib
import sys

try:
    import matplotlib
except ImportError:
    debian = "/usr/bin/python3"
    other = pathlib.Path("/usr/lib/python3/dist-packages/matplotlib").is_dir() and sys.executable != debian
    sys.exit(f"plot.py: {sys.executable} has no matplotlib; " +
             (f"{debian} has it: {debian} {' '.join(sys.argv)}" if other else
              f"install Debian's python3-matplotlib, or: {sys.executable} -m pip install matplotlib"))
matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator  # noqa: E402

INK, FAINT, GRID = "#22272e", "#6b7280", "#e5e7eb"
# Okabe and Ito's colors, which color-blind readers can distinguish.
RUN_COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f"]


def human_bytes(value, _=None):
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"


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


def subplots(columns, size, rows=1, **more):
    """Returns a figure and its axes."""
    plt.rcParams.update({"font.family": "DejaVu Sans", "font.size": 10, "text.color": INK})
    figure, axes = plt.subplots(rows, columns, figsize=size, **more)
    figure.patch.set_facecolor("white")
    return figure, axes


def finish(figure, path, title, about, at, dpi=110, **margins):
    """Writes the figure into `path`. at: the title's left edge and height, and the height of the line below."""
    figure.text(at[0], at[1], title, fontsize=16, fontweight="bold")
    figure.text(at[0], at[2], about, fontsize=10.5, color=FAINT)
    figure.subplots_adjust(**margins)
    figure.savefig(path, dpi=dpi)
    plt.close(figure)


def log_axis(axis, form, subs=(1, 2, 5)):
    """Gives a logarithmic axis, such as figure.axes[0].xaxis, few ticks, written by form(value, position)."""
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(form))
    axis.set_minor_locator(NullLocator())
