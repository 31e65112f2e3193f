#!/usr/bin/env python3
"""Runs the commands of docs/for-trainers.md for a new environment. Needs a network, and `make wheel`.

    new_environments.py FRAMEWORK...    FRAMEWORK: a row of the page's table of packages

Makes build/new-environments/FRAMEWORK, 5 GB each. ctest does not run it.
"""
from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from typing import Dict, List

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/for-trainers.md").read_text()
FIRST = "python3 -m venv env"


def packages() -> Dict[str, List[str]]:
    """Returns the arguments of pip install for each framework of the page's table."""
    rows = re.findall(r"^\| `(\w+)`.*? \| (`.*`) \|$", PAGE, re.M)
    return {name: re.findall(r"`([^`]+)`", cells) for name, cells in rows}


def commands(framework: str, installed: List[str]) -> List[str]:
    """Returns the page's commands, with another framework in place of lightning."""
    text = PAGE[PAGE.index(f"    {FIRST}\n"):]
    create, install, run = (line.strip() for line in text.splitlines()[:3])
    if framework == "ray":
        run = re.sub(r"torchrun .*(?= integrations)", "python", run)
    first = install.replace(" lightning", f" {installed[0]}")
    more = [f"env/bin/pip install {words}" for words in installed[1:]]
    return [create, first, *more, run.replace(" lightning", f" {framework}")]


def main() -> int:
    table = packages()
    if not sys.argv[1:] or set(sys.argv[1:]) - table.keys():
        print(f"{__doc__}\nFrameworks: {', '.join(table)}", file=sys.stderr)
        return 2
    environment = {name: value for name, value in os.environ.items()
                   if name not in ("GRADWIRE_LIBRARY", "PYTHONPATH", "LD_LIBRARY_PATH")}
    for framework in sys.argv[1:]:
        folder = ROOT / "build/new-environments" / framework
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in ("dist", "integrations"):
            (folder / name).symlink_to(ROOT / name)
        for command in commands(framework, table[framework]):
            start = time.monotonic()
            print(f"$ {command}", flush=True)
            code = subprocess.run(command, shell=True, cwd=folder, env=environment).returncode
            print(f"  {time.monotonic() - start:.0f} s", flush=True)
            if code:
                print(f"{framework}: the command ended with {code}", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
