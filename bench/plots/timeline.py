"""Draws one step of a trace (gradwire train --trace): the activity of each rank's streams, a row per rank."""
import statistics

from plots.style import FAINT, INK, finish, plt, style, subplots

# Labels and colors of spans. The NVTX ranges have the same colors (runtime/device/nvtx.cpp).
KINDS = {
    "batch": ("batch", "#b8bec8"), "forward": ("forward", "#9db7d5"), "backward": ("backward", "#4f7cac"),
    "optimizer": ("optimizer", "#edae49"), "wait": ("waits for communication", "#f7dfe2"),
    "compress": ("compress", "#7b5ea7"), "communicate": ("communicate", "#d1495b"),
    "decompress": ("decompress", "#3a9d8f"),
    "exchange": ("on the wire", INK),
}
# The offset of each lane from the top of the rank's row, and the lane's height.
LANES = {"compute": (0.0, 0.40), "communicate": (0.44, 0.34), "exchange": (0.80, 0.07)}


class Timeline:
    """The spans of one step by rank, in milliseconds since the first rank began the step."""

    def __init__(self, trace, step):
        spans = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
        steps = [e for e in spans if e["cat"] == "step"]
        if not steps:
            raise SystemExit("plot.py: this trace has no steps"
                             + (f"; the run ended with: {trace['otherData']['error']}"
                                if "error" in trace["otherData"] else ""))
        # Use only steps that all ranks have.
        times = {}
        for e in steps:
            times.setdefault(e["args"]["step"], []).append(e["dur"])
        whole = {n: statistics.mean(t) for n, t in times.items() if len(t) == max(map(len, times.values()))}
        if step is None:  # choose the step of median length
            step = sorted(whole, key=lambda n: (whole[n], n))[(len(whole) - 1) // 2]
        if step not in whole:
            raise SystemExit(f"plot.py: step {step} is not in this trace; it has "
                             f"{', '.join(map(str, sorted(whole)))}")
        self.step, self.about = step, trace["otherData"]
        mine = [e for e in spans if e["args"]["step"] == step]
        self.ranks = sorted({e["pid"] for e in mine})
        zero = min(e["ts"] for e in mine if e["cat"] == "step")
        self.spans = {rank: [] for rank in self.ranks}
        for e in mine:
            self.spans[e["pid"]].append((e["cat"], (e["ts"] - zero) / 1e3, e["dur"] / 1e3,
                                         e["args"].get("bucket")))
        self.step_ms = {rank: self.sum(rank, "step") for rank in self.ranks}

    def busy(self, rank, *kinds):
        """Returns the time for which at least one span of these kinds was active."""
        total = until = 0.0
        for begin, end in sorted((begin, begin + ms) for kind, begin, ms,
                                 _ in self.spans[rank] if kind in kinds):
            total += max(0.0, end - max(begin, until))
            until = max(until, end)
        return total

    def sum(self, rank, *kinds):
        return sum(ms for kind, _, ms, _ in self.spans[rank] if kind in kinds)

    def end(self):
        return max(begin + ms for spans in self.spans.values() for kind, begin, ms,
                   _ in spans if kind in KINDS or kind == "step")


def draw_spans(axis, spans, top, end, several):
    for kind, begin, ms, bucket in spans:
        if kind not in KINDS:
            continue
        lane = kind if kind == "exchange" else "communicate" if kind in ("compress", "communicate",
                                                                         "decompress") else "compute"
        offset, height = LANES[lane]
        if lane == "communicate" and several:  # buckets alternate between two streams and overlap
            height /= 2
            offset += height * (bucket % 2)
        edge = {"hatch": "////", "edgecolor": "#d1495b", "linewidth": 0} if kind == "wait" else {
            "edgecolor": "white", "linewidth": 0.7 if lane != "exchange" and ms > end / 400 else 0}
        axis.barh(top + offset + height / 2, ms, left=begin, height=height, color=KINDS[kind][1], **edge)
        text = {"communicate": str(bucket) if kind == "communicate" else "", "compute": kind}.get(lane, "")
        if kind == "wait":
            text = f"waits {ms:.1f} ms" if ms > end / 10 else f"{ms:.0f} ms"
        # A letter is about 1/140 of the picture's width.
        if text and ms > end * (len(text) + 1) / 140:
            axis.text(begin + ms / 2, top + offset + height / 2, text, ha="center", va="center", fontsize=8.5,
                      color="#a22f40" if kind == "wait" else INK if kind in ("batch", "forward", "optimizer")
                      else "white", bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5,
                                          "alpha": 0.85} if kind == "wait" else None)


def draw(trace, step, path):
    timeline = Timeline(trace, step)
    plt.rcParams.update({"hatch.linewidth": 0.5})
    ranks, about, end = timeline.ranks, timeline.about, timeline.end()
    several = len({bucket for spans in timeline.spans.values() for *_,
                   bucket in spans if bucket is not None}) > 1
    buckets = f"buckets of {about['bucket_mb']} MiB" if several else "one bucket"
    height = 1.9 + 0.95 * len(ranks)
    figure, axis = subplots(1, (16, height))
    style(axis, "", "milliseconds", "")
    axis.grid(axis="y", visible=False)
    for row, rank in enumerate(ranks):
        draw_spans(axis, timeline.spans[rank], row, end, several)
        axis.text(-0.092, row + 0.43, f"rank {rank}", transform=axis.get_yaxis_transform(), fontweight="bold",
                  ha="left", va="center")
        for lane, name in (("compute", "compute"), ("communicate", "buckets")):
            offset, tall = LANES[lane]
            axis.text(-0.004, row + offset + tall / 2, name, transform=axis.get_yaxis_transform(),
                      color=FAINT, fontsize=8, ha="right", va="center")
    axis.set_yticks([])
    axis.set_ylim(len(ranks) - 0.08, -0.08)
    axis.set_xlim(0, end * 1.002)

    first = ranks[0]
    communication = timeline.busy(first, "compress", "communicate", "decompress")
    waited = timeline.sum(first, "wait")
    overlap = ""
    if communication:
        overlapped = 100 * (1 - min(1, waited / communication))
        overlap = f", communication {communication:.1f} ms, {overlapped:.0f} % of it overlapped with backward"
    shown = [kind for kind in KINDS if any(kind == s[0] for spans in timeline.spans.values() for s in spans)]
    handles = [plt.Rectangle((0, 0), 1, 1, facecolor=KINDS[kind][1], linewidth=0,
                             **({"hatch": "////", "edgecolor": "#d1495b"} if kind == "wait" else {}))
               for kind in shown]
    figure.legend(handles, [KINDS[kind][0] for kind in shown], loc="lower center", ncol=len(shown),
                  frameon=False, fontsize=9.5, labelcolor=FAINT, handlelength=1.1, handleheight=1.0,
                  columnspacing=1.6, borderaxespad=0.2)
    world = f"{len(ranks)} rank{'s' * (len(ranks) > 1)}"
    finish(figure, path, f"One step of {about['model']} on {world}",
           f"{about['compression']}, {buckets}, batch {about['batch_size']} per rank, "
           f"on {about['device']} ({about['ranks_are']});  "
           f"step {timeline.step}: {timeline.step_ms[first]:.1f} ms on rank {first}{overlap}",
           (0.02, 1 - 0.44 / height, 1 - 0.73 / height), left=0.098, right=0.985, top=1 - 0.95 / height,
           bottom=0.92 / height)
