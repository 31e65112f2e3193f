#!/usr/bin/env python3
"""Tests the interposer between a program and a stand-in for NCCL. The interposer forwards every call unchanged,
and the log lists the calls that the settings would compress. Without a GPU nothing is compressed."""
import os
import subprocess
import sys

program, interposer, folder = sys.argv[1:4]
failures = 0


def run(preload=True, **settings):
    env = {k: v for k, v in os.environ.items() if not k.startswith("GRADWIRE_")}
    env |= settings | {"LD_LIBRARY_PATH": folder, "CUDA_VISIBLE_DEVICES": ""}
    if preload:
        env["LD_PRELOAD"] = interposer
    done = subprocess.run([program], env=env, capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        sys.exit(f"exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout, done.stderr


def expect(condition, what, output=""):
    global failures
    if not condition:
        failures += 1
        print(f"FAILED: {what}\n{output}")


alone, _ = run(preload=False)
expect(alone.count("allreduce") == 9 and alone.count("group") == 4 and "-> 4" in alone, "the program works",
       alone)

through, said = run()
expect(through == alone, "every call reaches NCCL as it was made, and its result the program", through)
expect(said.count("calls are unchanged") == 1,
       "it says once that there is no GPU", said)

through, said = run(GRADWIRE_NCCL_DRY_RUN="1", GRADWIRE_NCCL_SPEC="fp8")
expect(through == alone, "a dry run changes nothing", through)
expect(said.count("would send 4194304 bytes as fp8") == 3, "a dry run says what would be compressed", said)
expect(said.count("inside ncclGroupStart/End stay uncompressed") == 1,
       "groups are left alone, which is said once", said)

_, said = run(GRADWIRE_NCCL_DRY_RUN="1", GRADWIRE_NCCL_MIN_BYTES="4M")
expect(said.count("would send") == 3, "a call of exactly the smallest size is compressed", said)
_, said = run(GRADWIRE_NCCL_DRY_RUN="1", GRADWIRE_NCCL_MIN_BYTES="5M")
expect("would send" not in said, "a smaller one is not", said)

through, said = run(GRADWIRE_NCCL_SPEC="nonsense")
expect(through == alone and "calls are unchanged" in said, "an invalid setting changes no result", said)

names = subprocess.run(["nm", "-D", "--defined-only", interposer], capture_output=True, text=True,
                       check=True).stdout
defined = sorted(line.split()[-1].split("@")[0] for line in names.splitlines() if " T " in line)
expect(defined == ["ncclAllReduce", "ncclCommAbort", "ncclCommDestroy", "ncclGroupEnd", "ncclGroupStart"],
       "nothing else is defined", names)
sys.exit(1 if failures else 0)
