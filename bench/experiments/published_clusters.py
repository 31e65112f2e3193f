"""NCCL's allreduces as `gradwire plan` predicts them, against published measurements of other clusters.

Each set names its cluster file (trainer/plan/clusters) and the points from which at most two numbers of the
file were fitted; all other points are predicted. Points of SimAI's table and of the article are efficiencies
and steps; the others are bus bandwidths in GB/s. The article's steps need no NCCL estimate but whole plans.
"""
import json
import math
import subprocess
import tempfile

from experiments.table import Experiment
from harness import ranks, report

KI, MI, GI = 1 << 10, 1 << 20, 1 << 30
H200 = dict(zip((32 * KI << i for i in range(20)), (
    1.44, 2.93, 5.73, 11.74, 23.94, 39.93, 64.53, 107.16, 155.53, 219.89, 275.84, 346.51, 401.93, 436.15,
    450.29, 463.58, 469.17, 473.10, 477.45, 482.26)))
SIMAI_NODES = (2, 4, 8, 16, 32, 64, 128)
SIMAI = {16: (.32, .24, .13, .05, .044, .021, .0087), 32: (.47, .38, .24, .11, .052, .042, .021225),
         64: (.5, .53, .39, .21, .106, .051, .04405), 128: (.67, .67, .54, .38, .205, .107, .0533),
         256: (.85, .77, .69, .57, .387, .209, .1027), 512: (.89, .85, .78, .73, .562, .384, .1902),
         1024: (.92, .93, .9, .76, .74, .563, .314575), 2048: (.94, .94, .94, .92, .758, .745, .553525),
         4096: (.95, .95, .95, .95, .923, .755, .740175), 8192: (.95, .96, .96, .96, .953, .914, .7648),
         16384: (.96, .96, .96, .96, .957, .958, .919175)}
SIMAI_GB_PER_S = 400  # of a node's network cards, of which the table has fractions
# (set, cluster, ranks, {bytes: bus GB/s}, bytes of the fitted points)
TABLES = [
    ("8x H200", "h200-efa", 8, H200, (32 * KI, 16 * GI)),
    ("8x B200", "b200-efa", 8, {16 * MI: 255, GI: 723, 16 * GI: 845.7}, (16 * MI, 16 * GI)),
    ("4 nodes of 8x B200, EFA", "b200-efa", 32,
     {MI: 5.4, 16 * MI: 64.4, 256 * MI: 229, GI: 362, 16 * GI: 381.8}, (MI, 16 * GI)),
    ("NDv4, 8x A100", "a100-ib", 8, {16 * MI: 187, 2 * GI: 244}, (2 * GI,)),
    ("NDv4, 2 nodes of 8x A100", "a100-ib", 16, {24 * MI: 152, 2 * GI: 236}, (2 * GI,)),
    ("NDv5, 2 nodes of 8x H100", "h100-ib", 16, {24 * MI: 222, 48 * MI: 259.7, 3 * GI: 377.7}, (3 * GI,)),
    *((f"SimAI, {nodes} nodes", "simai-h100", 8 * nodes,
       {size * MI: SIMAI_GB_PER_S * row[i] for size, row in SIMAI.items()},
       tuple(size * MI for size in SIMAI) if nodes <= 8 else ()) for i, nodes in enumerate(SIMAI_NODES))]
# The four hosts' gradients: GPT, width 256, 6 layers, vocabulary 50,257, context 512. One allreduce each.
HOST_TENSORS = [50257 * 256] * 2 + [512 * 256] + 6 * (
    [3 * 256 * 256, 256 * 256, 4 * 256 * 256, 4 * 256 * 256, 3 * 256, 4 * 256] + 6 * [256]) + [256] * 2
HOST_SECONDS = {5000: .3177, 1000: 1.506, 200: 8.283, 50: 37.83}  # megabits per second: mean of three runs
HOST_FITTED = (5000, 1000)
# The article's steps in ms: one bucket, then several, and PowerSGD.
ARTICLE = {"FP32": ("fp32", "nccl", True, 701), "BF16": ("bf16", "ring", True, 701 / 1.65),
           "BF16, buckets": ("bf16", "ring", False, 701 / 1.86),
           "PowerSGD": ("powersgd:rank=4", "ring", False, 1000 / 7.5)}


