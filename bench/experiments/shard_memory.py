"""Peak memory of a rank of `gradwire train`, for each --shard and number of ranks.

ViT-B/32 with AdamW, batches of one image: 10 minutes, 20 GB of memory.
"""
import json
import pathlib
import subprocess
import tempfile

from harness import report
from harness.ranks import GRADWIRE

SHARDS = ("none", "optimizer")
OPTIONS = {"model": "vit_b_32", "image_size": 224, "worlds": (1, 2, 4, 8), "gradwire": GRADWIRE}
SMOKE = {"model": "vit_tiny", "image_size": 28, "worlds": (1, 2)}
SPECS = ("fp32", "int8", "int8:residual=int8")


def memory_of(options, spec, shard, ranks):
    """Returns the peak bytes of a rank's buffers in two steps."""
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "run.jsonl"
        subprocess.run([
            options.gradwire, "train", "--model", options.model, "--image-size", str(options.image_size),
            "--data", "synthetic:64", "--batch-size", "1", "--steps", "2", "--eval-every", "0", "--ranks",
            str(ranks), "--compression", spec, "--shard", shard, "--timeout-s", "600", "--log", log
        ], check=True, stdout=subprocess.DEVNULL, timeout=1800)
        return json.loads(log.read_text().splitlines()[-1])["memory_bytes"]


def measure(options):
    for spec in SPECS:
        for shard in SHARDS:
            for ranks in options.worlds:
                if ranks > 1 or shard == "none":  # a single rank has nothing to divide
                    yield {"compression": spec, "shard": shard, "ranks": ranks,
                           "bytes": memory_of(options, spec, shard, ranks)}


def line(item):
    return (f"{item['compression']:20} {item['shard']:10} {item['ranks']} ranks: "
            f"{item['bytes'] / 1e6:.0f} MB")


def tables(document):
    sizes = {(i["compression"], i["shard"], i["ranks"]): i["bytes"] for i in document["items"]}
    worlds = sorted({ranks for _, _, ranks in sizes})
    rows = [["compression", "`--shard`", *(f"{n} rank{'s' * (n > 1)}" for n in worlds)]]
    for spec in SPECS:
        for shard in SHARDS:
            found = [sizes.get((spec, shard if n > 1 else "none", n)) for n in worlds]
            rows.append([f"`{spec}`", f"`{shard}`",
                         *("" if size is None else f"{size / 1e6:,.0f} MB" for size in found)])
    return report.markdown(rows)
