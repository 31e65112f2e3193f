"""Evaluates the measurements of bench/experiments: rows, tables, and the goals of slow_links.

A result is {"settings": {...}, "items": [...]}; an item is one measurement. All output is computed from the
items, so that a result can be shown again.
"""
import json
import pathlib
import statistics
import typing

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs/results/slow-links.md"
ONE_BUCKET_MB = 1 << 20
RANKS = (1, 2, 4, 8)


class Method(typing.NamedTuple):
    key: str
    name: str
    spec: str                   # Gradwire's spec
    hook: typing.Optional[dict]  # PyTorch's hook; None: PyTorch has no such hook
    flags: tuple = ()           # flags of `gradwire train`


BF16_PRODUCTS = ("--precision", "bf16")
# The specs name schedules, so that all repetitions use the same schedule: a ring where bandwidth is the
# limit, as in gloo, and the fewest rounds where latency is the limit.
METHODS = [
    Method("fp32", "FP32", "fp32:schedule=ring", {"hook": None}),
    Method("16bit", "BF16", "bf16:schedule=ring", {"hook": "16bit"}),  # see theirs_16bit()
    Method("4bit", "INT4, rotated", "int4:rotate=hadamard,schedule=ring", None),
    *(Method(f"powersgd{r}", f"PowerSGD rank {r}", f"powersgd:rank={r},schedule=two_shot",
             {"hook": "powersgd", "rank": r}) for r in RANKS),
    Method("fp32-products", "FP32, products in BF16", "fp32:schedule=ring", None, BF16_PRODUCTS),
    Method("powersgd4-products", "PowerSGD rank 4, products in BF16", "powersgd:rank=4,schedule=two_shot",
           None, BF16_PRODUCTS),
]
OURS_ALONE = {m.key for m in METHODS if m.hook is None}
NAMES = {m.key: m.name for m in METHODS}
# Fields of a log's steps, reported as medians.
FIELDS = ("comm_ms", "exposed_comm_ms", "data_ms", "forward_ms", "backward_ms", "optimizer_ms", "wire_bytes",
          "dense_bytes")


def median(values):
    values = [v for v in values if v is not None]
    return statistics.median(values) if values else None


def read_log(path, warmup):
    """Returns an item's result from the log of `gradwire train`, without the first `warmup` steps."""
    records = [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]
    run = next(r for r in records if r["type"] == "run")
    steps = [r for r in records if r["type"] == "step"][warmup:]
    return {"step_ms": [s["step_ms"] for s in steps], "loss": steps[-1]["loss"], "buckets": run["buckets"],
            "schedule": run["schedule"], "parameters": run["parameters"], "tensors": run["tensors"],
            **{field: median(s.get(field) for s in steps) for field in FIELDS}}


def theirs_16bit(items):
    """Returns the number format of PyTorch's 16-bit hook: FP16 if its gloo cannot sum BF16, as in 1.13."""
    hooks = {i.get("hook") for i in items if (i["who"], i["method"]) == ("pytorch", "16bit")}
    return "BF16" if "bf16" in hooks else "FP16"


def progress_line(number, count, item, result):
    who = {"gradwire": "Gradwire", "pytorch": "PyTorch"}[item["who"]]
    what = NAMES.get(item["method"], "no communication")
    if item["who"] == "pytorch" and item["method"] == "16bit":
        what = theirs_16bit([item])
    buckets = f", buckets of {item['bucket_mb']} MB" if item.get("bucket_mb") else ""
    where = {"threads": ", threads"}.get(item["ranks_are"], "")
    shown = result.get("error") or (f"{median(result['step_ms']):.1f} ms" if "step_ms" in result else "?")
    return f"[{number}/{count}] {who} {what}{buckets}{where}: {shown}"


class Cell:
    """A mode of one side: the median of the repetitions' median steps."""

    def __init__(self, items):
        self.items = [i for i in items if "error" not in i]
        self.error = next((i["error"] for i in items if "error" in i), None)
        self.ms = median(median(i["step_ms"]) for i in self.items)
        self.bucket_mb = items[0].get("bucket_mb") if items else None

    def __bool__(self):
        return self.ms is not None

    def field(self, name):
        return median(i.get(name) for i in self.items)

    def spread(self):
        """Returns the spread of the repetitions: largest / smallest - 1."""
        values = [median(i["step_ms"]) for i in self.items]
        return max(values) / min(values) - 1


