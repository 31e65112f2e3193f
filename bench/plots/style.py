"""The common style of bench/plots' pictures. The only module that imports matplotlib."""
import sys

try:
    import matplotlib
except ImportError:
    sys.exit("plot.py: matplotlib is missing; install Debian's python3-matplotlib")
matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator  # noqa: E402, F401

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
