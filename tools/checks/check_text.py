#!/usr/bin/env python3
"""Fails on lines over 110 columns, on unformatted C++ and on phrases of words.txt in comments and pages.

    check_text.py ROOT [FILE...] [--fix]

Checks the format of C++ and CUDA with clang-format 14, because versions differ. Without clang-format, skips
this check with a message. --fix formats the files. Tables and links in pages, URLs, and results in
docs/results/ may exceed 110 columns.
"""
import argparse
import io
import pathlib
import re
import shutil
import subprocess
import sys
import tokenize

import gate

COLUMNS = 110
C_FAMILY = (".h", ".cpp", ".cu", ".cuh", ".c")
TEXT = (*C_FAMILY, ".py", ".sh", ".cmake", ".md", ".in")
CLANG_FORMAT = ("clang-format-14", "clang-format")


def in_long_strings(name: str, text: str) -> set[int]:
    """Returns the numbers of the lines that are part of a string in which a line cannot be broken."""
    if name.endswith(C_FAMILY):
        raw = re.compile(r'R"(\w*)\(.*?\)\1"', re.DOTALL)
        spans = [(text.count("\n", 0, m.start()) + 1, text.count("\n", 0, m.end()) + 1)
                 for m in raw.finditer(text)]
    elif name.endswith(".py"):
        spans, starts = [], []
        for t in tokenize.generate_tokens(io.StringIO(text).readline):
            kind = tokenize.tok_name[t.type]
            if kind in ("STRING", "FSTRING_START"):
                starts.append(t.start)
            if kind in ("STRING", "FSTRING_END"):  # Python 3.12 splits an f-string into several tokens
                row, column = starts.pop()
                if row != t.end[0] or t.end[1] - column > COLUMNS - 20:
                    spans.append((row, t.end[0]))
    else:
        return set()
    return {number for first, last in spans for number in range(first, last + 1)}


def too_long(name: str, text: str) -> list[str]:
    lines = text.splitlines()
    if all(len(line) <= COLUMNS for line in lines):
        return []
    excused = in_long_strings(name, text)
    # Commands of shell and CMake may be longer, but comments may not.
    if not name.endswith((*C_FAMILY, ".py", ".md")):
        excused |= {number for number, line in enumerate(lines, 1) if not line.lstrip().startswith("#")}
    return [f"{name}:{number}: {len(line)} columns; at most {COLUMNS}" for number, line in enumerate(lines, 1)
            if len(line) > COLUMNS and "://" not in line and number not in excused
            and not (name.endswith(".md") and line.startswith(("|", "From nvcc")))]


def prose(name: str, text: str) -> list[tuple[int, str]]:
    """Returns the lines of comments, docstrings or a page, with their numbers."""
    if name.endswith(".md"):
        return list(enumerate(text.splitlines(), 1))
    if name.endswith(".py"):
        found = []
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            doc = token.type == tokenize.STRING and token.string.lstrip("rR").startswith('"""')
            if token.type == tokenize.COMMENT or doc:
                found += list(enumerate(token.string.splitlines(), token.start[0]))
        return found
    mark = "//" if name.endswith(C_FAMILY) else "#"
    block = re.compile(r"^\s*(/\*|\*)") if name.endswith(C_FAMILY) else None
    return [(number, line if block and block.match(line) else line.partition(mark)[2])
            for number, line in enumerate(text.splitlines(), 1)
            if mark in line or (block and block.match(line))]


def read_words(path: pathlib.Path) -> list[tuple[re.Pattern, str, list[str]]]:
    words = []
    for line in path.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        cells = line.split("\t")
        words.append((re.compile(cells[0], re.IGNORECASE), cells[1], "".join(cells[2:]).split()))
    return words


def unformatted(root: pathlib.Path, names: list[str], fix: bool) -> list[str]:
    for program in CLANG_FORMAT:
        version = subprocess.run([program, "--version"], capture_output=True,
                                 text=True).stdout if shutil.which(program) else ""
        if re.search(r"version 14\.", version):
            break
    else:
        print("the format of C++ was not checked: no clang-format 14 (apt install clang-format-14)")
        return []
    sources = [n for n in names if n.endswith(C_FAMILY)]
    if not sources:
        return []
    if fix:
        subprocess.run([program, "-i", *sources], cwd=root, check=True)
        return []
    out = subprocess.run([program, "--dry-run", *sources], cwd=root, capture_output=True, text=True).stderr
    files = sorted({line.split(":")[0] for line in out.splitlines() if "clang-format-violations" in line})
    return [f"{name} is not formatted: make format" for name in files]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=pathlib.Path)
    parser.add_argument("files", nargs="*", help="only these files")
    parser.add_argument("--fix", action="store_true")
    options = parser.parse_args()
    names = [n for n in gate.files(options.root) if not n.startswith("docs/results/")  # which programs write
             and (n.endswith(TEXT) or n.rpartition("/")[2] in ("CMakeLists.txt", "Makefile"))]
    names = [n for n in names if n in options.files or not options.files]
    words = read_words(pathlib.Path(__file__).parent / "words.txt")
    wrong = unformatted(options.root, names, options.fix)
    for name in names:
        text = (options.root / name).read_text()
        wrong += too_long(name, text)
        for number, line in prose(name, text):
            for phrase, instead, allowed in words:
                if (match := phrase.search(line)) and name not in allowed:
                    wrong.append(
                        f'{name}:{number}: "{match.group()}": write "{instead}" (tools/checks/words.txt)')
    return gate.end(wrong, f"{len(names)} files are formatted, within {COLUMNS} columns, and without the "
                    "phrases of words.txt")


if __name__ == "__main__":
    sys.exit(main())
