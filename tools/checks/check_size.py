#!/usr/bin/env python3
"""Checks the size of the sources, and into how many pieces they are cut, against sizes.tsv.

    check_size.py ROOT [--print]

sizes.tsv has a row for each folder (lines and files) and for each ratio. A value more than 0.5 % above its
limit fails, and so does a value more than 2 % below it, so that what was won is kept. Small changes need no
edit of the table; a release sets it to the values of --print. Functions and types are counted by ctags (their definitions).
"""
import collections
import pathlib
import re
import subprocess
import sys

import gate

TABLE = pathlib.Path(__file__).with_name("sizes.tsv")
CXX = (".h", ".cuh", ".cpp", ".cu")
PRODUCT = ("bench", "collectives", "include", "integrations", "kernels", "runtime", "trainer")
SMALL = 80  # lines: below, a file's includes and namespaces cost more than a reader gains from it
FRAME = re.compile(r"#include|(inline )?namespace\b|\}  // namespace")


def definitions(root: pathlib.Path, files: list[str]) -> collections.Counter:
    """Returns the number of functions, structs, classes, enums and unions that `files` define."""
    listed = subprocess.run(["ctags", "--langmap=C++:+.cu.cuh", "--kinds-C++=fcsgu", "-x", "--sort=no",
                             "--_xformat=%K", "-L", "-"],
                            cwd=root, input="\n".join(files), capture_output=True, text=True, check=True)
    return collections.Counter(listed.stdout.split())


def measure(root: pathlib.Path) -> dict[str, float]:
    """Returns the values of all rows of the table, by name."""
    folders = (*PRODUCT, "scripts", "tests", "tools")
    lines = {f: (root / f).read_text().splitlines() for f in gate.files(root)
             if f.split("/")[0] in folders and f.endswith((*CXX, ".py"))}
    values: dict[str, float] = collections.Counter()
    for file, text in lines.items():
        kind = "C++" if file.endswith(CXX) else "Python"
        folder = file.split("/")[0] if kind == "C++" or file.startswith("tests") else "product"
        values[f"{folder}, {kind}, lines"] += len(text)
        values[f"{folder}, {kind}, files"] += 1
    product = {f: text for f, text in lines.items() if f.endswith(CXX) and f.split("/")[0] in PRODUCT}
    total = sum(map(len, product.values()))
    count = definitions(root, list(product))
    values["functions per 1,000 lines"] = 1000 * count["function"] / total
    values["types per 1,000 lines"] = 1000 * (count.total() - count["function"]) / total
    values["includes and namespaces, % of lines"] = (
        100 * sum(bool(FRAME.match(line)) for text in product.values() for line in text) / total)
    values[f"files below {SMALL} lines"] = sum(len(text) < SMALL for text in product.values())
    return values


def main() -> int:
    root = pathlib.Path(sys.argv[1]).resolve()
    try:
        values = measure(root)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"not checked: needs git, a checkout and universal-ctags ({error})")
        return 77
    table = [f"{name}\t{value:.6g}" if value == int(value) else f"{name}\t{value:.2f}"
             for name, value in sorted(values.items())]
    if "--print" in sys.argv:
        print("\n".join(table))
        return 0
    limits = dict(row.split("\t") for row in TABLE.read_text().splitlines() if not row.startswith("#"))
    wrong = [f"{name}: {'remove' if name in limits else 'add'} the row"
             for name in sorted(limits.keys() ^ values.keys())]
    for name in sorted(limits.keys() & values.keys()):
        value, limit = values[name], float(limits[name])
        if value > limit * 1.005 + 0.005:
            wrong.append(f"{name}: {value:.6g}, limit {limit:.6g}: make the change smaller, for example in a "
                         "file that exists; or lower another folder's limit by as much, raise this one, and "
                         "say in the commit what went")
        elif value < limit * 0.98 - 1:
            wrong.append(f"{name}: {value:.6g}, limit {limit:.6g}: lower the limit to {value:.6g}")
    return gate.end((f"tools/checks/sizes.tsv: {w}" for w in wrong), f"{len(limits)} limits of sizes hold")


if __name__ == "__main__":
    sys.exit(main())
