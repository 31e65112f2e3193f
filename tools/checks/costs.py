#!/usr/bin/env python3
"""Prints the core-seconds of each test of a build folder, most expensive first.

    costs.py BUILD [-R REGEX] [-E REGEX] [-j N]

Core-seconds are user and system time of all processes of a test. Unlike ctest's times, they hardly depend on
other programs on the machine. GTEST_FILTER has the same effect as for ctest.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import sys


def cost(test: dict, build: pathlib.Path) -> tuple[float, str]:
    properties = {p["name"]: p["value"] for p in test.get("properties", [])}
    environment = dict(os.environ) | dict(entry.split("=", 1) for entry in properties.get("ENVIRONMENT", []))
    process = subprocess.Popen(test["command"], env=environment,
                               cwd=properties.get("WORKING_DIRECTORY", build), stdin=subprocess.DEVNULL,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    failed = f"  (exit status {process.returncode})" if status else ""
    return used.ru_utime + used.ru_stime, test["name"].split("  #")[0] + failed


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("-R", dest="only", default="")
    parser.add_argument("-E", dest="without", default="(?!)")
    parser.add_argument("-j", dest="jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    listed = json.loads(subprocess.check_output(["ctest", "--show-only=json-v1"], cwd=options.build))["tests"]
    tests = [t for t in listed if "command" in t and re.search(options.only, t["name"])
             and not re.search(options.without, t["name"])]
    # Tests that read the files of other tests must run last.
    tests.sort(key=lambda t: any(p["name"] == "FIXTURES_REQUIRED" for p in t.get("properties", [])))
    with concurrent.futures.ThreadPoolExecutor(max_workers=options.jobs) as pool:
        costs = sorted(pool.map(lambda t: cost(t, options.build), tests), reverse=True)
    for seconds, name in costs:
        print(f"{seconds:8.1f}  {name}")
    print(f"{sum(seconds for seconds, _ in costs):8.1f}  all {len(costs)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
