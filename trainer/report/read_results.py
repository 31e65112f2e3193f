"""Reads the files of `gradwire report`: results of compare, run logs, and results of gradwire-bench.

document_of() returns what page.js draws: `rows`, one per spec, each with its seeds; `runs`, one per log, with
curves, the parts of a step, waits between ranks and the configuration; `bench`, one table per file. Numbers
are finite or None.
"""
import json
import math
import os
import pathlib
import statistics
import sys

PARTS = ("data", "forward", "backward", "exposed_comm", "optimizer")  # of a step, in order
PARALLEL = ("compress", "communicate", "decompress")
FIGURES = ("step_ms", "images_per_s", "wire_bytes", "dense_bytes", "exposed_comm_ms")  # medians
# Fields of a run's first record that do not distinguish seeds of one configuration.
NOT_SETTINGS = {
    "type", "schema", "version", "seed", "init", "resume", "checkpoint", "dump_gradients", "trace",
    "trace_steps", "timeout_s", "parameters", "tensors", "buckets", "schedule",
    "schedule_reason", "reducer_extra_bytes", "peak_tflops", "copy_gb_per_s", "fma_share", "products",
    "flags"
}
# Results of gradwire-bench: title, fields by which a file is recognized, fields that name a line, x, y.
BENCHES = (
    ("Collectives", {"schedule", "spec", "busbw_gbps"}, ("schedule", "spec", "transport"), "size_bytes",
     "busbw_gbps"),
    ("Kernels", {"op", "variant", "copy_fraction"}, ("op", "variant", "cache"), "size_bytes", "gbps"),
    ("Numerics", {"schedule", "lossy_steps", "rel_error"}, ("schedule", "compression"), "ranks", "rel_error"),
    ("Formats", {"spec", "stated_error", "on"}, ("data", "spec"), "bytes_per_element", "error"),
    ("Hook", {"spec", "floor_ms", "baseline_ms"}, ("model", "spec"), None, None),
    ("Orthonormalization", {"rank", "matrices", "baseline_ms"}, ("model", "rank"), None, None),
    ("World of one rank", {"reducer_ms", "bypassed_ms"}, ("model", "compression"), None, None),
)
KINDS = "a result of gradwire compare --json or gradwire-bench --json, or a log of gradwire train --log"


sys.path += filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))  # ignored by Python itself
MARK = b"\0gradwire\0"


def deliver(text=""):
    """Writes the command's output between two marks, by which the command knows that it is whole."""
    sys.stdout.flush()
    rest = memoryview(MARK + text.encode(errors="surrogateescape") + MARK)
    while rest:  # a write to a pipe may be short
        rest = rest[os.write(sys.stdout.fileno(), rest):]


def fail(text, code=2):
    print("gradwire: " + " ".join(text.split()), file=sys.stderr)
    deliver()
    sys.exit(code)


