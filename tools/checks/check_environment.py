#!/usr/bin/env python3
"""Checks docs/environment.md against what the code reads.

    check_environment.py GRADWIRE ROOT

GRADWIRE is the command, whose `doctor --environment` prints the table in the code. Only
runtime/util/environment.cpp may call getenv(), and its table must have every variable that C++ code reads.
The page has separate sections for the variables of Python, shell and the tests; they must be complete and
have no other variables.
"""
import functools
import pathlib
import re
import subprocess
import sys

import gate

PRODUCT = ("runtime", "kernels", "collectives", "trainer", "bench", "integrations")
READER = "runtime/util/environment.cpp"
NAME = r"[A-Z][A-Z0-9_]+"
# The folders and files whose variables each section of the page lists. C++ counts only in tests.
SECTIONS = {"The Python package": ["integrations/python"], "Tests": ["tests", "tools/checks"],
            "Scripts and benchmarks": ["Makefile", "scripts", "bench"]}
READS = {
    ".py": re.compile(rf"""os\.environ(?:\.get\(|\[)\s*["']({NAME})["']|"""
                      rf"""\benv\[["']({NAME})["']\](?!\s*=[^=])"""),
    ".sh": re.compile(rf"\$\{{({NAME}):-"),
    "Makefile": re.compile(rf"^({NAME}) \?=", re.M),
    ".cpp": re.compile(rf"""(?:getenv|from_environment)\(\s*"({NAME})\""""),
}
READS[".h"] = READS[".cpp"]


tree = functools.lru_cache(gate.files)


def files(root, where):
    return [root / name for name in tree(root) if (name + "/").startswith(where + "/")]


def getenv_elsewhere(root):
    for top in PRODUCT:
        for path in files(root, top):
            name = path.relative_to(root).as_posix()
            if path.suffix not in (".h", ".cpp", ".c", ".cu", ".cuh") or name == READER:
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if re.search(r"\bgetenv\b(?!\(\)\.)|\benviron\b", line.split("//")[0]):
                    yield f"{name}:{number}: variables are read by environment() of {READER} only"


def asked_for(root):
    """Yields (variable, place) of each literal name that C++ passes to environment()."""
    for top in PRODUCT:
        for path in files(root, top):
            if path.suffix in (".h", ".cpp"):
                call = rf'\b(?:environment|environment_flag|flag|path_in_environment)\("({NAME})"\)'
                for match in re.finditer(call, path.read_text()):
                    yield match[1], path.relative_to(root).as_posix()


def read_by(root, places):
    """Returns a dictionary: variable -> a file that reads the variable."""
    found = {}
    for place in places:
        for path in files(root, place):
            pattern = READS.get(path.suffix) or READS.get(path.name)
            if pattern is None or (path.suffix in (".cpp", ".h") and place != "tests"):
                continue
            for match in pattern.finditer(path.read_text()):
                found.setdefault(next(g for g in match.groups() if g), path.relative_to(root).as_posix())
    return found


def sections(page):
    """Returns a dictionary: title -> text. The text before the first title has the key ""."""
    parts = re.split(r"^## (.+)\n", page, flags=re.M)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2]))}


def listed(text):
    return {name for row in re.findall(r"^\| (`.*?) \|", text, re.M)
            for name in re.findall(rf"`({NAME})`", row)}


def problems(root, printed):
    yield from getenv_elsewhere(root)
    page, printed = sections((root / "docs/environment.md").read_text()), sections(printed)
    table = set()
    for title, text in printed.items():
        table |= listed(text)
        if page.get(title, "").strip() != text.strip() and title:
            yield (f"docs/environment.md: section '{title}' is not what `gradwire doctor --environment` "
                   "prints; paste that")
    for name, place in asked_for(root):
        if name not in table:
            yield f"{place}: {name} is not in the table of {READER}"
    for title, places in SECTIONS.items():
        on_page, read = listed(page.get(title, "")), read_by(root, places)
        for name in sorted(set(read) - on_page):
            yield (f"docs/environment.md: section '{title}' lacks {name}, which {read[name]} reads: "
                   f"add | `{name}` | its default | what it sets |")
        for name in sorted(on_page - set(read)):
            yield (f"docs/environment.md: section '{title}' has {name}, which none of {', '.join(places)} "
                   "reads: remove it")
    for title in set(page) - set(printed) - set(SECTIONS):
        yield f"docs/environment.md: unknown section '{title}'; known: {', '.join([*printed, *SECTIONS])}"


def main():
    if len(sys.argv) != 3:
        sys.exit("usage: check_environment.py PATH_OF_GRADWIRE ROOT_OF_THE_SOURCES")
    printed = subprocess.run([sys.argv[1], "doctor", "--environment"], capture_output=True, text=True,
                             check=True).stdout
    if printed.count("\n| `") < 20:
        sys.exit(f"check_environment: the command printed no table:\n{printed}")
    return gate.end(problems(pathlib.Path(sys.argv[2]), printed), f"{len(listed(printed))} variables in the "
                    "code's table, all on the page; no getenv() elsewhere")


if __name__ == "__main__":
    sys.exit(main())
