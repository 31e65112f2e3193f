"""The modes of the experiment slow_links, and the rows, tables and goals of its results.

A result is {"settings": {...}, "items": [...]}; an item is one measurement. All output is computed from the
items, so that a result can be shown again.
"""
import typing

from harness.report import median, median_steps


class Method(typing.NamedTuple):
    key: str
    name: str
    spec: str                   # Gradwire's spec
    hook: typing.Optional[dict]  # PyTorch's hook; None: PyTorch has no such hook
    steps: tuple                # steps and warm-up; of PyTorch's PowerSGD: 6, 4
    flags: tuple = ()           # flags of `gradwire train`


RANKS = (1, 2, 4, 8)
BF16_PRODUCTS = ("--precision", "bf16")
# The specs name schedules, so that all repetitions use the same schedule: a ring where bandwidth is the
# limit, as in gloo, and the fewest rounds where latency is the limit.
METHODS = [
    Method("fp32", "FP32", "fp32:schedule=ring", {"hook": None}, (5, 1)),
    Method("16bit", "BF16", "bf16:schedule=ring", {"hook": "16bit"}, (7, 2)),  # see theirs_16bit()
    Method("4bit", "INT4, rotated", "int4:rotate=hadamard,schedule=ring", None, (10, 3)),
    *(Method(f"powersgd{r}", f"PowerSGD rank {r}", f"powersgd:rank={r},schedule=two_shot",
             {"hook": "powersgd", "rank": r}, (16, 4)) for r in RANKS),
    Method("fp32-products", "FP32, products in BF16", "fp32:schedule=ring", None, (5, 1), BF16_PRODUCTS),
    Method("powersgd4-products", "PowerSGD rank 4, products in BF16", "powersgd:rank=4,schedule=two_shot",
           None, (16, 4), BF16_PRODUCTS),
]
ALONE = Method("alone", "no communication", "fp32", {"hook": "alone"}, (14, 3))
NAMES = {m.key: m.name for m in METHODS}
SIDES = {"gradwire": "Gradwire", "pytorch": "PyTorch"}
MODES = ("alone", *NAMES)
ONE_BUCKET_MB = 1 << 20


class Cell:
    """A mode of one side: the median of the repetitions' median steps."""

    def __init__(self, items):
        self.items = [i for i in items if "error" not in i]
        self.error = next((i["error"] for i in items if "error" in i), None)
        self.ms = median_steps(self.items)
        self.bucket_mb = items[0].get("bucket_mb") if items else None

    def __bool__(self):
        return self.ms is not None

    def field(self, name):
        return median(i.get(name) for i in self.items)


class Result:
    def __init__(self, document):
        self.settings, self.items = document["settings"], document["items"]

    def cell(self, who, method, buckets, network="shaped"):
        """Returns the cell of a mode, empty if not measured. buckets: "one" or "many"."""
        return Cell([i for i in self.items
                     if (i["who"], i["method"], i["network"], i["phase"]) == (who, method, network, "main")
                     and (buckets == "many") == bool(i["bucket_mb"])])

    def better(self, who, method, network="shaped"):
        """Returns the faster cell of one bucket and many buckets."""
        cells = [c for c in (self.cell(who, method, b, network) for b in ("one", "many")) if c]
        return min(cells, key=lambda c: c.ms) if cells else Cell([])

    def rows(self, network="shaped"):
        """Returns the article's rows: (name, buckets, Gradwire, PyTorch). PowerSGD: the faster bucketing."""
        out = []
        for method, name in NAMES.items():
            if method.startswith("powersgd"):
                out.append((name, "better", *(self.better(who, method, network) for who in SIDES)))
            else:
                out += [(name, buckets, *(self.cell(who, method, buckets, network) for who in SIDES))
                        for buckets in ("one", "many")]
        return [row for row in out if row[2] or row[3] or row[2].error or row[3].error]

    def base(self, who, network="shaped"):
        return self.cell(who, "fp32", "one", network)

    def alone(self, who):
        return self.cell(who, "alone", "one")

    def share(self):
        """Returns communication's share of Gradwire's FP32 step with one bucket (84 % in the article)."""
        base, alone = self.base("gradwire"), self.alone("gradwire")
        return 1 - alone.ms / base.ms if base and alone else None


def theirs_16bit(items):
    """Returns the number format of PyTorch's 16-bit hook: FP16 if its gloo cannot sum BF16, as in 1.13."""
    hooks = {i.get("hook") for i in items if (i["who"], i["method"]) == ("pytorch", "16bit")}
    return "BF16" if "bf16" in hooks else "FP16"


def ratio(above, below):
    return above.ms / below.ms if above and below else None