def parse(text):
    """Returns a JSON document in which NaN and infinities are None, or None if the text is not JSON.

    Whole numbers that JavaScript would round, such as seeds, become text."""
    def finite(digits):
        value = float(digits)
        return value if math.isfinite(value) else None

    def exact(digits):
        return int(digits) if abs(int(digits)) <= 2 ** 53 else digits

    try:
        return json.loads(text, parse_float=finite, parse_int=exact, parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        return None


def number(value):
    """Returns a finite number, or None for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value if abs(value) < 2 ** 1000 else None
    return value if isinstance(value, float) and math.isfinite(value) else None


def mean(values):
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def deviation(values):
    known = [v for v in values if v is not None]
    return statistics.stdev(known) if len(known) > 1 else None


def median(values):
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None


def is_list_of_objects(document):
    return isinstance(document, list) and bool(document) and all(isinstance(row, dict) for row in document)


def log_records(path, text):
    """Returns a log's records. The last line of a run in progress may be incomplete."""
    records, lines = [], text.removesuffix("\n").split("\n")  # splitlines() also splits at U+2028 in strings
    for at, line in enumerate(lines, 1):
        record = parse(line)
        if not records and not (isinstance(record, dict) and record.get("type") == "run"):
            fail(f"{path}: not a result; give {KINDS}")
        if isinstance(record, dict):
            records.append(record)
        elif at < len(lines):
            fail(f"{path}:{at}: not a record of a run log")
    return records


def load(path):
    """Returns ("compare" or "log", records) or ("bench", its row of BENCHES, rows). Exits for other files."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # may begin with a byte order mark
    except OSError as error:
        fail(f"{path}: {error.strerror}")
    except UnicodeDecodeError:
        fail(f"{path}: not a text file; give {KINDS}")
    document = parse(text)
    if is_list_of_objects(document):
        if all(isinstance(row.get("compression"), str) and is_list_of_objects(row.get("seeds"))
               for row in document):
            return "compare", document
        for bench in BENCHES:
            if all(bench[1] <= set(row) for row in document):
                return "bench", bench, document
    if document is not None and not isinstance(document, dict) or not text.strip():
        fail(f"{path}: not a result; give {KINDS}")
    return "log", log_records(path, text)


def thinned(columns, points):
    """Returns columns of equal length with at most `points` entries: means of ranges of equal size."""
    count = len(columns[0])
    size = -(-count // points)
    if size <= 1:
        return columns
    return [[mean(column[i:i + size]) for i in range(0, count, size)] for column in columns]


def rounded(values, digits=5):
    return [None if v is None else float(f"{v:.{digits}g}") for v in values]


def curves(records, points):
    """Returns the loss by step, seconds and bytes, and the evaluations at the same scales."""
    steps, seconds, sent, losses, evals = [], [], [], [], []
    for record in records:
        if record.get("type") == "step":
            steps.append((number(record.get("step")) or 0) + 1)
            seconds.append((seconds[-1] if seconds else 0) + (number(record.get("step_ms")) or 0) / 1000)
            sent.append((sent[-1] if sent else 0) + (number(record.get("wire_bytes")) or 0))
            losses.append(number(record.get("loss")))
        elif record.get("type") == "eval" and number(record.get("test_accuracy")) is not None:
            evals.append((number(record.get("step")), seconds[-1] if seconds else 0, sent[-1] if sent else 0,
                          record["test_accuracy"]))
    loss = thinned([steps, seconds, sent, losses], points) if steps else [[], [], [], []]
    names = ("step", "seconds", "bytes", "value")
    return {"loss": {name: rounded(column) for name, column in zip(names, loss)},
            "accuracy": {name: [e[i] for e in evals] for i, name in enumerate(names)}}


def parts_of(steps):
    """Returns the mean milliseconds of each part of a step, `other` included, or None without steps."""
    whole = mean([number(s.get("step_ms")) for s in steps])
    if whole is None:
        return None
    parts = {name: mean([number(s.get(name + "_ms")) for s in steps]) or 0 for name in PARTS}
    parts["other"] = max(0, whole - sum(parts.values()))
    parts.update({name: mean([number(s.get(name + "_ms")) for s in steps]) or 0 for name in PARALLEL})
    return parts


def matrix(waits):
    """Returns waited_s as a square matrix of numbers, or None."""
    square = isinstance(waits, list) and len(waits) > 1 and all(
        isinstance(row, list) and len(row) == len(waits) and all(number(v) is not None for v in row)
        for row in waits)
    return waits if square else None


def straggler_of(waited, seconds):
    """Returns the rank that waits least, if the others wait longer by 5 % of the time, as `train` does."""
    totals = [sum(row) for row in waited]
    least = totals.index(min(totals))
    behind = (sum(totals) - totals[least]) / (len(totals) - 1) - totals[least]
    if not seconds or behind < 0.05 * seconds:
        return None
    return {"rank": least, "behind_s": behind, "share": behind / seconds}


def waits_of(records, summary, seconds):
    """Returns who waited for whom since the ranks last changed: the newest record, or the summary."""
    waited, at = matrix(summary.get("waited_s")), seconds
    for record in records:
        if record.get("type") == "waits" and matrix(record.get("waited_s")) and number(record.get("seconds")):
            waited, at = record["waited_s"], record["seconds"]
    if not waited or not at:
        return None
    return {"waited_s": [rounded(row, 4) for row in waited], "seconds": at,
            "straggler": straggler_of(waited, at)}


def run_of(path, records, points):
    config = records[0]
    steps = [r for r in records if r.get("type") == "step"]
    summary = next((r for r in reversed(records) if r.get("type") == "summary"), {})
    evals = [r for r in records if r.get("type") == "eval"]

    def figure(name):
        value = number(summary.get(name))
        return value if value is not None else median([number(s.get(name)) for s in steps])

    losses = [number(s.get("loss")) for s in steps[-20:]]
    seconds = sum(number(s.get("step_ms")) or 0 for s in steps) / 1000
    return {"log": path.name, "config": {k: v for k, v in config.items() if k != "type"},
            "compression": str(config.get("compression", "?")), "seed": config.get("seed"),
            "finished": bool(summary), "steps": len(steps), "curves": curves(records, points),
            "parts": parts_of(steps), "waits": waits_of(records, summary, seconds),
            "diverged": bool(steps) and number(
                summary.get("final_loss") if summary else steps[-1].get("loss")) is None,
            "accuracy": number((summary or (evals[-1] if evals else {})).get("test_accuracy")),
            "loss": number(summary.get("final_loss")) if summary else mean(losses),
            **{name: figure(name) for name in FIGURES}}


def rows_of_comparison(path, document, read_log, notes):
    rows, missing = [], 0
    for entry in document:
        seeds = []
        for seed in entry["seeds"]:
            log = path.parent / pathlib.Path(str(seed.get("log") or "-")).name
            run = read_log(log) if os.path.isfile(log) else None
            missing += run is None
            seeds.append({"seed": seed.get("seed"), "accuracy": number(seed.get("test_accuracy")),
                          "loss": number(seed.get("final_loss")), "run": run,
                          "diverged": bool(seed.get("diverged"))})
        row = {name: number(entry.get(name))
               for name in (*FIGURES, "ratio", "ranks", "bucket_mb", "target_accuracy", "seconds_to_target")}
        rows.append({**row, "compression": entry["compression"], "source": path.stem, "seeds": seeds,
                     "schedule": str(entry.get("schedule", "")), "device": str(entry.get("device", "")),
                     "link": str(entry.get("link") or ""),
                     "bytes_per_element": number(entry.get("wire_bytes_per_element"))})
    if missing:
        notes.append(f"{path.name}: {missing} of its logs are not next to it, so their curves are missing.")
    return rows


def rows_of_logs(indices, runs):
    """Groups runs that differ only in their seed."""
    groups = {}
    for at in indices:
        config = runs[at]["config"]
        key = json.dumps({k: v for k, v in config.items() if k not in NOT_SETTINGS}, sort_keys=True)
        groups.setdefault(key, []).append(at)
    rows = []
    for members in groups.values():
        config = runs[members[0]]["config"]
        row = {name: median([runs[at][name] for at in members]) for name in FIGURES}
        sent, parameters = row["wire_bytes"], number(config.get("parameters"))
        rows.append({**row, "compression": runs[members[0]]["compression"],
                     "source": pathlib.Path(runs[members[0]]["log"]).stem,
                     "ratio": row["dense_bytes"] / sent if sent and row["dense_bytes"] else None,
                     "bytes_per_element": sent / parameters if sent and parameters else None,
                     "schedule": str(config.get("schedule", "")), "device": str(config.get("device", "")),
                     "link": str(config.get("link") or ""),
                     "ranks": number(config.get("ranks")), "bucket_mb": number(config.get("bucket_mb")),
                     "seeds": [{"seed": runs[at]["seed"], "accuracy": runs[at]["accuracy"],
                                "loss": runs[at]["loss"], "run": at, "diverged": runs[at]["diverged"]}
                               for at in members]})
    return rows


def finish(rows, runs):
    """Adds means, deviations, parts of a step, and labels that distinguish the rows."""
    for row in rows:
        for name in ("accuracy", "loss"):
            diverged = any(seed["diverged"] for seed in row["seeds"])
            row[name] = None if diverged else mean([seed[name] for seed in row["seeds"]])
            row[name + "_std"] = deviation([seed[name] for seed in row["seeds"]])
        known = [runs[s["run"]]["parts"] for s in row["seeds"] if s["run"] is not None]
        known = [parts for parts in known if parts]
        row["parts"] = {name: mean([parts[name] for parts in known])
                        for name in (*PARTS, "other", *PARALLEL)} if known else None
        row["label"] = row["compression"]
    several_sizes = len({row["bucket_mb"] for row in rows}) > 1
    several_links = len({row["link"] for row in rows}) > 1
    for row in rows:
        if several_links and row["link"]:
            row["label"] += f", links of {row['link']}"
        if several_sizes and row["bucket_mb"]:
            row["label"] += f", buckets of {row['bucket_mb']:g} MiB"
    labels = [row["label"] for row in rows]
    for row, label in zip(rows, labels):
        if labels.count(label) > 1:
            row["label"] += f" ({row['source']})"


def bench_of(path, bench, document):
    title, _, names, x, y = bench
    rows = document
    if title == "Formats":
        rows = [{**entry, **on} for entry in document for on in entry["on"] if isinstance(on, dict)]
    rows = [{k: v for k, v in row.items() if isinstance(v, (str, int, float, bool)) or v is None}
            for row in rows]
    for row in rows:
        row["label"] = " ".join(str(row[name]) for name in names if row.get(name) is not None)
    columns = [k for k in dict.fromkeys(k for row in rows for k in row) if k != "label" and k not in names]
    return {"title": title, "file": path.name, "columns": columns, "rows": rows, "x": x, "y": y}


def model_of(config):
    model = config.get("model")
    return model.get("name") if isinstance(model, dict) else model


def document_of(paths, points):
    """Returns the page's document. points: entries of a curve, at most."""
    runs, at_path, rows, notes, benches, single = [], {}, [], [], [], []

    def read_log(path, records=None):
        """Returns the index of a log's run."""
        key = path.resolve()
        if key not in at_path:
            at_path[key] = len(runs)
            records = records or log_records(path, path.read_text(encoding="utf-8-sig"))
            runs.append(run_of(path, records, points))
        return at_path[key]

    loaded = [(path, *load(path)) for path in paths]
    for path, kind, *content in loaded:
        if kind == "compare":
            rows += rows_of_comparison(path, content[0], read_log, notes)
    in_tables = set(at_path.values())
    for path, kind, *content in loaded:
        if kind == "log":
            single.append(read_log(path, content[0]))
        elif kind == "bench":
            benches.append(bench_of(path, *content))
    rows += rows_of_logs([at for at in dict.fromkeys(single) if at not in in_tables], runs)
    finish(rows, runs)
    unfinished = [run["log"] for run in runs if not run["finished"]]
    if unfinished:
        notes.append(f"Not finished: {', '.join(unfinished)}. Figures are those of the steps so far.")
    diverged = [f"{row['label']}, seed {seed['seed']}" for row in rows for seed in row["seeds"]
                if seed["diverged"]]
    if diverged:
        notes.append(f"Diverged, the last loss is not finite: {'; '.join(diverged)}.")
    titles = dict.fromkeys(f"{model_of(run['config'])} on {run['config'].get('data')}" for run in runs)
    return {"title": ", ".join(titles) or ", ".join(path.name for path in paths), "rows": rows, "runs": runs,
            "bench": benches, "notes": notes, "files": [str(path) for path in paths], "parts": PARTS}
