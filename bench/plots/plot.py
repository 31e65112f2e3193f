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
from plots import by_ranks, experiments, pareto, runs, timeline  # noqa: E402

# The fields of a file's document, or of its first row, by which its kind is known.
KINDS = {"plans": {"cluster", "ranks", "rows"}, "experiments": {"settings", "items"},
         "trace": {"traceEvents", "otherData"}, "numerics": {"lossy_steps", "rel_error"},
         "compared": {"compression", "seeds"}}


def document_of(path):
    """Returns the content of a JSON file, or None."""
    try:
        return json.loads(pathlib.Path(path).read_text()) if path.endswith(".json") else None
    except (OSError, ValueError):
        return None  # runs.load() reports the error


def kind_of(documents):
    """Returns the kind of a single document, or of several plans; "runs" for other files."""
    for kind, fields in KINDS.items():
        heads = [d[0] if d and isinstance(d, list) else d for d in documents]
        rows = kind in ("numerics", "compared")
        if all(isinstance(h, dict) and fields <= set(h) and isinstance(d, list) == rows
               for h, d in zip(heads, documents)) and (len(documents) == 1 or kind == "plans"):
            return kind
    return "runs"


def draws_pareto(rows, asked):
    """Returns whether a comparison is too large for a line per run."""
    return asked or len(rows) > len(runs.RUN_COLORS) or len(rows[0]["seeds"]) > 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", help="compare.json, run logs (.jsonl), numerics.json, or a trace")
    parser.add_argument("-o", "--output", default="report.png", help="picture to write (default: report.png)")
    parser.add_argument("--step", type=int,
                        help="of a trace: the step to draw (default: one of median length)")
    parser.add_argument("--pareto", action="store_true",
                        help="of compare.json: one point per compression and the Pareto front, as for many")
    arguments = parser.parse_args()
    documents = [document_of(path) for path in arguments.files]
    kind, first = kind_of(documents), documents[0]
    if kind == "plans":
        by_ranks.draw_plans(documents, arguments.output)
    elif kind == "experiments":
        experiments.draw(first, arguments.output)
    elif kind == "trace":
        timeline.draw(first, arguments.step, arguments.output)
    elif kind == "numerics":
        by_ranks.draw_numerics(first, arguments.output)
    elif kind == "compared" and draws_pareto(first, arguments.pareto):
        pareto.draw(first, runs.title(runs.first_log(arguments.files[0], first)), arguments.output)
    else:
        runs.draw(runs.load(arguments.files), arguments.output)
    print(f"Picture: {arguments.output}")


if __name__ == "__main__":
    main()