class Result:
    def __init__(self, document):
        self.settings, self.items = document["settings"], document["items"]

    def cell(self, who, method, buckets, network="shaped", phase="main"):
        """Returns the cell of a mode, empty if not measured. buckets: "one" or "many"."""
        return Cell([i for i in self.items
                     if (i["who"], i["method"], i["network"], i["phase"]) == (who, method, network, phase)
                     and (buckets == "many") == bool(i["bucket_mb"])])

    def better(self, who, method, network="shaped"):
        """Returns the faster cell of one bucket and many buckets."""
        cells = [c for c in (self.cell(who, method, b, network) for b in ("one", "many")) if c]
        return min(cells, key=lambda c: c.ms) if cells else Cell([])

    def rows(self, network="shaped"):
        """Returns the article's rows: (name, buckets, Gradwire, PyTorch). PowerSGD: the faster bucketing."""
        out = []
        for method, name, *_ in METHODS:
            if method.startswith("powersgd"):
                out.append((name, "better", self.better("gradwire", method, network),
                            self.better("pytorch", method, network)))
                continue
            for buckets in ("one", "many"):
                out.append((name, buckets,
                            *(self.cell(w, method, buckets, network) for w in ("gradwire", "pytorch"))))
        return [row for row in out if row[2] or row[3] or row[2].error or row[3].error]

    def base(self, who, network="shaped"):
        return self.cell(who, "fp32", "one", network)

    def alone(self, who):
        return self.cell(who, "alone", "one")

    def share(self):
        """Returns communication's share of Gradwire's FP32 step with one bucket (84 % in the article)."""
        base, alone = self.base("gradwire"), self.alone("gradwire")
        return 1 - alone.ms / base.ms if base and alone else None


def best_bucket_mb(items, who, method, untried):
    """Returns the sweep's fastest size (None: one bucket), or `untried` if nothing was measured."""
    tried = {}
    for i in items:
        if (i["who"], i["method"], i["phase"]) == (who, method, "sweep") and "error" not in i:
            tried.setdefault(i["bucket_mb"], []).append(median(i["step_ms"]))
    return min(tried, key=lambda mb: median(tried[mb])) if tried else untried


def goal(what, measured, least):
    return {"what": what, "measured": measured, "least": least,
            "met": None if measured is None else measured >= least}


def ratio(above, below):
    return above.ms / below.ms if above and below else None


def goals(result):
    """Returns the goals with the measurements. "met" is None if the goal was not measured."""
    base = result.base("gradwire")
    out = [goal("BF16 with buckets, steps/s relative to own FP32 with one bucket",
                ratio(base, result.cell("gradwire", "16bit", "many")), 1.86),
           goal("INT4, rotated, with buckets, relative to own FP32 with one bucket",
                ratio(base, result.cell("gradwire", "4bit", "many")), 3.2)]
    fastest = min((c for c in ((result.better("gradwire", f"powersgd{r}"), r) for r in RANKS) if c[0]),
                  key=lambda c: c[0].ms, default=(Cell([]), None))
    out.append(goal(f"PowerSGD (rank {fastest[1]}), relative to own FP32 with one bucket",
                    ratio(base, fastest[0]), 5))
    products = result.better("gradwire", "powersgd4-products")
    if products:
        out.append(
            goal("PowerSGD rank 4, products in BF16, relative to FP32 with one bucket, products in BF16",
                 ratio(result.cell("gradwire", "fp32-products", "one"), products), 5))
    for name, buckets, ours, theirs in result.rows():
        if not theirs:
            continue
        where = {"one": ", one bucket", "many": ", buckets", "better": ""}[buckets]
        least = 1.5 if name.startswith("PowerSGD") else 1
        theirs_is = "FP16" if name == "BF16" and theirs_16bit(result.items) == "FP16" else "the same"
        out.append(goal(f"{name}{where}: speed relative to PyTorch's ({theirs_is})", ratio(theirs, ours),
                        least))
    return out


