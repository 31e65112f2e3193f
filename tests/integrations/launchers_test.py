#!/usr/bin/python3
"""Tests ranks started by real launchers: PyTorch's torchrun, and each installed mpirun.

usage: launchers_test.py PATH_OF_GRADWIRE
"""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from launch import torchrun_obstacle

FLAGS = ["--data", "synthetic:128", "--batch-size", "8", "--device", "host", "--width", "16", "--depth", "1",
         "--heads", "2", "--mlp", "32", "--steps", "3", "--compression", "bf16:schedule=ring"]


def losses(log):
    return [(r.get("loss"), r.get("test_loss")) for r in map(json.loads, log.read_text().splitlines())]


def main() -> int:
    gradwire, failed = os.path.abspath(sys.argv[1]), 0
    # Redirects stderr, because Debian 12's torchrun crashes with its default. Does not redirect stdout,
    # because torchrun can split a line while it copies stdout.
    torchrun = [
        "/usr/bin/python3", "-m", "torch.distributed.run", "--no_python", "--nproc_per_node", "2", "-r", "2",
        "-t", "2"]
    obstacle = torchrun_obstacle(torchrun[0])
    if obstacle:
        print(f"torchrun: not tried: {obstacle}")
    launchers = {} if obstacle else {
        "torchrun": [*torchrun, "--master_port", str(20000 + os.getpid() % 10000)],
        "torchrun --standalone": [*torchrun, "--standalone"]}
    for name, words in (("Open MPI", ["mpirun.openmpi", "--allow-run-as-root",
                                      "--oversubscribe"]), ("MPICH", ["mpirun.mpich"])):
        if shutil.which(words[0]):
            launchers[name] = [*words, "-n", "2"]
        else:
            print(f"{name}: not installed, not tried")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # otherwise torchrun prints a warning
    with tempfile.TemporaryDirectory(prefix="gradwire-launchers-") as folder:
        alone, together = pathlib.Path(folder, "threads.jsonl"), pathlib.Path(folder, "processes.jsonl")
        subprocess.run([gradwire, "train", *FLAGS, "--ranks", "2", "--log", alone], check=True,
                       capture_output=True)
        for name, words in launchers.items():
            ended = subprocess.run([*words, gradwire, "train", *FLAGS, "--log",
                                    str(together)], cwd=folder, timeout=120, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
            said = [line for line in ended.stdout.splitlines() if "Launcher: " in line]
            good = (ended.returncode == 0 and len(said) == 1 and name.split()[0] in said[0]
                    and losses(together) == losses(alone))
            print(f"{name}: {said[0] if good else 'FAILED'}")
            if not good:
                print(ended.stdout)
                failed += 1
            together.unlink(missing_ok=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
