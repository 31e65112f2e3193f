#!/usr/bin/env python3
"""Runs make demo's comparisons, between threads and over emulated slow links, and prints the results.

    demo.py [FLAG...]     train, draw and print; FLAGs are more flags of gradwire compare
    demo.py --readme      write the results of the last run and its picture into README.md and docs/

docs/demo.json has the run behind README's table. tests/demo_test.py compares both with the program.
"""
import json
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = pathlib.Path("build/demo")
RECORD = ROOT / "docs/demo.json"
PROGRAM = "build/bin/gradwire"
TARGET, LINK, WARMUP = 80, "150Mbit", 100
SPECS = ("fp32", "int8", "powersgd:rank=4,wire=int8")
RUN = ("--model", "vit_tiny", "--data", "fashion-mnist", "--ranks", "4", "--batch-size", "16", "--optimizer",
       "adamw", "--gelu", "tanh", "--lr", "2e-3", "--epochs", "0.6", "--warmup", str(WARMUP),
       *(word for spec in SPECS for word in ("--compression", spec)))
# The links change no bits, so the runs between threads need no accuracy and only a few steps.
THREADS = ("--steps", "100", "--eval-every", "0")
LINKS = ("--link", LINK, "--eval-every", "0.05", "--target-accuracy", str(TARGET))
FIELDS = ("compression", "test_accuracy", "step_ms", "wire_bytes", "ratio", "seconds_to_target")
BLOCK = re.compile(r"(?<=```\n)Over emulated links of.*?(?=```)", re.S)  # README's table


def without_epochs(words):
    """Returns RUN's flags for a run with --steps."""
    at = words.index("--epochs")
    return words[:at] + words[at + 2:]


def human_bytes(value):
    return f"{value / 1e6:.2f} MB" if value >= 999_500 else f"{value / 1e3:.0f} kB"


def table(rows):
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.ljust(width) if at == 0 else cell.rjust(width)
                       for at, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def text_of(record):
    """Returns the table of a run over slow links, and a line about the runs between threads."""
    threads, links = record["threads"], record["links"]
    slowest = links[0]["seconds_to_target"]
    reached = [row for row in links if row["seconds_to_target"]]
    verdict = f"nothing reached {TARGET} %"
    if reached and slowest:
        best = min(reached, key=lambda row: row["seconds_to_target"])
        speedup = slowest / best["seconds_to_target"]
        verdict = f"{best['compression']} reaches {TARGET} % {speedup:.1f}x as fast as fp32"
    rate = re.sub(r"(\d)([kMG]?bit)", r"\1 \2/s", record["link"])
    text = f"Over emulated links of {rate}, {verdict}:\n\n"
    text += table([("compression", "test accuracy", "step ms", "sent per step", f"time to {TARGET} %",
                    "speedup"),
                   *((row["compression"], f"{100 * row['test_accuracy']:.2f} %", f"{row['step_ms']:.1f}",
                      human_bytes(row["wire_bytes"]), *time_cells(row["seconds_to_target"], slowest))
                     for row in links)])
    fp32, best = threads[0], min(threads[1:], key=lambda row: row["step_ms"])
    pays = "pays" if fp32["step_ms"] / best["step_ms"] >= 1.1 else "does not pay"
    return text + (f"\n\nBetween threads of one machine, compression {pays}: a step takes {fp32['step_ms']:.1f} ms "
                   f"with fp32, {best['step_ms']:.1f} ms with {best['compression']}.\n")


def time_cells(seconds, slowest):
    if seconds is None:
        return "-", "-"
    return f"{seconds:.1f} s", f"{slowest / seconds:.1f}x" if slowest else "-"


def machine():
    """Returns what the bits of a run depend on: the host's vector instructions and its library of products."""
    shown = subprocess.run([PROGRAM, "doctor"], capture_output=True, text=True, check=True).stdout
    return {name: re.search(rf"^ *{name} +(.*)$", shown, re.M)[1] for name in ("SIMD", "BLAS")}


def record_of(folder):
    """Returns the record of the last run in this folder."""
    rows = {name: json.loads((folder / f"{name}.json").read_text()) for name in ("threads", "links")}
    logs = [folder / row["seeds"][0]["log"] for row in rows["links"]]
    losses = [[json.loads(line)["loss"] for line in log.read_text().splitlines() if '"type":"step"' in line]
              for log in logs]
    record = {name: [{field: row.get(field) for field in FIELDS} for row in rows[name]] for name in rows}
    for row, loss in zip(record["links"], losses):
        row["losses"] = loss[:WARMUP:10]  # for the test, which runs these steps
    return {"link": rows["links"][0]["link"], "machine": machine(), **record}


def compare(name, *flags):
    command = [PROGRAM, "compare", *flags, "--log-every", "100", "--json", str(FOLDER / f"{name}.json")]
    if subprocess.run(command).returncode:
        sys.exit(1)


def run(extra):
    FOLDER.mkdir(parents=True, exist_ok=True)
    for log in FOLDER.glob("*.jsonl"):  # compare would skip these runs
        log.unlink()
    print("demo: training between threads of this machine", flush=True)
    compare("threads", *without_epochs(RUN), *THREADS, *extra)
    print(f"\ndemo: training over emulated links of {LINK}, about two minutes on two cores", flush=True)
    compare("links", *RUN, *LINKS, *extra)
    links = str(FOLDER / "links.json")
    for command, missing in (
        ([sys.executable, "bench/plots/plot.py", links, "-o", str(FOLDER / "report.png")], "no picture"),
        ([PROGRAM, "report", links, "-o", str(FOLDER / "report.html")], "no page")):
        if subprocess.run(command).returncode:
            print(f"demo: {missing}", flush=True)
    print(f"Records: {FOLDER}/*.json and {FOLDER}/*.jsonl (docs/formats.md)\n")
    print(text_of(record_of(FOLDER)), end="")


def write_readme():
    record = record_of(FOLDER)
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    readme = ROOT / "README.md"
    text, count = BLOCK.subn(lambda _: text_of(record), readme.read_text())
    if count != 1:
        sys.exit("demo.py: README.md has not one block that begins with 'Over emulated links of'")
    readme.write_text(text)
    shutil.copy(FOLDER / "report.png", ROOT / "docs/demo.png")


if __name__ == "__main__":
    if sys.argv[1:] == ["--readme"]:
        write_readme()
    else:
        run(sys.argv[1:])