def goal_cells(g):
    """Returns (measured, goal, verdict) as text."""
    verdict = "not measured" if g["met"] is None else "met" if g["met"] else "NOT MET"
    return "-" if g["measured"] is None else f"{g['measured']:.2f}x", f"{g['least']:g}x", verdict


def goal_lines(result):
    """Returns the report for the terminal."""
    lines = []
    for g in goals(result):
        measured, least, verdict = goal_cells(g)
        lines.append(f"{verdict:12}  {measured:>6}  (goal {least})  {g['what']}")
    return lines


def goal_table(result):
    return [["goal", "measured", "at least", ""], *([g["what"], *goal_cells(g)] for g in goals(result))]


def bucket_text(cell, buckets):
    if buckets == "one":
        return "one bucket"
    if not cell or not cell.bucket_mb:
        return "one bucket" if cell else "buckets"
    return f"buckets of {cell.bucket_mb} MB"


def step_text(cell, base):
    """Returns a cell's milliseconds, and its speed relative to `base`, as text."""
    if not cell:
        return ["fails" if cell.error else "-", "-"]
    return [f"{cell.ms:.0f}" if cell.ms >= 100 else f"{cell.ms:.1f}",
            f"{base.ms / cell.ms:.2f}x" if base else "-"]


def main_table(result, network="shaped"):
    """Returns the rows of the main table as text. The first row is the header."""
    ours_base, theirs_base = (result.base(who, network) for who in ("gradwire", "pytorch"))
    table = [["mode", "Gradwire: buckets", "ms/step", "of own FP32", "MB sent", "PyTorch: buckets", "ms/step",
              "of own FP32", "Gradwire / PyTorch"]]
    for name, buckets, ours, theirs in result.rows(network):
        compared_to = ratio(theirs, ours)
        sent = ours.field("wire_bytes") if ours else None
        if not theirs and not theirs.error:
            their_buckets = "-"
        else:
            their_buckets = bucket_text(theirs, buckets) + (
                " (FP16)" if name == "BF16" and theirs_16bit(result.items) == "FP16" else "")
        table.append([name, bucket_text(ours, buckets), *step_text(ours, ours_base),
                      "-" if sent is None else f"{sent / 1e6:.2f}", their_buckets,
                      *step_text(theirs, theirs_base), f"{compared_to:.2f}x" if compared_to else "-"])
    if network == "shaped":
        ours, theirs = result.alone("gradwire"), result.alone("pytorch")
        compared_to = ratio(theirs, ours)
        table.append(["no communication", "-", *step_text(ours, ours_base), "0", "-",
                      *step_text(theirs, theirs_base), f"{compared_to:.2f}x" if compared_to else "-"])
    compared = any(row[5] != "-" for row in table[1:])
    return table if compared else [row[:5] for row in table]


def parts_table(result):
    """Returns a table of the parts of Gradwire's step."""
    table = [["mode", "ms/step", "forward", "backward", "communication", "exposed", "optimizer"]]
    cells = [(name, buckets, ours) for name, buckets, ours, _ in result.rows() if ours]
    alone = result.alone("gradwire")
    if alone:
        cells.append(("no communication", "-", alone))
    for name, buckets, cell in cells:
        what = name if buckets == "-" else f"{name}, {bucket_text(cell, buckets)}"
        table.append([what, f"{cell.ms:.0f}", *(f"{cell.field(f) or 0:.0f}" for f in
                      ("forward_ms", "backward_ms", "comm_ms", "exposed_comm_ms", "optimizer_ms"))])
    return table


def sweep_table(items):
    """Returns a table of milliseconds per step by bucket size."""
    sizes = sorted({i["bucket_mb"] for i in items if i["phase"] == "sweep"},
                   key=lambda mb: -(mb or ONE_BUCKET_MB))
    table = [["", *(f"{mb} MB" if mb else "one bucket" for mb in sizes)]]
    for who in ("gradwire", "pytorch"):
        for method, name, *_ in METHODS:
            values = [median(median(i["step_ms"]) for i in items
                             if i["phase"] == "sweep" and "error" not in i and
                             (i["who"], i["method"], i["bucket_mb"]) == (who, method, mb)) for mb in sizes]
            if any(values):
                side = "Gradwire" if who == "gradwire" else "PyTorch"
                name = theirs_16bit(items) if (who, method) == ("pytorch", "16bit") else name
                table.append([f"{side} {name}", *("-" if v is None else f"{v:.0f}" for v in values)])
    return table


