#!/usr/bin/env python3
"""Draws `gradwire compare`: accuracy by bytes sent, loss by time, and the parts of a step's time.

    plot.py build/demo/compare.json -o report.png     the result of gradwire compare --json
    plot.py shelf.json -o shelf.png                   a result with over 7 compressions or several seeds:
                                                      accuracy by bytes per element, with the Pareto front
    plot.py run-a.jsonl run-b.jsonl -o report.png     logs of single runs (gradwire train --log)
    plot.py numerics.json -o numerics.png             the result of gradwire-bench numerics --json
    plot.py experiments.json -o experiments.png       the result of bench/experiments/slow_links.py
    plot.py plan-*.json -o plan.png                   plans of a cluster for several numbers of ranks
    plot.py trace.json -o timeline.png                one step of gradwire train --trace, a row per rank

The runs' logs, compare.0.jsonl and so on, must be next to compare.json (docs/formats.md). --pareto draws few
compressions of one seed like many.
"""
import argparse
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # bench/
from plots import experiments, numerics, pareto, plans, runs, timeline  # noqa: E402


def document_of(paths):
    """Returns the content of a single JSON file, or None for other paths."""
    if len(paths) != 1 or not paths[0].endswith(".json"):
        return None
    try:
        return json.loads(pathlib.Path(paths[0]).read_text())
    except (OSError, ValueError):
        return None  # runs.load() reports the error


def experiments_of(paths):
    """Returns the result of bench/experiments/slow_links.py, or None for other files."""
    document = document_of(paths)
    return document if isinstance(document, dict) and {"settings", "items"} <= set(document) else None


def trace_of(paths):
    """Returns a trace of gradwire train --trace, or None for other files."""
    document = document_of(paths)
    return document if isinstance(document, dict) and {"traceEvents", "otherData"} <= set(document) else None


def numerics_of(paths):
    """Returns the rows of `gradwire-bench numerics --json`, or None for other files."""
    rows = document_of(paths)
    return rows if rows and isinstance(rows, list) and {"lossy_steps", "rel_error"} <= set(rows[0]) else None


def plans_of(paths):
    """Returns the results of `gradwire plan --json`, or None if a file is none."""
    documents = [document_of([path]) for path in paths]
    are_plans = all(isinstance(d, dict) and {"cluster", "ranks", "rows"} <= set(d) for d in documents)
    return documents if are_plans else None


def compared(paths):
    """Returns the rows of `gradwire compare --json`, or None for other files."""
    rows = document_of(paths)
    return rows if rows and isinstance(rows, list) and {"compression", "seeds"} <= set(rows[0]) else None


def draws_pareto(rows, asked):
    """Returns whether a comparison is too large for a line per run."""
    return rows is not None and (asked or len(rows) > len(runs.RUN_COLORS) or len(rows[0]["seeds"]) > 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", help="compare.json, run logs (.jsonl), numerics.json, or a trace")
    parser.add_argument("-o", "--output", default="report.png", help="picture to write (default: report.png)")
    parser.add_argument("--step", type=int,
                        help="of a trace: the step to draw (default: one of median length)")
    parser.add_argument("--pareto", action="store_true",
                        help="of compare.json: one point per compression and the Pareto front, as for many")
    arguments = parser.parse_args()
    comparison = compared(arguments.files)
    trace = trace_of(arguments.files)
    numerics_rows, experiments_result = numerics_of(arguments.files), experiments_of(arguments.files)
    if planned := plans_of(arguments.files):
        plans.draw(planned, arguments.output)
    elif experiments_result:
        experiments.draw(experiments_result, arguments.output)
    elif trace:
        timeline.draw(trace, arguments.step, arguments.output)
    elif numerics_rows:
        numerics.draw(numerics_rows, arguments.output)
    elif draws_pareto(comparison, arguments.pareto):
        pareto.draw(comparison, runs.title(runs.first_log(arguments.files[0], comparison)), arguments.output)
    else:
        runs.draw(runs.load(arguments.files), arguments.output)
    print(f"Picture: {arguments.output}")


if __name__ == "__main__":
    main()
