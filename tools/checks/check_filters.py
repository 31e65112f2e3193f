#!/usr/bin/env python3
"""Fails when a pattern of a GoogleTest filter matches no test.

    check_filters.py PROGRAM FILTER      one filter
    check_filters.py BUILD [ROOT]        the filters of ctest's tests in BUILD, and those in ROOT's scripts,
                                         Makefile, CMake files, tests and pages
    check_filters.py BUILD [ROOT] --cuda     those of the programs that only a build with nvcc has. Without
                                         --cuda all others, so that the result does not depend on nvcc

A filter has several patterns, such as *Gemm*:Blas.*-*Large*. Each must match a test, also the patterns after
the minus. A filter in a text is for the program that the same command names before it, or for all programs.
"""
import fnmatch
import functools
import json
import os
import pathlib
import re
import subprocess
import sys

import gate

FILTER = re.compile(r"""--gtest_filter=(?:"([^"]*)"|'([^']*)'|([^\s"'`;)\]]+))""")
PLACES = ("Makefile", "scripts", "tests", "docs", "README.md")
SUFFIXES = {"", ".sh", ".py", ".md", ".txt", ".cmake"}
# Scripts whose filters have variables of a run. Each script checks its filters in its --smoke run.
BY_SMOKE = {"scripts/gpu_check.sh", "scripts/soak.sh"}
CUDA_PROGRAMS = {"interposer_tests", "standin_interposer_tests", "standin_tests"}


@functools.lru_cache(maxsize=None)
def tests_of(program):
    """Returns the full names of a program's tests."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GTEST_")}
    listed = subprocess.run([program, "--gtest_list_tests"], capture_output=True, text=True, check=True,
                            env=environment).stdout
    names, suite = [], ""
    for line in listed.splitlines():
        name = line.split("  #")[0].rstrip()
        if not name.startswith(" "):
            suite = name
        elif suite:
            names.append(suite + name.strip())
    return names


def unmatched(text, programs):
    """Returns the patterns of a filter that match no test of any of the programs."""
    patterns = [p for half in text.split("-", 1) for p in half.split(":") if p]
    names = [name for program in programs for name in tests_of(program)]
    # GoogleTest supports * and ?, but does not support sets of characters.
    return [p for p in patterns if not fnmatch.filter(names, p.replace("[", "[[]"))]


def filters_of_ctest(build):
    """Returns a dictionary for the tests that ctest would run in this build: filter -> programs."""
    shown = subprocess.run(["ctest", "--show-only=json-v1"], cwd=build, capture_output=True, text=True,
                           check=True).stdout
    found = {}
    for test in json.loads(shown)["tests"]:
        command = test.get("command", [])
        properties = {p["name"]: p["value"] for p in test.get("properties", [])}
        environment = dict(e.split("=", 1) for e in properties.get("ENVIRONMENT", []))
        if not command or not os.access(command[0], os.X_OK):
            continue
        chosen = [w.partition("=")[2] for w in command if w.startswith("--gtest_filter=")]
        # A ctest test of a single case needs no check, because ctest found the case in the program.
        if len(chosen) == 1 and test["name"] == chosen[0]:
            continue
        if not chosen and "GTEST_FILTER" in environment:
            chosen = [environment["GTEST_FILTER"]]
        for text in chosen:
            found.setdefault(text, set()).add(command[0])
    return found


def filters_of_texts(root, build, cuda):
    """Yields (place, filter, programs) of each filter in the tree's texts for programs that only a build with
    nvcc has (cuda), or for other programs."""
    programs = sorted(p for p in (build / "bin").iterdir()
                      if p.name.endswith("_tests") and p.name != "fuzz_tests"
                      and (p.name in CUDA_PROGRAMS) == cuda)
    for name in gate.files(root):
        path = root / name
        if name.split("/")[0] not in PLACES or path.suffix not in SUFFIXES or name.startswith("docs/results"):
            continue
        text = path.read_text().replace("\\\n", " ")
        variables = dict(re.findall(r"^\s*(\w+)=['\"]?([^'\"\s$]*)['\"]?$", text, re.M))
        for line in text.splitlines():
            for match in FILTER.finditer(line):
                chosen = next(group for group in match.groups() if group)
                chosen = re.sub(r"\$\{?(\w+)\}?", lambda m: variables.get(m[1], m[0]), chosen)
                if "$" in chosen and name in BY_SMOKE:
                    continue
                named = re.findall(r"\b(\w+_tests)\b", line[:match.start()])
                if cuda != bool(named and named[-1] in CUDA_PROGRAMS):
                    continue
                own = [p for p in programs if named and p.name == named[-1]]
                yield name, chosen, own or ([] if named else programs)


def main():
    cuda = sys.argv[-1] == "--cuda"
    arguments = sys.argv[1:-1] if cuda else sys.argv[1:]
    if len(arguments) != 2 and not (len(arguments) == 1 and pathlib.Path(arguments[0]).is_dir()):
        sys.exit("usage: check_filters.py PROGRAM FILTER | BUILD [ROOT] [--cuda]")
    first = pathlib.Path(arguments[0]).resolve()
    if first.is_file():
        all_filters = [("the filter", arguments[1], [first])]
    else:
        all_filters = [("ctest", text, sorted(programs))
                       for text, programs in sorted(filters_of_ctest(first).items())
                       if cuda == any(pathlib.Path(p).name in CUDA_PROGRAMS for p in programs)]
        if len(arguments) == 2:
            in_texts = list(filters_of_texts(pathlib.Path(arguments[1]).resolve(), first, cuda))
            if not in_texts:
                sys.exit("check_filters: found no filter in any text: wrong folder?")
            all_filters += in_texts
    wrong = []
    for place, text, programs in all_filters:
        names = ", ".join(pathlib.Path(p).name for p in programs) if len(programs) < 4 else "any program"
        wrong += [f"{place}: {text}: '{p}' matches no test of {names or 'a program that was not built'}"
                  for p in unmatched(text, programs)]
    return gate.end(wrong, f"{len(all_filters)} filters: every pattern matches a test")


if __name__ == "__main__":
    sys.exit(main())
