#!/usr/bin/env python3
"""Memory of a rank of `gradwire train`, for each --shard and number of ranks.

    shard_memory.py run [--json FILE]    vit_b_32 with AdamW, batches of one image (10 minutes, 20 GB of
                                         memory)
    shard_memory.py run --smoke          the same with a tiny model and up to 2 ranks, in seconds
    shard_memory.py show FILE            the table, in Markdown
"""
import argparse
import datetime
import json
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
from harness import smoke  # noqa: E402

SHARDS, RANKS = ("none", "optimizer", "gradients", "full"), (1, 2, 4, 8)
COMPRESSIONS = ("fp32", "int8", "int8:residual=int8")


def memory_of(arguments, spec, shard, ranks):
    """Returns the peak bytes of a rank's buffers in two steps."""
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "run.jsonl"
        subprocess.run([
            arguments.gradwire, "train", "--model", arguments.model, "--image-size",
            str(arguments.image_size), "--data", "synthetic:64", "--batch-size", "1", "--steps", "2",
            "--eval-every", "0", "--ranks",
            str(ranks), "--compression", spec, "--shard", shard, "--timeout-s", "600", "--log", log
        ], check=True, stdout=subprocess.DEVNULL, timeout=1800)
        return json.loads(log.read_text().splitlines()[-1])["memory_bytes"]


def run(arguments):
    commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True,
                            cwd=ROOT).stdout
    results = {
        "date": datetime.date.today().isoformat(), "commit": commit.strip(), "model": arguments.model,
        "memory_bytes": []
    }
    for spec in COMPRESSIONS:
        for shard in SHARDS:
            for ranks in RANKS[:2] if arguments.smoke else RANKS:
                if ranks == 1 and shard != "none":
                    continue  # a single rank divides nothing
                size = memory_of(arguments, spec, shard, ranks)
                results["memory_bytes"].append(
                    {"compression": spec, "shard": shard, "ranks": ranks, "bytes": size})
                print(f"{spec:20} {shard:10} {ranks} ranks: {size / 1e6:.0f} MB", file=sys.stderr, flush=True)
                if arguments.json:
                    arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    show(results)


def show(results):
    found = {(r["compression"], r["shard"], r["ranks"]): r["bytes"] for r in results["memory_bytes"]}
    print("| compression | `--shard` | " + " | ".join(f"{n} rank{'s' * (n > 1)}" for n in RANKS) + " |")
    print("|---|---|" + "---:|" * len(RANKS))
    for spec in COMPRESSIONS:
        for shard in SHARDS:
            sizes = [found.get((spec, shard if n > 1 else "none", n)) for n in RANKS]
            print(f"| `{spec}` | `{shard}` | " + " | ".join("" if s is None else f"{s / 1e6:,.0f} MB"
                                                            for s in sizes) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("run")
    measure.add_argument("--json", type=pathlib.Path)
    measure.add_argument("--model", default="vit_b_32")
    measure.set_defaults(image_size=224)
    smoke.add(measure, model="vit_tiny", image_size=28)
    measure.add_argument("--gradwire", default=ROOT / "build" / "bin" / "gradwire")
    commands.add_parser("show").add_argument("file", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments)
    else:
        show(json.loads(arguments.file.read_text()))


if __name__ == "__main__":
    main()
