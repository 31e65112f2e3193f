#!/usr/bin/env python3
"""Tests Gradwire in Lightning, Accelerate and transformers' Trainer: processes on this machine, CPU.

usage: clients_test.py FRAMEWORK WORLD SCENARIO...    functions of clients_ranks.py
"""
from __future__ import annotations

import importlib.util
import pathlib
import sys
import tempfile

import launch

MODULES = {"fsdp2": "accelerate"}


def main() -> int:
    framework, world = sys.argv[1], int(sys.argv[2])
    module = MODULES.get(framework, framework)
    if importlib.util.find_spec(module) is None:
        print(f"SKIPPED: {module} is not installed: scripts/frameworks.sh install")
        return 77
    script = pathlib.Path(__file__).with_name("clients_ranks.py")
    with tempfile.TemporaryDirectory() as folder:
        arguments = [framework, folder, *sys.argv[3:]]
        return launch.report(world, launch.run_ranks(script, world, arguments, 300))


if __name__ == "__main__":
    sys.exit(main())
