#!/usr/bin/env python3
"""Fails when an include points the wrong way.

Top folders include in one direction: trainer -> collectives -> kernels -> runtime. Their subfolders, and
the folders of bench and the integrations, must not form cycles. `check_layers.py --print` shows their order:
each folder can be read and tested after the folders that it includes. bench's Python counts also; its modules
must not form cycles. Only runtime/device/launch.cuh launches kernels.
"""
import ast
import collections
import pathlib
import re
import sys

import gate

LAYERS = {  # each top folder, and the top folders that its files may include
    "runtime": set(),
    "kernels": {"runtime"},
    "collectives": {"kernels", "runtime"},
    "trainer": {"collectives", "kernels", "runtime"},
    "bench": {"trainer", "collectives", "kernels", "runtime"},
    "integrations": {"collectives", "kernels", "runtime"},
}
# The launcher chooses between nvcc and the CPU shim.
EXCEPTIONS = {("runtime/device/launch.cuh", "tests/simt/simt.h")}
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"')
SUFFIXES = (".h", ".cpp", ".cu", ".cuh", ".c")
LAUNCHER = "runtime/device/launch.cuh"
LAUNCH = re.compile(r"^(?!.*//.*<<<).*<<<|cudaLaunchKernel")


def violations(root: pathlib.Path, names: list[str], graph: dict[str, dict[str, str]]) -> list[str]:
    """Returns the wrong lines. Fills graph[folder][included folder] with the place of an include."""
    found = []
    for name in names:
        path = root / name
        folder, top = name.rpartition("/")[0], name.split("/")[0]
        graph[folder]
        for number, line in enumerate(path.read_text().splitlines(), 1):
            where = f"{name}:{number}"
            if LAUNCH.search(line) and name != LAUNCHER:
                found.append(f"{where}: kernels are launched through {LAUNCHER} only")
            match = INCLUDE.match(line)
            if not match or (name, match.group(1)) in EXCEPTIONS:
                continue
            target = match.group(1)
            if not (root / target).is_file():
                if top != "integrations":  # examples include installed headers
                    found.append(f"{where}: include by full path from the root, not {target!r}")
                continue
            if target.split("/")[0] not in LAYERS[top] | {top}:
                found.append(f"{where}: {top}/ may not include {target!r}")
            if (into := target.rpartition("/")[0]) != folder:
                graph[folder].setdefault(into, f"{where} includes {target}")
    return found


def python_imports(root: pathlib.Path, graph: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Returns the graph of bench's Python modules. Adds the imports between their folders to `graph`."""
    modules: dict[str, dict[str, str]] = collections.defaultdict(dict)
    for path in sorted((root / "bench").rglob("*.py")):
        name = path.relative_to(root).as_posix()
        modules[name]
        for node in ast.walk(ast.parse(path.read_text(), name)):
            imports = isinstance(node, (ast.Import, ast.ImportFrom))
            names = [alias.name for alias in node.names] if imports else []
            if isinstance(node, ast.ImportFrom):  # from plots import style; from plots.style import plt
                names = [node.module, *(f"{node.module}.{name}" for name in names)]
            for imported in names:
                # Python's path has bench/ and the script's folder.
                for at in (root / "bench", path.parent):
                    file = at.joinpath(*imported.split(".")).with_suffix(".py")
                    if file == path or not file.is_file():
                        continue
                    target = file.relative_to(root).as_posix()
                    where = f"{name}:{node.lineno} imports {target}"
                    modules[name].setdefault(target, where)
                    if (folder := name.rpartition("/")[0]) != (into := target.rpartition("/")[0]):
                        graph[folder].setdefault(into, where)
    return modules


def order(graph: dict[str, dict[str, str]]) -> tuple[list[str], list[str]]:
    """Returns folders (or modules), each after its includes, and the cycles that prevent such an order."""
    done: list[str] = []
    cycles, path = [], []

    def visit(folder: str) -> None:
        if folder in done:
            return
        if folder in path:
            ring = path[path.index(folder):] + [folder]
            cycles.append("a cycle: " + "; ".join(graph[a][b] for a, b in zip(ring, ring[1:])))
            return
        path.append(folder)
        for into in sorted(graph[folder]):
            visit(into)
        path.pop()
        done.append(folder)

    for folder in sorted(graph):
        visit(folder)
    return done, cycles


def main() -> int:
    arguments = [a for a in sys.argv[1:] if a != "--print"]
    root = pathlib.Path(arguments[0] if arguments else ".")
    names = [n for n in gate.files(root, 100) if n.split("/")[0] in LAYERS and n.endswith(SUFFIXES)]
    graph: dict[str, dict[str, str]] = collections.defaultdict(dict)
    found = violations(root, names, graph)
    modules = python_imports(root, graph)
    folders, cycles = order(graph)
    cycles += order(modules)[1]
    if "--print" in sys.argv:
        for folder in folders:
            print(f"{folder} -> {', '.join(sorted(graph[folder])) or 'nothing'}")
    return gate.end(found + cycles, f"{len(names)} files in {len(folders)} folders, {len(modules)} Python "
                    "modules: every include points down, no cycles")


if __name__ == "__main__":
    sys.exit(main())
