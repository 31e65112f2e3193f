#!/usr/bin/env python3
"""Checks the kernel table of docs/gpu.md against the sources and the kernels that the tests ran.

    check_kernel_table.py ROOT
        fails when the table lacks a __global__ function, or names a function that does not exist.
    check_kernel_table.py ROOT --launched DIR --executable simt_tests [--nm nm]
        fails when simt_tests did not launch a kernel that runs under the shim according to the table, or did
        not launch all instantiations of its template. DIR holds simt_tests' logs (GRADWIRE_TEST_LOG).
"""
import argparse
import dataclasses
import pathlib
import re
import subprocess
import sys

import gate

ROW = re.compile(r"^\|\s*`(\w+)`\s*\|(.*)\|\s*$")
COLUMNS = ["source", "wide accesses", "shim", "compute-sanitizer", "GPU", "of copy, H200", "of copy, H100"]


@dataclasses.dataclass
class Row:
    source: str
    wide: str
    shim: str


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.S)


def cuda_sources(root: pathlib.Path) -> list[pathlib.Path]:
    return sorted(p for top in ("kernels", "runtime") for p in (root / top).rglob("*.cu"))


def kernels_in_sources(root: pathlib.Path) -> dict[str, str]:
    """Returns a dictionary: name of each __global__ function -> name of the function's file."""
    found: dict[str, str] = {}
    for path in [*cuda_sources(root), *sorted((root / "kernels").rglob("*.cuh"))]:
        text = re.sub(r"__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)", " ",
                      without_comments(path.read_text()))
        for match in re.finditer(r"\b__global__\b([^(;{]*)\(", text):
            name = match.group(1).split()[-1]
            if name in found:
                raise SystemExit(f"two kernels are called {name}: in {found[name]} and "
                                 f"{path.relative_to(root)}; names must be unique")
            found[name] = str(path.relative_to(root))
    return found


def kernels_in_table(root: pathlib.Path) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for number, line in enumerate((root / "docs/gpu.md").read_text().splitlines(), 1):
        match = ROW.match(line)
        if not match:
            continue
        cells = [cell.strip() for cell in match.group(2).split("|")]
        if len(cells) != len(COLUMNS):
            raise SystemExit(
                f"docs/gpu.md:{number}: {len(cells) + 1} cells, expected kernel, {', '.join(COLUMNS)}")
        if match.group(1) in rows:
            raise SystemExit(f"docs/gpu.md:{number}: {match.group(1)} is listed twice")
        rows[match.group(1)] = Row(source=cells[0].strip("`"), wide=cells[1], shim=cells[2])
    return rows


def compare(sources: dict[str, str], table: dict[str, Row]) -> list[str]:
    wrong = [f"docs/gpu.md: the table of kernels lacks {name}; add, with its accesses of 16 bytes (ld, st): "
             f"| `{name}` | `{file}` | ld+st | yes | - | - | - | - |" for name, file in sources.items()
             if name not in table]
    for name, row in table.items():
        if name not in sources:
            wrong.append(f"docs/gpu.md lists {name}, but the sources have no such __global__ function")
        elif sources[name] != row.source:
            wrong.append(f"docs/gpu.md: {name} is in {sources[name]}, not in {row.source}")
        if row.shim != "yes" and not row.shim.startswith("no: "):
            wrong.append(
                f"docs/gpu.md: {name}: the shim column says {row.shim!r}; it must be 'yes' or 'no: reason'")
    return wrong


def base_name(symbol: str) -> str:
    """Returns the function's name in a demangled symbol: the first identifier with arguments."""
    match = re.search(r"(\w+)(?:<|\()", symbol.replace("(anonymous namespace)", "{anonymous}"))
    return match.group(1) if match else ""


def instantiations(executable: str, nm: str, names: set[str]) -> dict[int, str]:
    """Returns a dictionary of the compiled instantiations of the kernels: address -> demangled name."""
    listing = subprocess.run([nm, "-C", "--defined-only", executable], capture_output=True, text=True,
                             check=True).stdout
    found = {}
    for line in listing.splitlines():
        address, kind, symbol = line.split(maxsplit=2)
        if kind in "tTwW" and base_name(
                symbol) in names and "[clone" not in symbol and "::{lambda" not in symbol:
            found[int(address, 16)] = symbol
    return found


@dataclasses.dataclass
class Launched:
    threads: int = 0  # most threads in a block
    shared: int = 0   # most dynamic shared memory, in bytes


def read_logs(logs: pathlib.Path) -> dict[int, Launched]:
    """Returns a dictionary: address -> the kernel's largest launch by simt_tests (tests/simt/launch.cpp)."""
    found: dict[int, Launched] = {}
    for log in sorted(logs.iterdir()):
        for line in log.read_text().splitlines():
            address, _, _, threads, shared = line.split("\t")
            one = found.setdefault(int(address, 16), Launched())
            one.threads, one.shared = max(one.threads, int(threads)), max(one.shared, int(shared))
    return found


def launched_by_name(options: argparse.Namespace, names: set[str]) -> dict[str, Launched]:
    """Returns the launches of these kernels by demangled name, from the options of add_launched()."""
    logs = read_logs(options.launched)
    return {name: logs[address] for address, name in
            instantiations(options.executable, options.nm, names).items() if address in logs}


def check_launched(table: dict[str, Row], options: argparse.Namespace) -> list[str]:
    launched = read_logs(options.launched)
    compiled = instantiations(options.executable, options.nm, set(table))
    wrong = []
    for name, row in table.items():
        mine = {address: full for address, full in compiled.items() if base_name(full) == name}
        if row.shim == "yes" and not mine:
            wrong.append(f"docs/gpu.md says {name} runs under the shim, but simt_tests does not contain it")
        for address, full in mine.items():
            if row.shim == "yes" and address not in launched:
                wrong.append(f"docs/gpu.md says {name} runs under the shim, but no test launched {full}")
            if row.shim != "yes" and address in launched:
                wrong.append(f"{name} runs under the shim, but docs/gpu.md says {row.shim!r}")
    return wrong


def add_launched(parser: argparse.ArgumentParser) -> None:
    """Adds the options that name simt_tests and its logs."""
    parser.add_argument("--launched", type=pathlib.Path)
    parser.add_argument("--executable")
    parser.add_argument("--nm", default="nm")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=pathlib.Path)
    add_launched(parser)
    options = parser.parse_args()
    sources, table = kernels_in_sources(options.root), kernels_in_table(options.root)
    if not sources:
        raise SystemExit(f"no kernels below {options.root.resolve()}: wrong folder?")
    wrong = compare(sources, table)
    if options.launched:
        wrong += check_launched(table, options)
    return gate.end(wrong, f"{len(sources)} kernels agree with the table")


if __name__ == "__main__":
    sys.exit(main())
