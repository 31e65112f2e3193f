#!/usr/bin/env python3
"""Fails when an include points the wrong way: trainer -> collectives -> kernels, and never back.

Also keeps the triple-chevron kernel launch in its one file, kernels/cuda/launch.cuh.
"""
import pathlib
import re
import sys

ALLOWED = {
    "kernels": {"kernels"},
    "collectives": {"collectives", "kernels"},
    "trainer": {"trainer", "collectives", "kernels"},
}
# The launcher is where kernels part between nvcc and the CPU shim.
EXCEPTIONS = {("launch.cuh", "tests/simt/simt.h")}
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"')
SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}


def violations(root: pathlib.Path) -> list[str]:
    found = []
    for layer, allowed in ALLOWED.items():
        for path in sorted((root / layer).rglob("*")):
            if path.suffix not in SUFFIXES:
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                where = f"{path.relative_to(root)}:{number}"
                match = INCLUDE.match(line)
                if match:
                    top = match.group(1).split("/")[0]
                    if "/" not in match.group(1):
                        found.append(f"{where}: include by full path from the root, not {match.group(1)!r}")
                    elif top not in allowed and (path.name, match.group(1)) not in EXCEPTIONS:
                        found.append(f"{where}: {layer}/ may not include {match.group(1)!r}")
                if "<<<" in line and "//" not in line.split("<<<")[0] and path.name != "launch.cuh":
                    found.append(f"{where}: kernels are launched through kernels/cuda/launch.cuh only")
    return found


def main() -> int:
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    files = sum(1 for layer in ALLOWED for p in (root / layer).rglob("*") if p.suffix in SUFFIXES)
    if files < 10:
        print(f"check_layers: only {files} source files below {root.resolve()}: wrong folder?")
        return 1
    found = violations(root)
    print("\n".join(found) or f"{files} files: every include points down")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
