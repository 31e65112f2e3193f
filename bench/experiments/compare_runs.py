"""How often gradwire-bench compare is right: runs of one build, and runs whose work is 10 % more.

Each pair measures some kernels in --runs turns: A and B with the same arrays, C with arrays that are --more
times as large. compare should call no row of A and B FASTER or SLOWER, and each row of A and C SLOWER.
Other work on the machine shows as UNSURE. The machine's noise is the standard deviation over the mean of the
samples of a row.
"""
import json
import pathlib
import statistics
import subprocess
import tempfile

from harness import ranks, report

# Kernels whose time is proportional to the size of their arrays, which fit a core's caches.
KERNELS = ("bf16_decode", "bf16_reduce_encode (residual)", "int8_decode", "sgd_step (momentum)")
OPTIONS = {"pairs": 20, "size": 256 << 10, "more": 1.1, "kernels": KERNELS, "threads": 1,
           "runs": 9, "stop": "200ms",
           "program": str(pathlib.Path(ranks.GRADWIRE).with_name("gradwire-bench"))}
SMOKE = {"pairs": 1, "runs": 2, "size": 64 << 10, "stop": "5ms"}


def run(options, name, size, folder):
    """Measures the kernels. Returns the result file."""
    path = folder / f"{name}.json"
    filters = [word for kernel in options.kernels for word in ("--filter", kernel)]
    subprocess.run([
        options.program, "kernels", "--device", "host", "--threads", str(options.threads), "--cache", "warm",
        "--min-size", str(size), "--max-size", str(size), "--stop", options.stop, *filters, "--json", path
    ], check=True, stdout=subprocess.DEVNULL)
    return path


def compared(options, kind, first, second):
    """Returns the verdicts on each row of these runs."""
    path = second[0].with_suffix(f".{kind}.json")
    ran = subprocess.run([
        options.program, "compare", *(",".join(map(str, paths)) for paths in (first, second)), "--ignore",
        "size_bytes", "--ignore", "shape", "--json", path
    ], stdout=subprocess.DEVNULL)
    verdicts = json.loads(path.read_text())
    if ran.returncode != int(any(row["verdict"] == "SLOWER" for row in verdicts)):
        raise RuntimeError(f"gradwire-bench compare ended with {ran.returncode}")
    return {row["row"]: row["verdict"] for row in verdicts}


def measure(options):
    with tempfile.TemporaryDirectory(prefix="gradwire-compare-") as scratch:
        folder = pathlib.Path(scratch)
        for pair in range(options.pairs):
            sizes = {"a": options.size, "b": options.size, "c": int(options.size * options.more) // 4 * 4}
            turns = [[run(options, f"{name}{turn}", sizes[name], folder) for name in sizes]
                     for turn in range(options.runs)]
            a, b, c = zip(*turns)
            noise = [row["noise"] for path in (*a, *b, *c) for row in json.loads(path.read_text())]
            yield {"pair": pair, "noise": statistics.median(noise), "most_noise": max(noise),
                   "same": compared(options, "same", a, b), "more": compared(options, "more", a, c)}


def line(item):
    def counts(kind):
        verdicts = list(item[kind].values())
        return ", ".join(f"{verdicts.count(v)} {v}" for v in dict.fromkeys(sorted(verdicts)))

    return (f"pair {item['pair']}: noise {100 * item['noise']:.1f} % (at most {100 * item['most_noise']:.1f}); "
            f"same work: {counts('same')}; more work: {counts('more')}")


def tables(document):
    items = document["items"]
    rows = [["row", "same work: SAME", "UNSURE", "FASTER or SLOWER", "more work: SLOWER", "UNSURE", "other"]]
    for name in items[0]["same"]:
        same, more = ([item[kind][name] for item in items] for kind in ("same", "more"))
        rows.append([name, same.count("SAME"), same.count("UNSURE"),
                     same.count("FASTER") + same.count("SLOWER"), more.count("SLOWER"), more.count("UNSURE"),
                     more.count("SAME") + more.count("FASTER")])
    right = sum(all(v in ("SAME", "UNSURE") for v in item["same"].values()) for item in items)
    found = sum(all(v == "SLOWER" for v in item["more"].values()) for item in items)
    noise = statistics.median(item["noise"] for item in items)
    return (report.markdown([[str(cell) for cell in row] for row in rows]) +
            f"\nNo row of {right} of {len(items)} pairs with the same work is FASTER or SLOWER. Every row of "
            f"{found} of {len(items)} with more work is SLOWER. Median noise {100 * noise:.1f} %.")
