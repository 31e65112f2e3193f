"""Is `train --compression auto` right? Trains with auto and, in turns with it, with each spec that it may choose.
Takes 15 minutes with nothing else running.

Links: emulated (--link) between threads; "RATE, namespaces": between processes, shaped by tc, which needs root;
"none": between threads without a link.

Regret: auto's step over that of the best spec within the error budget, less 1. A spec's step is the median over
the repetitions of the median step. Error of a prediction: the predicted step of a spec, by the auto of that
repetition, over its measured step, less 1.
"""
import statistics

from experiments.table import Experiment
from harness import ranks, report

SMALL, LARGE = "vit_tiny", "vit_tiny, 128 wide, 6 deep"
MODELS = {SMALL: ("--batch-size", "16"), LARGE: ("--width", "128", "--depth", "6", "--batch-size", "8")}
NAMESPACES = ", namespaces"
PAGE = ranks.ROOT / "docs/results/auto.md"


def train(options, link, model, compression):
    """Returns the steps of one run; with auto, also its choice and its predictions."""
    flags = [*MODELS[model], "--device", "host", "--data", "synthetic:4000", "--eval-every", "0",
             "--compression", compression, "--steps", options.warmup + options.steps]
    shaped = link.endswith(NAMESPACES)
    if not shaped:
        flags += ["--ranks", "4", *(() if link == "none" else ("--link", link))]
    rate = link.removesuffix(NAMESPACES).lower() if shaped else ""
    try:
        records = ranks.train(flags, 4 if shaped else 1, rate, options.deadline_s, {"GRADWIRE_THREADS": "1"})
    except ranks.Failed as error:
        return {"error": str(error)}
    result = report.result_of(records, options.warmup)
    for record in records:
        if record["type"] == "run":
            result["choice"] = record["compression"]
        if record["type"] == "choice":
            result.setdefault("predictions", record["prediction"]["best"])
        if record["type"] == "summary" and record.get("predicted"):
            result["predicted"] = record["predicted"]
    return result


def measure(options):
    runs = [(None, spec) for spec in options.spec]
    runs += [(budget, f"auto:error={budget:g},replan=off,allow={'+'.join(options.spec)}")
             for budget in options.budget]
    for link in options.link:
        for model in options.model:
            for repetition in range(options.repetitions):
                for budget, spec in runs:
                    yield {"link": link, "model": model, "repetition": repetition, "spec": spec,
                           "budget": budget, **train(options, link, model, spec)}


def line(item):
    shown = item.get("error") or f"{statistics.median(item['step_ms']):.1f} ms"
    chosen = f" ({item['choice']})" if item["budget"] and "choice" in item else ""
    return f"{item['link']}, {item['model']}, {item['spec']}{chosen}: {shown}"


def chosen(items, **fields):
    return [item for item in items if "step_ms" in item and all(item[k] == v for k, v in fields.items())]


def regret(items, budget):
    """Returns auto's choices and step, and the best spec's, of one rate and model; None without results."""
    autos = chosen(items, budget=budget)
    if not autos:
        return None
    errors = {row["compression"]: row["error"] for item in autos for row in item["predictions"]}
    hand = {spec: report.median_steps(runs) for spec, error in errors.items()
            if error <= budget and (runs := chosen(items, budget=None, spec=spec))}
    best = min(hand, key=hand.get)
    choices = sorted({item["choice"] for item in autos})
    # Auto's step differs from the chosen spec's own runs only by noise.
    of_choice = statistics.median(hand[item["choice"]] for item in autos)
    return {"choices": choices, "auto_ms": report.median_steps(autos), "of_choice_ms": of_choice,
            "best": best, "best_ms": hand[best], "fp32_ms": hand["fp32"]}


def prediction_errors(items):
    """Returns (predicted over measured, less 1; inside its interval or None) for each run of a spec."""
    found = []
    for auto in chosen(items):
        for row in auto.get("predictions", ()):
            same = chosen(items, link=auto["link"], model=auto["model"], repetition=auto["repetition"],
                          budget=None, spec=row["compression"])
            for run in same:
                measured = statistics.median(run["step_ms"])
                interval = row.get("step_interval_ms")
                inside = interval[0] <= measured <= interval[1] if interval else None
                found.append((row["step_ms"] / measured - 1, inside))
    return found


def percent(value):
    return f"{100 * value:+.1f} %"


def tables(document):
    settings, items = document["settings"], document["items"]
    rows = [["link", "model", "error budget", "auto's choices", "auto, ms", "best spec", "its ms", "fp32, ms",
             "regret", "regret of the choice"]]
    regrets, of_choices = [], []
    for link in settings["link"]:
        for model in settings["model"]:
            cell = chosen(items, link=link, model=model)
            for budget in settings["budget"]:
                found = regret(cell, budget)
                if not found:
                    continue
                regrets.append(found["auto_ms"] / found["best_ms"] - 1)
                of_choices.append(found["of_choice_ms"] / found["best_ms"] - 1)
                rows.append([link, model, f"{budget:g}", ", ".join(f"`{c}`" for c in found["choices"]),
                             f"{found['auto_ms']:.1f}", f"`{found['best']}`", f"{found['best_ms']:.1f}",
                             f"{found['fp32_ms']:.1f}", percent(regrets[-1]), percent(of_choices[-1])])
    text = report.markdown(rows)
    if regrets:
        text += (f"\nRegret: median {percent(statistics.median(regrets))}, worst {percent(max(regrets))}; of the "
                 f"choice: median {percent(statistics.median(of_choices))}, worst {percent(max(of_choices))}.")
    errors = prediction_errors(items)
    if errors:
        sizes = sorted(abs(error) for error, _ in errors)
        text += (f"\nPredicted steps of {len(errors)} runs: mean error {100 * statistics.mean(sizes):.1f} %, nine "
                 f"of ten within {100 * sizes[int(0.9 * (len(sizes) - 1))]:.1f} %, largest {100 * sizes[-1]:.1f} %.")
        known = [inside for _, inside in errors if inside is not None]
        if known:
            text += (f" {sum(known)} of {len(known)} are inside the 90 % interval "
                     f"({100 * sum(known) / len(known):.0f} %).")
    return text


def render(document, path, options):
    """Writes the tables into docs/results/auto.md."""
    report.put_section(PAGE, "tables", tables(document))


EXPERIMENT = Experiment(
    __doc__,
    {"repetitions": 5, "steps": 30, "warmup": 5,
     "link": ("200Mbit", "1Gbit", "1Gbit" + NAMESPACES, "5Gbit", "none"),
     "model": (SMALL, LARGE), "budget": (0.1, 1.0), "deadline_s": 120,
     "spec": ("fp32", "bf16", "int8", "fp8", "int4", "powersgd:rank=4", "powersgd:rank=1")},
    {"repetitions": 1, "steps": 2, "warmup": 1, "link": ("5Gbit",), "model": (SMALL,),
     "spec": ("fp32", "bf16"), "budget": (1.0,)}, measure, tables, line=line, render=render)
