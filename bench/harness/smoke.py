#!/usr/bin/env python3
"""Shrinks measurements for the `--smoke` runs, with which `make test` tests every script that measures.

    smoke.py COMMAND [ARGUMENT...]   runs COMMAND with tiny sizes, on the host

A smoke run executes the code of the whole script in seconds. It fails when a flag, op, model, spec or
field that the script names does not exist. Its numbers mean nothing.
"""
import importlib
import os
import pathlib
import subprocess
import sys

if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # bench/
from harness import ranks  # noqa: E402
from harness.ranks import ROOT  # noqa: E402

SKIPPED = 77  # ctest's SKIP_RETURN_CODE
# The values of flags of gradwire-bench and gradwire train in a smoke run.
TINY = {"--min-size": "64K", "--max-size": "64K", "--stop": "1", "--steps": "1", "--batch-size": "1",
        "--device": "host", "-b": "64K", "-e": "64K", "-n": "1", "-w": "0"}
SIZE_BYTES = 64 << 10  # size of a row that was measured with TINY
SMALL_MODEL, SMALL_MODEL_OF_RANK_32 = "vit_tiny", "vit_s_16"
# Cold timings write twice as many bytes before each sample. Threads that wait for each other spin.
ENVIRONMENT = {"GRADWIRE_BENCH_FLUSH_BYTES": str(1 << 20), "GRADWIRE_THREADS": "1", "OMP_NUM_THREADS": "1"}


def check_model(program, model):
    """Exits unless gradwire-bench knows the model."""
    bench = pathlib.Path(program).with_name("gradwire-bench")
    known = subprocess.run(
        [bench, "orthonormalize", "--model", model, "--rank", "1", "--stop", "1", "--device", "host"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if known.returncode != 0:
        sys.exit(f"smoke: {known.stderr.strip()}")


def tiny(command, more=()):
    """Returns the command with the values of TINY and `more` for its flags, and with a small model.

    Exits if the command's model does not exist.
    """
    values = {**TINY, **dict(more)}
    words = [str(word) for word in command]
    if pathlib.Path(words[0]).name == "shaped_link.sh" and ranks.no_links():
        print("smoke: no slow links on this machine, so the ranks run without them", flush=True)
        words = words[words.index("--") + 1:]
    if "--min-size" in words and "--max-size" not in words:
        words += ["--max-size", ""]
    for i, word in enumerate(words[:-1]):
        if word == "--model" and words[i + 1] != SMALL_MODEL:
            program = next(w for w in words if pathlib.Path(w).name in ("gradwire", "gradwire-bench"))
            check_model(program, words[i + 1])
            words[i + 1] = SMALL_MODEL if "orthonormalize" not in words else SMALL_MODEL_OF_RANK_32
        words[i + 1] = values.get(word, words[i + 1])
    # Python programs name the host "cpu"; experiments have a flag for a smoke run.
    script = next((i for i, word in enumerate(words) if word.endswith(".py")), len(words))
    if words[script:] and pathlib.Path(words[script]).parent.name == "experiments":
        words.append("--smoke")
    return words[:script] + ["cpu" if word == "cuda" else word for word in words[script:]]


def check_specs(specs):
    """Exits unless the release build knows all specs."""
    words = [word for spec in dict.fromkeys(specs) for word in ("--compression", spec)]
    known = subprocess.run(
        tiny([
            ROOT / "build/bin/gradwire-bench", "collectives", "--transport", "local", "--ranks", "2",
            "--schedule", "ring", "-c", "0", "-b", "", "-e", "", "-n", "", "-w", "", *words
        ]), capture_output=True, text=True)
    if known.returncode != 0:
        sys.exit(f"smoke: {known.stderr.strip() or known.stdout}")


def at_least(version, oldest):
    """Returns whether a version such as "2.6.0+debian" is `oldest` or later."""
    return [int(part) for part in version.split(".")[:2]] >= [int(part) for part in oldest.split(".")]


def need(modules, specs):
    """Checks the specs of a smoke run, then ends it as skipped if Python lacks one of the modules.

    A module may have an oldest version: torch>=2.9.
    """
    if specs:
        check_specs(specs)
    for module in modules:
        name, _, oldest = module.partition(">=")
        try:
            found = importlib.import_module(name)
            if oldest and not at_least(found.__version__, oldest):
                raise ImportError(f"this is {found.__version__}")
        except Exception as error:  # PyTorch 1.13 raises ValueError on Python 3.11
            print(f"NOT CHECKED: {sys.executable} has no {module}: {error}")
            sys.exit(SKIPPED)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: smoke.py COMMAND [ARGUMENT...]")
    small_command = tiny(sys.argv[1:])
    os.execvpe(small_command[0], small_command, {**os.environ, **ENVIRONMENT})