def goals(result):
    """Returns a row per goal: what, measured, at least, verdict."""
    base = result.base("gradwire")
    found = [("BF16 with buckets, steps/s relative to own FP32 with one bucket",
              ratio(base, result.cell("gradwire", "16bit", "many")), 1.86),
             ("INT4, rotated, with buckets, relative to own FP32 with one bucket",
              ratio(base, result.cell("gradwire", "4bit", "many")), 3.2)]
    fastest = min((c for c in ((result.better("gradwire", f"powersgd{r}"), r) for r in RANKS) if c[0]),
                  key=lambda c: c[0].ms, default=(Cell([]), None))
    found.append((f"PowerSGD (rank {fastest[1]}), relative to own FP32 with one bucket",
                  ratio(base, fastest[0]), 5))
    if products := result.better("gradwire", "powersgd4-products"):
        found.append(("PowerSGD rank 4, products in BF16, relative to FP32 with one bucket, products in BF16",
                      ratio(result.cell("gradwire", "fp32-products", "one"), products), 5))
    for name, buckets, ours, theirs in result.rows():
        if theirs:
            where = {"one": ", one bucket", "many": ", buckets", "better": ""}[buckets]
            theirs_is = "FP16" if name == "BF16" and theirs_16bit(result.items) == "FP16" else "the same"
            found.append((f"{name}{where}: speed relative to PyTorch's ({theirs_is})", ratio(theirs, ours),
                          1.5 if name.startswith("PowerSGD") else 1))
    return [[what, "-" if value is None else f"{value:.2f}x", f"{least:g}x",
             "not measured" if value is None else "met" if value >= least else "NOT MET"]
            for what, value, least in found]


def goal_lines(result):
    return [f"{verdict:12}  {measured:>6}  (goal {least})  {what}"
            for what, measured, least, verdict in goals(result)]


def buckets_of(megabytes):
    return f"buckets of {megabytes} MB" if megabytes else "one bucket"


def step_text(cell, base):
    """Returns a cell's milliseconds, and its speed relative to `base`, as text."""
    if not cell:
        return ["fails" if cell.error else "-", "-"]
    return [f"{cell.ms:.0f}" if cell.ms >= 100 else f"{cell.ms:.1f}",
            f"{base.ms / cell.ms:.2f}x" if base else "-"]


def main_table(result, network="shaped"):
    """Returns the rows of the main table as text. The first row is the header."""
    def bucket_text(cell, buckets):
        return buckets_of(cell.bucket_mb) if cell else "one bucket" if buckets == "one" else "buckets"

    rows = result.rows(network)
    if network == "shaped":
        rows.append((ALONE.name, "-", result.alone("gradwire"), result.alone("pytorch")))
    bases = [result.base(who, network) for who in SIDES]
    table = [["mode", "Gradwire: buckets", "ms/step", "of own FP32", "MB sent", "PyTorch: buckets", "ms/step",
              "of own FP32", "Gradwire / PyTorch"]]
    for name, buckets, ours, theirs in rows:
        sent = ours.field("wire_bytes") if ours else None
        fp16 = " (FP16)" if name == "BF16" and theirs_16bit(result.items) == "FP16" else ""
        alone = name == ALONE.name
        compared_to = ratio(theirs, ours)
        table.append([name, "-" if alone else bucket_text(ours, buckets), *step_text(ours, bases[0]),
                      "0" if alone else "-" if sent is None else f"{sent / 1e6:.2f}",
                      bucket_text(theirs, buckets) + fp16 if not alone and (theirs or theirs.error) else "-",
                      *step_text(theirs, bases[1]), f"{compared_to:.2f}x" if compared_to else "-"])
    compared = any(row[5] != "-" for row in table[1:])
    return table if compared else [row[:5] for row in table]


def parts_table(result):
    """Returns a table of the parts of Gradwire's step."""
    table = [["mode", "ms/step", "forward", "backward", "communication", "exposed", "optimizer"]]
    cells = [(f"{name}, {buckets_of(ours.bucket_mb)}", ours) for name, _, ours, _ in result.rows() if ours]
    for name, cell in [*cells, (ALONE.name, result.alone("gradwire"))]:
        if cell:
            table.append([name, f"{cell.ms:.0f}", *(f"{cell.field(f) or 0:.0f}" for f in (
                "forward_ms", "backward_ms", "comm_ms", "exposed_comm_ms", "optimizer_ms"))])
    return table


def sweep_table(items):
    """Returns a table of milliseconds per step by bucket size."""
    items = [i for i in items if i["phase"] == "sweep"]
    sizes = sorted({i["bucket_mb"] for i in items}, key=lambda mb: -(mb or ONE_BUCKET_MB))
    table = [["", *(f"{mb} MB" if mb else "one bucket" for mb in sizes)]]
    for who, side in SIDES.items():
        for method, name in NAMES.items():
            values = [median_steps(i for i in items if (i["who"], i["method"], i["bucket_mb"]) ==
                                   (who, method, mb)) for mb in sizes]
            if any(values):
                name = theirs_16bit(items) if (who, method) == ("pytorch", "16bit") else name
                table.append([f"{side} {name}", *("-" if v is None else f"{v:.0f}" for v in values)])
    return table


def errors(result):
    """Returns the errors of the measurements, each error once."""
    seen = {}
    for i in result.items:
        if "error" in i:
            seen.setdefault((i["who"], i["method"], bool(i["bucket_mb"])), i["error"])
    return [f"{SIDES[who]} {NAMES.get(method, method)}, {'buckets' if many else 'one bucket'}: {why[:160]}"
            for (who, method, many), why in seen.items()]


def best_bucket_mb(items, who, method, untried):
    """Returns the sweep's fastest size (None: one bucket), or `untried` if nothing was measured."""
    tried = {}
    for i in items:
        if (i["who"], i["method"], i["phase"]) == (who, method, "sweep") and "error" not in i:
            tried.setdefault(i["bucket_mb"], []).append(i)
    return min(tried, key=lambda mb: median_steps(tried[mb])) if tried else untried
