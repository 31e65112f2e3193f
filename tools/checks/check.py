#!/usr/bin/env python3
"""Runs the gates that take seconds: all gates, or the gates that concern FILEs.

    check.py [FILE...]    also: make check, make check FILE=kernels/wire/qsgd.h

Gates that need a program which `make test` builds run it as it was built last, and are left out without it.
"""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = "build/bin/"
# A gate: its files, its arguments after Python, and the program that it needs.
GATES = {
    "text": (".", ["tools/checks/check_text.py", "."], ""),
    "paths": (".", ["tools/checks/check_paths.py", "."], ""),
    "size": (r"\.(h|cpp|cu|cuh|py|sh|md)$|CMakeLists", ["tools/checks/check_size.py", "."], ""),
    "layers": (r"\.(h|cpp|cu|cuh|py)$", ["tools/checks/check_layers.py", "."], ""),
    "factories": (r"^integrations/python/gradwire/", ["tools/checks/check_factories.py", "."], ""),
    "commands": (r"\.md$|page_commands|^Makefile$", ["tools/checks/check_commands.py", "."], ""),
    "kernel_table": (r"\.cuh?$|^docs/gpu.md$", ["tools/checks/check_kernel_table.py", "."], ""),
    "environment": (r"\.(h|cpp|cu|py|sh)$|^Makefile$|^docs/environment.md$",
                    ["tools/checks/check_environment.py", BIN + "gradwire", "."], BIN + "gradwire"),
    "filters": (r"_test\.cpp$|^(docs|scripts)/|^Makefile$", ["tools/checks/check_filters.py", "build", "."],
                BIN + "simt_tests"),
    "bench.command": (r"^kernels/|^docs/formats.md$|^bench/cases/", [
        "tests/bench_test.py", BIN + "gradwire-bench", ".", "Kernels.test_every_op_has_a_case",
        "Formats.test_the_formats_page_has_the_table_of_formats"], BIN + "gradwire-bench"),
    "oracle_wire": (r"^kernels/wire/|wire_oracle", ["tests/oracles/wire_oracle_test.py", BIN + "wire_oracle"],
                    BIN + "wire_oracle"),
    "cli_train": (r"^trainer/(log|config|cli)/|^docs/formats.md$", [
        "tests/cli/train_test.py", BIN + "gradwire", "Train.test_formats_page_lists_every_field_of_the_log"],
                  BIN + "gradwire")}


def main():
    files = []
    for word in sys.argv[1:]:
        path = (pathlib.Path.cwd() / word).resolve()
        if not path.is_file() or ROOT not in path.parents:
            sys.exit(f"check: {word}: no such file in {ROOT}; without FILE, all gates run")
        files.append(path.relative_to(ROOT).as_posix())
    failed = []
    for name, (concerns, command, program) in GATES.items():
        if files and not any(re.search(concerns, file) for file in files):
            continue
        if program and not (ROOT / program).exists():
            print(f"{name}: not run: {program} is not built: make build-tests")
            continue
        words = [*command, *(files if name == "text" else [])]
        done = subprocess.run([sys.executable, "-B", *words], cwd=ROOT, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True)
        ok = done.returncode in (0, 77)
        failed += [] if ok else [name]
        last = (done.stdout.strip().splitlines() or [""])[-1]
        print(f"{name}: {last if ok else 'FAILED'}" + ("" if ok else f"\n{done.stdout}"), flush=True)
    if failed:
        sys.exit(f"check: failed: {' '.join(failed)}; each alone: ctest --test-dir build -R '^NAME$' -V")


if __name__ == "__main__":
    main()