def plan(options, cluster, world, model="vit_tiny", batch=1, specs=("fp32:schedule=ring",)):
    """Returns the plan. `cluster`: the name of a cluster file, or its contents."""
    folder = ranks.ROOT / "trainer/plan/clusters"
    with tempfile.TemporaryDirectory() as scratch:
        path, out = folder / f"{cluster}.json", f"{scratch}/plan.json"
        if isinstance(cluster, dict):
            path = f"{scratch}/cluster.json"
            with open(path, "w") as file:
                json.dump(cluster, file)
        words = [word for spec in specs for word in ("--compression", spec)]
        subprocess.run([options.gradwire, "plan", "--cluster", path, "--ranks", str(world), "--model", model,
                        "--batch-size", str(batch), "--json", out, *words], check=True,
                       stdout=subprocess.DEVNULL)
        with open(out) as file:
            return json.load(file)


def interpolated(table, size, key):
    """Returns a value between two sizes of NCCL's table, on logarithmic axes."""
    low = max((row for row in table if row["bytes"] <= size), key=lambda row: row["bytes"], default=table[0])
    high = min((row for row in table if row["bytes"] >= size), key=lambda row: row["bytes"])
    if low["bytes"] >= high["bytes"]:
        return high[key]
    part = math.log(size / low["bytes"]) / math.log(high["bytes"] / low["bytes"])
    return math.exp((1 - part) * math.log(low[key]) + part * math.log(high[key]))


def point(name, at, predicted, published, fitted):
    return {"set": name, "at": at, "predicted": predicted, "published": published, "fitted": fitted}


def measure(options):
    for name, cluster, world, points, fitted in TABLES:
        table = plan(options, cluster, world)["nccl_allreduce"]
        for size, published in points.items():
            yield point(name, size, interpolated(table, size, "bus_gb_per_s"), published, size in fitted)
    yield from four_hosts(options)
    yield from article(options)


def four_hosts(options):
    cluster = json.loads((ranks.ROOT / "trainer/plan/clusters/l40s-ethernet.json").read_text())
    share = cluster["nic"]["gb_per_s"] / 1.25  # of the line rate, 10 Gb/s
    for megabits, seconds in HOST_SECONDS.items():
        cluster["nic"]["gb_per_s"] = share * megabits / 8e3
        table = plan(options, cluster, 4)["nccl_allreduce"]
        us = sum(interpolated(table, 4 * count, "us") for count in HOST_TENSORS)
        yield point("four hosts, per tensor, s", megabits, us / 1e6, seconds, megabits in HOST_FITTED)


def article(options):
    rows = plan(options, "article-pcie-8", 8, "vit_l_32", 32, ("bf16", "powersgd:rank=4"))["rows"]
    for title, (spec, schedule, one_bucket, published) in ARTICLE.items():
        row = next(r for r in rows if (r["compression"], r["schedule"]) == (spec, schedule))
        step = (row["tried"][-1] if one_bucket else row["best"])["step_ms"]
        yield point("article, PCIe, ms", title, step, published, title == "FP32")


def error(points):
    """Returns exp(mean |log ratio|) - 1, or None without points."""
    logs = [abs(math.log(p["predicted"] / p["published"])) for p in points]
    return math.exp(sum(logs) / len(logs)) - 1 if logs else None


def tables(document):
    def percent(value):
        return "-" if value is None else f"{100 * value:.2f} %"

    rows = [["set", "points", "fitted", "mean error", "of the predicted", "largest"]]
    items = document["items"]
    names = dict.fromkeys(i["set"] for i in items)
    groups = [(name, [i for i in items if i["set"] == name]) for name in names]
    groups.append(("SimAI, all", [i for i in items if i["set"].startswith("SimAI")]))
    for name, points in groups:
        if not points:
            continue
        held_back = [p for p in points if not p["fitted"]]
        rows.append([name, str(len(points)), str(len(points) - len(held_back)), percent(error(points)),
                     percent(error(held_back)), percent(max(error([p]) for p in points))])
    return report.markdown(rows)


EXPERIMENT = Experiment(__doc__, {"gradwire": ranks.GRADWIRE}, {}, measure, tables)
