"""Tables of measurements: medians, speeds and losses relative to a mode, as Markdown or aligned text."""
import pathlib
import statistics

ROOT = pathlib.Path(__file__).resolve().parents[2]
SLOW_LINKS_PAGE = ROOT / "docs/results/slow-links.md"
GLOO = "jax.lax.pmean, Gloo"  # the mode of JAX without Gradwire
# Fields of a log's steps, reported as medians.
FIELDS = ("comm_ms", "exposed_comm_ms", "data_ms", "forward_ms", "backward_ms", "optimizer_ms", "wire_bytes",
          "dense_bytes")


def median(values):
    values = [v for v in values if v is not None]
    return statistics.median(values) if values else None


def median_steps(items):
    """Returns the median of the items' median steps, in milliseconds; None without a result."""
    return median(median(i["step_ms"]) for i in items if "step_ms" in i)


def result_of(records, warmup):
    """Returns the result in the records of `gradwire train`, without the first `warmup` steps."""
    run = next(r for r in records if r["type"] == "run")
    steps = [r for r in records if r["type"] == "step"][warmup:]
    return {"step_ms": [s["step_ms"] for s in steps], "loss": steps[-1]["loss"], "buckets": run["buckets"],
            "schedule": run["schedule"], "parameters": run["parameters"], "tensors": run["tensors"],
            **{field: median(s.get(field) for s in steps) for field in FIELDS}}


def markdown(table):
    lines = ["| " + " | ".join(row) + " |" for row in table]
    return "\n".join([lines[0], "|---" * len(table[0]) + "|", *lines[1:]]) + "\n"


def plain(table):
    """Returns a table with aligned columns. The first column is text, the other columns are numbers."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = []
    for first, *others in table:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:]))]
        lines.append("  ".join(cells))
    return "\n".join(lines)


def replace_section(page, name, text):
    """Replaces the text between <!-- name:begin --> and <!-- name:end --> in the page."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if begin not in page or end not in page:
        raise ValueError(f"no {begin} and {end} on the page")
    head, rest = page.split(begin, 1)
    return head + begin + "\n" + text.strip() + "\n" + end + rest.split(end, 1)[1]


def put_section(page, name, text):
    """Replaces a section of a page in docs/."""
    page.write_text(replace_section(page.read_text(), name, text))
    print(f"Written: {page}, section {name}")


def by_mode(items):
    """Returns the items of each mode."""
    found = {}
    for item in items:
        found.setdefault(item["mode"], []).append(item)
    return found


def speed_line(item):
    mode = f"{item['mode']}: {item['choice']['spec']}" if item.get("choice") else item["mode"]
    return f"{item.get('what', ''):15}{mode:44} {median(item['step_ms']):9.1f} ms"


def speed_table(items, *bases, first=""):
    """Returns a row per mode: the median of its repetitions' medians, and the speed relative to other modes.

    Args:
        items: measurements with "mode", "step_ms" and, to show bytes, "sent_bytes".
        bases: the modes with which to compare.
        first: the header of the modes.
    """
    modes = by_mode(items)
    each = {mode: [median(i["step_ms"]) for i in found] for mode, found in modes.items()}
    sent = any("sent_bytes" in i for i in items)
    table = [[first, *(["MB sent"] if sent else []), "ms", *(f"x {base}" for base in bases),
              "range of repetitions, ms"]]
    for mode, ms in each.items():
        megabytes = [f"{median(i['sent_bytes'] for i in modes[mode]) / 1e6:.1f}"] if sent else []
        compared = [f"{median(each[base]) / median(ms):.2f}" if base in each else "-" for base in bases]
        table.append([mode, *megabytes, f"{median(ms):.1f}", *compared, f"{min(ms):.1f} to {max(ms):.1f}"])
    return table


def loss_line(item):
    return f"{item['optimizer']:6} {item['mode']:44} seed {item['seed']}: {item['final_loss']:.4f}"


def loss_table(items, base):
    """Returns a row per mode: the mean loss for each optimizer, and the differences to `base` by seed."""
    items = [{"optimizer": "sgd", **i} for i in items]
    optimizers = list(dict.fromkeys(i["optimizer"] for i in items))
    table = [["", *(f"{what}, {name}" for name in optimizers
                    for what in ("final loss", "mean difference", f"above {base} of the same seed"))]]
    bases = {(i["optimizer"], i["seed"]): i["final_loss"] for i in items if i["mode"] == base}
    for mode, found in by_mode(items).items():
        row = [mode]
        for name in optimizers:
            losses = {i["seed"]: i["final_loss"] for i in found if i["optimizer"] == name}
            above = [loss - bases[name, seed] for seed, loss in losses.items() if (name, seed) in bases]
            row += [f"{statistics.fmean(losses.values()):.4f}",
                    f"{statistics.fmean(above):+.4f}" if above else "-",
                    ", ".join(f"{a:+.4f}" for a in above)]
        table.append(row)
    return table
