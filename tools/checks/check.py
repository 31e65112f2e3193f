#!/usr/bin/env python3
"""Runs the gates of gates.tsv, which take seconds: all gates, or the gates that concern FILEs.

    check.py [FILE...]    also: make check, make check FILE=kernels/wire/qsgd.h

Gates that need a program run it as it was built last, and are left out without it.
"""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def main():
    files = [pathlib.Path(word).resolve() for word in sys.argv[1:]]
    for file in files:
        if not file.is_file() or ROOT not in file.parents:
            sys.exit(f"check: {file}: no such file in {ROOT}; without FILE, all gates run")
    files, failed = [file.relative_to(ROOT).as_posix() for file in files], []
    for row in (ROOT / "tools/checks/gates.tsv").read_text().splitlines():
        if row.startswith("#"):
            continue
        name, command, program, concerns = row.split("\t")
        if files and not any(re.search(concerns, file) for file in files):
            continue
        unbuilt = [word for word in program.split() if not (ROOT / "build/bin" / word).exists()]
        if unbuilt:
            print(f"{name}: not run: {' '.join(unbuilt)} must be built: make build-tests")
            continue
        done = subprocess.run([sys.executable, "-B", *command.split(), *(files if name == "text" else [])],
                              cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        ok = done.returncode in (0, 77)
        failed += [] if ok else [name]
        last = (done.stdout.strip().splitlines() or [""])[-1]
        print(f"{name}: {last}" if ok else f"{name}: FAILED: python3 {command}\n{done.stdout}", flush=True)
    if failed:
        sys.exit(f"check: failed: {' '.join(failed)}")


if __name__ == "__main__":
    main()