def markdown(table):
    lines = ["| " + " | ".join(row) + " |" for row in table]
    return "\n".join([lines[0], "|---" * len(table[0]) + "|", *lines[1:]]) + "\n"


def plain(table):
    """Returns a table with aligned columns. The first column is text, the other columns are numbers."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = []
    for first, *others in table:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:]))]
        lines.append("  ".join(cells))
    return "\n".join(lines)


def errors(result):
    """Returns the errors of the measurements, each error once."""
    seen = {}
    for i in result.items:
        if "error" in i:
            seen.setdefault((i["who"], i["method"], bool(i["bucket_mb"])), i["error"])
    sides = {"gradwire": "Gradwire", "pytorch": "PyTorch"}
    return [f"{sides[who]} {NAMES.get(method, method)}, {'buckets' if many else 'one bucket'}: {why[:160]}"
            for (who, method, many), why in seen.items()]


def replace_section(page, name, text):
    """Replaces the text between <!-- name:begin --> and <!-- name:end --> in the page."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if begin not in page or end not in page:
        raise ValueError(f"no {begin} and {end} on the page")
    head, rest = page.split(begin, 1)
    return head + begin + "\n" + text.strip() + "\n" + end + rest.split(end, 1)[1]


def put_section(name, text):
    """Replaces a section of docs/results/slow-links.md."""
    PAGE.write_text(replace_section(PAGE.read_text(), name, text))
    print(f"Written: {PAGE}, section {name}")


# ---- Experiments that compare modes ------------------------------------------------------------------------


def by_mode(items):
    """Returns the items of each mode."""
    found = {}
    for item in items:
        found.setdefault(item["mode"], []).append(item)
    return found


def speed_line(item):
    mode = f"{item['mode']}: {item['choice']['spec']}" if item.get("choice") else item["mode"]
    return f"{item.get('what', ''):15}{mode:44} {median(item['step_ms']):9.1f} ms"


def speed_table(items, *bases, first=""):
    """Returns a row per mode: the median of its repetitions' medians, and the speed relative to other modes.

    Args:
        items: measurements with "mode", "step_ms" and, to show bytes, "sent_bytes".
        bases: the modes with which to compare.
        first: the header of the modes.
    """
    modes = by_mode(items)
    each = {mode: [median(i["step_ms"]) for i in found] for mode, found in modes.items()}
    sent = any("sent_bytes" in i for i in items)
    table = [[first, *(["MB sent"] if sent else []), "ms", *(f"x {base}" for base in bases),
              "range of repetitions, ms"]]
    for mode, ms in each.items():
        megabytes = [f"{median(i['sent_bytes'] for i in modes[mode]) / 1e6:.1f}"] if sent else []
        compared = [f"{median(each[base]) / median(ms):.2f}" if base in each else "-" for base in bases]
        table.append([mode, *megabytes, f"{median(ms):.1f}", *compared, f"{min(ms):.1f} to {max(ms):.1f}"])
    return table


def loss_line(item):
    return f"{item['optimizer']:6} {item['mode']:44} seed {item['seed']}: {item['final_loss']:.4f}"


def loss_table(items, base):
    """Returns a row per mode: the mean loss for each optimizer, and the differences to `base` by seed."""
    items = [{"optimizer": "sgd", **i} for i in items]
    optimizers = list(dict.fromkeys(i["optimizer"] for i in items))
    table = [["", *(f"{what}, {name}" for name in optimizers
                    for what in ("final loss", "mean difference", f"above {base} of the same seed"))]]
    bases = {(i["optimizer"], i["seed"]): i["final_loss"] for i in items if i["mode"] == base}
    for mode, found in by_mode(items).items():
        row = [mode]
        for name in optimizers:
            losses = {i["seed"]: i["final_loss"] for i in found if i["optimizer"] == name}
            above = [loss - bases[name, seed] for seed, loss in losses.items() if (name, seed) in bases]
            row += [f"{statistics.fmean(losses.values()):.4f}",
                    f"{statistics.fmean(above):+.4f}" if above else "-",
                    ", ".join(f"{a:+.4f}" for a in above)]
        table.append(row)
    return table
