#!/usr/bin/env python3
"""Prints where the time of a CUDA graph goes, by kernel, from the list of bench/harness/graph_trace.cpp.

    graph_table.py TRACE [STEPS]    the medians of the last STEPS whole replays (default: 10)

A replay is the kernels of one graph launch, so the number of kernels of a step comes from the trace. Replays
of the graph with most kernels count. Busy: at least one kernel runs. Idle: gaps within a replay.
"""
import collections
import pathlib
import shutil
import statistics
import subprocess
import sys
import typing


class Kernel(typing.NamedTuple):
    start: int  # ns
    end: int
    launch: str
    shape: tuple  # grid, threads per block, registers, bytes of shared memory
    name: str


def read(text):
    """Returns the kernels of graphs. Ignores an incomplete last line, which a killed program leaves."""
    found = []
    for line in text.splitlines():
        cells = line.split("\t", 9)
        if len(cells) == 10 and cells[3] != "0":
            found.append(Kernel(int(cells[0]), int(cells[1]), cells[4], tuple(cells[5:9]), cells[9]))
    return sorted(found)


def replays(kernels, most):
    """Returns the kernels of the last `most` replays of the largest graph."""
    by_launch = collections.defaultdict(list)
    for kernel in kernels:
        by_launch[kernel.launch].append(kernel)
    largest = max(map(len, by_launch.values()), default=0)
    return [replay for replay in by_launch.values() if len(replay) == largest][-most:]


def busy_ns(replay):
    total, last = 0, replay[0].start
    for kernel in replay:
        total += max(0, kernel.end - max(last, kernel.start))
        last = max(last, kernel.end)
    return total


def readable(names):
    """Returns a dictionary: name in the trace -> name without parameters and namespaces."""
    plain = names
    if shutil.which("c++filt"):
        plain = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True,
                               check=True).stdout.splitlines()
    drop = ("gradwire::cuda::", "gradwire::", "(anonymous namespace)::", "void ")
    for text in drop:
        plain = [name.replace(text, "") for name in plain]
    return {name: short.split("(")[0] for name, short in zip(names, plain)}


def table(steps):
    """Returns the lines of the table for replays of one graph."""
    groups = collections.defaultdict(list)
    for kernel in (kernel for step in steps for kernel in step):
        groups[kernel.name, kernel.shape].append((kernel.end - kernel.start) / 1e3)
    names = readable(sorted({name for name, _ in groups}))
    lines = ["ms/step      count  median us  grid, threads, registers, shared bytes  kernel"]
    for (name, shape), us in sorted(groups.items(), key=lambda item: -sum(item[1])):
        lines.append(f"{sum(us) / 1e3 / len(steps):7.3f} {len(us) / len(steps):10.1f} "
                     f"{statistics.median(us):10.2f}  {' '.join(shape)}  {names[name]}")
    spans = [max(kernel.end for kernel in step) - step[0].start for step in steps]
    periods = [after[0].start - before[0].start for before, after in zip(steps, steps[1:])] or spans
    busy = [busy_ns(step) for step in steps]
    ms = [statistics.median(values) / 1e6 for values in (periods, spans, busy)]
    lines.append(f"step {ms[0]:.3f} ms, its graph {ms[1]:.3f} ms: busy {ms[2]:.3f}, "
                 f"idle {ms[1] - ms[2]:.3f} ms in {len(steps[0])} launches, of {len(steps)} steps")
    return lines


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    steps = replays(read(pathlib.Path(sys.argv[1]).read_text()), int((sys.argv + ["10"])[2]))
    if not steps:
        sys.exit(f"graph_table: {sys.argv[1]} has no kernel of a graph; does CUPTI support this GPU, and did "
                 "the program use --graph?")
    print("\n".join(table(steps)))


if __name__ == "__main__":
    main()
