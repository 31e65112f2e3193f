#!/usr/bin/env python3
"""Runs an experiment of this folder: measures, stores the measurements as JSON, and prints tables of them.

    run.py NAME [--json FILE] [OPTION...]   run.py NAME --help describes the experiment and its options
    run.py NAME --show FILE                 prints the tables of a stored result
    run.py NAME --render FILE               writes or draws them for the result's page, for slow_links
                                            and accuracy
    run.py NAME --smoke                     seconds in place of minutes, to test the experiment itself

An experiment with the option --ranks runs in that many processes of this machine. With --rate 1gbit each
process runs on a separate host, and links of this rate connect the hosts (bench/harness/shaped_link.sh; needs
root).

The experiments are the rows of table.py, and this folder's other modules, each with an EXPERIMENT.
"""
import argparse
import importlib
import json
import os
import pathlib
import platform
import signal
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "integrations/python")]
from experiments.table import ROWS  # noqa: E402
from harness import ranks, smoke  # noqa: E402

NAMES = sorted({*ROWS, *(path.stem for path in HERE.glob("*.py"))} - {"run", "table"})


def existing(text):
    if not pathlib.Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text} is not a file; expected a result of an experiment")
    return pathlib.Path(text)


def parse(name, experiment, words):
    """Returns the options of the command line, with the values of SMOKE in a smoke run."""
    parser = argparse.ArgumentParser(prog=f"run.py {name}", description=experiment.about,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, help=f"default: build/{name}.json")
    parser.add_argument("--show", type=existing, metavar="FILE", help="only print a result's tables")
    if experiment.render:
        parser.add_argument("--render", type=existing, metavar="FILE", help="only write a result's page")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to test the experiment")
    defaults = experiment.options
    if "ranks" in defaults:
        defaults = {"rate": "", "deadline_s": 3600, **defaults}
    for option, default in defaults.items():
        flag = "--" + option.replace("_", "-")
        if default is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, tuple):
            parser.add_argument(flag, action="append", type=type(default[0]),
                                help=f"may be repeated; default: {' '.join(map(str, default))}")
        else:
            parser.add_argument(flag, type=type(default), default=default,
                                help=f"default: {default or 'none'}")
    options = parser.parse_args(words)
    for option, default in defaults.items():
        if isinstance(default, tuple) and not getattr(options, option):
            setattr(options, option, default)
    if options.smoke:
        vars(options).update(experiment.smoke)
    options.json = options.json or ROOT / "build" / ("smoke" if options.smoke else "") / f"{name}.json"
    return options


def settings(name, experiment, options, items):
    """Returns the machine, versions and options of a result."""
    versions = {module: getattr(sys.modules.get(module), "__version__", None)
                for module in ("gradwire", "jax", "torch")}
    chosen = {option: getattr(options, option) for option in experiment.options}
    return {"date": time.strftime("%Y-%m-%d", time.gmtime()), "commit": ranks.commit(),
            "command": f"bench/experiments/run.py {' '.join(sys.argv[1:])}", "cpu": ranks.cpu(),
            "cores": os.cpu_count(), "system": platform.platform(), "python": platform.python_version(),
            "load": os.getloadavg()[0], **{module: v for module, v in versions.items() if v},
            **{option: str(v) if isinstance(v, pathlib.Path) else v for option, v in chosen.items()},
            **experiment.settings(options, items)}


def measure(name, experiment, options):
    """Stores each measurement at once, so that a later failure loses nothing. Returns the exit status."""
    resumes = experiment.resumes and options.json.is_file() and not options.smoke
    options.done = json.loads(options.json.read_text())["items"] if resumes else []
    document = {"schema": 1, "settings": {}, "items": list(options.done)}
    first = os.environ.get("RANK", "0") == "0"
    options.json.parent.mkdir(parents=True, exist_ok=True)
    for item in experiment.measure(options):
        if not first:
            continue
        document["items"].append(item)
        document["settings"] = settings(name, experiment, options, document["items"])
        options.json.write_text(json.dumps(document, indent=1) + "\n")
        if experiment.line:
            print(experiment.line(item), flush=True)
    if first:
        print(f"\n{experiment.tables(document)}\n\nWritten: {options.json}", flush=True)
    failed = any("error" in item for item in document["items"])
    return int(failed and (options.smoke or not experiment.errors_are_results))


def main():
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        print(f"{__doc__}\nExperiments: {', '.join(NAMES)}", file=sys.stderr)
        return 0 if sys.argv[1:] in (["-h"], ["--help"]) else 2
    name = sys.argv[1]
    experiment = ROWS.get(name) or importlib.import_module(f"experiments.{name}").EXPERIMENT
    options = parse(name, experiment, sys.argv[2:])
    if options.show:
        print(experiment.tables(json.loads(options.show.read_text())))
        return 0
    if getattr(options, "render", None):
        experiment.render(json.loads(options.render.read_text()), options.render, options)
        return 0
    if options.smoke and "RANK" not in os.environ:
        smoke.need(experiment.modules, experiment.specs)
    if "ranks" in experiment.options and "RANK" not in os.environ:
        return ranks.run([sys.executable, *sys.argv], options.ranks, options.rate, options.deadline_s,
                         experiment.environment)
    return measure(name, experiment, options)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks and namespaces end
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
