#!/usr/bin/env python3
"""Makes a measurement small, for the `--smoke` runs that `make test` makes of every script that measures.

    smoke.py COMMAND [ARGUMENT...]   runs COMMAND with tiny sizes, on the host

A smoke run goes through the code of the whole script in seconds. It fails when a flag, op, model, spec or field that the
script names does not exist. Its numbers mean nothing.
"""
import argparse
import importlib.util
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
SKIPPED = 77  # ctest's SKIP_RETURN_CODE
# The values of flags of gradwire-bench and gradwire train.
TINY = {"--min-size": "64K", "--max-size": "64K", "--budget-ms": "0.1", "--steps": "1", "--batch-size": "1",
        "--seconds": "0.01", "--device": "host", "-b": "64K", "-e": "64K", "-n": "1", "-w": "0"}
SIZE_BYTES = 64 << 10  # of a row that was measured with TINY
SMALL_MODEL = "vit_tiny"
# Cold timings write twice as many bytes before each sample.
ENVIRONMENT = {"GRADWIRE_BENCH_FLUSH_BYTES": str(1 << 20)}


def links_are_possible():
    """Whether bench/harness/shaped_link.sh works here: it needs root and network namespaces."""
    link = [ROOT / "bench/harness/shaped_link.sh", "--hosts", "2", "--", "true"]
    return subprocess.run(link, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def check_model(program, model):
    """Exits unless gradwire-bench knows the model."""
    bench = pathlib.Path(program).with_name("gradwire-bench")
    known = subprocess.run([bench, "orthonormalize", "--model", model, "--rank", "1", "--steps", "1", "--device", "host"],
                           stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if known.returncode != 0:
        sys.exit(f"smoke: {known.stderr.strip()}")


def tiny(command):
    """The command with TINY's values for the flags that it has. Checks the name of a model, and takes a small one."""
    words = [str(word) for word in command]
    if pathlib.Path(words[0]).name == "shaped_link.sh" and not links_are_possible():
        print("smoke: no slow links here, so the ranks run without them", flush=True)
        words = words[words.index("--") + 1:]
    for i, word in enumerate(words[:-1]):
        if word == "--model" and words[i + 1] != SMALL_MODEL:
            program = next(w for w in words if pathlib.Path(w).name in ("gradwire", "gradwire-bench"))
            check_model(program, words[i + 1])
            words[i + 1] = SMALL_MODEL
        words[i + 1] = TINY.get(word, words[i + 1])
    return words


class _Smoke(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        vars(namespace).update(self.const, smoke=True)


def add(parser, **small):
    """Adds --smoke to an experiment's parser, which sets the options in `small`."""
    parser.set_defaults(smoke=False)
    parser.add_argument("--smoke", action=_Smoke, nargs=0, const=small,
                        help="seconds in place of minutes, to test this program: " +
                        ", ".join(f"{name}={value}" for name, value in small.items()))


def need(arguments, *modules):
    """Ends a smoke run as skipped where Python lacks one of the modules."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if arguments.smoke and missing:
        print(f"NOT CHECKED: {sys.executable} has no {' and no '.join(missing)}")
        sys.exit(SKIPPED)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: smoke.py COMMAND [ARGUMENT...]")
    small_command = tiny(sys.argv[1:])
    os.execvpe(small_command[0], small_command, {**os.environ, **ENVIRONMENT})
