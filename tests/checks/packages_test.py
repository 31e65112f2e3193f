#!/usr/bin/env python3
"""Tests that scripts/setup.sh lists every used package, and that check_packages.py reports a missing package.

packages_test.py ROOT BUILD
"""
import pathlib
import subprocess
import sys

CHECK = pathlib.Path(__file__).parents[2] / "tools/checks/check_packages.py"
# Maps one package of each kind of use to the text with which the check reports the package.
PLANTED = {"python3-matplotlib": "the list of scripts/setup.sh demo lacks python3-matplotlib",
           "libgmock-dev": "header /usr/include/gmock/", "libboost-context-dev": "library /usr/lib",
           "iproute2": "command ip", "python3-pip": "module pip"}


def run(*arguments):
    return subprocess.run([sys.executable, CHECK, *sys.argv[1:3], *arguments], capture_output=True, text=True)


def main():
    result = run()
    print(result.stdout, result.stderr, sep="", end="")
    if result.returncode:
        sys.exit(result.returncode)
    for package, named in PLANTED.items():
        result = run("--without", package)
        if result.returncode != 1 or named not in result.stdout:
            sys.exit(
                f"without {package} in the list, the check should fail and name"
                f" '{named}':\n{result.stdout}{result.stderr}"
            )
    print(f"each of {len(PLANTED)} packages taken from the list is noticed")


if __name__ == "__main__":
    main()
