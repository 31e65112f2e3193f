#!/usr/bin/env python3
"""Tests that scripts/setup.sh lists every used package, and that check_packages.py reports a missing package.

packages_test.py ROOT BUILD
"""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tools/checks"))
import check_packages  # noqa: E402

# Maps one package of each kind of use to the text with which the check reports the package.
PLANTED = {"python3-matplotlib": "the list of scripts/setup.sh demo lacks python3-matplotlib",
           "libgtest-dev": "header /usr/include/gtest/", "libboost-context-dev": "library /usr/lib",
           "iproute2": "command ip", "python3-pip": "module pip"}


def main():
    if not pathlib.Path("/var/lib/dpkg/info").is_dir():
        print("skipped: not a Debian system")
        sys.exit(77)
    reports = check_packages.check(*(pathlib.Path(argument).resolve() for argument in sys.argv[1:3]), PLANTED)
    text, bad = reports[None]
    print(text, end="")
    if bad:
        sys.exit(1)
    for package, named in PLANTED.items():
        text, bad = reports[package]
        if not bad or named not in text:
            sys.exit(f"without {package} in the list, the check should fail and name '{named}':\n{text}")
    print(f"each of {len(PLANTED)} packages taken from the list is noticed")


if __name__ == "__main__":
    main()
