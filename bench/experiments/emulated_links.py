"""Step times over emulated links (gradwire train --link), between processes and between threads, and over
shaped links between network namespaces, alternating in one run. Needs root for the namespaces. Takes eight
minutes. Also compares a rate that no step reaches with no --link at all.
"""
import pathlib
import statistics
import sys
import tempfile

from harness import ranks, report

OPTIONS = {"hosts": 4, "repetitions": 3, "steps": 12, "warmup": 3, "rate": ("100Mbit", "200Mbit", "1Gbit"),
           "spec": ("fp32", "bf16", "powersgd:rank=4"), "deadline_s": 120}
SMOKE = {"hosts": 2, "repetitions": 1, "steps": 2, "warmup": 1, "rate": ("1Gbit",), "spec": ("fp32",)}
MODEL = ("--width", "128", "--batch-size", "4", "--data", "synthetic:4000", "--eval-every", "0")
ENVIRONMENT = {"GRADWIRE_THREADS": "1"}
UNLIMITED = "1Tbit"
BURST = ",0us,128KiB"  # of shaped_link.sh
WAYS = {"namespaces": "namespaces", "processes": "processes, `--link`", "threads": "threads, `--link`"}


def train(options, way, rate, spec, log):
    command = [ranks.GRADWIRE, "train", *MODEL, "--device", "host", "--compression", spec, "--log", str(log),
               "--steps", str(options.warmup + options.steps)]
    if way == "threads":
        command += ["--ranks", str(options.hosts)]
    if way != "namespaces" and rate:
        command += ["--link", rate + BURST]
    quiet = ["sh", "-c", 'exec "$@" > /dev/null', "sh", *command]
    shaped = rate.lower() if way == "namespaces" else ""
    count = 1 if way == "threads" else options.hosts
    if ranks.run(quiet, count, shaped, options.deadline_s, ENVIRONMENT) != 0:
        return {"error": "gradwire train failed"}
    return report.read_log(log, options.warmup)


def measure(options):
    why = ranks.no_links()
    if why and not options.smoke:
        sys.exit(f"emulated_links: no slow links on this machine: {why}")
    ways = [way for way in WAYS if not (why and way == "namespaces")]
    cells = [(way, rate, spec) for rate in options.rate for spec in options.spec for way in ways]
    cells += [(way, rate, options.spec[0]) for way in ("processes", "threads") for rate in ("", UNLIMITED)]
    with tempfile.TemporaryDirectory() as folder:
        for repetition in range(options.repetitions):
            for way, rate, spec in cells:
                log = pathlib.Path(folder) / "run.jsonl"
                yield {"way": way, "rate": rate, "spec": spec, "repetition": repetition,
                       **train(options, way, rate, spec, log)}
                log.unlink(missing_ok=True)


def line(item):
    shown = item.get("error") or f"{statistics.median(item['step_ms']):.1f} ms"
    return f"{item['way']}, {item['rate'] or 'no link'}, {item['spec']}: {shown}"


def step_ms(document, way, rate, spec):
    """Returns the median over the repetitions of the median step; None without a result."""
    medians = [statistics.median(item["step_ms"]) for item in document["items"] if "step_ms" in item
               and (item["way"], item["rate"], item["spec"]) == (way, rate, spec)]
    return statistics.median(medians) if medians else None


def tables(document):
    settings = document["settings"]
    rows = [["rate", "compression", "namespaces, ms", *(f"{WAYS[w]}, ms" for w in ("processes", "threads"))]]
    for rate in settings["rate"]:
        for spec in settings["spec"]:
            base = step_ms(document, "namespaces", rate, spec)
            times = [step_ms(document, way, rate, spec) for way in ("processes", "threads")]
            rows.append([rate, f"`{spec}`", f"{base:.1f}" if base else "-",
                         *(f"{t:.1f} ({100 * (t / base - 1):+.1f} %)" if t and base else "-" for t in times)])
    text = "Median step; in brackets, the difference to namespaces:\n\n" + report.markdown(rows)
    rows = [["ranks", "no `--link`, ms", f"`--link {UNLIMITED}`, ms"]]
    for way in ("processes", "threads"):
        times = [step_ms(document, way, rate, settings["spec"][0]) for rate in ("", UNLIMITED)]
        rows.append([way, *(f"{t:.1f}" if t else "-" for t in times)])
    return text + "\n\nWithout a limit:\n\n" + report.markdown(rows)
