"""Draws the result of the experiment slow_links."""
from harness.slow_links import Result, theirs_16bit
from plots.style import FAINT, INK, finish, plt, style, subplots

OURS, THEIRS = "#0072b2", "#d5a021"


def label(name, buckets, ours):
    """Returns the label of a mode's bars, in two or three lines."""
    if name.startswith("PowerSGD"):
        return name.replace("PowerSGD ", "PowerSGD\n").replace(", ", "\n")
    return name.replace(
        ", ", "\n") + ("\none bucket" if buckets == "one" or ours and not ours.bucket_mb else "\nbuckets")


def grouped_bars(axis, rows, value, text, lines=()):
    """Draws value(cell, is Gradwire's) for both sides of each row. lines: (height, color, label)."""
    width = 0.38
    values = [[value(cell, mine) if cell else None for cell, mine in ((ours, True), (theirs, False))]
              for _, _, ours, theirs in rows]
    most = max(v for pair in values for v in pair if v is not None)
    for at, pair in enumerate(values):
        for side, (v, color) in enumerate(zip(pair, (OURS, THEIRS))):
            x = at + (side - 0.5) * width
            if v is None:
                axis.text(x, most * 0.012, "none" if not rows[at][3].error else "fails", ha="center",
                          va="bottom", fontsize=8, color=FAINT, rotation=90)
                continue
            axis.bar(x, v, width=width * 0.94, color=color)
            axis.text(x, v + most * 0.012, text(v), ha="center", va="bottom", fontsize=8.5,
                      color=color if side == 0 else FAINT, fontweight="bold" if side == 0 else "normal")
    for height, color, what in lines:
        axis.axhline(height, color=color, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
        axis.text(-0.55, height, what, color=FAINT, fontsize=8, va="bottom", ha="left")
        most = max(most, height)
    axis.set_xticks(range(len(rows)))
    axis.set_xticklabels([label(name, buckets, ours) for name, buckets, ours, _ in rows], fontsize=8.5,
                         color=INK)
    axis.grid(axis="x", visible=False)
    axis.set_ylim(0, most * 1.1)
    axis.set_xlim(-0.6, len(rows) - 0.4)


def draw(document, path):
    result = Result(document)
    s = result.settings
    fast = result.rows("loopback")
    figure, axes = subplots(3 if fast else 2, (23 if fast else 17, 5.8),
                            gridspec_kw={"width_ratios": [1.4, 1.4, 0.9][:3 if fast else 2]})
    rows = result.rows()
    base_ms = {True: result.base("gradwire").ms, False: result.base("pytorch").ms}
    style(axes[0], "Speed relative to own FP32 with one bucket", "", "")
    grouped_bars(axes[0], rows, lambda cell, mine: base_ms[mine] / cell.ms, lambda v: f"{v:.2f}",
                 [(5, "#d1495b", "article: PowerSGD"), (1.86, "#d1495b", "article: BF16, buckets")])
    style(axes[1], "Steps per second", "", "")
    lines = [(1000 / cell.ms, color, f"{who} without communication")
             for cell, color, who in ((result.alone("gradwire"), OURS, "Gradwire"),
                                      (result.alone("pytorch"), THEIRS, "PyTorch")) if cell]
    grouped_bars(axes[1], rows, lambda cell, _: 1000 / cell.ms, lambda v: f"{v:.1f}", lines)
    if fast:
        style(axes[2], "Steps per second over loopback", "", "")
        grouped_bars(axes[2], fast, lambda cell, _: 1000 / cell.ms, lambda v: f"{v:.1f}")
    share = result.share()
    about = (f"{s['hosts']} hosts (network namespaces on {s['cores']} cores), "
             f"ViT with {s['parameters'] or 0:,} parameters, batch {s['batch_size']} per host")
    if share:
        about += f"; communication is {100 * share:.0f} % of Gradwire's FP32 step with one bucket"
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in (OURS, THEIRS)]
    for_bf16 = " (FP16 for BF16)" if theirs_16bit(result.items) == "FP16" else ""
    figure.legend(handles, ["Gradwire", f"PyTorch {s['torch']} DDP over gloo{for_bf16}"],
                  loc="upper right", bbox_to_anchor=(0.985, 0.985), ncol=2, frameon=False, fontsize=10.5,
                  handlelength=1.2, handleheight=1.0)
    finish(figure, path, f"Training steps over {s['rate']} links", about, (0.03, 0.95, 0.9), 100, left=0.03,
           right=0.985, top=0.79, bottom=0.14, wspace=0.08)
